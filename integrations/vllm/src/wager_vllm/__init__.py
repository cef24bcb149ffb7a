"""wager's drafters and its policy inside vLLM (docs/vllm.md).

    vllm serve MODEL --speculative-config \\
        '{"method":"custom_class","model":"wager_vllm.Proposer","num_speculative_tokens":8}'

vLLM takes what it is told to use by name from here; each is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_WHERE = {"Proposer": "proposer", "Scheduler": "scheduler"}
"""The module of each name."""

__all__ = ["Proposer", "Scheduler"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(f"wager_vllm.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
