"""Block drafters, DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147): configurations and tensors.

Read are the formats of vLLM's speculators (`speculators_model_type` dflash or dspark) and of DSpark's own checkpoints
(flat, layer ids one lower). Layers attend to the whole block; those of a sliding window are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from wager.arch.config_keys import ConfigKeys, shown
from wager.arch.layers import Gqa
from wager.arch.spec import ModelSpec
from wager.errors import ModelError
from wager.models.head_eagle_spec import check_sizes, read_head_decoder
from wager.models.head_files import HeadFiles
from wager.models.head_vocabulary import HeadVocabulary, read_vocabulary, vocabulary_shapes

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
            f"The head in {files.where} is a {shown(kind)} head.", "A dflash or dspark head is wanted here."
        )
    layer = keys if flat else keys.section("transformer_layer_config")
    decoder, attention, inner = read_head_decoder(layer, files.where)
    if any(getattr(each.attention, "window", None) for each in decoder.layers):
        raise ModelError(f"The head in {files.where} has layers of a sliding window, which are not supported.")
    check_sizes(files, keys, layer, target)
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
    if decoder.hidden != target.hidden and not (spec.own_embedding and spec.own_output):
        raise ModelError(
            f"The head in {files.where} of hidden size {decoder.hidden} shares matrices of the target, whose hidden "
            f"size is {target.hidden}.",
            "The head was trained for another target, or is incomplete.",
        )
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
    for tap in taps:
        if not 0 <= tap < target.num_layers:
            raise ModelError(
                f"The head in {keys.where} taps the target after layer {tap}; {target.name} has {target.num_layers} "
                f"layers, of which 0 to {target.num_layers - 1} can be tapped.",
                "The head was trained for another target.",
            )
    return taps


def _mask(keys: ConfigKeys, native: ConfigKeys, target: ModelSpec) -> int:
    section = keys if keys.get("mask_token_id") is not None else native
    ids = section.token_ids("mask_token_id", vocab=target.vocab)
    if len(ids) != 1:
        raise ModelError(f"{keys.where} lacks 'mask_token_id'.", "The head's configuration is damaged or incomplete.")
    return ids[0]


def _tensors(spec: BlockSpec, target: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, attention, details, rank = spec.decoder.hidden, spec.attention, spec.decoder.details, spec.markov_rank
    yield from (
        ("fc.weight", (hidden, spec.state_width)),
        ("hidden_norm.weight", (hidden,)),
        ("norm.weight", (hidden,)),
    )
    keys = attention.kv_heads * attention.head_dim
    for index in range(spec.decoder.num_layers):
        name = f"layers.{index}"
        yield from ((f"{name}.{norm}.weight", (hidden,)) for norm in ("input_layernorm", "post_attention_layernorm"))
        for part, size in (("q", attention.query_width), ("k", keys), ("v", keys)):
            yield f"{name}.self_attn.{part}_proj.weight", (size, hidden)
            if details.qkv_bias:
                yield f"{name}.self_attn.{part}_proj.bias", (size,)
            if details.qk_norm and part != "v":
                yield f"{name}.self_attn.{part}_norm.weight", (attention.head_dim,)
        yield f"{name}.self_attn.o_proj.weight", (hidden, attention.output_width)
        yield f"{name}.mlp.gate_proj.weight", (spec.inner, hidden)
        yield f"{name}.mlp.up_proj.weight", (spec.inner, hidden)
        yield f"{name}.mlp.down_proj.weight", (hidden, spec.inner)
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
