"""The interface of the kernels: a tape of ops, recorded once over fixed buffers and replayed for any number of rows.

A tape is to a CPU what a captured CUDA graph is to a GPU: the decoder describes its pass once, in the ops below, and a
step only fills the integer inputs and replays. Every op computes a row with one reduction order, whatever the other
rows of the batch; that is what makes verification bit-equal to plain decoding.

Shapes: R rows of the step, S sequences, L logits rows (those whose logits are computed), d head_dim.
Types: `act` is the kernels' activation type (bfloat16 natively); residual stream, q/k/v before rotation and logits are
float32. Keys and values are rounded to the cache's type *before* their first use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from wager.arch.layers import Experts
from wager.kernels.arrays import INT32, Array, DType, WeightParts, empty, zeros
from wager.kernels.blocks import Matrix
from wager.kernels.inputs import Inputs
from wager.types import Draft, KVDtype, PackedBatch, Span

BLOCK_SIZE = 16
"""Tokens per block of the cache; prefixes are reused block by block."""

KEY_TILE = 64
"""Keys whose scores are weighed together in attention; tiles begin at absolute positions."""

MAX_HEAD_DIM = 512
"""Largest head_dim of the native kernels (a multiple of 16), and largest rank of a latent."""

RowSet = Literal["rows", "logits"]
"""The rows an op runs over: all rows of the step, or the logits rows that `Tape.select` copied."""


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
    def allocate(cls, spec: Experts, *, max_rows: int, hidden: int, act: DType) -> Routing:
        pairs = max_rows * spec.active
        return cls(
            empty(max_rows, spec.count),
            zeros(max_rows, spec.active, dtype=INT32),
            empty(max_rows, spec.active),
            zeros(pairs + 2 * spec.count + 2, dtype=INT32),
            empty(pairs, hidden, dtype=act),
            empty(pairs, spec.width, dtype=act),
        )

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in self.__dataclass_fields__)


class KVCache(Protocol):
    """Keys and values of all layers in blocks of BLOCK_SIZE tokens. A slot is block * BLOCK_SIZE + offset."""

    num_blocks: int

    def move(self, source: Array, target: Array) -> None:
        """Copy slots source[i] -> target[i] (int32, i ascending) in every layer: an accepted tree path becomes
        contiguous."""

    def read(self, slot: int) -> Array:
        """Keys and values of one slot, [layers, 2, kv_heads, head_dim], for tests; a latent cache has one vector per
        layer, [layers, 1, 1, rank + rope]. float32 where the cache holds int8."""

    def clear(self, block: int) -> None:
        """Zero one block (after values that were not finite)."""


class BatchBuffers(Protocol):
    """The inputs of a tape, with a quicker way to write a step to them than a batch of its own and then a copy."""

    packed: PackedBatch | None
    """The batch that they hold, if `pack` wrote it."""
    sizes: tuple[int, int, int, int]
    """Its rows, sequences, rows of logits and blocks of the longest span, while there is one."""

    def pack(
        self, spans: Sequence[Span], drafts: Mapping[str, Draft], block_tables: Mapping[str, Sequence[int]]
    ) -> PackedBatch | None:
        """What verify.pack.pack gives, valid until the next batch is packed there; None for what it does not pack."""


class Tap(Protocol):
    """A place in a tape where rows can be copied out; see `Tape.tap`."""

    def copy_to(self, out: Array | None) -> None:
        """From now on every pass copies its rows to out f32 [max_rows, n]; None: no more."""


class Tape(Protocol):
    """Ops over fixed buffers. `out` buffers have room for max_rows; only the rows of the step are written.

    `of` names the rows an op runs over, see RowSet. A tape is used by one thread at a time.
    """

    inputs: Inputs
    buffers: BatchBuffers | None
    """`inputs` where a batch can be packed straight into them."""

    def embed(self, table: Any, out: Array) -> None:
        """out f32 [R, hidden] = table[inputs.tokens]; table [vocab, hidden] from `Kernels.pack`. A quantised row is
        dequantised: scale * code, then + minimum, each rounded to float32."""

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array, *, of: RowSet = "rows") -> None:
        """out act = x / sqrt(mean(x^2) + eps) * weight; x f32 [*, n], weight f32 [n]."""

    def linear(self, x: Array, weight: Any, out: Array, *, add: bool = False, of: RowSet = "rows") -> None:
        """out f32 [*, N] = x W^T (+ bias), or out += when `add`; x act [*, K]; weight from `Kernels.pack`. out may be
        columns of a wider buffer. Where weights are quantised, so is x; see docs/quantisation.md."""

    def gated(self, x: Array, weight: Any, out: Array, *, of: RowSet = "rows") -> None:
        """out act [*, N] = silu(x Wg^T + bg) * (x Wu^T + bu); weight from `Kernels.pack_gated`."""

    def route(self, x: Array, weight: Array, bias: Array | None, spec: Experts, routing: Routing) -> None:
        """Select each row's top experts and their shares, by arch.feed_forward.Experts; x act [R, hidden].

        Logits are x W^T in float32, weight f32 [experts, hidden], and are compared as they are under softmax; scores
        are, under sigmoid. `bias` f32 [experts] is added for the selection alone. Ties, of experts and of groups, go to
        the lowest. A row whose logits are not finite has shares that are NaN and does not affect the other rows."""

    def experts(self, x: Array, weight: Any, spec: Experts, routing: Routing, out: Array) -> None:
        """out f32 [R, hidden] += share * expert(x) for each expert selected by `route`, in order of their ids; x act
        [R, hidden]; weight from `Kernels.pack_experts`. Only the weights of experts that some row selected are read.
        The values between an expert's projections are rounded to act."""

    def per_head(self, x: Array, weight: Any, out: Array) -> None:
        """out act [R, heads * step]: of each head's `step` elements the first N are its own x [R, heads * K] times its
        own W^T; weight from `Kernels.pack_heads`, N <= step."""

    def latent(
        self,
        q: Array,
        kv: Array,
        table: Array,
        norm: tuple[Array, float],
        cache: KVCache,
        layer: int,
        q_nope: Array,
        query: Array,
    ) -> None:
        """Latent attention's rotation, and the write of its latent to a cache from `Kernels.latent_cache`.

        q f32 [R, heads * (nope + rope)]: the first part of each head goes to q_nope act [R, heads * nope], the second,
        rotated, to the last `rope` of the head's rank + rope in query act [R, heads * (rank + rope)]. kv f32 [R, rank +
        rope]: RMS norm (weight f32 [rank], eps) of the first part, rotation of the second, then the cache. table f32
        [positions, rope] and the rotation as in `rotary`."""

    def rotary(
        self, qkv: Array, table: Array, norms: tuple[Array, Array, float] | None, cache: KVCache, layer: int, q: Array
    ) -> None:
        """Per-head q/k RMS norm (q weight, k weight, eps) if given, rotation, and the write of k, v to the cache.

        qkv f32 [R, (heads + 2 kv_heads) * d]; table f32 [positions, d] = cos | sin of each angle, [d/2] each;
        rotation is half-split (dimension i pairs with i + d/2). q act [R, heads * d]."""

    def attention(
        self,
        q: Array,
        cache: KVCache,
        layer: int,
        *,
        window: int | None,
        out: Array,
        scale: float | None = None,
        of: RowSet = "rows",
    ) -> None:
        """out act [*, heads * d] for the rows `of` those in q [R, heads * d]: each attends to its own path: cached
        positions below its span's base, then its ancestors in the batch, then itself; scale 1/sqrt(d) if None. `window`
        w keeps positions > p - w. Keys are taken in path order in tiles of KEY_TILE that begin at absolute positions.
        Over a latent cache d is rank + rope, a value is the first `rank` of what is its key, and out is [*, heads *
        rank]."""

    def select(self, x: Array, out: Array) -> None:
        """out f32 [L, n] = x[inputs.logits_indices]."""

    def copy(self, x: Array, out: Array) -> None:
        """out f32 [R, n] = x [R, n], which is f32 or act; out may be columns of a wider buffer."""

    def tap(self, x: Array) -> Tap:
        """A place where the rows of x f32 [R, n] can be read. A pass spends nothing on it until it is given an out."""

    def argmax(self, logits: Array, out: Array) -> None:
        """out int32 [L]: the lowest id of the largest logit; -1 if any logit of the row is not finite."""

    def beside(self) -> Tape:
        """An empty tape of the same shape that reads the same `inputs`."""

    def run(self, *, rows: int, sequences: int, logits_rows: int) -> None:
        """Replay with the present contents of `inputs`.

        CacheIntegrityError if they are inconsistent: a path that skips a position, a slot other than the one that
        the block table of its sequence has for the row, a block that two sequences write to (natively). UsageError
        while another thread runs the tape (natively).
        """


class Kernels(Protocol):
    """A backend: packs weights, allocates caches and records tapes."""

    name: str
    reason: str
    act: DType
    weight_layout: int | None
    """Version of the layout of packed weights, which changes when their bytes do; None: there is none to be kept."""

    @property
    def threads(self) -> int: ...

    def pack(self, weight: Matrix, bias: Array | None = None) -> Any:
        """weight [N, K] (any float type, or quantised) in the backend's layout, with its bias [N]."""

    def pack_gated(self, gate: Matrix, up: Matrix, *, bias: tuple[Array, Array] | None = None) -> Any:
        """gate and up [N, K], of one format, in one layout, so that their product needs no round trip through
        memory. `bias` is the gate's and the up projection's, [N] each."""

    def pack_experts(self, parts: Iterable[tuple[Matrix, Matrix, Matrix]], *, count: int) -> Any:
        """Gate and up [width, hidden] and down [hidden, width] of `count` experts in order, taken one by one; all gates
        and ups of one format, and all downs."""

    def pack_heads(self, weight: Sequence[Matrix] | Array) -> Any:
        """One matrix [N, K] per head, all of one format, for `per_head`."""

    def dismantle(self, weight: Any) -> WeightParts:
        """A packed weight in parts that a file can hold; only with a `weight_layout`."""

    def assemble(self, parts: WeightParts) -> Any:
        """The packed weight of such parts, which uses their arrays as they are: they may be read-only. ValueError,
        KeyError or TypeError if they are not those of a packed weight."""

    def matrix_bytes(self, n: int, k: int, format_name: str | None) -> int:
        """Bytes of a packed matrix [n, k] of floats (None) or of that block format."""

    def cache(
        self, *, layers: int, num_blocks: int, kv_heads: int, head_dim: int, kv_dtype: KVDtype = "bf16"
    ) -> KVCache:
        """A cache of keys and values in `act`, or (q8) each as whole numbers of -127 to 127 times a float32 scale of
        its own: x / s rounded to nearest even, s the largest |x| / 127. Below 1e-30 all are zero; where some x is not
        finite the scale is NaN, and so is what attends to it."""

    def latent_cache(self, *, layers: int, num_blocks: int, rank: int, rope: int) -> KVCache:
        """A cache of one vector of rank + rope per position and layer, for `latent`; its tape has kv_heads 1."""

    def tape(
        self, *, max_rows: int, max_sequences: int, max_blocks: int, heads: int, kv_heads: int, head_dim: int
    ) -> Tape: ...

    def sample(
        self, logits: Array, rows: Array, temperatures: Array, seeds: Array, positions: Array, choices: Array
    ) -> Array:
        """argmax(z / T + g) over the full vocabulary for the given rows of logits [L, V]; see kernels/noise.py.

        rows, positions, choices int32 [n]: row of `logits`, absolute position of the token to sample, index of the
        sequence among the n of its request; temperatures float64 [n]; seeds int64 [n] (bit pattern of the unsigned
        seed). Returns int32 [n], -1 for a row with a logit that is not finite. Ties go to the lowest id.
        `kernels.sampling.sample_rows` packs these arguments."""


@dataclass(frozen=True)
class TargetOutput:
    """The result of a pass: views into the target's buffers, valid until its next pass."""

    logits: Array  # float32 [L, vocabulary]
    greedy_tokens: Array  # int32 [L]: the greedy token of each logits row, -1 where logits are not finite
    last_hidden: Array | None = None  # float32 [L, hidden]: the residual stream of each logits row before the last norm
    taps: Mapping[int, Array] = field(default_factory=dict)
    """float32 [R, hidden] by layer id: the residual stream after that many layers (0: the embeddings), for those that
    are tapped. These are the numbers that heads are trained with, `hidden_states[i]` of transformers (but behind all
    layers the stream before the last norm)."""


class Target(Protocol):
    """The model that the engine verifies with: the decoder, or the closed-form target of `testing`."""

    vocab: int
    max_rows: int
    max_sequences: int
    cache: KVCache

    def forward(self, batch: PackedBatch) -> TargetOutput:
        """One ragged pass; writes the rows' keys and values at their slots."""


@runtime_checkable
class TappedTarget(Protocol):
    """A target whose passes can give the residual stream between its layers."""

    def tap(self, layers: Collection[int]) -> None:
        """From now on passes give it after so many layers, and after no other number: TargetOutput.taps."""
