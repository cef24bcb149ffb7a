"""Weights in the layout the C++ products read: panels of 32 outputs (csrc/weight_layout.h), of bfloat16 or quantised.

A panel of a gated pair is 16 outputs of the gate and the same 16 of the up projection. `dismantle` and `assemble` turn
packed weights into plain values and arrays of bytes, which a file can hold, and back, without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wager.errors import ModelError
from wager.kernels import _native
from wager.kernels.arrays import BFLOAT16, FLOAT32, Array, WeightParts, address, zeros
from wager.kernels.blocks import Matrix, QuantisedMatrix

PANEL = 32
"""Outputs of a panel."""

LAYOUT_VERSION: int = _native.weight_layout_version
"""Changes whenever the bytes do."""


@dataclass(frozen=True)
class Packed:
    """Weights in panels of 32 outputs, on huge pages. `format` is bf16 or a name of blocks.BLOCK_FORMATS; `n` outputs
    (of one half when gated), `k` inputs."""

    buffer: Any
    format: str
    n: int
    k: int
    panels: int
    gated: bool
    bias: Array | None = None  # f32 [panels * 32], in the order of the panels


@dataclass(frozen=True)
class PackedHeads:
    """One matrix [n, k] per head, head after head."""

    buffer: Any
    format: str
    heads: int
    n: int
    k: int


@dataclass(frozen=True)
class PackedExperts:
    """Gate and up projections of each expert, or without gates up alone (`into`), and down projections, expert after
    expert, and the format of each. Biases are f32 [count, panels * 32] in the order of the panels."""

    into: Any
    down: Any
    into_format: str
    down_format: str
    count: int
    hidden: int
    width: int
    gated: bool = True
    into_bias: Array | None = None
    down_bias: Array | None = None


_KINDS: Mapping[type, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    Packed: ("matrix", ("buffer",), ("bias",)),
    PackedHeads: ("heads", ("buffer",), ()),
    PackedExperts: ("experts", ("into", "down"), ("into_bias", "down_bias")),
}
"""What each is called in a file, and its fields that are bytes: buffers, and biases that may be absent."""


@dataclass(frozen=True)
class _StoredRows:
    """Where the rows of a matrix lie, in the order of its outputs; `owner` keeps their memory."""

    format: str
    addresses: NDArray[np.uint64]
    k: int
    owner: Any

    @property
    def n(self) -> int:
        return len(self.addresses)

    def padded(self, outputs: int) -> _StoredRows:
        """With outputs that are zero, up to a multiple of `outputs`."""
        rest = np.zeros(-self.n % outputs, np.uint64)
        return _StoredRows(self.format, np.concatenate([self.addresses, rest]), self.k, self.owner)

    def write(self, pool: Any, buffer: Any, offset: int) -> None:
        """Pack the panels, all full, `offset` bytes into the buffer."""
        _native.pack(pool, self.format, address(self.addresses), self.n // PANEL, self.k, buffer, offset)

    @property
    def nbytes(self) -> int:
        return self.n // PANEL * int(_native.panel_bytes(self.format, self.k))


class Packer:
    """Packs weights with the threads of a pool. Weights are matrices [N, K] of any float type, or quantised; ModelError
    if K is not of the format's multiples or shapes disagree."""

    pool: Any

    def pack(self, weight: Matrix, bias: Array | None = None) -> Packed:
        """A weight [N, K] with its bias [N]."""
        own = _rows(weight)
        rows = own.padded(PANEL)
        padded = None if bias is None else _padded(bias, own.n, rows.n)
        return Packed(self._packed(rows), rows.format, own.n, own.k, rows.n // PANEL, False, padded)

    def pack_gated(self, gate: Matrix, up: Matrix, *, bias: tuple[Array, Array] | None = None) -> Packed:
        """gate and up [N, K], of one format, interleaved by panels, so that their product needs no round trip through
        memory. `bias` is the gate's and the up projection's, [N] each."""
        rows, n = _gated(gate, up), gate.shape[0]
        joined = None if bias is None else _joined(bias, n)
        return Packed(self._packed(rows), rows.format, n, rows.k, rows.n // PANEL, True, joined)

    def _packed(self, rows: _StoredRows) -> Any:
        buffer = _native.Buffer(rows.nbytes)
        rows.write(self.pool, buffer, 0)
        return buffer

    def pack_heads(self, weight: Sequence[Matrix] | Array) -> PackedHeads:
        """One matrix [N, K] per head, all of one format, for `Tape.per_head`."""
        heads = [_rows(head).padded(PANEL) for head in weight]
        first = heads[0]
        size = first.nbytes
        buffer = _native.Buffer(len(heads) * size)
        for index, head in enumerate(heads):
            _check_same(f"Head {index}", head, first)
            head.write(self.pool, buffer, index * size)
        return PackedHeads(buffer, first.format, len(heads), weight[0].shape[0], first.k)

    def pack_experts(
        self,
        parts: Iterable[tuple[Matrix | None, Matrix, Matrix]],
        *,
        count: int,
        biases: Sequence[tuple[Array, Array, Array]] | None = None,
    ) -> PackedExperts:
        """Gate and up [width, hidden] and down [hidden, width] of `count` experts in order, taken one by one; all gates
        and ups of one format, and all downs. Gates are None in experts without. `biases` are those of each expert:
        [width], [width] and [hidden]."""
        packed: PackedExperts | None = None
        done = 0
        for gate, up, down in parts:
            into = _rows(up).padded(PANEL) if gate is None else _gated(gate, up)
            out = _rows(down).padded(PANEL)
            if packed is None:
                first = (into, out)
                buffers = (_native.Buffer(count * into.nbytes), _native.Buffer(count * out.nbytes))
                formats, gated = (into.format, out.format), gate is not None
                packed = PackedExperts(*buffers, *formats, count, into.k, up.shape[0], gated)
            shapes = [tuple(part.shape) for part in (gate, up, down) if part is not None]
            wanted = [(packed.width, packed.hidden)] * (1 + packed.gated) + [(packed.hidden, packed.width)]
            if done == count or shapes != wanted:
                raise ModelError(f"Expert {done} has the shapes {shapes}, or is one too many for {count} experts.")
            for rows, of, buffer in zip((into, out), first, (packed.into, packed.down), strict=True):
                _check_same(f"Expert {done}", rows, of)
                rows.write(self.pool, buffer, done * rows.nbytes)
            done += 1
        if packed is None or done != count:
            raise ModelError(f"{done} experts were given, not {count}.")
        if biases is None:
            return packed
        into_bias = np.stack([_joined((gate, up), packed.width) for gate, up, _ in biases])
        outputs = _panels(packed.hidden) * PANEL
        down_bias = np.stack([_padded(down, packed.hidden, outputs) for _, _, down in biases])
        return replace(packed, into_bias=into_bias, down_bias=down_bias)

    def matrix_bytes(self, n: int, k: int, format_name: str | None) -> int:
        """Bytes of a packed matrix [n, k] of floats (None) or of that block format."""
        return _panels(n) * _panel_bytes(format_name or "bf16", k)

    def dismantle(self, weight: Packed | PackedHeads | PackedExperts) -> WeightParts:
        """A packed weight in parts that a file can hold; its bytes are not copied."""
        kind, buffers, biases = _KINDS[type(weight)]
        names = [field.name for field in fields(weight) if field.name not in (*buffers, *biases)]
        found = (getattr(weight, name) for name in biases)
        arrays = [bias.view(np.uint8).ravel() for bias in found if bias is not None]
        values = {"kind": kind, **{name: getattr(weight, name) for name in names}}
        return WeightParts(values, (*(_bytes(getattr(weight, name)) for name in buffers), *arrays))

    def assemble(self, parts: WeightParts) -> Packed | PackedHeads | PackedExperts:
        """The packed weight of such parts, on their arrays themselves, which may be read-only. ValueError, KeyError or
        TypeError where fields and sizes do not agree."""
        values, arrays = dict(parts.fields), parts.arrays
        kind = values.pop("kind")
        if kind == "matrix":
            panels, bias = int(values["panels"]), arrays[1:]
            _check(arrays, [panels * _panel_bytes(values["format"], values["k"]), *([panels * PANEL * 4] * len(bias))])
            if panels != -(-values["n"] // (PANEL // (2 if values["gated"] else 1))):
                raise ValueError(f"{values['n']} outputs in {panels} panels")
            return Packed(ArrayBuffer(arrays[0]), **values, bias=bias[0].view(FLOAT32) if bias else None)
        if kind == "heads":
            _check(arrays, [values["heads"] * _panels(values["n"]) * _panel_bytes(values["format"], values["k"])])
            return PackedHeads(ArrayBuffer(arrays[0]), **values)
        if kind != "experts":
            raise ValueError(f"a weight of kind {kind!r}")
        count, hidden, width = values["count"], values["hidden"], values["width"]
        outputs = _panels(2 * -(-width // 16) * 16 if values.get("gated", True) else width), _panels(hidden)
        into = outputs[0] * _panel_bytes(values["into_format"], hidden)
        down = outputs[1] * _panel_bytes(values["down_format"], width)
        biases = [count * size * PANEL * 4 for size in outputs] if len(arrays) > 2 else []
        _check(arrays, [count * into, count * down, *biases])
        floats = [array.view(FLOAT32).reshape(count, -1) for array in arrays[2:]]
        of_into, of_down = floats if floats else (None, None)
        buffers = ArrayBuffer(arrays[0]), ArrayBuffer(arrays[1])
        return PackedExperts(*buffers, **values, into_bias=of_into, down_bias=of_down)


def _rows(weight: Matrix) -> _StoredRows:
    """The rows of a matrix, quantised or in bfloat16."""
    name = weight.format.name if isinstance(weight, QuantisedMatrix) else "bf16"
    multiple = int(_native.input_multiple(name))
    if len(weight.shape) != 2 or weight.shape[1] % multiple or not all(weight.shape):
        raise ModelError(
            f"A weight of shape {tuple(weight.shape)} cannot be packed: the kernels need [N, K] with K "
            f"{'even' if multiple == 2 else f'a multiple of {multiple} in {name}'}."
        )
    if isinstance(weight, QuantisedMatrix):
        stored: Array = weight.data if weight.data.strides[1] == 1 else np.ascontiguousarray(weight.data)
    else:
        stored = np.ascontiguousarray(weight, BFLOAT16)
    steps = np.arange(len(stored), dtype=np.uint64) * np.uint64(stored.strides[0])
    return _StoredRows(name, np.uint64(address(stored)) + steps, weight.shape[1], stored)


def _gated(gate: Matrix, up: Matrix) -> _StoredRows:
    """16 rows of the gate, the same 16 of the up projection, and so on."""
    first, second = _rows(gate), _rows(up)
    if (first.format, gate.shape) != (second.format, up.shape):
        raise ModelError(
            f"gate {first.format} {tuple(gate.shape)} and up {second.format} {tuple(up.shape)} must have one shape and "
            "one format."
        )
    halves = [half.padded(16).addresses.reshape(-1, 16) for half in (first, second)]
    return _StoredRows(first.format, np.concatenate(halves, axis=1).ravel(), first.k, (first.owner, second.owner))


def _check_same(name: str, rows: _StoredRows, first: _StoredRows) -> None:
    if (rows.format, rows.n, rows.k) != (first.format, first.n, first.k):
        raise ModelError(f"{name} is {rows.format} of {rows.k} inputs, the first one {first.format} of {first.k}.")


def _joined(bias: tuple[Array, Array], n: int) -> Array:
    """The biases [n] of gate and up in the order of their panels."""
    panels = -(-n // 16)
    return np.concatenate([_padded(half, n, panels * 16).reshape(panels, 16) for half in bias], axis=1).ravel()


def _padded(bias: Array, n: int, size: int) -> Array:
    """A bias [n] in float32, padded with zeros to `size`."""
    if bias.shape != (n,):
        raise ModelError(f"A bias of shape {tuple(bias.shape)} does not fit {n} outputs.")
    padded = zeros(size)
    padded[:n] = bias
    return padded


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


def _bytes(buffer: Any) -> Array:
    interface = {"data": (buffer.address, False), "shape": (buffer.nbytes,), "typestr": "|u1", "version": 3}
    return np.asarray(_Memory(interface, buffer))


def _check(arrays: Sequence[Array], sizes: Sequence[int]) -> None:
    found = [array.nbytes for array in arrays]
    if found != list(sizes):
        raise ValueError(f"parts of {found} bytes, not {list(sizes)}")


def _panels(n: int) -> int:
    return -(-n // PANEL)


def _panel_bytes(format_name: str, k: int) -> int:
    return int(_native.panel_bytes(format_name, k))
