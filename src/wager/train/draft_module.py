"""What every trained drafter shares: sizes, the target's embedding and positions, the output over its vocabulary; and
the simplest of them, Medusa heads (arXiv 2401.10774).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from wager.train.data import DraftVocabulary
from wager.train.target import TargetStates, TorchTarget


@dataclass(frozen=True, slots=True)
class DraftSizes:
    """Sizes and flags of a draft module.

    `taps` are layer ids of the target (i: after i layers). Of EAGLE-3: `depth_share` is the share of rows that each
    further step of training keeps, `norm_before_residual`, `fc_norm` and `norm_output` are speculators' flags. Of a
    block drafter: `layers`, the id of empty slots, the rank of the Markov head, the share of rows that are anchors. Of
    a pruned draft model: the target's layers that it keeps.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    taps: tuple[int, ...]
    depth_share: float = 1.0
    norm_before_residual: bool = True
    fc_norm: bool = True
    norm_output: bool = True
    layers: int = 1
    mask_token: int = 0
    markov_rank: int = 0
    anchor_share: float = 0.25
    kept_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepRows:
    """What a module computed at one depth: `states` [B, n, H] that enter its output matrix, and for each row the
    position whose distribution it guesses (`positions` int64 [B, n]), where `valid` bool [B, n], and the token there
    (`previous` int64 [B, n])."""

    states: Tensor
    positions: Tensor
    valid: Tensor
    previous: Tensor

    def take(self, chosen: Tensor | slice | int) -> OutputRows:
        """Those rows of all texts."""
        return OutputRows(self.states[chosen], self.previous[chosen])


@dataclass(frozen=True)
class OutputRows:
    """Rows that enter the output: `states` [..., H] and the token before the one that each guesses, int64 [...]."""

    states: Tensor
    previous: Tensor


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

    def logits(self, rows: OutputRows) -> Tensor:
        """The module's own logits over the draft vocabulary."""
        found: Tensor = self.lm_head(rows.states)
        return found

    def choices(self, rows: OutputRows, ids: Tensor) -> Tensor:
        """The target's id of each row's first choice, int64 [...]; `ids` are the target's of the draft vocabulary."""
        return ids[self.logits(rows).argmax(-1)]

    def output_parameters(self) -> list[nn.Parameter]:
        """The parameters that `logits` and `further_loss` use."""
        return list(self.lm_head.parameters())

    def further_loss(self, rows: OutputRows, logits: Tensor, labels: Tensor) -> Tensor | None:
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
