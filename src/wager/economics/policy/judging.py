"""Whether and how the drafts of a step are judged: how much each token is expected to gain, and which are verified.

Judging takes the policy time, so it must gain more than that: where rows are so cheap that every token is taken, the
drafts of the next steps are verified as they are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from wager.economics.acceptance import Floats
from wager.economics.latency_cache import LatencyCache
from wager.economics.policy.admission import keep_nodes, select, select_prefixes
from wager.economics.policy.goodput import ADJACENT_ROWS
from wager.economics.policy.objective import ObjectiveWeights
from wager.economics.policy.sequence_state import DrafterProfile, PolicyStep
from wager.types import Draft

_MAX_UNJUDGED = 31  # steps in a row whose drafts are not judged
_NEGLIGIBLE = 0.002  # share of the step's weight that judging must gain beyond what it takes
_SMOOTHING = 0.05  # weight of a new step in the running mean of what judging gains
_ONE_BY_ONE = 12  # drafts up to which they are judged one by one, which takes less than arrays do


@dataclass(frozen=True, slots=True)
class JudgedDrafts:
    """What is verified, and how many `rows` that are; their expected gain and `cut` (Selection), the profit beyond that
    of verifying everything, and what 0, 1, ... more rows add to the step."""

    admitted: Mapping[str, Draft]
    rows: int
    gain: float
    cut: float | None
    benefit: float
    extra: Sequence[float]


class DraftJudge:
    """Judges drafts whose tokens may decide whether they are verified."""

    def __init__(self, drafters: Sequence[DrafterProfile], latency: LatencyCache, weights: ObjectiveWeights) -> None:
        self._drafters, self._latency, self._weights = drafters, latency, weights
        self._interval = self._skipped = 0
        self._benefit = 0.0  # of judging lately, as a share of the weight of one token of each sequence

    def skips(self) -> bool:
        """Whether the drafts of this step are verified as they are."""
        self._skipped += 1
        return self._skipped <= self._interval

    def judge_next(self) -> None:
        """There is a new plan: its drafts are judged once at least."""
        self._skipped = self._interval

    def judge(self, step: PolicyStep, drafts: Mapping[str, Draft], *, limit: int, unjudged_rows: int) -> JudgedDrafts:
        """The most profitable tokens of `drafts`, at most `limit`, beside `unjudged_rows` that are verified in any
        case."""
        count = unjudged_rows + sum([len(draft.tokens) for draft in drafts.values()]) + ADJACENT_ROWS
        extra = self._latency.extra_seconds(step.rows, step.sequences, step.context_sum, count=count)
        seconds = extra[unjudged_rows:] if unjudged_rows else extra
        if len(drafts) > _ONE_BY_ONE:
            parts = self._by_drafter(step, drafts)
            if all(_are_chains(part) for part in parts.values()):
                return self._judge_chains(step, parts, seconds, limit=limit, extra=extra)
        return self._judge_each(step, drafts, seconds, limit=limit, extra=extra)

    def schedule(self, *, benefit: float, cost: float) -> None:
        """A step was judged, which gained `benefit` and took `cost`, both as shares of the step's weight."""
        self._benefit += _SMOOTHING * (benefit - self._benefit)
        self._skipped = 0
        self._interval = 0 if self._benefit > cost + _NEGLIGIBLE else min(_MAX_UNJUDGED, 2 * self._interval + 1)

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
        parts: Mapping[int, Sequence[Draft]],
        seconds: Sequence[float],
        *,
        limit: int,
        extra: Sequence[float],
    ) -> JudgedDrafts:
        drafts = [draft for part in parts.values() for draft in part]
        sizes = [len(draft.tokens) for draft in drafts]
        gains = np.zeros((len(drafts), max(sizes)))
        first = 0
        for index, part in parts.items():
            survival = self._chain_survival(step, index, part)
            gains[first : first + len(part), : survival.shape[1]] = survival
            first += len(part)
        if not self._weights.uniform:
            states = step.states
            gains *= np.array([self._weights.weight(states[draft.seq_id].weight) for draft in drafts])[:, None]
        chosen = select_prefixes(gains, seconds, goodput=step.goodput, limit=limit)
        lengths = chosen.lengths.tolist()
        admitted = {
            draft.seq_id: draft if length == size else draft.truncate(length)
            for draft, length, size in zip(drafts, lengths, sizes, strict=True)
            if length
        }
        return JudgedDrafts(admitted, chosen.count, chosen.gain, chosen.cut, chosen.benefit, extra)

    def _chain_survival(self, step: PolicyStep, index: int, drafts: Sequence[Draft]) -> Floats:
        sizes = np.array([len(draft.tokens) for draft in drafts])
        total, width = int(sizes.sum()), int(sizes.max())
        scored = list(chain.from_iterable([draft.scores for draft in drafts]))
        model = self._drafters[index].acceptance
        if scored:
            return model.chain_survival(np.fromiter(scored, np.float64, total), sizes, (), width)
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
        for seq_id, draft in drafts.items():
            state, index = step.states[seq_id], step.drafter_index[step.plan[seq_id].drafter]
            survival = self._drafters[index].acceptance.survival(draft, state.acceptance[index])
            weight = self._weights.weight(state.weight)
            first.append(len(gains))
            gains += survival if weight == 1.0 else [weight * each for each in survival]
        chosen = select(gains, seconds, goodput=step.goodput, limit=limit)
        taken = sorted(chosen.taken)
        admitted = {}
        if len(taken) == len(gains):
            admitted = dict(drafts)
        else:
            for start, (seq_id, draft) in zip(first, drafts.items(), strict=True):
                nodes = taken[bisect_left(taken, start) : bisect_left(taken, start + len(draft.tokens))]
                if nodes:
                    admitted[seq_id] = keep_nodes(draft, [node - start for node in nodes])
        return JudgedDrafts(admitted, len(taken), chosen.gain, chosen.cut, chosen.benefit, extra)


_CHAIN_PARENTS = [tuple(range(-1, size - 1)) for size in range(64)]


def _are_chains(drafts: Sequence[Draft]) -> bool:
    """Whether all drafts are short chains, with scores for all tokens of all of them or for none."""
    sizes = [len(draft.tokens) for draft in drafts]
    if max(sizes) >= len(_CHAIN_PARENTS):
        return False
    scored = [len(draft.scores) for draft in drafts]
    if any(scored) and scored != sizes:
        return False
    return [draft.parents for draft in drafts] == [_CHAIN_PARENTS[size] for size in sizes]
