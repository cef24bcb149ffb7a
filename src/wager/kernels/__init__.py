"""The kernels: all arithmetic of a model, in C++ or as a plain-numpy reference.

`select` returns the C++ kernels, or the reference if these do not support the model, with the reason. Importing this
package fails with a WagerError where the C++ extension cannot be imported.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import cast

from wager.errors import UsageError, WagerError
from wager.inputs import check_threads
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
    name: str,
    *,
    dtype: str = "bfloat16",
    threads: int | None = None,
    head_dim: int | None = None,
    latent: tuple[int, int] | None = None,
) -> Kernels:
    """The kernels called `name`: auto, native or reference. `threads` None: one per physical core this process has.

    `head_dim` is the model's, or `latent` the rank and rotated part of its latent attention, if known: the native
    kernels do not support every size.
    The environment variable WAGER_ISA (avx512, avx2, portable) forces an instruction set of the native kernels.
    UsageError if `name` or `dtype` is unknown, or if native is requested and not available.
    """
    if name not in ("auto", "native", "reference"):
        raise UsageError(f"kernels = {name!r} is not known.", "Choose one of: auto, native, reference.")
    if dtype not in ("bfloat16", "float32"):
        raise UsageError(f"dtype = {dtype!r} is not known.", "Choose one of: bfloat16, float32.")
    if threads is not None:
        check_threads(threads)
    if name == "reference":
        return _reference_kernels(dtype, "the reference kernels were requested")
    obstacle = _obstacle(dtype, head_dim, latent)
    if obstacle is None:
        return _native_kernels(threads)
    if name == "native":
        raise UsageError(f"The native kernels cannot be used: {obstacle}.", "Use --kernels auto or reference.")
    return _reference_kernels(dtype, f"the native kernels cannot be used: {obstacle}")


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


def _obstacle(dtype: str, head_dim: int | None, latent: tuple[int, int] | None) -> str | None:
    """Why the native kernels cannot be used, or None."""
    if dtype != "bfloat16":
        return f"they compute in bfloat16, and dtype is {dtype}"
    if latent is not None:
        if any(size % 16 or size > MAX_HEAD_DIM for size in latent):
            needed = f"a latent whose rank and rotated part are multiples of 16 up to {MAX_HEAD_DIM}"
            return f"they need {needed}, and the model's are {latent[0]} and {latent[1]}"
    elif head_dim is not None and (head_dim % 16 or head_dim > MAX_HEAD_DIM):
        return f"they need a head_dim that is a multiple of 16 up to {MAX_HEAD_DIM}, and the model's is {head_dim}"
    return None


def _native_kernels(threads: int | None) -> Kernels:
    from wager.kernels.cpu import CpuKernels

    forced = os.environ.get("WAGER_ISA")
    reason = "this is the best instruction set the machine has" if forced is None else f"WAGER_ISA is {forced}"
    return cast(Kernels, CpuKernels(isa=forced, threads=threads or physical_cores(), reason=reason))


def _reference_kernels(dtype: str, reason: str) -> Kernels:
    from wager.kernels.reference import ReferenceKernels

    return cast(Kernels, ReferenceKernels(dtype, reason=reason))
