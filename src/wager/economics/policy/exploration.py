"""Exploration: steps that are not expected to pay, taken to keep the estimates current within a fixed share of the
time; and the drafters that nothing wants meanwhile.

Steps of the planned number of rows are observed all the time, others never, so a policy that believes that they are too
expensive would never learn that they are not: now and then a step verifies more or fewer draft tokens than planned. A
drafter that no sequence uses is asked for a short draft now and then.

A drafter that reads the target's states costs something in every step, used or not, and the steps of a small target
are short. One that no plan has named for some steps is inactive: it is shown no states. When it is wanted again, it is
shown those of some steps before it is asked for drafts. Of the sequences that decode meanwhile it has then seen the
last tokens only, which is nearly as good (docs/policy.md), and of those that come later everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from wager.economics.acceptance import LARGE_BATCH
from wager.economics.latency import difference_deviations
from wager.economics.policy.base import LONGEST_INTERVAL, UPDATE_INTERVAL
from wager.economics.policy.prices import Prices
from wager.economics.policy.state import DrafterProfile, PlannedSequence, PolicyStep
from wager.types import DraftDecision

EXPLORATION_SHARE = 0.004  # of the running time: hardly noticeable, yet enough to notice a change within seconds
_MAX_SAVED = 1500  # steps whose budget can accumulate, or be owed, so that a burst costs no more than a few steps
_MIN_COST = 0.005  # of a plain step: what exploration costs at least, so that it is not done in every step

INACTIVE_AFTER = 32  # steps for which nothing wants a drafter that is then inactive
TRIAL = 8  # steps after a request until one may be inactive: what it guessed is compared with the tokens of these
KEEPING_S = 1e-4  # seconds that keeping states takes in a step, about, whatever the target
_NEGLIGIBLE_KEEPING = 0.002  # share of a step: keeping states that takes less goes on

_DEPTH = 2  # of drafts made only to learn: the second token is a second observation for little more time
_PLAUSIBLE = 2.5  # standard deviations by which seconds may plausibly differ from what is believed
_LEAST_GAIN = 0.01  # of the tokens of a plain step: what a step must be able to gain to be worth a look
_FIRST_INTERVAL = 2 * UPDATE_INTERVAL  # steps between those in which it is asked whether to explore; it doubles

_NONE: frozenset[str] = frozenset()


class ExplorationBudget:
    """Seconds that may be spent on exploration; `share` of the running time. `saved_up`: as many as can accumulate may
    be spent at once, since what is learned at first helps most."""

    def __init__(self, share: float, *, saved_up: bool = False) -> None:
        self._share, self._saved_up = share, saved_up
        self._most = 0.0
        self.seconds = 0.0  # those that are left; negative if something took longer than was expected

    def earn(self, seconds: float, *, steps: int = 1) -> None:
        """`steps` steps took so long together."""
        self._most = self._share * _MAX_SAVED * seconds / steps
        self.seconds = self._most if self._saved_up else min(self.seconds + self._share * seconds, self._most)
        self._saved_up = False

    def spend(self, seconds: float, plain_seconds: float) -> bool:
        """Take `seconds` from the budget; False if it has fewer. `plain_seconds` are those of a plain step."""
        cost = max(seconds, _MIN_COST * plain_seconds)
        if cost > self.seconds:
            return False
        self.seconds -= cost
        return True

    def charge(self, seconds: float) -> None:
        """What was spent on took so much longer than was expected. A pause of the machine must not end exploration."""
        self.seconds = max(-self._most, self.seconds - seconds)


class DrafterReadiness:
    """Which drafters are inactive, which have seen enough to draft, and what they have missed. `left_out` are those
    that failed and pause."""

    def __init__(self, drafters: Sequence[DrafterProfile]) -> None:
        self.inactive = self.left_out = _NONE
        self._drafters = drafters
        self._index = {profile.name: index for index, profile in enumerate(drafters)}
        self._readers = [index for index, profile in enumerate(drafters) if profile.capabilities.warm_up]
        self._ready = [0] * len(drafters)  # the step from which each has seen enough
        self._kept = [0] * len(drafters)  # the step until which it is not inactive; 0: none was set yet

    def note_request(self, state: PlannedSequence, drafter: int, now: int) -> None:
        """In step number `now` it is asked for a draft."""
        state.last_position[drafter], state.last_step[drafter] = state.known, now
        self._kept[drafter] = max(self._kept[drafter], now + TRIAL)

    def note_drafted(self, step: PolicyStep, decisions: Mapping[str, DraftDecision]) -> None:
        """Before a plan: until now the drafters kept up with the sequences that they were to draft for."""
        if not any(profile.capabilities.catch_up_s for profile in self._drafters):
            return
        for state in step.candidates:
            decision = decisions.get(state.seq_id)
            if decision is not None and state.known_before:
                self.note_request(state, self._index[decision.drafter], step.number)
            state.known_before = True
        for name in self.inactive:
            self._start_anew(step, self._index[name])

    def _start_anew(self, step: PolicyStep, drafter: int) -> None:
        """What it has missed of the sequences it never computes."""
        for state in step.candidates:
            state.last_position[drafter] = state.known

    def unready(self, now: int) -> frozenset[str]:
        """The drafters that are inactive, pause, or woke so lately that they have not seen enough."""
        waking = [self._drafters[index].name for index in self._readers if self._ready[index] > now]
        return self.inactive.union(waking, self.left_out) if waking or self.left_out else self.inactive

    def next_ready(self, now: int) -> int | None:
        """The next step in which one that woke has seen enough."""
        return min([self._ready[index] for index in self._readers if self._ready[index] > now], default=None)

    def update(self, step: PolicyStep, decisions: Mapping[str, DraftDecision]) -> None:
        """Those that sequences are to use are awake from now on; those that nothing wanted for long are inactive."""
        if not self._readers:
            return
        now, wanted = step.number, {self._index[decision.drafter] for decision in decisions.values()}
        for index in self._readers:
            if index in wanted or not self._kept[index]:
                self.keep(step, index, steps=INACTIVE_AFTER)
        if _NEGLIGIBLE_KEEPING * step.plain.seconds < KEEPING_S:
            inactive = [self._drafters[index].name for index in self._readers if self._kept[index] <= now]
            if not self.inactive.issuperset(inactive):
                self.inactive = self.inactive.union(inactive)

    def keep(self, step: PolicyStep, drafter: int, *, steps: int) -> None:
        """It is not inactive within so many steps; one that was wakes, and these begin when it has seen enough."""
        now, (name, capabilities, _) = step.number, self._drafters[drafter]
        if name in self.inactive:
            self.inactive = self.inactive.difference([name])
            self._ready[drafter] = now = now + capabilities.warm_up
            self._start_anew(step, drafter)
        self._kept[drafter] = max(self._kept[drafter], now + steps)


class DraftExploration:
    """Requests drafts by drafters that sequences do not use."""

    def __init__(
        self, drafters: Sequence[DrafterProfile], prices: Prices, readiness: DrafterReadiness, *, share: float
    ) -> None:
        self.budget = ExplorationBudget(share)
        self._drafters = drafters
        self._latency = prices.latency
        self._readiness = readiness

    def explore(self, step: PolicyStep, *, draws_tokens: bool, steps: int) -> None:
        """Add such drafts to the plan, as the budget allows, those of the next `steps` steps together. An inactive
        drafter wakes for it. `draws_tokens`: a draft may have to be verified whatever it is."""
        seconds, readiness = step.plain.seconds, self._readiness
        if self.budget.seconds < _MIN_COST * seconds:
            return
        if len(self._drafters) == 1 and (len(step.plan) == step.decoding or len(step.plan) == step.num_candidates):
            return
        step.plan = step.plan.copy()  # later steps repeat it without exploration
        unready = readiness.unready(step.number)
        ready = [index for index, profile in enumerate(self._drafters) if profile.name not in unready]
        requested: list[tuple[PlannedSequence, int]] = []
        for _ in range(steps):
            if self.budget.seconds < _MIN_COST * seconds:
                break
            found = [
                (state, index) for index in ready if (state := self._request(step, index, draws_tokens=draws_tokens))
            ]
            if not found:
                break
            requested += found
        for index, profile in enumerate(self._drafters):
            if profile.name in readiness.inactive and self._pays_to_wake(profile, seconds):
                readiness.keep(step, index, steps=TRIAL)
        for state, index in requested:
            readiness.note_request(state, index, step.number)

    def _pays_to_wake(self, profile: DrafterProfile, plain_seconds: float) -> bool:
        """Pay for keeping states for the steps that a trial takes, if a draft can be paid for too."""
        name, capabilities, _ = profile
        keeping = KEEPING_S * (capabilities.warm_up + TRIAL)
        draft = self._latency.draft_seconds(name, 1, min(_DEPTH, capabilities.max_depth))
        if self.budget.seconds < keeping + draft + capabilities.catch_up_s * capabilities.warm_up:
            return False
        return self.budget.spend(keeping, plain_seconds)

    def _request(self, step: PolicyStep, index: int, *, draws_tokens: bool) -> PlannedSequence | None:
        """Request a draft for the sequence that the drafter last drafted for the longest time ago."""
        name, capabilities, _ = self._drafters[index]
        plan, candidates, plain_step = step.plan, step.candidates, step.plain
        plain = [state for state in candidates if state.seq_id not in plan]
        others = [state for state in candidates if state.seq_id in plan and plan[state.seq_id].drafter != name]
        if not plain and not others:
            return None
        state = min(plain or others, key=lambda state: state.last_step[index])
        depth, depths = min(state.room, capabilities.max_depth, _DEPTH), step.passes().get(index, [])
        ragged = self._latency.ragged_draft_seconds
        catch_up = state.catch_up_seconds(index, capabilities)
        cost = catch_up + ragged(name, [*depths, depth]) - ragged(name, depths)
        if draws_tokens:
            cost += self._latency.extra_seconds(*plain_step.shape, count=depth)[depth]
        if not plain:  # what the other drafter's tokens would have gained
            cost += plain_step.speculation_gain / len(candidates)
        if not self.budget.spend(cost, plain_step.seconds):
            return None
        step.catches_up |= catch_up > 0
        step.explored_catch_up += catch_up
        step.plan[state.seq_id] = DraftDecision(depth, name)
        step.explored |= {state.seq_id}
        return state


class MeasuringStep(NamedTuple):
    """All sequences draft to `depth` with one drafter, by index, and all of it is verified; 0: none drafts."""

    drafter: int
    depth: int


@dataclass(frozen=True, slots=True)
class DepthPrices:
    """Drafting to each depth, from 0, for all sequences: its expected gain in weighted tokens, the seconds that its
    rows and drafting add, and how uncertain it is what the rows differ from those of the plan, in seconds."""

    gain: Sequence[float]
    seconds: Sequence[float]
    deviation: Sequence[float]


class RowExploration:
    """Decides when a step measures what rows cost, and how many. One is taken if it would pay, were it as much faster
    than believed as is plausible; what it loses if it is not is paid from the budget."""

    def __init__(
        self, drafters: Sequence[DrafterProfile], prices: Prices, readiness: DrafterReadiness, *, share: float
    ) -> None:
        self.budget = ExplorationBudget(share, saved_up=True)
        self.steps = 0  # taken
        self._drafters = drafters
        self._prices = prices
        self._readiness = readiness
        # by batch size in powers of two:
        self._streaks: dict[int, int] = {}  # speculating steps since a plain one
        self._plain_intervals: dict[int, int] = {}  # how long a streak must be before the next plain step
        self._asked: dict[int, int] = {}  # when it was last asked whether to explore
        self._intervals: dict[int, int] = {}  # how many steps there must be between
        self._last_asked = 0  # the step in which it was last asked whether to take a plain one
        self._postponed: MeasuringStep | None = None  # one that waits for its drafter

    def takes_plain_step(self, step: PolicyStep, *, speculates: bool) -> bool:
        """Whether to take this step without drafts, to measure its latency where every step `speculates`; to be asked
        every few steps."""
        if not self._prices.model.learns:
            return False
        size, passed = step.decoding.bit_length(), step.number - self._last_asked
        self._last_asked = step.number
        self._streaks[size] = streak = self._streaks.get(size, 0) + passed if speculates else 0
        interval = self._plain_intervals.get(size, _FIRST_INTERVAL)
        if streak < interval:
            return False
        if not self.budget.spend(step.plain.speculation_gain + self._prices.own.planning, step.plain.seconds):
            return False
        self._streaks[size], self._plain_intervals[size] = 0, min(LONGEST_INTERVAL, 2 * interval)
        return True

    def measure(self, step: PolicyStep, *, planned_rows: int) -> MeasuringStep | None:
        """How to draft in this step to measure; None: as planned, which verifies about `planned_rows` draft tokens. If
        it is by an inactive drafter, that wakes, and the step is taken when it is ready."""
        readiness = self._readiness
        if (postponed := self._postponed) is not None:
            name = self._drafters[postponed.drafter].name
            if name in readiness.unready(step.number) and name not in readiness.inactive:
                return None
            self._postponed = None
            if name not in readiness.inactive and step.candidates:
                return postponed
        if not (self._prices.model.learns and self._is_due(step)):
            return None
        count, plain = len(step.candidates), step.plain
        planning, least_cost = self._prices.own.planning, _MIN_COST * plain.seconds
        if not count or plain.goodput <= 0 or least_cost + planning > self.budget.seconds:
            return None
        every = 1 + count // LARGE_BATCH  # some sequences' forecasts are averaged
        plans = [state.plan for state in step.candidates[::every] if state.plan.forecasts]
        best, best_value, cost, planned = None, 0.0, 0.0, planned_rows / count
        for index in range(len(self._drafters) if plans else 0):
            width = min([plan.forecasts[index].shape[1] for plan in plans])
            forecasts = [plan.forecasts[index][plan.row, :width].tolist() for plan in plans]
            survival = [sum(column) / len(plans) for column in zip(*forecasts, strict=True)]
            prices = self._depth_prices(step, index, survival, planned_rows)
            profit = [gain - plain.goodput * seconds for gain, seconds in zip(prices.gain, prices.seconds, strict=True)]
            usual = _between(profit, planned)
            for depth, (mine, deviation) in enumerate(zip(profit, prices.deviation, strict=True)):
                better = mine - usual
                hoped = better + plain.goodput * _PLAUSIBLE * deviation
                loss = max(-better / plain.goodput, least_cost) + planning
                worth = hoped > _LEAST_GAIN * plain.weight and loss <= self.budget.seconds and hoped > best_value * loss
                if worth and abs(depth - planned) >= 0.5:  # nearer ones are the plan
                    best, best_value, cost = MeasuringStep(index, depth), hoped / loss, loss
        if best is None or not self.budget.spend(cost, plain.seconds):
            return None
        self._intervals[step.decoding.bit_length()] = _FIRST_INTERVAL
        if best.depth and self._drafters[best.drafter].name in readiness.unready(step.number):
            readiness.keep(step, best.drafter, steps=TRIAL)
            self._postponed, best = best, None
        return best

    def _is_due(self, step: PolicyStep) -> bool:
        size = step.decoding.bit_length()
        interval = self._intervals.get(size, _FIRST_INTERVAL)
        if self.steps - self._asked.setdefault(size, self.steps) < interval:
            return False
        self._asked[size], self._intervals[size] = self.steps, min(LONGEST_INTERVAL, 2 * interval)
        return True

    def _depth_prices(self, step: PolicyStep, index: int, survival: Sequence[float], planned_rows: int) -> DepthPrices:
        (name, capabilities, _), candidates = self._drafters[index], step.candidates
        count, depth, latency = len(candidates), len(survival), self._prices.latency
        rows, requests, context_sum = step.plain.shape
        new = [state for state in candidates if state.seq_id not in step.plan]
        missed = sum([state.catch_up_seconds(index, capabilities) for state in new])
        extra = latency.extra_seconds(rows, requests, context_sum, count=count * depth)
        depths, weight = range(1, depth + 1), step.plain.weight / step.decoding * count
        drafting = [missed + latency.draft_seconds(name, count, deep) for deep in depths]
        return DepthPrices(
            gain=[weight * sum_ for sum_ in accumulate(survival, initial=0.0)],
            seconds=[extra[0], *[extra[count * deep] + taken for deep, taken in zip(depths, drafting, strict=True)]],
            deviation=difference_deviations(
                self._prices.model,
                rows + planned_rows,
                [rows + count * deep for deep in range(depth + 1)],
                requests=requests,
                context_sum=context_sum,
            ),
        )


def _between(values: Sequence[float], at: float) -> float:
    """`values` at 0, 1, ..., interpolated; the last one beyond."""
    below = min(int(at), len(values) - 1)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (at - below)
