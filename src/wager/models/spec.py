"""What a decoder is, as plain values: shapes, rotation, windows, and the physics that follows from them.

Knows no family names that decide anything, no files and no torch: whoever fills a ModelSpec (families.py) has already
turned every difference between families into a value here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding with whatever scaling, reduced to numbers.

    Pair i of a head turns by position * theta^(-2i/d) / factors[i]; no factors means all ones. `magnitude` multiplies
    both cosine and sine (YaRN's attention factor, which thereby scales queries and keys alike).
    """

    theta: float
    factors: tuple[float, ...] = ()
    magnitude: float = 1.0

    def table(self, positions: int, head_dim: int) -> NDArray[np.float32]:
        """cos | sin of every angle, float32 [positions, head_dim], computed in float64.

        The frequencies are rounded to float32 first, because that is what models are trained with.
        """
        exponents = np.arange(0, head_dim, 2) / head_dim
        frequencies = self.theta**-exponents / np.array(self.factors or 1.0)
        angles = np.outer(np.arange(positions), frequencies.astype(np.float32).astype(np.float64))
        return (self.magnitude * np.concatenate([np.cos(angles), np.sin(angles)], axis=1)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A pre-norm decoder with grouped-query attention and a SwiGLU, every size and switch of it.

    `width` is the feed-forward's inner size, `context` the most positions the model was made for. `windows` gives each
    layer's sliding window (None: all positions). `tied`: the head is the embedding matrix.
    """

    architecture: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    context: int
    norm_eps: float
    rope: Rope
    windows: tuple[int | None, ...]
    tied: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def qkv(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def layer_elements(self) -> int:
        """Elements of the matrices of one layer: what a pass streams per layer."""
        return self.hidden * (self.qkv + self.heads * self.head_dim) + 3 * self.hidden * self.width

    @property
    def head_elements(self) -> int:
        return self.vocab * self.hidden

    @property
    def streamed_elements(self) -> int:
        """Matrix elements every pass reads, head included, embedding rows excluded."""
        return self.layers * self.layer_elements + self.head_elements

    @property
    def vector_elements(self) -> int:
        """Norm weights and biases."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        biases = (self.qkv if self.qkv_bias else 0) + (self.hidden if self.output_bias else 0)
        biases += 2 * self.width + self.hidden if self.mlp_bias else 0
        return self.layers * (norms + biases) + self.hidden

    @property
    def parameters(self) -> int:
        """Distinct parameters: a tied head counts once."""
        embedding = 0 if self.tied else self.head_elements
        return self.streamed_elements + embedding + self.vector_elements

    @property
    def kv_elements(self) -> int:
        """Elements of keys and values that one position caches, all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim

    def kv_reads(self, context: int) -> int:
        """Cached positions one row at position `context` reads, summed over layers; windows cap them."""
        return sum(min(context, window or context) for window in self.windows)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model under its canonical name, with its shape; matrices are [outputs, inputs]."""
        hidden, heads, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab, hidden)}
        for layer in range(self.layers):
            rows = {"q": heads, "k": kv, "v": kv, "o": hidden, "gate": self.width, "up": self.width, "down": hidden}
            columns = {"o": heads, "down": self.width}
            biased = {
                **dict.fromkeys("qkv", self.qkv_bias),
                "o": self.output_bias,
                **dict.fromkeys(("gate", "up", "down"), self.mlp_bias),
            }
            part: dict[str, tuple[int, ...]] = {"attn_norm.weight": (hidden,), "mlp_norm.weight": (hidden,)}
            if self.qk_norm:
                part |= {"q_norm.weight": (self.head_dim,), "k_norm.weight": (self.head_dim,)}
            for name, size in rows.items():
                part[f"{name}.weight"] = (size, columns.get(name, hidden))
                if biased[name]:
                    part[f"{name}.bias"] = (size,)
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in part.items()}
        shapes["norm.weight"] = (hidden,)
        if not self.tied:
            shapes["head.weight"] = (self.vocab, hidden)
        return shapes
