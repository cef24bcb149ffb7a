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

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from wager.economics.acceptance import LARGE_BATCH
from wager.economics.policy.base import (
    LONGEST_INTERVAL,
    NEGLIGIBLE,
    SLOW_INTERVAL,
    UPDATE_INTERVAL,
    DrafterCapabilities,
)
from wager.economics.policy.prices import Prices
from wager.economics.policy.state import PlannedSequence, PolicyStep
from wager.types import DraftDecision

EXPLORATION_SHARE = 0.004  # of the running time: hardly noticeable, yet enough to notice a change within seconds
_MAX_SAVED = 1500  # steps whose budget can accumulate, or be owed, so that a burst costs no more than a few steps
_MIN_COST = 0.005  # of a plain step: what exploration costs at least, so that it is not done in every step

TRIAL = 8  # steps after a request until one may be inactive: what it guessed is compared with the tokens of these
KEEPING_S = 1e-4  # seconds that keeping states takes in a step, about, whatever the target; it goes on where negligible

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

    def __init__(self, drafters: Mapping[str, DrafterCapabilities]) -> None:
        self.inactive = self.left_out = _NONE
        self._drafters = drafters
        self._readers = [name for name, capabilities in drafters.items() if capabilities.warm_up]
        self._ready = dict.fromkeys(drafters, 0)  # the step from which each has seen enough
        self._kept = dict.fromkeys(drafters, 0)  # the step until which it is not inactive; 0: none was set yet

    def note_request(self, state: PlannedSequence, drafter: str, now: int) -> None:
        """In step number `now` it is asked for a draft."""
        state.last_position[drafter], state.last_step[drafter] = state.known, now
        self._kept[drafter] = max(self._kept[drafter], now + TRIAL)

    def note_drafted(self, step: PolicyStep, decisions: Mapping[str, DraftDecision]) -> None:
        """Before a plan: until now the drafters kept up with the sequences that they were to draft for."""
        if not any(capabilities.catch_up_s for capabilities in self._drafters.values()):
            return
        for state in step.candidates:
            decision = decisions.get(state.seq_id)
            if decision is not None and state.known_before:
                self.note_request(state, decision.drafter, step.number)
            state.known_before = True
        for drafter in self.inactive:
            self._start_anew(step, drafter)

    def _start_anew(self, step: PolicyStep, drafter: str) -> None:
        """What it has missed of the sequences it never computes."""
        for state in step.candidates:
            state.last_position[drafter] = state.known

    def unready(self, now: int) -> frozenset[str]:
        """The drafters that are inactive, pause, or woke so lately that they have not seen enough."""
        waking = [drafter for drafter in self._readers if self._ready[drafter] > now]
        return self.inactive.union(waking, self.left_out) if waking or self.left_out else self.inactive

    def next_ready(self, now: int) -> int | None:
        """The next step in which one that woke has seen enough."""
        return min([self._ready[drafter] for drafter in self._readers if self._ready[drafter] > now], default=None)

    def update(self, step: PolicyStep, decisions: Mapping[str, DraftDecision]) -> None:
        """Those that sequences are to use are awake from now on; those that nothing wanted for long are inactive."""
        if not self._readers:
            return
        wanted = {decision.drafter for decision in decisions.values()}
        for drafter in self._readers:
            if drafter in wanted or not self._kept[drafter]:
                self.keep(step, drafter, steps=SLOW_INTERVAL)
        if NEGLIGIBLE * step.plain.seconds < KEEPING_S:
            inactive = [drafter for drafter in self._readers if self._kept[drafter] <= step.number]
            if not self.inactive.issuperset(inactive):
                self.inactive = self.inactive.union(inactive)

    def keep(self, step: PolicyStep, drafter: str, *, steps: int) -> None:
        """It is not inactive within so many steps; one that was wakes, and these begin when it has seen enough."""
        now = step.number
        if drafter in self.inactive:
            self.inactive = self.inactive.difference([drafter])
            self._ready[drafter] = now = now + self._drafters[drafter].warm_up
            self._start_anew(step, drafter)
        self._kept[drafter] = max(self._kept[drafter], now + steps)


class MeasuringStep(NamedTuple):
    """All sequences draft to `depth` with one drafter, and all of it is verified; 0: none drafts."""

    drafter: str
    depth: int


@dataclass(slots=True)
class BatchSize:
    """When steps of about one batch size measured, and when they are to again."""

    speculating: int = 0  # steps since a plain one
    plain_interval: int = _FIRST_INTERVAL  # how many there must be before the next plain step
    asked: int | None = None  # when it was last asked whether to measure what rows cost
    interval: int = _FIRST_INTERVAL  # how many steps there must be between


class Exploration:
    """Drafts by drafters that sequences do not use, and steps that measure what rows cost, each from a budget of its
    own. A step measures if it would pay, were it as much faster than believed as is plausible; what it loses if it is
    not is spent."""

    def __init__(
        self,
        drafters: Mapping[str, DrafterCapabilities],
        prices: Prices,
        readiness: DrafterReadiness,
        *,
        share: float,
    ) -> None:
        self.for_drafts, self.for_rows = ExplorationBudget(share), ExplorationBudget(share, saved_up=True)
        self._drafters, self._prices, self._readiness = drafters, prices, readiness
        self._steps = 0  # taken
        self._sizes: dict[int, BatchSize] = defaultdict(BatchSize)  # in powers of two
        self._last_asked = 0  # the step in which it was last asked whether to take a plain one
        self._postponed: MeasuringStep | None = None  # one that waits for its drafter

    def earn(self, seconds: float, *, steps: int) -> None:
        """`steps` steps took so long together."""
        self._steps += steps
        self.for_drafts.earn(seconds, steps=steps)
        self.for_rows.earn(seconds, steps=steps)

    # ---- drafts -----------------------------------------------------------------------------------------------------

    def add_drafts(self, step: PolicyStep, *, draws_tokens: bool, steps: int) -> None:
        """Add drafts by other drafters to the plan, as the budget allows, those of the next `steps` steps together. An
        inactive drafter wakes for it. `draws_tokens`: a draft may have to be verified whatever it is."""
        least, readiness = _MIN_COST * step.plain.seconds, self._readiness
        if self.for_drafts.seconds < least:
            return
        asked = len(step.plan)
        if len(self._drafters) == 1 and (asked == step.decoding or asked == len(step.candidates)):
            return
        step.plan = step.plan.copy()  # later steps repeat it without exploration
        unready = readiness.unready(step.number)
        ready = [drafter for drafter in self._drafters if drafter not in unready]
        requested: list[tuple[PlannedSequence, str]] = []
        for _ in range(steps):
            if self.for_drafts.seconds < least:
                break
            found = [(state, each) for each in ready if (state := self._request(step, each, draws_tokens=draws_tokens))]
            if not found:
                break
            requested += found
        for drafter in self._drafters:
            if drafter in readiness.inactive and self._pays_to_wake(drafter, step.plain.seconds):
                readiness.keep(step, drafter, steps=TRIAL)
        for state, drafter in requested:
            readiness.note_request(state, drafter, step.number)

    def _pays_to_wake(self, drafter: str, plain_seconds: float) -> bool:
        """Pay for keeping states for the steps that a trial takes, if a draft can be paid for too."""
        capabilities = self._drafters[drafter]
        keeping = KEEPING_S * (capabilities.warm_up + TRIAL)
        draft = self._prices.latency.draft_seconds(drafter, 1, min(_DEPTH, capabilities.max_depth))
        if self.for_drafts.seconds < keeping + draft + capabilities.catch_up_s * capabilities.warm_up:
            return False
        return self.for_drafts.spend(keeping, plain_seconds)

    def _request(self, step: PolicyStep, drafter: str, *, draws_tokens: bool) -> PlannedSequence | None:
        """Request a draft for the sequence that the drafter last drafted for the longest time ago."""
        plan, latency, plain_step, capabilities = step.plan, self._prices.latency, step.plain, self._drafters[drafter]
        plain = [state for state in step.candidates if state.seq_id not in plan]
        others = [state for state in step.candidates if state.seq_id in plan and plan[state.seq_id].drafter != drafter]
        if not plain and not others:
            return None
        state = min(plain or others, key=lambda state: state.last_step.get(drafter, -1))
        depth, depths = min(state.room, capabilities.max_depth, _DEPTH), step.passes().get(drafter, [])
        catch_up, drafting = state.catch_up_seconds(drafter, capabilities), latency.ragged_draft_seconds
        cost = catch_up + drafting(drafter, [*depths, depth]) - drafting(drafter, depths)
        if draws_tokens:
            cost += latency.extra_seconds(plain_step.shape, count=depth)[depth]
        if not plain:  # what the other drafter's tokens would have gained
            cost += plain_step.speculation_gain / len(step.candidates)
        if not self.for_drafts.spend(cost, plain_step.seconds):
            return None
        step.catches_up |= catch_up > 0
        step.explored_catch_up += catch_up
        step.plan[state.seq_id] = DraftDecision(depth, drafter)
        step.explored |= {state.seq_id}
        return state

    # ---- what rows cost ---------------------------------------------------------------------------------------------

    def takes_plain_step(self, step: PolicyStep, *, speculates: bool) -> bool:
        """Whether to take this step without drafts, to measure its latency where every step `speculates`; to be asked
        every few steps."""
        if not self._prices.model.learns:
            return False
        size, passed = self._sizes[step.decoding.bit_length()], step.number - self._last_asked
        self._last_asked = step.number
        size.speculating = size.speculating + passed if speculates else 0
        if size.speculating < size.plain_interval:
            return False
        if not self.for_rows.spend(step.plain.speculation_gain + self._prices.own.planning, step.plain.seconds):
            return False
        size.speculating, size.plain_interval = 0, min(LONGEST_INTERVAL, 2 * size.plain_interval)
        return True

    def measure(self, step: PolicyStep, *, planned_rows: int) -> MeasuringStep | None:
        """How to draft in this step to measure; None: as planned, which verifies about `planned_rows` draft tokens. If
        it is by an inactive drafter, that wakes, and the step is taken when it is ready."""
        readiness = self._readiness
        if (postponed := self._postponed) is not None:
            inactive = postponed.drafter in readiness.inactive
            if postponed.drafter in readiness.unready(step.number) and not inactive:
                return None
            self._postponed = None
            if not inactive and step.candidates:
                return postponed
        if not self._prices.model.learns:
            return None
        size = self._sizes[step.decoding.bit_length()]
        if size.asked is None:
            size.asked = self._steps
        if self._steps - size.asked < size.interval:
            return None
        size.asked, size.interval = self._steps, min(LONGEST_INTERVAL, 2 * size.interval)
        best = self._best_to_measure(step, planned_rows)
        if best is None:
            return None
        size.interval = _FIRST_INTERVAL
        if best.depth and best.drafter in readiness.unready(step.number):
            readiness.keep(step, best.drafter, steps=TRIAL)
            self._postponed, best = best, None
        return best

    def _best_to_measure(self, step: PolicyStep, planned_rows: int) -> MeasuringStep | None:
        """The step that would gain most for what it loses if seconds are as believed, which is spent."""
        count, plain = len(step.candidates), step.plain
        planning, least_cost = self._prices.own.planning, _MIN_COST * plain.seconds
        if not count or plain.goodput <= 0 or least_cost + planning > self.for_rows.seconds:
            return None
        every = 1 + count // LARGE_BATCH  # some sequences' forecasts are averaged
        forecast = [state for state in step.candidates[::every] if state.forecasts]
        best, best_value, cost, planned = None, 0.0, 0.0, planned_rows / count
        for drafter in self._drafters if forecast else ():
            width = min([state.forecasts[drafter].shape[1] for state in forecast])
            rows = [state.forecasts[drafter][state.row, :width].tolist() for state in forecast]
            survival = [sum(column) / len(forecast) for column in zip(*rows, strict=True)]
            profit, deviations = self._profits(step, drafter, survival, planned_rows)
            usual = float(np.interp(planned, range(len(profit)), profit))
            for depth, (mine, deviation) in enumerate(zip(profit, deviations, strict=True)):
                better = mine - usual
                hoped = better + plain.goodput * _PLAUSIBLE * deviation
                loss = max(-better / plain.goodput, least_cost) + planning
                worth = hoped > _LEAST_GAIN * plain.weight and loss <= self.for_rows.seconds
                if worth and hoped > best_value * loss and abs(depth - planned) >= 0.5:  # nearer ones are the plan
                    best, best_value, cost = MeasuringStep(drafter, depth), hoped / loss, loss
        return best if best is not None and self.for_rows.spend(cost, plain.seconds) else None

    def _profits(
        self, step: PolicyStep, drafter: str, survival: Sequence[float], planned_rows: int
    ) -> tuple[list[float], list[float]]:
        """Of drafting to each depth, from 0, for all sequences: the expected profit in weighted tokens, and how
        uncertain it is what its rows differ from those of the plan, in seconds."""
        capabilities, candidates, latency = self._drafters[drafter], step.candidates, self._prices.latency
        count, depths, plain = len(candidates), range(len(survival) + 1), step.plain
        rows, requests, context_sum = plain.shape
        new = [state for state in candidates if state.seq_id not in step.plan]
        missed = sum([state.catch_up_seconds(drafter, capabilities) for state in new])
        extra = latency.extra_seconds(plain.shape, count=count * len(survival))
        drafting = [missed + latency.draft_seconds(drafter, count, depth) if depth else 0.0 for depth in depths]
        weight = plain.weight / step.decoding * count
        gains = [weight * reached for reached in accumulate(survival, initial=0.0)]
        profits = [gains[depth] - plain.goodput * (extra[count * depth] + drafting[depth]) for depth in depths]
        deviations = self._prices.model.difference_deviations(
            rows + planned_rows,
            [rows + count * depth for depth in depths],
            requests=requests,
            context_sum=context_sum,
        )
        return profits, deviations
