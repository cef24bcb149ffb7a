"""The loss of many rows over a vocabulary, some rows at a time: gradients are computed with the loss, so that logits of
all rows are never in memory at once. Large arrays cost more in fresh pages than in arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
