"""Before drafting: which drafter for each sequence, how deep, or none. Drafting is priced like everything else.

A bid is what a drafter would bring and cost for every sequence. Guesses with confidence can be dropped again after
they were made, so asking for one is an option: it brings what survives the hurdle and costs rows only then. Knows
chances and seconds, and learns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from wager.economics.policy.acceptance import Floats, Skill
from wager.economics.policy.base import DrafterCapabilities
from wager.economics.policy.bets import Choice, Seat, Step
from wager.economics.policy.objective import Worth
from wager.economics.policy.prices import Prices, Rates

Ints = NDArray[np.intp]

_PATIENCE, _ASLEEP, _SOON = 32, 128, 4
"""Steps that decisions stand; the first stands one step, the second two, and so on up to this many; up to the second
number where nobody drafts, but up to the third once a probe came true there."""

_OTHER = 1.5
"""A batch larger or smaller by this factor is another one."""

_STAY = 64.0
"""Steps over which the cost of waking a drafter is spread."""

_NOTED = 0.05
"""How fast the policy's own time is followed."""

_FREE = 0.002
"""Guesses that cost less than this share of a step's worth are asked for: they may turn out to be good."""

_LUCK = 0.93
"""What is left of a promised profit for every drafter beyond the first: the better of several estimates is partly
luck."""

_SUREST = 0.95
"""No drafter is told to stop after a guess that is likelier than this."""


class Planner:
    """Decides for every sequence, every few steps. `usual` is what a new one gets until then."""

    def __init__(
        self,
        offers: Sequence[tuple[str, DrafterCapabilities]],
        skills: Sequence[Skill],
        *,
        prices: Prices,
        rates: Rates,
    ) -> None:
        self.usual = Choice()
        self._offers, self._skills, self._prices, self._rates = offers, skills, prices, rates
        self.asks = True  # whether anybody was to draft when that was last decided
        self._alike = False
        self._due = self._now = self._new = self._patience = self._size = 0
        self._idle = self._busy = self._bets = 0.0

    def due(self, step: Step, *, now: int) -> bool:
        """Whether it is time to decide, in step number `now`: decisions stand for a while, but for another size of
        batch, and for new sequences (all at once, or fewer for longer) where they were not all alike."""
        self._now = now
        size = len(step.open)
        if now >= self._due or max(size, self._size) > _OTHER * min(size, self._size):
            return True
        if self._alike:
            return False
        self._new += sum([not seat.choice.own for _, seat, _, _ in step.open])
        return self._new >= size

    def hurry(self) -> None:
        """A probe came true: where nobody drafts, decide before long."""
        if not self.asks:
            self._due = min(self._due, self._now + _SOON)

    def decide(self, step: Step, worth: Worth) -> None:
        """Renew the choices of the step's open sequences."""
        self._new = 0
        most, more = (_PATIENCE, 1) if self.asks else (_ASLEEP, 4)
        self._patience = min(most, self._patience + more)
        self._due = self._now + self._patience
        self._size = len(step.open)
        rooms = np.array([room for _, _, room, _ in step.open])
        values = np.array([worth.of(seat.merit) for _, seat, _, _ in step.open])
        batch = BatchToPlan(step.rows, step.requests, step.context, step.price, rooms, values)
        outlooks = [self._outlook(index, step, rooms) for index in range(len(self._offers))]
        plan = decide(outlooks, batch, prices=self._prices, hurdles=self._hurdles(step))
        expected = [each.survival.tolist() for each in outlooks]
        choices = []
        for row, (_, seat, _, _) in enumerate(step.open):
            drafter, depth, floor = int(plan.drafters[row]), int(plan.depths[row]), float(plan.floors[row])
            floor = self._skills[drafter].raw(floor) if depth and floor > 0 else 0.0
            seat.choice = Choice(drafter, depth, floor, [each[row] for each in expected], own=True)
            choices.append(seat.choice)
        self.asks = any(choice.depth for choice in choices)
        choices.sort(key=lambda choice: (choice.drafter, choice.depth))
        self.usual = replace(choices[len(choices) // 2], own=False)
        first, last = choices[0], choices[-1]
        self._alike = len(choices) > 1 and (first.drafter, first.depth) == (last.drafter, last.depth)

    def note(self, seconds: float, bets: int) -> None:
        """A step took the policy itself so long, with so many bets."""
        if bets:
            self._busy += _NOTED * (seconds - self._busy)
            self._bets += _NOTED * (bets - self._bets)
        else:
            self._idle += _NOTED * (seconds - self._idle)

    @property
    def own(self) -> float:
        """Seconds that one more bet takes the policy itself; until a step without bets was timed, half of what one with
        bets takes is put down to the step."""
        idle = self._idle or self._busy / 2
        return max(0.0, self._busy - idle) / self._bets if self._bets else 0.0

    def catching_up(self, index: int, seat: Seat, known: int) -> float:
        """Seconds for a drafter with a cache of its own to read what it missed of a sequence."""
        offer = self._offers[index][1]
        if not offer.catch_up_s:
            return 0.0
        return max(0, known - seat.asked_at[index] - offer.max_depth) * offer.catch_up_s

    def _outlook(self, index: int, step: Step, rooms: Ints) -> Outlook:
        name, offer = self._offers[index]
        skill = self._skills[index]
        depth = min(offer.max_depth, int(rooms.max()))
        survival = skill.expect([seat.ratings[index] for _, seat, _, _ in step.open], depth)
        survival = np.where(np.arange(depth) < rooms[:, None], survival, 0.0)
        waking = [self.catching_up(index, seat, known) / _STAY for _, seat, _, known in step.open]
        marginal = self._prices.marginal(name, len(step.open), depth).copy()
        marginal[:, 0] += self.own
        drawn = np.array([seat.drawn for _, seat, _, _ in step.open])
        return Outlook(skill, survival, marginal, np.array(waking), drawn, offer.stops_early)

    def _hurdles(self, step: Step) -> list[float]:
        """What a row may cost: what it lately did, and what it would if everyone drafted one guess, if that is less."""
        count = len(step.open)
        extra = self._prices.extra(step.rows, step.requests, step.context, count=count)
        crowd = step.price * extra[count] / count
        lately = self._rates.hurdle(step.live)
        if lately is None:
            return [crowd]
        return [lately] if lately <= crowd else [lately, crowd]


@dataclass(frozen=True, slots=True)
class BatchToPlan:
    """The step before drafting: its shape, what a second is worth (`price`), and by sequence that may draft its room
    for guesses and the worth of a token, [sequences]."""

    rows: int
    requests: int
    context: int
    price: float
    rooms: Ints
    worth: Floats

    @property
    def free(self) -> float:
        """Too little to be counted."""
        return _FREE * float(self.worth.sum())


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a drafter is expected to do: survival by sequence and depth, [sequences, depth], 0 beyond their room;
    `drafting` the seconds that the j-th to draft at a depth adds, `waking` those of catching up, [sequences]; `drawn`
    whose guesses are verified unseen, [sequences]."""

    skill: Skill
    survival: Floats
    drafting: Floats
    waking: Floats
    drawn: NDArray[np.bool_]
    stops: bool

    def floors(self, batch: BatchToPlan, *, hurdle: float) -> Floats:
        """Survival after which a sequence's next pass is not worth making, [sequences]: it costs a pass and then a row,
        and its guess survives less."""
        if not (self.stops and self.skill.scored):
            return np.full(len(batch.worth), -1.0)
        onward = float(1.0 / (1.0 + np.exp(-self.skill.depths.odds[1])))
        cost = (hurdle + batch.price * float(self.drafting[-1, 0])) / onward
        return np.minimum(cost / batch.worth, _SUREST)


@dataclass(frozen=True, slots=True)
class Bid:
    """What one drafter offers, down to the depth where its passes pay together: arrays [sequences] or [sequences,
    depth]. `gain` and `rows` are what is expected to be verified, `reach` how likely a pass is to be made, `net` what
    it brings at the margin, `drafting` the seconds that the j-th to make it adds; `profit` the best a sequence can make
    of it after its own share of drafting, `opening` what the passes cost beyond the shares."""

    gain: Floats
    rows: Floats
    reach: Floats
    net: Floats
    drafting: Floats
    profit: Floats
    opening: float


@dataclass(frozen=True, slots=True)
class Decision:
    """Index of each sequence's drafter (-1: none), how deep it drafts, and the survival after which it should stop
    (-1: it cannot), [sequences]; the profit expected of it all."""

    drafters: Ints
    depths: Ints
    floors: Floats
    profit: float = 0.0


def decide(outlooks: Sequence[Outlook], batch: BatchToPlan, *, prices: Prices, hurdles: Sequence[float]) -> Decision:
    """The most profitable of the choices made under each of several `hurdles` (what a row may cost, in tokens' worth).

    Where rows get cheaper the more there are (experts are shared), doing nothing and everyone drafting can each look
    right at its own marginal price; only profit tells which is.
    """
    size = len(batch.worth)
    best = Decision(np.full(size, -1), np.zeros(size, np.intp), np.full(size, -1.0))
    for hurdle in hurdles:
        floors = [each.floors(batch, hurdle=hurdle) for each in outlooks]
        bids = [bid(each, batch, hurdle=hurdle, floor=low) for each, low in zip(outlooks, floors, strict=True)]
        choice = assign(bids, size)
        depths, profit = fill(bids, choice, batch, prices=prices)
        if profit > best.profit:
            low = np.choose(choice + 1, [np.full(size, -1.0), *floors])
            best = Decision(choice, depths, low, profit)
        if best.depths.all():
            break
    return best


def bid(outlook: Outlook, batch: BatchToPlan, *, hurdle: float, floor: Floats) -> Bid:
    """One drafter's offer to everyone."""
    survival, drafting, worth = outlook.survival, outlook.drafting, batch.worth[:, None]
    gain, rows, reach = survival, (survival > 0).astype(np.float64), np.ones_like(survival)
    if outlook.skill.scored:  # guesses are judged once they are made, but for those that are draws
        option = outlook.skill.option(survival, hurdle=hurdle / worth, floor=floor[:, None])
        unseen = outlook.drawn[:, None]
        gain, rows, reach = (np.where(unseen, *each) for each in zip((gain, rows, reach), option, strict=True))
    gain = gain * worth
    net = np.minimum.accumulate(gain - hurdle * rows, axis=1)
    own = np.cumsum(net - batch.price * drafting[-1] * reach, axis=1)
    anyone = 1 - np.prod(1 - reach * (own > 0), axis=0)
    opening = batch.price * np.cumsum(np.maximum(drafting[0] - drafting[-1], 0.0) * anyone)
    best = np.maximum.accumulate(own, axis=1) - batch.price * outlook.waking[:, None]
    together = best.clip(0.0).sum(0) - opening
    deep = int(np.flatnonzero(together >= together.max() - batch.free)[-1]) + 1
    gain, rows, reach, net, drafting = (values[:, :deep] for values in (gain, rows, reach, net, drafting))
    return Bid(gain, rows, reach, net, drafting, best[:, deep - 1].clip(0.0), float(opening[deep - 1]))


def assign(bids: Sequence[Bid], size: int) -> Ints:
    """Index of each sequence's drafter, -1 for none: the set of drafters that together make the most."""
    if len(bids) == 1:  # `fill`, which looks at all depths, says more
        return np.where(bids[0].profit > 0, 0, -1)
    best, choice = 0.0, np.full(size, -1)
    sizes = range(1, len(bids) + 1) if len(bids) <= 3 else (1, len(bids))
    for chosen in (each for number in sizes for each in combinations(range(len(bids)), number)):
        profits = np.stack([bids[index].profit for index in chosen])
        taken = np.where(profits.max(0) > 0, np.array(chosen)[profits.argmax(0)], -1)
        used = [index for index in chosen if (taken == index).any()]
        total = float(profits.max(0).sum()) - sum([bids[index].opening for index in used])
        total *= _LUCK ** (len(used) - 1)
        if total > best:
            best, choice = total, taken
    return choice


def fill(bids: Sequence[Bid], choice: Ints, batch: BatchToPlan, *, prices: Prices) -> tuple[Ints, float]:
    """How deep each sequence drafts, and the profit: guesses in order of what they bring, as many as profit most."""
    size, width = len(choice), max([each.net.shape[1] for each in bids])
    net, gain, rows, cost = (np.zeros((size, width)) for _ in range(4))
    asked = np.zeros((size, width), dtype=bool)
    for index, each in enumerate(bids):
        mine = np.flatnonzero(choice == index)
        if len(mine):
            deep = each.net.shape[1]
            place = np.ix_(mine, np.arange(deep))
            net[place], gain[place], rows[place] = each.net[mine], each.gain[mine], each.rows[mine]
            ranks = np.argsort(np.argsort(-each.net[mine], axis=0, kind="stable"), axis=0)
            cost[place] = np.take_along_axis(each.drafting, ranks, axis=0) * each.reach[mine]
            asked[place] = np.arange(deep) < batch.rooms[mine, None]
    flat = np.flatnonzero(asked)
    if not len(flat):
        return np.zeros(size, dtype=np.intp), 0.0
    flat = flat[np.argsort(-net.ravel()[flat], kind="stable")]
    added = np.concatenate([[0.0], np.cumsum(rows.ravel()[flat])])
    extra = prices.extra(batch.rows, batch.requests, batch.context, count=int(added[-1]) + 2)
    seconds = np.interp(added, np.arange(len(extra)), extra)
    seconds += np.concatenate([[0.0], np.cumsum(cost.ravel()[flat])])
    profit = np.concatenate([[0.0], np.cumsum(gain.ravel()[flat])]) - batch.price * seconds
    taken = flat[: int(np.flatnonzero(profit >= profit.max() - batch.free)[-1])]
    return np.bincount(taken // width, minlength=size), float(profit.max())
