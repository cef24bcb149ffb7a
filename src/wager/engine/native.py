"""The parts of a step that are C++; each stands for Python of the same result."""

from __future__ import annotations

from typing import Any

from wager.engine.sequence import Sequence
from wager.kernels import _native
from wager.kv.blocks import BlockLists
from wager.types import OutputDelta, Span


def plain_steps(sequences: dict[str, Sequence], lists: BlockLists, max_context: int) -> tuple[Any, Any]:
    """What schedules, and what commits, sequences that simply go on, as Scheduler does; csrc/schedule_bindings.cpp and
    csrc/commit_bindings.cpp."""
    committer = _native.PlainCommitter(OutputDelta, sequences, lists, max_context)
    return _native.PlainScheduler(Span, lists, max_context), committer
