"""The kernels: doors to the C++ in csrc/, which does all arithmetic of a model.

`select` returns those for this machine. Importing this package fails with a WagerError where the C++ extension cannot
be imported. tests/oracle/kernels.py has every op in plain numpy.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import cast

from wager.errors import UsageError, WagerError
from wager.kernels.base import MAX_HEAD_DIM, Kernels

try:
    from wager.kernels import _native  # noqa: F401
except ImportError as error:
    raise WagerError(
        f"wager's C++ extension cannot be imported: {error}.",
        "Install wager again with the Python that runs it, in a copy of its repository: "
        "`python -m pip install --force-reinstall --no-deps .`",
    ) from error

__all__ = ["machine", "physical_cores", "select"]


def select(
    *, threads: int | None = None, head_dim: int | None = None, latent: tuple[int, int] | None = None
) -> Kernels:
    """Kernels of the best instruction set that this machine has, or of the one that the environment variable WAGER_ISA
    (avx512, avxvnni, avx2, portable) names. `threads` None: one per physical core this process has.

    `head_dim` is the model's, or `latent` the rank and rotated part of its latent attention, if known: UsageError if
    the kernels do not support that size, or if the instruction set is unknown or missing here.
    """
    sizes = {"head_dim": head_dim}
    if latent is not None:
        sizes = {"latent's rank": latent[0], "latent's rotated part": latent[1]}
    for name, size in sizes.items():
        if size is not None and (size % 16 or size > MAX_HEAD_DIM):
            raise UsageError(
                f"A {name} of {size} is not supported: the kernels need a multiple of 16 up to {MAX_HEAD_DIM}.",
                "`wager plan` knows such a model; the engine cannot run it.",
            )
    from wager.kernels.cpu import CpuKernels

    forced = os.environ.get("WAGER_ISA")
    reason = "this is the best instruction set the machine has" if forced is None else f"WAGER_ISA is {forced}"
    kernels = CpuKernels(isa=forced, threads=physical_cores() if threads is None else threads, reason=reason)
    return cast(Kernels, kernels)


def machine() -> str:
    """The processor's name and how many of its cores this process may use: the key of speed measurements."""
    try:
        cpu = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.MULTILINE)
    except OSError:
        cpu = None
    cores = physical_cores()
    return f"{cpu[1].strip() if cpu else platform.machine()}, {cores} core{'s' * (cores > 1)}"


def physical_cores() -> int:
    """Physical cores this process may use: hyper-threads of a core count once; at most a container's CPU quota."""
    processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores: set[str] = set()
    for processor in processors:
        siblings = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(processor))
    return max(1, min(len(cores), _quota()))


def _quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """The control group's CPU quota in processors, rounded down; all processors without one."""
    try:
        granted, period = path.read_text().split()
        return max(1, int(granted) // int(period))
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return os.cpu_count() or 1
