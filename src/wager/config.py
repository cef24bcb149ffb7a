"""What an engine is built from: frozen, validated, unknown keys refused by name.

Knows no tensors and opens no files; `engine.build` turns it into an engine.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

from wager.errors import UsageError
from wager.types import VerifyRule

DEFAULT_MODEL = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that decides what an engine is.

    model: directory, GGUF file or name. drafter: `none`, `auto` or NAME[:ARG],... (ngram, model:PATH).
    policy: `adaptive`, `threshold[:P]` or `fixed`, who decides how far to guess (None: adaptive, or fixed if a depth is
    given). depth: guesses per step and sequence, of the adaptive policy the most (None: the drafter's own).
    objective: what the adaptive policy maximises: `throughput`, `latency`, or `slo:TIME` per token, such as slo:20ms.
    verify: the acceptance rule.
    kernels: auto, native or reference. dtype: bfloat16, or float32 (reference kernels only).
    max_rows: rows in one pass. max_sequences: sequences that run together. max_context: positions per sequence (None:
    the model's own). memory: bytes that weights, cache, workspace and drafter may take (None: most of what is free).
    cache_tokens: tokens the cache holds (None: planned from memory). threads: None for one per physical core.
    """

    model: str = DEFAULT_MODEL
    drafter: str = "auto"
    policy: str | None = None
    depth: int | None = None
    objective: str = "throughput"
    verify: VerifyRule = "match"
    kernels: str = "auto"
    dtype: str = "bfloat16"
    max_rows: int = 512
    max_sequences: int = 64
    max_context: int | None = None
    memory: int | None = None
    cache_tokens: int | None = None
    prefix_cache: bool = True
    threads: int | None = None

    def __post_init__(self) -> None:
        _one_of("verify", self.verify, get_args(VerifyRule))
        _one_of("kernels", self.kernels, ("auto", "native", "reference"))
        _one_of("dtype", self.dtype, ("bfloat16", "float32"))
        for name, low in (("max_rows", 1), ("max_sequences", 1), ("depth", 0), ("max_context", 2), ("threads", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise UsageError(f"{name} = {value} is out of range.", f"{name} must be at least {low}.")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Build from a mapping; an unknown key is an error that names it and the nearest known one."""
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"Did you mean {near[0]!r}?" if near else f"Known options: {', '.join(known)}."
                raise UsageError(f"Unknown option {key!r}.", hint)
        return cls(**values)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Choose one of: {', '.join(allowed)}."
        raise UsageError(f"{name} = {value!r} is not known.", hint)
