"""Before drafting: which drafter for each sequence, how deep, or none. Drafting is priced like everything else.

A bid is what a drafter would bring and cost for every sequence. Guesses with confidence can be dropped again after
they were made, so asking for one is an option: it brings what survives the hurdle and costs rows only then. Knows
chances and seconds; keeps nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from wager.economics.acceptance import Skill
from wager.economics.admission import Prices
from wager.economics.ratings import Bools, Floats, Ints

_FREE = 0.002
"""Guesses that cost less than this share of a step's worth are asked for: they may turn out to be good."""


_LUCK = 0.93
"""What is left of a promised profit for every drafter beyond the first."""


@dataclass(frozen=True, slots=True)
class View:
    """The step as it stands before drafting. `price` is what a second is worth, `total` what one token of each live
    sequence is worth together; the arrays are of live sequences with room, `worth` their worth of a token."""

    rows: int
    requests: int
    context: int
    live: int
    plain: float
    price: float
    total: float
    sequences: tuple[str, ...]
    slots: Ints
    rooms: Ints
    known: Ints
    worth: Floats

    @property
    def open(self) -> int:
        return len(self.sequences)


@dataclass(frozen=True, slots=True)
class Bid:
    """What one drafter offers, down to the depth where its passes pay together: arrays [sequences] or [sequences,
    depth]. `gain` and `rows` are what is expected to be admitted, `net` what they bring at the margin, `profit` the
    best a sequence can make of it after its own share of drafting, `opening` what the passes cost beyond the shares."""

    gain: Floats
    rows: Floats
    net: Floats
    reach: Floats
    drafting: Floats
    profit: Floats
    opening: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a drafter is expected to do for each sequence, before prices: survival and chance by depth, [sequences,
    depth]; `drafting` what the j-th to draft at a depth adds and `waking` what catching up costs, in seconds."""

    drafter: str
    skill: Skill
    survival: Floats
    chance: Floats
    drafting: Floats
    waking: Floats
    stops: bool


def outlook(
    skill: Skill, drafter: str, view: View, *, prices: Prices, depth: int, waking: Floats, stops: bool
) -> Outlook:
    """Down to `depth`, and to each sequence's room."""
    depth = min(depth, int(view.rooms.max()))
    survival, chance = skill.expect(view.slots, depth)
    survival = np.where(np.arange(depth) < view.rooms[:, None], survival, 0.0)
    return Outlook(drafter, skill, survival, chance, prices.drafting(drafter, view.open, depth), waking, stops)


def bid(outlook: Outlook, view: View, *, hurdle: float) -> Bid:
    """`hurdle` is what a row is taken to cost, in tokens' worth."""
    survival, drafting = outlook.survival, outlook.drafting
    if outlook.skill.scored:
        worth = view.worth[:, None]
        floor = np.full_like(worth, -1.0) if not outlook.stops else floors(outlook, view, hurdle=hurdle)[:, None]
        kept, rows, above = outlook.skill.option(survival, hurdle=hurdle / worth, floor=floor)
    else:
        kept, rows, above = survival, (survival > 0).astype(np.float64), np.ones_like(survival)
    gain = kept * view.worth[:, None]
    net = np.minimum.accumulate(gain - hurdle * rows, axis=1)
    reach = np.ones_like(rows)  # how likely a pass is to be made: a drafter that stops skips those after a doubt
    reach[:, 1:] = above[:, :-1]
    own = np.cumsum(net - view.price * drafting[-1] * reach, axis=1)
    anyone = 1 - np.prod(1 - reach * (own > 0), axis=0)
    opening = view.price * np.cumsum(np.maximum(drafting[0] - drafting[-1], 0.0) * anyone)
    together = np.maximum.accumulate(own - view.price * outlook.waking[:, None], axis=1).clip(0.0).sum(0) - opening
    deepest = int(np.flatnonzero(together >= together.max() - _FREE * view.total)[-1]) + 1
    profit = own[:, :deepest].max(axis=1) - view.price * outlook.waking
    gain, rows, net, reach, drafting = (values[:, :deepest] for values in (gain, rows, net, reach, drafting))
    return Bid(gain, rows, net, reach, drafting, np.maximum(profit, 0.0), float(opening[deepest - 1]))


def floors(outlook: Outlook, view: View, *, hurdle: float) -> Floats:
    """Survival below which a sequence's next pass is not worth making: it would cost a pass, and then a row."""
    return (hurdle + view.price * float(outlook.drafting[-1, 0])) / view.worth


@dataclass(slots=True)
class Decided:
    """Index of each sequence's drafter (-1: none) and how deep it drafts, [sequences]; the profit expected of it."""

    choice: Ints
    depths: Ints
    profit: float = 0.0


@dataclass(frozen=True, slots=True)
class Standing:
    """A decision that stands for a few steps, as long as no sequence joins. `rows` gives a sequence's row in it."""

    outlooks: tuple[Outlook, ...]
    decided: Decided
    floors: Floats
    rows: Mapping[str, int]

    def covers(self, view: View) -> bool:
        """Whether every sequence of the step was decided on."""
        return all(map(self.rows.__contains__, view.sequences))

    def over(self, view: View) -> tuple[Ints, Decided]:
        """Rows of the step's sequences, and what was decided for them, within their rooms."""
        rows = np.array([self.rows[sequence] for sequence in view.sequences], dtype=np.intp)
        depths = np.minimum(self.decided.depths[rows], view.rooms)
        return rows, Decided(self.decided.choice[rows], depths, self.decided.profit)


def decide(outlooks: Sequence[Outlook], view: View, *, prices: Prices, hurdles: Sequence[float]) -> Standing:
    """Choose, and where drafters that can stop should."""
    decided = choose(outlooks, view, prices=prices, hurdles=hurdles)
    low = np.zeros(view.open)
    for index, each in enumerate(outlooks):
        if each.stops and each.skill.scored:
            low = np.where(decided.choice == index, floors(each, view, hurdle=hurdles[0]), low)
    return Standing(tuple(outlooks), decided, low, {sequence: row for row, sequence in enumerate(view.sequences)})


def choose(outlooks: Sequence[Outlook], view: View, *, prices: Prices, hurdles: Sequence[float]) -> Decided:
    """The most profitable of the choices made under each of several `hurdles`.

    Where rows get cheaper the more there are (experts are shared), doing nothing and everyone drafting can each look
    right at its own marginal price; only profit tells which is.
    """
    best = Decided(np.full(view.open, -1), np.zeros(view.open, np.intp))
    for hurdle in hurdles:
        bids = [bid(each, view, hurdle=hurdle) for each in outlooks]
        drafter = assign(bids, view)
        deep, profit = depths(bids, drafter, view, prices=prices)
        if profit > best.profit:
            best = Decided(drafter, deep, profit)
        if best.depths.all():
            break
    return best


def assign(bids: Sequence[Bid], view: View) -> Ints:
    """Index of each sequence's drafter, -1 for none: the set of drafters that together make the most.

    Several at once must promise clearly more than one: the better of several estimates is partly luck.
    """
    best, choice = 0.0, np.full(view.open, -1)
    sizes = range(1, len(bids) + 1) if len(bids) <= 3 else (1, len(bids))
    for chosen in (each for size in sizes for each in combinations(range(len(bids)), size)):
        profits = np.stack([bids[index].profit for index in chosen])
        taken = np.where(profits.max(0) > 0, np.array(chosen)[profits.argmax(0)], -1)
        used = [index for index in chosen if (taken == index).any()]
        total = float(profits.max(0).sum()) - sum(bids[index].opening for index in used)
        total *= _LUCK ** (len(used) - 1)
        if total > best or (len(bids) == 1 and used):  # of one drafter the search over all depths says more
            best, choice = total, taken
    return choice


def depths(bids: Sequence[Bid], choice: Ints, view: View, *, prices: Prices) -> tuple[Ints, float]:
    """How deep each sequence drafts, and the profit: guesses in order of what they bring, as many as profit most."""
    width = max(bid.net.shape[1] for bid in bids)
    net, gain, rows, cost = (np.zeros((view.open, width)) for _ in range(4))
    asked: Bools = np.zeros((view.open, width), dtype=bool)
    for index, each in enumerate(bids):
        mine = np.flatnonzero(choice == index)
        if len(mine):
            deep = each.net.shape[1]
            place = np.ix_(mine, np.arange(deep))
            net[place], gain[place], rows[place] = each.net[mine], each.gain[mine], each.rows[mine]
            ranks = np.argsort(np.argsort(-each.net[mine], axis=0, kind="stable"), axis=0)
            cost[place] = np.take_along_axis(each.drafting, ranks, axis=0) * each.reach[mine]
            asked[place] = np.arange(deep) < view.rooms[mine, None]
    flat = np.flatnonzero(asked)
    if not len(flat):
        return np.zeros(view.open, dtype=np.intp), 0.0
    flat = flat[np.argsort(-net.ravel()[flat], kind="stable")]
    added = np.concatenate([[0.0], np.cumsum(rows.ravel()[flat])])
    extra = prices.extra(view.rows, view.requests, view.context, count=int(np.ceil(added[-1])) + 1)
    seconds = np.interp(added, np.arange(len(extra)), extra)
    seconds += np.concatenate([[0.0], np.cumsum(cost.ravel()[flat])])
    profit = np.concatenate([[0.0], np.cumsum(gain.ravel()[flat])]) - view.price * seconds
    taken = flat[: int(np.flatnonzero(profit >= profit.max() - _FREE * view.total)[-1])]
    return np.bincount(taken // width, minlength=view.open), float(profit.max())
