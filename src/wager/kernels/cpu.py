"""The thin door to the C++ kernels: checks tensors, hands over their addresses, keeps them alive.

Knows layouts only as sizes; every number is computed in csrc/. Importing this module fails where the extension was not
built, and `kernels.select` then says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wager.errors import CacheIntegrityError, ModelError, UsageError
from wager.kernels import _native
from wager.kernels.base import MAX_HEAD_DIM, PAGE, Inputs, Rows
from wager.kernels.packed import Packed, pack, pack_gated
from wager.types import GREEDY_TEMPERATURE

ISAS = ("avx512", "avx2", "portable")
"""Instruction sets, best first: AVX-512 with BF16 dot products, AVX2 with FMA, and whatever the compiler targets."""


class CpuCache:
    """Keys [layer][page][kv_head][d/2][16][2] and values [layer][page][kv_head][8][d][2], bf16: both products of
    attention then read sixteen keys, or sixteen dimensions, at once, in pairs along their sum."""

    def __init__(self, pool: Any, *, layers: int, pages: int, kv_heads: int, head_dim: int) -> None:
        _check_head_dim(head_dim)
        nbytes = 2 * layers * pages * kv_heads * PAGE * head_dim
        self.pages = pages
        self.shape = (layers, kv_heads, head_dim)
        self.keys, self.values = _native.Block(nbytes), _native.Block(nbytes)
        self.view = _native.CacheView(self.keys, self.values, layers, pages, kv_heads, head_dim)
        self._pool = pool

    @property
    def nbytes(self) -> int:
        return int(self.keys.nbytes) + int(self.values.nbytes)

    def move(self, source: Tensor, target: Tensor) -> None:
        if len(source) != len(target):
            raise CacheIntegrityError(f"{len(source)} slots cannot move to {len(target)} slots.")
        source, target = source.to(torch.int32).contiguous(), target.to(torch.int32).contiguous()
        for slots in (source, target):
            if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < self.pages * PAGE:
                raise CacheIntegrityError(f"A slot to move lies outside the cache of {self.pages} pages.")
        self.view.move(self._pool, source.data_ptr(), target.data_ptr(), len(source))

    def read(self, slot: int) -> Tensor:
        layers, kv_heads, head_dim = self.shape
        if not 0 <= slot < self.pages * PAGE:
            raise CacheIntegrityError(f"Slot {slot} lies outside the cache of {self.pages} pages.")
        out = torch.empty(layers, 2, kv_heads, head_dim, dtype=torch.bfloat16)
        self.view.read(slot, out.data_ptr())
        return out

    def clear(self, page: int) -> None:
        if not 0 <= page < self.pages:
            raise CacheIntegrityError(f"Page {page} lies outside the cache of {self.pages} pages.")
        self.view.clear(page)


class CpuTape:
    """Ops recorded once and replayed in one parallel region; see kernels/base.py for what each computes."""

    def __init__(self, kernels: CpuKernels, inputs: Inputs, *, heads: int, kv_heads: int, head_dim: int) -> None:
        _check_head_dim(head_dim)
        if heads % kv_heads:
            raise ModelError(f"{heads} query heads cannot share {kv_heads} key-value heads evenly.")
        self.inputs = inputs
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim
        self._rows = self._head_rows = len(inputs.tokens)
        self._kept: list[Any] = [inputs]
        names = ("tokens", "positions", "parents", "slots", "owners", "heads", "starts", "bases", "tables")
        addresses = tuple(getattr(inputs, name).data_ptr() for name in names)
        sizes = (self._rows, len(inputs.starts), inputs.tables.shape[1])
        self._tape = _native.Tape(kernels.pool, kernels.isa, addresses, *sizes, heads, kv_heads, head_dim)

    def _take(self, name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int | None]) -> int:
        """The address of a tensor, once it is known to be what the C++ side will take it for."""
        fits = tensor.dim() == len(shape) and all(w is None or w == s for w, s in zip(shape, tensor.shape, strict=True))
        if tensor.dtype != dtype or not fits or not tensor.is_contiguous():
            wanted = ", ".join("any" if w is None else str(w) for w in shape)
            raise ModelError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be contiguous {dtype} [{wanted}].",
                "A tape's buffers are fixed when it is recorded.",
            )
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _buffer(self, name: str, tensor: Tensor, dtype: torch.dtype, width: int, *, of: Rows = "rows") -> int:
        """A buffer of rows: room for max_rows, or for as many heads as a step may then ask for."""
        address = self._take(name, tensor, dtype, (None, width))
        if of == "heads":
            self._head_rows = min(self._head_rows, len(tensor))
        elif len(tensor) < self._rows:
            raise ModelError(f"{name} has room for {len(tensor)} rows; the tape's max_rows is {self._rows}.")
        return address

    def embed(self, table: Tensor, out: Tensor) -> None:
        vocab, hidden = table.shape
        source = self._take("table", table, torch.bfloat16, (vocab, hidden))
        self._tape.embed(source, vocab, hidden, self._buffer("out", out, torch.float32, hidden))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor, *, of: Rows = "rows") -> None:
        n = x.shape[-1]
        source = self._buffer("x", x, torch.float32, n, of=of)
        scale = self._take("weight", weight, torch.float32, (n,))
        target = self._buffer("out", out, torch.bfloat16, n, of=of)
        self._tape.rms_norm(source, scale, n, eps, target, of == "heads")

    def linear(self, x: Tensor, weight: Packed, out: Tensor, *, add: bool = False, of: Rows = "rows") -> None:
        target = self._buffer("out", out, torch.float32, weight.n, of=of)
        self._product(x, weight, target, add=add, of=of)

    def gated(self, x: Tensor, weight: Packed, out: Tensor) -> None:
        target = self._buffer("out", out, torch.bfloat16, weight.n)
        self._product(x, weight, target, add=False, of="rows")

    def _product(self, x: Tensor, weight: Packed, target: int, *, add: bool, of: Rows) -> None:
        source = self._buffer("x", x, torch.bfloat16, weight.k, of=of)
        self._kept.append(weight)
        bias = 0 if weight.bias is None else weight.bias.data_ptr()
        panels = (weight.block.address, bias, weight.n, weight.k, weight.panels, weight.gated)
        self._tape.linear(source, *panels, add, target, of == "heads")

    def rotary(
        self,
        qkv: Tensor,
        table: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
        cache: CpuCache,
        layer: int,
        q: Tensor,
    ) -> None:
        d, width = self._head_dim, (self._heads + 2 * self._kv_heads) * self._head_dim
        self._check_cache(cache, layer)
        source = self._buffer("qkv", qkv, torch.float32, width)
        angles = self._take("table", table, torch.float32, (None, d))
        weights, eps = (0, 0), 0.0
        if norms is not None:
            q_norm, k_norm, eps = norms
            weights = (
                self._take("q norm", q_norm, torch.float32, (d,)),
                self._take("k norm", k_norm, torch.float32, (d,)),
            )
        target = self._buffer("q", q, torch.bfloat16, self._heads * d)
        self._tape.rotary(source, angles, len(table), *weights, eps, cache.view, layer, self._heads, target)

    def attention(self, q: Tensor, cache: CpuCache, layer: int, *, window: int | None, out: Tensor) -> None:
        self._check_cache(cache, layer)
        if window is not None and window < 1:
            raise ModelError(f"A sliding window of {window} positions holds no key.")
        source = self._buffer("q", q, torch.bfloat16, self._heads * self._head_dim)
        target = self._buffer("out", out, torch.bfloat16, self._heads * self._head_dim)
        self._tape.attention(source, cache.view, layer, self._heads, window or 0, target)

    def select(self, x: Tensor, out: Tensor) -> None:
        n = x.shape[-1]
        source = self._buffer("x", x, torch.float32, n)
        self._tape.select(source, self._buffer("out", out, torch.float32, n, of="heads"), n)

    def argmax(self, logits: Tensor, out: Tensor) -> None:
        n = logits.shape[-1]
        source = self._buffer("logits", logits, torch.float32, n, of="heads")
        if len(out) < len(logits):
            raise ModelError(f"argmax has {len(logits)} rows of logits and room for {len(out)} results.")
        self._tape.argmax(source, self._take("out", out, torch.int32, (None,)), n)

    def run(self, *, rows: int, sequences: int, heads: int) -> None:
        if heads > self._head_rows:
            raise CacheIntegrityError(f"A step asks for {heads} head rows; the buffers hold {self._head_rows}.")
        try:
            self._tape.run(rows, sequences, heads)
        except IndexError as error:
            raise CacheIntegrityError(f"A step cannot be run: {error}.", "This is a defect in wager.") from error

    def _check_cache(self, cache: CpuCache, layer: int) -> None:
        layers, kv_heads, head_dim = cache.shape
        if (kv_heads, head_dim) != (self._kv_heads, self._head_dim) or not 0 <= layer < layers:
            raise ModelError(
                f"Layer {layer} of a cache {cache.shape} does not fit {self._kv_heads} x {self._head_dim}."
            )
        self._kept.append(cache)


class CpuKernels:
    """The native backend: bf16 weights, activations and cache, float32 sums, one reduction order per row."""

    act = torch.bfloat16

    def __init__(self, *, isa: str | None = None, threads: int = 1, reason: str = "it was asked for") -> None:
        """`isa` one of ISAS, or None for the best this machine has; UsageError if it is unknown or missing here."""
        if isa is None:
            isa = next(name for name in ISAS if _native.Isa.has(name))
        if isa not in ISAS:
            raise UsageError(f"Instruction set {isa!r} is not known.", f"Choose one of: {', '.join(ISAS)}.")
        if not _native.Isa.has(isa):
            raise UsageError(f"This machine (or this build) has no {isa}.", "Unset WAGER_ISA to let wager choose.")
        if threads < 1:
            raise UsageError(f"threads = {threads} is out of range.", "threads must be at least 1.")
        self.isa = _native.Isa(isa)
        self.pool = _native.Pool(threads)
        self.name = f"native {self.isa.name}"
        self.reason = reason

    @property
    def threads(self) -> int:
        return int(self.pool.threads)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Packed:
        return pack(self.pool, weight, bias)

    def pack_gated(self, gate: Tensor, up: Tensor, *, bias: tuple[Tensor, Tensor] | None = None) -> Packed:
        return pack_gated(self.pool, gate, up, bias)

    def cache(self, *, layers: int, pages: int, kv_heads: int, head_dim: int) -> CpuCache:
        return CpuCache(self.pool, layers=layers, pages=pages, kv_heads=kv_heads, head_dim=head_dim)

    def tape(
        self, *, max_rows: int, max_sequences: int, max_pages: int, heads: int, kv_heads: int, head_dim: int
    ) -> CpuTape:
        inputs = Inputs.allocate(max_rows=max_rows, max_sequences=max_sequences, max_pages=max_pages)
        return CpuTape(self, inputs, heads=heads, kv_heads=kv_heads, head_dim=head_dim)

    def sample(
        self, logits: Tensor, rows: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, choices: Tensor
    ) -> Tensor:
        n, (count, vocab) = len(rows), logits.shape
        if logits.dtype != torch.float32 or not logits.is_contiguous():
            raise ModelError(f"logits are {logits.dtype} {tuple(logits.shape)}; they must be contiguous float32.")
        which, where, choice = (t.to(torch.int32).contiguous() for t in (rows, positions, choices))
        heat, seed = temperatures.to(torch.float64).contiguous(), seeds.to(torch.int64).contiguous()
        if any(len(t) != n for t in (heat, seed, where, choice)):
            raise ModelError("sample takes one temperature, seed, position and choice per row.")
        if n and not 0 <= int(which.min()) <= int(which.max()) < count:
            raise ModelError(f"sample was asked for a row outside the {count} rows of logits.")
        out = torch.empty(n, dtype=torch.int32)
        _native.sample(
            self.pool,
            self.isa,
            logits.data_ptr(),
            vocab,
            which.data_ptr(),
            heat.data_ptr(),
            seed.data_ptr(),
            where.data_ptr(),
            choice.data_ptr(),
            n,
            GREEDY_TEMPERATURE,
            out.data_ptr(),
        )
        return out


def _check_head_dim(head_dim: int) -> None:
    if head_dim % 16 or not 16 <= head_dim <= MAX_HEAD_DIM:
        raise ModelError(
            f"head_dim {head_dim} is not a multiple of 16 up to {MAX_HEAD_DIM}, which the native kernels need.",
            "Use --kernels reference for this model.",
        )
