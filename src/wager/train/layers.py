"""What the modules of drafters are made of: norms, rotation, attention over shared context and own guesses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


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


class DraftNorm(nn.Module):
    """RMSNorm with a weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class GatedMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, width: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=bias)
        self.up_proj = nn.Linear(hidden, width, bias=bias)
        self.down_proj = nn.Linear(width, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


class Projections(nn.Module):
    """The matrices of an attention whose inputs are `inputs` wide, with biases of queries, keys and values (`bias`) or
    of the output."""

    def __init__(
        self,
        inputs: int,
        hidden: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        bias: bool = False,
        output_bias: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(inputs, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(inputs, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(inputs, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=output_bias)

    def heads(self, projected: Tensor) -> Tensor:
        """[B, rows, heads * d] as float32 [B, heads, rows, d]."""
        return projected.float().view(*projected.shape[:2], -1, self.head_dim).transpose(1, 2)

    def output(self, found: Tensor) -> Tensor:
        """The output projection of [B, heads, rows, d]."""
        out: Tensor = self.o_proj(found.transpose(1, 2).flatten(2))
        return out


def attend(
    q: Tensor, keys: Tensor, values: Tensor, allowed: Tensor, own: Sequence[tuple[Tensor, Tensor]] = ()
) -> Tensor:
    """Attention of q [B, h, n, d] over shared keys and values [B, kv, T, d] where `allowed` bool [B or 1, n, T], and
    over `own` pairs [B, kv, n, d], of which every row sees its own only (the diagonal of earlier unrolled steps)."""
    groups = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    own = [(k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)) for k, v in own]
    scale = q.shape[-1] ** -0.5
    scores = (q @ keys.transpose(-1, -2)).float() * scale
    scores = scores.masked_fill(~allowed[:, None], float("-inf"))
    diagonal = [(q * k).sum(-1, keepdim=True) * scale for k, _ in own]
    shares = torch.cat([scores, *diagonal], -1).softmax(-1)
    context = keys.shape[2]
    found: Tensor = shares[..., :context].to(values.dtype) @ values
    for number, (_, v) in enumerate(own):
        found = found + shares[..., context + number, None] * v
    return found
