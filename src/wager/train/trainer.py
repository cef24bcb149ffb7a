"""The training loop: batches to states of the target, to losses of every depth, to a step of the optimiser; its losses
and its checkpoints.

Everything random is drawn from (seed, step), so a run that goes on from its checkpoint ends in the same weights as one
that was never interrupted. What decides the numbers (settings, sizes, data, target) must be equal, or it is refused by
name. A loss compares a draft distribution q with the target's p over the draft vocabulary, one number per row:

kl   forward Kullback-Leibler divergence, sum p log(p / q)
tv   total variation 1 - sum min(p, q): one minus the acceptance of rejection rules
ce   cross-entropy on the target's likeliest token
lk   l KL + (1 - l) TV with l = exp(-3 (1 - TV)), not differentiated (arXiv 2602.23881)
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wager.errors import ModelError, UsageError
from wager.inputs import replacing
from wager.train.data import TextWeights, TrainingData, TrainingText
from wager.train.draft_module import DraftModule, DraftSizes, OutputRows
from wager.train.target import StateSource, TargetStates


def _kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _tv(log_q: Tensor, log_p: Tensor) -> Tensor:
    return 1 - torch.minimum(log_q.exp(), log_p.exp()).sum(-1)


def _ce(log_q: Tensor, log_p: Tensor) -> Tensor:
    return -log_q.gather(-1, log_p.argmax(-1, keepdim=True)).squeeze(-1)


def _lk(log_q: Tensor, log_p: Tensor) -> Tensor:
    distance = _tv(log_q, log_p)
    share = (-3 * (1 - distance)).exp().detach()
    return share * _kl(log_q, log_p) + (1 - share) * distance


LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"kl": _kl, "tv": _tv, "ce": _ce, "lk": _lk}


def divergence(loss: str, logits: Tensor, target_logits: Tensor) -> Tensor:
    """float32 [...] from logits [..., Vd] of the draft and of the target; the latter get no gradient."""
    log_p = target_logits.detach().float().log_softmax(-1)
    return LOSSES[loss](logits.float().log_softmax(-1), log_p)


_ROWS = 512


@dataclass(frozen=True)
class RowsLoss:
    """`total` is the sum of weighted losses of all rows, differentiable; `right` the weight of rows whose choice is
    the target's."""

    total: Tensor
    right: float


class _Computed(torch.autograd.Function):
    """A number whose gradients to some tensors are known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        return (None, None, *(gradient * outputs[0] for gradient in ctx.gradients))


def rows_loss(
    states: Tensor,
    weights: Tensor,
    parameters: list[torch.nn.Parameter],
    compute: Callable[[Tensor, slice], tuple[Tensor, Tensor]],
) -> RowsLoss:
    """The loss of states [n, H], each counted by `weights` [n]. `compute(states, rows)` gives losses of these rows and
    whether their first choice is right, from the states and `parameters` alone."""
    total, right = torch.zeros((), device=states.device), 0.0
    tensors = [states, *parameters]
    wanted = torch.is_grad_enabled() and states.requires_grad
    gradients = [torch.zeros_like(tensor) for tensor in tensors] if wanted else []
    for first in range(0, len(states), _ROWS):
        rows = slice(first, first + _ROWS)
        part = states[rows].detach().requires_grad_(wanted)
        losses, correct = compute(part, rows)
        loss = (losses * weights[rows]).sum()
        right += float((correct * weights[rows]).sum())
        total += loss.detach()
        if wanted:
            found = torch.autograd.grad(loss, [part, *parameters])
            gradients[0][rows] = found[0]
            for gradient, piece in zip(gradients[1:], found[1:], strict=True):
                gradient += piece
    if wanted:
        total = _Computed.apply(total, gradients, *tensors)  # type: ignore[no-untyped-call]
    return RowsLoss(total, right)


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
    """The loss of one depth's rows, whose labels are the distributions of the target's states `final` [n, H]."""

    def compute(part: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        entering = OutputRows(part, taken.previous[rows])
        labels, logits = module.labels(final[rows]), module.logits(entering)
        losses = divergence(loss, logits, labels)
        further = module.further_loss(entering, logits, labels)
        right = logits.detach().argmax(-1) == labels.argmax(-1)
        return losses if further is None else losses + further, right

    return rows_loss(taken.states, counted, module.output_parameters(), compute)


_FORMAT = 1
NAME = "checkpoint.pt"


@dataclass(frozen=True)
class Provenance:
    """Where the weights come from: the target's name and fingerprint, its tokenizer's, the data's digest and size, the
    command, and `figures` of the run: tokens, seconds, held-out acceptance."""

    target: str
    target_fingerprint: str
    tokenizer_fingerprint: str
    data_digest: str
    texts: int
    command: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingCheckpoint:
    """A run at a step. `module` and `optimiser` are state dictionaries."""

    settings: TrainSettings
    sizes: DraftSizes
    vocabulary: NDArray[np.int64]
    provenance: Provenance
    step: int
    module: Mapping[str, Any]
    optimiser: Mapping[str, Any]
    history: tuple[dict[str, Any], ...] = ()

    @classmethod
    def of(
        cls, trainer: Trainer, vocabulary: NDArray[np.int64], provenance: Provenance, history: list[dict[str, Any]]
    ) -> TrainingCheckpoint:
        module = trainer.module
        return cls(
            trainer.settings,
            module.sizes,
            vocabulary,
            provenance,
            trainer.step,
            module.state_dict(),
            trainer.optimiser.state_dict(),
            tuple(history),
        )

    def save(self, folder: Path) -> None:
        """Write it to `folder`; at every moment there is the old one or the new one, whole."""
        values = {
            "format": _FORMAT,
            "settings": asdict(self.settings),
            "sizes": {name: _listed(value) for name, value in asdict(self.sizes).items()},
            "vocabulary": torch.from_numpy(self.vocabulary),
            "provenance": asdict(self.provenance),
            "step": self.step,
            "module": dict(self.module),
            "optimiser": dict(self.optimiser),
            "history": list(self.history),
        }
        with replacing(folder / NAME) as file:
            torch.save(values, file)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def load(cls, folder: Path) -> TrainingCheckpoint:
        """The checkpoint of `folder`. ModelError if it is damaged."""
        path = folder / NAME
        try:
            values = torch.load(path, map_location="cpu", weights_only=True)
            if values["format"] != _FORMAT:
                raise ModelError(f"{path} is a checkpoint of format {values['format']}.", "Train again.")
            sizes = values["sizes"]
            lists = {name: tuple(value) for name, value in sizes.items() if isinstance(value, list)}
            sizes = DraftSizes(**{**sizes, **lists})
            return cls(
                TrainSettings(**values["settings"]),
                sizes,
                values["vocabulary"].numpy(),
                Provenance(**values["provenance"]),
                values["step"],
                values["module"],
                values["optimiser"],
                tuple(values["history"]),
            )
        except ModelError:
            raise
        except Exception as error:  # torch raises many kinds for a damaged file
            raise ModelError(f"{path} cannot be read: {error}.", "The file is damaged; train again.") from error

    @property
    def digest(self) -> str:
        """SHA-256 of the module's weights, in hex."""
        found = hashlib.sha256()
        for name, value in sorted(self.module.items()):
            found.update(name.encode() + value.float().numpy().tobytes())
        return found.hexdigest()

    def check_can_begin(self, kind: str, sizes: DraftSizes, fingerprint: str, where: Path) -> None:
        """UsageError unless a run of this kind, of these sizes and for this target can begin with these weights."""
        old = {**asdict(self.sizes), "kind": self.settings.kind, "target": self.provenance.target_fingerprint}
        new = {**asdict(sizes), "kind": kind, "target": fingerprint}
        for name, value in new.items():
            if old[name] != value and name not in ("mask_token", "depth_share", "anchor_share"):
                raise UsageError(
                    f"The weights in {where} are of {name} = {old[name]!r}, and this run has {value!r}.",
                    "Begin with a run of the same kind, sizes and target.",
                )

    def check_same(self, settings: TrainSettings, sizes: DraftSizes, provenance: Provenance) -> None:
        """UsageError that names what differs from the run that this checkpoint is of."""
        old = {**asdict(self.settings), **asdict(self.sizes), **_identity(self.provenance)}
        new = {**asdict(settings), **asdict(sizes), **_identity(provenance)}
        for name, value in new.items():
            if old[name] != value:
                raise UsageError(
                    f"The checkpoint was made with {name} = {old[name]!r}, and this run has {value!r}.",
                    "Resume with the options and data it was begun with, or write to another folder.",
                )

    def restore(self, trainer: Trainer) -> None:
        """Set the trainer to this step."""
        self.restore_module(trainer.module)
        trainer.optimiser.load_state_dict(dict(self.optimiser))
        trainer.step = self.step

    def restore_module(self, module: DraftModule) -> None:
        try:
            module.load_state_dict(dict(self.module))
        except RuntimeError as error:
            raise ModelError(f"The checkpoint does not fit this drafter: {error}.", "Train again.") from error


def _identity(provenance: Provenance) -> dict[str, str]:
    return {"target": provenance.target_fingerprint, "data": provenance.data_digest}


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
