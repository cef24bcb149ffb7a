"""A block drafter in torch: all guesses of a round in one pass (DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147).

The slots of a block are the last token (the anchor) and masks. They attend to each other in both directions and to the
target's fused states of all positions before the anchor, which every layer projects with its own matrices.
Slot j guesses the token j + 1 places after the anchor. A low-rank Markov head adds what the token before says, and a
confidence head learns how likely a slot is accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from wager.train.target import TargetStates, TorchTarget


class BlockLayer(nn.Module):
    """A decoder layer of the block."""

    def __init__(self, sizes: DraftSizes) -> None:
        super().__init__()
        self.input_layernorm = DraftNorm(sizes.hidden, sizes.norm_eps)
        self.self_attn = Projections(sizes, normed=True)
        self.post_attention_layernorm = DraftNorm(sizes.hidden, sizes.norm_eps)
        self.mlp = GatedMlp(sizes.hidden, sizes.inner)

    def forward(self, x: Tensor, context: tuple[Tensor, Tensor], rotation: Tensor, allowed: Tensor) -> Tensor:
        """x [B, A, S, H] of A blocks of S slots; `rotation` [B, A * S, d]; `allowed` bool [B, A * S, T + A * S]."""
        attention, (batch, anchors, slots, width) = self.self_attn, x.shape
        normed = self.input_layernorm(x).view(batch, anchors * slots, width)
        q, own = attention.queries(normed, rotation), attention.keys(normed, rotation)
        keys, values = (torch.cat(pair, 2) for pair in zip(context, own, strict=True))
        x = x + attention.output(attend(q, keys, values, allowed)).view(x.shape)
        found: Tensor = x + self.mlp(self.post_attention_layernorm(x)).float()
        return found


_ANCHOR_SHARE = 0.25
"""The share of rows that a step of training has blocks after."""


class BlockModule(DraftModule):
    """A block drafter. `sizes.mask_token` is the id that stands in empty slots."""

    def __init__(self, sizes: DraftSizes) -> None:
        super().__init__(sizes)
        self.fc = nn.Linear(len(sizes.taps) * sizes.hidden, sizes.hidden, bias=False)
        self.hidden_norm = DraftNorm(sizes.hidden, sizes.norm_eps)
        self.layers = nn.ModuleList(BlockLayer(sizes) for _ in range(sizes.layers))
        self.norm = DraftNorm(sizes.hidden, sizes.norm_eps)

    def attach(self, target: TorchTarget, vocabulary: DraftVocabulary) -> None:
        super().attach(target, vocabulary)
        rank = self.sizes.markov_rank
        codes, guesses = nn.Embedding(target.spec.vocab, rank), nn.Linear(rank, len(vocabulary.ids), bias=False)
        nn.init.normal_(codes.weight, std=rank**-0.5)
        nn.init.zeros_(guesses.weight)
        self.markov_head = nn.ModuleDict({"markov_w1": codes, "markov_w2": guesses}).to(target.device)
        confidence = nn.Linear(self.sizes.hidden + rank, 1)
        self.confidence_head = nn.ModuleDict({"proj": confidence}).to(target.device)
        self.norm.weight.data.copy_(target.final_norm)

    def steps(self, states: TargetStates, depth: int, generator: torch.Generator | None) -> Iterator[StepRows]:
        tokens, count = states.tokens, states.tokens.shape[1] - 1
        rows = drawn_rows(states.weights[:, 1:], _ANCHOR_SHARE, generator)  # [B, A] blocks begin after
        slots = torch.arange(depth, device=tokens.device)
        places = rows[..., None] + 1 + slots  # [B, A, S], of the slots' inputs and of the distributions they guess
        masks = torch.full((*rows.shape, depth - 1), self.sizes.mask_token, device=tokens.device)
        x = self.embed(torch.cat([tokens.gather(1, rows + 1)[..., None], masks], -1))
        context = self.hidden_norm(self.fc(states.taps[:, :-1].flatten(2)))
        rotation = self.rotation[places.flatten(1)]
        allowed = self._allowed(rows, count, depth)
        for layer in self.layers:
            block = cast(BlockLayer, layer)
            kept = block.self_attn.keys(context, self.rotation[:count])
            x = block(x, kept, rotation, allowed)
        x = self.norm(x)
        inside = places.clamp(max=count)
        for slot in range(depth):
            known = tokens.gather(1, inside[..., slot])
            yield StepRows(x[:, :, slot], inside[..., slot], places[..., slot] <= count, known)

    def logits(self, rows: StepRows) -> Tensor:
        codes = self.markov_head["markov_w1"](rows.previous)
        found: Tensor = self.lm_head(rows.states) + self.markov_head["markov_w2"](codes)
        return found

    def output_parameters(self) -> list[nn.Parameter]:
        heads = (self.lm_head, self.markov_head, self.confidence_head)
        return [parameter for head in heads for parameter in head.parameters()]

    def further_loss(self, rows: StepRows, logits: Tensor, labels: Tensor) -> Tensor:
        """Binary cross-entropy of the confidence with the acceptance sum min(p, q)."""
        both = torch.cat([rows.states, self.markov_head["markov_w1"](rows.previous)], -1)
        accepted = torch.minimum(logits.detach().float().softmax(-1), labels.float().softmax(-1)).sum(-1)
        confidence = self.confidence_head["proj"](both).squeeze(-1).float()
        return functional.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")

    def _allowed(self, rows: Tensor, count: int, depth: int) -> Tensor:
        """bool [B, A * S, T + A * S]: states up to the anchor's row, and the slots of the own block."""
        batch, anchors = rows.shape
        own = torch.arange(anchors, device=rows.device).repeat_interleave(depth)
        blocks = (own[:, None] == own).expand(batch, -1, -1)
        before = torch.arange(count, device=rows.device) <= rows.repeat_interleave(depth, 1)[..., None]
        return torch.cat([before, blocks], -1)
