"""The target in torch: its hidden states and distributions by teacher-forced passes over dequantised weights, and their
store on disk.

It computes what the engine's kernels do up to rounding: residuals in float32, products in `dtype`. States are most of a
pass's work, so they can be kept after the first pass: one file of bfloat16 for taps, one for final states, one byte for
each text that says whether they are there. States of a batch are kept together or not at all, so that a resumed run
computes what is missing in the same batches.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from wager.arch.layers import Dense, Gqa
from wager.arch.spec import ModelSpec
from wager.errors import UsageError
from wager.models.weights import Weights
from wager.train.data import TextBatch, TrainingData, TrainingText


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


class StateSource:
    """States of batches: computed, and with `folder` kept there for the next pass."""

    def __init__(self, target: TorchTarget, data: TrainingData, *, identity: str, folder: Path | None = None) -> None:
        self.target, self._folder = target, folder
        if folder is None:
            return
        lengths = [min(len(text.ids), data.longest) for text in data.train]
        self._places = {text: place for place, text in enumerate(data.train)}
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        hidden, rows = target.spec.hidden, int(self._starts[-1])
        written = {"identity": identity, "data": data.digest, "taps": list(target.taps), "longest": data.longest}
        digest = hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()[:16]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._taps = _mapped(folder / f"{digest}.taps", (rows, len(target.taps), hidden), np.uint16)
            self._final = _mapped(folder / f"{digest}.final", (rows, hidden), np.uint16)
            self._kept = _mapped(folder / f"{digest}.kept", (len(lengths),), np.uint8)
        except OSError as error:
            raise UsageError(f"States cannot be kept in {folder}: {error}.", "Give another --states folder.") from error

    def of(self, texts: list[TrainingText], batch: TextBatch) -> TargetStates:
        """The states of a batch made of these texts."""
        device = self.target.device
        tokens, weights = torch.from_numpy(batch.tokens).to(device), torch.from_numpy(batch.weights).to(device)
        if self._folder is None:
            return self.target.states(tokens, weights)
        places = [self._places[text] for text in texts]
        if not all(self._kept[place] for place in places):
            self._keep(places, self.target.states(tokens, weights))
        return self._read(places, tokens, weights)

    def _keep(self, places: list[int], states: TargetStates) -> None:
        for row, place in enumerate(places):
            first, last = self._starts[place], self._starts[place + 1]
            self._taps[first:last] = _bits(states.taps[row, : last - first])
            self._final[first:last] = _bits(states.final[row, : last - first])
        self._taps.flush()
        self._final.flush()
        self._kept[places] = 1

    def _read(self, places: list[int], tokens: Tensor, weights: Tensor) -> TargetStates:
        batch, longest = tokens.shape
        taps = torch.zeros(batch, longest, *self._taps.shape[1:], dtype=torch.bfloat16)
        final = torch.zeros(batch, longest, self._final.shape[1], dtype=torch.bfloat16)
        for row, place in enumerate(places):
            first, last = self._starts[place], self._starts[place + 1]
            taps[row, : last - first] = _floats(self._taps[first:last])
            final[row, : last - first] = _floats(self._final[first:last])
        device = self.target.device
        return TargetStates(tokens, taps.to(device).float(), final.to(device).float(), weights)


def _mapped(path: Path, shape: tuple[int, ...], dtype: type[np.generic]) -> np.memmap:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if not path.exists() or path.stat().st_size != size:
        with path.open("wb") as file:
            file.truncate(size)
    return np.memmap(path, dtype, "r+", shape=shape)


def _bits(values: Tensor) -> np.ndarray:
    return values.to(torch.bfloat16).cpu().contiguous().view(torch.uint16).numpy()


def _floats(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(bits)).view(torch.bfloat16)


def choose_device(device: str) -> str:
    """`cpu` or `cuda`; `auto` is the latter where there is one. UsageError if it is not there."""
    found = torch.cuda.is_available()
    if device == "cuda" and not found:
        raise UsageError("--device cuda: torch finds no CUDA device.", "Take --device cpu.")
    return device if device != "auto" else "cuda" if found else "cpu"


def choose_precision(precision: str, device: str) -> str:
    """`bfloat16` or `float32`; `auto` is the former where the device multiplies it."""
    if precision != "auto":
        return precision
    fast = device == "cuda" or torch.cpu.get_capabilities().get("avx512_bf16", False)
    return "bfloat16" if fast else "float32"


def use_threads(threads: int | None) -> None:
    """Threads of products on a CPU; None: all cores."""
    if threads is not None:
        torch.set_num_threads(threads)
