"""The native kernels as a Kernels backend: an instruction set, a pool of threads, and the objects made with them.

All arithmetic is in csrc/.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from wager.errors import ModelError, UsageError
from wager.inputs import check_threads
from wager.kernels import _native
from wager.kernels.arrays import BFLOAT16, FLOAT32, Array, WeightParts, address
from wager.kernels.blocks import Matrix
from wager.kernels.cpu_cache import CpuCache, CpuLatents
from wager.kernels.cpu_tape import CpuTape
from wager.kernels.inputs import Inputs
from wager.kernels.packed import PANEL, Packed, PackedExperts, PackedHeads, pack, pack_experts, pack_gated, pack_heads
from wager.kernels.packed_parts import LAYOUT_VERSION, assemble, dismantle
from wager.types import GREEDY_TEMPERATURE, KVDtype

ISAS = ("avx512", "avxvnni", "avx2", "portable")
"""Instruction sets, best first: AVX-512 with BF16 and VNNI, AVX2 with FMA (and AVX-VNNI), and whatever the compiler
targets."""


class CpuKernels:
    """The native backend: bf16 weights, activations and cache, float32 sums, one reduction order per row."""

    act = BFLOAT16
    weight_layout: int | None = LAYOUT_VERSION

    def __init__(self, *, isa: str | None = None, threads: int = 1, reason: str = "it was requested") -> None:
        """`isa` one of ISAS, or None for the best this machine has; UsageError if it is unknown or missing here."""
        if isa is None:
            isa = next(name for name in ISAS if _native.Isa.has(name))
        if isa not in ISAS:
            raise UsageError(f"Instruction set {isa!r} is not known.", f"Choose one of: {', '.join(ISAS)}.")
        if not _native.Isa.has(isa):
            raise UsageError(f"This machine (or this build) has no {isa}.", "Unset WAGER_ISA to let wager choose.")
        check_threads(threads)
        self.isa = _native.Isa(isa)
        self.pool = _native.Pool(threads)
        self.name = f"native {self.isa.name}"
        self.reason = reason

    @property
    def threads(self) -> int:
        return int(self.pool.threads)

    def pack(self, weight: Matrix, bias: Array | None = None) -> Packed:
        return pack(self.pool, weight, bias)

    def pack_gated(self, gate: Matrix, up: Matrix, *, bias: tuple[Array, Array] | None = None) -> Packed:
        return pack_gated(self.pool, gate, up, bias)

    def pack_experts(self, parts: Iterable[tuple[Matrix, Matrix, Matrix]], *, count: int) -> PackedExperts:
        return pack_experts(self.pool, parts, count=count)

    def pack_heads(self, weight: Sequence[Matrix] | Array) -> PackedHeads:
        return pack_heads(self.pool, weight)

    def dismantle(self, weight: Packed | PackedHeads | PackedExperts) -> WeightParts:
        return dismantle(weight)

    def assemble(self, parts: WeightParts) -> Packed | PackedHeads | PackedExperts:
        return assemble(parts)

    def matrix_bytes(self, n: int, k: int, format_name: str | None) -> int:
        return -(-n // PANEL) * int(_native.panel_bytes(format_name or "bf16", k))

    def latent_cache(self, *, layers: int, num_blocks: int, rank: int, rope: int) -> CpuLatents:
        return CpuLatents(self.pool, layers=layers, num_blocks=num_blocks, rank=rank, rope=rope)

    def cache(
        self, *, layers: int, num_blocks: int, kv_heads: int, head_dim: int, kv_dtype: KVDtype = "bf16"
    ) -> CpuCache:
        shape = {"layers": layers, "num_blocks": num_blocks, "kv_heads": kv_heads, "head_dim": head_dim}
        return CpuCache(self.pool, **shape, kv_dtype=kv_dtype)

    def tape(
        self, *, max_rows: int, max_sequences: int, max_blocks: int, heads: int, kv_heads: int, head_dim: int
    ) -> CpuTape:
        inputs = Inputs.allocate(max_rows=max_rows, max_sequences=max_sequences, max_blocks=max_blocks)
        return CpuTape(self.pool, self.isa, inputs, heads=heads, kv_heads=kv_heads, head_dim=head_dim)

    def sample(
        self, logits: Array, rows: Array, temperatures: Array, seeds: Array, positions: Array, choices: Array
    ) -> Array:
        n, (count, vocab) = len(rows), logits.shape
        if logits.dtype != FLOAT32 or not logits.flags.c_contiguous:
            raise ModelError(f"logits are {logits.dtype} {tuple(logits.shape)}; they must be contiguous float32.")
        row, position, choice = (np.ascontiguousarray(a, np.int32) for a in (rows, positions, choices))
        temperature, seed = np.ascontiguousarray(temperatures, np.float64), np.ascontiguousarray(seeds, np.int64)
        if any(len(a) != n for a in (temperature, seed, position, choice)):
            raise ModelError("sample takes one temperature, seed, position and choice per row.")
        if n and not 0 <= int(row.min()) <= int(row.max()) < count:
            raise ModelError(f"sample got a row outside the {count} rows of logits.")
        out = np.empty(n, np.int32)
        _native.sample(
            self.pool,
            self.isa,
            address(logits),
            vocab,
            address(row),
            address(temperature),
            address(seed),
            address(position),
            address(choice),
            n,
            GREEDY_TEMPERATURE,
            address(out),
        )
        return out
