"""wager: speculative decoding that gives the same bytes in fewer slow steps.

    import wager
    with wager.LLM(drafter="ngram") as llm:
        print(llm.generate("Once upon a time", wager.SamplingParams(max_tokens=64)).text)

Every name is imported when it is first used, so that `import wager` and `wager --help` are quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wager.async_llm import AsyncLLM, AsyncOutputStream
    from wager.config import CapacityConfig, EngineConfig, LearningConfig, ModelConfig, SpeculationConfig
    from wager.engine.core import Engine
    from wager.errors import (
        CacheIntegrityError,
        ClosedError,
        DownloadError,
        GrammarError,
        MemoryPlanError,
        ModelError,
        NumericsError,
        RequestError,
        TokenizerError,
        UsageError,
        WagerError,
    )
    from wager.llm import LLM, OutputStream
    from wager.receipts import Receipt, Verification
    from wager.types import (
        Completion,
        Grammar,
        OutputDelta,
        Request,
        RequestSpeculation,
        SamplingParams,
        Stats,
        TokenLogprob,
    )

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncOutputStream",
    "CacheIntegrityError",
    "CapacityConfig",
    "ClosedError",
    "Completion",
    "DownloadError",
    "Engine",
    "EngineConfig",
    "Grammar",
    "GrammarError",
    "LearningConfig",
    "MemoryPlanError",
    "ModelConfig",
    "ModelError",
    "NumericsError",
    "OutputDelta",
    "OutputStream",
    "Receipt",
    "Request",
    "RequestError",
    "RequestSpeculation",
    "SamplingParams",
    "SpeculationConfig",
    "Stats",
    "TokenLogprob",
    "TokenizerError",
    "UsageError",
    "Verification",
    "WagerError",
]

_MODULES = {
    "async_llm": ("AsyncLLM", "AsyncOutputStream"),
    "config": ("CapacityConfig", "EngineConfig", "LearningConfig", "ModelConfig", "SpeculationConfig"),
    "engine.core": ("Engine",),
    "llm": ("LLM", "OutputStream"),
    "receipts": ("Receipt", "Verification"),
    "types": (
        "Completion",
        "Grammar",
        "OutputDelta",
        "Request",
        "SamplingParams",
        "RequestSpeculation",
        "Stats",
        "TokenLogprob",
    ),
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}
"""Names -> the module that has them; all others are errors."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'wager' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"wager.{_WHERE.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
