"""Steps that were taken, until all parts of the policy have learned from them.

Those of a small batch are learned from together, while the tables are in the processor's caches.
"""

from __future__ import annotations

from wager.economics.latency import LatencyCache
from wager.economics.policy.collapse import CollapseWatch
from wager.economics.policy.draft_exploration import DraftExploration
from wager.economics.policy.draft_seconds import DraftSeconds
from wager.economics.policy.learning import DeferredLearning
from wager.economics.policy.objective import ObjectiveWeights
from wager.economics.policy.observed import ObservedSteps
from wager.economics.policy.own_seconds import OwnSeconds
from wager.economics.policy.planning import Planner
from wager.economics.policy.row_exploration import RowExploration
from wager.economics.policy.sequence_state import PolicyStep
from wager.types import DRAFT_STAGE, POLICY_STAGE


class TakenSteps:
    """`steps` are those that are not learned from yet, and `passed_over` how many like them never are; `verified` the
    draft tokens in the last one that was taken as planned. `exploration` and `rows` earn by the seconds of steps."""

    def __init__(
        self,
        learning: DeferredLearning,
        own: OwnSeconds,
        *,
        latency: LatencyCache,
        drafting: DraftSeconds,
        weights: ObjectiveWeights,
        planner: Planner,
        exploration: DraftExploration,
        rows: RowExploration,
        observed: ObservedSteps,
        watch: CollapseWatch,
    ) -> None:
        self.steps: list[PolicyStep] = []
        self.verified = self.passed_over = 0
        self._counted = self._verdicts = 0  # of the steps: how many were counted, and whose verdicts were learned
        self._learning, self._own, self._latency, self._drafting = learning, own, latency, drafting
        self._weights, self._planner, self._exploration, self._observed = weights, planner, exploration, observed
        self._rows, self._watch = rows, watch

    def learn(self) -> None:
        """Learn from all of them."""
        self.count()
        if self._watch.add(self.steps):
            self._planner.plan_now()
        self.learn_verdicts()
        self._learn_records()
        self.steps.clear()
        self._counted = self._verdicts = 0

    def count(self) -> None:
        """Count them for `explain`, which changes nothing that is decided."""
        self._observed.add(self.steps[self._counted :] if self._counted else self.steps)
        self._counted = len(self.steps)

    def learn_verdicts(self) -> None:
        """Learn from their verdicts."""
        steps, self._verdicts = self.steps[self._verdicts :], len(self.steps)
        for step in steps:
            if self._weights.learns:
                for verdict in step.verdicts:
                    if verdict.seq_id in step.states:
                        self._weights.learn(step.states[verdict.seq_id].weight, len(verdict.tokens))
            if step.explored:
                tokens = {verdict.seq_id: verdict.tokens[:1] for verdict in step.verdicts}
                drafted = [(seq_id, step.drafted[seq_id]) for seq_id in step.explored if seq_id in step.drafted]
                if any(draft.tokens[:1] == tokens.get(seq_id) for seq_id, draft in drafted):
                    self._planner.plan_soon()
            self._learning.add_verdicts(step)

    def _learn_records(self) -> None:
        own, learning, drafting, weights = self._own, self._learning, self._drafting, self._weights
        together, steps, idle, idle_steps = 0.0, 0, 0.0, 0
        for step in self.steps:
            if (record := step.record) is None:
                continue
            seconds = sum(record.seconds.values())
            together, steps = together + seconds, steps + 1
            if step.skipped:
                idle, idle_steps = idle + seconds, idle_steps + 1
            if weights.learns:
                weights.observe(seconds)
            own.observe(record.seconds.get(POLICY_STAGE, 0.0), step_seconds=seconds, kind=step.kind)
            learning.add_record(step, record)
            if step.measures_plain or step.measures_rows:
                learning.learn()
                self._latency.clear()
                self._planner.plan_now()
            elif step.plan:
                self.verified = record.drafted
            taken = record.seconds.get(DRAFT_STAGE, 0.0)
            if step.explored:
                self._exploration.settle(step, taken=taken, expected=drafting.expected(step.passes()))
            if drafting.learns(step, taken):
                drafting.learn(step, taken)
            step.let_go()
        if not steps:
            return
        if idle_steps:
            together, steps = together + self.passed_over * idle / idle_steps, steps + self.passed_over
        self.passed_over = 0
        self._exploration.earn(together, steps=steps)
        self._rows.earn(together, steps=steps)
