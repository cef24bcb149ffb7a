"""A model's published shape as numbers, for any family: layers of attention and feed-forward, head, precision.

Everything a cost model asks of a model, and nothing it computes. Knows no machine, no tensors, no files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from wager.arch.attention import Attention, Gqa, Mla
from wager.arch.formats import Precision
from wager.arch.spec import ModelSpec
from wager.errors import UsageError


@dataclass(frozen=True, slots=True)
class Dense:
    """A gated feed-forward: gate, up and down projection."""

    width: int

    def weights(self, hidden: int) -> int:
        return 3 * hidden * self.width


@dataclass(frozen=True, slots=True)
class Experts:
    """`count` routed experts of `width`, `active` of them per token, and `shared` ones that every token uses."""

    count: int
    active: int
    shared: int
    width: int
    shared_width: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.active <= self.count or self.shared < 0 or self.width < 1:
            raise UsageError(
                f"{self.count} experts of width {self.width} with {self.active} active and {self.shared} shared "
                "are not a layer.",
                "Between one and all of the experts are active.",
            )

    def expert(self, hidden: int) -> int:
        """Elements of one routed expert."""
        return 3 * hidden * self.width

    def shared_weights(self, hidden: int) -> int:
        return 3 * hidden * self.shared * (self.shared_width or self.width)

    def router(self, hidden: int) -> int:
        return hidden * self.count


@dataclass(frozen=True, slots=True)
class Layer:
    """`count` layers alike. Their order does not matter to what they cost."""

    attention: Attention
    ffn: Dense | Experts
    count: int = 1


@dataclass(frozen=True, slots=True)
class Model:
    """A model's shape. `context` is the most positions it was made for; `head` False leaves the head out of every
    bill, as some published charts do; `source` says where the dimensions are from."""

    name: str
    hidden: int
    vocab: int
    tied: bool
    layers: tuple[Layer, ...]
    precision: Precision
    context: int
    head: bool = True
    router: bool = True
    source: str = ""

    @property
    def depth(self) -> int:
        """Layers."""
        return sum(layer.count for layer in self.layers)

    @property
    def head_elements(self) -> int:
        return self.vocab * self.hidden if self.head else 0

    @property
    def sparse(self) -> bool:
        """Some layer has routed experts."""
        return any(isinstance(layer.ffn, Experts) for layer in self.layers)

    def elements(self) -> Mapping[str, int]:
        """Matrix elements by use: projections, ffn, router, shared (experts), experts, head, embedding."""
        total: Counter[str] = Counter()
        for layer in self.layers:
            total["projections"] += layer.count * layer.attention.weights(self.hidden)
            if isinstance(layer.ffn, Dense):
                total["ffn"] += layer.count * layer.ffn.weights(self.hidden)
                continue
            total["router"] += layer.count * layer.ffn.router(self.hidden) if self.router else 0
            total["shared"] += layer.count * layer.ffn.shared_weights(self.hidden)
            total["experts"] += layer.count * layer.ffn.count * layer.ffn.expert(self.hidden)
        total["head"] = self.head_elements
        total["embedding"] = 0 if self.tied or not self.head else self.head_elements
        return total

    @property
    def parameters(self) -> int:
        """Distinct parameters of the matrices, and of two norms a layer and one at the end."""
        return sum(self.elements().values()) + (2 * self.depth + 1) * self.hidden

    @property
    def active(self) -> int:
        """Elements that one token's pass multiplies with: head included, input embedding not."""
        idle = sum(
            layer.count * (layer.ffn.count - layer.ffn.active) * layer.ffn.expert(self.hidden)
            for layer in self.layers
            if isinstance(layer.ffn, Experts)
        )
        elements = self.elements()
        return sum(elements.values()) - elements["embedding"] - idle

    @property
    def resident_bytes(self) -> float:
        """Bytes of all weights: what a machine must hold."""
        formats = {"experts": self.precision.experts, "shared": self.precision.shared}
        return sum(size * formats.get(part, self.precision.weights).bytes for part, size in self.elements().items())

    @property
    def streamed_bytes(self) -> float:
        """Bytes of weights that a pass over one token reads."""
        active = sum(
            layer.count * layer.ffn.active * layer.ffn.expert(self.hidden)
            for layer in self.layers
            if isinstance(layer.ffn, Experts)
        )
        elements = {**self.elements(), "experts": active, "embedding": 0}
        formats = {"experts": self.precision.experts, "shared": self.precision.shared}
        return sum(size * formats.get(part, self.precision.weights).bytes for part, size in elements.items())

    def kv_bytes(self, context: float) -> float:
        """Bytes that one sequence of `context` positions keeps: keys and values, latents, states."""
        return sum(layer.count * layer.attention.kv_bytes(context, self.precision) for layer in self.layers)


def from_spec(spec: ModelSpec, *, name: str = "", precision: Precision | None = None) -> Model:
    """The physics of a decoder that the engine can run; layers alike are counted together."""
    alike = Counter((window, spec.has_experts(layer)) for layer, window in enumerate(spec.windows))
    return Model(
        name=name or spec.architecture,
        hidden=spec.hidden,
        vocab=spec.vocab,
        tied=spec.tied,
        layers=tuple(
            Layer(_attention(spec, window), _feed_forward(spec, sparse=sparse), count)
            for (window, sparse), count in alike.items()
        ),
        precision=precision or Precision.of("bf16"),
        context=spec.context,
        source="the model's own files",
    )


def _attention(spec: ModelSpec, window: int | None) -> Attention:
    latent = spec.latent
    if latent is None:
        return Gqa(spec.heads, spec.kv_heads, spec.head_dim, window)
    return Mla(spec.heads, latent.q_rank or None, latent.rank, latent.nope, latent.rope, latent.value)


def _feed_forward(spec: ModelSpec, *, sparse: bool) -> Dense | Experts:
    how = spec.experts
    if how is None or not sparse:
        return Dense(spec.width)
    shared, width = (how.shared // how.width, None) if how.shared % how.width == 0 else (1, how.shared)
    return Experts(how.count, how.chosen, shared, how.width, width)
