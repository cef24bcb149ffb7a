"""Memory that is free: what the machine has left, and what the limits of this process and of its control groups leave
of it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from wager.errors import MemoryPlanError

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """`free` of `total` bytes; `where` says what bounds them."""

    free: int
    total: int
    where: str = "this machine"


def free_memory(root: Path | None = None) -> FreeMemory:
    """The bound that leaves least. MemoryPlanError where the system does not say what is free. `root`: where /proc and
    /sys are."""
    root = root or ROOT
    return min([_machine(root), *_process(root), *_groups(root)], key=lambda bound: bound.free)


def total_memory(root: Path | None = None) -> FreeMemory:
    """The bound with the least memory in total."""
    root = root or ROOT
    return min([_machine(root), *_process(root), *_groups(root)], key=lambda bound: bound.total)


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
