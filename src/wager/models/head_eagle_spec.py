"""EAGLE-3 heads (arXiv 2503.01840) with the normalisations of 3.1 (arXiv 2605.09992): configurations and tensors.

Two formats are read: that of vLLM's speculators (the decoder's configuration under transformer_layer_config, the flags
beside it) and that of the original repository (one flat configuration, tensors under `midlayer.`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from wager.arch.config_keys import ConfigKeys, shown
from wager.arch.hf_config import read_config
from wager.arch.layers import Dense, Gqa
from wager.arch.spec import ModelSpec
from wager.errors import ModelError
from wager.models.head_files import HeadFiles
from wager.models.head_vocabulary import HeadVocabulary, read_vocabulary, vocabulary_shapes

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_RENAMED = {"model\\.": "", "midlayer\\.": "layers.0."}
_OPTIONAL = (r".*rotary_emb\.inv_freq", r"verifier_.*")

Shapes = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class EagleSpec:
    """What an EAGLE-3 head is. `decoder` has sizes, rotation and norms of its layers, which have one kind of
    `attention` and feed-forwards of the inner size `inner`; `taps` are the target's layers that it reads, of
    `target_hidden` elements each.

    norm_before_residual: the residual stream is the normed state. norm_before_fc: one norm over all taps; fc_norm: one
    for each. norm_output: the state fed back is the one behind the last norm. own_embedding, own_output: whether it has
    these matrices, or uses the target's.
    """

    decoder: ModelSpec
    attention: Gqa
    inner: int
    taps: tuple[int, ...]
    target_hidden: int
    vocabulary: HeadVocabulary
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    own_embedding: bool
    own_output: bool
    depth: int | None = None

    @property
    def state_width(self) -> int:
        """Elements of a position's tapped states."""
        return len(self.taps) * self.target_hidden


def read_eagle(files: HeadFiles, target: ModelSpec) -> EagleSpec:
    """The head's specification; all of its tensors' names and shapes are checked. ModelError names what does not fit
    the target, and what is not supported."""
    files.rename(_RENAMED)
    keys, flat = files.keys, "transformer_layer_config" not in files.config
    kind = keys.text("speculators_model_type")
    if kind is not None and kind != "eagle3":
        raise ModelError(f"The head in {files.where} is a {kind} head.", "An eagle3 head is wanted here.")
    layer = keys if flat else keys.section("transformer_layer_config")
    decoder, attention, inner = read_head_decoder(layer, files.where)
    taps = _read_taps(keys, layer, target)
    check_sizes(files, keys, layer, target)
    draft = keys.integer("draft_vocab_size", default=layer.integer("draft_vocab_size", default=target.vocab))
    spec = EagleSpec(
        decoder,
        attention,
        inner,
        taps,
        target.hidden,
        read_vocabulary(files, draft=draft, size=target.vocab),
        norm_before_residual=keys.flag("norm_before_residual", default=not flat),
        norm_before_fc=keys.flag("norm_before_fc") or keys.section("eagle_config").flag("norm_before_fc"),
        fc_norm=keys.flag("fc_norm"),
        norm_output=keys.flag("norm_output"),
        own_embedding="embed_tokens.weight" in files.shapes,
        own_output="lm_head.weight" in files.shapes,
        depth=read_proposed(keys),
    )
    _check_shared(spec, target, files.where)
    files.check(
        dict(_tensors(spec, target)) | vocabulary_shapes(files, draft=draft, size=target.vocab), optional=_OPTIONAL
    )
    return spec


def read_head_decoder(layer: ConfigKeys, where: str) -> tuple[ModelSpec, Gqa, int]:
    """The layers of a head as a model, their attention and the inner size of their feed-forwards."""
    model_type = layer.text("model_type") or "llama"
    if model_type not in _ARCHITECTURES:
        raise ModelError(
            f"The head in {where} has layers of model_type {shown(model_type)}, which are not supported.",
            f"Supported are: {', '.join(_ARCHITECTURES)}.",
        )
    config: dict[str, Any] = {**layer.values, "architectures": [_ARCHITECTURES[model_type]]}
    config.setdefault("tie_word_embeddings", False)
    decoder = read_config(config, runnable=True, where=f"{where}/config.json")
    attention, ffn = decoder.layers[0].attention, decoder.layers[0].ffn
    if not isinstance(attention, Gqa) or not isinstance(ffn, Dense):
        raise ModelError(f"The layers of the head in {where} are of a kind that is not supported.")
    return decoder, attention, ffn.width


def _read_taps(keys: ConfigKeys, layer: ConfigKeys, target: ModelSpec) -> tuple[int, ...]:
    name = "eagle_aux_hidden_state_layer_ids"
    for section in (keys, keys.section("eagle_config"), layer):
        found = section.integers(name)
        if found:
            break
    layers = target.num_layers
    taps = tuple(found) if found else (2, layers // 2, layers - 3)
    count = layer.integer("num_aux_hidden_states", default=len(taps))
    if count != len(taps):
        raise ModelError(f"{name} in {keys.where} lists {len(taps)} layers, and num_aux_hidden_states is {count}.")
    for tap in taps:
        if not 0 <= tap < layers:
            raise ModelError(
                f"The head in {keys.where} taps the target after layer {tap}; {target.name} has {layers} layers, of "
                f"which 0 to {layers - 1} can be tapped.",
                "The head was trained for another target.",
            )
    return taps


def check_sizes(files: HeadFiles, keys: ConfigKeys, layer: ConfigKeys, target: ModelSpec) -> None:
    """ModelError if the configuration names another target's sizes."""
    hidden = keys.integer("target_hidden_size", default=target.hidden)
    vocab = layer.integer("vocab_size", default=target.vocab)
    for name, found, own in (("hidden size", hidden, target.hidden), ("vocabulary", vocab, target.vocab)):
        if found != own:
            raise ModelError(
                f"The head in {files.where} was trained for a target of {name} {found}; {target.name} has {own}.",
                "Give a head of this target.",
            )


def _check_shared(spec: EagleSpec, target: ModelSpec, where: str) -> None:
    own, shared = spec.decoder.hidden, [] if spec.own_embedding else ["embedding"]
    if not spec.own_output:
        shared.append("output")
    if shared and own != target.hidden:
        raise ModelError(
            f"The head in {where} of hidden size {own} has no {shared[0]} matrix of its own, and the target's is of "
            f"{target.hidden}.",
            "The head was trained for another target, or is incomplete.",
        )
    if spec.norm_before_fc and spec.fc_norm:
        raise ModelError(f"norm_before_fc and fc_norm in {where}/config.json exclude each other.")


def read_proposed(keys: ConfigKeys) -> int | None:
    """Guesses of a round that the head was made for."""
    methods = keys.section("speculators_config").get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    depth = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    return depth if isinstance(depth, int) and depth > 0 else None


def _tensors(spec: EagleSpec, target: ModelSpec) -> Shapes:
    hidden, taps = spec.decoder.hidden, len(spec.taps)
    yield "fc.weight", (hidden, spec.state_width)
    if spec.norm_before_fc:
        yield "input_norm.weight", (spec.state_width,)
    if spec.fc_norm:
        yield from ((f"fc_norm.{tap}.weight", (spec.target_hidden,)) for tap in range(taps))
    for index in range(spec.decoder.num_layers):
        yield from ((f"layers.{index}.{name}", shape) for name, shape in _layer(spec, index))
    yield "norm.weight", (hidden,)
    if spec.own_output:
        yield "lm_head.weight", (len(spec.vocabulary.ids), hidden)
    if spec.own_embedding:
        yield "embed_tokens.weight", (target.vocab, hidden)


def _layer(spec: EagleSpec, index: int) -> Shapes:
    """The first layer's attention reads the embedding beside the state."""
    decoder, attention, hidden = spec.decoder, spec.attention, spec.decoder.hidden
    norms = ["input_layernorm", "post_attention_layernorm"] + (["hidden_norm"] if index == 0 else [])
    yield from ((f"{norm}.weight", (hidden,)) for norm in norms)
    keys, width = attention.kv_heads * attention.head_dim, 2 * hidden if index == 0 else hidden
    for part, size in (("q", attention.query_width), ("k", keys), ("v", keys)):
        yield f"self_attn.{part}_proj.weight", (size, width)
        if decoder.details.qkv_bias:
            yield f"self_attn.{part}_proj.bias", (size,)
        if decoder.details.qk_norm and part != "v":
            yield f"self_attn.{part}_norm.weight", (attention.head_dim,)
    yield "self_attn.o_proj.weight", (hidden, attention.output_width)
    if decoder.details.output_bias:
        yield "self_attn.o_proj.bias", (hidden,)
    inner = spec.inner
    for part, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
        yield f"mlp.{part}_proj.weight", shape
        if decoder.details.mlp_bias:
            yield f"mlp.{part}_proj.bias", shape[:1]
