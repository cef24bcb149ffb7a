"""The native tape: checks the types and shapes of arrays, passes their addresses to the C++ side, keeps them alive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wager.arch.layers import Experts
from wager.errors import CacheIntegrityError, ModelError, UsageError
from wager.kernels import _native
from wager.kernels.arrays import BFLOAT16, FLOAT32, INT32, Array, DType, address
from wager.kernels.base import Routing, RowSet
from wager.kernels.cpu_cache import CpuCache, CpuLatents
from wager.kernels.inputs import Inputs
from wager.kernels.packed import Packed, PackedExperts, PackedHeads
from wager.kernels.packer import input_packer

MAX_EXPERTS = 1024
"""Most experts of a layer that the native router takes."""


class CpuTap:
    """A copy that was recorded without a place to copy to."""

    def __init__(self, tape: CpuTape, copy: int, n: int) -> None:
        self._tape, self._copy, self._n = tape, copy, n
        self._out: Array | None = None

    def copy_to(self, out: Array | None) -> None:
        self._tape.redirect(self._copy, out, self._n)
        self._out = out  # kept alive


def _stride(rows: Array) -> int:
    """Elements from one row to the next."""
    return int(rows.strides[0] // rows.itemsize)


class CpuTape:
    """Ops recorded once and replayed in one parallel region; see kernels/base.py for what each computes."""

    def __init__(self, pool: Any, isa: Any, inputs: Inputs, *, heads: int, kv_heads: int, head_dim: int) -> None:
        if heads % kv_heads:
            raise ModelError(f"{heads} query heads cannot share {kv_heads} key-value heads evenly.")
        self.inputs = inputs
        self.buffers = input_packer(inputs)
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim
        self._rows = self._logits_rows = len(inputs.tokens)
        self._kept: list[Any] = [inputs]
        names = (
            "tokens",
            "positions",
            "parents",
            "slot_mapping",
            "seq_ids",
            "logits_indices",
            "query_start_loc",
            "num_computed_tokens",
            "block_tables",
        )
        addresses = tuple(address(getattr(inputs, name)) for name in names)
        sizes = (self._rows, len(inputs.num_computed_tokens), inputs.block_tables.shape[1])
        self._tape = _native.Tape(pool, isa, addresses, *sizes, heads, kv_heads, head_dim)
        self._threads = pool, isa

    def _take(self, name: str, array: Array, dtype: DType, shape: Sequence[int | None]) -> int:
        """The address of an array of this type and shape (None: any size); ModelError if it is another."""
        fits = array.ndim == len(shape) and all(w is None or w == s for w, s in zip(shape, array.shape, strict=True))
        if array.dtype != dtype or not fits or not array.flags.c_contiguous:
            expected = ", ".join("any" if w is None else str(w) for w in shape)
            raise ModelError(
                f"{name} is {array.dtype} {tuple(array.shape)}; it must be contiguous {dtype} [{expected}].",
                "A tape's buffers are fixed when it is recorded.",
            )
        self._kept.append(array)
        return address(array)

    def _buffer(self, name: str, array: Array, dtype: DType, width: int, *, of: RowSet = "rows") -> int:
        """A buffer of rows: room for max_rows, or for as many logits rows as a step may have."""
        first = self._take(name, array, dtype, (None, width))
        self._check_room(name, array, of)
        return first

    def _columns(self, name: str, array: Array, width: int, *, of: RowSet) -> int:
        """As `_buffer` in float32, but rows may be columns of a wider buffer."""
        self._check_columns(name, array, width, of=of)
        self._kept.append(array)
        return address(array)

    def _check_columns(self, name: str, array: Array, width: int, *, of: RowSet) -> None:
        size = FLOAT32.itemsize
        shaped = array.ndim == 2 and array.shape[1] == width and array.dtype == FLOAT32
        if not shaped or array.strides[1] != size or array.strides[0] % size or array.strides[0] < size * width:
            raise ModelError(
                f"{name} is {array.dtype} {tuple(array.shape)}; it must be contiguous float32 rows of {width}.",
                "A tape's buffers are fixed when it is recorded.",
            )
        self._check_room(name, array, of)

    def _check_room(self, name: str, array: Array, of: RowSet) -> None:
        if of == "logits":
            self._logits_rows = min(self._logits_rows, len(array))
        elif len(array) < self._rows:
            raise ModelError(f"{name} has room for {len(array)} rows; the tape's max_rows is {self._rows}.")

    def embed(self, table: Packed, out: Array) -> None:
        self._kept.append(table)
        target = self._buffer("out", out, FLOAT32, table.k)
        self._tape.embed(table.buffer.address, table.format, table.n, table.k, target)

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array, *, of: RowSet = "rows") -> None:
        n = x.shape[-1]
        source = self._buffer("x", x, FLOAT32, n, of=of)
        scale = self._take("weight", weight, FLOAT32, (n,))
        target = self._buffer("out", out, BFLOAT16, n, of=of)
        self._tape.rms_norm(source, scale, n, eps, target, of == "logits")

    def linear(self, x: Array, weight: Packed, out: Array, *, add: bool = False, of: RowSet = "rows") -> None:
        target = self._columns("out", out, weight.n, of=of)
        self._product(x, weight, target, _stride(out), add=add, of=of)

    def gated(self, x: Array, weight: Packed, out: Array, *, of: RowSet = "rows") -> None:
        target = self._buffer("out", out, BFLOAT16, weight.n, of=of)
        self._product(x, weight, target, weight.n, add=False, of=of)

    def _product(self, x: Array, weight: Packed, target: int, stride: int, *, add: bool, of: RowSet) -> None:
        source = self._buffer("x", x, BFLOAT16, weight.k, of=of)
        self._kept.append(weight)
        bias = 0 if weight.bias is None else address(weight.bias)
        panels = (weight.buffer.address, weight.format, bias, weight.n, weight.k, weight.panels, weight.gated)
        self._tape.linear(source, *panels, add, target, stride, of == "logits")

    def per_head(self, x: Array, weight: PackedHeads, out: Array) -> None:
        if out.shape[-1] % weight.heads or out.shape[-1] < weight.heads * weight.n:
            raise ModelError(f"out of {out.shape[-1]} elements has no room for {weight.heads} heads of {weight.n}.")
        source = self._buffer("x", x, BFLOAT16, weight.heads * weight.k)
        target = self._buffer("out", out, BFLOAT16, out.shape[-1])
        self._kept.append(weight)
        step = out.shape[-1] // weight.heads
        matrices = (weight.buffer.address, weight.format, weight.heads, weight.n, weight.k)
        self._tape.per_head(source, *matrices, step, target)

    def route(self, x: Array, weight: Array, bias: Array | None, spec: Experts, routing: Routing) -> None:
        if spec.count > MAX_EXPERTS:
            raise ModelError(f"{spec.count} experts are more than the {MAX_EXPERTS} the native kernels support.")
        hidden = x.shape[-1]
        params = (spec.count, spec.active, spec.gating.groups, spec.gating.top_groups, spec.gating.group_best)
        self._tape.route(
            self._buffer("x", x, BFLOAT16, hidden),
            self._take("router", weight, FLOAT32, (spec.count, hidden)),
            0 if bias is None else self._take("correction", bias, FLOAT32, (spec.count,)),
            hidden,
            (*params, spec.gating.score == "sigmoid", spec.gating.normalised),
            spec.gating.scale,
            self._buffer("logits", routing.logits, FLOAT32, spec.count),
            self._buffer("ids", routing.ids, INT32, spec.active),
            self._buffer("shares", routing.shares, FLOAT32, spec.active),
        )

    def experts(self, x: Array, weight: PackedExperts, spec: Experts, routing: Routing, out: Array) -> None:
        if (weight.count, weight.width) != (spec.count, spec.width):
            raise ModelError(f"{weight.count} experts of {weight.width} are packed, not {spec.count} of {spec.width}.")
        pairs = len(routing.ids) * spec.active
        buffers = (
            self._buffer("ids", routing.ids, INT32, spec.active),
            self._buffer("shares", routing.shares, FLOAT32, spec.active),
            self._take("groups", routing.groups, INT32, (pairs + 2 * spec.count + 2,)),
            self._take("gathered", routing.gathered, BFLOAT16, (pairs, weight.hidden)),
            self._take("inner", routing.inner, BFLOAT16, (pairs, weight.width)),
        )
        source = self._buffer("x", x, BFLOAT16, weight.hidden)
        target = self._buffer("out", out, FLOAT32, weight.hidden)
        self._kept.append(weight)
        matrices = ((weight.into.address, weight.into_format), (weight.down.address, weight.down_format))
        sizes = (weight.hidden, weight.width, spec.count, spec.active, len(routing.ids))
        self._tape.experts(source, *matrices, *sizes, buffers, target)

    def latent(
        self,
        q: Array,
        kv: Array,
        table: Array,
        norm: tuple[Array, float],
        cache: CpuLatents,
        layer: int,
        q_nope: Array,
        query: Array,
    ) -> None:
        self._check_cache(cache, layer)
        rank, rope, heads = cache.rank, self._head_dim - cache.rank, self._heads
        nope = q_nope.shape[-1] // heads
        self._tape.latent(
            self._buffer("q", q, FLOAT32, heads * (nope + rope)),
            self._buffer("kv", kv, FLOAT32, rank + rope),
            self._take("table", table, FLOAT32, (None, rope)),
            len(table),
            self._take("norm", norm[0], FLOAT32, (rank,)),
            norm[1],
            cache.view,
            layer,
            heads,
            nope,
            self._buffer("q_nope", q_nope, BFLOAT16, heads * nope),
            self._buffer("query", query, BFLOAT16, heads * (rank + rope)),
        )

    def rotary(
        self,
        qkv: Array,
        table: Array,
        norms: tuple[Array, Array, float] | None,
        cache: CpuCache,
        layer: int,
        q: Array,
    ) -> None:
        d, width = self._head_dim, (self._heads + 2 * self._kv_heads) * self._head_dim
        self._check_cache(cache, layer)
        source = self._buffer("qkv", qkv, FLOAT32, width)
        angles = self._take("table", table, FLOAT32, (None, d))
        weights, eps = (0, 0), 0.0
        if norms is not None:
            q_norm, k_norm, eps = norms
            weights = (
                self._take("q norm", q_norm, FLOAT32, (d,)),
                self._take("k norm", k_norm, FLOAT32, (d,)),
            )
        target = self._buffer("q", q, BFLOAT16, self._heads * d)
        self._tape.rotary(source, angles, len(table), *weights, eps, cache.view, layer, self._heads, target)

    def attention(
        self,
        q: Array,
        cache: CpuCache,
        layer: int,
        *,
        window: int | None,
        out: Array,
        scale: float | None = None,
        of: RowSet = "rows",
    ) -> None:
        self._check_cache(cache, layer)
        if window is not None and window < 1:
            raise ModelError(f"A sliding window of {window} positions holds no key.")
        source = self._buffer("q", q, BFLOAT16, self._heads * self._head_dim)
        value_dim = cache.rank if isinstance(cache, CpuLatents) else self._head_dim
        target = self._buffer("out", out, BFLOAT16, self._heads * value_dim, of=of)
        self._tape.attention(source, cache.view, layer, self._heads, window or 0, scale or 0.0, target, of == "logits")

    def select(self, x: Array, out: Array) -> None:
        n = x.shape[-1]
        source = self._buffer("x", x, FLOAT32, n)
        self._tape.select(source, self._buffer("out", out, FLOAT32, n, of="logits"), n)

    def copy(self, x: Array, out: Array) -> None:
        n, wide = x.shape[-1], x.dtype == BFLOAT16
        source = self._buffer("x", x, BFLOAT16 if wide else FLOAT32, n)
        self._tape.copy(source, self._columns("out", out, n, of="rows"), n, _stride(out), wide)

    def tap(self, x: Array) -> CpuTap:
        n = x.shape[-1]
        return CpuTap(self, self._tape.copy(self._buffer("x", x, FLOAT32, n), 0, n, n, False), n)

    def redirect(self, copy: int, out: Array | None, n: int) -> None:
        """Let the op of that number copy to `out` from now on; None: nowhere."""
        if out is None:
            self._tape.redirect(copy, 0, n)
        else:
            self._check_columns("out", out, n, of="rows")
            self._tape.redirect(copy, address(out), _stride(out))

    def argmax(self, logits: Array, out: Array) -> None:
        n = logits.shape[-1]
        source = self._buffer("logits", logits, FLOAT32, n, of="logits")
        if len(out) < len(logits):
            raise ModelError(f"argmax has {len(logits)} rows of logits and room for {len(out)} results.")
        self._tape.argmax(source, self._take("out", out, INT32, (None,)), n)

    def beside(self) -> CpuTape:
        sizes = {"heads": self._heads, "kv_heads": self._kv_heads, "head_dim": self._head_dim}
        return CpuTape(*self._threads, self.inputs, **sizes)

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
