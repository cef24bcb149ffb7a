"""Block drafters, DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147): all guesses of a round in one pass over a
block of slots.

Every layer projects the target's fused states of all known positions with its own matrices, once, to the keys and
values of the context. The slots attend to these and to each other, in both directions, which the attention of a tape
cannot; so it is computed here, in numpy, between the products on the kernels. BLAS is not called: its threads would
spin beside those of the kernels and make the next pass several times slower.

Read are the formats of vLLM's speculators (`speculators_model_type` dflash or dspark) and of DSpark's own checkpoints
(flat, layer ids one lower). Layers of a sliding window are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from wager.arch.config_keys import ConfigKeys, short_repr
from wager.arch.spec import ModelSpec
from wager.errors import ModelError
from wager.kernels.arrays import FLOAT32, INT32, Array, empty
from wager.kernels.base import BLOCK_SIZE, TargetOutput
from wager.kernels.cpu import Kernels
from wager.models.head_files import (
    TREE_ROWS,
    CheckedLayers,
    HeadFiles,
    HeadWeights,
    TargetLogits,
    check_taps,
    read_layers,
    row_tape,
    run_rows,
)
from wager.models.transformer import Decoder
from wager.models.weights import Weights

_MOST_SLOTS = 64


@dataclass(frozen=True)
class CheckedBlock(CheckedLayers):
    """A block drafter whose files were checked. A block has `slots` slots, the last token and masks of `mask_token`;
    `anchor_guesses`: every slot guesses the token after it, else all but the first guess the token in their place.
    `markov_rank` 0: there is no Markov head."""

    slots: int
    mask_token: int
    anchor_guesses: bool
    markov_rank: int
    confidence: bool
    confidence_reads_markov: bool

    @property
    def depth(self) -> int:
        """Guesses of a round."""
        return self.slots if self.anchor_guesses else self.slots - 1

    def workspace_bytes(self, kernels: Kernels, *, rows: int, sequences: int, context: int) -> int:
        act, attention = kernels.act.itemsize, self.attention
        hidden, keys = self.decoder.hidden, attention.kv_heads * attention.head_dim
        row = 4 * (2 * hidden + self.state_width + 2 * keys * self.decoder.num_layers + attention.qkv_width)
        row += act * (2 * hidden + self.state_width + attention.output_width + self.inner)
        return rows * (row + 4 * len(self.vocabulary.ids)) + 4 * context * attention.rope_dim

    def token_bytes(self, kernels: Kernels) -> int:
        """Bytes of keys and values per position, in float32, with the room they grow into."""
        return 2 * 4 * self.decoder.num_layers * self.attention.cache_width

    def load(self, decoder: Decoder, target: Weights, *, num_blocks: int) -> BlockHead:
        return BlockHead(self, decoder, target)


def open_block(files: HeadFiles, target: ModelSpec, *, quantised: bool) -> CheckedBlock:
    """The drafter in some files; all tensors' names and shapes are checked. ModelError names what does not fit."""
    files.rename({r"model\.": ""})
    keys, flat = files.keys, files.flat
    kind = keys.text("speculators_model_type")
    if not flat and kind not in ("dflash", "dspark"):
        raise ModelError(
            f"The head in {files.where} is a {short_repr(kind)} head.", "A dflash or dspark head is wanted here."
        )
    layers = read_layers(files, target)
    if any(getattr(each.attention, "window", None) for each in layers["decoder"].layers):
        raise ModelError(f"The head in {files.where} has layers of a sliding window, which are not supported.")
    native = keys.section("dflash_config") if flat else keys
    slots = keys.integer("block_size", default=native.integer("block_size", default=8), most=_MOST_SLOTS)
    keys.refuse("markov_head_type", unless=("vanilla",))
    head = CheckedBlock(
        files,
        quantised,
        **layers,
        taps=_taps(keys, native, target, flat=flat),
        slots=slots,
        mask_token=_mask(keys, native, target),
        anchor_guesses=keys.flag("sample_from_anchor", default=flat and "markov_rank" in files.config),
        markov_rank=0 if keys.get("markov_rank") is None else keys.count("markov_rank"),
        confidence=keys.flag("enable_confidence_head"),
        confidence_reads_markov=keys.flag("confidence_head_with_markov"),
    )
    if head.depth < 1:
        raise ModelError(f"block_size = {slots} in {keys.where} leaves no slot to guess in.")
    hidden, rank = head.decoder.hidden, head.markov_rank
    further: dict[str, tuple[int, ...]] = {"hidden_norm.weight": (hidden,)}
    if rank:
        further["markov_head.markov_w1.weight"] = (target.vocab, rank)
        further["markov_head.markov_w2.weight"] = (len(head.vocabulary.ids), rank)
    if head.confidence:
        further["confidence_head.proj.weight"] = (1, hidden + (rank if head.confidence_reads_markov else 0))
        further["confidence_head.proj.bias"] = (1,)
    head.check_tensors(further, first_width=hidden)
    return head


def _taps(keys: ConfigKeys, native: ConfigKeys, target: ModelSpec, *, flat: bool) -> tuple[int, ...]:
    name = "target_layer_ids" if flat else "aux_hidden_state_layer_ids"
    found = keys.integers(name) or native.integers(name)
    if not found:
        raise ModelError(f"{keys.where} lacks {name!r}.", "The head's configuration is damaged or incomplete.")
    taps = tuple(tap + 1 if flat else tap for tap in found)
    check_taps(keys, taps, target)
    return taps


def _mask(keys: ConfigKeys, native: ConfigKeys, target: ModelSpec) -> int:
    section = keys if keys.get("mask_token_id") is not None else native
    ids = section.token_ids("mask_token_id", vocab=target.vocab)
    if len(ids) != 1:
        raise ModelError(f"{keys.where} lacks 'mask_token_id'.", "The head's configuration is damaged or incomplete.")
    return ids[0]


@dataclass
class BlockContext:
    """Keys (rotated) and values of one sequence's known positions, `count` of them behind `origin`: float32 [layers, 2,
    kv_heads, room, head_dim]."""

    origin: int = 0
    count: int = 0
    values: Array = field(default_factory=lambda: np.zeros((0, 2, 0, 0, 0), np.float32))

    @property
    def known(self) -> Array:
        return self.values[:, :, :, : self.count]


class BlockHead:
    """A block drafter for the target `decoder`, whose embedding and output matrix it uses where it has none.

    `conditions`: its logits depend on the token before; `logits` gives at most `max_logits_rows` rows at a time.
    """

    def __init__(self, head: CheckedBlock, decoder: Decoder, target: Weights) -> None:
        weights = head.weights(decoder.kernels)
        act, vocabulary = decoder.kernels.act, head.vocabulary
        self._head, self._details, self._attention = head, head.decoder.details, head.attention
        self.taps, self.state_width, self.state_dtype = head.taps, head.state_width, act
        self.vocab, self.max_depth = decoder.vocab, head.depth
        self.max_positions = decoder.max_blocks * BLOCK_SIZE + head.slots
        self.max_sequences = max(1, decoder.max_rows // head.slots)
        self.max_logits_rows = max(self.max_sequences, head.slots, TREE_ROWS)
        self.conditions = head.markov_rank > 0
        self._rotation = self._details.rope.table(self.max_positions, self._attention.rope_dim)
        self._record_context(weights, decoder.max_rows)
        rows = self.max_sequences * head.slots
        self._record_layers(weights, decoder, rows)
        self._logits = empty(rows, len(vocabulary.ids))
        self._output = row_tape(weights, rows)
        self._output.rms_norm(self._x, weights.vector("norm.weight"), self._details.norm_eps, self._normed)
        self._output.linear(self._normed, head.output(weights, decoder, target), self._logits)
        self._target = TargetLogits(vocabulary, self.max_logits_rows)
        self._codes = weights.matrix("markov_head.markov_w1.weight") if head.markov_rank else None
        if head.markov_rank:
            self._code = empty(self.max_logits_rows, head.markov_rank, dtype=act)
            self._further = empty(self.max_logits_rows, len(vocabulary.ids))
            self._markov = row_tape(weights, self.max_logits_rows)
            self._markov.linear(self._code, weights.pack(["markov_head.markov_w2.weight"]), self._further)
        self._confidence = (
            (weights.vector("confidence_head.proj.weight")[0], float(weights.vector("confidence_head.proj.bias")[0]))
            if head.confidence
            else None
        )

    # ---- recording -------------------------------------------------------------------------------------------------

    def _record_context(self, weights: HeadWeights, rows: int) -> None:
        """A tape from tapped states to each layer's keys | values of them."""
        head, act = self._head, weights.kernels.act
        hidden, keys = head.decoder.hidden, self._attention.kv_heads * self._attention.head_dim
        self._states = empty(rows, head.state_width, dtype=act)
        fused, normed = empty(rows, hidden), empty(rows, hidden, dtype=act)
        self._context = row_tape(weights, rows)
        self._context.linear(self._states, weights.pack(["fc.weight"]), fused)
        self._context.rms_norm(fused, weights.vector("hidden_norm.weight"), self._details.norm_eps, normed)
        self._known = [empty(rows, 2 * keys) for _ in range(head.decoder.num_layers)]
        for layer, out in enumerate(self._known):
            names = [f"layers.{layer}.self_attn.{part}_proj.weight" for part in "kv"]
            self._context.linear(normed, weights.pack(names), out)

    def _record_layers(self, weights: HeadWeights, decoder: Decoder, rows: int) -> None:
        """Tapes of the layers over the slots of several blocks: one up to the attention, one behind it."""
        head, act, eps = self._head, weights.kernels.act, self._details.norm_eps
        hidden = head.decoder.hidden
        self._x, self._normed = empty(rows, hidden), empty(rows, hidden, dtype=act)
        self._qkv = empty(rows, self._attention.qkv_width)
        self._mixed = empty(rows, self._attention.output_width, dtype=act)
        inner = empty(rows, head.inner, dtype=act)
        self._embed = row_tape(weights, rows)
        self._embed.embed(head.embedding(weights, decoder), self._x)
        self._layers = []
        for layer in range(head.decoder.num_layers):
            attention, mlp = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
            before, after = row_tape(weights, rows), row_tape(weights, rows)
            before.rms_norm(self._x, weights.vector(f"layers.{layer}.input_layernorm.weight"), eps, self._normed)
            qkv = weights.pack([f"{attention}.{part}_proj.weight" for part in "qkv"])
            before.linear(self._normed, qkv, self._qkv)
            after.linear(self._mixed, weights.pack([f"{attention}.o_proj.weight"]), self._x, add=True)
            norm = weights.vector(f"layers.{layer}.post_attention_layernorm.weight")
            after.rms_norm(self._x, norm, eps, self._normed)
            gated = weights.pack_gated(f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")
            after.gated(self._normed, gated, inner)
            after.linear(inner, weights.pack([f"{mlp}.down_proj.weight"]), self._x, add=True)
            norms = [weights.vector(f"{attention}.{part}_norm.weight") for part in "qk" if self._details.qk_norm]
            self._layers.append((before, after, norms))

    # ---- running ---------------------------------------------------------------------------------------------------

    def extend(self, context: BlockContext, states: Array) -> None:
        """Add the next known positions, whose tapped states are [n, state_width]."""
        for first in range(0, len(states), len(self._states)):
            part = states[first : first + len(self._states)]
            rows, start = len(part), context.origin + context.count
            self._states[:rows] = part
            run_rows(self._context, rows)
            self._make_room(context, rows)
            table, place = self._rotation[start : start + rows], slice(context.count, context.count + rows)
            for layer, known in enumerate(self._known):
                keys, values = np.split(known[:rows], 2, axis=1)
                context.values[layer, 0, :, place] = self._keys(layer, keys, table)
                context.values[layer, 1, :, place] = split(values, self._attention.kv_heads)
            context.count += rows

    def _make_room(self, context: BlockContext, rows: int) -> None:
        room, attention = context.values.shape[3], self._attention
        if context.count + rows > room:
            room = max(2 * room, context.count + rows, 64)
            shape = (self._head.decoder.num_layers, 2, attention.kv_heads, room, attention.head_dim)
            grown = np.zeros(shape, np.float32)
            if context.count:
                grown[:, :, :, : context.count] = context.known
            context.values = grown

    def run(self, contexts: Sequence[BlockContext], anchors: Sequence[int]) -> None:
        """One pass over a block behind each context, whose first slot has the token `anchors[i]`."""
        slots, rows = self._head.slots, len(anchors) * self._head.slots
        tokens = np.full((len(anchors), slots), self._head.mask_token, np.int32)
        tokens[:, 0] = anchors
        self._embed.inputs.tokens[:rows] = tokens.reshape(-1)
        run_rows(self._embed, rows)
        for layer, (before, after, _) in enumerate(self._layers):
            run_rows(before, rows)
            for block, context in enumerate(contexts):
                own, start = slice(block * slots, (block + 1) * slots), context.origin + context.count
                table = self._rotation[start : start + slots]
                self._mixed[own] = self._attend(layer, self._qkv[own], context.known[layer], table)
            run_rows(after, rows)
        run_rows(self._output, rows)

    def _attend(self, layer: int, qkv: Array, context: Array, table: Array) -> Array:
        """Every slot over the `context` [2, kv_heads, n, head_dim] and all slots of its block; `table` are the
        rotations [slots, head_dim]."""
        attention = self._attention
        size, slots = attention.head_dim, len(qkv)
        ends = [attention.query_width, attention.query_width + attention.kv_heads * size]
        own_queries, own_keys, own_values = np.split(qkv, ends, axis=1)
        queries = split(own_queries, attention.heads)
        if norms := self._layers[layer][2]:
            queries = self._head_norm(queries, norms[0])
        keys = np.concatenate([context[0], self._keys(layer, own_keys, table)], axis=1)
        values = np.concatenate([context[1], split(own_values, attention.kv_heads)], axis=1)
        grouped = rotated(queries, table).reshape(attention.kv_heads, -1, size)  # the queries that share a kv head
        scores = np.einsum("kqd,knd->kqn", grouped, keys) * np.float32(size**-0.5)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = np.einsum("kqn,knd->kqd", scores / scores.sum(axis=-1, keepdims=True), values)
        found: Array = mixed.reshape(attention.heads, slots, size).swapaxes(0, 1).reshape(slots, -1)
        return found

    def _keys(self, layer: int, keys: Array, table: Array) -> Array:
        """A layer's keys [n, kv_heads * d] by head, normed and rotated."""
        found, norms = split(keys, self._attention.kv_heads), self._layers[layer][2]
        return rotated(self._head_norm(found, norms[1]) if norms else found, table)

    def _head_norm(self, x: Array, weight: Array) -> Array:
        found: Array = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + self._details.norm_eps) * weight
        return found

    # ---- results ---------------------------------------------------------------------------------------------------

    def guess_row(self, block: int, step: int) -> int:
        """The row whose logits are guess `step` of a block."""
        return block * self._head.slots + step + (0 if self._head.anchor_guesses else 1)

    def logits(self, rows: Sequence[int], before: Sequence[int]) -> TargetOutput:
        """The logits of some rows of the last pass by the target's ids, `before` the tokens before their guesses."""
        logits = self._logits[list(rows)]
        if self._codes is not None:
            self._code[: len(rows)] = self._codes[list(before)]
            run_rows(self._markov, len(rows))
            logits += self._further[: len(rows)]
        finite = np.isfinite(logits).all(axis=1)
        return self._target.take(logits, np.where(finite, logits.argmax(axis=1), -1).astype(INT32))

    def confidence(self, row: int, before: int) -> float | None:
        """The chance that the guess of a row is right if those before it are, as the head sees it; None without one."""
        if self._confidence is None:
            return None
        weight, bias = self._confidence
        x = self._normed[row].astype(FLOAT32)
        if self._head.confidence_reads_markov and self._codes is not None:
            x = np.concatenate([x, self._codes[before].astype(FLOAT32)])
        score = float((weight * x).sum()) + bias
        return float(1 / (1 + np.exp(-score))) if np.isfinite(score) else 0.0


def split(x: Array, heads: int) -> Array:
    """[n, heads * d] -> [heads, n, d]."""
    return x.reshape(len(x), heads, -1).swapaxes(0, 1)


def rotated(x: Array, table: Array) -> Array:
    """Rotary embedding of [heads, n, d] by [n, d] of cos | sin, halves paired."""
    half = x.shape[-1] // 2
    cos, sin = table[:, :half], table[:, half:]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
