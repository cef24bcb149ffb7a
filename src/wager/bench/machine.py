"""Describes this machine, for the card of a measurement and `doctor`. Unknown values are None."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FEATURES = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm")
"""Instruction sets that affect the kernels' speed, by their names in Linux."""

PACKAGES = ("wager", "numpy", "ml_dtypes", "tokenizers", "safetensors", "gguf", "huggingface-hub", "torch")


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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe() -> Machine:
    """Read /proc on Linux; on other systems most values are unknown."""
    from wager.kernels import physical_cores

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


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages a measurement depends on; None where one is missing."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


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
