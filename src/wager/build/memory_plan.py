"""The memory plan: what weights, workspace, drafters and cache take, decided before anything is allocated.

Bytes and positions only, no tensors. What does not fit is refused with the figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wager.errors import MemoryPlanError
from wager.kernels.base import BLOCK_SIZE

SHARE = 0.8
"""Share of the memory that is free at start which is planned with, where no limit was given."""

FULL_CONTEXTS = 4
"""Sequences of full length that the cache has room for by default; with a memory limit it takes all that is left."""


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
    """Divide `budget` bytes. `token_bytes` is what the cache takes per position (target and drafters together).

    Without `cache_tokens` the cache takes what is left, up to FULL_CONTEXTS contexts unless `use_all`; at least one
    whole context must fit. Raises MemoryPlanError with the figures.
    """
    fixed = weights + workspace + drafter
    wanted = cache_tokens if cache_tokens is not None else max_context * FULL_CONTEXTS
    if cache_tokens is None:
        left = max(0, budget - fixed) // token_bytes
        wanted = left if use_all else min(wanted, left)
    tokens = wanted // BLOCK_SIZE * BLOCK_SIZE if cache_tokens is None else -(-wanted // BLOCK_SIZE) * BLOCK_SIZE
    least = max_context if cache_tokens is None else tokens
    if fixed + max(tokens, least) * token_bytes > budget:
        raise MemoryPlanError(
            f"The model does not fit: weights {gib(weights)} + workspace {gib(workspace)} + drafter {gib(drafter)} + "
            f"cache of {max(tokens, least)} tokens {gib(max(tokens, least) * token_bytes)} = "
            f"{gib(fixed + max(tokens, least) * token_bytes)}, of {gib(budget)} that may be used.",
            "Lower --max-context, use a smaller model, or raise --memory.",
        )
    return MemoryPlan(budget, weights, workspace, drafter, tokens * token_bytes, tokens)


def available() -> int:
    """Bytes free for new allocations: the lesser of what the system and what the control group leaves."""
    found = [_meminfo(), *_cgroup()]
    return min(value for value in found if value is not None)


def _meminfo() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise MemoryPlanError("This system does not say how much memory is free.", "Give --memory, for example 4GiB.")


def _cgroup() -> list[int]:
    """What the control group (a container's limit) leaves; empty without one."""
    root = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most, now = (root / limit).read_text().strip(), int((root / used).read_text())
        except (OSError, ValueError):
            continue
        if most.isdigit():
            return [max(0, int(most) - now)]
    return []


def gib(size: int) -> str:
    """Bytes as text, in GiB or MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"
