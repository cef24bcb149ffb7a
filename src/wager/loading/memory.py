"""Memory: what is free, and what an engine takes of it, computed before anything is allocated.

Free is what the machine has left, and what the limits of this process and of its control groups leave of it. A model
that does not fit is refused with the figures.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from wager.errors import MemoryPlanError
from wager.kernels.base import BLOCK_SIZE

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """`free` of `total` bytes; `where` says what bounds them."""

    free: int
    total: int
    where: str = "this machine"


def bounds(root: Path | None = None) -> list[FreeMemory]:
    """The free memory of the machine, of this process and of its control groups. MemoryPlanError where the system does
    not say what is free. `root`: where /proc and /sys are."""
    root = root or ROOT
    return [_machine(root), *_process(root), *_groups(root)]


def free_memory(root: Path | None = None) -> FreeMemory:
    """The bound that leaves least. Errors and `root` as `bounds`."""
    return min(bounds(root), key=lambda bound: bound.free)


def _machine(root: Path) -> FreeMemory:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        found = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
        return FreeMemory(int(found["MemAvailable"][0]) * 1024, int(found["MemTotal"][0]) * 1024)
    except (OSError, KeyError, IndexError, ValueError):
        raise MemoryPlanError(
            "This system does not report how much memory is free.", "Give --memory, for example 4GiB."
        ) from None


def _process(root: Path) -> Iterator[FreeMemory]:
    """The limit of this process's addresses, if it has one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return
    try:
        used = int((root / "proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return
    yield FreeMemory(max(0, limit - used), limit, "the address space of this process (ulimit -v)")


def _groups(root: Path) -> Iterator[FreeMemory]:
    """Every control group with a limit that this process is in: its own and those above it, of both versions. Cached
    pages of files that nobody has used for long do not count as used: the system takes them back."""
    for mount, limits, usage, path in _memberships(root):
        for folder in [PurePosixPath(path), *PurePosixPath(path).parents]:
            group = mount / str(folder).lstrip("/")
            limit = min((size for name in limits if (size := _number(group / name)) is not None), default=None)
            used = _number(group / usage)
            if limit is not None and used is not None:
                taken = max(0, used - _idle_files(group))
                yield FreeMemory(max(0, limit - taken), limit, f"the control group {folder}")


def _memberships(root: Path) -> Iterator[tuple[Path, tuple[str, ...], str, str]]:
    """Where control groups of memory are mounted, their files with limits and with the use, and this process's
    path."""
    hierarchies = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            for mount in (hierarchies, hierarchies / "unified"):
                yield mount, ("memory.max", "memory.high"), "memory.current", path
        elif "memory" in controllers.split(","):
            yield hierarchies / "memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", path


def _number(file: Path) -> int | None:
    """The number in a file; None if it is not there, or says `max`."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _idle_files(group: Path) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    found = dict(line.split(" ", 1) for line in lines if " " in line)
    value = found.get("total_inactive_file") or found.get("inactive_file") or "0"
    return int(value) if value.strip().isdigit() else 0


SHARE = 0.8
"""Share of the free memory that a plan may use if no limit was given."""

FULL_CONTEXTS = 4
"""Sequences of full length that fit in the cache by default; with a memory limit it takes all the remaining bytes."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by use. `cache_tokens` are the positions the cache holds, a multiple of BLOCK_SIZE; `draft_cache` bytes of
    it are the drafters'. `draft_parts` are the bytes of `drafter` by what is loaded; `reason` says what bounds the
    budget; `states` are those of the recurrent layers of `sequences` that run at once, for any context."""

    budget: int
    weights: int
    workspace: int
    drafter: int
    cache: int
    cache_tokens: int
    draft_cache: int = 0
    draft_parts: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""
    states: int = 0
    sequences: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.workspace + self.states + self.drafter + self.cache

    @property
    def num_blocks(self) -> int:
        return self.cache_tokens // BLOCK_SIZE

    def describe(self) -> str:
        """What takes how much, in one line."""
        states = [(f"recurrent states of {self.sequences} sequences", self.states)] if self.states else []
        parts = [("weights", self.weights), ("workspace", self.workspace), *states, *self.draft_parts.items()]
        listed = ", ".join(f"{name} {gib(size)}" for name, size in parts)
        own = f" ({gib(self.draft_cache)} of it for drafters)" if self.draft_cache else ""
        return (
            f"{listed}, cache of {self.cache_tokens} tokens {gib(self.cache)}{own}; together {gib(self.total)} of "
            f"{gib(self.budget)} that may be used{_because(self.reason)}"
        )


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
    draft_token_bytes: int = 0,
    states: int = 0,
    sequences: int = 0,
    draft_parts: Mapping[str, int] | None = None,
    reason: str = "",
) -> MemoryPlan:
    """Divide `budget` bytes. `token_bytes` are the cache's bytes per position (target and drafters together), of which
    `draft_token_bytes` are the drafters'; `states`, `sequences`, `draft_parts` and `reason` are those of the plan.

    The cache has `cache_tokens` positions, or else what remains, up to FULL_CONTEXTS contexts unless `use_all` and at
    least one context of full length; in whole blocks. Raises MemoryPlanError with the figures.
    """
    fixed = weights + workspace + states + drafter
    if cache_tokens is None:
        free = max(0, budget - fixed) // token_bytes // BLOCK_SIZE * BLOCK_SIZE
        most = free if use_all else min(free, _whole_blocks(max_context * FULL_CONTEXTS))
        tokens = max(most, _whole_blocks(max_context))
    else:
        tokens = _whole_blocks(cache_tokens)
    total = fixed + tokens * token_bytes
    if total > budget:
        recurrent = f"recurrent states of {sequences} sequences {gib(states)} + " if states else ""
        less = "--max-sequences or --max-context" if states else "--max-context"
        raise MemoryPlanError(
            f"The model does not fit: weights {gib(weights)} + workspace {gib(workspace)} + {recurrent}drafter "
            f"{gib(drafter)} + cache of {tokens} tokens {gib(tokens * token_bytes)} = {gib(total)}, of {gib(budget)} "
            f"that may be used{_because(reason)}.",
            f"Lower {less}, use a smaller model, or raise --memory."
            if cache_tokens is None
            else "Lower cache_tokens, use a smaller model, or raise --memory.",
        )
    cache, draft_cache = tokens * token_bytes, tokens * draft_token_bytes
    parts = dict(draft_parts or {})
    return MemoryPlan(budget, weights, workspace, drafter, cache, tokens, draft_cache, parts, reason, states, sequences)


def budget(*, limit: int | None = None, held: int = 0) -> tuple[int, str]:
    """The bytes that a plan may use, and why that number: a share of the memory that is free, or up to `limit` bytes,
    but no more than are free. `held` bytes, which the plan counts too, are in use already. MemoryPlanError if `limit`
    is more than there is."""
    known = bounds()
    free = min(known, key=lambda bound: bound.free)
    left = f"the {gib(free.free)} that {free.where} has free"
    if limit is None:
        return int(free.free * SHARE) + held, f"{SHARE:.0%} of {left}"
    installed = min(known, key=lambda bound: bound.total)
    if limit > installed.total:
        raise MemoryPlanError(
            f"memory = {gib(limit)} is more than the {gib(installed.total)} of {installed.where}.",
            "Give less, or leave it out.",
        )
    return (limit, "--memory") if limit <= free.free + held else (free.free + held, left)


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""


def _whole_blocks(tokens: int) -> int:
    """Rounded up to whole blocks."""
    return -(-tokens // BLOCK_SIZE) * BLOCK_SIZE


def gib(size: int) -> str:
    """Bytes as text, in GiB or MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"
