"""wager: speculative decoding that gives the same bytes in fewer slow steps.

    import wager
    engine = wager.load(wager.EngineConfig(drafter="ngram"))
    prompt = engine.tokenizer.encode("Once upon a time")
    (answer,) = engine.generate([wager.Request("1", tuple(prompt), wager.SamplingParams(max_tokens=64))])

What needs torch is imported when it is first used, so that `import wager` is quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wager.config import EngineConfig
from wager.errors import WagerError
from wager.types import Completion, OutputDelta, Request, SamplingParams, Stats

if TYPE_CHECKING:
    from wager.build.load import LoadedEngine, load
    from wager.engine.core import Engine

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "LoadedEngine",
    "OutputDelta",
    "Request",
    "SamplingParams",
    "Stats",
    "WagerError",
    "load",
]

_LATER = {"Engine": "wager.engine.core", "LoadedEngine": "wager.build.load", "load": "wager.build.load"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'wager' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LATER[name]), name)
