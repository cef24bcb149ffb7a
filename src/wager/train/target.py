"""The target in torch: its hidden states and distributions by teacher-forced passes over dequantised weights.

It computes what the engine's kernels do up to rounding: residuals in float32, products in `dtype`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from wager.arch.layers import Attention, Dense, Gqa
from wager.arch.spec import ModelSpec
from wager.errors import UsageError
from wager.models.weights import Weights

Function = TypeVar("Function", bound=Callable[..., Any])


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.config.suppress_errors = True  # what cannot be compiled runs as it is
    return torch.compile(function, dynamic=True)


def compiled(function: Function, device: str) -> Function:
    """The function; for a GPU compiled for any number of rows, since many small kernels are what takes the time
    there."""
    return cast(Function, _compiled(function)) if device == "cuda" else function


def uncompiled(device: str) -> AbstractContextManager[Any]:
    """Inside, functions run as they are: for few texts, each of its own shape. Elsewhere than on a GPU they do anyway,
    and torch's compiler, which takes two seconds to import, is not asked."""
    return torch.compiler.set_stance("force_eager") if device == "cuda" else nullcontext()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary embedding of half-split heads: x [B, heads, rows, d], `rotation` cos | sin [rows, d] or [B, rows, d]."""
    cos, sin = rotation.chunk(2, -1)
    if rotation.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _projected(
    layer: Mapping[str, Tensor], x: Tensor, rotation: Tensor, head_dim: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries [1, heads, N, d] and keys, and values [1, kv, N, d], of the residual stream of N rows [1, N, H]
    with `rotation` [N, d]."""
    dtype = layer["q"].dtype
    normed = rms_norm(x, layer["attn_norm"], eps).to(dtype)

    def heads(part: str) -> Tensor:
        found = functional.linear(normed, layer[part], layer.get(f"{part}_bias"))
        return found.float().view(*found.shape[:2], -1, head_dim).transpose(1, 2)

    q, k, v = heads("q"), heads("k"), heads("v")
    if "q_norm" in layer:
        q, k = rms_norm(q, layer["q_norm"], eps), rms_norm(k, layer["k_norm"], eps)
    return rotate(q, rotation).to(dtype), rotate(k, rotation).to(dtype), v.to(dtype)


def _behind(layer: Mapping[str, Tensor], x: Tensor, found: Tensor, eps: float) -> Tensor:
    """The residual stream [1, N, H] behind a layer, from that before it and what its attention found [1, N, h * d]."""
    x = x + functional.linear(found, layer["o"], layer.get("o_bias")).float()
    normed = rms_norm(x, layer["mlp_norm"], eps).to(layer["gate"].dtype)
    gate = functional.linear(normed, layer["gate"], layer.get("gate_bias"))
    up = functional.linear(normed, layer["up"], layer.get("up_bias"))
    return x + functional.linear(functional.silu(gate) * up, layer["down"], layer.get("down_bias")).float()


Remember = Callable[[int, Tensor, Tensor], None]


@dataclass(frozen=True)
class TargetStates:
    """States of B texts of up to T tokens, padded on the right.

    `tokens` int64 [B, T]; `taps` [B, T, n_aux, H], the residual stream at the tapped layers; `final` [B, T, H], what
    enters the output matrix; `weights` float32 [B, T], of the distribution after each token in the loss, 0 for padding.
    """

    tokens: Tensor
    taps: Tensor
    final: Tensor
    weights: Tensor


def default_taps(layers: int) -> tuple[int, ...]:
    """The layers that EAGLE-3 taps, as far as the model has them: id i is the residual stream after i layers."""
    return tuple(sorted({min(2, layers - 1), layers // 2, max(layers - 3, 0)}))


def check_trainable(spec: ModelSpec) -> tuple[Gqa, Dense]:
    """The attention and the feed-forward of a target whose states can be computed here, or UsageError."""
    attention, dense, details = spec.attention, spec.dense, spec.details
    if not isinstance(attention, Gqa) or spec.experts is not None or dense is None:
        raise UsageError(
            f"{spec.name} cannot be trained for: it has latent attention or experts.",
            "Give a dense model with grouped-query attention.",
        )
    unlike = [name for name, value in _COMPUTED.items() if getattr(details, name) != value]
    if unlike or details.rope.long_factors or any(_unlike(layer.attention) for layer in spec.layers):
        raise UsageError(
            f"{spec.name} cannot be trained for: training does not compute what its family does otherwise than Llama.",
            "Draft by lookup (ngram, suffix, store), with a smaller model, or with some of its own layers.",
        )
    return attention, dense


_COMPUTED: Mapping[str, Any] = {
    "activation": "silu",
    "pre_norms": True,
    "post_norms": False,
    "whole_qk_norm": False,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "attention_cap": None,
    "logit_cap": None,
}
"""What TorchTarget computes, where models may differ."""


def _unlike(attention: Attention) -> bool:
    return not isinstance(attention, Gqa) or (
        attention.rotation != "global" or attention.rotated is not None or attention.gated
    )


class TorchTarget:
    """A target's weights in torch. `taps` are layer ids: i is the residual stream after i layers, 0 the embeddings."""

    def __init__(
        self, weights: Weights, taps: Sequence[int], *, dtype: torch.dtype, device: str = "cpu", positions: int = 2048
    ) -> None:
        spec = self.spec = weights.spec
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
        """The states of padded token ids [B, T], no longer than its positions; `weights` is handed on."""
        found: dict[int, Tensor] = {}
        for layer, x in enumerate(self.residuals(tokens)):
            if layer in self.taps or layer == len(self.layers):
                found[layer] = x
        taps = torch.stack([found[tap] for tap in self.taps], 2)
        final = rms_norm(found[len(self.layers)], self.final_norm, self.spec.details.norm_eps)
        return TargetStates(tokens, taps, final, weights)

    def residuals(self, tokens: Tensor, remember: Remember | None = None) -> Iterator[Tensor]:
        """The residual stream float32 [B, T, H] of token ids [B, T] before the first layer and after each one;
        `remember` gets each layer's number, keys and values [B, kv, T, d]."""
        x = functional.embedding(tokens, self.embedding).float()
        yield x
        rotation = self.rotation[: tokens.shape[1]].repeat(len(tokens), 1)
        for index, layer in enumerate(self.spec.ordered_layers):
            found = self._attention(index, cast(Gqa, layer.attention), x, rotation, remember)
            x = self.behind(index, x.flatten(0, 1), found.transpose(1, 2).flatten(2).flatten(0, 1)).view(x.shape)
            yield x

    def logits(self, final: Tensor) -> Tensor:
        """float32 [..., V] of states that enter the output matrix."""
        return functional.linear(final.to(self.dtype), self.head).float()

    def _attention(self, index: int, attention: Gqa, x: Tensor, rotation: Tensor, remember: Remember | None) -> Tensor:
        """What the attention of a layer finds, [B, heads, T, d]; `rotation` [B * T, d]."""
        shape = x.shape[:2]
        q, k, v = (
            part.view(len(part), *shape, -1).transpose(0, 1)
            for part in self.projected(index, attention, x.flatten(0, 1), rotation)
        )
        if remember is not None:
            remember(index, k, v)
        mask, rows = None, shape[1]
        if attention.window is not None and attention.window < rows:
            ones = torch.ones(rows, rows, dtype=torch.bool, device=x.device)
            mask = ones.tril() & ones.triu(1 - attention.window)
        scale = self.spec.details.attention_scale
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True, scale=scale
        )

    def projected(self, index: int, attention: Gqa, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [heads, N, d] and keys, and values [kv, N, d], of a layer for the residual stream [N, H]
        before it; `rotation` [N, d]."""
        project = compiled(_projected, self.device)
        q, k, v = project(self.layers[index], x[None], rotation, attention.head_dim, self.spec.details.norm_eps)
        return q[0], k[0], v[0]

    def behind(self, index: int, x: Tensor, found: Tensor) -> Tensor:
        """The residual stream [N, H] behind a layer, of that before it and what its attention found [N, h * d]."""
        return compiled(_behind, self.device)(self.layers[index], x[None], found[None], self.spec.details.norm_eps)[0]


def choose_device(device: str, precision: str, *, threads: int | None) -> tuple[str, str]:
    """The device, `cpu` or `cuda`, and the precision of products, `bfloat16` or `float32`; `auto` is CUDA where there
    is one, and bfloat16 where the device multiplies it. `threads` of products on a CPU (None: all cores) are set.
    UsageError if the device is not there."""
    if threads is not None:
        torch.set_num_threads(threads)
    cuda = torch.cuda.is_available()
    if device == "cuda" and not cuda:
        raise UsageError("--device cuda: torch finds no CUDA device.", "Take --device cpu.")
    found = device if device != "auto" else "cuda" if cuda else "cpu"
    if found == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it prepares every shape for longer than it computes it
    if precision != "auto":
        return found, precision
    fast = found == "cuda" or torch.cpu.get_capabilities().get("avx512_bf16", False)
    return found, "bfloat16" if fast else "float32"
