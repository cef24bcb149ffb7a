"""Whether and how the drafts of a step are judged: how much each token is expected to gain, and which are verified.

Judging takes the policy time, so it must gain more than that: where rows are so cheap that every token is taken, the
drafts of the next steps are verified as they are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from wager.economics.acceptance import BIN_BORDERS, HIGHEST_RATE, LARGE_BATCH, Floats, Ints
from wager.economics.latency import LatencyCache
from wager.economics.policy.admission import keep_nodes, select, select_prefixes
from wager.economics.policy.base import SMOOTHING, UPDATE_INTERVAL
from wager.economics.policy.draft_seconds import DraftSeconds
from wager.economics.policy.goodput import ADJACENT_ROWS, GoodputEstimator
from wager.economics.policy.objective import ObjectiveWeights
from wager.economics.policy.own_seconds import OwnSeconds
from wager.economics.policy.planning import MAX_INTERVAL
from wager.economics.policy.sequence_state import DrafterProfile, PolicyStep
from wager.economics.policy.step_load import StepLoad
from wager.kernels import _native
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
        self._native = native_judge()
        # of the last step with scores and equal weights, of one drafter: its load, and what judging it needs
        self._scored_load: StepLoad | None = None
        self._curve: Sequence[float] = ()
        self._corrections = [profile.acceptance.bins.odds for profile in drafters[:1]]
        self._benefit = 0.0  # of judging lately, as a share of the weight of one token of each sequence

    def judge_next(self) -> None:
        """There is a new plan: its drafts are judged once at least."""
        self._skipped = self._interval

    def admit(self, step: PolicyStep, budget: int, *, now: int, deepest: int) -> Mapping[str, Draft]:
        """What is verified in step number `now`, whose drafts have at most `deepest` tokens each, in `budget` rows."""
        drafts, records = step.drafted, now >= self._recorded + self._record_interval
        if not step.spans or not (drafts or records):
            return {}
        if drafts and not (step.draws_tokens or step.explored):
            if deepest * len(drafts) <= budget:
                self._skipped += 1
                if self._skipped <= self._interval:
                    return drafts
            load = step.load
            if load is self._scored_load and not records:  # as the last one was: nothing else is done in most steps
                quick = self._native.judge(drafts, self._corrections, None, self._curve, 0, load.goodput, budget)
                if quick is not None:
                    step.judged = True
                    self._schedule(load, quick[-1])
                    admitted: Mapping[str, Draft] = quick[0]
                    return admitted
        step.judged = bool(drafts)
        unjudged, rest, rows = self._unjudged(step) if step.draws_tokens else {}, drafts, 0
        if unjudged:
            rest = {seq_id: draft for seq_id, draft in drafts.items() if seq_id not in unjudged}
            rows = sum([len(draft) for draft in unjudged.values()])
        judged = self._judge(step, rest, limit=budget - rows, unjudged_rows=rows)
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

    def _judge(self, step: PolicyStep, drafts: Mapping[str, Draft], *, limit: int, unjudged_rows: int) -> JudgedDrafts:
        """The most profitable tokens of `drafts`, at most `limit`, beside `unjudged_rows` that are verified in any
        case."""
        sizes = [len(draft.tokens) for draft in drafts.values()]
        count = unjudged_rows + sum(sizes) + ADJACENT_ROWS
        extra = self._latency.extra_seconds(*step.load.shape, count=count)
        seconds = extra[unjudged_rows:] if unjudged_rows else extra
        self._scored_load = None
        if self._native is not None and drafts:
            judged = self._judge_natively(step, drafts, extra, limit=limit, first=unjudged_rows)
            if judged is not None:
                return judged
        if len(drafts) > LARGE_BATCH and are_chains(list(drafts.values()), sizes):
            return self._judge_chains(step, drafts, seconds, limit=limit, extra=extra)
        return self._judge_each(step, drafts, seconds, limit=limit, extra=extra)

    def _judge_natively(
        self, step: PolicyStep, drafts: Mapping[str, Draft], extra: Sequence[float], *, limit: int, first: int
    ) -> JudgedDrafts | None:
        """`_judge_each` in C++, of drafts with scores; None for others. `extra` counts from `first`."""
        used, weights, alone = self._drafters[:1], None, len(self._drafters) == 1
        if not alone:
            used = [self._drafters[step.drafter_index[step.plan[seq_id].drafter]] for seq_id in drafts]
        if not self._weights.uniform:
            weights = [float(self._weights.weight(step.states[seq_id].weight)) for seq_id in drafts]
        corrections = [profile.acceptance.bins.odds for profile in used]
        judged = self._native.judge(drafts, corrections, weights, extra, first, step.load.goodput, limit)
        if judged is None:
            return None
        for profile in used:
            profile.acceptance.has_scores = True
        if alone and weights is None and not first:
            self._scored_load, self._curve = step.load, extra
        admitted, rows, gain, cut, benefit = judged
        return JudgedDrafts(admitted, rows, gain, cut, benefit, extra)

    def _by_drafter(self, step: PolicyStep, drafts: Mapping[str, Draft]) -> dict[int, list[Draft]]:
        if len(self._drafters) == 1:
            return {0: list(drafts.values())}
        parts: dict[int, list[Draft]] = {}
        for seq_id, draft in drafts.items():
            parts.setdefault(step.drafter_index[step.plan[seq_id].drafter], []).append(draft)
        return parts

    def _judge_chains(
        self,
        step: PolicyStep,
        drafts: Mapping[str, Draft],
        seconds: Sequence[float],
        *,
        limit: int,
        extra: Sequence[float],
    ) -> JudgedDrafts:
        parts = self._by_drafter(step, drafts)
        ordered = [draft for part in parts.values() for draft in part]
        sizes = np.array([len(draft.tokens) for draft in ordered])
        gains = np.zeros((len(ordered), int(sizes.max())))
        first = 0
        for index, part in parts.items():
            last = first + len(part)
            survival = self._chain_survival(step, index, part, sizes[first:last])
            gains[first:last, : survival.shape[1]] = survival
            first = last
        if not self._weights.uniform:
            states = step.states
            gains *= np.array([self._weights.weight(states[draft.seq_id].weight) for draft in ordered])[:, None]
        chosen = select_prefixes(gains, seconds, goodput=step.load.goodput, limit=limit)
        admitted = {draft.seq_id: draft for draft in ordered}
        for cut in np.flatnonzero(chosen.lengths < sizes).tolist():
            draft, length = ordered[cut], int(chosen.lengths[cut])
            if length:
                admitted[draft.seq_id] = draft.truncate(length)
            else:
                del admitted[draft.seq_id]
        return JudgedDrafts(admitted, chosen.count, chosen.gain, chosen.cut, chosen.benefit, extra)

    def _chain_survival(self, step: PolicyStep, index: int, drafts: Sequence[Draft], sizes: Ints) -> Floats:
        width, model = int(sizes.max()), self._drafters[index].acceptance
        if drafts[0].scores:
            scores = chain.from_iterable([draft.scores for draft in drafts])
            return model.chain_survival(np.fromiter(scores, np.float64, int(sizes.sum())), sizes, (), width)
        states = step.states
        return model.chain_survival(None, sizes, [states[draft.seq_id].acceptance[index] for draft in drafts], width)

    def _judge_each(
        self,
        step: PolicyStep,
        drafts: Mapping[str, Draft],
        seconds: Sequence[float],
        *,
        limit: int,
        extra: Sequence[float],
    ) -> JudgedDrafts:
        gains: list[float] = []
        first: list[int] = []
        states, plan, indices, uniform = step.states, step.plan, step.drafter_index, self._weights.uniform
        for seq_id, draft in drafts.items():
            state, index = states[seq_id], indices[plan[seq_id].drafter]
            survival = self._drafters[index].acceptance.survival(draft, state.acceptance[index])
            weight = 1.0 if uniform else self._weights.weight(state.weight)
            first.append(len(gains))
            gains += survival if weight == 1.0 else [weight * each for each in survival]
        chosen = select(gains, seconds, goodput=step.load.goodput, limit=limit)
        admitted: dict[str, Draft] = {}
        taken = chosen.taken
        if len(taken) == len(gains):
            return JudgedDrafts(drafts, len(taken), chosen.gain, chosen.cut, chosen.benefit, extra)
        if taken:
            taken = sorted(taken)
            for start, (seq_id, draft) in zip(first, drafts.items(), strict=True):
                nodes = taken[bisect_left(taken, start) : bisect_left(taken, start + len(draft.tokens))]
                if nodes:
                    admitted[seq_id] = keep_nodes(draft, [node - start for node in nodes])
        return JudgedDrafts(admitted, len(taken), chosen.gain, chosen.cut, chosen.benefit, extra)


def native_judge() -> Any:
    """What judges drafts with scores in C++ (csrc/judging.h), as `select` with AcceptanceModel.survival."""
    return _native.TokenJudge(Draft, BIN_BORDERS, HIGHEST_RATE)


_CHAIN_PARENTS = [tuple(range(-1, size - 1)) for size in range(64)]


def are_chains(drafts: Sequence[Draft], sizes: Sequence[int]) -> bool:
    """Whether all drafts, of these sizes, are short chains, with scores for all tokens of all of them or for none."""
    if max(sizes) >= len(_CHAIN_PARENTS):
        return False
    if any(draft.scores for draft in drafts) and [len(draft.scores) for draft in drafts] != sizes:
        return False
    return [draft.parents for draft in drafts] == [_CHAIN_PARENTS[size] for size in sizes]
