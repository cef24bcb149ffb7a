"""Describes this machine, for `doctor` and the card of a measurement. Unknown values are None."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FEATURES = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm")
"""Instruction sets that affect the kernels' speed, by their names in Linux."""

PACKAGES = ("wager", "numpy", "ml_dtypes", "tokenizers", "safetensors", "gguf", "huggingface-hub", "torch")

PRESSURES = ("/proc/pressure/cpu", "/sys/fs/cgroup/cpu.pressure")
"""Where Linux states how long threads waited for a processor: on the machine, and in this container."""

BUSY_WAITING = 0.1
"""From this share of time on in which some thread waits, a machine counts as busy."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A processor and its memory. `cores` counts physical cores open to this process; memory is in bytes."""

    cpu: str | None
    architecture: str
    system: str
    cores: int
    hardware_threads: int
    features: tuple[str, ...]
    memory: int | None
    available: int | None


def describe() -> Machine:
    """Read /proc on Linux; on other systems most values are unknown."""
    from wager.kernels.cpu import physical_cores

    info, memory = _read("/proc/cpuinfo"), _read("/proc/meminfo")
    flags = set(_first(r"^(?:flags|Features)\s*:\s*(.*)$", info, "").split())
    return Machine(
        cpu=_first(r"^model name\s*:\s*(.*)$", info, None),
        architecture=platform.machine(),
        system=platform.system(),
        cores=physical_cores(),
        hardware_threads=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        features=tuple(name for name in FEATURES if name in flags),
        memory=_kib("MemTotal", memory),
        available=_kib("MemAvailable", memory),
    )


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """What else the processors do. `average` is the mean number of threads that ran or waited in the last minute;
    `waiting` the share of the last ten seconds in which some thread waited for a processor (Linux only)."""

    cores: int
    average: float | None
    waiting: float | None

    @property
    def is_busy(self) -> bool:
        """Whether threads of wager would wait for processors, and so for each other."""
        if self.waiting is not None:
            return self.waiting >= BUSY_WAITING
        return self.average is not None and self.average > self.cores

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "busy": self.is_busy}


def machine_load(pressures: Sequence[str] = PRESSURES) -> MachineLoad:
    """The load now, by the files that state how long threads waited: of the whole machine, and of a container."""
    from wager.kernels.cpu import physical_cores

    shares = [_first(r"^some avg10=([\d.]+)", _read(path), None) for path in pressures]
    waiting = max((float(share) / 100 for share in shares if share is not None), default=None)
    try:
        average = os.getloadavg()[0]
    except (AttributeError, OSError):  # not on Windows
        average = None
    return MachineLoad(physical_cores(), average, waiting)


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages a measurement depends on; None where one is missing."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def card(*, model: str, settings: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The conditions of a measurement: model, machine, settings, versions, date, and what is given."""
    return {
        "model": model,
        **more,
        "machine": asdict(describe()),
        "settings": dict(settings),
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _first(pattern: str, text: str, default: Any) -> Any:
    match = re.search(pattern, text, re.MULTILINE)
    return match[1].strip() if match else default


def _kib(name: str, text: str) -> int | None:
    kib = _first(rf"^{name}:\s*(\d+) kB$", text, None)
    return None if kib is None else int(kib) * 1024
