"""What drafting takes: expected of a step, and learned from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wager.economics.latency import LatencyCache, LatencyModel
from wager.economics.policy.base import UPDATE_INTERVAL
from wager.economics.policy.own_seconds import OwnSeconds
from wager.economics.policy.sequence_state import DrafterProfile, PolicyStep

_SURPRISE = 2.0  # times as long as expected
_WORTH_LEARNING = 0.02  # of a step without drafts
"""A step whose drafting takes _SURPRISE times what was expected, and _WORTH_LEARNING of a step more, makes the next
drafting be learned from. (Not its own: to learn only from what takes long would make all seem slow.)"""


class DraftSeconds:
    """`latency` is the model behind `cache`."""

    def __init__(
        self, latency: LatencyModel, cache: LatencyCache, drafters: Sequence[DrafterProfile], *, own: OwnSeconds
    ) -> None:
        self._latency, self._cache, self._drafters, self._own = latency, cache, drafters, own
        self._learns = latency.learns
        self._next = float(UPDATE_INTERVAL)  # the step from which they are learned again

    def expected(self, passes: Mapping[int, Sequence[int]]) -> float:
        """Of drafting with these passes (PolicyStep.passes)."""
        ragged, drafters = self._cache.ragged_draft_seconds, self._drafters
        return sum([ragged(drafters[index].name, depths) for index, depths in passes.items()])

    def learns(self, step: PolicyStep, taken: float) -> bool:
        """Whether to learn from the step, whose drafting took so long."""
        if not self._learns or step.catches_up or not step.plan:
            return False
        if step.number >= self._next:
            return True
        worth = _WORTH_LEARNING * step.load.plain_seconds  # most drafts of lookups take less: nothing more is asked
        if taken > worth and _surprises(taken, self.expected(step.passes()), step):
            self._next = step.number + 1
        return False

    def learn(self, step: PolicyStep, taken: float) -> None:
        """Pass each drafter's seconds to the latency model. It models drafts of one depth for all sequences, so it gets
        what such a draft would have taken, were it as far from its expectation as this step's drafting."""
        passes = step.passes()
        expected = self.expected(passes)
        surprises = _surprises(taken, expected, step)
        self._next = step.number + (1 if surprises else UPDATE_INTERVAL * self._own.pace)
        for index, depths in passes.items():
            drafter, count, depth = self._drafters[index].name, len(depths), max(depths)
            even = self._cache.draft_seconds(drafter, count, depth)
            seconds = taken * even / expected if expected > 0 else taken / len(passes)
            self._latency.observe_draft(drafter, count, depth, seconds=seconds)


def _surprises(taken: float, expected: float, step: PolicyStep) -> bool:
    return taken > _SURPRISE * expected + _WORTH_LEARNING * step.load.plain_seconds
