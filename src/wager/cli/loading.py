"""From a configuration to a loaded model, with progress on stderr."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from wager.cli import console
from wager.config import EngineConfig

if TYPE_CHECKING:
    from wager.async_llm import AsyncLLM
    from wager.build.load import LoadedEngine
    from wager.draft.history import TargetOracle
    from wager.llm import LLM
    from wager.models.tokenizer import Tokenizer
    from wager.types import Request


def open_llm(config: EngineConfig, *, expected: Callable[[Tokenizer], Sequence[Request]] | None = None) -> LLM:
    """Load a model, and fetch it first if it is not stored. `expected` is LLM's."""
    from wager.llm import LLM

    _fetch([config.model.model, *_draft_models(config)])
    with console.working(f"Loading {config.model.model}") as report:
        return LLM(config=config, report=report, expected=expected)


def open_async_llm(config: EngineConfig) -> AsyncLLM:
    """As `open_llm`, for an event loop."""
    from wager.async_llm import AsyncLLM

    _fetch([config.model.model, *_draft_models(config)])
    with console.working(f"Loading {config.model.model}") as report:
        return AsyncLLM(config=config, report=report)


def open_engine(
    config: EngineConfig,
    *,
    like: LoadedEngine | None = None,
    oracle: TargetOracle | None = None,
    besides: Sequence[EngineConfig] = (),
    keep_expert_choices: bool = False,
) -> LoadedEngine:
    """Load an engine, and fetch its models first if they are not stored; for commands that compare engines.

    `like` shares its target, so that weights load once; `oracle` and `besides` are those of `load`;
    `keep_expert_choices` is Decoder's.
    """
    from wager.build.load import load

    models = [model for each in (config, *besides) for model in _draft_models(each)]
    _fetch([*([config.model.model] if like is None else []), *dict.fromkeys(models)])
    with console.working(f"Loading {config.model.model}") as report:
        return load(
            config,
            report=report,
            target=like.target if like else None,
            oracle=oracle,
            besides=besides,
            keep_expert_choices=keep_expert_choices,
        )


def _draft_models(config: EngineConfig) -> list[str]:
    return [model for spec in config.speculation.drafters for model in spec.models]


def _fetch(models: list[str]) -> None:
    from wager.models import hub

    with console.meter("bytes") as update:
        for model in models:
            if not hub.is_random(model):
                hub.resolve(model, update)
