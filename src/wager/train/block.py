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
from wager.train.draft_module import DraftModule, DraftSizes, OutputRows, StepRows
from wager.train.target import DraftNorm, GatedMlp, Projections, TargetStates, TorchTarget, attend, rotate


class BlockAttention(Projections):
    """Attention of slots over fused states and slots, with normed queries and keys."""

    def __init__(self, sizes: DraftSizes) -> None:
        super().__init__(
            sizes.hidden, sizes.hidden, heads=sizes.heads, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim
        )
        self.q_norm = DraftNorm(sizes.head_dim, sizes.norm_eps)
        self.k_norm = DraftNorm(sizes.head_dim, sizes.norm_eps)

    def keys(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, kv, rows, d] of inputs [B, rows, H]."""
        return rotate(self.k_norm(self.heads(self.k_proj(x))), rotation), self.heads(self.v_proj(x))


class BlockLayer(nn.Module):
    """A decoder layer of the block."""

    def __init__(self, sizes: DraftSizes) -> None:
        super().__init__()
        self.input_layernorm = DraftNorm(sizes.hidden, sizes.norm_eps)
        self.self_attn = BlockAttention(sizes)
        self.post_attention_layernorm = DraftNorm(sizes.hidden, sizes.norm_eps)
        self.mlp = GatedMlp(sizes.hidden, sizes.inner)

    def forward(self, x: Tensor, context: tuple[Tensor, Tensor], rotation: Tensor, allowed: Tensor) -> Tensor:
        """x [B, A, S, H] of A blocks of S slots; `rotation` [B, A * S, d]; `allowed` bool [B, A * S, T + A * S]."""
        attention, (batch, anchors, slots, width) = self.self_attn, x.shape
        normed = self.input_layernorm(x).view(batch, anchors * slots, width)
        q = rotate(attention.q_norm(attention.heads(attention.q_proj(normed))), rotation)
        own = attention.keys(normed, rotation)
        keys, values = (torch.cat(pair, 2) for pair in zip(context, own, strict=True))
        x = x + attention.output(attend(q, keys, values, allowed)).float().view(x.shape)
        found: Tensor = x + self.mlp(self.post_attention_layernorm(x)).float()
        return found


class MarkovHead(nn.Module):
    """What the token before says of the next one: logits += W2 W1[token]."""

    def __init__(self, tokens: int, guessed: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(tokens, rank)
        self.markov_w2 = nn.Linear(rank, guessed, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, previous: Tensor) -> Tensor:
        found: Tensor = self.markov_w2(self.markov_w1(previous))
        return found


class ConfidenceHead(nn.Module):
    """The logit of a slot's acceptance, from its state and the Markov head's code of the token before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)


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
        sizes = self.sizes
        self.markov_head = MarkovHead(target.spec.vocab, len(vocabulary.ids), sizes.markov_rank).to(target.device)
        self.confidence_head = ConfidenceHead(sizes.hidden + sizes.markov_rank).to(target.device)
        self.norm.weight.data.copy_(target.final_norm)

    def steps(self, states: TargetStates, depth: int, generator: torch.Generator | None) -> Iterator[StepRows]:
        tokens, count = states.tokens, states.tokens.shape[1] - 1
        rows = self._anchors(len(tokens), count, generator).to(tokens.device)
        slots = torch.arange(depth, device=tokens.device)
        places = rows[..., None] + 1 + slots  # [B, A, S], of the slots' inputs and of the distributions they guess
        x = self._inputs(tokens, rows, depth)
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

    def logits(self, rows: OutputRows) -> Tensor:
        found: Tensor = self.lm_head(rows.states) + self.markov_head(rows.previous)
        return found

    def output_parameters(self) -> list[nn.Parameter]:
        heads = (self.lm_head, self.markov_head, self.confidence_head)
        return [parameter for head in heads for parameter in head.parameters()]

    def further_loss(self, rows: OutputRows, logits: Tensor, labels: Tensor) -> Tensor:
        """Binary cross-entropy of the confidence with the acceptance sum min(p, q)."""
        both = torch.cat([rows.states, self.markov_head.markov_w1(rows.previous)], -1)
        accepted = torch.minimum(logits.detach().float().softmax(-1), labels.float().softmax(-1)).sum(-1)
        confidence = self.confidence_head.proj(both).squeeze(-1).float()
        return functional.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")

    def _anchors(self, batch: int, count: int, generator: torch.Generator | None) -> Tensor:
        """The rows that blocks begin after, int64 [B, A], ascending: a random share with a generator, else all."""
        share = max(1, round(count * self.sizes.anchor_share))
        if generator is None or share >= count:
            return torch.arange(count).expand(batch, count)
        return torch.rand(batch, count, generator=generator).topk(share).indices.sort(-1).values

    def _inputs(self, tokens: Tensor, rows: Tensor, depth: int) -> Tensor:
        anchors = tokens.gather(1, rows + 1)[..., None]
        masks = torch.full((*rows.shape, depth - 1), self.sizes.mask_token, device=tokens.device)
        return self.embed(torch.cat([anchors, masks], -1))

    def _allowed(self, rows: Tensor, count: int, depth: int) -> Tensor:
        """bool [B, A * S, T + A * S]: states up to the anchor's row, and the slots of the own block."""
        batch, anchors = rows.shape
        own = torch.arange(anchors, device=rows.device).repeat_interleave(depth)
        blocks = (own[:, None] == own).expand(batch, -1, -1)
        before = torch.arange(count, device=rows.device) <= rows.repeat_interleave(depth, 1)[..., None]
        return torch.cat([before, blocks], -1)
