"""The top experts of one row, in plain torch: the oracle of the native router."""

from __future__ import annotations

import torch
from torch import Tensor

from wager.arch.feed_forward import Experts


def top_experts(logits: Tensor, bias: Tensor | None, spec: Experts) -> tuple[Tensor, Tensor]:
    """Ids (ascending) and shares of the experts of one row, int64 and float32 [top_k], from its logits f32 [experts].

    Ties go to the lowest id, of groups and of experts: see kernels.base.Tape.route.
    """
    scores = torch.sigmoid(logits) if spec.gating.score == "sigmoid" else torch.softmax(logits, dim=0)
    ranking = scores if spec.gating.score == "sigmoid" else logits
    if bias is not None:
        ranking = ranking + bias
    if spec.gating.groups > 1:
        grouped = ranking.view(spec.gating.groups, -1)
        best = grouped.sort(dim=1, descending=True).values[:, : spec.gating.group_best].sum(dim=1)
        allowed = torch.zeros(spec.gating.groups, dtype=torch.bool)
        allowed[_best(best, spec.gating.top_groups)] = True
        ranking = torch.where(allowed[:, None], grouped, -torch.inf).flatten()
    ids = _best(ranking, spec.active)
    shares = scores[ids]
    if spec.gating.normalised:
        total = shares[0]
        for share in shares[1:]:
            total = total + share
        shares = shares / (total + 1e-20)
    return ids, shares * spec.gating.scale


def _best(values: Tensor, count: int) -> Tensor:
    """The indices of the largest values, ascending; among equals the lowest."""
    return values.sort(descending=True, stable=True).indices[:count].sort().values
