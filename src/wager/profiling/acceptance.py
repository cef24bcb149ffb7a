"""How often a drafter's tokens are accepted: survival by depth, alpha and tau with intervals, from recorded drafts.

Definitions, for rounds of one fixed depth K, each of which begins where the last one ended:

- survival S_k: the probability that the draft token at depth k is reached and accepted, over all rounds; a round
  without a draft token there counts as not accepted. Where the answer ends, or its length limit leaves no room, depth k
  is unobserved; S_k is the product of the observed conditional rates (Kaplan and Meier 1958), so it never rises with k.
- alpha: accepted / (accepted + first rejections), the maximum-likelihood rate if every draft token that is reached is
  accepted with one probability.
- tau: mean tokens per round, the bonus token included: tokens / rounds. But for the ends of answers it is
  1 + S_1 + ... + S_K.
- coverage: the share of rounds with room for a draft that got one.

Survival depends on the depth that is drafted: deep drafts leap over predictable stretches, so that their rounds begin
more often where little can be predicted. Hence tau is given for every depth, from the rounds of that depth.

Intervals hold 95 % of the values over resampled prompts (bootstrap): prompts are independent, rounds of one are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wager.profiling.draft_records import DraftedAnswer

RESAMPLES = 2000
_QUANTILES = (0.025, 0.975)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value (None: nothing was observed) and its 95 % interval (None: fewer than two prompts)."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class DepthRounds:
    """The rounds of one fixed depth: tau, and the shares of rounds in which 0, 1, ... depth draft tokens were made."""

    depth: int
    rounds: int
    tau: Estimate
    lengths: tuple[float, ...]

    @property
    def drafted(self) -> float:
        """Draft tokens made per round."""
        return sum(length * share for length, share in enumerate(self.lengths))

    def as_dict(self) -> dict[str, Any]:
        return {
            "depth": self.depth,
            "rounds": self.rounds,
            **_named("tau", self.tau),
            "drafted": self.drafted,
            "lengths": list(self.lengths),
        }


@dataclass(frozen=True, slots=True)
class DrafterAcceptance:
    """The acceptance of one drafter on some prompts, in rounds of the deepest depth; see the definitions above.

    `given_draft` is the survival in rounds that got a draft; `depths` holds every depth from 1 to the deepest;
    `context` are the positions before a token of an answer, on average.
    """

    prompts: int
    tokens: int
    rounds: int
    coverage: float
    context: float
    alpha: Estimate
    tau: Estimate
    survival: tuple[Estimate, ...]
    given_draft: tuple[float, ...]
    depths: tuple[DepthRounds, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; docs/acceptance.md lists the keys."""
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "rounds": self.rounds,
            "coverage": self.coverage,
            "context": self.context,
            **_named("alpha", self.alpha),
            **_named("tau", self.tau),
            "survival": [estimate.value for estimate in self.survival],
            "survival_low": [estimate.low for estimate in self.survival],
            "survival_high": [estimate.high for estimate in self.survival],
            "survival_given_draft": list(self.given_draft),
            "depths": [depth.as_dict() for depth in self.depths],
        }


def _named(name: str, estimate: Estimate) -> dict[str, float | None]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def estimate_acceptance(answers: Sequence[DraftedAnswer], depth: int) -> DrafterAcceptance:
    """The acceptance in `answers`, which were recorded to `depth` or deeper."""
    weights = _resampled(len(answers))
    counts = [_DepthCounts.of(answers, each) for each in range(1, depth + 1)]
    deepest = counts[-1]
    before = [answer.prompt_tokens + (len(answer.drafts) - 1) / 2 for answer in answers]
    lengths = [len(answer.drafts) for answer in answers]
    survival = _estimates(deepest.survival, weights)
    return DrafterAcceptance(
        prompts=len(answers),
        tokens=sum(lengths),
        rounds=int(deepest.rounds.sum()),
        coverage=_ratio(deepest.with_draft.sum(), deepest.with_room.sum()),
        context=float(np.average(before, weights=lengths)),
        alpha=_estimates(deepest.alpha, weights)[0],
        tau=_estimates(deepest.tau, weights)[0],
        survival=tuple(survival),
        given_draft=tuple(_survival(deepest.reached_with_draft.sum(0), deepest.accepted.sum(0)).tolist()),
        depths=tuple(
            DepthRounds(
                each.depth,
                int(each.rounds.sum()),
                _estimates(each.tau, weights)[0],
                tuple((each.lengths.sum(0) / each.rounds.sum()).tolist()),
            )
            for each in counts
        ),
    )


@dataclass(frozen=True, slots=True)
class _DepthCounts:
    """Counts of each answer in rounds of one depth, float64 [answers], by depth [answers, depth]. `reached` are rounds
    in which all draft tokens above were accepted and a verdict at this depth was possible; `lengths` are rounds by the
    number of draft tokens made [answers, 1 + depth]."""

    depth: int
    tokens: Floats
    rounds: Floats
    rejected: Floats
    with_room: Floats
    with_draft: Floats
    reached: Floats
    reached_with_draft: Floats
    accepted: Floats
    lengths: Floats

    @classmethod
    def of(cls, answers: Sequence[DraftedAnswer], depth: int) -> _DepthCounts:
        scalars, by_depth = np.zeros((5, len(answers))), np.zeros((3, len(answers), depth))
        lengths = np.zeros((len(answers), depth + 1))
        for index, answer in enumerate(answers):
            for each in answer.rounds_at(depth):
                scalars[1:, index] += (1, each.rejected, each.observable > 0, each.drafted > 0)
                lengths[index, each.drafted] += 1
                deepest = min(each.accepted + 1, each.observable)
                by_depth[0, index, :deepest] += 1
                by_depth[1, index, : deepest if each.drafted else 0] += 1
                by_depth[2, index, : each.accepted] += 1
            scalars[0, index] = len(answer.drafts)
        tokens, rounds, rejected, with_room, with_draft = scalars
        reached, reached_with_draft, accepted = by_depth
        return cls(
            depth, tokens, rounds, rejected, with_room, with_draft, reached, reached_with_draft, accepted, lengths
        )

    def alpha(self, weights: Floats) -> Floats:
        """[resamples, 1]"""
        accepted, rejected = weights @ self.accepted.sum(1), weights @ self.rejected
        return _divide(accepted, accepted + rejected)[:, None]

    def tau(self, weights: Floats) -> Floats:
        """[resamples, 1]"""
        return _divide(weights @ self.tokens, weights @ self.rounds)[:, None]

    def survival(self, weights: Floats) -> Floats:
        """[resamples, depth]"""
        return _survival(weights @ self.reached, weights @ self.accepted)


def _survival(reached: Floats, accepted: Floats) -> Floats:
    """Products of conditional rates over the last axis; a depth that was never reached survives with probability 0."""
    rates = np.nan_to_num(_divide(accepted, reached))
    return np.cumprod(rates, axis=-1, dtype=np.float64)


def _divide(over: Floats, under: Floats) -> Floats:
    """NaN where nothing was counted."""
    quotient: Floats = np.full(np.broadcast(over, under).shape, np.nan)
    np.divide(over, under, out=quotient, where=under > 0)
    return quotient


def _resampled(count: int) -> Floats:
    """How often each of `count` prompts is drawn, [1 + RESAMPLES, count]; the first row has each once."""
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    return np.vstack([np.ones(count), drawn])


def _estimates(statistic: Callable[[Floats], Floats], weights: Floats) -> list[Estimate]:
    """Value and interval of each column of a statistic."""
    columns = statistic(weights).T
    return [_estimate(column, intervals=weights.shape[1] > 1) for column in columns]


def _estimate(column: Floats, *, intervals: bool) -> Estimate:
    value, resampled = column[0], column[1:]
    if np.isnan(value):
        return Estimate(None, None, None)
    if not intervals:
        return Estimate(float(value), None, None)
    low, high = np.nanquantile(resampled, _QUANTILES)
    return Estimate(float(value), float(low), float(high))


def _ratio(over: float, under: float) -> float:
    return float(over / under) if under else 0.0
