"""Layers for kernel tests: rows with known queries, keys and values, packed by hand into any block table.

Uses neither the decoder nor pack.py, so that a mistake there cannot hide one here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from packing import batch
from wager.arch.rope import Rope
from wager.kernels.arrays import INT32, Array, zeros
from wager.kernels.base import BLOCK_SIZE
from wager.kernels.cpu import Kernels
from wager.kernels.tape import Tape
from wager.types import KVDtype, PackedBatch

_UNSEEDED = np.random.default_rng(0)


def randn(*shape: int, seed: int | None = None) -> Array:
    """Normal noise f32; without a seed it goes on from the call before."""
    noise: Array = (_UNSEEDED if seed is None else np.random.default_rng(seed)).standard_normal(shape, np.float32)
    return noise


def rand(*shape: int) -> Array:
    """Uniform noise f32 in [0, 1)."""
    return _UNSEEDED.random(shape, np.float32)


def angles(positions: int, d: int) -> Array:
    """A rotation table f32 [positions, d]: cos | sin."""
    return Rope(10000.0).table(positions, d)


@dataclass
class Piece:
    """Some rows of one sequence in one step: `rows` f32 [n, width]; parents are indices in the span, -1: cached."""

    blocks: Sequence[int]
    base: int
    rows: Array
    parents: Sequence[int] = ()

    def chain(self) -> list[int]:
        return list(self.parents) or list(range(-1, len(self.rows) - 1))


def batch_of(pieces: Sequence[Piece], max_blocks: int, logits_indices: Sequence[int] = ()) -> PackedBatch:
    """The pieces with block tables of this width; row i of a span is cached at the slot of position base + i."""
    rows = [(piece.base, [0] * len(piece.rows), piece.chain(), piece.blocks) for piece in pieces]
    packed = batch(rows, logits_indices)
    missing = max_blocks - packed.block_tables.shape[1]
    return replace(packed, block_tables=np.pad(packed.block_tables, ((0, 0), (0, missing))))


def chain_inputs(tape: Tape) -> None:
    """The inputs of one sequence from position 0 on, for tapes without a cache: row i is position i, at slot i."""
    rows = np.arange(len(tape.inputs.positions), dtype=INT32)
    tape.inputs.positions[:] = rows
    tape.inputs.slot_mapping[:] = rows
    tape.inputs.parents[:] = rows - 1
    tape.inputs.block_tables[0] = np.arange(tape.inputs.block_tables.shape[1])


def run_chain(tape: Tape, rows: int, logits_rows: int = 0) -> None:
    """Run the first rows of `chain_inputs`."""
    tape.inputs.query_start_loc[1] = rows
    tape.run(rows=rows, sequences=1, logits_rows=logits_rows)


@dataclass
class World:
    """One layer's rotation and attention over a cache of its own."""

    kernels: Kernels
    heads: int = 6
    kv_heads: int = 2
    d: int = 32
    num_blocks: int = 64
    max_rows: int = 256
    max_blocks: int = 48
    window: int | None = None
    norms: tuple[Array, Array, float] | None = None
    layers: int = 1
    rotated: int | None = None  # 0: no table
    whole_spans: bool = False
    kv_dtype: ClassVar[KVDtype] = "bf16"
    soft_cap: ClassVar[float | None] = None
    with_sinks: ClassVar[bool] = False
    cache: Any = field(init=False)

    def __post_init__(self) -> None:
        self.cache = self.kernels.cache(
            layers=self.layers,
            num_blocks=self.num_blocks,
            kv_heads=self.kv_heads,
            head_dim=self.d,
            kv_dtype=self.kv_dtype,
        )
        limits = {"max_rows": self.max_rows, "max_sequences": 16, "max_blocks": self.max_blocks}
        self.tape = self.kernels.tape(**limits, whole_spans=self.whole_spans)
        self.qkv = zeros(self.max_rows, self.width)
        self.q = zeros(self.max_rows, self.heads * self.d, dtype=self.kernels.act)
        self.out = np.zeros_like(self.q)
        rotated = self.d if self.rotated is None else self.rotated
        table = angles(self.max_blocks * BLOCK_SIZE, rotated) if rotated else None
        layer = self.layers - 1
        self.tape.rotary(self.qkv, table, self.norms, self.cache, layer, self.q)
        self.chosen = np.zeros_like(self.q)
        sinks = randn(self.heads, seed=44) * 3 if self.with_sinks else None
        kept = {"window": self.window, "soft_cap": self.soft_cap, "sinks": sinks}
        self.tape.attention(self.q, self.cache, layer, out=self.out, **kept)
        self.tape.attention(self.q, self.cache, layer, out=self.chosen, of="logits", **kept)

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.d

    def rows(self, n: int, seed: int) -> Array:
        """Queries, keys and values of n rows."""
        return randn(n, self.width, seed=seed) * 1.5

    def step(self, *pieces: Piece, logits_indices: Sequence[int] = ()) -> list[Array]:
        """Attention's output of each piece's rows; `chosen` has it for the rows of `logits_indices`."""
        batch = batch_of(pieces, self.max_blocks, logits_indices)
        self.tape.inputs.fill(batch)
        self.qkv[: batch.rows] = np.concatenate([piece.rows for piece in pieces])
        self.tape.run(rows=batch.rows, sequences=len(pieces), logits_rows=len(logits_indices))
        return np.split(self.out[: batch.rows].copy(), np.cumsum([len(piece.rows) for piece in pieces])[:-1])


class Int8World(World):
    """With a cache in int8."""

    kv_dtype = "q8"


class CappedWorld(World):
    """With a soft cap far below the largest scores."""

    soft_cap = 4.0


class SinkWorld(World):
    """Whose heads have sinks, some above all scores of a row and some below."""

    with_sinks = True


class LatentWorld(World):
    """One layer of absorbed latent attention over a cache of its own; a row is its queries and its latent."""

    def __init__(
        self,
        kernels: Kernels,
        *,
        heads: int = 5,
        rank: int = 48,
        rope: int = 16,
        nope: int = 24,
        layers: int = 1,
        window: int | None = None,
    ) -> None:
        self.kernels, self.heads, self.layers = kernels, heads, layers
        self.rank, self.rope, self.queries = rank, rope, heads * (nope + rope)
        self.max_rows, self.max_blocks, self.num_blocks = 256, 48, 64
        self.cache = kernels.latent_cache(layers=layers, num_blocks=self.num_blocks, rank=rank, rope=rope)
        self.tape = kernels.tape(max_rows=self.max_rows, max_sequences=16, max_blocks=self.max_blocks)
        act, rows, layer = kernels.act, self.max_rows, layers - 1
        self.qkv = zeros(rows, self.width)
        self.q, self.kv = zeros(rows, self.queries), zeros(rows, rank + rope)
        plain, query = zeros(rows, heads * nope, dtype=act), zeros(rows, heads * (rank + rope), dtype=act)
        self.out = zeros(rows, heads * rank, dtype=act)
        make = np.random.default_rng(0)
        norm = make.random(rank, np.float32) + 0.5
        absorb = make.standard_normal((heads, rank, nope), np.float32) * nope**-0.5
        table = angles(self.max_blocks * BLOCK_SIZE, rope)
        self.tape.latent(self.q, self.kv, table, (norm, 1e-6), self.cache, layer, plain, query)
        self.tape.per_head(plain, kernels.pack_heads(absorb), query)
        self.tape.attention(query, self.cache, layer, window=window, out=self.out, scale=0.11)

    @property
    def width(self) -> int:
        return self.queries + self.rank + self.rope

    def step(self, *pieces: Piece) -> list[Array]:
        rows = np.concatenate([piece.rows for piece in pieces])
        self.q[: len(rows)], self.kv[: len(rows)] = rows[:, : self.queries], rows[:, self.queries :]
        return super().step(*pieces)


def decode(world: World, rows: Array, blocks: Sequence[int], *, chunk: int = 1, start: int = 0) -> Array:
    """Outputs of the rows of a path, computed `chunk` rows at a time."""
    outs = [world.step(Piece(blocks, at, rows[at : at + chunk]))[0] for at in range(start, len(rows), chunk)]
    return np.concatenate(outs)
