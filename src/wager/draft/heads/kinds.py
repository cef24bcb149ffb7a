"""The drafters of the kinds of heads, from a head that was loaded."""

from __future__ import annotations

from typing import Any

from wager.draft.base import Drafter
from wager.draft.heads.autoregressive import HeadDrafter
from wager.draft.heads.block import BlockDrafter
from wager.draft.heads.block_trees import BlockTreeDrafter, ParallelTreeDrafter
from wager.draft.heads.head_trees import HeadTreeDrafter
from wager.draft.heads.modules import ModulesDrafter
from wager.draft.heads.parallel import ParallelDrafter
from wager.kernels.base import Kernels

_TREE = "-tree"


def head_kind(drafter: str) -> str:
    """The kind of head that a drafter runs: the same one for chains and for trees."""
    return drafter.removesuffix(_TREE)


def head_drafter(
    name: str, head: Any, *, kernels: Kernels | None, prefix_cache: bool = True, depth: int | None = None
) -> Drafter:
    """The drafter `name` of that head: `eagle3`, `mtp`, `medusa` or `dflash`, with `-tree` behind it for trees.
    `depth`: guesses of a round that the head was made for."""
    kind, trees = head_kind(name), name.endswith(_TREE)
    if kind == "medusa":
        return (ParallelTreeDrafter if trees else ParallelDrafter)(head, kernels=kernels)
    if kind == "dflash":
        return (BlockTreeDrafter if trees else BlockDrafter)(head, kernels=kernels)
    if kind == "mtp" and head.modules > 1:
        return ModulesDrafter(head, kernels=kernels, prefix_cache=prefix_cache, depth=depth)
    return (HeadTreeDrafter if trees else HeadDrafter)(head, kernels=kernels, prefix_cache=prefix_cache, depth=depth)
