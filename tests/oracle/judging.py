"""What draft tokens survive, and which are worth their rows, in Python: the reference of csrc/judging.h."""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from wager.economics.acceptance import (
    _MAX_DEPTH,
    BIN_BORDERS,
    AcceptanceModel,
    SequenceAcceptance,
    _conditional_confidence,
)
from wager.types import Draft


def survival(model: AcceptanceModel, draft: Draft, sequence: SequenceAcceptance) -> list[float]:
    """Survival of every node: by its confidence if it has one, by its depth if not."""
    survival: list[float] = []
    if len(draft.scores) != len(draft.tokens):
        siblings = Counter(draft.parents)  # they share the rate of their depth: at most one of them is accepted
        for depth, parent in zip(draft.depths, draft.parents, strict=True):
            odds = model.depths.odds[min(depth, _MAX_DEPTH) - 1] * sequence.odds
            above = survival[parent] if parent >= 0 else 1.0
            survival.append(above * odds / (1 + odds) / siblings[parent])
        return survival
    scores, corrections = draft.scores, model.bins.odds
    for score, parent in zip(scores, draft.parents, strict=True):
        score_above, above = (scores[parent], survival[parent]) if parent >= 0 else (1.0, 1.0)
        confidence = _conditional_confidence(score, score_above)
        odds = confidence * corrections[bisect(BIN_BORDERS, confidence)]
        survival.append(above * odds / (odds + 1.0 - confidence))
    return survival


class Selection(NamedTuple):
    """The tokens taken, by index, best first, and their total gain; `cut` lies between the gain of the last one taken
    and that of the first one left (None if all or none are taken); `benefit` is the profit beyond that of taking every
    token with gain."""

    taken: Sequence[int]
    gain: float
    cut: float | None
    benefit: float = 0.0


def select(gains: Sequence[float], seconds: Sequence[float], *, goodput: float, limit: int | None = None) -> Selection:
    """The n tokens of greatest gain (weighted tokens), for the n that maximises gain - goodput * seconds[n].

    `seconds[n]` is what n more rows add to the step; at most `limit` are taken (None: any number), and none without
    gain. Of equal ones the earlier comes first: a parent, listed before its children, is taken before them.
    """
    order = sorted(range(len(gains)), key=gains.__getitem__, reverse=True)
    limit = len(order) if limit is None else max(0, min(limit, len(order)))
    profit, best, count, net = goodput * seconds[0], 0.0, 0, 0.0
    for number, index in enumerate(order if limit == len(order) else order[:limit], 1):
        gain = gains[index]
        if gain <= 0:
            limit = number - 1
            break
        profit += gain
        net = profit - goodput * seconds[number]
        if net > best:
            best, count = net, number
    cut = (gains[order[count - 1]] + gains[order[count]]) / 2 if 0 < count < limit else None
    taken = order[:count]
    return Selection(taken, sum([gains[index] for index in taken]), cut, best - net)
