"""Weights in the layout the C++ products read: panels of 32 outputs, [panel][inputs / 2][32][2], bf16.

A panel of a gated pair is 16 outputs of the gate and the same 16 of the up projection.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from wager.errors import ModelError
from wager.kernels import _native
from wager.kernels.arrays import BFLOAT16, Array, address, zeros

_PANEL = 32


@dataclass(frozen=True)
class Packed:
    """Weights in panels of 32 outputs, bf16, on huge pages. `n` outputs (of one half when gated), `k` inputs."""

    buffer: Any
    n: int
    k: int
    panels: int
    gated: bool
    bias: Array | None = None  # f32 [panels * 32], in the order of the panels

    @property
    def nbytes(self) -> int:
        return int(self.buffer.nbytes) + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True)
class PackedHeads:
    """One matrix [n, k] per head, head after head."""

    buffer: Any
    heads: int
    n: int
    k: int

    @property
    def nbytes(self) -> int:
        return int(self.buffer.nbytes)


@dataclass(frozen=True)
class PackedExperts:
    """Gate and up (`into`) and down projections of each expert, expert after expert."""

    into: Any
    down: Any
    count: int
    hidden: int
    width: int

    @property
    def nbytes(self) -> int:
        return int(self.into.nbytes) + int(self.down.nbytes)


def pack(pool: Any, weight: Array, bias: Array | None) -> Packed:
    """weight [N, K] and bias [N] of any float type. ModelError if K is odd or shapes disagree."""
    matrix = _matrix(weight)
    n, k = matrix.shape
    panels = -(-n // _PANEL)
    buffer = _native.Buffer(panels * _PANEL * k * 2)
    _native.pack(pool, address(matrix), n, k, buffer, 0)
    return Packed(buffer, n, k, panels, False, None if bias is None else _padded(bias, n, panels * _PANEL))


def pack_gated(pool: Any, gate: Array, up: Array, bias: tuple[Array, Array] | None) -> Packed:
    """gate and up [N, K] and their biases [N], interleaved by panels. ModelError as in `pack`."""
    first, second = _matrix(gate), _matrix(up)
    if first.shape != second.shape:
        raise ModelError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} must have one shape.")
    n, k = first.shape
    panels = -(-n // 16)
    buffer = _native.Buffer(panels * _PANEL * k * 2)
    _native.pack_gated(pool, address(first), address(second), n, k, buffer, 0)
    if bias is None:
        return Packed(buffer, n, k, panels, True)
    halves = [_padded(half, n, panels * 16).reshape(panels, 16) for half in bias]
    return Packed(buffer, n, k, panels, True, np.concatenate(halves, axis=1).ravel())


def pack_heads(pool: Any, weight: Array) -> PackedHeads:
    """weight [heads, N, K] of any float type. ModelError as in `pack`."""
    heads, n, k = weight.shape
    size = -(-n // _PANEL) * _PANEL * k * 2
    buffer = _native.Buffer(heads * size)
    for head in range(heads):
        matrix = _matrix(weight[head])
        _native.pack(pool, address(matrix), n, k, buffer, head * size)
    return PackedHeads(buffer, heads, n, k)


def pack_experts(pool: Any, parts: Iterable[tuple[Array, Array, Array]], *, count: int) -> PackedExperts:
    """Gate and up [width, hidden] and down [hidden, width] of each expert. ModelError as in `pack`, or if there are not
    `count` of one shape."""
    packed: PackedExperts | None = None
    done = 0
    for gate, up, down in parts:
        width, hidden = gate.shape
        sizes = (-(-width // 16) * _PANEL * hidden * 2, -(-hidden // _PANEL) * _PANEL * width * 2)
        if packed is None:
            packed = PackedExperts(
                _native.Buffer(count * sizes[0]), _native.Buffer(count * sizes[1]), count, hidden, width
            )
        shapes = [tuple(part.shape) for part in (gate, up, down)]
        if done == count or shapes != [(packed.width, packed.hidden)] * 2 + [(packed.hidden, packed.width)]:
            raise ModelError(f"Expert {done} has the shapes {shapes}, or is one too many for {count} experts.")
        first, second, last = _matrix(gate), _matrix(up), _matrix(down)
        at = (address(first), address(second), width, hidden)
        _native.pack_gated(pool, *at, packed.into, done * sizes[0])
        _native.pack(pool, address(last), hidden, width, packed.down, done * sizes[1])
        done += 1
    if packed is None or done != count:
        raise ModelError(f"{done} experts were given, not {count}.")
    return packed


def _matrix(weight: Array) -> Array:
    """A weight as contiguous bf16 [N, K]; K must be even, because products take pairs of inputs."""
    if weight.ndim != 2 or weight.shape[1] % 2 or not weight.size:
        raise ModelError(
            f"A weight of shape {tuple(weight.shape)} cannot be packed: the native kernels need [N, K] with K even.",
            "Use --kernels reference for this model.",
        )
    return np.ascontiguousarray(weight, BFLOAT16)


def _padded(bias: Array, n: int, size: int) -> Array:
    """A bias [n] in float32, padded with zeros to `size`."""
    if bias.shape != (n,):
        raise ModelError(f"A bias of shape {tuple(bias.shape)} does not fit {n} outputs.")
    padded = zeros(size)
    padded[:n] = bias
    return padded
