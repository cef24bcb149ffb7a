"""Packed weights as plain values and arrays of bytes, which a file can hold, and back, without a copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wager.kernels import _native
from wager.kernels.arrays import FLOAT32, Array, WeightParts, address
from wager.kernels.packed import PANEL, Packed, PackedExperts, PackedHeads

LAYOUT_VERSION: int = _native.weight_layout_version
"""Changes whenever the bytes do."""


class ArrayBuffer:
    """The bytes of an array, uint8 [n], in place of a native buffer."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.address, self.nbytes = address(array), array.nbytes


@dataclass(frozen=True)
class _Memory:
    """Bytes at an address as numpy takes them; `owner` keeps them."""

    __array_interface__: Mapping[str, Any]
    owner: Any


def dismantle(weight: Packed | PackedHeads | PackedExperts) -> WeightParts:
    """The parts of a packed weight; its bytes are not copied."""
    if isinstance(weight, Packed):
        names = ("format", "n", "k", "panels", "gated")
        bias = () if weight.bias is None else (weight.bias.view(np.uint8),)
        return WeightParts(_fields("matrix", weight, names), (_bytes(weight.buffer), *bias))
    if isinstance(weight, PackedHeads):
        return WeightParts(_fields("heads", weight, ("format", "heads", "n", "k")), (_bytes(weight.buffer),))
    names = ("into_format", "down_format", "count", "hidden", "width")
    return WeightParts(_fields("experts", weight, names), (_bytes(weight.into), _bytes(weight.down)))


def assemble(parts: WeightParts) -> Packed | PackedHeads | PackedExperts:
    """The inverse of `dismantle`, on the arrays themselves. ValueError, KeyError or TypeError where fields and sizes do
    not agree."""
    fields, arrays = dict(parts.fields), parts.arrays
    kind = fields.pop("kind")
    if kind == "matrix":
        panels, bias = int(fields["panels"]), arrays[1:]
        _check(arrays, [panels * _panel(fields["format"], fields["k"]), *([panels * PANEL * 4] * len(bias))])
        if panels != -(-fields["n"] // (PANEL // (2 if fields["gated"] else 1))):
            raise ValueError(f"{fields['n']} outputs in {panels} panels")
        return Packed(ArrayBuffer(arrays[0]), **fields, bias=bias[0].view(FLOAT32) if bias else None)
    if kind == "heads":
        _check(arrays, [fields["heads"] * _panels(fields["n"]) * _panel(fields["format"], fields["k"])])
        return PackedHeads(ArrayBuffer(arrays[0]), **fields)
    if kind != "experts":
        raise ValueError(f"a weight of kind {kind!r}")
    hidden, width = fields["hidden"], fields["width"]
    into = _panels(2 * -(-width // 16) * 16) * _panel(fields["into_format"], hidden)
    down = _panels(hidden) * _panel(fields["down_format"], width)
    _check(arrays, [fields["count"] * into, fields["count"] * down])
    return PackedExperts(ArrayBuffer(arrays[0]), ArrayBuffer(arrays[1]), **fields)


def _fields(kind: str, weight: object, names: Sequence[str]) -> dict[str, Any]:
    return {"kind": kind, **{name: getattr(weight, name) for name in names}}


def _bytes(buffer: Any) -> Array:
    interface = {"data": (buffer.address, False), "shape": (buffer.nbytes,), "typestr": "|u1", "version": 3}
    return np.asarray(_Memory(interface, buffer))


def _check(arrays: Sequence[Array], sizes: Sequence[int]) -> None:
    found = [array.nbytes for array in arrays]
    if found != list(sizes):
        raise ValueError(f"parts of {found} bytes, not {list(sizes)}")


def _panels(n: int) -> int:
    return -(-n // PANEL)


def _panel(format_name: str, k: int) -> int:
    return int(_native.panel_bytes(format_name, k))
