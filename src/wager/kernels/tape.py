"""The tape: ops recorded once over fixed buffers and replayed for any number of rows in one parallel region.

A tape is to a CPU what a captured CUDA graph is to a GPU: the decoder describes its pass once, in the ops below, and a
step only fills the integer inputs and replays. Every op computes a row with one reduction order, whatever the other
rows of the batch; that is what makes verification bit-equal to plain decoding. All arithmetic is in csrc/: this module
checks the types and shapes of arrays, passes their addresses on and keeps them alive.

Shapes: R rows of the step, S sequences, L logits rows (those whose logits are computed), d head_dim.
Types: `act` is the activation type, bfloat16; residual stream, q/k/v before rotation and logits are float32. Keys and
values are rounded to the cache's type *before* their first use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from wager.arch.layers import Activation, Experts
from wager.errors import CacheIntegrityError, ModelError, UsageError, WagerError
from wager.kernels import _native
from wager.kernels.arrays import BFLOAT16, FLOAT32, INT32, Array, DType, address, zeros
from wager.kernels.cpu_cache import CpuCache, CpuLatents
from wager.kernels.cpu_states import CpuStates
from wager.kernels.inputs import Inputs
from wager.kernels.packed import Packed, PackedExperts, PackedHeads
from wager.types import Draft

RowSet = Literal["rows", "logits"]
"""The rows an op runs over: all rows of the step, or the logits rows that `Tape.select` copied."""

HeadRows = Literal["qkv", "qk", "kv", "q"]
"""The heads that a row has before its rotation: of queries, keys and values, or some of these alone."""

_ANY_POSITION = (1 << 31) - 1
_EVERY_OP = 1 << 31

MAX_EXPERTS = 1024
"""Most experts of a layer that the router takes, as kMaxExperts in csrc/ops.h."""


@dataclass(frozen=True)
class Gates:
    """The two gates of each head of a recurrent layer, from the last columns of its rows. By the delta rule these are b
    and a: step = sigmoid(b), decay = exp(rate * softplus(a + bias)). Else a alone: step = softplus(a + bias), decay =
    exp(rate * step)."""

    rates: Array  # float32 [heads], below zero
    bias: Array  # float32 [heads]
    delta: bool = True


@dataclass(frozen=True)
class Heads:
    """How the heads of a recurrent layer lie in its channels: `key_heads` queries from column `q_at` on, as many keys,
    and values; neighbouring heads share a key head, or with `tiled` every key_heads-th."""

    key_heads: int
    q_at: int
    k_at: int
    v_at: int
    tiled: bool = False


@dataclass(frozen=True)
class Routing:
    """Buffers between `route` and `experts`, allocated once for all layers. A pair is a row and one of its experts."""

    logits: Array  # float32 [max_rows, experts]
    ids: Array  # int32 [max_rows, top_k], ascending in each row
    shares: Array  # float32 [max_rows, top_k]: the weight of each expert's output
    groups: Array  # int32 [max_rows * top_k + 2 * experts + 2]: the pairs in order of their experts
    gathered: Array  # act [max_rows * top_k, hidden]: the pairs' rows in that order
    inner: Array  # act [max_rows * top_k, width]: the values between the projections of their experts

    @classmethod
    def allocate(
        cls, spec: Experts, *, max_rows: int, hidden: int, act: DType, make: Callable[..., Array] = zeros
    ) -> Routing:
        pairs = max_rows * spec.active
        return cls(
            make(max_rows, spec.count),
            make(max_rows, spec.active, dtype=INT32),
            make(max_rows, spec.active),
            make(pairs + 2 * spec.count + 2, dtype=INT32),
            make(pairs, hidden, dtype=act),
            make(pairs, spec.width, dtype=act),
        )

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in self.__dataclass_fields__)


NOISE_KEY: DType = np.dtype(
    [("temperature", np.float64), ("seed", np.uint64), ("position", np.uint32), ("choice", np.uint32)]
)
"""What a guess is drawn with; see `Tape.guess`."""


class GuessedIds:
    """The target's id of each logit: `ids` int [count], or None where logit i is that of id i. `halves` are the ids by
    two, as the noise needs them."""

    def __init__(self, ids: Array | None, *, count: int) -> None:
        self.count = count
        self.own = None if ids is None else np.ascontiguousarray(ids, np.int32)
        self.halves = None if self.own is None else self.own // 2


def _stride(rows: Array) -> int:
    """Elements from one row to the next."""
    return int(rows.strides[0] // rows.itemsize)


def _explained(error: IndexError | RuntimeError) -> WagerError:
    """Why a tape did not run."""
    if isinstance(error, IndexError):
        return CacheIntegrityError(f"A step cannot be run: {error}.", "This is a defect in wager.")
    return UsageError(f"A step cannot be run: {error}.", "Run one step at a time.")


class Tap:
    """A place in a tape where rows can be copied out: a copy that was recorded without a place to copy to."""

    def __init__(self, tape: Tape, copy: int, n: int) -> None:
        self._tape, self._copy, self._n = tape, copy, n
        self._out: Array | None = None

    def copy_to(self, out: Array | None) -> None:
        """From now on every pass copies its rows to out f32 [max_rows, n]; None: no more."""
        self._tape.redirect(self._copy, out, self._n)
        self._out = out  # kept alive


class Tape:
    """Ops over fixed buffers. `out` buffers have room for max_rows; only the rows of the step are written.

    `of` names the rows an op runs over, see RowSet. whole_spans: as of Kernels.tape. A tape is used by one thread at a
    time.
    """

    def __init__(self, pool: Any, isa: Any, inputs: Inputs, *, whole_spans: bool = False) -> None:
        self.inputs = inputs
        self.buffers = inputs.packer()
        self._rows = self._logits_rows = len(inputs.tokens)
        self._kept: list[Any] = [inputs]
        addresses = tuple(address(getattr(inputs, field.name)) for field in fields(Inputs))
        sizes = (self._rows, len(inputs.num_computed_tokens), inputs.block_tables.shape[1])
        self._tape = _native.Tape(pool, isa, addresses, *sizes, whole_spans)
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

    def _vector(self, name: str, array: Array | None, size: int) -> int:
        """The address of f32 [size], 0 for None."""
        return 0 if array is None else self._take(name, array, FLOAT32, (size,))

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

    def _check_columns(self, name: str, array: Array, width: int, *, of: RowSet, dtype: DType = FLOAT32) -> None:
        size = dtype.itemsize
        shaped = array.ndim == 2 and array.shape[1] == width and array.dtype == dtype
        if not shaped or array.strides[1] != size or array.strides[0] % size or array.strides[0] < size * width:
            raise ModelError(
                f"{name} is {array.dtype} {tuple(array.shape)}; it must be contiguous {dtype} rows of {width}.",
                "A tape's buffers are fixed when it is recorded.",
            )
        self._check_room(name, array, of)

    def _check_room(self, name: str, array: Array, of: RowSet) -> None:
        if of == "logits":
            self._logits_rows = min(self._logits_rows, len(array))
        elif len(array) < self._rows:
            raise ModelError(f"{name} has room for {len(array)} rows; the tape's max_rows is {self._rows}.")

    def embed(self, table: Packed, out: Array, *, scale: float = 1.0, tokens: Array | None = None) -> None:
        """out f32 [R, hidden] = table[inputs.tokens] * scale; table [vocab, hidden] from `Kernels.pack`. A quantised
        row is dequantised: scale * code, then + minimum, each rounded to float32. `tokens` int32 [R] are those that a
        `guess` of the same tape wrote, of a vocabulary no larger, where -1 reads row 0."""
        self._kept.append(table)
        target = self._buffer("out", out, FLOAT32, table.k)
        source = 0 if tokens is None else self._guesses("tokens", tokens, INT32, of="rows")
        self._tape.embed(table.buffer.address, table.format, table.n, table.k, source, target, scale)

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
        """out = x / sqrt(mean(x^2) + eps) * weight, in act or float32; in float32 `scale` times that, or times out +
        that when `add`. x f32 [*, n], weight f32 [n]. In float32, x and out may be columns of wider buffers, and the
        same ones; or each of `groups` equal parts of whole rows is normed alone, weight f32 [n / groups]."""
        n = x.shape[-1]
        if out.dtype == FLOAT32:
            size = n // groups
            columns = self._columns("x", x, n, of=of)
            weights, into = self._take("weight", weight, FLOAT32, (size,)), self._columns("out", out, n, of=of)
            if groups > 1 and (n % groups or _stride(x) != n or _stride(out) != n):
                raise ModelError(f"Rows of {n} that lie apart cannot be normed as {groups} groups.")
            strides = (size, size) if groups > 1 else (_stride(x), _stride(out))
            rows = (size, strides[0], groups, eps)
            self._tape.float_norm(columns, weights, *rows, into, strides[1], scale, add, of == "logits")
            return
        source = self._buffer("x", x, FLOAT32, n, of=of)
        weights = self._take("weight", weight, FLOAT32, (n,))
        target = self._buffer("out", out, BFLOAT16, n, of=of)
        self._tape.rms_norm(source, weights, n, eps, target, of == "logits")

    def narrow(self, x: Array, out: Array, *, squared_relu: bool = False, of: RowSet = "rows") -> None:
        """out act = x, or max(x, 0)^2 with `squared_relu`, rounded; x f32 [*, n]."""
        n = x.shape[-1]
        source = self._buffer("x", x, FLOAT32, n, of=of)
        self._tape.narrow(source, self._buffer("out", out, BFLOAT16, n, of=of), n, squared_relu, of == "logits")

    def soft_cap(self, x: Array, cap: float, *, of: RowSet = "rows") -> None:
        """x f32 [*, n] becomes cap * tanh(x / cap)."""
        n = x.shape[-1]
        self._tape.soft_cap(self._buffer("x", x, FLOAT32, n, of=of), n, cap, of == "logits")

    def linear(
        self,
        x: Array,
        weight: Packed,
        out: Array,
        *,
        add: bool = False,
        scale: float = 1.0,
        of: RowSet = "rows",
    ) -> None:
        """out f32 [*, N] = scale * (x W^T (+ bias)), or out += that when `add`; x act [*, K]; weight from
        `Kernels.pack`. out may be columns of a wider buffer. Where weights are quantised, so is x; see
        docs/quantisation.md."""
        target = self._columns("out", out, weight.n, of=of)
        self._product(x, weight, target, _stride(out), "silu", scale, add=add, of=of)

    def gated(
        self,
        x: Array,
        weight: Packed,
        out: Array,
        *,
        activation: Activation = "silu",
        gate_scale: float = 1.0,
        of: RowSet = "rows",
    ) -> None:
        """out act [*, N] = f(gate_scale * (x Wg^T + bg)) * (x Wu^T + bu) with f silu or gelu (by tanh); weight from
        `Kernels.pack_gated`."""
        target = self._buffer("out", out, BFLOAT16, weight.n, of=of)
        self._product(x, weight, target, weight.n, activation, gate_scale, add=False, of=of)

    def _product(
        self,
        x: Array,
        weight: Packed,
        target: int,
        stride: int,
        activation: Activation,
        scale: float,
        *,
        add: bool,
        of: RowSet,
    ) -> None:
        source = self._buffer("x", x, BFLOAT16, weight.k, of=of)
        self._kept.append(weight)
        bias = 0 if weight.bias is None else address(weight.bias)
        panels = (weight.buffer.address, weight.format, bias, weight.n, weight.k, weight.panels, weight.gated)
        self._tape.linear(source, *panels, activation, add, scale, target, stride, of == "logits")

    def per_head(self, x: Array, weight: PackedHeads, out: Array) -> None:
        """out act [R, heads * step]: of each head's `step` elements the first N are its own x [R, heads * K] times its
        own W^T; weight from `Kernels.pack_heads`, N <= step."""
        if out.shape[-1] % weight.heads or out.shape[-1] < weight.heads * weight.n:
            raise ModelError(f"out of {out.shape[-1]} elements has no room for {weight.heads} heads of {weight.n}.")
        source = self._buffer("x", x, BFLOAT16, weight.heads * weight.k)
        target = self._buffer("out", out, BFLOAT16, out.shape[-1])
        self._kept.append(weight)
        step = out.shape[-1] // weight.heads
        matrices = (weight.buffer.address, weight.format, weight.heads, weight.n, weight.k)
        self._tape.per_head(source, *matrices, step, target)

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
        """Select each row's top experts and their shares, by arch.layers.Experts; x act [R, hidden].

        Logits are x W^T in float32 (+ `logit_bias` f32 [experts]), weight f32 [experts, hidden]. Experts are ranked by
        their logits (softmax) or by sigmoid(logit) (sigmoid). `bias` f32 [experts] is added for the selection alone.
        Ties, of experts and of groups, go to the lowest. Shares are multiplied by `scales` f32 [experts]. A row whose
        logits are not finite has shares that are NaN and does not affect the other rows."""
        if spec.count > MAX_EXPERTS:
            raise ModelError(f"{spec.count} experts are more than the {MAX_EXPERTS} the kernels support.")
        hidden = x.shape[-1]
        params = (spec.count, spec.active, spec.gating.groups, spec.gating.top_groups, spec.gating.group_best)
        self._tape.route(
            self._buffer("x", x, BFLOAT16, hidden),
            self._take("router", weight, FLOAT32, (spec.count, hidden)),
            self._vector("router's bias", logit_bias, spec.count),
            self._vector("correction", bias, spec.count),
            self._vector("scales", scales, spec.count),
            hidden,
            (*params, spec.gating.score == "sigmoid", spec.gating.normalised),
            spec.gating.scale,
            self._buffer("logits", routing.logits, FLOAT32, spec.count),
            self._buffer("ids", routing.ids, INT32, spec.active),
            self._buffer("shares", routing.shares, FLOAT32, spec.active),
        )

    def experts(
        self,
        x: Array,
        weight: PackedExperts,
        spec: Experts,
        routing: Routing,
        out: Array,
        *,
        activation: Activation = "silu",
    ) -> None:
        """out f32 [R, hidden] += share * expert(x) for each expert selected by `route`, in order of their ids; x act
        [R, hidden]; weight from `Kernels.pack_experts`. Only the weights of experts that some row selected are read.
        The values between an expert's projections are rounded to act."""
        if (weight.gated, spec.gated) != (activation != "relu2",) * 2:
            raise ModelError(f"Experts {'with' if weight.gated else 'without'} gates have no {activation}.")
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
        biases = [0 if bias is None else address(bias) for bias in (weight.into_bias, weight.down_bias)]
        into = (weight.into.address, weight.into_format, biases[0])
        down = (weight.down.address, weight.down_format, biases[1])
        sizes = (weight.hidden, weight.width, spec.count, spec.active, len(routing.ids))
        self._tape.experts(source, into, down, *sizes, buffers, activation, target)

    def add_gated(self, x: Array, weight: Array, y: Array, out: Array) -> None:
        """out f32 [R, n] += sigmoid(x . weight) * y; x act [R, k], weight f32 [k], y f32 [R, n]."""
        k, n = x.shape[-1], y.shape[-1]
        self._tape.add_gated(
            self._buffer("x", x, BFLOAT16, k),
            self._take("weight", weight, FLOAT32, (k,)),
            k,
            self._buffer("y", y, FLOAT32, n),
            n,
            self._buffer("out", out, FLOAT32, n),
        )

    def latent(
        self,
        q: Array,
        kv: Array,
        table: Array,
        norm: tuple[Array, float],
        cache: CpuCache,
        layer: int,
        q_nope: Array,
        query: Array,
    ) -> None:
        """Latent attention's rotation, and the write of its latent to a cache from `Kernels.latent_cache`.

        q f32 [R, heads * (nope + rope)]: the first part of each head goes to q_nope act [R, heads * nope], the second,
        rotated, to the last `rope` of the head's rank + rope in query act [R, heads * (rank + rope)]. kv f32 [R, rank +
        rope]: RMS norm (weight f32 [rank], eps) of the first part, rotation of the second, then the cache. table f32
        [positions, rope] and the rotation as in `rotary`."""
        heads = self._heads(cache, layer, query)
        if not isinstance(cache, CpuLatents):
            raise ModelError("Latent attention needs a cache of latents.")
        rank, rope = cache.rank, cache.shape[2] - cache.rank
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
        table: Array | None,
        norms: tuple[Array, Array | None, float] | None,
        cache: CpuCache,
        layer: int,
        q: Array,
        *,
        rows: HeadRows = "qkv",
        norm_values: bool = False,
        of: RowSet = "rows",
    ) -> None:
        """Per-head q/k RMS norm (q weight, k weight, eps) if given, rotation, and the write of k, v to the cache.

        qkv f32 [R, (heads + 2 kv_heads) * d] with the heads that `rows` names: without q, q stays as it is; without v,
        values are the keys as they are before norm and rotation; without k and v, nothing is written. With
        `norm_values` values have an RMS norm without weight. table f32 [positions, r] = cos | sin of each angle, [r/2]
        each: the first r <= d dimensions of a head are rotated, half-split (dimension i pairs with i + r/2); without a
        table none. q act [R, heads * d]. Of logits rows, qkv [L, heads * d] has queries alone, which go to their rows
        of q."""
        if of == "logits" and rows != "q":
            raise ModelError("Keys and values are written for all rows.")
        heads, (_, kv_heads, d) = self._heads(cache, layer, q), cache.shape
        heads = heads if "q" in rows else 0
        stored = heads + (len(rows) - ("q" in rows)) * kv_heads
        source = self._buffer("qkv", qkv, FLOAT32, stored * d, of=of)
        angles, positions, rope_dim = 0, _ANY_POSITION, 0
        if table is not None:
            angles, (positions, rope_dim) = self._take("table", table, FLOAT32, (None, None)), table.shape
        if rope_dim % 2 or rope_dim > d:
            raise ModelError(f"A head of {d} dimensions cannot have {rope_dim} of them rotated.")
        weights, eps = (0, 0), 0.0
        if norms is not None:
            q_norm, k_norm, eps = norms
            weights = (self._take("q norm", q_norm, FLOAT32, (d,)), self._vector("k norm", k_norm, d))
        target = self._buffer("q", q, BFLOAT16, q.shape[-1])
        rotated = (source, angles, positions, *weights, eps)
        values = -1 if rows == "q" else stored - kv_heads
        written = (heads, rope_dim, values, norm_values, target)
        self._tape.rotary(*rotated, cache.view, layer, *written, of == "logits")

    def attention(
        self,
        q: Array,
        cache: CpuCache,
        layer: int,
        *,
        window: int | None,
        out: Array,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
        of: RowSet = "rows",
    ) -> None:
        """out act [*, heads * d] for the rows `of` those in q [R, heads * d]: each attends to its own path: cached
        positions below its span's base, then its ancestors in the batch, then itself; scale 1/sqrt(d) if None. `window`
        w keeps positions > p - w. With `soft_cap` c scores become c * tanh(score / c). `sinks` f32 [heads] are scores
        that take part in the softmax and have no value. Keys are taken in path order in tiles of 64 keys (kKeyTile in
        csrc/ops.h) that begin at absolute positions. Over a latent cache d is rank + rope, a value is the first `rank`
        of what is its key, and out is [*, heads * rank]."""
        heads, head_dim = self._heads(cache, layer, q), cache.shape[2]
        if window is not None and window < 1:
            raise ModelError(f"A sliding window of {window} positions holds no key.")
        source = self._buffer("q", q, BFLOAT16, heads * head_dim)
        value_dim = cache.rank if isinstance(cache, CpuLatents) else head_dim
        target = self._buffer("out", out, BFLOAT16, heads * value_dim, of=of)
        sink = self._vector("sinks", sinks, heads)
        options = (window or 0, scale or 0.0, soft_cap or 0.0, sink)
        self._tape.attention(source, cache.view, layer, heads, *options, target, of == "logits")

    def convolve(
        self,
        x: Array,
        weight: Array,
        bias: Array | None,
        gates: Gates | None,
        states: CpuStates,
        layer: int,
        out: Array,
        *,
        silu: bool = True,
    ) -> None:
        """The convolution of a recurrent layer, with silu behind it or nothing, and its gates, if it has some: what
        `recur` reads.

        x and out f32 [2 max_rows, width] have the rows of the step from max_rows on; before them are the accepted
        guesses of the step before, which this copies there. Of out a row is the channels, then step and decay of each
        head. weight f32 [taps, channels], the oldest first. A channel's tap is the row before on the path; sums begin
        with the bias and go from the oldest tap to the newest."""
        shape, rows, heads = states.shape, 2 * self._rows, 0 if gates is None else len(gates.rates)
        self._check_states(states, layer)
        width = shape.channels + 2 * heads
        source = self._take("x", x, FLOAT32, (rows, shape.width))
        target = self._take("out", out, FLOAT32, (rows, width))
        self._tape.replay(states.view, layer, source)
        self._tape.convolve(
            states.view,
            layer,
            source,
            self._take("weight", weight, FLOAT32, (shape.taps, shape.channels)),
            self._vector("bias", bias, shape.channels),
            self._vector("rates", None if gates is None else gates.rates, heads),
            self._vector("gates' bias", None if gates is None else gates.bias, heads),
            heads,
            gates is not None and gates.delta,
            silu,
            target,
        )

    def recur(
        self,
        x: Array,
        heads: Heads,
        states: CpuStates,
        layer: int,
        out: Array,
        *,
        delta: bool = True,
        skip: Array | None = None,
    ) -> None:
        """The recurrence, row by row along each path, in every head: S decays, then S += k u^T, and out f32 [R, heads *
        value_dim] = S^T q (+ skip v, skip f32 [heads]). By the delta rule (arXiv 2412.06464) u = step (v - S^T k), q
        and k are divided by their length, and q by the root of its size too; else (arXiv 2405.21060) u = step v. x f32
        [2 max_rows, ..] from `convolve`. The states behind the known rows are kept; guesses change none."""
        shape = states.shape
        self._check_states(states, layer)
        self._tape.recur(
            states.view,
            layer,
            self._take("x", x, FLOAT32, (2 * self._rows, shape.channels + 2 * shape.heads)),
            self._vector("skip", skip, shape.heads),
            heads.key_heads,
            heads.q_at,
            heads.k_at,
            heads.v_at,
            heads.tiled,
            delta,
            self._buffer("out", out, FLOAT32, shape.heads * shape.value_dim),
        )

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
        """out act [R, heads * n] = rms_norm(x) * weight * silu(gate), by head, or with `gate_first` rms_norm(x *
        silu(gate)) * weight, or without a weight x * silu(gate); x and gate f32, weight f32 [n] or [heads * n]."""
        n, size = x.shape[-1], x.shape[-1] if weight is None else len(weight)
        if n % (16 * heads) or size not in (n, n // heads):
            raise ModelError(f"Rows of {n} are no {heads} heads of a multiple of 16 with a norm of {size}.")
        source, by = self._buffer("x", x, FLOAT32, n), self._buffer("gate", gate, FLOAT32, n)
        scale, target = self._vector("weight", weight, size), self._buffer("out", out, BFLOAT16, n)
        stride = n // heads if size == n else 0
        self._tape.gated_norm(source, by, scale, eps, heads, n // heads, stride, gate_first, target)

    def multiply(self, x: Array, y: Array, out: Array, *, gelu: bool = False, of: RowSet = "rows") -> None:
        """out [*, n] = x * y, or gelu(x) * y, by element; x [*, n] and y [R, n] f32, out f32 or act; those in f32 may
        be columns of wider buffers. Of logits rows x and out have these, y all rows."""
        n, narrow = x.shape[-1], out.dtype == BFLOAT16
        source, by = self._columns("x", x, n, of=of), self._columns("y", y, n, of="rows")
        target = self._buffer("out", out, BFLOAT16, n, of=of) if narrow else self._columns("out", out, n, of=of)
        self._tape.multiply(source, _stride(x), by, _stride(y), n, target, _stride(out), gelu, narrow, of == "logits")

    def add_silu(self, x: Array, y: Array, out: Array) -> None:
        """out act [R, n] = x + silu(y), rounded; x act [R, n], y f32 [R, n], n a multiple of 16. out may be columns of
        a wider buffer."""
        n = x.shape[-1]
        if n % 16:
            raise ModelError(f"Rows of {n} elements cannot be added: the kernels need a multiple of 16.")
        source, by = self._buffer("x", x, BFLOAT16, n), self._buffer("y", y, FLOAT32, n)
        self._check_columns("out", out, n, of="rows", dtype=BFLOAT16)
        self._kept.append(out)
        self._tape.add_silu(source, by, n, address(out), _stride(out))

    def sigmoid_gate(self, x: Array, gate: Array) -> None:
        """x act [R, n] *= sigmoid(gate f32 [R, n]); n a multiple of 16."""
        n = x.shape[-1]
        self._tape.sigmoid_gate(self._buffer("x", x, BFLOAT16, n), self._buffer("gate", gate, FLOAT32, n), n)

    def _check_states(self, states: CpuStates, layer: int) -> None:
        if states.max_rows != self._rows or not 0 <= layer < states.layers:
            raise ModelError(f"States of {states.layers} layers and {states.max_rows} rows do not fit layer {layer}.")
        self._kept.append(states)

    def select(self, x: Array, out: Array) -> None:
        """out f32 [L, n] = x[inputs.logits_indices]."""
        n = x.shape[-1]
        source = self._buffer("x", x, FLOAT32, n)
        self._tape.select(source, self._buffer("out", out, FLOAT32, n, of="logits"), n)

    def copy(self, x: Array, out: Array) -> None:
        """out f32 [R, n] = x [R, n], which is f32 or act; out may be columns of a wider buffer."""
        n, wide = x.shape[-1], x.dtype == BFLOAT16
        source = self._buffer("x", x, BFLOAT16 if wide else FLOAT32, n)
        self._tape.copy(source, self._columns("out", out, n, of="rows"), n, _stride(out), wide)

    def tap(self, x: Array) -> Tap:
        """A place where the rows of x f32 [R, n] can be read. A pass spends nothing on it until it is given an out."""
        n = x.shape[-1]
        return Tap(self, self._tape.copy(self._buffer("x", x, FLOAT32, n), 0, n, n, False), n)

    def redirect(self, copy: int, out: Array | None, n: int) -> None:
        """Let the op of that number copy to `out` from now on; None: nowhere."""
        if out is not None:
            self._check_columns("out", out, n, of="rows")
        self._tape.redirect(copy, 0 if out is None else address(out), n if out is None else _stride(out))

    def argmax(self, logits: Array, out: Array) -> None:
        """out int32 [L]: the lowest id of the largest logit; -1 if any logit of the row is not finite."""
        n = logits.shape[-1]
        source = self._buffer("logits", logits, FLOAT32, n, of="logits")
        if len(out) < len(logits):
            raise ModelError(f"argmax has {len(logits)} rows of logits and room for {len(out)} results.")
        self._tape.argmax(source, self._take("out", out, INT32, (None,)), n)

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
        """tokens int32 [*] are guesses by the rows of logits f32 [*, n], which may be columns of a wider buffer:
        argmax(z / temperature + g), g the noise of each id in `ids` (kernels/noise.py) under the row's key, a NOISE_KEY
        [*], `ahead` positions behind the key's. Greedy at temperature 0. probabilities f32 [*] are those of the tokens
        under the softmax of the logits. -1 and 0 where a logit is not finite."""
        if not 0 < logits.shape[-1] == ids.count:
            raise ModelError(f"Logits of {logits.shape[-1]} ids cannot be those of {ids.count}.")
        source = self._columns("logits", logits, ids.count, of=of)
        noise = self._guesses("keys", keys, NOISE_KEY, of=of)
        target = self._guesses("tokens", tokens, INT32, of=of)
        shares = self._guesses("probabilities", probabilities, FLOAT32, of=of)
        self._kept.append(ids)
        own = (0, 0) if ids.own is None or ids.halves is None else (address(ids.own), address(ids.halves))
        self._tape.guess(source, _stride(logits), ids.count, *own, noise, ahead, target, shares, of == "logits")

    def _guesses(self, name: str, array: Array, dtype: DType, *, of: RowSet) -> int:
        """An array of one element for each row."""
        first = self._take(name, array, dtype, (None,))
        self._check_room(name, array, of)
        return first

    def feed(self, x: Array, out: Array, *, first: int) -> None:
        """How `rounds` go on behind a guess, which is the last op: the ops from the mark `first` on run over a row that
        stands for it, with its row of x [L, n], act or f32, in out f32 [R, n]."""
        n, narrow = out.shape[-1], x.dtype == BFLOAT16
        source = self._buffer("x", x, BFLOAT16 if narrow else FLOAT32, n, of="logits")
        self._tape.feed(first, source, narrow, self._buffer("out", out, FLOAT32, n), n)

    def rounds(
        self, drafter: str, pool: _native.BlockPool, states: Array, *, limits: tuple[int, int, int]
    ) -> _native.HeadDrafts | None:
        """Makes a drafter's drafts by passes that read `states` f32 [max_rows, width] and go on as `feed` says.
        `limits`: rows and sequences of a pass, and positions of a context."""
        width = states.shape[-1]
        return _native.HeadDrafts(
            Draft, drafter, self._tape, pool, self._buffer("states", states, FLOAT32, width), width, limits
        )

    def beside(self) -> Tape:
        """An empty tape that reads the same `inputs`."""
        return Tape(*self._threads, self.inputs)

    @property
    def mark(self) -> int:
        """The place behind all ops that were recorded so far."""
        return int(self._tape.ops)

    def run(self, *, rows: int, sequences: int, logits_rows: int, first: int = 0, last: int = _EVERY_OP) -> None:
        """All ops, or those between two marks."""
        if logits_rows > self._logits_rows:
            raise CacheIntegrityError(f"A step has {logits_rows} logits rows; the buffers hold {self._logits_rows}.")
        try:
            self._tape.run(rows, sequences, logits_rows, first, last)
        except (IndexError, RuntimeError) as error:
            raise _explained(error) from error

    def _heads(self, cache: CpuCache, layer: int, q: Array) -> int:
        """How many heads queries q [R, heads * d] of a layer have, by its cache."""
        layers, kv_heads, head_dim = cache.shape
        heads, rest = divmod(int(q.shape[-1]), head_dim)
        if rest or heads % kv_heads or not 0 <= layer < layers:
            raise ModelError(f"Layer {layer} of a cache {cache.shape} does not fit queries of {q.shape[-1]}.")
        self._kept.append(cache)
        return heads
