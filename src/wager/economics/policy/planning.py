"""Before drafting: which drafter each sequence uses, how deep, or none (csrc/planning.h chooses)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from wager.economics.acceptance import AcceptanceModel, Floats
from wager.economics.policy.base import LONGEST_INTERVAL, SLOW_INTERVAL, UPDATE_INTERVAL, DrafterCapabilities
from wager.economics.policy.prices import Prices
from wager.economics.policy.state import PolicyStep
from wager.kernels import _native
from wager.types import DraftDecision

SEVERAL_DRAFTERS = 0.93  # factor of profit per drafter beyond the first: the best of several estimates is biased
MAX_MIN_SURVIVAL = 0.95  # the greatest min_survival given to a drafter
_NEVER = -50.0  # log-odds of what is not expected
_SIZE_RATIO = 1.5  # a batch that grew or shrank by more is planned anew


class Planner:
    """Plans every sequence anew every few steps. `decisions` are what drafters are asked for until then, by sequence,
    without those that decode plainly, and `deepest` is their depth. Nothing is expected of the drafters that are
    `unused` or `left_out`."""

    def __init__(
        self,
        drafters: Mapping[str, DrafterCapabilities],
        models: Mapping[str, AcceptanceModel],
        prices: Prices,
        *,
        unused: Collection[str],
    ) -> None:
        self.decisions: dict[str, DraftDecision] = {}
        self.deepest = 0
        self.speculates = True  # whether any sequence drafts, by the last plan
        self.left_out: Collection[str] = ()
        self.next_plan = 0  # the step in which the same sequences are planned anew
        self._drafters, self._models, self._prices, self._unused = drafters, models, prices, unused
        self._default: tuple[Mapping[str, Floats], int] = {}, 0  # forecasts of sequences that come between two plans
        self._default_decision: DraftDecision | None = None
        self._uniform = False  # whether all sequences got the same plan
        self._now = 0
        self._planned = 0  # sequences in the last plan
        self._newcomers = 0  # since then
        self._interval = 0.0

    def due(self, size: int, *, now: int) -> bool:
        """Whether to plan in step number `now`, of `size` sequences: the interval is over, the batch grew or shrank, or
        as many sequences are new as others (counted in every step) and not all plans are the same."""
        self._now = now
        if now >= self.next_plan or max(size, self._planned) > _SIZE_RATIO * min(size, self._planned):
            return True
        return not self._uniform and self._newcomers >= size

    def plan_soon(self) -> None:
        """An exploration draft was right: plan within a few steps."""
        if not self.speculates:
            self.next_plan = min(self.next_plan, self._now + UPDATE_INTERVAL)

    def plan_now(self) -> None:
        """Prices have changed: plan in the next step."""
        self.next_plan = self._now

    def start_sequence(self, seq_id: str) -> tuple[Mapping[str, Floats], int]:
        """A sequence came; until the next plan it gets a decision that many got. Its forecasts and its row of them."""
        self._newcomers += 1
        if self._default_decision is not None:
            self.decisions[seq_id] = self._default_decision
        return self._default

    def plan(self, step: PolicyStep) -> None:
        """Plan the candidates of the step."""
        affordable = self._prices.own.planning_interval
        longest = max(SLOW_INTERVAL if self.speculates else LONGEST_INTERVAL, affordable)
        self._interval = min(longest, max(self._interval + longest / SLOW_INTERVAL, affordable))
        self.next_plan = self._now + round(self._interval)
        self._planned, self._newcomers = step.decoding, 0
        candidates, names = step.candidates, list(self._drafters)
        drafters, depths, min_survival, forecasts = self._choose(step)
        keys = list(zip(drafters, depths, min_survival, strict=True))
        made = {key: self._decision(names[key[0]], *key[1:]) for key in set(keys) if key[1]}
        self.decisions = {}
        for row, (state, key) in enumerate(zip(candidates, keys, strict=True)):
            state.forecasts, state.row = forecasts, row
            if key in made:
                self.decisions[state.seq_id] = made[key]
        self.deepest = max(depths)
        order = sorted(range(len(keys)), key=lambda row: keys[row][:2])
        middle = order[len(order) // 2]
        self._default = forecasts, middle
        self._default_decision = made.get(keys[middle])
        self.speculates = bool(self.decisions)
        self._uniform = len(order) > 1 and keys[order[0]][:2] == keys[order[-1]][:2]

    def _choose(self, step: PolicyStep) -> tuple[list[int], list[int], list[float], dict[str, Floats]]:
        """Each sequence's drafter (-1: none), depth and min_survival (-1: none), and each drafter's forecast of
        survival, [sequences, depth]."""
        candidates, latency, weights = step.candidates, self._prices.latency, self._prices.weights
        rooms = [state.room for state in candidates]
        most = max(rooms)
        forecasts = {name: np.empty((len(rooms), min(each.max_depth, most))) for name, each in self._drafters.items()}
        deepest = max([forecast.shape[1] for forecast in forecasts.values()])
        native = _native.DraftPlanner(
            rooms=rooms,
            weights=[weights.weight(state) for state in candidates],
            extra=latency.extra_seconds(step.plain.shape, count=len(rooms) * deepest + 2),
            goodput=step.plain.goodput,
            several_drafters=SEVERAL_DRAFTERS,
            max_min_survival=MAX_MIN_SURVIVAL,
        )
        unjudged = [state.unjudged for state in candidates]
        for name, capabilities in self._drafters.items():
            model, sequences = self._models[name], [state.acceptance[name] for state in candidates]
            model.compare_sequences(sequences)
            unused = name in self._unused or name in self.left_out
            native.add(
                log_odds=model.depths.log_odds,
                means=[_NEVER if unused else sequence.mean for sequence in sequences],
                variances=[sequence.variance for sequence in sequences],
                seconds=latency.marginal_draft_seconds(name, len(rooms), forecasts[name].shape[1]),
                # until the next plan each step takes its share of catching up
                catch_up=[state.catch_up_seconds(name, capabilities) / (2 * SLOW_INTERVAL) for state in candidates],
                unjudged=unjudged,
                shifts=model.confidence_shifts,
                has_scores=model.has_scores,
                stops_early=capabilities.stops_early,
                survival=forecasts[name],
            )
        return *native.choose(self._row_costs(step)), forecasts

    def _row_costs(self, step: PolicyStep) -> list[float]:
        """Two costs of a row, for which plans are made: the recent one and, if it is less, that of one draft token for
        everyone. Where rows get cheaper the more there are (experts are shared), drafting nothing and drafting much can
        each be consistent, and their profits are compared."""
        size = len(step.candidates)
        extra = self._prices.latency.extra_seconds(step.plain.shape, count=size)
        everyone, recent = step.plain.goodput * extra[size] / size, self._prices.goodput.row_cost(step.decoding)
        if recent is None:
            return [everyone]
        return [recent, everyone] if recent > everyone else [recent]

    def _decision(self, drafter: str, depth: int, stop: float) -> DraftDecision:
        """Where the drafter is to stop after a token of survival `stop` (-1: nowhere), it is told the score of one."""
        return DraftDecision(depth, drafter, self._models[drafter].score_of(stop) if stop > 0 else 0.0)
