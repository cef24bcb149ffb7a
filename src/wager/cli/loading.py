"""From a configuration to a loaded model, with progress on stderr."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from wager.config import EngineConfig
from wager.terminal import console

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

    running = gc.isenabled()
    gc.disable()
    try:
        with console.meter("bytes") as update:
            for model in dict.fromkeys(models):
                if not hub.is_random(model):
                    hub.resolve(model, update)
        with console.working(f"Loading {config.model.model}") as report:
            yield report
    finally:
        if running:
            gc.enable()


def open_llm(config: EngineConfig, *, expected: Callable[[Tokenizer], Sequence[Request]] | None = None) -> LLM:
    """Load a model, and fetch it first if it is not stored. `expected` is LLM's."""
    with _loading(config, models=[config.model.model, *_draft_models(config)]) as report:
        from wager.llm import LLM

        return LLM(config=config, report=report, expected=expected)


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
    keep_expert_choices: bool = False,
) -> LoadedEngine:
    """Load an engine, and fetch its models first if they are not stored; for commands that compare engines.

    `like` shares its target, so that weights load once; `drafter` and `shared_by` are those of `load`;
    `keep_expert_choices` is Decoder's.
    """
    drafts = [model for each in (config, *shared_by) for model in _draft_models(each)]
    with _loading(config, models=drafts if like else [config.model.model, *drafts]) as report:
        from wager.loading.load import load

        return load(
            config,
            report=report,
            target=like.target if like else None,
            drafter=drafter,
            shared_by=shared_by,
            keep_expert_choices=keep_expert_choices,
        )


def loaded_lines(engine: LoadedEngine) -> list[str]:
    """What a user should know of an engine that was loaded: its memory, and notes of its drafters."""
    return [f"memory: {engine.memory_plan.describe()}", *(f"note: {note}" for note in engine.notes)]


def _draft_models(config: EngineConfig) -> list[str]:
    return [model for spec in config.speculation.drafters for model in spec.models]
