"""Under an exact rule what is verified must not depend on the token itself: distributions by enumeration, and a check
that the check can fail.

Source: the published counter-examples to anticipating policies (DSpark, arXiv 2607.05147, appendix A, and one more).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import product

import numpy as np
import pytest

from wager.economics.latency import LatencyModel
from wager.economics.policy.adaptive import Adaptive
from wager.economics.policy.base import DrafterCapabilities, Policy
from wager.economics.policy.heuristics import Threshold
from wager.types import Draft, DraftDecision, Plan, Span, StepRecord, Verdict

Probs = tuple[float, float]
GoesOn = Callable[[tuple[int, ...]], bool]
Keep = Callable[[tuple[int, ...]], int]
"""The draws -> how many of them are verified."""

BUDGET = 10_000


def two_tokens(p: Probs, q: Probs, goes_on: GoesOn, keep: Keep) -> dict[tuple[int, ...], float]:
    """Distribution of the first two emitted tokens when a drafter goes on after `draws` while `goes_on(draws)`, at most
    two; the target's distribution is `p` at every position. The rest is as in arXiv 2211.17192."""
    probs = dict.fromkeys(product((0, 1), repeat=2), 0.0)

    def draw(draws: tuple[int, ...], mass: float) -> None:
        if len(draws) < 2 and (not draws or goes_on(draws)):
            for token in (0, 1):
                draw((*draws, token), mass * q[token])
        else:
            emit((), draws[: keep(draws)], mass)

    def emit(before: tuple[int, ...], draws: tuple[int, ...], mass: float) -> None:
        if len(before) == 2:
            probs[before] += mass
        elif not draws:  # the bonus token, and the tokens of later steps
            for token in (0, 1):
                emit((*before, token), (), mass * p[token])
        else:
            accepted = min(1.0, p[draws[0]] / q[draws[0]])
            emit((*before, draws[0]), draws[1:], mass * accepted)
            left = [max(0.0, p[token] - q[token]) for token in (0, 1)]
            for token in (0, 1):
                if accepted < 1.0:
                    emit((*before, token), (), mass * (1 - accepted) * left[token] / sum(left))

    draw((), 1.0)
    return probs


def confidence(draws: tuple[int, ...]) -> tuple[float, ...]:
    """The first token is accepted with 0.8; the second nearly always after an A, and never after a B."""
    return (0.8, 0.8 * (0.9 if draws[0] == 0 else 0.0))[: len(draws)]


def drafted(draws: tuple[int, ...], q: Probs, scores: tuple[float, ...]) -> Draft:
    parents = tuple(range(-1, len(draws) - 1))
    return Draft("r", draws, parents, scores, "d", np.array([q] * len(draws)))


def test_policies_that_look_at_the_draws_they_drop_change_the_distribution() -> None:
    """One searches over the survival of the draws, the other drops a token for its own confidence."""

    def full_search(draws: tuple[int, ...]) -> int:
        survival = np.concatenate([[0.0], confidence(draws)])
        return int(((1 + survival.cumsum()) * [1.0, 0.5, 0.45]).argmax())

    searched = two_tokens((0.7, 0.3), (0.5, 0.5), lambda draws: True, full_search)
    assert searched[0, 0] + searched[0, 1] == pytest.approx(0.85, abs=1e-12), "not 0.7"
    dropped = two_tokens((0.5, 0.5), (0.8, 0.2), lambda draws: False, lambda draws: int(draws[0] == 0))
    assert dropped[0, 0] + dropped[0, 1] == pytest.approx(0.6, abs=1e-12), "not 0.5"


class Machine(LatencyModel):
    """Rows whose cost rises, so that admission has something to decide."""

    def seconds(self, rows: int, requests: int, context_sum: int) -> float:
        return 5e-3 * (1.0 + 0.3 * max(0, rows - 1))

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        return 1e-5 * depth


def experienced(rule: str) -> tuple[Adaptive, int]:
    """A policy that has learned that draft tokens are mostly accepted, and the depth it plans next."""
    policy = Adaptive(Machine(), drafters={"d": DrafterCapabilities(2, stops_early=True)}, rule=rule)  # type: ignore[arg-type]
    draw = np.random.default_rng(5)
    for position in range(100, 160):
        plan = ask(policy, position)
        drafts = {}
        if plan:
            draws = tuple(draw.integers(0, 2, plan["r"].depth).tolist())
            drafts = {"r": drafted(draws, (0.5, 0.5), confidence(draws))}
        kept = policy.admit(drafts, BUDGET).get("r", ())
        policy.learn([Verdict("r", tuple(range(len(kept))), (0,) * (len(kept) + 1))])
        policy.observe(StepRecord(1 + len(kept), 1, len(kept), 0, 1, {"forward": 5e-3}, (position,)))
    return policy, ask(policy, 160).get("r", DraftDecision(0)).depth


def ask(policy: Adaptive, position: int) -> Plan:
    return policy.plan([Span("r", position, (0,), True, 2)], BUDGET)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(("p", "q"), [((0.7, 0.3), (0.5, 0.5)), ((0.5, 0.5), (0.8, 0.2)), ((0.1, 0.9), (0.6, 0.4))])
def test_the_adaptive_policy_leaves_the_distribution_as_it_is(rule: str, p: Probs, q: Probs) -> None:
    policy, depth = experienced(rule)
    assert depth > 0, "it does draft"
    kept = {}
    for draws in product((0, 1), repeat=depth):
        doubt = confidence(draws)
        for scores in (doubt, tuple(q[x] for x in draws)):
            copy = deepcopy(policy)
            kept[draws, scores] = len(copy.admit({"r": drafted(draws, q, scores)}, BUDGET).get("r", ()))
    assert len(set(kept.values())) == 1
    probs = two_tokens(p, q, lambda draws: len(draws) < depth, lambda draws: kept[draws, confidence(draws)])
    assert probs == pytest.approx({(a, b): p[a] * p[b] for a, b in probs}, abs=1e-12)


@pytest.mark.parametrize(("p", "q"), [((0.7, 0.3), (0.5, 0.5)), ((0.1, 0.9), (0.6, 0.4))])
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("kind", ["threshold", "adaptive"])
def test_a_drafter_that_stops_early_leaves_the_distribution_as_it_is(kind: str, rule: str, p: Probs, q: Probs) -> None:
    """It stops after an unlikely draw, which is verified all the same: only tokens not yet drawn depend on it."""
    stop = 0.4
    policy: Policy = Threshold(2, threshold=stop, rule=rule)  # type: ignore[arg-type]
    assert policy.plan([Span("r", 100, (0,), True, 2)], BUDGET)["r"].min_survival == stop
    if kind == "adaptive":
        policy, _ = experienced(rule)

    def score(draws: tuple[int, ...]) -> tuple[float, ...]:
        return (0.8, 0.7)[: len(draws)] if draws[0] == 0 else (0.3, 0.2)[: len(draws)]

    def goes_on(draws: tuple[int, ...]) -> bool:
        return score(draws)[-1] >= stop

    def keep(draws: tuple[int, ...]) -> int:
        return len(deepcopy(policy).admit({"r": drafted(draws, q, score(draws))}, BUDGET).get("r", ()))

    probs = two_tokens(p, q, goes_on, keep)
    assert probs == pytest.approx({(a, b): p[a] * p[b] for a, b in probs}, abs=1e-12)
    wrong = two_tokens(p, q, goes_on, lambda draws: sum(each >= stop for each in score(draws)))
    assert any(abs(mass - p[a] * p[b]) > 0.01 for (a, b), mass in wrong.items())
