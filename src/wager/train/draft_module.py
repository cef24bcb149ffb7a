"""What every trained drafter shares: sizes, layers, the target's embedding and positions, the output over its
vocabulary; and the simplest of them, Medusa heads (arXiv 2401.10774).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from wager.train.data import DraftVocabulary
from wager.train.target import TargetStates, TorchTarget, rms_norm, rotate


@dataclass(frozen=True, slots=True)
class DraftSizes:
    """Sizes of a draft module. `taps` are layer ids of the target (i: after i layers). A block drafter has `layers`,
    the id of empty slots and the rank of the Markov head; a pruned draft model the target's layers that it keeps. With
    `state_norms` an EAGLE-3 head norms every tap, and feeds back what its last norm gave (3.1).
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    taps: tuple[int, ...]
    layers: int = 1
    mask_token: int = 0
    markov_rank: int = 0
    kept_layers: tuple[int, ...] = ()
    state_norms: bool = True


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
    """The matrices of an attention whose inputs are `inputs` wide (None: as the state), with biases of queries, keys
    and values (`bias`) or of the output, and perhaps norms of queries and keys."""

    def __init__(
        self,
        sizes: DraftSizes,
        *,
        inputs: int | None = None,
        bias: bool = False,
        output_bias: bool = False,
        normed: bool = False,
    ) -> None:
        super().__init__()
        width = inputs or sizes.hidden
        self.head_dim = sizes.head_dim
        self.q_proj = nn.Linear(width, sizes.heads * sizes.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, sizes.kv_heads * sizes.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, sizes.kv_heads * sizes.head_dim, bias=bias)
        self.o_proj = nn.Linear(sizes.heads * sizes.head_dim, sizes.hidden, bias=output_bias)
        self.q_norm = DraftNorm(sizes.head_dim, sizes.norm_eps) if normed else None
        self.k_norm = DraftNorm(sizes.head_dim, sizes.norm_eps) if normed else None

    def queries(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Rotated queries [B, heads, rows, d] of inputs [B, rows, width]."""
        q = self._heads(self.q_proj(x))
        return rotate(q if self.q_norm is None else self.q_norm(q), rotation)

    def keys(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [B, kv, rows, d] of inputs [B, rows, width]."""
        k = self._heads(self.k_proj(x))
        return rotate(k if self.k_norm is None else self.k_norm(k), rotation), self._heads(self.v_proj(x))

    def output(self, found: Tensor) -> Tensor:
        """The output projection of [B, heads, rows, d], float32."""
        out: Tensor = self.o_proj(found.transpose(1, 2).flatten(2))
        return out.float()

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.float().view(*projected.shape[:2], -1, self.head_dim).transpose(1, 2)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, allowed: Tensor, own: Sequence[tuple[Tensor, Tensor]] = ()
) -> Tensor:
    """Attention of q [B, h, n, d] over shared keys and values [B, kv, T, d] where `allowed` bool [B or 1, n, T], and
    over `own` pairs [B, kv, n, d], of which every row sees its own only (the diagonal of earlier unrolled steps)."""
    diagonal = torch.eye(q.shape[2], dtype=torch.bool, device=q.device).expand(len(allowed), -1, -1)
    allowed = torch.cat([allowed, *(diagonal for _ in own)], -1)
    keys, values = (torch.cat(parts, 2) for parts in zip((keys, values), *own, strict=True))
    groups = q.shape[1] // keys.shape[1]
    if groups > 1:  # the kernel of a GPU for masks knows no groups
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    return functional.scaled_dot_product_attention(q, keys, values, attn_mask=allowed[:, None])


@dataclass(frozen=True)
class StepRows:
    """What a module computed at one depth: `states` [B, n, H] that enter its output matrix, and for each row the
    position whose distribution it guesses (`positions` int64 [B, n]), where `valid` bool [B, n], and the token there
    (`previous` int64 [B, n])."""

    states: Tensor
    positions: Tensor
    valid: Tensor
    previous: Tensor

    @property
    def flat(self) -> StepRows:
        """All rows, [B * n, H] and [B * n]."""
        parts = (self.states, self.positions, self.valid, self.previous)
        return StepRows(*(part.flatten(0, 1) for part in parts))

    def take(self, chosen: slice | int) -> StepRows:
        """The chosen rows, [n, H] and [n]."""
        return StepRows(self.states[chosen], self.positions[chosen], self.valid[chosen], self.previous[chosen])


def drawn_rows(weights: Tensor, share: float, generator: torch.Generator | None) -> Tensor:
    """Rows of each text, int64 [B, n], ascending: a share of those whose `weights` [B, count] are given, at random, but
    those that count more before others; or all without a generator."""
    batch, count = weights.shape
    drawn = max(1, round(count * share))
    if generator is None or drawn >= count:
        return torch.arange(count, device=weights.device).expand(batch, count)
    order = weights + torch.rand(batch, count, generator=generator, device=weights.device)
    return order.topk(drawn).indices.sort(-1).values


class DraftModule(nn.Module):
    """Base of the trained modules. `attach` gives it the target's embedding, positions and output matrix."""

    rotation: Tensor
    embedding: Tensor
    label_head: Tensor

    def __init__(self, sizes: DraftSizes) -> None:
        super().__init__()
        self.sizes = sizes

    def attach(self, target: TorchTarget, vocabulary: DraftVocabulary) -> None:
        """Use the target's frozen parts, and its output rows of the draft vocabulary as the beginning of the module's
        own."""
        self.attach_target(target, vocabulary)
        self.lm_head = nn.Linear(self.sizes.hidden, len(vocabulary.ids), bias=False, device=target.head.device)
        self.lm_head.weight.data.copy_(self.label_head.float())

    def attach_target(self, target: TorchTarget, vocabulary: DraftVocabulary) -> None:
        """Use the target's frozen embedding and rotation, and its output rows of the draft vocabulary as the matrix of
        the labels."""
        ids = torch.from_numpy(vocabulary.ids).to(target.head.device)
        self.register_buffer("rotation", target.rotation, persistent=False)
        self.register_buffer("embedding", target.embedding, persistent=False)
        self.register_buffer("label_head", target.head[ids], persistent=False)

    def embed(self, tokens: Tensor) -> Tensor:
        """float32 [..., H]."""
        return functional.embedding(tokens, self.embedding).float()

    def labels(self, final: Tensor) -> Tensor:
        """The target's logits over the draft vocabulary, of states [..., H] that enter its output matrix."""
        return functional.linear(final.to(self.label_head.dtype), self.label_head)

    def logits(self, rows: StepRows) -> Tensor:
        """The module's own logits over the draft vocabulary."""
        found: Tensor = self.lm_head(rows.states)
        return found

    def choices(self, rows: StepRows, ids: Tensor) -> Tensor:
        """The target's id of each row's first choice, int64 [...]; `ids` are the target's of the draft vocabulary."""
        return ids[self.logits(rows).argmax(-1)]

    def output_parameters(self) -> list[nn.Parameter]:
        """The parameters that `logits` and `further_loss` use."""
        return list(self.lm_head.parameters())

    def further_loss(self, rows: StepRows, logits: Tensor, labels: Tensor) -> Tensor | None:
        """What is added to each row's loss, [...]."""
        return None

    def steps(self, states: TargetStates, depth: int, generator: torch.Generator | None) -> Iterator[StepRows]:
        """The rows of every depth, the first guess first. With `generator` rows may be left out at random."""
        raise NotImplementedError


class MedusaBlock(nn.Module):
    """The residual block of one head, W and b zero at first, so that it begins as the target's state."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(hidden, hidden)])
        for value in self.parameters():
            nn.init.zeros_(value)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.silu(self.layers[0](x)).float()


class MedusaModule(DraftModule):
    """`sizes.layers` heads."""

    def __init__(self, sizes: DraftSizes) -> None:
        super().__init__(sizes)
        self.blocks = nn.ModuleList(MedusaBlock(sizes.hidden) for _ in range(sizes.layers))

    def steps(self, states: TargetStates, depth: int, generator: torch.Generator | None) -> Iterator[StepRows]:
        last = states.tokens.shape[1] - 1
        rows = torch.arange(last, device=states.tokens.device).expand(len(states.tokens), last)
        for step, block in enumerate(list(self.blocks)[:depth]):
            ahead = (rows + 1 + step).clamp(max=last)
            known = states.tokens.gather(1, ahead)
            yield StepRows(block(states.final[:, :-1]), ahead, rows + 1 + step <= last, known)
