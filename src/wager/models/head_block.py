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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wager.arch.config_keys import ConfigKeys, short_repr
from wager.arch.layers import Gqa
from wager.arch.spec import ModelSpec
from wager.errors import ModelError
from wager.kernels.arrays import FLOAT32, INT32, Array, empty
from wager.kernels.base import BLOCK_SIZE, TargetOutput
from wager.kernels.cpu import Kernels
from wager.models.head_files import (
    TREE_ROWS,
    HeadFiles,
    HeadVocabulary,
    HeadWeights,
    OpenedHeadFiles,
    TargetLogits,
    check_shared,
    check_sizes,
    check_taps,
    layer_tensors,
    output_matrix,
    read_head_decoder,
    read_vocabulary,
    row_tape,
    run_rows,
    vocabulary_shapes,
)
from wager.models.transformer import Decoder
from wager.models.weights import Weights

_MOST_SLOTS = 64


@dataclass(frozen=True)
class BlockSpec:
    """What a block drafter is. A block has `slots` slots, the last token and masks of `mask_token`; `anchor_guesses`:
    every slot guesses the token after it, else all but the first guess the token in their place. `markov_rank` 0: there
    is no Markov head."""

    decoder: ModelSpec
    attention: Gqa
    inner: int
    taps: tuple[int, ...]
    target_hidden: int
    vocabulary: HeadVocabulary
    slots: int
    mask_token: int
    anchor_guesses: bool
    markov_rank: int
    confidence: bool
    confidence_reads_markov: bool
    own_embedding: bool
    own_output: bool

    @property
    def depth(self) -> int:
        """Guesses of a round."""
        return self.slots if self.anchor_guesses else self.slots - 1

    @property
    def state_width(self) -> int:
        """Elements of a position's tapped states."""
        return len(self.taps) * self.target_hidden


def read_block(files: HeadFiles, target: ModelSpec) -> BlockSpec:
    """The drafter's specification; all tensors' names and shapes are checked. ModelError names what does not fit."""
    files.rename({r"model\.": ""})
    keys, flat = files.keys, "transformer_layer_config" not in files.config
    kind = keys.text("speculators_model_type")
    if not flat and kind not in ("dflash", "dspark"):
        raise ModelError(
            f"The head in {files.where} is a {short_repr(kind)} head.", "A dflash or dspark head is wanted here."
        )
    layer = keys if flat else keys.section("transformer_layer_config")
    decoder, attention, inner = read_head_decoder(layer, files.where)
    if any(getattr(each.attention, "window", None) for each in decoder.layers):
        raise ModelError(f"The head in {files.where} has layers of a sliding window, which are not supported.")
    hidden = keys.integer("target_hidden_size", default=target.hidden)
    check_sizes(files, target, hidden=hidden, vocab=layer.integer("vocab_size", default=target.vocab))
    draft = keys.integer("draft_vocab_size", default=target.vocab)
    native = keys.section("dflash_config") if flat else keys
    slots = keys.integer("block_size", default=native.integer("block_size", default=8), most=_MOST_SLOTS)
    markov = keys.get("markov_rank")
    rank = keys.count("markov_rank") if markov is not None else 0
    keys.refuse("markov_head_type", unless=("vanilla",))
    spec = BlockSpec(
        decoder,
        attention,
        inner,
        _taps(keys, native, target, flat=flat),
        target.hidden,
        read_vocabulary(files, draft=draft, size=target.vocab),
        slots,
        _mask(keys, native, target),
        anchor_guesses=keys.flag("sample_from_anchor", default=flat and "markov_rank" in files.config),
        markov_rank=rank,
        confidence=keys.flag("enable_confidence_head"),
        confidence_reads_markov=keys.flag("confidence_head_with_markov"),
        own_embedding="embed_tokens.weight" in files.shapes,
        own_output="lm_head.weight" in files.shapes,
    )
    check_shared(files, decoder.hidden, target)
    if spec.depth < 1:
        raise ModelError(f"block_size = {slots} in {keys.where} leaves no slot to guess in.")
    expected = dict(_tensors(spec, target)) | vocabulary_shapes(files, draft=draft, size=target.vocab)
    files.check(expected, optional=(r".*rotary_emb\.inv_freq", r"verifier_.*"))
    return spec


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


def _tensors(spec: BlockSpec, target: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, rank = spec.decoder.hidden, spec.markov_rank
    yield from (
        ("fc.weight", (hidden, spec.state_width)),
        ("hidden_norm.weight", (hidden,)),
        ("norm.weight", (hidden,)),
    )
    for index in range(spec.decoder.num_layers):
        layer = layer_tensors(spec.decoder, spec.attention, spec.inner, width=hidden)
        yield from ((f"layers.{index}.{name}", shape) for name, shape in layer)
    if spec.own_output:
        yield "lm_head.weight", (len(spec.vocabulary.ids), hidden)
    if spec.own_embedding:
        yield "embed_tokens.weight", (target.vocab, hidden)
    if rank:
        yield "markov_head.markov_w1.weight", (target.vocab, rank)
        yield "markov_head.markov_w2.weight", (len(spec.vocabulary.ids), rank)
    if spec.confidence:
        yield "confidence_head.proj.weight", (1, hidden + (rank if spec.confidence_reads_markov else 0))
        yield "confidence_head.proj.bias", (1,)


@dataclass
class BlockContext:
    """Keys (rotated) and values of one sequence's known positions, `count` of them behind `origin`: float32 [layers, 2,
    kv_heads, room, head_dim]."""

    origin: int = 0
    count: int = 0
    values: Array = field(default_factory=lambda: np.zeros((0, 2, 0, 0, 0), np.float32))


class BlockHead:
    """A block drafter for the target `decoder`, whose embedding and output matrix it uses where it has none.

    `conditions`: its logits depend on the token before; `logits` gives at most `max_logits_rows` rows at a time.
    """

    def __init__(self, spec: BlockSpec, weights: HeadWeights, decoder: Decoder, target: Weights) -> None:
        self.spec = spec
        self.taps = spec.taps
        self.vocab = decoder.vocab
        self.max_depth = spec.depth
        self.state_width, self.state_dtype = spec.state_width, weights.form.kernels.act
        self.max_positions = decoder.max_blocks * BLOCK_SIZE + spec.slots
        self.max_sequences = max(1, decoder.max_rows // spec.slots)
        self.max_logits_rows = max(self.max_sequences, spec.slots, TREE_ROWS)
        self.conditions = spec.markov_rank > 0
        self._context = _ContextTape(spec, weights, decoder.max_rows)
        self._rotation = spec.decoder.details.rope.table(self.max_positions, spec.attention.rope_dim)
        rows = self.max_sequences * spec.slots
        self._block = _BlockTapes(spec, weights, decoder, rows)
        vocabulary = spec.vocabulary
        self._normed, self._logits = self._block.normed, empty(rows, len(vocabulary.ids))
        self._head = row_tape(weights, rows)
        matrix: Any = (
            weights.pack(["lm_head.weight"]) if spec.own_output else output_matrix(weights, vocabulary, decoder, target)
        )
        self._head.rms_norm(self._block.x, weights.vector("norm.weight"), spec.decoder.details.norm_eps, self._normed)
        self._head.linear(self._normed, matrix, self._logits)
        self._target = TargetLogits(vocabulary, self.max_logits_rows)
        self._codes = weights.matrix("markov_head.markov_w1.weight") if spec.markov_rank else None
        if spec.markov_rank:
            self._code = empty(self.max_logits_rows, spec.markov_rank, dtype=weights.form.kernels.act)
            self._further = empty(self.max_logits_rows, len(vocabulary.ids))
            self._markov = row_tape(weights, self.max_logits_rows)
            self._markov.linear(self._code, weights.pack(["markov_head.markov_w2.weight"]), self._further)
        self._confidence = (
            (weights.vector("confidence_head.proj.weight")[0], float(weights.vector("confidence_head.proj.bias")[0]))
            if spec.confidence
            else None
        )

    def extend(self, context: BlockContext, states: Array) -> None:
        """Add the next known positions, whose tapped states are [n, state_width]."""
        spec, attention = self.spec, self.spec.attention
        for first in range(0, len(states), self._context.rows):
            part = states[first : first + self._context.rows]
            start = context.origin + context.count
            _make_room(context, len(part), spec)
            for layer, (keys, values) in enumerate(self._context.run(part)):
                table = self._rotation[start : start + len(part)]
                keys = rotated(self._block.key_norm(layer, split(keys, attention.kv_heads)), table)
                end = context.count + len(part)
                context.values[layer, 0, :, context.count : end] = keys
                context.values[layer, 1, :, context.count : end] = split(values, attention.kv_heads)
            context.count += len(part)

    def run(self, contexts: Sequence[BlockContext], anchors: Sequence[int]) -> None:
        """One pass over a block behind each context, whose first slot has the token `anchors[i]`."""
        spec, slots = self.spec, self.spec.slots
        tokens = np.full((len(anchors), slots), spec.mask_token, np.int32)
        tokens[:, 0] = anchors
        starts = [context.origin + context.count for context in contexts]
        tables = [self._rotation[start : start + slots] for start in starts]
        self._block.run(tokens.reshape(-1), [context.values[:, :, :, : context.count] for context in contexts], tables)
        run_rows(self._head, tokens.size)

    def guess_row(self, block: int, step: int) -> int:
        """The row whose logits are guess `step` of a block."""
        return block * self.spec.slots + step + (0 if self.spec.anchor_guesses else 1)

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
        if self.spec.confidence_reads_markov and self._codes is not None:
            x = np.concatenate([x, self._codes[before].astype(FLOAT32)])
        score = float((weight * x).sum()) + bias
        return float(1 / (1 + np.exp(-score))) if np.isfinite(score) else 0.0


class _ContextTape:
    """Fused states, and each layer's keys and values of them."""

    def __init__(self, spec: BlockSpec, weights: HeadWeights, rows: int) -> None:
        self.rows = rows
        act = weights.form.kernels.act
        hidden = spec.decoder.hidden
        keys = spec.attention.kv_heads * spec.attention.head_dim
        self._states = empty(rows, spec.state_width, dtype=act)
        fused, normed = empty(rows, hidden), empty(rows, hidden, dtype=act)
        self._tape = row_tape(weights, rows)
        self._tape.linear(self._states, weights.pack(["fc.weight"]), fused)
        self._tape.rms_norm(fused, weights.vector("hidden_norm.weight"), spec.decoder.details.norm_eps, normed)
        self._out = [empty(rows, 2 * keys) for _ in range(spec.decoder.num_layers)]
        for layer, out in enumerate(self._out):
            names = [f"layers.{layer}.self_attn.{part}_proj.weight" for part in "kv"]
            self._tape.linear(normed, weights.pack(names), out)

    def run(self, states: Array) -> list[tuple[Array, Array]]:
        n = len(states)
        self._states[:n] = states
        run_rows(self._tape, n)
        half = self._out[0].shape[1] // 2
        return [(out[:n, :half], out[:n, half:]) for out in self._out]


class _BlockTapes:
    """The layers over the slots of several blocks: products on tapes, attention between them."""

    def __init__(self, spec: BlockSpec, weights: HeadWeights, decoder: Decoder, rows: int) -> None:
        self.spec = spec
        act = weights.form.kernels.act
        hidden = spec.decoder.hidden
        attention = spec.attention
        self.x, self.normed = empty(rows, hidden), empty(rows, hidden, dtype=act)
        self._qkv = empty(rows, attention.qkv_width)
        self._mixed = empty(rows, attention.output_width, dtype=act)
        inner, eps = empty(rows, spec.inner, dtype=act), spec.decoder.details.norm_eps
        self._embed = row_tape(weights, rows)
        embedding = weights.pack(["embed_tokens.weight"]) if spec.own_embedding else decoder.embedding
        self._embed.embed(embedding, self.x)
        self._before = []
        self._after = []
        self._norms = []
        for layer in range(spec.decoder.num_layers):
            name = f"layers.{layer}"
            before, after = row_tape(weights, rows), row_tape(weights, rows)
            before.rms_norm(self.x, weights.vector(f"{name}.input_layernorm.weight"), eps, self.normed)
            before.linear(
                self.normed, weights.pack([f"{name}.self_attn.{part}_proj.weight" for part in "qkv"]), self._qkv
            )
            after.linear(self._mixed, weights.pack([f"{name}.self_attn.o_proj.weight"]), self.x, add=True)
            after.rms_norm(self.x, weights.vector(f"{name}.post_attention_layernorm.weight"), eps, self.normed)
            after.gated(
                self.normed, weights.pack_gated(f"{name}.mlp.gate_proj.weight", f"{name}.mlp.up_proj.weight"), inner
            )
            after.linear(inner, weights.pack([f"{name}.mlp.down_proj.weight"]), self.x, add=True)
            self._before.append(before)
            self._after.append(after)
            names = [f"{name}.self_attn.{part}_norm.weight" for part in "qk"]
            self._norms.append([weights.vector(each) for each in names] if spec.decoder.details.qk_norm else [])

    def run(self, tokens: Array, contexts: Sequence[Array], tables: Sequence[Array]) -> None:
        """contexts [layers, 2, kv_heads, n, head_dim] and rotations [slots, head_dim] of each block."""
        rows = len(tokens)
        self._embed.inputs.tokens[:rows] = tokens
        run_rows(self._embed, rows)
        for layer, (before, after) in enumerate(zip(self._before, self._after, strict=True)):
            run_rows(before, rows)
            for block, (context, table) in enumerate(zip(contexts, tables, strict=True)):
                own = slice(block * self.spec.slots, (block + 1) * self.spec.slots)
                self._mixed[own] = self._attend(layer, self._qkv[own], context[layer], table)
            run_rows(after, rows)

    def key_norm(self, layer: int, keys: Array) -> Array:
        return self._normed(keys, self._norms[layer][1]) if self._norms[layer] else keys

    def _attend(self, layer: int, qkv: Array, context: Array, table: Array) -> Array:
        """Every slot over the context and all slots of its block."""
        attention = self.spec.attention
        queries_end = attention.query_width
        keys_end = queries_end + attention.kv_heads * attention.head_dim
        queries = split(qkv[:, :queries_end], attention.heads)
        if self._norms[layer]:
            queries = self._normed(queries, self._norms[layer][0])
        queries = rotated(queries, table)
        keys = rotated(self.key_norm(layer, split(qkv[:, queries_end:keys_end], attention.kv_heads)), table)
        keys = np.concatenate([context[0], keys], axis=1)
        values = np.concatenate([context[1], split(qkv[:, keys_end:], attention.kv_heads)], axis=1)
        slots, size = qkv.shape[0], attention.head_dim
        grouped = queries.reshape(attention.kv_heads, -1, size)  # the queries that share a kv head
        scores = np.einsum("kqd,knd->kqn", grouped, keys) * np.float32(size**-0.5)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = np.einsum("kqn,knd->kqd", scores / scores.sum(axis=-1, keepdims=True), values)
        found: Array = mixed.reshape(attention.heads, slots, size).swapaxes(0, 1).reshape(slots, -1)
        return found

    def _normed(self, x: Array, weight: Array) -> Array:
        found: Array = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + self.spec.decoder.details.norm_eps) * weight
        return found


def split(x: Array, heads: int) -> Array:
    """[n, heads * d] -> [heads, n, d]."""
    return x.reshape(len(x), heads, -1).swapaxes(0, 1)


def rotated(x: Array, table: Array) -> Array:
    """Rotary embedding of [heads, n, d] by [n, d] of cos | sin, halves paired."""
    half = x.shape[-1] // 2
    cos, sin = table[:, :half], table[:, half:]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _make_room(context: BlockContext, rows: int, spec: BlockSpec) -> None:
    room = context.values.shape[3]
    if context.count + rows > room:
        attention = spec.attention
        shape = (
            spec.decoder.num_layers,
            2,
            attention.kv_heads,
            max(2 * room, context.count + rows, 64),
            attention.head_dim,
        )
        grown = np.zeros(shape, np.float32)
        if context.count:
            grown[:, :, :, : context.count] = context.values[:, :, :, : context.count]
        context.values = grown


class OpenedBlock(OpenedHeadFiles[BlockSpec]):
    """A block drafter whose files were checked."""

    def workspace_bytes(self, kernels: Kernels, *, rows: int, sequences: int, context: int) -> int:
        spec, act = self.spec, kernels.act.itemsize
        hidden, keys = spec.decoder.hidden, spec.attention.kv_heads * spec.attention.head_dim
        row = 4 * (2 * hidden + spec.state_width + 2 * keys * spec.decoder.num_layers + spec.attention.qkv_width)
        row += act * (2 * hidden + spec.state_width + spec.attention.output_width + spec.inner)
        return rows * (row + 4 * len(spec.vocabulary.ids)) + 4 * context * spec.attention.rope_dim

    def token_bytes(self, kernels: Kernels) -> int:
        """Bytes of keys and values per position, in float32, with the room they grow into."""
        return 2 * 4 * self.spec.decoder.num_layers * self.spec.attention.cache_width

    def load(self, decoder: Decoder, target: Weights, *, num_blocks: int) -> BlockHead:
        return BlockHead(self.spec, self.weights(decoder), decoder, target)


def open_block(files: HeadFiles, target: ModelSpec, *, quantised: bool) -> OpenedBlock:
    """ModelError if it is damaged, of a kind that is not supported, or of another target."""
    return OpenedBlock(files, read_block(files, target), quantised)
