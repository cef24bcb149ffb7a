"""The training loop: batches to states of the target, to losses of every depth, to a step of the optimiser.

Everything random is drawn from (seed, step), so a resumed run computes the same numbers as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wager.errors import UsageError
from wager.train.chunked_loss import RowsLoss, rows_loss
from wager.train.draft_module import DraftModule, OutputRows
from wager.train.examples import TextWeights, TrainingData, TrainingText
from wager.train.losses import divergence
from wager.train.stored_states import StateSource
from wager.train.target_states import TargetStates


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Options of a run that decide its numbers; a checkpoint can only be resumed with equal ones.

    `depth` is the number of guesses that are trained, each counting `decay` times the one before; `batch` is in tokens;
    the learning rate rises over `warmup` steps and falls linearly to 0 over the last `cooldown` share of all `steps`.
    `begun_with` is the digest of the weights that the run begins with; empty for fresh ones.
    """

    kind: str = "eagle3"
    steps: int = 1000
    batch: int = 2048
    depth: int = 3
    decay: float = 0.8
    loss: str = "kl"
    rate: float = 1e-3
    warmup: int = 20
    cooldown: float = 0.5
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    precision: str = "bfloat16"
    begun_with: str = ""

    def learning_rate(self, step: int) -> float:
        """Of the step with this number, the first is 0."""
        left = (self.steps - step) / max(1.0, self.cooldown * self.steps)
        return self.rate * min(1.0, (step + 1) / max(1, self.warmup), left)


@dataclass(frozen=True)
class StepReport:
    """What a step was: loss, share of rows whose first choice is the target's by depth, and tokens."""

    step: int
    loss: float
    agreement: tuple[float, ...]
    tokens: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Trainer:
    """A run. `step` is the number of steps that are done; `run` takes the rest, calling `after` after each."""

    def __init__(
        self,
        module: DraftModule,
        states: StateSource,
        data: TrainingData,
        weights: TextWeights,
        settings: TrainSettings,
    ) -> None:
        self.module, self.states, self.data, self.weights, self.settings = module, states, data, weights, settings
        self.step = 0
        matrices = [parameter for parameter in module.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in module.parameters() if parameter.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimiser = torch.optim.AdamW(groups, lr=settings.rate, betas=(0.9, 0.95), eps=1e-8)

    def run(self, after: Callable[[StepReport], None]) -> None:
        for texts in self._remaining():
            report = self._take(texts)
            self.step += 1
            after(report)

    def _remaining(self) -> Iterator[list[TrainingText]]:
        """The batches from `step` on, pass after pass."""
        done, number = 0, 0
        while done < self.settings.steps:
            batches = self.data.batches(tokens=self.settings.batch, seed=self.settings.seed, number=number)
            for batch in batches:
                if self.step <= done < self.settings.steps:
                    yield batch
                done += 1
            number += 1

    def _take(self, texts: list[TrainingText]) -> StepReport:
        settings, batch = self.settings, self.data.padded(texts, self.weights)
        for group in self.optimiser.param_groups:
            group["lr"] = settings.learning_rate(self.step)
        states, device = self.states.of(texts, batch), self.states.target.device
        drawn = np.random.default_rng([settings.seed, self.step, 1]).integers(1 << 62)
        generator = torch.Generator().manual_seed(int(drawn))
        with autocast(settings.precision, device):
            total, agreement = unrolled_loss(self.module, states, settings, generator)
        if not torch.isfinite(total):
            raise UsageError(f"The loss of step {self.step + 1} is not a number.", "Take a smaller --rate.")
        self.optimiser.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), settings.clip)
        self.optimiser.step()
        return StepReport(self.step, total.item(), tuple(agreement), batch.tokens.size)


def autocast(precision: str, device: str) -> AbstractContextManager[Any]:
    """Products in bfloat16 where that is asked for."""
    return torch.autocast(device, torch.bfloat16) if precision == "bfloat16" else nullcontext()


def unrolled_loss(
    module: DraftModule, states: TargetStates, settings: TrainSettings, generator: torch.Generator | None
) -> tuple[Tensor, list[float]]:
    """The weighted loss of all depths, and by depth the share of rows whose first choice is the target's."""
    total = torch.zeros((), device=states.tokens.device)
    agreement, scale, scales = [], 1.0, 0.0
    for rows in module.steps(states, settings.depth, generator):
        places = rows.positions
        counted = states.weights.gather(1, places) * rows.valid
        chosen = counted > 0
        final = states.final.gather(1, places[..., None].expand(*places.shape, states.final.shape[-1]))[chosen]
        found = _step_loss(module, rows.take(chosen), final, counted[chosen], settings.loss)
        whole = counted.sum().clamp(min=1e-6)
        total = total + scale * found.total / whole
        agreement.append(found.right / whole.item())
        scales, scale = scales + scale, scale * settings.decay
    return total / scales, agreement


def _step_loss(module: DraftModule, taken: OutputRows, final: Tensor, counted: Tensor, loss: str) -> RowsLoss:
    """The loss of one depth's rows, whose labels are the laws of the target's states `final` [n, H]."""

    def compute(part: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        entering = OutputRows(part, taken.previous[rows])
        labels, logits = module.labels(final[rows]), module.logits(entering)
        losses = divergence(loss, logits, labels)
        further = module.further_loss(entering, logits, labels)
        right = logits.detach().argmax(-1) == labels.argmax(-1)
        return losses if further is None else losses + further, right

    return rows_loss(taken.states, counted, module.output_parameters(), compute)
