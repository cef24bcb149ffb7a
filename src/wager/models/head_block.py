"""Block drafters, DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147): all guesses of a round in one pass over a
block of slots.

Every layer projects the target's fused states of all known positions with its own matrices, once, to the keys and
values of the context, which are cached. The slots attend to these and to each other, in both directions. Guesses are
drawn one after the other, where a Markov head adds what the one before says; a tape has all of them.

Read are the formats of vLLM's speculators (`speculators_model_type` dflash or dspark) and of DSpark's own checkpoints
(flat, layer ids one lower). Layers of a sliding window are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wager.arch.config_keys import ConfigKeys, short_repr
from wager.arch.spec import ModelSpec
from wager.errors import ModelError
from wager.kernels.arrays import INT32, Array, empty, zeros
from wager.kernels.base import TargetOutput
from wager.kernels.cpu import Kernels
from wager.kernels.tape import Tape
from wager.models.head_files import (
    TREE_ROWS,
    CachedHead,
    CheckedLayers,
    HeadFiles,
    HeadLogits,
    HeadWeights,
    check_taps,
    read_layers,
    row_tape,
    run_rows,
)
from wager.models.transformer import Decoder, LayerBuffers, LayerRecorder, buffer_bytes
from wager.models.weights import Weights
from wager.types import PackedBatch

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
        """Bytes of the buffers of a pass."""
        act, hidden, vocabulary = kernels.act.itemsize, self.decoder.hidden, self.vocabulary
        rows, keys = max(rows, self.slots), self.attention.kv_heads * self.attention.head_dim
        layers = buffer_bytes(self.decoder, kernels, positions=context, max_rows=rows, max_logits_rows=1)
        row = 4 * (hidden + self.state_width + 3 * keys + len(vocabulary.ids))
        row += act * (2 * hidden + self.state_width + keys)
        logits = len(vocabulary.ids) * bool(self.markov_rank) + (0 if vocabulary.whole else vocabulary.size)
        return layers + rows * row + max(sequences, self.slots, TREE_ROWS) * 4 * logits

    def load(self, decoder: Decoder, target: Weights, *, num_blocks: int) -> BlockHead:
        return BlockHead(self, decoder, target, num_blocks=num_blocks)


def open_block(files: HeadFiles, target: ModelSpec, *, dtype: str) -> CheckedBlock:
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
        dtype,
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


class BlockHead(CachedHead):
    """A block drafter for the target `decoder`, whose embedding and output matrix it uses where it has none.
    `num_blocks` is the size of its cache.

    `conditions`: its logits depend on the token before; `logits` gives at most `max_logits_rows` rows at a time.
    """

    def __init__(self, head: CheckedBlock, decoder: Decoder, target: Weights, *, num_blocks: int) -> None:
        weights = head.weights(decoder.kernels)
        super().__init__(
            decoder,
            decoder.kernels,
            head.decoder.hidden,
            state_width=head.state_width,
            least_rows=head.slots,
            whole_spans=True,
        )
        self.taps = head.taps
        self.max_depth, self.slots, self.conditions = head.depth, head.slots, head.markov_rank > 0
        self.masks = (head.mask_token,) * (head.slots - 1)
        self.blocks = min(self.max_sequences, self.max_rows // head.slots)
        """Blocks of a pass at most."""
        self.max_logits_rows = max(self.blocks, head.slots, TREE_ROWS)
        self._first_slot = 0 if head.anchor_guesses else 1
        self._weights, self._head = weights, head
        self.cache = head.cache(decoder.kernels, num_blocks=num_blocks)
        self._confidence: Array | None = empty(self.max_rows, 1) if head.confidence else None  # before the sigmoid
        self._code_confidence = self._record_layers(weights, decoder, target)  # what the Markov head's code adds
        self.guesses = HeadLogits(head.vocabulary, self.max_logits_rows)
        self._tokens = zeros(head.depth, self.blocks, dtype=INT32)
        self._probabilities = zeros(head.depth, self.blocks)
        self._chains: dict[int, Tape] = {}
        if head.markov_rank:
            self._codes = weights.matrix("markov_head.markov_w1.weight")
            self._packed_codes = decoder.kernels.pack(self._codes)
            self._from_code = weights.pack(["markov_head.markov_w2.weight"])
            rows = self.max_logits_rows
            self._code = empty(rows, head.markov_rank, dtype=decoder.kernels.act)
            self._further, self._surer = empty(rows, len(head.vocabulary.ids)), empty(rows, 1)
            self._markov = row_tape(weights, rows)
            self._markov.linear(self._code, self._from_code, self._further)
            if self._code_confidence is not None:
                self._markov.linear(self._code, self._code_confidence, self._surer)

    # ---- recording -------------------------------------------------------------------------------------------------

    def _record_layers(self, weights: HeadWeights, decoder: Decoder, target: Weights) -> Any:
        """The pass over blocks, to logits of all slots, and the one from states of known positions to their keys and
        values in every layer. What the confidence reads of the Markov head's code, packed; None if it does not."""
        head, model, kernels, rows = self._head, self._head.decoder, weights.kernels, self.max_rows
        attention, details, act = head.attention, model.details, weights.kernels.act
        buffers = LayerBuffers(model, kernels, positions=self.max_context, max_rows=rows, max_logits_rows=1)
        narrowed, normed = empty(rows, head.state_width, dtype=act), empty(rows, self.hidden, dtype=act)
        kv_width = attention.kv_heads * attention.head_dim
        qkv, unused = zeros(rows, 3 * kv_width), empty(rows, kv_width, dtype=act)  # rotation takes queries, too
        limits: dict[str, Any] = {"max_rows": rows, "max_sequences": self.max_sequences, "max_blocks": self.max_blocks}
        self._context: Tape = kernels.tape(**limits)
        self.context_buffers = self._context.buffers
        self._context.narrow(self._target_states, narrowed)
        self._context.linear(narrowed, weights.pack(["fc.weight"]), self._state)
        self._context.rms_norm(self._state, weights.vector("hidden_norm.weight"), details.norm_eps, normed)
        self._tape.embed(head.embedding(weights, decoder), buffers.x)
        recorder = LayerRecorder(model, kernels, self._tape, self.cache, buffers)
        for index, tensors in enumerate(head.layers(weights)):
            recorder.record(tensors, model.ordered_layers[index], index, of="rows")
            self._context.linear(
                normed,
                weights.pack([f"layers.{index}.self_attn.{part}_proj.weight" for part in "kv"]),
                qkv[:, kv_width:],
            )
            norms = (tensors.vector("q_norm"), tensors.vector("k_norm"), details.norm_eps) if details.qk_norm else None
            self._context.rotary(qkv, buffers.rotations["global"], norms, self.cache, index, unused)
        self._normed, self._logits = empty(rows, self.hidden, dtype=act), empty(rows, len(head.vocabulary.ids))
        self._tape.rms_norm(buffers.x, weights.vector("norm.weight"), details.norm_eps, self._normed)
        self._tape.linear(self._normed, head.output(weights, decoder, target), self._logits)
        if self._confidence is None:
            return None
        weight, bias = (weights.vector(f"confidence_head.proj.{part}") for part in ("weight", "bias"))
        self._tape.linear(self._normed, kernels.pack(weight[:, : self.hidden], bias), self._confidence)
        return kernels.pack(weight[:, self.hidden :]) if head.confidence_reads_markov and head.markov_rank else None

    def _record_chain(self, depth: int) -> Tape:
        """A tape over blocks that guesses `depth` tokens of each, one after the other."""
        head, rows, slots = self._head, self.blocks, self._head.slots
        ids, tape = self._logits.shape[1], row_tape(self._weights, rows)
        logits = self._logits[: rows * slots].reshape(rows, slots * ids)
        code, narrowed = empty(rows, head.markov_rank), empty(rows, head.markov_rank, dtype=self._weights.kernels.act)
        for step in range(depth):
            slot = step + self._first_slot
            own = logits[:, slot * ids : (slot + 1) * ids]
            if head.markov_rank:
                tape.embed(self._packed_codes, code, tokens=self._tokens[step - 1] if step else None)
                tape.narrow(code, narrowed)
                tape.linear(narrowed, self._from_code, own, add=True)
                if self._confidence is not None and self._code_confidence is not None:
                    sure = self._confidence[: rows * slots].reshape(rows, slots)[:, slot : slot + 1]
                    tape.linear(narrowed, self._code_confidence, sure, add=True)
            found = self._tokens[step], self._probabilities[step]
            tape.guess(own, self.guesses.ids, self.guesses.keys[:rows], *found, ahead=step, of="rows")
        return tape

    # ---- running ---------------------------------------------------------------------------------------------------

    def extend(self, batch: PackedBatch, states: Array) -> None:
        """Cache the keys and values of the batch's rows, known positions whose tapped states are [n, state_width]. It
        is packed into `context_buffers`."""
        self._target_states[: len(states)] = states
        self._context.run(rows=batch.rows, sequences=batch.num_sequences, logits_rows=0)

    def run(self, batch: PackedBatch) -> None:
        """One pass over blocks, packed into `buffers`: the last known token of each sequence, and masks."""
        self._tape.run(rows=batch.rows, sequences=batch.num_sequences, logits_rows=0)

    def chains(self, last: Sequence[int], depth: int) -> tuple[Array, Array]:
        """The guesses of all blocks of the last pass, drawn as `guesses.keys` say, and the chance of each to be right
        if those before it are: by the confidence head, or else its probability; [blocks, depth] both. `last` are the
        last known tokens. Logits of these slots are used up."""
        rows = len(last)
        if depth not in self._chains:
            self._chains[depth] = self._record_chain(depth)
        tape = self._chains[depth]
        tape.inputs.tokens[:rows] = last
        run_rows(tape, rows)
        rates = self._probabilities[:depth, :rows].T
        if self._confidence is not None:
            slots = self._confidence[: rows * self.slots].reshape(rows, self.slots)
            rates = sigmoid(slots[:, self._first_slot : self._first_slot + depth])
        return self._tokens[:depth, :rows].T, rates

    def guess_row(self, block: int, step: int) -> int:
        """The row whose logits are guess `step` of a block."""
        return block * self.slots + step + self._first_slot

    def logits(self, rows: Sequence[int], before: Sequence[int]) -> tuple[TargetOutput, Sequence[float | None]]:
        """The logits of some rows of the last pass by the target's ids, `before` the tokens before their guesses; and
        the chance that the guess of each is right if those before it are, where there is a confidence head."""
        picked, n = list(rows), len(rows)
        logits = self._logits[picked]
        sure = None if self._confidence is None else self._confidence[picked, 0]
        if self.conditions:
            self._code[:n] = self._codes[list(before)]
            run_rows(self._markov, n)
            logits += self._further[:n]
            if sure is not None and self._code_confidence is not None:
                sure += self._surer[:n, 0]
        rates = [None] * n if sure is None else sigmoid(sure).tolist()
        return self.guesses.output(logits).by_target(), rates


def sigmoid(x: Array) -> Array:
    """0 where x is not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        found: Array = 1 / (1 + np.exp(-x))
    return np.where(np.isfinite(x), found, np.float32(0))
