"""Whether and how the drafts of a step are judged: how much each token is expected to gain, and which are verified.

Judging takes the policy time, so it must gain more than that: where rows are so cheap that every token is taken, the
drafts of the next steps are verified as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from wager.economics.acceptance import token_judge
from wager.economics.latency import LatencyCache
from wager.economics.policy.base import SMOOTHING, UPDATE_INTERVAL
from wager.economics.policy.draft_seconds import DraftSeconds
from wager.economics.policy.goodput import ADJACENT_ROWS, GoodputEstimator
from wager.economics.policy.objective import ObjectiveWeights
from wager.economics.policy.own_seconds import OwnSeconds
from wager.economics.policy.planning import MAX_INTERVAL
from wager.economics.policy.sequence_state import DrafterProfile, PolicyStep
from wager.economics.policy.step_load import StepLoad
from wager.types import Draft

_NEGLIGIBLE = 0.002  # share of the step's weight that judging must gain beyond what it takes


class JudgedDrafts(NamedTuple):
    """What is verified, and how many `rows` that are; their expected gain and `cut` (Selection), the profit beyond that
    of verifying everything, and what 0, 1, ... more rows add to the step."""

    admitted: Mapping[str, Draft]
    rows: int
    gain: float
    cut: float | None
    benefit: float
    extra: Sequence[float]


class DraftJudge:
    """Decides what is verified, and passes what is expected of it to `goodput`. Tokens drawn from draft_probs, under a
    rule that needs these, are verified whatever they are."""

    def __init__(
        self,
        drafters: Sequence[DrafterProfile],
        latency: LatencyCache,
        weights: ObjectiveWeights,
        *,
        drafting: DraftSeconds,
        goodput: GoodputEstimator,
        own: OwnSeconds,
    ) -> None:
        self._drafters, self._latency, self._weights, self._goodput = drafters, latency, weights, goodput
        self._drafting, self._own = drafting, own
        self._interval = self._skipped = self._judged = self._recorded = 0
        self._record_interval = UPDATE_INTERVAL  # steps between those whose goodput is recorded
        self._benefit = 0.0  # of judging lately, as a share of the weight of one token of each sequence

    def judge_next(self) -> None:
        """There is a new plan: its drafts are judged once at least."""
        self._skipped = self._interval

    def admit(self, step: PolicyStep, budget: int, *, now: int, deepest: int) -> Mapping[str, Draft]:
        """What is verified in step number `now`, whose drafts have at most `deepest` tokens each, in `budget` rows."""
        drafts, records = step.drafted, now >= self._recorded + self._record_interval
        if not step.spans or not (drafts or records):
            return {}
        if drafts and not (step.draws_tokens or step.explored) and deepest * len(drafts) <= budget:
            self._skipped += 1
            if self._skipped <= self._interval:
                return drafts
        step.judged = bool(drafts)
        unjudged, rest, rows = self._unjudged(step) if step.draws_tokens else {}, drafts, 0
        if unjudged:
            rest = {seq_id: draft for seq_id, draft in drafts.items() if seq_id not in unjudged}
            rows = sum([len(draft) for draft in unjudged.values()])
        judged = self._judge(step, rest, limit=budget - rows, first=rows)
        if rest and not unjudged:
            self._schedule(step.load, judged.benefit)
        if records:
            self._record_goodput(step, judged, unjudged, steps=min(now - self._recorded, self._record_interval))
            self._recorded, self._record_interval = now, round(UPDATE_INTERVAL * self._own.pace)
        return {**unjudged, **judged.admitted} if unjudged else judged.admitted

    def _schedule(self, load: StepLoad, benefit: float) -> None:
        """A step was judged, which gained `benefit`, in weighted tokens: whether the next ones are judged."""
        goodput, weight = load.goodput, load.weight
        self._judged += 1  # at first a plain mean, not one that starts from 0
        self._benefit += max(SMOOTHING, 1 / self._judged) * (benefit / weight - self._benefit)
        cost = goodput * self._own.of_judging / weight
        self._skipped = 0
        longest = max(MAX_INTERVAL, round(self._own.judging_interval))
        self._interval = 0 if self._benefit > cost + _NEGLIGIBLE else min(longest, 2 * self._interval + 1)

    def _unjudged(self, step: PolicyStep) -> dict[str, Draft]:
        """Drafts sampled from draft_probs, which are verified as planned."""
        unjudged = {}
        for seq_id, draft in step.drafted.items():
            state = step.states[seq_id]
            state.unjudged = draft.draft_probs is not None
            if state.unjudged:
                unjudged[seq_id] = draft
        return unjudged

    def _record_goodput(
        self, step: PolicyStep, judged: JudgedDrafts, unjudged: Mapping[str, Draft], *, steps: int
    ) -> None:
        """Update the goodput and the cost of a row with what is expected of the step, one of the last `steps`."""
        gain, rows = judged.gain, judged.rows + sum([len(draft) for draft in unjudged.values()])
        for seq_id, draft in unjudged.items():
            state = step.states[seq_id]
            forecasts, drafter = state.plan.forecasts, step.drafter_index[step.plan[seq_id].drafter]
            if forecasts:
                survival = float(forecasts[drafter][state.plan.row, : len(draft)].sum())
                gain += self._weights.weight(state.weight) * survival
        load, decoding = step.load, step.decoding
        seconds = load.plain_seconds + judged.extra[rows] + self._drafting.expected(step.passes())
        plain = load.weight / load.plain_seconds * seconds
        self._goodput.record(decoding, expected=load.weight + gain, plain=plain, steps=steps)
        self._goodput.record_row_cost(
            decoding, extra=judged.extra, rows=rows, cut=judged.cut, goodput=load.goodput, steps=steps
        )

    def _judge(self, step: PolicyStep, drafts: Mapping[str, Draft], *, limit: int, first: int) -> JudgedDrafts:
        """The most profitable tokens of `drafts`, at most `limit`, beside `first` other rows."""
        count = first + sum([len(draft.tokens) for draft in drafts.values()]) + ADJACENT_ROWS
        extra = self._latency.extra_seconds(*step.load.shape, count=count)
        if not drafts:
            return JudgedDrafts({}, 0, 0.0, None, 0.0, extra)
        used, offsets, weights, states = self._drafters, None, None, step.states
        if len(used) > 1:
            used = [used[step.drafter_index[step.plan[seq_id].drafter]] for seq_id in drafts]
        scores = [draft.scores for draft in drafts.values()]
        if not all(scores):
            index, plan = step.drafter_index, step.plan
            offsets = [states[seq_id].acceptance[index[plan[seq_id].drafter]].odds for seq_id in drafts]
        if not self._weights.uniform:
            weights = [self._weights.weight(states[seq_id].weight) for seq_id in drafts]
        kept, rows, gain, cut, benefit = token_judge.judge(
            scores,
            [draft.parents for draft in drafts.values()],
            [profile.acceptance.bins.odds for profile in used],
            [profile.acceptance.depths.odds for profile in used],
            offsets,
            weights,
            extra,
            first,
            step.load.goodput,
            limit,
        )
        for profile, draft in zip(used, drafts.values(), strict=False):
            profile.acceptance.has_scores = len(draft.scores) == len(draft.tokens)
        if kept is not None:
            kept_of = zip(drafts.items(), kept, strict=True)
            drafts = {seq_id: keep_nodes(draft, nodes) for (seq_id, draft), nodes in kept_of if nodes}
        return JudgedDrafts(drafts, rows, gain, cut, benefit, extra)


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
    )
