"""The choice of experts of one row, in plain torch: what the native router is tested against.

Knows no tape and no other row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wager.arch.feed_forward import Experts


def choose(logits: Tensor, bias: Tensor | None, how: Experts) -> tuple[Tensor, Tensor]:
    """Ids (ascending) and shares of the experts of one row, int64 and float32 [chosen], from its logits f32 [experts].

    Ties go to the lowest id, of groups and of experts: see kernels.base.Tape.route.
    """
    gating = how.gating
    scores = torch.sigmoid(logits) if gating.score == "sigmoid" else torch.softmax(logits, dim=0)
    merit = scores if gating.score == "sigmoid" else logits
    if bias is not None:
        merit = merit + bias
    if gating.groups > 1:
        grouped = merit.view(gating.groups, -1)
        best = grouped.sort(dim=1, descending=True).values[:, : gating.group_best].sum(dim=1)
        allowed = torch.zeros(gating.groups, dtype=torch.bool)
        allowed[_best(best, gating.top_groups)] = True
        merit = torch.where(allowed[:, None], grouped, -torch.inf).flatten()
    ids = _best(merit, how.active)
    shares = scores[ids]
    if gating.normalised:
        total = shares[0]
        for share in shares[1:]:
            total = total + share
        shares = shares / (total + 1e-20)
    return ids, shares * gating.scale


def _best(values: Tensor, count: int) -> Tensor:
    """The indices of the largest values, ascending; among equals the lowest."""
    return values.sort(descending=True, stable=True).indices[:count].sort().values
