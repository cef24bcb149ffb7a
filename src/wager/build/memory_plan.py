"""The memory plan: what weights, workspace, drafter and cache take, decided before the first token.

Knows bytes and positions, no tensors. What does not fit is refused with the figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wager.errors import MemoryPlanError
from wager.kernels.base import BLOCK_SIZE

SHARE = 0.8
"""Part of the memory that is free at start which the engine may plan with, when nobody says otherwise."""

FULL_CONTEXTS = 4
"""Sequences of full length the default cache has room for (shorter ones share it); more is asked for by --memory."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by use. `cache_tokens` is what the cache holds, a multiple of PAGE."""

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
    full: bool = False,
) -> MemoryPlan:
    """Divide `budget` bytes. `token_bytes` is the cache's price per position (target and drafter together).

    Without `cache_tokens` the cache takes what is left, up to FULL_CONTEXTS contexts unless `full`; at least one whole
    context must fit.
    """
    fixed = weights + workspace + drafter
    wanted = cache_tokens if cache_tokens is not None else max_context * FULL_CONTEXTS
    if cache_tokens is None:
        left = max(0, budget - fixed) // token_bytes
        wanted = left if full else min(wanted, left)
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
    """Bytes free for new allocations: the least of the system's and the control group's word."""
    found = [_meminfo(), *_cgroup()]
    return min(value for value in found if value is not None)


def _meminfo() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise MemoryPlanError("This system does not say how much memory is free.", "Give --memory, for example 4GiB.")


def _cgroup() -> list[int]:
    """What the control group (a container's limit) leaves, if there is one."""
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
    """Bytes for people."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"
