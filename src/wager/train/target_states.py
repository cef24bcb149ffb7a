"""The target's hidden states and laws by a teacher-forced pass in torch: plain, batched, of dequantised weights.

It computes what the engine's kernels do up to rounding: residuals in float32, products in `dtype`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from wager.arch.layers import Dense, Gqa
from wager.arch.spec import ModelSpec
from wager.errors import UsageError
from wager.models.weights import Weights
from wager.train.layers import rms_norm, rotate


@dataclass(frozen=True)
class TargetStates:
    """States of B texts of up to T tokens, padded on the right.

    `tokens` int64 [B, T]; `taps` [B, T, n_aux, H], the residual stream at the tapped layers; `final` [B, T, H], what
    enters the output matrix; `weights` float32 [B, T], what the law after each token counts in the loss, 0 for padding.
    """

    tokens: Tensor
    taps: Tensor
    final: Tensor
    weights: Tensor


def default_taps(layers: int) -> tuple[int, ...]:
    """The layers that EAGLE-3 taps, as far as there are so many: id i is the residual stream after i layers."""
    return tuple(sorted({min(2, layers - 1), layers // 2, max(layers - 3, 0)}))


def check_trainable(spec: ModelSpec) -> None:
    """UsageError unless the target is one whose states can be computed here."""
    if not isinstance(spec.attention, Gqa) or spec.experts is not None or spec.dense is None:
        raise UsageError(
            f"{spec.name} cannot be trained for: it has latent attention or experts.",
            "Give a dense model with grouped-query attention.",
        )


class TorchTarget:
    """A target's weights in torch. `taps` are layer ids: i is the residual stream after i layers, 0 the embeddings."""

    def __init__(
        self, weights: Weights, taps: Sequence[int], *, dtype: torch.dtype, device: str = "cpu", positions: int = 2048
    ) -> None:
        spec = self.spec = weights.spec
        check_trainable(spec)
        bad = [tap for tap in taps if not 0 <= tap <= spec.num_layers]
        if bad or not taps:
            raise UsageError(
                f"Layer {bad[:1] or 'ids'} cannot be tapped: {spec.name} has layers 0 to {spec.num_layers}."
            )
        self.taps, self.dtype, self.device = tuple(taps), dtype, device
        self.embedding = self._read(weights, "embed.weight", dtype)
        self.head = self.embedding if spec.tied else self._read(weights, "head.weight", dtype)
        self.final_norm = self._read(weights, "norm.weight", torch.float32)
        self.layers = [self._layer(weights, index) for index in range(spec.num_layers)]
        table = spec.details.rope.table(positions, spec.attention.rope_dim)
        self.rotation = torch.from_numpy(table).to(device)

    def _read(self, weights: Weights, name: str, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(weights.read(name)).to(self.device, dtype)

    def _layer(self, weights: Weights, index: int) -> dict[str, Tensor]:
        details = self.spec.details
        matrices = ["q", "k", "v", "o", "gate", "up", "down"]
        found = {part: self._read(weights, f"layers.{index}.{part}.weight", self.dtype) for part in matrices}
        norms = ["attn_norm", "mlp_norm", *(["q_norm", "k_norm"] if details.qk_norm else [])]
        found |= {part: self._read(weights, f"layers.{index}.{part}.weight", torch.float32) for part in norms}
        biased = [*("qkv" if details.qkv_bias else ""), *("o" if details.output_bias else "")]
        biased += ["gate", "up", "down"] if details.mlp_bias else []
        found |= {f"{part}_bias": self._read(weights, f"layers.{index}.{part}.bias", self.dtype) for part in biased}
        return found

    @torch.no_grad()
    def states(self, tokens: Tensor, weights: Tensor) -> TargetStates:
        """The states of padded token ids [B, T]; `weights` is handed on. UsageError for texts beyond its positions."""
        if tokens.shape[1] > len(self.rotation):
            raise UsageError(
                f"A text of {tokens.shape[1]} tokens exceeds the {len(self.rotation)} positions of a batch."
            )
        x = functional.embedding(tokens, self.embedding).float()
        found = {0: x}
        for index, layer in enumerate(self.spec.ordered_layers):
            if not isinstance(layer.attention, Gqa) or not isinstance(layer.ffn, Dense):
                raise UsageError(f"Layer {index} of {self.spec.name} cannot be computed here.")
            x = x + self._attention(self.layers[index], layer.attention, x)
            x = x + self._feed_forward(self.layers[index], x)
            found[index + 1] = x
        taps = torch.stack([found[tap] for tap in self.taps], 2)
        return TargetStates(tokens, taps, rms_norm(x, self.final_norm, self.spec.details.norm_eps), weights)

    def logits(self, final: Tensor) -> Tensor:
        """float32 [..., V] of states that enter the output matrix."""
        return functional.linear(final.to(self.dtype), self.head).float()

    def _attention(self, layer: dict[str, Tensor], attention: Gqa, x: Tensor) -> Tensor:
        details, (batch, rows, _) = self.spec.details, x.shape
        normed = rms_norm(x, layer["attn_norm"], details.norm_eps).to(self.dtype)

        def heads(part: str) -> Tensor:
            found = functional.linear(normed, layer[part], layer.get(f"{part}_bias"))
            return found.float().view(batch, rows, -1, attention.head_dim).transpose(1, 2)

        q, k, v = heads("q"), heads("k"), heads("v")
        if details.qk_norm:
            q = rms_norm(q, layer["q_norm"], details.norm_eps)
            k = rms_norm(k, layer["k_norm"], details.norm_eps)
        q, k = rotate(q, self.rotation[:rows]), rotate(k, self.rotation[:rows])
        mask = None
        if attention.window is not None and attention.window < rows:
            ones = torch.ones(rows, rows, dtype=torch.bool, device=x.device)
            mask = ones.tril() & ones.triu(1 - attention.window)
        out = functional.scaled_dot_product_attention(
            q.to(self.dtype),
            k.to(self.dtype),
            v.to(self.dtype),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
            scale=details.attention_scale,
        )
        return functional.linear(out.transpose(1, 2).reshape(batch, rows, -1), layer["o"], layer.get("o_bias")).float()

    def _feed_forward(self, layer: dict[str, Tensor], x: Tensor) -> Tensor:
        normed = rms_norm(x, layer["mlp_norm"], self.spec.details.norm_eps).to(self.dtype)
        gate = functional.linear(normed, layer["gate"], layer.get("gate_bias"))
        up = functional.linear(normed, layer["up"], layer.get("up_bias"))
        return functional.linear(functional.silu(gate) * up, layer["down"], layer.get("down_bias")).float()
