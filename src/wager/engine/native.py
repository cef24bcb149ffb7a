"""The parts of a step that are C++ where the native kernels are there; each stands for Python of the same result."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from wager.engine.sequence import Sequence
from wager.kv.blocks import BlockLists
from wager.types import DraftRequest, OutputDelta, Span, StepRecord


def plain_steps(sequences: dict[str, Sequence], lists: BlockLists, max_context: int) -> tuple[Any, Any]:
    """What schedules, and what commits, sequences that simply go on, as Scheduler does; csrc/schedule_bindings.cpp and
    csrc/commit_bindings.cpp."""
    native = _native()
    if native is None:
        return None, None
    committer = native.PlainCommitter(OutputDelta, sequences, lists, max_context)
    return native.PlainScheduler(Span, lists, max_context), committer


def draft_calls() -> Any:
    """What makes draft requests and checks drafts that are chains, as Proposer does; csrc/draft_bindings.cpp."""
    native = _native()
    return native and native.DraftCalls(DraftRequest)


def step_counter() -> Any:
    """What counts a step, as StepCounter does; csrc/record_bindings.cpp."""
    native = _native()
    return native and native.StepCounter(StepRecord)


def _native() -> Any:
    try:
        return import_module("wager.kernels._native")
    except ImportError:
        return None
