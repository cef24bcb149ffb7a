"""Exploration: steps that are not expected to pay, taken to keep the estimates current within a fixed share of the
time; and the drafters that nothing wants meanwhile.

Steps of the planned number of rows are observed all the time, others never: now and then a step verifies more or fewer
draft tokens than planned, and a drafter that no sequence uses is asked for a short draft. One that reads the target's
states costs something in every step, so it is inactive while no plan names it, and is shown the states of some steps
before it drafts again (docs/policy.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from wager.economics.acceptance import LARGE_BATCH
from wager.economics.policy.base import (
    LONGEST_INTERVAL,
    NEGLIGIBLE,
    PAUSE,
    SLOW_INTERVAL,
    UPDATE_INTERVAL,
    DrafterCapabilities,
)
from wager.economics.policy.state import PlannedSequence, PolicyStep, Prices
from wager.types import DraftDecision

EXPLORATION_SHARE = 0.004  # of the running time: hardly noticeable, yet enough to notice a change within seconds
_MAX_SAVED = 1500  # steps whose budget can accumulate, or be owed, so that a burst costs no more than a few steps
_ROWS_SHARE = 0.5  # of that, for what rows cost: prices change more seldom than texts
_FIRST_SHARE, _FIRST_STEPS = 0.05, 120  # of the first steps, to measure what rows cost: as much as is saved later
_MIN_COST = 0.005  # of a plain step: what exploration costs at least, so that it is not done in every step

TRIAL = PAUSE  # steps after a request until a drafter may be inactive: at least, after it woke
KEEPING_S = 1e-4  # seconds that keeping states takes in a step, about, whatever the target; it goes on where negligible

_DEPTH = 2  # of drafts made only to learn: the second token is a second observation for little more time
_PLAUSIBLE = 2.5  # standard deviations by which seconds may plausibly differ from what is believed
_LEAST_GAIN = 0.01  # of the tokens of a plain step: what a step must be able to gain to be worth a look
_REPAID = 16  # steps in which what a look loses must be gained back, if rows are as cheap as is plausible
_FIRST_INTERVAL = 2 * UPDATE_INTERVAL  # steps between those in which it is asked whether to explore; it doubles


def keeping_seconds(plain_seconds: float) -> float:
    """What keeping the target's states takes in a step, where a plain one takes `plain_seconds`; 0 if negligible."""
    return KEEPING_S if NEGLIGIBLE * plain_seconds < KEEPING_S else 0.0


class ExplorationBudget:
    """Seconds that may be spent on exploration: `share` of the running time, and `first_share` of that of the first
    steps, since what is learned at first helps most. What `saved` steps earn can accumulate, or be owed."""

    def __init__(self, share: float, *, first_share: float, saved: int) -> None:
        self._share, self._first_share, self._saved = share, first_share, saved
        self._steps = 0  # taken
        self._most = 0.0
        self.seconds = 0.0  # those that are left; negative if something took longer than was expected

    def earn(self, seconds: float, *, steps: int) -> None:
        """`steps` steps took so long together."""
        self._steps += steps
        share = self._first_share if self._steps <= _FIRST_STEPS else self._share
        self._most = self._share * self._saved * seconds / steps
        self.seconds = min(self.seconds + share * seconds, self._most)

    def spend(self, seconds: float, plain_seconds: float) -> bool:
        """Take `seconds` from the budget; False if it has fewer. `plain_seconds` are those of a plain step."""
        cost = max(seconds, _MIN_COST * plain_seconds)
        if cost > self.seconds:
            return False
        self.seconds -= cost
        return True

    def charge(self, seconds: float) -> None:
        """What `spend` paid for took that much longer. A pause of the machine must not end exploration."""
        self.seconds = max(-self._most, self.seconds - seconds)


class DrafterReadiness:
    """Which drafters are inactive, which have seen enough to draft, and what they have missed. `left_out` are those
    that failed and pause."""

    def __init__(self, drafters: Mapping[str, DrafterCapabilities]) -> None:
        self.inactive = self.left_out = frozenset[str]()
        self._drafters = drafters
        self._readers = [name for name, capabilities in drafters.items() if capabilities.warm_up]
        self._ready = dict.fromkeys(drafters, 0)  # the step from which each has seen enough
        self._kept = dict.fromkeys(drafters, 0)  # the step until which it is not inactive; 0: none was set yet

    @property
    def watches(self) -> bool:
        """Whether a drafter is shown the target's states: it is asked within a trial, or inactive after it."""
        return not self.inactive.issuperset(self._readers)

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
        """The drafter never computes the tokens that it has missed."""
        for state in step.candidates:
            state.last_position[drafter] = state.known

    def unready(self, now: int) -> frozenset[str]:
        """The drafters that are inactive, pause, or woke so lately that they have not seen enough."""
        waking = [drafter for drafter in self._readers if self._ready[drafter] > now] if self._readers else ()
        return self.inactive.union(waking, self.left_out) if waking or self.left_out else self.inactive

    def update(self, step: PolicyStep, decisions: Mapping[str, DraftDecision]) -> None:
        """Wake the drafters that sequences are to use; the ones that nothing wanted for long become inactive."""
        if not self._readers:
            return
        wanted = {decision.drafter for decision in decisions.values()}
        for drafter in self._readers:
            if drafter in wanted or not self._kept[drafter]:
                self.keep(step, drafter, steps=SLOW_INTERVAL)
        if keeping_seconds(step.plain.seconds):
            inactive = [drafter for drafter in self._readers if self._kept[drafter] <= step.number]
            if not self.inactive.issuperset(inactive):
                self.inactive = self.inactive.union(inactive)

    def keep(self, step: PolicyStep, drafter: str, *, steps: int) -> None:
        """The drafter stays active for `steps` steps; one that was inactive wakes first, and sees enough to draft."""
        now = step.number
        if drafter in self.inactive:
            self.inactive = self.inactive.difference([drafter])
            self._ready[drafter] = now = now + self._drafters[drafter].warm_up
            self._start_anew(step, drafter)
        self._kept[drafter] = max(self._kept[drafter], now + steps)


@dataclass(slots=True)
class MeasuringSchedule:
    """When steps of about one batch size measured, and when they are to again."""

    speculating: int = 0  # steps since a plain one
    plain_interval: int = _FIRST_INTERVAL  # how many there must be before the next plain step; it doubles
    asked: int | None = None  # when it was last asked whether to measure what rows cost
    interval: int = _FIRST_INTERVAL  # how many steps there must be between
    waits: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By depth, whoever drafts: the step from which it may be measured again, and how long it waits after that."""


class Exploration:
    """Drafts by drafters that sequences do not use, and steps that measure what rows cost, each from a budget of its
    own. A step measures if it would pay, were it as much faster than believed as is plausible; what it loses if it is
    not is spent. `draws_tokens`: a draft may have to be verified whatever it is."""

    def __init__(
        self,
        drafters: Mapping[str, DrafterCapabilities],
        prices: Prices,
        readiness: DrafterReadiness,
        *,
        share: float,
        draws_tokens: bool,
    ) -> None:
        self.for_drafts = ExplorationBudget(share, first_share=share, saved=_MAX_SAVED)
        first = _FIRST_SHARE if share else 0.0
        self.for_rows = ExplorationBudget(_ROWS_SHARE * share, first_share=first, saved=round(_MAX_SAVED / _ROWS_SHARE))
        self.planned_rows = 0  # draft tokens that the last step with drafts verified that did not measure
        self._drafters, self._prices, self._readiness, self._draws_tokens = drafters, prices, readiness, draws_tokens
        self._steps = 0  # taken
        self._sizes: dict[int, MeasuringSchedule] = defaultdict(MeasuringSchedule)  # in powers of two
        self._last_asked = 0  # the step in which it was last asked whether to measure

    def earn(self, seconds: float, *, steps: int) -> None:
        """`steps` steps took so long together."""
        self._steps += steps
        self.for_drafts.earn(seconds, steps=steps)
        self.for_rows.earn(seconds, steps=steps)

    # ---- drafts -----------------------------------------------------------------------------------------------------

    def add_drafts(self, step: PolicyStep, *, steps: int) -> None:
        """Add drafts by other drafters to the plan, as the budget allows, those of the next `steps` steps together. An
        inactive drafter wakes for it, if the steps that a trial takes can be paid for and a draft too."""
        asked, readiness, budget = len(step.plan), self._readiness, self.for_drafts
        if budget.seconds < _MIN_COST * step.plain.seconds:
            return
        if len(self._drafters) == 1 and (asked == len(step.ids) or asked == len(step.candidates)):
            return
        step.plan = step.plan.copy()  # later steps repeat it without exploration
        unready = readiness.unready(step.number)
        ready = [drafter for drafter in self._drafters if drafter not in unready]
        for _ in range(steps):
            if not [drafter for drafter in ready if self._request(step, drafter)]:
                break
        for drafter in [name for name in self._drafters if name in readiness.inactive]:
            capabilities = self._drafters[drafter]
            keeping = KEEPING_S * (capabilities.warm_up + self._trial)
            look = self._look(step, drafter)
            if look is None or keeping + look[2] + capabilities.catch_up_s * capabilities.warm_up > budget.seconds:
                continue
            if budget.spend(keeping, step.plain.seconds):
                readiness.keep(step, drafter, steps=self._trial)

    @property
    def _trial(self) -> int:
        """Steps after it is ready until a drafter that woke may be inactive again: in one of them it is asked."""
        return max(TRIAL, self._prices.own.update_interval)

    def _look(self, step: PolicyStep, drafter: str) -> tuple[PlannedSequence, int, float] | None:
        """The sequence that the drafter last drafted for the longest time ago, how deep it would draft for it, and what
        that would cost, in seconds, without catching up; None where it, or exploration, has every sequence."""
        plan, latency, plain_step, capabilities = step.plan, self._prices.latency, step.plain, self._drafters[drafter]
        plain = [state for state in step.candidates if state.seq_id not in plan]
        planned = [state for state in step.candidates if state.seq_id in plan and state.seq_id not in step.explored]
        others = [state for state in planned if plan[state.seq_id].drafter != drafter]
        if not plain and not others:
            return None
        state = min(plain or others, key=lambda state: state.last_step.get(drafter, -1))
        depth, depths = min(state.room, capabilities.max_depth, _DEPTH), step.passes().get(drafter, [])
        drafting = latency.ragged_draft_seconds
        cost = drafting(drafter, [*depths, depth]) - drafting(drafter, depths)
        if self._draws_tokens:
            cost += latency.extra_seconds(plain_step.shape, count=depth)[depth]
        if not plain:  # what the other drafter's tokens would have gained, in seconds of plain decoding
            gain = plain_step.goodput * plain_step.seconds / plain_step.weight - 1
            cost += gain * plain_step.seconds / len(step.candidates)
        return state, depth, cost

    def _request(self, step: PolicyStep, drafter: str) -> bool:
        """Request a draft only to learn; False if there is none to request, or the budget has too little for it."""
        look = self._look(step, drafter)
        if look is None:
            return False
        state, depth, cost = look
        catch_up = state.catch_up_seconds(drafter, self._drafters[drafter])
        if not self.for_drafts.spend(cost + catch_up, step.plain.seconds):
            return False
        step.catches_up |= catch_up > 0
        step.explored_catch_up += catch_up
        step.plan[state.seq_id] = DraftDecision(depth, drafter)
        step.explored |= {state.seq_id}
        self._readiness.note_request(state, drafter, step.number)
        return True

    # ---- what rows cost ---------------------------------------------------------------------------------------------

    def measure(self, step: PolicyStep, *, speculates: bool) -> None:
        """Draft in this step to measure what rows cost, if that is worth it; to be asked every few steps. Where all
        steps speculate (`speculates`), one without drafts is taken now and then."""
        if not self._prices.latency.model.learns:
            return
        now, size, own = step.number, self._sizes[len(step.ids).bit_length()], self._prices.own
        passed, self._last_asked = now - self._last_asked, now
        size.speculating = size.speculating + passed if speculates else 0
        plain = step.plain
        gain = (plain.goodput * plain.seconds / plain.weight - 1) * plain.seconds  # of speculation, lately
        if size.speculating >= size.plain_interval and self.for_rows.spend(gain + own.planning, plain.seconds):
            size.speculating, size.plain_interval = 0, 2 * size.plain_interval
            step.plan, step.measured_depth = {}, 0
            return
        if size.asked is None:
            size.asked = self._steps
        if self._steps - size.asked < size.interval:
            return
        size.asked, size.interval = self._steps, min(LONGEST_INTERVAL, 2 * size.interval)
        best, cost = self._best_to_measure(step, size)
        if best is None:
            return
        size.interval = _FIRST_INTERVAL
        if best.depth and best.drafter in self._readiness.unready(now):  # when it is ready, it is asked again
            self._readiness.keep(step, best.drafter, steps=self._trial)
        elif self.for_rows.spend(cost, plain.seconds):
            _, wait = size.waits.get(best.depth, (0, _FIRST_INTERVAL))
            size.waits[best.depth] = self._steps + wait, min(LONGEST_INTERVAL, 2 * wait)
            planned, step.plan, step.measured_depth = step.plan, {}, best.depth
            for state in step.candidates if best.depth else ():
                if state.seq_id not in planned:
                    step.catches_up |= state.catch_up_seconds(best.drafter, self._drafters[best.drafter]) > 0
                    self._readiness.note_request(state, best.drafter, now)
                step.plan[state.seq_id] = best._replace(depth=min(best.depth, state.room))

    def _best_to_measure(self, step: PolicyStep, size: MeasuringSchedule) -> tuple[DraftDecision | None, float]:
        """How all are to draft in the step that would gain most for what it loses if seconds are as believed, which is
        returned too."""
        (rows, requests, context_sum), plain, latency = step.plain.shape, step.plain, self._prices.latency
        count, planning = len(step.candidates), self._prices.own.planning
        planned = self.planned_rows if step.plan else 0
        usual_depth = round(planned / count) if count else 0
        new = [state for state in step.candidates if state.seq_id not in step.plan]
        every = 1 + count // LARGE_BATCH  # some sequences' forecasts are averaged
        forecast = [state for state in step.candidates[::every] if state.forecasts]
        best, best_value, cost, least_cost = None, 0.0, 0.0, _MIN_COST * plain.seconds
        for drafter, capabilities in self._drafters.items() if forecast and plain.goodput > 0 else ():
            each = [state.forecasts[drafter][state.row] for state in forecast]
            width = min(map(len, each))
            survival = [sum(column) / len(forecast) for column in zip(*[rates[:width] for rates in each], strict=True)]
            extra = latency.extra_seconds(plain.shape, count=count * width)
            missed = sum([state.catch_up_seconds(drafter, capabilities) for state in new])
            profits = [
                plain.weight / len(step.ids) * count * reached
                - plain.goodput
                * (extra[count * depth] + (missed + latency.draft_seconds(drafter, count, depth)) * (depth > 0))
                for depth, reached in enumerate(accumulate(survival, initial=0.0))
            ]
            usual = profits[min(usual_depth, width)]
            deviations = latency.model.difference_deviations(
                rows + planned,
                [rows + count * depth for depth in range(width + 1)],
                requests=requests,
                context_sum=context_sum,
            )
            for depth, (profit, deviation) in enumerate(zip(profits, deviations, strict=True)):
                if depth in size.waits and self._steps < size.waits[depth][0]:
                    continue  # else what is cheap to measure would be measured again and again, and the rest never
                loss = max((usual - profit) / plain.goodput, least_cost) + planning
                hoped = profit - usual + plain.goodput * _PLAUSIBLE * deviation
                if depth > usual_depth:  # rows are free at best
                    hoped = min(hoped, profit - usual + plain.goodput * extra[count * depth])
                least = max(_LEAST_GAIN * plain.weight, plain.goodput * loss / _REPAID)
                worth = hoped > least and loss <= self.for_rows.seconds
                if worth and hoped > best_value * loss and depth != usual_depth:
                    best, best_value, cost = DraftDecision(depth, drafter), hoped / loss, loss
        return best, cost
