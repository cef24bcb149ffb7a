"""The drafters of the kinds of heads, from a head that was loaded."""

from __future__ import annotations

from typing import Any

from wager.draft.base import Drafter
from wager.draft.heads.autoregressive import HeadDrafter
from wager.draft.heads.block import BlockDrafter
from wager.draft.heads.parallel import ParallelDrafter
from wager.draft.registry import DrafterParts, DrafterSpec
from wager.errors import UsageError


def head_drafter(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    """UsageError if no head was loaded."""
    if parts.head is None:
        raise UsageError(f"Drafter {str(spec)!r} was given no loaded head.", "Load the head and pass it as a part.")
    head: Any = parts.head
    if spec.name == "medusa":
        return ParallelDrafter(head, kernels=parts.kernels)
    if spec.name == "dflash":
        return BlockDrafter(head, kernels=parts.kernels)
    return HeadDrafter(head, kernels=parts.kernels, prefix_cache=parts.prefix_cache, depth=parts.depth)
