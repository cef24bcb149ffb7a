"""The top experts of one row, in plain numpy: the oracle of the native router."""

from __future__ import annotations

import numpy as np

from wager.arch.layers import Experts
from wager.kernels.arrays import Array
from wager.kernels.reference_rows import sigmoid, softmax


def top_experts(logits: Array, bias: Array | None, spec: Experts) -> tuple[Array, Array]:
    """Ids (ascending) and shares of the experts of one row, int64 and float32 [top_k], from its logits f32 [experts].

    Ties go to the lowest id, of groups and of experts: see kernels.base.Tape.route.
    """
    gating = spec.gating
    scores = sigmoid(logits) if gating.score == "sigmoid" else softmax(logits)
    if not np.isfinite(logits).all():
        scores = np.full_like(scores, np.nan)
    ranking = scores if gating.score == "sigmoid" else logits
    if bias is not None:
        ranking = ranking + bias
    if gating.groups > 1:
        grouped = ranking.reshape(gating.groups, -1)
        best = np.sort(grouped, axis=1)[:, ::-1][:, : gating.group_best].sum(axis=1)
        allowed = np.zeros((gating.groups, 1), bool)
        allowed[_best(best, gating.top_groups)] = True
        ranking = np.where(allowed, grouped, np.float32(-np.inf)).ravel()
    ids = _best(ranking, spec.active)
    shares = scores[ids]
    if gating.normalised:
        total = shares[0]
        for share in shares[1:]:
            total = total + share
        shares = shares / (total + np.float32(1e-20))
    return ids, shares * np.float32(gating.scale)


def _best(values: Array, count: int) -> Array:
    """The indices of the largest values, ascending; among equals the lowest."""
    return np.sort(np.argsort(-values, kind="stable")[:count])
