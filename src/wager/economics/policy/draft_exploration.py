"""Exploration of drafters: drafts by those that a sequence does not use, to keep what is believed of them current."""

from __future__ import annotations

from collections.abc import Sequence

from wager.economics.latency import LatencyCache
from wager.economics.policy.exploration import ExplorationBudget
from wager.economics.policy.readiness import KEEPING_S, TRIAL, DrafterReadiness
from wager.economics.policy.sequence_state import DrafterProfile, PolicyStep, SequencePolicyState
from wager.types import DraftDecision

_DEPTH = 2  # of drafts made only to learn: the second token is a second observation for little more time
_DRAFTS = 2  # that the budget must have for a drafter to wake


class DraftExploration:
    """Requests such drafts; `share` of the running time may go to them."""

    def __init__(self, drafters: Sequence[DrafterProfile], latency: LatencyCache, *, share: float) -> None:
        self._drafters, self._latency, self._budget = drafters, latency, ExplorationBudget(share)

    def earn(self, seconds: float, *, steps: int) -> None:
        """So many steps took that long together."""
        self._budget.earn(seconds, steps=steps)

    def settle(self, step: PolicyStep, *, taken: float, expected: float) -> None:
        """Drafting took so long in a step with such drafts, where catching up is not among what was expected of it. The
        rest is paid for too; which drafter of the step took it is not known."""
        self._budget.owe(max(0.0, taken - expected - step.explored_catch_up))

    def explore(
        self, step: PolicyStep, readiness: DrafterReadiness, *, steps: int
    ) -> list[tuple[SequencePolicyState, int]]:
        """Add them to the plan, as the budget allows, those of the next `steps` steps together; for which sequences,
        by which drafter. A drafter that rests wakes for it."""
        seconds, chosen = step.load.plain_seconds, []
        if not self._budget.affords_draft(seconds):
            return []
        if len(self._drafters) == 1 and (len(step.plan) == step.decoding or len(step.plan) == step.num_candidates):
            return []
        step.plan = step.plan.copy()  # later steps repeat it without exploration
        unready = readiness.unready(step.number)
        ready = [index for index, profile in enumerate(self._drafters) if profile.name not in unready]
        for _ in range(steps):
            if not self._budget.affords_draft(seconds):
                break
            found = [(state, index) for index in ready if (state := self._request(step, index)) is not None]
            if not found:
                break
            chosen += found
        for index, profile in enumerate(self._drafters):
            if profile.name in readiness.resting and self._pays_to_wake(profile, seconds):
                readiness.keep(step, index, steps=TRIAL)
        return chosen

    def _pays_to_wake(self, profile: DrafterProfile, plain_seconds: float) -> bool:
        """Pay for keeping states for the steps that a trial takes, if drafts can be paid for too."""
        name, capabilities, _ = profile
        keeping = KEEPING_S * (capabilities.warm_up + TRIAL)
        drafts = _DRAFTS * self._latency.draft_seconds(name, 1, min(_DEPTH, capabilities.max_depth))
        if self._budget.seconds < keeping + drafts + capabilities.catch_up_s * capabilities.warm_up:
            return False
        return self._budget.spend(keeping, plain_seconds)

    def _request(self, step: PolicyStep, index: int) -> SequencePolicyState | None:
        """Request a draft for the sequence that the drafter last drafted for the longest time ago."""
        name, capabilities, _ = self._drafters[index]
        plan, candidates, load = step.plan, step.candidates, step.load
        plain = [state for state in candidates if state.seq_id not in plan]
        others = [state for state in candidates if state.seq_id in plan and plan[state.seq_id].drafter != name]
        if not plain and not others:
            return None
        state = min(plain or others, key=lambda state: state.last_step[index])
        depth, depths = min(state.room, capabilities.max_depth, _DEPTH), step.passes().get(index, [])
        ragged = self._latency.ragged_draft_seconds
        catch_up = state.catch_up_seconds(index, capabilities)
        cost = catch_up + ragged(name, [*depths, depth]) - ragged(name, depths)
        if step.draws_tokens:  # it may be verified in any case
            cost += self._latency.extra_seconds(*load.shape, count=depth)[depth]
        if not plain:  # what the other drafter's tokens would have gained
            cost += load.speculation_gain / len(candidates)
        if not self._budget.spend(cost, load.plain_seconds):
            return None
        step.catches_up |= catch_up > 0
        step.explored_catch_up += catch_up
        step.plan[state.seq_id] = DraftDecision(depth, name)
        step.explored |= {state.seq_id}
        return state
