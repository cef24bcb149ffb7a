"""The native tape: checks the types and shapes of tensors, passes their addresses to the C++ side, keeps them alive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wager.arch.feed_forward import Experts
from wager.errors import CacheIntegrityError, ModelError, UsageError
from wager.kernels import _native
from wager.kernels.base import Inputs, Routing, RowSet
from wager.kernels.cpu_cache import CpuCache, CpuLatents
from wager.kernels.packer import InputPacker
from wager.kernels.packed import Packed, PackedExperts, PackedHeads

MAX_EXPERTS = 1024
"""Most experts of a layer that the native router takes."""


class CpuTape:
    """Ops recorded once and replayed in one parallel region; see kernels/base.py for what each computes."""

    def __init__(self, pool: Any, isa: Any, inputs: Inputs, *, heads: int, kv_heads: int, head_dim: int) -> None:
        if heads % kv_heads:
            raise ModelError(f"{heads} query heads cannot share {kv_heads} key-value heads evenly.")
        self.inputs = inputs
        self.buffers = InputPacker(inputs)
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim
        self._rows = self._logits_rows = len(inputs.tokens)
        self._kept: list[Any] = [inputs]
        names = (
            "tokens", "positions", "parents", "slot_mapping", "seq_ids", "logits_indices", "query_start_loc",
            "num_computed_tokens", "block_tables",
        )  # fmt: skip
        addresses = tuple(getattr(inputs, name).data_ptr() for name in names)
        sizes = (self._rows, len(inputs.num_computed_tokens), inputs.block_tables.shape[1])
        self._tape = _native.Tape(pool, isa, addresses, *sizes, heads, kv_heads, head_dim)

    def _take(self, name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int | None]) -> int:
        """The address of a tensor of this type and shape (None: any size); ModelError if it is another."""
        fits = tensor.dim() == len(shape) and all(w is None or w == s for w, s in zip(shape, tensor.shape, strict=True))
        if tensor.dtype != dtype or not fits or not tensor.is_contiguous():
            expected = ", ".join("any" if w is None else str(w) for w in shape)
            raise ModelError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be contiguous {dtype} [{expected}].",
                "A tape's buffers are fixed when it is recorded.",
            )
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _buffer(self, name: str, tensor: Tensor, dtype: torch.dtype, width: int, *, of: RowSet = "rows") -> int:
        """A buffer of rows: room for max_rows, or for as many logits rows as a step may have."""
        address = self._take(name, tensor, dtype, (None, width))
        if of == "logits":
            self._logits_rows = min(self._logits_rows, len(tensor))
        elif len(tensor) < self._rows:
            raise ModelError(f"{name} has room for {len(tensor)} rows; the tape's max_rows is {self._rows}.")
        return address

    def embed(self, table: Tensor, out: Tensor) -> None:
        vocab, hidden = table.shape
        source = self._take("table", table, torch.bfloat16, (vocab, hidden))
        self._tape.embed(source, vocab, hidden, self._buffer("out", out, torch.float32, hidden))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor, *, of: RowSet = "rows") -> None:
        n = x.shape[-1]
        source = self._buffer("x", x, torch.float32, n, of=of)
        scale = self._take("weight", weight, torch.float32, (n,))
        target = self._buffer("out", out, torch.bfloat16, n, of=of)
        self._tape.rms_norm(source, scale, n, eps, target, of == "logits")

    def linear(self, x: Tensor, weight: Packed, out: Tensor, *, add: bool = False, of: RowSet = "rows") -> None:
        target = self._buffer("out", out, torch.float32, weight.n, of=of)
        self._product(x, weight, target, add=add, of=of)

    def gated(self, x: Tensor, weight: Packed, out: Tensor) -> None:
        target = self._buffer("out", out, torch.bfloat16, weight.n)
        self._product(x, weight, target, add=False, of="rows")

    def _product(self, x: Tensor, weight: Packed, target: int, *, add: bool, of: RowSet) -> None:
        source = self._buffer("x", x, torch.bfloat16, weight.k, of=of)
        self._kept.append(weight)
        bias = 0 if weight.bias is None else weight.bias.data_ptr()
        panels = (weight.buffer.address, bias, weight.n, weight.k, weight.panels, weight.gated)
        self._tape.linear(source, *panels, add, target, of == "logits")

    def per_head(self, x: Tensor, weight: PackedHeads, out: Tensor) -> None:
        if out.shape[-1] % weight.heads or out.shape[-1] < weight.heads * weight.n:
            raise ModelError(f"out of {out.shape[-1]} elements has no room for {weight.heads} heads of {weight.n}.")
        source = self._buffer("x", x, torch.bfloat16, weight.heads * weight.k)
        target = self._buffer("out", out, torch.bfloat16, out.shape[-1])
        self._kept.append(weight)
        step = out.shape[-1] // weight.heads
        self._tape.per_head(source, weight.buffer.address, weight.heads, weight.n, weight.k, step, target)

    def route(self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: Experts, routing: Routing) -> None:
        if spec.count > MAX_EXPERTS:
            raise ModelError(f"{spec.count} experts are more than the {MAX_EXPERTS} the native kernels support.")
        hidden = x.shape[-1]
        params = (spec.count, spec.active, spec.gating.groups, spec.gating.top_groups, spec.gating.group_best)
        self._tape.route(
            self._buffer("x", x, torch.bfloat16, hidden),
            self._take("router", weight, torch.float32, (spec.count, hidden)),
            0 if bias is None else self._take("correction", bias, torch.float32, (spec.count,)),
            hidden,
            (*params, spec.gating.score == "sigmoid", spec.gating.normalised),
            spec.gating.scale,
            self._buffer("logits", routing.logits, torch.float32, spec.count),
            self._buffer("ids", routing.ids, torch.int32, spec.active),
            self._buffer("shares", routing.shares, torch.float32, spec.active),
        )

    def experts(self, x: Tensor, weight: PackedExperts, spec: Experts, routing: Routing, out: Tensor) -> None:
        if (weight.count, weight.width) != (spec.count, spec.width):
            raise ModelError(f"{weight.count} experts of {weight.width} are packed, not {spec.count} of {spec.width}.")
        pairs = len(routing.ids) * spec.active
        buffers = (
            self._buffer("ids", routing.ids, torch.int32, spec.active),
            self._buffer("shares", routing.shares, torch.float32, spec.active),
            self._take("groups", routing.groups, torch.int32, (pairs + 2 * spec.count + 2,)),
            self._take("gathered", routing.gathered, torch.bfloat16, (pairs, weight.hidden)),
            self._take("inner", routing.inner, torch.bfloat16, (pairs, weight.width)),
        )
        source = self._buffer("x", x, torch.bfloat16, weight.hidden)
        target = self._buffer("out", out, torch.float32, weight.hidden)
        self._kept.append(weight)
        addresses = (weight.into.address, weight.down.address)
        sizes = (weight.hidden, weight.width, spec.count, spec.active, len(routing.ids))
        self._tape.experts(source, *addresses, *sizes, buffers, target)

    def latent(
        self,
        q: Tensor,
        kv: Tensor,
        table: Tensor,
        norm: tuple[Tensor, float],
        cache: CpuLatents,
        layer: int,
        q_nope: Tensor,
        query: Tensor,
    ) -> None:
        self._check_cache(cache, layer)
        rank, rope, heads = cache.rank, self._head_dim - cache.rank, self._heads
        nope = q_nope.shape[-1] // heads
        self._tape.latent(
            self._buffer("q", q, torch.float32, heads * (nope + rope)),
            self._buffer("kv", kv, torch.float32, rank + rope),
            self._take("table", table, torch.float32, (None, rope)),
            len(table),
            self._take("norm", norm[0], torch.float32, (rank,)),
            norm[1],
            cache.view,
            layer,
            heads,
            nope,
            self._buffer("q_nope", q_nope, torch.bfloat16, heads * nope),
            self._buffer("query", query, torch.bfloat16, heads * (rank + rope)),
        )

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

    def attention(
        self, q: Tensor, cache: CpuCache, layer: int, *, window: int | None, out: Tensor, scale: float | None = None
    ) -> None:
        self._check_cache(cache, layer)
        if window is not None and window < 1:
            raise ModelError(f"A sliding window of {window} positions holds no key.")
        source = self._buffer("q", q, torch.bfloat16, self._heads * self._head_dim)
        value_dim = cache.rank if isinstance(cache, CpuLatents) else self._head_dim
        target = self._buffer("out", out, torch.bfloat16, self._heads * value_dim)
        self._tape.attention(source, cache.view, layer, self._heads, window or 0, scale or 0.0, target)

    def select(self, x: Tensor, out: Tensor) -> None:
        n = x.shape[-1]
        source = self._buffer("x", x, torch.float32, n)
        self._tape.select(source, self._buffer("out", out, torch.float32, n, of="logits"), n)

    def argmax(self, logits: Tensor, out: Tensor) -> None:
        n = logits.shape[-1]
        source = self._buffer("logits", logits, torch.float32, n, of="logits")
        if len(out) < len(logits):
            raise ModelError(f"argmax has {len(logits)} rows of logits and room for {len(out)} results.")
        self._tape.argmax(source, self._take("out", out, torch.int32, (None,)), n)

    def run(self, *, rows: int, sequences: int, logits_rows: int) -> None:
        if logits_rows > self._logits_rows:
            raise CacheIntegrityError(f"A step has {logits_rows} logits rows; the buffers hold {self._logits_rows}.")
        try:
            self._tape.run(rows, sequences, logits_rows)
        except IndexError as error:
            raise CacheIntegrityError(f"A step cannot be run: {error}.", "This is a defect in wager.") from error
        except RuntimeError as error:
            raise UsageError(f"A step cannot be run: {error}.", "Run one step at a time.") from error

    def _check_cache(self, cache: CpuCache, layer: int) -> None:
        layers, kv_heads, head_dim = cache.shape
        if (kv_heads, head_dim) != (self._kv_heads, self._head_dim) or not 0 <= layer < layers:
            raise ModelError(
                f"Layer {layer} of a cache {cache.shape} does not fit {self._kv_heads} x {self._head_dim}."
            )
        self._kept.append(cache)
