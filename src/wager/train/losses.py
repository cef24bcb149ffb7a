"""What a drafter is trained to lower. A loss compares a draft distribution q with the target's p over the draft
vocabulary, one number per row:

kl   forward Kullback-Leibler divergence, sum p log(p / q)
tv   total variation 1 - sum min(p, q): one minus the acceptance of rejection rules
ce   cross-entropy on the target's likeliest token
lk   l KL + (1 - l) TV with l = exp(-3 (1 - TV)), not differentiated (arXiv 2602.23881)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wager.train.draft_module import DraftModule, StepRows
from wager.train.target import TargetStates, compiled


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


_ROWS, _ROWS_ON_CUDA = 512, 16384
"""Rows whose logits are held at a time."""


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
) -> tuple[Tensor, Tensor]:
    """The sum of losses of states [n, H], each counted by `weights` [n], differentiable, and the weight of the rows
    whose first choice is right. `compute(states, rows)` gives losses of these rows and whether their first choice is
    right, from the states and `parameters` alone."""
    total, right = torch.zeros((), device=states.device), torch.zeros((), device=states.device)
    tensors = [states, *parameters]
    wanted = torch.is_grad_enabled() and states.requires_grad
    gradients = [torch.zeros_like(tensor) for tensor in tensors] if wanted else []
    at_once = _ROWS_ON_CUDA if states.is_cuda else _ROWS
    for first in range(0, len(states), at_once):
        rows = slice(first, first + at_once)
        part = states[rows].detach().requires_grad_(wanted)
        losses, correct = compute(part, rows)
        loss = (losses * weights[rows]).sum()
        right += (correct * weights[rows]).sum()
        total += loss.detach()
        if wanted:
            found = torch.autograd.grad(loss, [part, *parameters])
            gradients[0][rows] = found[0]
            for gradient, piece in zip(gradients[1:], found[1:], strict=True):
                gradient += piece
    if wanted:
        total = _Computed.apply(total, gradients, *tensors)  # type: ignore[no-untyped-call]
    return total, right


def _measured(module: DraftModule, loss: str, entering: StepRows, final: Tensor) -> tuple[Tensor, Tensor]:
    """The losses of rows, and whether their first choice is that of the target's states `final` there."""
    labels, logits = module.labels(final), module.logits(entering)
    losses = divergence(loss, logits, labels)
    further = module.further_loss(entering, logits, labels)
    right = logits.detach().argmax(-1) == labels.argmax(-1)
    return losses if further is None else losses + further, right


def unrolled_loss(
    module: DraftModule,
    states: TargetStates,
    *,
    depth: int,
    decay: float,
    loss: str,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """The weighted loss of all depths, each of which counts `decay` times the one before, and by depth [depth] the
    share of rows whose first choice is the target's."""
    measured = compiled(_measured, states.tokens.device.type)
    total = torch.zeros((), device=states.tokens.device)
    agreement: list[Tensor] = []
    scale, scales = 1.0, 0.0
    for rows in module.steps(states, depth, generator):
        places = rows.positions
        weights = states.weights.gather(1, places) * rows.valid
        final = states.final.gather(1, places[..., None].expand(*places.shape, states.final.shape[-1])).flatten(0, 1)
        taken = rows.flat

        def compute(part: Tensor, some: slice, final: Tensor = final, taken: StepRows = taken) -> tuple[Tensor, Tensor]:
            return measured(module, loss, replace(taken.take(some), states=part), final[some])

        found, right = rows_loss(taken.states, weights.flatten(), module.output_parameters(), compute)
        whole = weights.sum().clamp(min=1e-6)
        total = total + scale * found / whole
        agreement.append(right / whole)
        scales, scale = scales + scale, scale * decay
    return total / scales, torch.stack(agreement)
