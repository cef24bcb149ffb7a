"""Which guesses to verify, over the whole batch at once.

Guesses are taken in the order of what they bring, so that any number of them is the best set of that size and, since
survival never rises along a path, closed under parents. How many is found by looking at every number: a machine's cost
is a staircase, and stopping at the first guess that does not pay would stop below a step that does. Knows no drafter
and learns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wager.types import Draft


@dataclass(frozen=True, slots=True)
class Selection:
    """The guesses taken, by index in the order they were taken, and what they bring. `cut` is the gain between the
    last that was taken and the first that was not; None where there is no such border."""

    taken: Sequence[int]
    gain: float
    cut: float | None


def select(gains: Sequence[float], seconds: Sequence[float], *, price: float, most: int | None = None) -> Selection:
    """The n best guesses, for the n at which their gains less `price` x seconds[n] are greatest; every n is looked at.

    `seconds[n]` are those of a step with n guesses; at most `most` are taken (None: any number). Guesses without gain
    are never taken; of equal ones the earlier comes first, so that a parent that is listed
    before its children is taken before them.
    """
    order = sorted(range(len(gains)), key=gains.__getitem__, reverse=True)
    profit, best = price * seconds[0], 0.0
    count, most = 0, len(order) if most is None else max(0, min(most, len(order)))
    for number, index in enumerate(order[:most], 1):
        gain = gains[index]
        if gain <= 0:
            most = number - 1
            break
        profit += gain
        net = profit - price * seconds[number]
        if net > best:
            best, count = net, number
    cut = (gains[order[count - 1]] + gains[order[count]]) / 2 if 0 < count < most else None
    taken = order[:count]
    return Selection(taken, sum([gains[index] for index in taken]), cut)


def keep(draft: Draft, nodes: Sequence[int]) -> Draft:
    """The draft with these nodes alone, ascending and closed under parents; a chain keeps a beginning."""
    size = len(nodes)
    if not size or nodes[-1] == size - 1:
        return draft.truncate(size)
    place = {-1: -1, **{node: index for index, node in enumerate(nodes)}}
    return Draft(
        draft.seq_id,
        tuple([draft.tokens[node] for node in nodes]),
        tuple([place[draft.parents[node]] for node in nodes]),
        tuple([draft.scores[node] for node in nodes]) if draft.scores else (),
        draft.drafter,
        None if draft.draft_probs is None else draft.draft_probs[list(nodes)],
    )
