"""From a configuration to a loaded model, with progress on stderr."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
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
def _collector_paused() -> Iterator[None]:
    """What loading makes stays: looking through it again and again would take a twentieth of a start."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def open_llm(config: EngineConfig, *, expected: Callable[[Tokenizer], Sequence[Request]] | None = None) -> LLM:
    """Load a model, and fetch it first if it is not stored. `expected` is LLM's."""
    with _collector_paused():
        from wager.llm import LLM

        _fetch([config.model.model, *_draft_models(config)])
        with console.working(f"Loading {config.model.model}") as report:
            return LLM(config=config, report=report, expected=expected)


def open_async_llm(config: EngineConfig) -> AsyncLLM:
    """As `open_llm`, for an event loop."""
    with _collector_paused():
        from wager.async_llm import AsyncLLM

        _fetch([config.model.model, *_draft_models(config)])
        with console.working(f"Loading {config.model.model}") as report:
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
    from wager.loading.load import load

    models = [model for each in (config, *shared_by) for model in _draft_models(each)]
    _fetch([*([config.model.model] if like is None else []), *dict.fromkeys(models)])
    with console.working(f"Loading {config.model.model}") as report:
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


def _fetch(models: list[str]) -> None:
    from wager.models import hub

    with console.meter("bytes") as update:
        for model in models:
            if not hub.is_random(model):
                hub.resolve(model, update)
