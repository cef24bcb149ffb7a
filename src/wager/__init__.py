"""wager: speculative decoding that gives the same bytes in fewer slow steps.

    import wager
    with wager.LLM(drafter="ngram") as llm:
        print(llm.generate("Once upon a time", wager.SamplingParams(max_tokens=64)).text)

The engine is imported when it is first used, so that `import wager` is quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wager.config import CapacityConfig, EngineConfig, ModelConfig, SpeculationConfig
from wager.errors import (
    CacheIntegrityError,
    ClosedError,
    DownloadError,
    MemoryPlanError,
    ModelError,
    NumericsError,
    RequestError,
    TokenizerError,
    UsageError,
    WagerError,
)
from wager.types import Completion, OutputDelta, Request, SamplingParams, Stats, TokenLogprob

if TYPE_CHECKING:
    from wager.engine.core import Engine
    from wager.llm import LLM, OutputStream

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CacheIntegrityError",
    "CapacityConfig",
    "ClosedError",
    "Completion",
    "DownloadError",
    "Engine",
    "EngineConfig",
    "MemoryPlanError",
    "ModelConfig",
    "ModelError",
    "NumericsError",
    "OutputDelta",
    "OutputStream",
    "Request",
    "RequestError",
    "SamplingParams",
    "SpeculationConfig",
    "Stats",
    "TokenLogprob",
    "TokenizerError",
    "UsageError",
    "WagerError",
]

_LATER = {"Engine": "wager.engine.core", "LLM": "wager.llm", "OutputStream": "wager.llm"}
"""Names of the engine -> the module that has them."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'wager' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LATER[name]), name)
