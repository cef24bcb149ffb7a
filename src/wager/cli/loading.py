"""From a configuration to a loaded model, with progress on stderr."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from wager.config import EngineConfig
from wager.inputs import expand_path
from wager.terminal import console, flags

if TYPE_CHECKING:
    from wager.async_llm import AsyncLLM
    from wager.draft.base import Drafter
    from wager.llm import LLM
    from wager.loading.load import LoadedEngine
    from wager.models.tokenizer import Tokenizer
    from wager.types import Request


@contextmanager
def _loading(config: EngineConfig, *, models: Iterable[str]) -> Iterator[Callable[[str], None]]:
    """Fetch the models that are not stored, and load within the block with the collector paused: what loading makes
    stays, and looking through it again and again would take a twentieth of a start."""
    from wager.models import hub

    models = dict.fromkeys(model for model in models if not hub.is_random(model))
    for model in models:
        hub.find(model)  # whether all of them exist, before one is fetched
    if config.speculation.drafter == "auto":
        models |= dict.fromkeys(_offered(config.model.model))
    running = gc.isenabled()
    gc.disable()
    try:
        with console.meter("bytes") as update:
            for model in models:
                hub.resolve(model, update)
        with console.working(f"Loading {config.model.model}") as report:
            yield report
    finally:
        if running:
            gc.enable()


def _offered(model: str) -> list[str]:
    """What `auto` needs to have fetched: the drafter that is known to fit the model best, if none is here and the user
    agrees. Asked is who wrote --drafter auto; others are told."""
    from wager.loading.drafters import is_here, known_drafters

    specs = known_drafters(model)
    if not specs or any(is_here(spec) for spec in specs):
        return []
    best, yes = specs[0].argument or "", flags.says_yes()
    if (yes or flags.wrote("drafter")) and console.confirmed(f"Fetch {offer(best)} to draft for {model}?", yes=yes):
        return [best]
    console.say(f"note: {offer(best)} would draft for {model}: --drafter auto --yes fetches it.")
    return []


def offer(model: str) -> str:
    """A model by its name and what fetching it takes."""
    from wager.models.names import named_model

    row = named_model(model)
    return f"{model} ({row.gb:g} GB)" if row else model


def open_llm(config: EngineConfig, *, expected: Callable[[Tokenizer], Sequence[Request]] | None = None) -> LLM:
    """Load a model, and fetch it first if it is not stored. `expected` is LLM's."""
    with _loading(config, models=[config.model.model, *_draft_models(config)]) as report:
        from wager.llm import LLM

        llm = LLM(config=config, report=report, expected=expected)
    _detail(llm.engine)
    return llm


def open_async_llm(config: EngineConfig) -> AsyncLLM:
    """As `open_llm`, for an event loop."""
    with _loading(config, models=[config.model.model, *_draft_models(config)]) as report:
        from wager.async_llm import AsyncLLM

        return AsyncLLM(config=config, report=report)


def open_engine(
    config: EngineConfig,
    *,
    like: LoadedEngine | None = None,
    drafter: Drafter | None = None,
    shared_by: Sequence[EngineConfig] = (),
) -> LoadedEngine:
    """Load an engine, and fetch its models first if they are not stored; for commands that compare engines.

    `like` shares its target, so that weights load once; `drafter` and `shared_by` are those of `load`.
    """
    drafts = [model for each in (config, *shared_by) for model in _draft_models(each)]
    with _loading(config, models=drafts if like else [config.model.model, *drafts]) as report:
        from wager.loading.load import load

        engine = load(
            config,
            report=report,
            target=like.target if like else None,
            drafter=drafter,
            shared_by=shared_by,
        )
    _detail(engine)
    return engine


def _detail(engine: LoadedEngine) -> None:
    for line in loaded_lines(engine):
        console.detail(line)


def loaded_lines(engine: LoadedEngine) -> list[str]:
    """What a user should know of an engine that was loaded: its memory, and notes of its drafters."""
    return [f"memory: {engine.memory_plan.describe()}", *(f"note: {note}" for note in engine.notes)]


def _draft_models(config: EngineConfig) -> list[str]:
    """The models that drafters run, and the heads that are named as on the hub."""
    from wager.models.names import hub_source

    drafters = config.speculation.drafters
    heads = [
        spec.argument or "" for each in drafters for spec in each.all if not spec.parts and spec.option.runs_a_head
    ]
    fetched = [head for head in heads if hub_source(head) and not expand_path(head).exists()]
    return [model for spec in drafters for model in spec.models] + fetched
