"""EAGLE-3's draft module in torch (arXiv 2503.01840), with the normalisations of 3.1 or without, unrolled as it will
be used.

Row t holds the target's states of position t and the embedding of the token after it, and guesses the token after that.
Step j feeds back the module's own output and the next token's embedding at position t + j; its query sees the keys of
step 0 up to row t and those of its own row from the steps between ("training-time test").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from wager.train.data import DraftVocabulary
from wager.train.draft_module import (
    DraftModule,
    DraftNorm,
    DraftSizes,
    GatedMlp,
    Projections,
    StepRows,
    attend,
    drawn_rows,
)
from wager.train.target import TargetStates, TorchTarget, compiled

_MLP_SCALE = 0.05
"""The target's residual at its last layer is about this much larger than a normed one."""
_DEPTH_SHARE = 0.6
"""The share of rows that each further step of training keeps."""


class EagleLayer(nn.Module):
    """The one decoder layer, under the names of published checkpoints."""

    def __init__(self, sizes: DraftSizes) -> None:
        super().__init__()
        hidden, eps = sizes.hidden, sizes.norm_eps
        self.input_layernorm = DraftNorm(hidden, eps)
        self.hidden_norm = DraftNorm(hidden, eps)
        self.self_attn = Projections(sizes, inputs=2 * hidden)
        self.post_attention_layernorm = DraftNorm(hidden, eps)
        self.mlp = GatedMlp(hidden, sizes.inner)


@dataclass(frozen=True)
class _Unrolled:
    """A row's outputs and own keys and values so far, all for the rows `rows` int64 [B, n]."""

    rows: Tensor
    state: Tensor
    own: tuple[tuple[Tensor, Tensor], ...]

    def take(self, chosen: Tensor) -> _Unrolled:
        """The rows at places `chosen` int64 [B, m]."""

        def pick(values: Tensor, dim: int) -> Tensor:
            shape = [1] * values.dim()
            shape[0], shape[dim] = chosen.shape
            sizes = list(values.shape)
            sizes[dim] = chosen.shape[1]
            return values.gather(dim, chosen.view(shape).expand(sizes))

        own = tuple((pick(k, 2), pick(v, 2)) for k, v in self.own)
        return _Unrolled(pick(self.rows, 1), pick(self.state, 1), own)


class EagleModule(DraftModule):
    """One EAGLE-3 layer over fused taps."""

    def __init__(self, sizes: DraftSizes) -> None:
        super().__init__(sizes)
        taps = sizes.taps
        self.fc = nn.Linear(len(taps) * sizes.hidden, sizes.hidden, bias=False)
        if sizes.state_norms:
            self.fc_norm = nn.ModuleList(DraftNorm(sizes.hidden, sizes.norm_eps) for _ in taps)
        self.layers = nn.ModuleList([EagleLayer(sizes)])
        self.norm = DraftNorm(sizes.hidden, sizes.norm_eps)

    def attach(self, target: TorchTarget, vocabulary: DraftVocabulary) -> None:
        """As DraftModule's; the state begins as the deepest tap, the feed-forward as that of the target's last layer,
        scaled to the normed residual, as far as it is as wide."""
        super().attach(target, vocabulary)
        layer, last, sizes = self._only, target.layers[-1], self.sizes
        self.norm.weight.data.copy_(target.final_norm)
        self.fc.weight.data.mul_(0.1)
        self.fc.weight.data[:, -sizes.hidden :] += torch.eye(sizes.hidden, device=target.device)
        layer.post_attention_layernorm.weight.data.copy_(last["mlp_norm"])
        inner = min(sizes.inner, len(last["gate"]))
        layer.mlp.gate_proj.weight.data[:inner] = last["gate"][:inner].float()
        layer.mlp.up_proj.weight.data[:inner] = last["up"][:inner].float()
        layer.mlp.down_proj.weight.data[:, :inner] = last["down"][:, :inner].float() * _MLP_SCALE
        self._fuse = compiled(self._fused, target.device)
        self._enter = compiled(self._entered, target.device)
        self._leave = compiled(self._left, target.device)

    def steps(self, states: TargetStates, depth: int, generator: torch.Generator | None) -> Iterator[StepRows]:
        tokens, positions = states.tokens, states.tokens.shape[1] - 1
        rows = torch.arange(positions, device=tokens.device).expand(len(tokens), positions)
        fused = self._fuse(states.taps[:, :-1].flatten(0, 1))
        done = _Unrolled(rows, fused.view(*rows.shape, -1), ())
        keys: tuple[Tensor, Tensor] | None = None
        for step in range(depth):
            if step and generator is not None:
                counted = states.weights.gather(1, self._ahead(done, step, positions))
                done = done.take(drawn_rows(counted, _DEPTH_SHARE, generator))
            ahead = self._ahead(done, step, positions)
            known = tokens.gather(1, ahead)
            state, normed, new = self._layer(known, done, keys, step)
            keys, own = (new, ()) if keys is None else (keys, (*done.own, new))
            done = _Unrolled(done.rows, normed if self.sizes.state_norms else state, own)
            yield StepRows(normed, ahead, done.rows + 1 + step <= positions, known)

    @staticmethod
    def _ahead(done: _Unrolled, step: int, last: int) -> Tensor:
        """The position whose distribution each row guesses at a step, at most the last one."""
        return (done.rows + 1 + step).clamp(max=last)

    @property
    def _only(self) -> EagleLayer:
        return cast(EagleLayer, self.layers[0])

    def _layer(
        self, known: Tensor, done: _Unrolled, keys: tuple[Tensor, Tensor] | None, step: int
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """The layer's output for each row, the same behind the last norm, and the row's key and value of this step;
        `known` are the tokens that are embedded."""
        shape = known.shape
        rotation = self.rotation[(done.rows + step).flatten()]
        residual, *projected = self._enter(known.flatten(), done.state.flatten(0, 1), rotation)
        q, k, v = (part.view(len(part), *shape, -1).transpose(0, 1) for part in projected)
        if keys is None:
            found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            columns = torch.arange(keys[0].shape[2], device=q.device)
            found = attend(q, *keys, columns <= done.rows[..., None], (*done.own, (k, v)))
        state, normed = self._leave(residual, found.transpose(1, 2).flatten(2).flatten(0, 1))
        return state.view(*shape, -1), normed.view(*shape, -1), (k, v)

    def _fused(self, taps: Tensor) -> Tensor:
        """The states float32 [N, H] that N rows begin with, of taps [N, n_aux, H]."""
        if self.sizes.state_norms:
            taps = torch.stack([norm(taps[:, index]) for index, norm in enumerate(self.fc_norm)], 1)
        found: Tensor = self.fc(taps.flatten(1))
        return found.float()

    def _entered(self, known: Tensor, state: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The residual [N, H], and rotated queries, keys and values [heads, N, d], of tokens and states of N rows."""
        layer, attention = self._only, self._only.self_attn
        residual = layer.hidden_norm(state)
        both = torch.cat([layer.input_layernorm(self.embed(known)), residual], -1)[None]
        k, v = attention.keys(both, rotation)
        return residual, attention.queries(both, rotation)[0], k[0], v[0]

    def _left(self, residual: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's output for N rows, and the same behind the last norm, of what the attention found [N, h * d]."""
        layer = self._only
        x = residual + layer.self_attn.o_proj(found).float()
        state = x + layer.mlp(layer.post_attention_layernorm(x)).float()
        return state, self.norm(state)
