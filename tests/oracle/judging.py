"""Which draft tokens are worth their rows, in Python: the reference of csrc/judging.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from wager.types import Draft


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


def keep_nodes(draft: Draft, nodes: Sequence[int]) -> Draft:
    """The draft with these nodes alone, ascending and closed under parents."""
    size = len(nodes)
    if not size or nodes[-1] == size - 1:
        return draft.truncate(size)
    new_index = {-1: -1, **{node: index for index, node in enumerate(nodes)}}
    return Draft(
        draft.seq_id,
        tuple([draft.tokens[node] for node in nodes]),
        tuple([new_index[draft.parents[node]] for node in nodes]),
        tuple([draft.scores[node] for node in nodes]) if draft.scores else (),
        draft.drafter,
        None if draft.draft_probs is None else draft.draft_probs[list(nodes)],
        draft.computed,
    )
