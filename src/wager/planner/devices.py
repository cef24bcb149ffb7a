"""Devices by their datasheets: peaks by arithmetic, bandwidth, memory, links. Dense peaks, never the sparse ones.

A device is one GPU (or one CPU's cores together). What is not published is None and is reported as unknown.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from wager.errors import UsageError
from wager.inputs import shown

_INSTEAD = {
    "fp4": ("bf16", "fp16", "fp32"),
    "fp8": ("bf16", "fp16", "fp32"),
    "int8": ("bf16", "fp16", "fp32"),
    "bf16": ("fp16", "fp32"),
    "fp16": ("bf16", "fp32"),
}
"""The arithmetic used instead on a device that lacks one. 4-bit weights without fp4 units are multiplied as 16 bits;
devices with both kinds of 16 bits multiply them at one rate, so that only one of them is listed."""
_ARITHMETIC = {*_INSTEAD, "fp32"}
_LEAST, _MOST = 1e6, 1e20
"""FLOP/s, bytes/s or bytes of a device; less is a figure in TFLOP/s, GB/s or GB."""


@dataclass(frozen=True, slots=True)
class Device:
    """`peaks` are FLOP/s by arithmetic, `bandwidth` bytes/s of its memory, `memory` bytes. `intra` and `inter` are
    bytes/s per direction to devices of the same node and of others, `node` how many devices a node has.

    `overlap` states how far reading and computing overlap: r seconds of reading and c of computing take together
    (r^p + c^p)^(1/p) seconds for an overlap p of 1 (their sum) or more; None: the larger of both.
    """

    name: str
    peaks: Mapping[str, float]
    bandwidth: float
    memory: float | None
    intra: float | None = None
    inter: float | None = None
    node: int | None = None
    label: str = ""
    overlap: float | None = None

    def seconds(self, size: float, flops: float, *, compute: str) -> float:
        """Reading `size` bytes and computing `flops` in that arithmetic."""
        read, computed = size / self.bandwidth, flops / self.peak(compute)
        if self.overlap is None or not read or not computed:
            return max(read, computed)
        longer = max(read, computed)  # divided out, so that the powers of small numbers do not vanish
        shorter = min(read, computed)
        return longer * math.exp(math.log1p((shorter / longer) ** self.overlap) / self.overlap)

    def peak(self, compute: str) -> float:
        """FLOP/s for numbers of that arithmetic, or of the one used instead."""
        if compute in self.peaks:
            return self.peaks[compute]
        found = next((kind for kind in _INSTEAD.get(compute, ()) if kind in self.peaks), None)
        if found is None:
            known = ", ".join(self.peaks)
            raise UsageError(f"{self.name} has no known peak for {compute} arithmetic.", f"Its known peaks: {known}.")
        return self.peaks[found]

    def ridge(self, compute: str) -> float:
        """FLOPs per byte at which computing takes as long as reading."""
        return self.peak(compute) / self.bandwidth

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Device:
        """A device that is not in the table: {"name", "peaks": {"bf16": FLOP/s, ...}, "bandwidth": bytes/s,
        "memory": bytes or null, "intra", "inter", "node", "overlap"}. UsageError names what is missing or no number."""
        unknown = sorted(set(values) - {"name", "peaks", "bandwidth", "memory", "intra", "inter", "node", "overlap"})
        if unknown:
            known = "name, peaks, bandwidth, memory, intra, inter, node and overlap"
            raise UsageError(f"A device has no {unknown[0]!r}.", f"It has {known}.")
        missing = [name for name in ("name", "peaks", "bandwidth") if values.get(name) is None]
        if missing or not isinstance(values["peaks"], Mapping) or not values["peaks"]:
            raise UsageError(
                f"The device lacks {(missing or ['peaks'])[0]!r}.",
                'Give "name", "peaks": {"bf16": FLOP/s} and "bandwidth": bytes/s.',
            )
        odd = next((kind for kind in values["peaks"] if kind not in _ARITHMETIC), None)
        if odd is not None:
            raise UsageError(
                f"No step computes in {shown(odd)}, which the device has a peak for.",
                f"Known are: {', '.join(sorted(_ARITHMETIC))}.",
            )
        overlap = values.get("overlap")
        if overlap is not None and _positive("overlap", overlap) < 1:
            raise UsageError(
                f"The device's overlap = {overlap!r} is below 1: reading and computing take no longer than their sum.",
                "1: one after the other; 2: partly at once; without it entirely.",
            )
        return cls(
            name=str(values["name"]),
            peaks={kind: _sized(f"peaks.{kind}", peak, "FLOP/s") for kind, peak in values["peaks"].items()},
            bandwidth=_sized("bandwidth", values["bandwidth"], "bytes/s"),
            label="given",
            overlap=None if overlap is None else float(overlap),
            **{
                key: None if values.get(key) is None else _sized(key, values[key], unit)
                for key, unit in (("memory", "bytes"), ("intra", "bytes/s"), ("inter", "bytes/s"))
            },
            node=_whole("node", values["node"]) if values.get("node") is not None else None,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, read again by from_dict except for the label."""
        return {**asdict(self), "peaks": dict(self.peaks)}


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UsageError(f"The device's {name} = {value!r} is not a number above 0.", "Give it as a number.")
    return float(value)


def _sized(name: str, value: Any, unit: str) -> float:
    size = _positive(name, value)
    if not _LEAST <= size <= _MOST:
        raise UsageError(
            f"The device's {name} = {value!r} is out of range: it is in {unit}, {_LEAST:g} to {_MOST:g}.",
            "989 TFLOP/s are 989e12, 3350 GB/s 3350e9 and 80 GB 80e9.",
        )
    return size


def _whole(name: str, value: Any) -> int:
    number = _positive(name, value)
    if number != int(number):
        raise UsageError(f"The device's {name} = {value!r} is not a whole number.", "It counts devices: 1 or more.")
    return int(number)


def _gpu(
    name: str,
    peaks: Mapping[str, float],
    bandwidth: float,
    memory: float,
    links: tuple[float | None, float | None],
    *,
    node: int | None = None,
    label: str,
) -> Device:
    """Peaks in TFLOP/s, bandwidth in GB/s, memory in MiB, links in GB/s per direction."""
    intra, inter = (None if link is None else link * 1e9 for link in links)
    flops = {kind: peak * 1e12 for kind, peak in peaks.items()}
    return Device(name, flops, bandwidth * 1e9, memory * 2**20, intra, inter, node, label)


_BLACKWELL = {"bf16": 2250, "fp8": 4500, "fp4": 9000, "int8": 4500}
_BLACKWELL_ULTRA = {**_BLACKWELL, "fp4": 13500, "int8": 150}
_HOPPER = {"bf16": 989.5, "fp8": 1979, "int8": 1979}
_HOPPER_PCIE = {"bf16": 756.5, "fp8": 1513, "int8": 1513}
_HOPPER_SMALL = {"bf16": 148, "fp8": 296, "int8": 296}
_AMPERE = {"bf16": 312, "int8": 624}
_CDNA3 = {"bf16": 1307.4, "fp8": 2614.9, "int8": 2614.9}
_CARD = "vendor architecture white paper: dense, 32-bit accumulation; link: PCIe, through the host's memory"
_PCIE = "vendor datasheet, dense; link: PCIe"
_DGX_A100 = "vendor datasheet, dense; NIC: 200 Gb/s a GPU, as in a DGX A100"
_FABRIC = "vendor datasheet, dense; links: 7 of 128 GB/s in both directions together; NIC: 400 Gb/s a GPU"
_CATALOG = "catalog; int8: vendor pages"

DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _gpu("B300", _BLACKWELL_ULTRA, 8000, 275_040, (900, 100), node=8, label=_CATALOG),
        _gpu("B200", _BLACKWELL, 8000, 183_359, (900, 50), node=8, label=_CATALOG),
        _gpu("H200", _HOPPER, 4800, 143_771, (450, 50), node=8, label="vendor pages; NIC unchecked"),
        _gpu("GH200", {**_HOPPER, "bf16": 989}, 4000, 97_871, (450, 25), label="catalog; NIC of one site's node"),
        _gpu("H100", _HOPPER, 3350, 81_559, (450, 50), node=8, label="catalog"),
        _gpu("H100-PCIe", _HOPPER_PCIE, 2000, 81_559, (64, None), label=_PCIE),
        _gpu(
            "H20",
            _HOPPER_SMALL,
            4000,
            97_871,
            (450, None),
            node=8,
            label="resellers' datasheets, dense; NIC not stated",
        ),
        _gpu("MI325X", _CDNA3, 6000, 262_128, (448, 50), node=8, label=_FABRIC),
        _gpu("MI300X", _CDNA3, 5300, 196_592, (448, 50), node=8, label=_FABRIC),
        _gpu("A100-80GB", _AMPERE, 2039, 81_920, (300, 25), node=8, label=_DGX_A100),
        _gpu("A100-80GB-PCIe", _AMPERE, 1935, 81_920, (32, None), label=_PCIE),
        _gpu("A100-40GB", _AMPERE, 1555, 40_960, (300, 25), node=8, label=_DGX_A100),
        _gpu("L40S", {"bf16": 362, "fp8": 733, "int8": 733}, 864, 46_068, (32, None), label=_PCIE),
        _gpu("L4", {"bf16": 121, "fp8": 242.5, "int8": 242.5}, 300, 23_034, (32, None), label=_PCIE),
        _gpu("A10G", {"bf16": 70, "int8": 140}, 600, 23_028, (32, None), label=_PCIE),
        _gpu("T4", {"fp16": 65, "int8": 130, "fp32": 8.1}, 320, 15_360, (16, None), label=_PCIE),
        _gpu("RTX-5090", {"bf16": 209.5, "fp8": 419, "fp4": 1676, "int8": 838}, 1792, 32_607, (64, None), label=_CARD),
        _gpu("RTX-4090", {"bf16": 165.2, "fp8": 330.3, "int8": 660.6}, 1008, 24_564, (32, None), label=_CARD),
        _gpu("RTX-3090", {"bf16": 71, "int8": 284}, 936, 24_576, (32, None), label=_CARD),
        Device(
            "CPU-2core-AVX512",
            {"bf16": 425e9, "int8": 600e9},
            51e9,
            None,
            overlap=2.0,
            label="measured: products of 1 to 16 rows by two cores with AVX-512 BF16 and VNNI, within 7 %",
        ),
    )
}
"""Devices by name. Memory is what the driver reports, in bytes: an H100 of 80 GB has 85.5e9. The T4 has no bf16: such
weights are served in fp16."""

ALIASES: Mapping[str, str] = {"CPU": "CPU-2core-AVX512", "A100": "A100-80GB"}

_IGNORED_WORDS = re.compile("nvidia|amd|geforce|tesla|instinct|gpu|sxm[2456]?|hgx|oam|hbm[23]e?|ac")
"""Parts of a name that do not tell two devices of the table apart."""


def find_device(name: str) -> Device:
    """The device of that name, as typed or as drivers spell it ("H100 80GB", "NVIDIA A100-SXM4-80GB", "rtx 4090 24gb").

    UsageError names the nearest ones if there is none, or if its memory is another.
    """
    model, gigabytes = _model_and_gigabytes(ALIASES.get(name.strip().upper(), name))
    alike = [device for device in DEVICES.values() if _model_and_gigabytes(device.name)[0] == model]
    fitting = [device for device in alike if _has_memory(device, gigabytes)]
    if fitting:
        return fitting[0]
    known = (
        f"Known are: {', '.join(DEVICES)}. Describe another in a JSON file with its peaks and bandwidth; `this` is "
        "this machine as calibrated, where a command takes measurements."
    )
    if alike:
        sizes = " and ".join(f"{device.memory / 1e9:.4g} GB" for device in alike if device.memory is not None)
        raise UsageError(f"No {alike[0].name} of {gigabytes:.4g} GB is known.", f"Known: {sizes}. {known}")
    models = {_model_and_gigabytes(device)[0]: device for device in (*DEVICES, *ALIASES)}
    near = difflib.get_close_matches(model, models, n=2, cutoff=0.4)
    longer = [other for other in models if model and (model in other or other in model)]
    longer.sort(key=lambda other: abs(len(other) - len(model)))
    close = " or ".join(models[other] for other in list(dict.fromkeys([*longer, *near]))[:2])
    raise UsageError(f"Hardware {name!r} is not known.", f"Did you mean {close}? {known}" if close else known)


def _model_and_gigabytes(name: str) -> tuple[str, float | None]:
    """The model of device in lower case without separators, and its gigabytes if the name states them."""
    text = re.sub(r"(?<=[a-z])(?=\d+ ?gi?b)|[\s_/,()-]+", " ", name.lower()).strip()
    text = re.sub(r"gh200 (480|120) ?gb", "gh200", text)  # as drivers have it: the memory of its CPU
    size = re.search(r"\b(\d+) ?gi?b\b", text)
    words = [word for word in re.sub(r"\b\d+ ?gi?b\b", " ", text).split() if not _IGNORED_WORDS.fullmatch(word)]
    return "".join(words), None if size is None else float(size[1])


def _has_memory(device: Device, gigabytes: float | None) -> bool:
    """Whether the device is sold with that memory: of 1e9 or 2^30 bytes each, less what the driver keeps."""
    if gigabytes is None or device.memory is None:
        return True
    return any(abs(gigabytes * unit / device.memory - 1) < 0.06 for unit in (1e9, 2**30))
