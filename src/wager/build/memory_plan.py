"""The memory plan: bytes of weights, workspace, drafters and cache, computed before anything is allocated.

A model that does not fit is refused with the figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wager.errors import MemoryPlanError
from wager.kernels.base import BLOCK_SIZE

SHARE = 0.8
"""Share of the free memory that a plan may use if no limit was given."""

FULL_CONTEXTS = 4
"""Sequences of full length that fit in the cache by default; with a memory limit it takes all the remaining bytes."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by use. `cache_tokens` are the positions the cache holds, a multiple of BLOCK_SIZE."""

    budget: int
    weights: int
    workspace: int
    drafter: int
    cache: int
    cache_tokens: int

    @property
    def total(self) -> int:
        return self.weights + self.workspace + self.drafter + self.cache

    @property
    def num_blocks(self) -> int:
        return self.cache_tokens // BLOCK_SIZE


def plan(
    *,
    budget: int,
    weights: int,
    workspace: int,
    drafter: int,
    token_bytes: int,
    max_context: int,
    cache_tokens: int | None = None,
    use_all: bool = False,
) -> MemoryPlan:
    """Divide `budget` bytes. `token_bytes` are the cache's bytes per position (target and drafters together).

    The cache has `cache_tokens` positions, or else what remains, up to FULL_CONTEXTS contexts unless `use_all` and at
    least one context of full length; in whole blocks. Raises MemoryPlanError with the figures.
    """
    fixed = weights + workspace + drafter
    if cache_tokens is None:
        free = max(0, budget - fixed) // token_bytes // BLOCK_SIZE * BLOCK_SIZE
        most = free if use_all else min(free, _whole_blocks(max_context * FULL_CONTEXTS))
        tokens = max(most, _whole_blocks(max_context))
    else:
        tokens = _whole_blocks(cache_tokens)
    total = fixed + tokens * token_bytes
    if total > budget:
        raise MemoryPlanError(
            f"The model does not fit: weights {gib(weights)} + workspace {gib(workspace)} + drafter {gib(drafter)} + "
            f"cache of {tokens} tokens {gib(tokens * token_bytes)} = "
            f"{gib(total)}, of {gib(budget)} that may be used.",
            "Lower --max-context, use a smaller model, or raise --memory."
            if cache_tokens is None
            else "Lower cache_tokens, use a smaller model, or raise --memory.",
        )
    return MemoryPlan(budget, weights, workspace, drafter, tokens * token_bytes, tokens)


def _whole_blocks(tokens: int) -> int:
    """Rounded up to whole blocks."""
    return -(-tokens // BLOCK_SIZE) * BLOCK_SIZE


def available() -> int:
    """Bytes free for new allocations: the smaller of the system's and the control group's."""
    return min(_meminfo("MemAvailable"), *_cgroup())


def check_limit(limit: int) -> None:
    """MemoryPlanError if `limit` is more than the machine has."""
    installed = _meminfo("MemTotal")
    if limit > installed:
        raise MemoryPlanError(
            f"memory = {gib(limit)} is more than the {gib(installed)} of this machine.", "Give less, or leave it out."
        )


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise MemoryPlanError("This system does not report how much memory is free.", "Give --memory, for example 4GiB.")


def _cgroup() -> list[int]:
    """Bytes free within the control group's limit (a container's), in a list that is empty without a limit."""
    root = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit_text, usage = (root / limit).read_text().strip(), int((root / used).read_text())
        except (OSError, ValueError):
            continue
        if limit_text.isdigit():
            return [max(0, int(limit_text) - usage)]
    return []


def gib(size: int) -> str:
    """Bytes as text, in GiB or MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"
