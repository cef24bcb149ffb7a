"""Devices by their datasheets: peaks by arithmetic, bandwidth, memory, links. Dense peaks, never the sparse ones.

A device is one GPU (or one CPU's cores together). What is not published is None and is reported as unknown.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wager.errors import UsageError

_WIDER = {"fp4": "bf16", "fp8": "bf16", "int8": "bf16", "bf16": "fp32"}
"""The arithmetic used instead on a device that lacks one. 4-bit weights without fp4 units are multiplied as bf16."""


@dataclass(frozen=True, slots=True)
class Device:
    """`peaks` are FLOP/s by arithmetic, `bandwidth` bytes/s of its memory, `memory` bytes. `intra` and `inter` are
    bytes/s per direction to devices of the same node and of others, `node` how many devices a node has."""

    name: str
    peaks: Mapping[str, float]
    bandwidth: float
    memory: float | None
    intra: float | None = None
    inter: float | None = None
    node: int | None = None
    label: str = ""

    def arithmetic(self, compute: str) -> str:
        """The arithmetic that `compute` is done in on this device: itself, or the next wider one there is."""
        arithmetic: str | None = compute
        while arithmetic is not None and arithmetic not in self.peaks:
            arithmetic = _WIDER.get(arithmetic)
        if arithmetic is None:
            known = ", ".join(self.peaks)
            raise UsageError(f"{self.name} has no known peak for {compute} arithmetic.", f"Its known peaks: {known}.")
        return arithmetic

    def peak(self, compute: str) -> float:
        """FLOP/s for numbers of that arithmetic."""
        return self.peaks[self.arithmetic(compute)]

    def ridge(self, compute: str) -> float:
        """FLOPs per byte at which computing takes as long as reading."""
        return self.peak(compute) / self.bandwidth

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Device:
        """A device that is not in the table: {"name", "peaks": {"bf16": FLOP/s, ...}, "bandwidth": bytes/s,
        "memory": bytes or null, "intra", "inter", "node"}. UsageError names what is missing or not a number."""
        unknown = sorted(set(values) - {"name", "peaks", "bandwidth", "memory", "intra", "inter", "node"})
        if unknown:
            known = "name, peaks, bandwidth, memory, intra, inter and node"
            raise UsageError(f"A device has no {unknown[0]!r}.", f"It has {known}.")
        missing = [name for name in ("name", "peaks", "bandwidth") if values.get(name) is None]
        if missing or not isinstance(values["peaks"], Mapping) or not values["peaks"]:
            raise UsageError(f"The device lacks {(missing or ['peaks'])[0]!r}.",
                             'Give "name", "peaks": {"bf16": FLOP/s} and "bandwidth": bytes/s.')  # fmt: skip
        return cls(
            name=str(values["name"]),
            peaks={str(kind): _positive(f"peaks.{kind}", peak) for kind, peak in values["peaks"].items()},
            bandwidth=_positive("bandwidth", values["bandwidth"]),
            label="given",
            **{key: _positive(key, values[key]) if values.get(key) is not None else None
               for key in ("memory", "intra", "inter")},
            node=int(_positive("node", values["node"])) if values.get("node") is not None else None,
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Plain values, read again by from_dict except for the label."""
        return {
            "name": self.name,
            "peaks": dict(self.peaks),
            "bandwidth": self.bandwidth,
            "memory": self.memory,
            "intra": self.intra,
            "inter": self.inter,
            "node": self.node,
            "label": self.label,
        }


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UsageError(f"The device's {name} = {value!r} is not a number above 0.")
    return float(value)


def _gpu(
    name: str, peaks: tuple[float, float | None, float | None], bandwidth: float, memory: float,
    links: tuple[float | None, float | None] = (None, None), *, node: int | None = None, label: str,
) -> Device:  # fmt: skip
    """Peaks of bf16, fp8 and fp4 in TFLOP/s, bandwidth in GB/s, memory in GB, links in GB/s per direction."""
    known = zip(("bf16", "fp8", "fp4"), peaks, strict=True)
    intra, inter = (None if link is None else link * 1e9 for link in links)
    flops = {kind: peak * 1e12 for kind, peak in known if peak is not None}
    return Device(name, flops, bandwidth * 1e9, memory * 1e9, intra, inter, node, label)


_CARD = "vendor architecture white paper: dense, 32-bit accumulation"

DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _gpu("B300", (2250, 4500, 13500), 8000, 288, (900, 100), node=8, label="catalog"),
        _gpu("B200", (2250, 4500, 9000), 8000, 192, (900, 50), node=8, label="catalog"),
        _gpu("H200", (989.5, 1979, None), 4800, 141, (450, 50), node=8, label="vendor pages; NIC unchecked"),
        _gpu("GH200", (989, 1979, None), 4000, 96, (450, 25), label="catalog; NIC of one site's node"),
        _gpu("H100", (989.5, 1979, None), 3350, 80, (450, 50), node=8, label="catalog"),
        _gpu("H100-PCIe", (756.5, 1513, None), 2000, 80, label="vendor datasheet, dense"),
        _gpu("MI300X", (1307.4, 2614.9, None), 5300, 192, label="vendor datasheet, dense"),
        _gpu("A100-80GB", (312, None, None), 2039, 80, (300, None), node=8, label="vendor pages"),
        _gpu("A100-80GB-PCIe", (312, None, None), 1935, 80, label="vendor pages"),
        _gpu("A100-40GB", (312, None, None), 1555, 40, (300, None), node=8, label="vendor pages"),
        _gpu("L40S", (362, 733, None), 864, 48, label="vendor datasheet, dense"),
        _gpu("RTX-5090", (209.5, 419, 1676), 1792, 32, label=_CARD),
        _gpu("RTX-4090", (165.2, 330.3, None), 1008, 24, label=_CARD),
        _gpu("RTX-3090", (71, None, None), 936, 24, label=_CARD),
        Device("CPU-2core-AVX512", {"bf16": 814e9}, 52e9, None,
               label="measured: best rate and read bandwidth seen, two cores with AVX-512 BF16"),
    )
}  # fmt: skip
"""Devices by name. GB are 1e9 bytes."""

ALIASES: Mapping[str, str] = {
    "CPU": "CPU-2core-AVX512",
    "A100": "A100-80GB",
    "H100-SXM": "H100",
    "H200-SXM": "H200",
    "H100-SXM5": "H100",
    "RTX5090": "RTX-5090",
    "RTX4090": "RTX-4090",
    "RTX3090": "RTX-3090",
}


def find_device(name: str) -> Device:
    """The device of that name, whatever its case; UsageError names the nearest ones."""
    names = {known.lower(): known for known in (*DEVICES, *ALIASES)}
    key = name.strip().lower().replace(" ", "-").replace("_", "-")
    known_name = names.get(key)
    if known_name is None:
        near = difflib.get_close_matches(key, names, n=2, cutoff=0.4)
        close = f"Did you mean {' or '.join(names[key] for key in near)}? " if near else ""
        raise UsageError(
            f"Hardware {name!r} is not known.",
            f"{close}Known are: {', '.join(DEVICES)}. Describe another in a JSON file with its peaks and bandwidth.",
        )
    return DEVICES[ALIASES.get(known_name, known_name)]
