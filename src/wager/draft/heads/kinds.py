"""The drafters of the kinds of heads, from a head that was loaded."""

from __future__ import annotations

from typing import Any

from wager.draft.base import Drafter
from wager.draft.heads.autoregressive import HeadDrafter
from wager.draft.heads.block import BlockDrafter
from wager.draft.heads.modules import ModulesDrafter
from wager.draft.heads.parallel import ParallelDrafter
from wager.kernels.base import Kernels


def head_drafter(
    kind: str, head: Any, *, kernels: Kernels | None, prefix_cache: bool = True, depth: int | None = None
) -> Drafter:
    """The drafter that runs a head of that kind, `eagle3`, `mtp`, `medusa` or `dflash`. `depth`: guesses of a round
    that the head was made for."""
    if kind == "medusa":
        return ParallelDrafter(head, kernels=kernels)
    if kind == "dflash":
        return BlockDrafter(head, kernels=kernels)
    if kind == "mtp" and head.modules > 1:
        return ModulesDrafter(head, kernels=kernels, prefix_cache=prefix_cache, depth=depth)
    return HeadDrafter(head, kernels=kernels, prefix_cache=prefix_cache, depth=depth)
