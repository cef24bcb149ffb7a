"""Medusa heads in torch (arXiv 2401.10774): head i guesses, from what enters the target's output matrix at position t,
the token i + 2 places on. A head is a residual block x + SiLU(W x + b); all share one output matrix over the draft
vocabulary, which begins as the target's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from wager.train.draft_module import DraftModule, DraftSizes, StepRows
from wager.train.target_states import TargetStates


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
