"""The oracle: every op in plain numpy, one row at a time, so that a row cannot depend on the others of its batch.

Values are rounded to the activation type exactly where kernels/base.py says so; all else is float32. Each row
is copied to an array of its own before it is used: numpy then sees the same shapes and strides whatever the batch. Its
products are einsum's loops and its sums are numpy's own, which add in an order that follows from these alone, in the
calling thread; BLAS, whose order may follow from alignment and the number of threads, is not called. Made to be simple,
not fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from wager.arch.layers import Experts
from wager.errors import CacheIntegrityError, ModelError, UsageError
from wager.kernels.arrays import BFLOAT16, FLOAT32, Array, DType
from wager.kernels.base import BLOCK_SIZE, Routing, RowSet
from wager.kernels.blocks import BLOCK, BLOCK_FORMATS, Matrix, QuantisedMatrix
from wager.kernels.inputs import Inputs
from wager.kernels.noise import argmax_gumbel
from wager.kernels.reference_quantised import ReferenceQuantised
from wager.kernels.reference_rows import matrix_vector, rms_norm, rotate, silu, softmax
from wager.kernels.reference_store import (
    HeadCache,
    ReferenceCache,
    ReferenceExpert,
    ReferenceInt8Cache,
    ReferenceLatents,
    ReferenceMatrix,
    ReferenceTap,
    ReferenceWeight,
    check_slots,
)
from wager.kernels.routing import top_experts
from wager.types import KVDtype

DTYPES: dict[str, DType] = {"bfloat16": BFLOAT16, "float32": FLOAT32}


class ReferenceTape:
    """Records each op as a function of one row; `run` calls it for every row of its set, op after op."""

    def __init__(self, inputs: Inputs, *, heads: int, kv_heads: int, head_dim: int) -> None:
        self.inputs, self.buffers = inputs, None
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim
        self._ops: list[tuple[RowSet, Callable[[int], None]]] = []
        self._paths: list[Array] = []

    def embed(self, table: ReferenceMatrix, out: Array) -> None:
        def op(row: int) -> None:
            out[row] = table.row(int(self.inputs.tokens[row]))

        self._ops.append(("rows", op))

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array, *, of: RowSet = "rows") -> None:
        def op(row: int) -> None:
            out[row] = rms_norm(_row(x, row), weight, eps)

        self._ops.append((of, op))

    def linear(self, x: Array, weight: ReferenceMatrix, out: Array, *, add: bool = False, of: RowSet = "rows") -> None:
        def op(row: int) -> None:
            y = weight.product(_row(x, row))
            out[row] = out[row] + y if add else y

        self._ops.append((of, op))

    def gated(
        self, x: Array, weight: tuple[ReferenceMatrix, ReferenceMatrix], out: Array, *, of: RowSet = "rows"
    ) -> None:
        gate, up = weight

        def op(row: int) -> None:
            value = _row(x, row)
            out[row] = silu(gate.product(value)) * up.product(value)

        self._ops.append((of, op))

    def route(self, x: Array, weight: Array, bias: Array | None, spec: Experts, routing: Routing) -> None:
        def op(row: int) -> None:
            routing.logits[row] = matrix_vector(weight, _row(x, row))
            routing.ids[row], routing.shares[row] = top_experts(routing.logits[row].copy(), bias, spec)

        self._ops.append(("rows", op))

    def experts(self, x: Array, weight: list[ReferenceExpert], spec: Experts, routing: Routing, out: Array) -> None:
        def op(row: int) -> None:
            value = _row(x, row)
            for expert, share in zip(routing.ids[row].tolist(), routing.shares[row], strict=True):
                (gate, up), down = weight[expert]
                inner = silu(gate.product(value)) * up.product(value)
                out[row] += share * down.product(inner.astype(x.dtype).astype(np.float32))

        self._ops.append(("rows", op))

    def per_head(self, x: Array, weight: list[ReferenceMatrix], out: Array) -> None:
        def op(row: int) -> None:
            heads = [w.product(value) for w, value in zip(weight, _row(x, row).reshape(len(weight), -1), strict=True)]
            out[row].reshape(len(weight), -1)[:, : len(heads[0])] = heads

        self._ops.append(("rows", op))

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

        def op(row: int) -> None:
            angles, slot = table[int(self.inputs.positions[row])], int(self.inputs.slot_mapping[row])
            heads, vector = _row(q, row).reshape(self._heads, -1), _row(kv, row)
            q_nope[row] = heads[:, :-rope].ravel()
            query[row].reshape(self._heads, -1)[:, rank:] = rotate(heads[:, -rope:], angles)
            cache.keys[layer, slot, 0, :rank] = rms_norm(vector[:rank].copy(), *norm)
            cache.keys[layer, slot, :, rank:] = rotate(vector[None, rank:], angles)

        self._ops.append(("rows", op))

    def rotary(
        self, qkv: Array, table: Array, norms: tuple[Array, Array, float] | None, cache: HeadCache, layer: int, q: Array
    ) -> None:
        first_key, first_value = self._heads, self._heads + self._kv_heads

        def op(row: int) -> None:
            heads = _row(qkv, row).reshape(-1, self._head_dim)
            queries, keys, values = heads[:first_key], heads[first_key:first_value], heads[first_value:]
            if norms is not None:
                queries, keys = rms_norm(queries, norms[0], norms[2]), rms_norm(keys, norms[1], norms[2])
            angles = table[int(self.inputs.positions[row])]
            slot = int(self.inputs.slot_mapping[row])
            q[row] = rotate(queries, angles).ravel()
            cache.write(layer, slot, rotate(keys, angles), values)

        self._ops.append(("rows", op))

    def attention(
        self,
        q: Array,
        cache: HeadCache | ReferenceLatents,
        layer: int,
        *,
        window: int | None,
        out: Array,
        scale: float | None = None,
        of: RowSet = "rows",
    ) -> None:
        factor = self._head_dim**-0.5 if scale is None else scale

        def op(index: int) -> None:
            row = index if of == "rows" else int(self.inputs.logits_indices[index])
            path = self._paths[row] if window is None else self._paths[row][-window:]
            keys, values = cache.rows(layer, path)  # [n, kv_heads, d]
            queries = _row(q, row).reshape(self._kv_heads, -1, self._head_dim)
            scores = np.einsum("kgd,nkd->kgn", queries, keys) * np.float32(factor)
            mixed = np.einsum("kgn,nkd->kgd", softmax(scores), values)
            out[index] = mixed.ravel()

        self._ops.append((of, op))

    def select(self, x: Array, out: Array) -> None:
        def op(row: int) -> None:
            out[row] = x[int(self.inputs.logits_indices[row])]

        self._ops.append(("logits", op))

    def copy(self, x: Array, out: Array) -> None:
        self.tap(x).copy_to(out)

    def tap(self, x: Array) -> ReferenceTap:
        tap = ReferenceTap(x)
        self._ops.append(("rows", tap.copy))
        return tap

    def argmax(self, logits: Array, out: Array) -> None:
        def op(row: int) -> None:
            out[row] = _argmax(logits[row])

        self._ops.append(("logits", op))

    def beside(self) -> ReferenceTape:
        return ReferenceTape(self.inputs, heads=self._heads, kv_heads=self._kv_heads, head_dim=self._head_dim)

    def run(self, *, rows: int, sequences: int, logits_rows: int) -> None:
        counts = {"rows": rows, "logits": logits_rows}
        check_slots(self.inputs, rows, sequences)
        with np.errstate(all="ignore"):  # what is not finite is found in the logits
            self._paths = [self._path(row) for row in range(rows)]
            for of, op in self._ops:
                for row in range(counts[of]):
                    op(row)

    def _path(self, row: int) -> Array:
        """Slots of the row's path: position i of the path is element i, the row itself is the last."""
        inputs = self.inputs
        position, sequence = int(inputs.positions[row]), int(inputs.seq_ids[row])
        base = int(inputs.num_computed_tokens[sequence])
        below = np.arange(base)
        cached = inputs.block_tables[sequence][below // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + below % BLOCK_SIZE
        steps: list[int] = []
        while row >= 0 and len(steps) <= position:
            steps.append(int(inputs.slot_mapping[row]))
            row = int(inputs.parents[row])
        if base + len(steps) != position + 1:
            raise CacheIntegrityError(
                f"The row at position {position} has a path of {base + len(steps)} positions, not of {position + 1}."
            )
        return np.concatenate([cached, np.array(steps[::-1], np.int64)])


class ReferenceKernels:
    """Plain numpy on the CPU, in bfloat16 (activations, weights and cache rounded) or float32 (nothing rounded)."""

    name = "reference"
    weight_layout = None

    def __init__(self, dtype: str = "bfloat16", *, reason: str = "the reference kernels were requested") -> None:
        if dtype not in DTYPES:
            raise UsageError(f"dtype = {dtype!r} is not known.", f"Choose one of: {', '.join(DTYPES)}.")
        self.act = DTYPES[dtype]
        self.reason = reason

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

    def pack_experts(self, parts: Iterable[tuple[Matrix, Matrix, Matrix]], *, count: int) -> list[ReferenceExpert]:
        packed = [(self.pack_gated(gate, up), self.pack(down)) for gate, up, down in parts]
        if len(packed) != count:
            raise ModelError(f"{len(packed)} experts were given, not {count}.")
        return packed

    def pack_heads(self, weight: Sequence[Matrix] | Array) -> list[ReferenceMatrix]:
        # a view would keep the whole array alive
        return [self.pack(head if isinstance(head, QuantisedMatrix) else head.copy()) for head in weight]

    def matrix_bytes(self, n: int, k: int, format_name: str | None) -> int:
        if format_name is None or self.act == FLOAT32:
            return 4 * n * k
        known = BLOCK_FORMATS[format_name]
        floats = k + k // known.group + (k // BLOCK if known.minimum else 0)
        return n * (4 * floats + k // known.inputs * known.bytes)

    def latent_cache(self, *, layers: int, num_blocks: int, rank: int, rope: int) -> ReferenceLatents:
        return ReferenceLatents(layers=layers, num_blocks=num_blocks, rank=rank, rope=rope, dtype=self.act)

    def cache(
        self, *, layers: int, num_blocks: int, kv_heads: int, head_dim: int, kv_dtype: KVDtype = "bf16"
    ) -> HeadCache:
        shape = {"layers": layers, "num_blocks": num_blocks, "kv_heads": kv_heads, "head_dim": head_dim}
        return ReferenceInt8Cache(**shape) if kv_dtype == "q8" else ReferenceCache(**shape, dtype=self.act)

    def tape(
        self, *, max_rows: int, max_sequences: int, max_blocks: int, heads: int, kv_heads: int, head_dim: int
    ) -> ReferenceTape:
        inputs = Inputs.allocate(max_rows=max_rows, max_sequences=max_sequences, max_blocks=max_blocks)
        return ReferenceTape(inputs, heads=heads, kv_heads=kv_heads, head_dim=head_dim)

    def sample(
        self, logits: Array, rows: Array, temperatures: Array, seeds: Array, positions: Array, choices: Array
    ) -> Array:
        out = np.full(len(rows), -1, np.int32)
        for i, row in enumerate(rows.tolist()):
            z = logits[row]
            if np.isfinite(z).all():
                seed = int(seeds[i]) & (2**64 - 1)
                out[i] = argmax_gumbel(z, float(temperatures[i]), seed, int(positions[i]), int(choices[i]))
        return out


def _row(x: Array, row: int) -> Array:
    """A fresh float32 copy of one row: its strides never depend on the row's place in the batch."""
    copied: Array = x[row].astype(np.float32)
    return copied


def _argmax(logits: Array) -> int:
    return int(logits.argmax()) if np.isfinite(logits).all() else -1
