"""The shape of a model as plain values: ModelSpec, read by the engine, the kernels' memory plan and the cost model.

Shapes are known for every family; the further details that the engine needs to run a model are in DecoderDetails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from wager.arch.formats import Precision
from wager.arch.layers import (
    Absent,
    Activation,
    Attention,
    Compressed,
    Dense,
    Experts,
    FeedForward,
    Gqa,
    Mla,
    Parallel,
    Recurrent,
    Rotation,
)
from wager.arch.rope import Rope
from wager.errors import ModelError


@dataclass(frozen=True, slots=True)
class Layer:
    """`count` layers of one shape. What is Absent has no norm either."""

    attention: Attention
    ffn: FeedForward
    count: int = 1

    @property
    def mixers(self) -> tuple[Attention, ...]:
        """What mixes positions: attention, a recurrent part, both or neither."""
        if isinstance(self.attention, Parallel):
            return self.attention.attention, self.attention.state
        return () if isinstance(self.attention, Absent) else (self.attention,)

    @property
    def attending(self) -> Gqa | Mla | None:
        """The part that reads keys and values."""
        return next((each for each in self.mixers if isinstance(each, Gqa | Mla)), None)

    @property
    def caching(self) -> Gqa | Mla | None:
        """The part that has keys and values of its own."""
        found = self.attending
        return None if isinstance(found, Gqa) and found.shared else found

    @property
    def recurrent(self) -> Recurrent | None:
        """The part that keeps a state."""
        return next((each for each in self.mixers if isinstance(each, Recurrent)), None)

    @property
    def sublayers(self) -> int:
        """How many of attention and feed-forward there are."""
        return (not isinstance(self.attention, Absent)) + (not isinstance(self.ffn, Absent))


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Factors of products in a layer (Falcon-H1): of the outputs of attention, of a recurrent part and of the
    feed-forward; of the gates of the latter two, before their activation; of a recurrent part's values, keys, queries
    and steps, before its convolution or softplus."""

    attention_out: float = 1.0
    state_out: float = 1.0
    down: float = 1.0
    gate: float = 1.0
    state_gate: float = 1.0
    values: float = 1.0
    keys: float = 1.0
    queries: float = 1.0
    step: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyDetails:
    """What all models of a family compute alike: the `activation` of feed-forwards, norms and scales.

    RMS norms stand before each sublayer (`pre_norms`), behind it, before its output is added (`post_norms`), or both.
    Norms of the queries and keys (DecoderDetails.qk_norm) are of each head, with `whole_qk_norm` of all their heads
    together; `value_norm`, without weights, of each head of the values. `layer_scales`: the residual stream is
    multiplied by a learned number behind each layer.
    """

    activation: Activation = "silu"
    pre_norms: bool = True
    post_norms: bool = False
    whole_qk_norm: bool = False
    value_norm: bool = False
    layer_scales: bool = False

    def family_details(self) -> dict[str, Any]:
        """These fields alone, by name."""
        return {each.name: getattr(self, each.name) for each in fields(FamilyDetails)}


@dataclass(frozen=True, slots=True)
class DecoderDetails(FamilyDetails):
    """The details beyond the shapes of a decoder, for the engine.

    `architecture` is the name in its configuration; layer i has the shape `ModelSpec.layers[layer_order[i]]`. `rope`
    turns the layers whose Gqa.rotation is global, `local_rope` the local ones.

    The embeddings are multiplied by `embedding_scale`, what a sublayer adds by `residual_scale`, logits by
    `logit_scale`; attention scores by `attention_scale` (None: head_dim ** -0.5); what is in a layer by `multipliers`.
    A cap c makes c * tanh(z / c) of scores or logits. `latent_norm_eps` is of the norms inside latent attention.

    Of the checkpoint: `interleaved_rope` if rotated dimensions pair up as (2i, 2i + 1), not as halves, `norm_offset`,
    which is added to the weights of its norms, `log_rates` if it has logarithms of the rates at which states decay,
    and `split_latent` if latent attention's projections of keys and values
    from the latent are two matrices, the first transposed.
    """

    architecture: str
    layer_order: tuple[int, ...]
    rope: Rope
    norm_eps: float
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_scale: float | None = None
    interleaved_rope: bool = False
    latent_norm_eps: float = 1e-6
    split_latent: bool = False
    local_rope: Rope | None = None
    norm_offset: float = 0.0
    log_rates: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_cap: float | None = None
    logit_cap: float | None = None
    multipliers: Multipliers = Multipliers()

    def rope_of(self, rotation: Rotation) -> Rope | None:
        """What turns the layers of that rotation; None: nothing."""
        return None if rotation == "none" else self.local_rope if rotation == "local" else self.rope


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model: sizes, shapes of its layers, number formats, and, if the engine runs it, `decoder`.

    `layers` holds each shape of layer once, with its count. `tied`: the LM head is the embedding matrix. `context` is
    the maximum number of positions. `layer_embedding` is the width of a token's further embedding for each layer, 0 for
    none: behind a layer a projection of the residual stream, gated by it, is projected back and added. Without `head`
    the LM head and the embedding are left out of all figures: a drafter may share its target's. `source` is the source
    of the sizes. `other_inputs` are what the published model reads besides text, by a part that is left out.
    """

    name: str
    hidden: int
    vocab: int
    tied: bool
    layers: tuple[Layer, ...]
    precision: Precision
    context: int
    head: bool = True
    source: str = ""
    decoder: DecoderDetails | None = None
    layer_embedding: int = 0
    other_inputs: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return sum(layer.count for layer in self.layers)

    @property
    def left_out(self) -> str:
        """That a part of the model is left out, in words; "" if none is."""
        return f"its part for {' and '.join(self.other_inputs)} is not used" if self.other_inputs else ""

    @property
    def sparse(self) -> bool:
        """Whether some layer has routed experts."""
        return self.experts is not None

    # ---- for the engine ----------------------------------------------------------------------------------------------

    @property
    def details(self) -> DecoderDetails:
        """`decoder`, or ModelError for a model of which only the shape is known."""
        if self.decoder is None:
            raise not_runnable(self.name)
        return self.decoder

    @property
    def attention(self) -> Gqa | Mla:
        """The attention of a model that the engine runs: that of its first layer that has one."""
        return self.attentions[0]

    @property
    def attentions(self) -> tuple[Gqa | Mla, ...]:
        """The kinds of attention of a model that the engine runs. They differ in the window and the rotation; in the
        size of heads, and whose keys and values they read, only in families that have that."""
        found = tuple(dict.fromkeys(kind for layer in self.layers if (kind := layer.attending)))
        if not found:
            first = type(self.layers[0].attention).__name__
            raise ModelError(f"The engine does not support the attention of {self.name} ({first}).")
        return found

    @property
    def head_dim(self) -> int:
        """The largest size of a head."""
        return max(kind.head_dim for kind in self.attentions)

    def rope_dim(self, rotation: Rotation) -> int:
        """Dimensions of a head that layers of that rotation turn; those of other layers if there are none."""
        kinds = [kind for kind in self.attentions if isinstance(kind, Gqa) and kind.rotation == rotation]
        return (kinds or self.attentions)[0].rope_dim

    @property
    def recurrent(self) -> Recurrent | None:
        """What the layers are that keep a state instead of keys and values; None if there are none."""
        return next((kind for layer in self.layers if (kind := layer.recurrent)), None)

    @property
    def rotations(self) -> tuple[Rotation, ...]:
        """The kinds of rotation that some layer has, without none."""
        attending = [kind for layer in self.layers if (kind := layer.attending)]
        kinds = [kind.rotation if isinstance(kind, Gqa) else "global" for kind in attending]
        found: tuple[Rotation, ...] = ("global", "local")
        return tuple(kind for kind in found if kind in kinds)

    @property
    def ordered_layers(self) -> tuple[Layer, ...]:
        """The shape of every layer, first to last."""
        return tuple(self.layers[index] for index in self.details.layer_order)

    @property
    def dense(self) -> Dense | None:
        """The feed-forward of the layers without experts, the widest if they differ; None if all have experts."""
        found = [layer.ffn for layer in self.layers if isinstance(layer.ffn, Dense)]
        return max(found, key=lambda dense: dense.width, default=None)

    @property
    def experts(self) -> Experts | None:
        """The experts of the layers that have some, None if none has."""
        return next((layer.ffn for layer in self.layers if isinstance(layer.ffn, Experts)), None)

    # ---- elements --------------------------------------------------------------------------------------------------

    @property
    def head_elements(self) -> int:
        """Elements of the LM head, and of the embedding."""
        return self.vocab * self.hidden if self.head else 0

    def elements(self) -> Mapping[str, int]:
        """Matrix elements by use: projections, compressors (DeepSeek-V4), ffn, router, shared (experts), experts, head,
        embedding."""
        total: Counter[str] = Counter()
        for layer in self.layers:
            total["projections"] += layer.count * layer.attention.weights(self.hidden)
            if isinstance(layer.attention, Compressed):
                total["compressors"] += layer.count * layer.attention.compressors(self.hidden)
            if not isinstance(layer.ffn, Experts):
                total["ffn"] += layer.count * layer.ffn.weights(self.hidden)
                continue
            total["router"] += layer.count * layer.ffn.router(self.hidden)
            total["shared"] += layer.count * layer.ffn.shared_weights(self.hidden)
            total["experts"] += layer.count * layer.ffn.count * layer.ffn.expert(self.hidden)
        total["head"] = self.head_elements
        total["embedding"] = 0 if self.tied or not self.head else self.head_elements
        further = self.num_layers * self.layer_embedding  # of a token
        total["projections"] += further * self.hidden
        total["ffn"] += 2 * further * self.hidden
        total["embedding"] += further * self.vocab if self.head else 0
        return total

    @property
    def active_expert_elements(self) -> int:
        """Elements of the routed experts that one token uses, all layers."""
        return sum(
            layer.count * layer.ffn.active * layer.ffn.expert(self.hidden)
            for layer in self.layers
            if isinstance(layer.ffn, Experts)
        )

    @property
    def active(self) -> int:
        """Matrix elements that one token's pass multiplies with: head included, input embedding not."""
        return sum({**self.elements(), "experts": self.active_expert_elements, "embedding": 0}.values())

    # ---- bytes -----------------------------------------------------------------------------------------------------

    @property
    def resident_bytes(self) -> float:
        """Bytes of all weights, which must be held in memory."""
        return self._bytes(self.elements())

    @property
    def streamed_bytes(self) -> float:
        """Bytes of weights that a pass over one token reads."""
        return self._bytes({**self.elements(), "experts": self.active_expert_elements, "embedding": 0})

    def _bytes(self, elements: Mapping[str, int]) -> float:
        return sum(size * self.precision.format_of(part).bytes for part, size in elements.items())

    def kv_bytes(self, context: float) -> float:
        """Bytes that one sequence of `context` positions caches: keys and values, latents, states."""
        return sum(layer.count * layer.attention.kv_bytes(context, self.precision) for layer in self.layers)


def with_scales(details: DecoderDetails, scales: Mapping[str, float | Multipliers | None]) -> DecoderDetails:
    """The details with multipliers and caps by their names."""
    return replace(details, **scales)  # type: ignore[arg-type]


def not_runnable(name: str) -> ModelError:
    """The error for a model of which only the shape is known."""
    return ModelError(
        f"The engine does not run {name}: only the shape of this family is known, for `wager plan`.",
        "Give a model of a family that the engine runs.",
    )


def stacked(attention: Iterable[Attention], ffn: Iterable[FeedForward]) -> tuple[tuple[Layer, ...], tuple[int, ...]]:
    """ModelSpec.layers, each shape once, and DecoderDetails.layer_order, from the attention and the feed-forward of
    every layer, first to last."""
    pairs = list(zip(attention, ffn, strict=True))
    counts = Counter(pairs)
    index = {pair: position for position, pair in enumerate(counts)}
    layers = tuple(Layer(kind, feed, count) for (kind, feed), count in counts.items())
    return layers, tuple(index[pair] for pair in pairs)
