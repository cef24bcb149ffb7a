"""Every op of the kernels in plain numpy, one row at a time: what the C++ is compared with.

`ReferenceKernels` has the methods of the kernels. Values are rounded to the activation type exactly where these say so;
all else is float32. With activations in float32 nothing is rounded, for comparisons with transformers.
Products are einsum's loops and sums numpy's own, on a fresh copy of each row: their order follows from shapes alone.
BLAS, whose order may follow from alignment and threads, is not called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from wager.arch.layers import Experts, StateShape
from wager.kernels.arrays import BFLOAT16, FLOAT32, Array, DType
from wager.kernels.base import BLOCK_SIZE
from wager.kernels.blocks import BLOCK, BLOCK_FORMATS, Floats, Matrix, QuantisedMatrix
from wager.kernels.cpu import Kernels, SampleRequest
from wager.kernels.inputs import Inputs
from wager.kernels.noise import argmax_gumbel, gumbel
from wager.kernels.tape import Gates, GuessedIds, HeadRows, Heads, Routing, RowSet
from wager.types import KVDtype


def matrix_vector(matrix: Array, x: Array) -> Array:
    """[N, K] times [K] -> [N]."""
    y: Array = np.einsum("nk,k->n", matrix, x)
    return y


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Over the last axis of x [..., n]."""
    mean = np.square(x).mean(axis=-1, keepdims=True)
    normed: Array = x * (np.float32(1) / np.sqrt(mean + np.float32(eps))) * weight
    return normed


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def gelu(x: Array) -> Array:
    """By tanh, in float64: far below zero 1 + tanh is a small difference of large numbers."""
    wide = x.astype(np.float64)
    found: Array = (wide / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))).astype(x.dtype)
    return found


def gated(activation: str, gate: Array, up: Array) -> Array:
    """The inner values of a gated layer; see spec.Activation."""
    if activation == "clamped":
        gate, up = np.minimum(gate, np.float32(7)), np.clip(up, np.float32(-7), np.float32(7))
        return gate * sigmoid(np.float32(1.702) * gate) * (up + np.float32(1))
    return (gelu(gate) if activation == "gelu" else silu(gate)) * up


def capped(x: Array, cap: float) -> Array:
    return np.float32(cap) * np.tanh(x / np.float32(cap))


def rotate(x: Array, angles: Array) -> Array:
    """x [heads, d], angles [r] = cos | sin: the pair (i, i + r/2) turned by angle i; dimensions from r on stay."""
    half, rotated = len(angles) // 2, len(angles)
    cos, sin, first, second = angles[:half], angles[half:], x[:, :half], x[:, half:rotated]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, x[:, rotated:]], axis=1)


def sigmoid(x: Array) -> Array:
    return np.float32(1) / (np.float32(1) + np.exp(-x))


def softmax(x: Array) -> Array:
    """Over the last axis."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    shares: Array = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def top_experts(logits: Array, bias: Array | None, spec: Experts) -> tuple[Array, Array]:
    """Ids (ascending) and shares of the experts of one row, int64 and float32 [top_k], from its logits f32 [experts].

    Ties go to the lowest id, of groups and of experts: see Tape.route.
    """
    gating = spec.gating
    scores = sigmoid(logits) if gating.score == "sigmoid" else softmax(logits)
    if not np.isfinite(logits).all():
        scores = np.full_like(scores, np.nan)
    ranking = scores if gating.score == "sigmoid" else logits
    if bias is not None:
        ranking = ranking + bias
    if gating.groups > 1:
        grouped = ranking.reshape(gating.groups, -1)
        best = np.sort(grouped, axis=1)[:, ::-1][:, : gating.group_best].sum(axis=1)
        allowed = np.zeros((gating.groups, 1), bool)
        allowed[_best(best, gating.top_groups)] = True
        ranking = np.where(allowed, grouped, np.float32(-np.inf)).ravel()
    ids = _best(ranking, spec.active)
    shares = scores[ids]
    if gating.normalised:
        total = shares[0]
        for share in shares[1:]:
            total = total + share
        shares = shares / (total + np.float32(1e-20))
    return ids, shares * np.float32(gating.scale)


def _best(values: Array, count: int) -> Array:
    """The indices of the largest values, ascending; among equals the lowest."""
    return np.sort(np.argsort(-values, kind="stable")[:count])


LEAST = np.float32(1e-30)
"""Blocks of activations, keys and values whose elements are all smaller are zero in 8 bits."""

_LOWER_BITS = np.int64((1 << 29) - 1)
"""The bits of a float64 that float32 lacks."""
_TIE = np.int64(1 << 28)


@dataclass(frozen=True)
class QuantisedRow:
    """A row of activations: value = scale * code."""

    codes: Floats  # whole numbers from -127 to 127 [k / 32, 32]
    scales: Floats  # [k / 32]


def quantise_row(x: Floats) -> QuantisedRow:
    """x float32 [k]. The scale of 32 inputs is max|x| / 127, their codes are x * (127 / max|x|) rounded to the nearest
    even integer. A block below LEAST is zero; one with a value that is not finite has the scale NaN and codes 0."""
    whole, scales = round_to_int8(x.reshape(-1, BLOCK))
    return QuantisedRow(whole.astype(np.float32), scales[:, 0])


class ReferenceQuantised:
    """A quantised matrix [n, k] and its bias float32 [n], unpacked for products of one row."""

    def __init__(self, matrix: QuantisedMatrix, bias: Floats | None = None) -> None:
        unpacked = matrix.codes()
        n, groups = unpacked.scales.shape
        self.floats = unpacked.values.dtype == FLOAT32  # of eight bits
        codes = unpacked.values.reshape(n, groups, -1).transpose(1, 0, 2)
        self.codes = np.ascontiguousarray(codes, dtype=np.float32)  # [k / group, n, group]
        self.scales = np.ascontiguousarray(unpacked.scales.T)  # [k / group, n]
        self.minima = None if unpacked.minima is None else np.ascontiguousarray(unpacked.minima.T)
        self.bias = bias
        self._matrix = matrix

    def row(self, index: int) -> Floats:
        """The weights of one output, float32 [k]."""
        found: Floats = self._matrix.take([index]).dequantise()[0]
        return found

    def product(self, x: Floats) -> Floats:
        """W x + b of one row x float32 [k] -> float32 [n]."""
        if self.floats:
            return self._with_floats(x)
        row = quantise_row(x)
        groups, n, inputs = self.codes.shape
        # integers below 2^24: exact in any order of summation
        sums = np.matmul(self.codes, row.codes.reshape(groups, inputs, 1))[..., 0]
        halves = BLOCK // inputs
        with np.errstate(invalid="ignore", over="ignore"):
            scales = self.scales * np.repeat(row.scales, halves)[:, None]
            lifts = np.repeat(row.scales, halves) * row.codes.reshape(groups, inputs).sum(axis=1)
            total = np.zeros(n, dtype=np.float32)
            for group in range(groups):
                total = fused(sums[group], scales[group], total)
                if self.minima is not None:
                    total = fused(self.minima[group], lifts[group], total)
        return total if self.bias is None else total + self.bias

    def _with_floats(self, x: Floats) -> Floats:
        """By pairs of inputs, of each the second first; the sum of a group is then multiplied by its scale."""
        groups, n, inputs = self.codes.shape
        total = np.zeros(n, dtype=np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            for codes, scales, part in zip(self.codes, self.scales, x.reshape(groups, inputs), strict=True):
                found = np.zeros(n, dtype=np.float32)
                for first in range(0, inputs, 2):
                    found = fused(codes[:, first + 1], part[first + 1], found)
                    found = fused(codes[:, first], part[first], found)
                total = fused(found, scales, total)
        return total if self.bias is None else total + self.bias


def fused(a: Floats, b: Any, c: Floats) -> Floats:
    """a * b + c rounded once to float32, as std::fma (results in the range of normal numbers, infinities and NaN).

    The product is exact in float64 and the sum rounded to it. Rounding again to float32 can only go wrong where the
    first rounding ended halfway between two float32; there its error decides.
    """
    product = a.astype(np.float64) * b
    total = product + c
    rounded: Floats = total.astype(np.float32)
    ties = (total.view(np.int64) & _LOWER_BITS) == _TIE
    if not ties.any():
        return rounded
    settled: Floats = np.where(ties, _settled(product, c.astype(np.float64), total), rounded)
    return settled


def _settled(product: NDArray[np.float64], c: NDArray[np.float64], total: NDArray[np.float64]) -> Floats:
    """The float32 nearest to product + c, where `total` is that sum rounded to float64."""
    part = total - product
    error = (product - (total - part)) + (c - part)  # exact (Knuth's two-sum)
    return np.where(error == 0, total, np.nextafter(total, np.copysign(np.inf, error))).astype(np.float32)


@dataclass(frozen=True)
class ReferenceWeight:
    """A matrix [N, K] in float32, already rounded to the activation type, and its bias [N] in float32."""

    matrix: Array
    bias: Array | None

    def product(self, x: Array) -> Array:
        """W x + b of one row x f32 [K] -> f32 [N]."""
        y = matrix_vector(self.matrix, x)
        return y if self.bias is None else y + self.bias

    def row(self, index: int) -> Array:
        """float32 [K]."""
        found: Array = self.matrix[index]
        return found


ReferenceMatrix = ReferenceWeight | ReferenceQuantised

ReferenceExpert = tuple[tuple[ReferenceMatrix | None, ReferenceMatrix], ReferenceMatrix]
"""Gate, if there is one, and up, then down."""


class ReferenceCache:
    """Keys and values as two arrays [layers, slots, kv_heads, head_dim] of the activation type."""

    def __init__(self, *, layers: int, num_blocks: int, kv_heads: int, head_dim: int, dtype: DType) -> None:
        self.num_blocks = num_blocks
        shape = (layers, num_blocks * BLOCK_SIZE, kv_heads, head_dim)
        self.keys: Array = np.zeros(shape, dtype)
        self.values: Array = np.zeros(shape, dtype)
        self.stored = [self.keys, self.values]

    def of_layer(self, layer: int) -> tuple[ReferenceCache, int]:
        return self, layer

    def write(self, layer: int, slot: int, keys: Array, values: Array) -> None:
        """Keys and values of one row, f32 [kv_heads, head_dim]."""
        self.keys[layer, slot], self.values[layer, slot] = keys, values

    def rows(self, layer: Any, slots: Any) -> tuple[Array, Array]:
        """Keys and values of these slots in float32, [n, kv_heads, head_dim] each."""
        return self.keys[layer, slots].astype(np.float32), self.values[layer, slots].astype(np.float32)

    def move(self, source: Array, target: Array) -> None:
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            for array in self.stored:
                array[:, new] = array[:, old]

    def read(self, slot: int) -> Array:
        return np.stack(self.rows(slice(None), slot), axis=1).astype(self.keys.dtype)

    def clear(self, block: int) -> None:
        for array in self.stored:
            array[:, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = 0


class ReferenceInt8Cache(ReferenceCache):
    """Keys and values as int8 and float32 scales [layers, slots, kv_heads, 1]."""

    def __init__(self, *, layers: int, num_blocks: int, kv_heads: int, head_dim: int) -> None:
        shape = {"layers": layers, "num_blocks": num_blocks, "kv_heads": kv_heads}
        super().__init__(**shape, head_dim=head_dim, dtype=np.dtype(np.int8))
        scales = ReferenceCache(**shape, head_dim=1, dtype=FLOAT32)
        self.key_scales, self.value_scales = scales.stored
        self.stored += scales.stored

    def write(self, layer: int, slot: int, keys: Array, values: Array) -> None:
        self.keys[layer, slot], self.key_scales[layer, slot] = round_to_int8(keys)
        self.values[layer, slot], self.value_scales[layer, slot] = round_to_int8(values)

    def rows(self, layer: Any, slots: Any) -> tuple[Array, Array]:
        keys = self.keys[layer, slots] * self.key_scales[layer, slots]
        return keys, self.values[layer, slots] * self.value_scales[layer, slots]

    def read(self, slot: int) -> Array:
        return np.stack(self.rows(slice(None), slot), axis=1)


class ReferenceLatents(ReferenceCache):
    """One vector per position, [layers, slots, 1, rank + rope]: the key, and in its first `rank` the value."""

    def __init__(self, *, layers: int, num_blocks: int, rank: int, rope: int, dtype: DType) -> None:
        super().__init__(layers=layers, num_blocks=num_blocks, kv_heads=1, head_dim=rank + rope, dtype=dtype)
        self.values = self.keys[..., :rank]
        self.stored = [self.keys]

    def read(self, slot: int) -> Array:
        return self.keys[:, None, slot].copy()


class ReferenceStates:
    """The states of recurrent layers, by layer and slot, and what the last pass saved of its guesses, by layer and
    row."""

    def __init__(self, shape: StateShape, *, layers: int, slots: int, max_rows: int) -> None:
        self.shape, self.max_rows = shape, max_rows
        self.tails: Array = np.zeros((layers, slots, shape.taps - 1, shape.channels), np.float32)
        self.heads: Array = np.zeros((layers, slots, shape.heads, shape.key_dim, shape.value_dim), np.float32)
        self.saved: Array = np.zeros((layers, max_rows, shape.width), np.float32)


@dataclass(frozen=True)
class StateRun:
    """The rows of a sequence in recurrent layers: `chain` are the places of its accepted guesses and of its known rows
    in buffers of 2 max_rows rows, `guesses` the rows of the others. States begin with those in slot `source`, and are
    kept in `state`, and in the slots of `saves` after so many rows of the chain."""

    state: int
    source: int
    chain: list[int]
    guesses: list[int]
    saves: dict[int, int]

    def begin(self, stored: Array) -> Array:
        """A copy of what is stored, [slots, ...]."""
        return np.zeros_like(stored[0]) if self.source < 0 else stored[self.source].copy()


def advance(row: Array, heads: Heads, shape: StateShape, state: Array, *, delta: bool) -> tuple[Array, Array]:
    """The state behind a row, f32 [heads, key_dim, value_dim], and the row's output [heads, value_dim]."""
    width, order = heads.key_heads * shape.key_dim, np.arange(shape.heads)
    q, k = (row[at : at + width].reshape(-1, shape.key_dim) for at in (heads.q_at, heads.k_at))
    if delta:
        q, k = (x / np.sqrt(np.square(x).sum(axis=1, keepdims=True) + np.float32(1e-6)) for x in (q, k))
        q = q / np.sqrt(np.float32(shape.key_dim))
    order = order % heads.key_heads if heads.tiled else order // (shape.heads // heads.key_heads)
    q, k = q[order], k[order]
    v = values_of(row, heads, shape)
    step, decay = row[shape.channels :].reshape(2, shape.heads, 1)
    state = state * decay[..., None]
    change = step * (v - np.einsum("hkv,hk->hv", state, k) if delta else v)
    state = state + k[:, :, None] * change[:, None, :]
    return state, np.einsum("hkv,hk->hv", state, q)


def values_of(row: Array, heads: Heads, shape: StateShape) -> Array:
    width = shape.heads * shape.value_dim
    found: Array = row[heads.v_at : heads.v_at + width].reshape(shape.heads, shape.value_dim)
    return found


def round_to_int8(x: Array) -> tuple[Array, Array]:
    """f32 [heads, d] as whole numbers of -127 to 127, int8, and the scale of each head, f32 [heads, 1]."""
    largest, most = np.abs(x).max(axis=-1, keepdims=True), np.float32(127)
    finite = np.isfinite(largest)
    usable = finite & (largest >= LEAST)
    whole = np.rint(np.where(usable, x, np.float32(0)) * (most / np.where(usable, largest, np.float32(1))))
    scale = np.where(usable, largest / most, np.where(finite, np.float32(0), np.float32(np.nan)))
    return whole.astype(np.int8), scale


_UNROTATED = np.empty(0, np.float32)


class ReferenceTap:
    """A place where rows of `x` are copied out, if it has somewhere to."""

    def __init__(self, x: Array) -> None:
        self._x = x
        self._out: Array | None = None

    def copy_to(self, out: Array | None) -> None:
        self._out = out

    def copy(self, row: int) -> None:
        if self._out is not None:
            self._out[row] = self._x[row]


class ReferenceTape:
    """Records each op as a function of one row; `run` calls it for every row of its set, op after op."""

    def __init__(self, inputs: Inputs, *, whole_spans: bool = False) -> None:
        self.inputs, self.buffers, self._whole_spans = inputs, inputs.packer(), whole_spans
        self._ops: list[tuple[RowSet | Literal["sequences"], Callable[[int], None]]] = []
        self._paths: list[Array] = []

    def _each(self, of: RowSet | Literal["sequences"]) -> Callable[[Callable[[int], None]], None]:
        """Record what is done for each row."""
        return lambda op: self._ops.append((of, op))

    def embed(self, table: ReferenceMatrix, out: Array, *, scale: float = 1.0, tokens: Array | None = None) -> None:
        source = self.inputs.tokens if tokens is None else tokens

        @self._each("rows")
        def op(row: int) -> None:
            out[row] = table.row(max(0, int(source[row]))) * np.float32(scale)

    def rms_norm(
        self,
        x: Array,
        weight: Array,
        eps: float,
        out: Array,
        *,
        add: bool = False,
        scale: float = 1.0,
        groups: int = 1,
        of: RowSet = "rows",
    ) -> None:
        @self._each(of)
        def op(row: int) -> None:
            y = rms_norm(_row(x, row).reshape(groups, -1), weight, eps).ravel()
            out[row] = (out[row] + y if add else y) * np.float32(scale)

    def narrow(self, x: Array, out: Array, *, squared_relu: bool = False, of: RowSet = "rows") -> None:
        @self._each(of)
        def op(row: int) -> None:
            out[row] = np.maximum(x[row], np.float32(0)) ** 2 if squared_relu else x[row]

    def soft_cap(self, x: Array, cap: float, *, of: RowSet = "rows") -> None:
        @self._each(of)
        def op(row: int) -> None:
            x[row] = capped(x[row], cap)

    def linear(
        self,
        x: Array,
        weight: ReferenceMatrix,
        out: Array,
        *,
        add: bool = False,
        scale: float = 1.0,
        of: RowSet = "rows",
    ) -> None:
        @self._each(of)
        def op(row: int) -> None:
            y = weight.product(_row(x, row))
            out[row] = out[row] + np.float32(scale) * y if add else np.float32(scale) * y

    def gated(
        self,
        x: Array,
        weight: tuple[ReferenceMatrix, ReferenceMatrix],
        out: Array,
        *,
        activation: str = "silu",
        gate_scale: float = 1.0,
        of: RowSet = "rows",
    ) -> None:
        gate, up = weight

        @self._each(of)
        def op(row: int) -> None:
            value = _row(x, row)
            out[row] = gated(activation, np.float32(gate_scale) * gate.product(value), up.product(value))

    def route(
        self,
        x: Array,
        weight: Array,
        bias: Array | None,
        spec: Experts,
        routing: Routing,
        *,
        logit_bias: Array | None = None,
        scales: Array | None = None,
    ) -> None:
        @self._each("rows")
        def op(row: int) -> None:
            logits = matrix_vector(weight, _row(x, row))
            routing.logits[row] = logits if logit_bias is None else logits + logit_bias
            ids, shares = top_experts(routing.logits[row].copy(), bias, spec)
            routing.ids[row], routing.shares[row] = ids, shares if scales is None else shares * scales[ids]

    def experts(
        self,
        x: Array,
        weight: list[ReferenceExpert],
        spec: Experts,
        routing: Routing,
        out: Array,
        *,
        activation: str = "silu",
    ) -> None:
        @self._each("rows")
        def op(row: int) -> None:
            value = _row(x, row)
            for expert, share in zip(routing.ids[row].tolist(), routing.shares[row], strict=True):
                (gate, up), down = weight[expert]
                of_up = up.product(value)
                inner = np.maximum(of_up, 0) ** 2 if gate is None else gated(activation, gate.product(value), of_up)
                out[row] += share * down.product(inner.astype(x.dtype).astype(np.float32))

    def add_gated(self, x: Array, weight: Array, y: Array, out: Array) -> None:
        @self._each("rows")
        def op(row: int) -> None:
            out[row] += sigmoid(np.einsum("k,k->", _row(x, row), weight)) * y[row]

    def per_head(self, x: Array, weight: list[ReferenceMatrix], out: Array) -> None:
        @self._each("rows")
        def op(row: int) -> None:
            heads = [w.product(value) for w, value in zip(weight, _row(x, row).reshape(len(weight), -1), strict=True)]
            out[row].reshape(len(weight), -1)[:, : len(heads[0])] = heads

    def latent(
        self,
        q: Array,
        kv: Array,
        table: Array,
        norm: tuple[Array, float],
        cache: ReferenceLatents,
        layer: int,
        q_nope: Array,
        query: Array,
    ) -> None:
        rope, rank = table.shape[1], len(norm[0])
        all_heads = query.shape[1] // (rank + rope)

        @self._each("rows")
        def op(row: int) -> None:
            angles, slot = table[int(self.inputs.positions[row])], int(self.inputs.slot_mapping[row])
            heads, vector = _row(q, row).reshape(all_heads, -1), _row(kv, row)
            q_nope[row] = heads[:, :-rope].ravel()
            query[row].reshape(all_heads, -1)[:, rank:] = rotate(heads[:, -rope:], angles)
            cache.keys[layer, slot, 0, :rank] = rms_norm(vector[:rank].copy(), *norm)
            cache.keys[layer, slot, :, rank:] = rotate(vector[None, rank:], angles)

    def rotary(
        self,
        qkv: Array,
        table: Array | None,
        norms: tuple[Array, Array | None, float] | None,
        cache: ReferenceCache,
        layer: int,
        q: Array,
        *,
        rows: HeadRows = "qkv",
        norm_values: bool = False,
        of: RowSet = "rows",
    ) -> None:
        kv_heads, head_dim = cache.keys.shape[2:]
        first_key = q.shape[1] // head_dim if "q" in rows else 0

        @self._each(of)
        def op(index: int) -> None:
            row = index if of == "rows" else int(self.inputs.logits_indices[index])
            heads = _row(qkv, index).reshape(-1, head_dim)
            queries = heads[:first_key] if norms is None else rms_norm(heads[:first_key], norms[0], norms[2])
            angles = _UNROTATED if table is None else table[int(self.inputs.positions[row])]
            if first_key:
                q[row] = rotate(queries, angles).ravel()
            if rows == "q":
                return
            keys, values = heads[first_key : first_key + kv_heads], heads[-kv_heads:]
            if norms is not None and norms[1] is not None:
                keys = rms_norm(keys, norms[1], norms[2])
                values = rms_norm(values, np.float32(1), norms[2]) if norm_values else values
            cache.write(layer, int(self.inputs.slot_mapping[row]), rotate(keys, angles), values)

    def attention(
        self,
        q: Array,
        cache: ReferenceCache,
        layer: int,
        *,
        window: int | None,
        out: Array,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
        of: RowSet = "rows",
    ) -> None:
        kv_heads, head_dim = cache.keys.shape[2:]
        factor = head_dim**-0.5 if scale is None else scale

        @self._each(of)
        def op(index: int) -> None:
            row = index if of == "rows" else int(self.inputs.logits_indices[index])
            path = self._paths[row] if window is None else self._paths[row][-window:]
            keys, values = cache.rows(layer, path)  # [n, kv_heads, d]
            queries = _row(q, row).reshape(kv_heads, -1, head_dim)
            scores = np.einsum("kgd,nkd->kgn", queries, keys) * np.float32(factor)
            if soft_cap is not None:
                scores = capped(scores, soft_cap)
            if sinks is not None:
                scores = np.concatenate([scores, sinks.reshape(*scores.shape[:2], 1)], axis=2)
            mixed = np.einsum("kgn,nkd->kgd", softmax(scores)[..., : len(path)], values)
            out[index] = mixed.ravel()

    def _state_run(self, sequence: int) -> StateRun:
        inputs, max_rows = self.inputs, len(self.inputs.tokens)
        uses = inputs.state_uses.tolist()
        state, source, known, replays, *saves = uses[sequence]
        first, end = inputs.query_start_loc[sequence : sequence + 2].tolist()
        replayed = sum(use[3] for use in uses[:sequence])
        chain = [*range(replayed, replayed + replays), *range(max_rows + first, max_rows + first + known)]
        covered = int(inputs.num_computed_tokens[sequence]) - replays
        kept = {at - covered: slot for at, slot in zip(saves[:2], saves[2:], strict=True) if at >= 0}
        return StateRun(state, source, chain, list(range(first + known, end)), kept)

    def convolve(
        self,
        x: Array,
        weight: Array,
        bias: Array | None,
        gates: Gates | None,
        states: ReferenceStates,
        layer: int,
        out: Array,
        *,
        silu: bool = True,
    ) -> None:
        shape, max_rows = states.shape, len(x) // 2

        def convolved(history: Sequence[Array], row: Array) -> Array:
            mixed = (np.stack(history[-shape.taps :]) * weight).sum(axis=0)
            mixed = mixed if bias is None else mixed + bias
            mixed = mixed * sigmoid(mixed) if silu else mixed
            if gates is None:
                return mixed
            *steps, decay = row[shape.channels :].reshape(-1, len(gates.rates))
            softplus = np.logaddexp(np.float32(0), decay + gates.bias)
            step = sigmoid(steps[0]) if gates.delta else softplus
            return np.concatenate([mixed, step, np.exp(gates.rates * softplus)])

        @self._each("sequences")
        def replay(sequence: int) -> None:
            for place in self._state_run(sequence).chain:
                if place < max_rows:
                    x[place] = states.saved[layer, self.inputs.replays[place]]

        @self._each("sequences")
        def op(sequence: int) -> None:
            run = self._state_run(sequence)
            history = list(run.begin(states.tails[layer]))
            for count, place in enumerate(run.chain, 1):
                history.append(x[place, : shape.channels].copy())
                out[place] = convolved(history, x[place])
                if count in run.saves:
                    states.tails[layer, run.saves[count]] = history[1 - shape.taps :]
            states.tails[layer, run.state] = history[1 - shape.taps :]
            paths: dict[int, list[Array]] = {}
            for row in run.guesses:
                before = paths.get(int(self.inputs.parents[row]), history)
                paths[row] = [*before, x[max_rows + row, : shape.channels].copy()]
                out[max_rows + row] = convolved(paths[row], x[max_rows + row])
                states.saved[layer, row] = x[max_rows + row]

    def recur(
        self,
        x: Array,
        heads: Heads,
        states: ReferenceStates,
        layer: int,
        out: Array,
        *,
        delta: bool = True,
        skip: Array | None = None,
    ) -> None:
        max_rows, shape = len(x) // 2, states.shape

        def given(place: int, state: Array) -> Array:
            """The state behind a row; its output to `out`."""
            row = x[place].copy()
            state, y = advance(row, heads, shape, state, delta=delta)
            if place >= max_rows:
                out[place - max_rows] = (
                    y if skip is None else y + skip[:, None] * values_of(row, heads, shape)
                ).ravel()
            return state

        @self._each("sequences")
        def op(sequence: int) -> None:
            run, stored = self._state_run(sequence), states.heads[layer]
            state = run.begin(stored)
            for count, place in enumerate(run.chain, 1):
                state = given(place, state)
                if count in run.saves:
                    stored[run.saves[count]] = state
            stored[run.state] = state
            found: dict[int, Array] = {}
            for row in run.guesses:
                found[row] = given(max_rows + row, found.get(int(self.inputs.parents[row]), state))

    def gated_norm(
        self,
        x: Array,
        gate: Array,
        weight: Array | None,
        eps: float,
        out: Array,
        *,
        heads: int,
        gate_first: bool = False,
    ) -> None:
        shape = (heads, x.shape[1] // heads)
        weights = None if weight is None else np.broadcast_to(weight.reshape(-1, shape[1]), shape)

        @self._each("rows")
        def op(row: int) -> None:
            values, by = (_row(each, row).reshape(heads, -1) for each in (x, gate))
            if weights is None:
                normed = values * silu(by)
            elif gate_first:
                normed = rms_norm(values * silu(by), weights, eps)
            else:
                normed = rms_norm(values, weights, eps) * silu(by)
            out[row] = normed.ravel()

    def multiply(self, x: Array, y: Array, out: Array, *, gelu: bool = False, of: RowSet = "rows") -> None:
        @self._each(of)
        def op(row: int) -> None:
            value, by = _row(x, row), _row(y, row if of == "rows" else int(self.inputs.logits_indices[row]))
            out[row] = gated("gelu", value, by) if gelu else value * by

    def add_silu(self, x: Array, y: Array, out: Array) -> None:
        @self._each("rows")
        def op(row: int) -> None:
            out[row] = _row(x, row) + silu(_row(y, row))

    def sigmoid_gate(self, x: Array, gate: Array) -> None:
        @self._each("rows")
        def op(row: int) -> None:
            x[row] = _row(x, row) * sigmoid(_row(gate, row))

    def select(self, x: Array, out: Array) -> None:
        @self._each("logits")
        def op(row: int) -> None:
            out[row] = x[int(self.inputs.logits_indices[row])]

    def copy(self, x: Array, out: Array) -> None:
        self.tap(x).copy_to(out)

    def tap(self, x: Array) -> ReferenceTap:
        tap = ReferenceTap(x)
        self._ops.append(("rows", tap.copy))
        return tap

    def argmax(self, logits: Array, out: Array) -> None:
        @self._each("logits")
        def op(row: int) -> None:
            out[row] = _argmax(logits[row])

    def guess(
        self,
        logits: Array,
        ids: GuessedIds,
        keys: Array,
        tokens: Array,
        probabilities: Array,
        *,
        ahead: int = 0,
        of: RowSet = "logits",
    ) -> None:
        own = np.arange(ids.count) if ids.own is None else ids.own

        @self._each(of)
        def op(row: int) -> None:
            tokens[row], probabilities[row] = -1, 0
            temperature, seed, position, choice = keys[row].tolist()
            if (best := _argmax(logits[row])) >= 0:
                if temperature > 0:
                    noise = gumbel(seed, position + ahead, own, choice=choice)
                    best = int((logits[row].astype(np.float64) / temperature + noise).argmax())
                shares = np.exp(logits[row] - logits[row].max())
                tokens[row], probabilities[row] = own[best], shares[best] / shares.sum()

        self._guess = keys, tokens, probabilities

    def feed(self, x: Array, out: Array, *, first: int) -> None:
        """Guesses that follow are made by passes of their own."""

    def rounds(self, *_: object, **__: object) -> None:
        """Python makes each pass."""

    def beside(self) -> ReferenceTape:
        return ReferenceTape(self.inputs)

    @property
    def mark(self) -> int:
        return len(self._ops)

    def run(self, *, rows: int, sequences: int, logits_rows: int, first: int = 0, last: int | None = None) -> None:
        counts = {"rows": rows, "logits": logits_rows, "sequences": sequences}
        with np.errstate(all="ignore"):  # what is not finite is found in the logits
            self._paths = [self._path(row) for row in range(rows)]
            for of, op in self._ops[first:last]:
                for row in range(counts[of]):
                    op(row)

    def _path(self, row: int) -> Array:
        """Slots of the row's path: position i of the path is element i, the row itself is the last."""
        inputs = self.inputs
        position, sequence = int(inputs.positions[row]), int(inputs.seq_ids[row])
        base = int(inputs.num_computed_tokens[sequence])
        if self._whole_spans:  # the last row of the span sees all of them
            row = int(inputs.query_start_loc[sequence + 1]) - 1
            position = int(inputs.positions[row])
        below = np.arange(base)
        cached = inputs.block_tables[sequence][below // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + below % BLOCK_SIZE
        steps: list[int] = []
        while row >= 0 and len(steps) <= position:
            steps.append(int(inputs.slot_mapping[row]))
            row = int(inputs.parents[row])
        return np.concatenate([cached, np.array(steps[::-1], np.int64)])


class ReferenceKernels:
    """In bfloat16 (activations, weights and cache rounded) or float32 (nothing rounded)."""

    name = "reference"
    weight_layout = None

    def __init__(self, dtype: str = "bfloat16") -> None:
        self.act: DType = {"bfloat16": BFLOAT16, "float32": FLOAT32}[dtype]
        native = Kernels(threads=1)  # sequences are sampled natively, whatever computed their logits
        self.pool, self.isa = native.pool, native.isa

    def pack(self, weight: Matrix, bias: Array | None = None) -> ReferenceMatrix:
        if isinstance(weight, QuantisedMatrix):
            if self.act == BFLOAT16:
                return ReferenceQuantised(weight, None if bias is None else bias.astype(np.float32))
            weight = weight.dequantise()
        rounded = weight.astype(self.act, copy=False)
        matrix = np.ascontiguousarray(rounded, np.float32)
        return ReferenceWeight(matrix, None if bias is None else bias.astype(np.float32))

    def pack_gated(
        self, gate: Matrix, up: Matrix, *, bias: tuple[Array, Array] | None = None
    ) -> tuple[ReferenceMatrix, ReferenceMatrix]:
        first, second = (None, None) if bias is None else bias
        return self.pack(gate, first), self.pack(up, second)

    def pack_experts(
        self,
        parts: Iterable[tuple[Matrix | None, Matrix, Matrix]],
        *,
        count: int,
        biases: Sequence[tuple[Array, Array, Array]] | None = None,
    ) -> list[ReferenceExpert]:
        packed: list[ReferenceExpert] = []
        for index, (gate, up, down) in enumerate(parts):
            of_gate, of_up, of_down = (None, None, None) if biases is None else biases[index]
            first = None if gate is None else self.pack(gate, of_gate)
            packed.append(((first, self.pack(up, of_up)), self.pack(down, of_down)))
        return packed

    def pack_heads(self, weight: Sequence[Matrix] | Array) -> list[ReferenceMatrix]:
        return [self.pack(head) for head in weight]

    def matrix_bytes(self, n: int, k: int, format_name: str | None) -> int:
        if format_name is None or self.act == FLOAT32:
            return 4 * n * k
        known = BLOCK_FORMATS[format_name]
        empty = QuantisedMatrix(known, np.zeros((1, known.row_bytes(k)), np.uint8), k)
        codes = empty.codes()
        floats = k + codes.scales.size + (0 if codes.minima is None else codes.minima.size)
        return n * (4 * floats + empty.data.nbytes)

    def latent_cache(self, *, layers: int, num_blocks: int, rank: int, rope: int) -> ReferenceLatents:
        return ReferenceLatents(layers=layers, num_blocks=num_blocks, rank=rank, rope=rope, dtype=self.act)

    def cache(
        self, *, layers: int, num_blocks: int, kv_heads: int, head_dim: int, kv_dtype: KVDtype = "bf16"
    ) -> ReferenceCache:
        shape = {"layers": layers, "num_blocks": num_blocks, "kv_heads": kv_heads, "head_dim": head_dim}
        return ReferenceInt8Cache(**shape) if kv_dtype == "q8" else ReferenceCache(**shape, dtype=self.act)

    def states(self, shape: StateShape, *, layers: int, slots: int, max_rows: int) -> ReferenceStates:
        return ReferenceStates(shape, layers=layers, slots=slots, max_rows=max_rows)

    def tape(self, *, max_rows: int, max_sequences: int, max_blocks: int, whole_spans: bool = False) -> ReferenceTape:
        inputs = Inputs.allocate(max_rows=max_rows, max_sequences=max_sequences, max_blocks=max_blocks)
        return ReferenceTape(inputs, whole_spans=whole_spans)

    def sample(self, logits: Array, requests: Sequence[SampleRequest]) -> list[int]:
        """argmax_gumbel is -1 where a logit is not finite."""
        return [argmax_gumbel(logits[r.row], r.temperature, r.seed, r.position, r.choice) for r in requests]


def _row(x: Array, row: int) -> Array:
    """A fresh float32 copy of one row: its strides never depend on the row's place in the batch."""
    copied: Array = x[row].astype(np.float32)
    return copied


def _argmax(logits: Array) -> int:
    return int(logits.argmax()) if np.isfinite(logits).all() else -1
