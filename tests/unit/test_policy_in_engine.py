"""The policy in the engine: whatever it decides the text is the same, and it learns of every sequence and step."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from wager.config import EngineConfig
from wager.draft.base import Drafter
from wager.draft.model import DraftModel
from wager.draft.ngram import NgramDrafter
from wager.economics.options import Objective
from wager.economics.policy.adaptive import Adaptive
from wager.economics.policy.base import DrafterCapabilities, Policy, truncate_to
from wager.economics.policy.heuristics import FixedDepth, Threshold
from wager.economics.surface import LatencySurface
from wager.engine.core import Engine
from wager.errors import RequestError, UsageError
from wager.loading.load import build_policies
from wager.testing import (
    AdversaryDrafter,
    FakeClock,
    OracleDrafter,
    RandomTreeDrafter,
    SetAcceptanceDrafter,
    ToyDistribution,
    ToyOracle,
    ToyTarget,
)
from wager.testing.toy import toy_engine
from wager.trace import Trace
from wager.types import Draft, DraftDecision, Plan, Request, SamplingParams, Span

LAW = ToyDistribution(vocab=48, order=2, sharpness=6.0, eos=3, eos_bias=-1.0)
ORACLE = ToyOracle(LAW)


def surface() -> LatencySurface:
    """A staircase: eight rows cost hardly more than one, sixteen twice as much."""
    return LatencySurface([1, 2, 4, 8, 16, 32, 64, 128], [5e-3, 5.1e-3, 5.3e-3, 5.6e-3, 9e-3, 16e-3, 31e-3, 60e-3])


def drafters() -> list[Drafter]:
    return [
        SetAcceptanceDrafter(LAW.vocab, [0.8, 0.6, 0.4], oracle=ORACLE),
        NgramDrafter(),
        AdversaryDrafter(LAW.vocab, oracle=ORACLE),
        RandomTreeDrafter(LAW.vocab, oracle=ORACLE),
        DraftModel(ToyTarget(LAW, num_blocks=40)),
    ]


def engine(*guessers: Drafter, policy: object = None, **options: object) -> Engine:
    """With a clock that stands still, so that prices stay what they are."""
    offers = {each.name: DrafterCapabilities(8, stops_early=each.samples) for each in guessers}
    chosen = policy or Adaptive(surface(), drafters=offers)
    first, *others = guessers
    return toy_engine(LAW, drafter=first, others=others, policy=chosen, depth=8, trace=Trace(FakeClock()), **options)  # type: ignore[arg-type]


def requests(count: int = 12) -> list[Request]:
    greedy = SamplingParams(max_tokens=50)
    params = [greedy, replace(greedy, temperature=0.8)]
    params += [replace(greedy, temperature=1.2, top_p=0.9, frequency_penalty=0.4)]
    return [
        Request(f"r{i}", tuple(range(4, 10 + i)), replace(params[i % 3], seed=i), weight=1.0 + i % 2)
        for i in range(count)
    ]


def plain() -> list[tuple[int, ...]]:
    return [each.token_ids for each in toy_engine(LAW, depth=0).generate(requests(), concurrency=4)]


class RandomPolicy(Policy):
    """Asks any drafter for any depth, admits any beginning, and sometimes plans nothing for a while."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.draw, self.steps = list(names), random.Random(3), 0

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        self.steps += 1
        if self.steps // 7 % 3 == 0:
            return {}
        live = [span.seq_id for span in spans if span.max_draft_tokens and self.draw.random() < 0.8]
        depths = {name: self.draw.randint(0, 8) for name in live}
        return {name: DraftDecision(depth, self.draw.choice(self.names), 0.02) for name, depth in depths.items()}

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        kept = {name: draft.truncate(self.draw.randint(1, len(draft))) for name, draft in drafts.items()}
        return truncate_to(kept, budget)

    def explain(self) -> str:
        return ""


class Refusing(FixedDepth):
    """Fails when the second sequence begins."""

    begun = 0

    def begin(self, sequence: str, *, weight: float) -> None:
        self.begun += 1
        if self.begun == 2:
            raise RuntimeError("no")


def test_a_request_that_a_policy_fails_at_does_not_run() -> None:
    ours = engine(NgramDrafter(), policy=Refusing(2))
    [request, *_] = requests(1)
    two = replace(request, params=replace(request.params, n=2))
    with pytest.raises(RuntimeError, match="no"):
        ours.add(two)
    assert not ours.busy
    assert ours.open_requests == []
    assert ours.step() == []
    [completion] = ours.generate([request])  # its id is free
    assert completion.finish_reason in ("stop", "length")


@pytest.mark.parametrize("pages", [256, 24])
@pytest.mark.parametrize("mind", ["adaptive", "latency", "slo", "random", "threshold"])
def test_no_decision_changes_a_token(mind: str, pages: int) -> None:
    guessers = drafters()
    offers = {each.name: DrafterCapabilities(8, stops_early=each.samples) for each in guessers}
    objective = {"latency": Objective("latency"), "slo": Objective("slo", 4e-3)}.get(mind, Objective())
    policy: Policy = Adaptive(surface(), drafters=offers, objective=objective)
    if mind in ("random", "threshold"):
        policy = RandomPolicy([*offers]) if mind == "random" else Threshold(8)
    speculating = engine(*guessers, policy=policy, num_blocks=pages)
    answers = speculating.generate(requests(), concurrency=6)
    assert [each.token_ids for each in answers] == plain()
    assert sum(each.stats.accepted for each in answers) > 20
    again = speculating.generate([replace(each, id=f"again-{each.id}") for each in requests()], concurrency=3)
    assert [each.token_ids for each in again] == plain()


@pytest.mark.parametrize("rule", ["match", "rejection", "block", "traversal"])
def test_a_drafter_that_was_not_asked_for_a_while_is_up_to_date(rule: str) -> None:
    """An identical model is right in every guess it makes (under `match`), however long it was not asked."""
    model = DraftModel(ToyTarget(LAW, num_blocks=200))
    speculating = engine(model, policy=RandomPolicy(["model"]), rule=rule)
    greedy = [replace(each, params=SamplingParams(max_tokens=60)) for each in requests(6)]
    answers = speculating.generate(greedy, concurrency=3)
    assert sum(each.stats.drafted for each in answers) > 60
    assert all(each.stats.accepted >= each.stats.drafted - 8 for each in answers), "but for what an end cut off"


@pytest.mark.slow
def test_the_right_drafter_is_found_among_several() -> None:
    both = engine(AdversaryDrafter(LAW.vocab, oracle=ORACLE), OracleDrafter(ORACLE))
    long = [replace(each, params=SamplingParams(max_tokens=150, ignore_eos=True)) for each in requests(8)]
    answers = both.generate(long, concurrency=4)
    origins = [origin for each in answers for origin in each.drafted_by if origin]
    assert origins.count("oracle") == len(origins)
    assert sum(each.stats.completion_tokens for each in answers) > 2 * sum(each.stats.rounds for each in answers)


def test_weights_reach_the_policy() -> None:
    told = {}

    class Listening(FixedDepth):
        def begin(self, sequence: str, *, weight: float) -> None:
            told[sequence] = weight

        def end(self, sequence: str) -> None:
            told[sequence] = -told[sequence]

    listening = engine(NgramDrafter(), policy=Listening(2))
    listening.generate([replace(requests()[0], weight=3.0, params=SamplingParams(max_tokens=5, n=2, seed=0))])
    assert told == {"r0": -3.0, "r0#1": -3.0}


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(RequestError, match="weight"):
        Request("r", (1,), weight=weight)


# ---- from words -----------------------------------------------------------------------------------------------------


def made(*guessers: Drafter, **options: object) -> tuple[object, int]:
    make, deepest = build_policies(EngineConfig.from_options(**options).speculation, guessers, surface)
    return make(), deepest


def test_the_configuration_says_who_decides() -> None:
    ngram = NgramDrafter()
    policy, deepest = made(ngram)
    assert isinstance(policy, Adaptive)
    assert deepest == ngram.max_depth
    assert made(ngram, policy="adaptive", depth=3)[1] == 3
    fixed, deepest = made(ngram, depth=3)
    assert (type(fixed), deepest) == (FixedDepth, 3)
    assert made(ngram, policy="fixed")[1] == ngram.default_depth
    threshold, _ = made(ngram, policy="threshold:0.3")
    assert isinstance(threshold, Threshold)
    assert threshold.threshold == 0.3
    assert made()[1] == made(ngram, depth=0)[1] == 0
    with pytest.raises(UsageError, match="uses one drafter"):
        made(NgramDrafter(), OracleDrafter(ORACLE), depth=4)
