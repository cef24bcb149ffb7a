"""The oracle: every op in plain torch, one row at a time, so that a row cannot depend on the others of its batch.

Values are rounded to the activation type exactly where kernels/base.py says so; all else is float32. Each row
is copied to a buffer of its own before it is used: a library call then sees the same shapes and the same alignment
whatever the batch, in one thread whatever the machine, and its reduction order is a constant. Made to be simple, not
fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from wager.arch.feed_forward import Experts
from wager.errors import CacheIntegrityError, ModelError, UsageError
from wager.kernels.base import BLOCK_SIZE, Inputs, Routing, RowSet
from wager.kernels.noise import argmax_gumbel
from wager.kernels.reference_store import ReferenceCache, ReferenceExpert, ReferenceLatents, ReferenceWeight
from wager.kernels.routing import top_experts
from wager.kernels.threads import one_thread

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class ReferenceTape:
    """Records each op as a function of one row; `run` calls it for every row of its set, op after op."""

    def __init__(self, inputs: Inputs, *, heads: int, kv_heads: int, head_dim: int) -> None:
        self.inputs = inputs
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim
        self._ops: list[tuple[RowSet, Callable[[int], None]]] = []
        self._paths: list[Tensor] = []

    def embed(self, table: Tensor, out: Tensor) -> None:
        def op(row: int) -> None:
            out[row] = table[int(self.inputs.tokens[row])]

        self._ops.append(("rows", op))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor, *, of: RowSet = "rows") -> None:
        def op(row: int) -> None:
            out[row] = _rms_norm(_row(x, row), weight, eps)

        self._ops.append((of, op))

    def linear(
        self, x: Tensor, weight: ReferenceWeight, out: Tensor, *, add: bool = False, of: RowSet = "rows"
    ) -> None:
        def op(row: int) -> None:
            y = weight.product(_row(x, row))
            out[row] = out[row] + y if add else y

        self._ops.append((of, op))

    def gated(self, x: Tensor, weight: tuple[ReferenceWeight, ReferenceWeight], out: Tensor) -> None:
        gate, up = weight

        def op(row: int) -> None:
            value = _row(x, row)
            out[row] = torch.nn.functional.silu(gate.product(value)) * up.product(value)

        self._ops.append(("rows", op))

    def route(self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: Experts, routing: Routing) -> None:
        def op(row: int) -> None:
            routing.logits[row] = torch.mv(weight, _row(x, row))
            routing.ids[row], routing.shares[row] = top_experts(routing.logits[row].clone(), bias, spec)

        self._ops.append(("rows", op))

    def experts(self, x: Tensor, weight: list[ReferenceExpert], spec: Experts, routing: Routing, out: Tensor) -> None:
        def op(row: int) -> None:
            value = _row(x, row)
            for expert, share in zip(routing.ids[row].tolist(), routing.shares[row], strict=True):
                (gate, up), down = weight[expert]
                inner = torch.nn.functional.silu(gate.product(value)) * up.product(value)
                out[row] += share * down.product(inner.to(x.dtype).float())

        self._ops.append(("rows", op))

    def per_head(self, x: Tensor, weight: list[ReferenceWeight], out: Tensor) -> None:
        def op(row: int) -> None:
            heads = [w.product(value) for w, value in zip(weight, _row(x, row).view(len(weight), -1), strict=True)]
            out[row].view(len(weight), -1)[:, : len(heads[0])] = torch.stack(heads)

        self._ops.append(("rows", op))

    def latent(
        self,
        q: Tensor,
        kv: Tensor,
        table: Tensor,
        norm: tuple[Tensor, float],
        cache: ReferenceLatents,
        layer: int,
        q_nope: Tensor,
        query: Tensor,
    ) -> None:
        rope, rank = table.shape[1], len(norm[0])

        def op(row: int) -> None:
            angles, slot = table[int(self.inputs.positions[row])], int(self.inputs.slot_mapping[row])
            heads, vector = _row(q, row).view(self._heads, -1), _row(kv, row)
            q_nope[row] = heads[:, :-rope].flatten()
            query[row].view(self._heads, -1)[:, rank:] = _rotate(heads[:, -rope:], angles)
            cache.keys[layer, slot, 0, :rank] = _rms_norm(vector[:rank].clone(), *norm)
            cache.keys[layer, slot, :, rank:] = _rotate(vector[None, rank:], angles)

        self._ops.append(("rows", op))

    def rotary(
        self,
        qkv: Tensor,
        table: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
        cache: ReferenceCache,
        layer: int,
        q: Tensor,
    ) -> None:
        sizes = [self._heads, self._kv_heads, self._kv_heads]

        def op(row: int) -> None:
            queries, keys, values = torch.split(_row(qkv, row).view(-1, self._head_dim), sizes)
            if norms is not None:
                queries = torch.stack([_rms_norm(head, norms[0], norms[2]) for head in queries])
                keys = torch.stack([_rms_norm(head, norms[1], norms[2]) for head in keys])
            angles = table[int(self.inputs.positions[row])]
            slot = int(self.inputs.slot_mapping[row])
            q[row] = _rotate(queries, angles).flatten()
            cache.keys[layer, slot] = _rotate(keys, angles)
            cache.values[layer, slot] = values

        self._ops.append(("rows", op))

    def attention(
        self,
        q: Tensor,
        cache: ReferenceCache | ReferenceLatents,
        layer: int,
        *,
        window: int | None,
        out: Tensor,
        scale: float | None = None,
    ) -> None:
        factor = self._head_dim**-0.5 if scale is None else scale

        def op(row: int) -> None:
            path = self._paths[row] if window is None else self._paths[row][-window:]
            keys = cache.keys[layer].index_select(0, path).float()  # [n, kv_heads, d]
            values = cache.values[layer].index_select(0, path).float()
            queries = _row(q, row).view(self._kv_heads, -1, self._head_dim)
            scores = torch.matmul(queries, keys.permute(1, 2, 0)) * factor  # [kv_heads, group, n]
            mixed = torch.matmul(torch.softmax(scores, dim=-1), values.transpose(0, 1))
            out[row] = mixed.flatten()

        self._ops.append(("rows", op))

    def select(self, x: Tensor, out: Tensor) -> None:
        def op(row: int) -> None:
            out[row] = x[int(self.inputs.logits_indices[row])]

        self._ops.append(("logits", op))

    def argmax(self, logits: Tensor, out: Tensor) -> None:
        def op(row: int) -> None:
            out[row] = _argmax(logits[row])

        self._ops.append(("logits", op))

    def run(self, *, rows: int, sequences: int, logits_rows: int) -> None:
        counts = {"rows": rows, "logits": logits_rows}
        _check_slots(self.inputs, rows, sequences)
        with one_thread():
            self._paths = [self._path(row) for row in range(rows)]
            for of, op in self._ops:
                for row in range(counts[of]):
                    op(row)

    def _path(self, row: int) -> Tensor:
        """Slots of the row's path: position i of the path is element i, the row itself is the last."""
        inputs = self.inputs
        position, sequence = int(inputs.positions[row]), int(inputs.seq_ids[row])
        base = int(inputs.num_computed_tokens[sequence])
        below = torch.arange(base, dtype=torch.int64)
        cached = inputs.block_tables[sequence][below // BLOCK_SIZE].long() * BLOCK_SIZE + below % BLOCK_SIZE
        steps: list[int] = []
        while row >= 0 and len(steps) <= position:
            steps.append(int(inputs.slot_mapping[row]))
            row = int(inputs.parents[row])
        if base + len(steps) != position + 1:
            raise CacheIntegrityError(
                f"The row at position {position} has a path of {base + len(steps)} positions, not of {position + 1}."
            )
        return torch.cat([cached, torch.tensor(steps[::-1], dtype=torch.int64)])


class ReferenceKernels:
    """Plain torch on the CPU, in bfloat16 (activations, weights and cache rounded) or float32 (nothing rounded)."""

    name = "reference"
    packed_itemsize = 4

    def __init__(self, dtype: str = "bfloat16", *, reason: str = "the reference kernels were requested") -> None:
        if dtype not in DTYPES:
            raise UsageError(f"dtype = {dtype!r} is not known.", f"Choose one of: {', '.join(DTYPES)}.")
        self.act = DTYPES[dtype]
        self.reason = reason

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> ReferenceWeight:
        matrix = weight.to(self.act).float().contiguous()
        return ReferenceWeight(matrix, None if bias is None else bias.float())

    def pack_gated(
        self, gate: Tensor, up: Tensor, *, bias: tuple[Tensor, Tensor] | None = None
    ) -> tuple[ReferenceWeight, ReferenceWeight]:
        first, second = (None, None) if bias is None else bias
        return self.pack(gate, first), self.pack(up, second)

    def pack_experts(self, parts: Iterable[tuple[Tensor, Tensor, Tensor]], *, count: int) -> list[ReferenceExpert]:
        packed = [(self.pack_gated(gate, up), self.pack(down)) for gate, up, down in parts]
        if len(packed) != count:
            raise ModelError(f"{len(packed)} experts were given, not {count}.")
        return packed

    def pack_heads(self, weight: Tensor) -> list[ReferenceWeight]:
        return [self.pack(head.clone()) for head in weight]  # a view would keep the whole tensor alive

    def latent_cache(self, *, layers: int, num_blocks: int, rank: int, rope: int) -> ReferenceLatents:
        return ReferenceLatents(layers=layers, num_blocks=num_blocks, rank=rank, rope=rope, dtype=self.act)

    def cache(self, *, layers: int, num_blocks: int, kv_heads: int, head_dim: int) -> ReferenceCache:
        return ReferenceCache(
            layers=layers, num_blocks=num_blocks, kv_heads=kv_heads, head_dim=head_dim, dtype=self.act
        )

    def tape(
        self, *, max_rows: int, max_sequences: int, max_blocks: int, heads: int, kv_heads: int, head_dim: int
    ) -> ReferenceTape:
        inputs = Inputs.allocate(max_rows=max_rows, max_sequences=max_sequences, max_blocks=max_blocks)
        return ReferenceTape(inputs, heads=heads, kv_heads=kv_heads, head_dim=head_dim)

    def sample(
        self, logits: Tensor, rows: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, choices: Tensor
    ) -> Tensor:
        out = torch.full((len(rows),), -1, dtype=torch.int32)
        for i, row in enumerate(rows.tolist()):
            z = logits[row]
            if bool(torch.isfinite(z).all()):
                seed = int(seeds[i]) & (2**64 - 1)
                out[i] = argmax_gumbel(z.numpy(), float(temperatures[i]), seed, int(positions[i]), int(choices[i]))
        return out


def _check_slots(inputs: Inputs, rows: int, sequences: int) -> None:
    """CacheIntegrityError unless each row's slot is the one that the block table of its sequence has for it."""
    starts, computed = inputs.query_start_loc.numpy(), inputs.num_computed_tokens.numpy()
    if starts[sequences] != rows:
        raise CacheIntegrityError(f"query_start_loc ends at {starts[sequences]}, and the step has {rows} rows.")
    seq_ids, slots = inputs.seq_ids.numpy()[:rows], inputs.slot_mapping.numpy()[:rows]
    places = computed[seq_ids] + np.arange(rows) - starts[seq_ids]
    expected = inputs.block_tables.numpy()[seq_ids, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
    for row in np.flatnonzero(slots != expected)[:1]:
        raise CacheIntegrityError(
            f"slot_mapping is {slots[row]} at index {row}, not {expected[row]} as in the block table of sequence "
            f"{seq_ids[row]}."
        )


def _row(x: Tensor, row: int) -> Tensor:
    """A fresh float32 copy of one row: its alignment never depends on the row's place in the batch."""
    return x[row].to(torch.float32, copy=True)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean() + eps) * weight


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x [heads, d], angles [d] = cos | sin: the pair (i, i + d/2) turned by angle i."""
    cos, sin = angles.chunk(2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _argmax(logits: Tensor) -> int:
    return int(torch.argmax(logits)) if bool(torch.isfinite(logits).all()) else -1
