"""Requests that say themselves how they speculate: the text is the same, and the policy decides for all others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import pytest

from wager.draft.ngram import NgramDrafter
from wager.economics.policy.adaptive import Adaptive
from wager.economics.policy.base import DrafterCapabilities, WrappedPolicy
from wager.economics.policy.heuristics import FixedDepth
from wager.economics.surface import DraftCurve, LatencySurface
from wager.errors import RequestError
from wager.kernels.base import TargetOutput
from wager.testing import AdversaryDrafter, FakeClock, OracleDrafter, ToyDistribution, ToyOracle
from wager.testing.toy import toy_engine
from wager.trace import Trace
from wager.types import (
    Draft,
    DraftRequest,
    PackedBatch,
    Plan,
    Request,
    RequestSpeculation,
    SamplingParams,
    Span,
    StepRecord,
    Verdict,
)

LAW = ToyDistribution(vocab=48, order=2, sharpness=6.0)
PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=7)


class SeenByPolicy(FixedDepth):
    """A fixed depth that keeps what it sees."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.begun: list[str] = []
        self.decoding: set[str] = set()
        self.admitted: set[str] = set()
        self.learned: set[str] = set()
        self.ended: list[str] = []

    def begin(self, sequence: str, *, weight: float) -> None:
        self.begun.append(sequence)

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        self.decoding |= {span.seq_id for span in spans if span.needs_logits}
        return super().plan(spans, budget)

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        self.admitted |= set(drafts)
        return super().admit(drafts, budget)

    def learn(self, verdicts: Iterable[Verdict]) -> None:
        self.learned |= {verdict.seq_id for verdict in verdicts}

    def end(self, sequence: str) -> None:
        self.ended.append(sequence)


def requests() -> list[Request]:
    choices = {
        "plain": None,
        "off": RequestSpeculation(depth=0),
        "default": RequestSpeculation(),
        "two": RequestSpeculation("oracle", 2),
        "other": RequestSpeculation("blind-adversary", 3),
        "deepest": RequestSpeculation(depth=1000),
    }
    return [
        Request(name, (1, 2, 3 + i), replace(PARAMS, n=2 if name == "two" else 1), speculation=choice)
        for i, (name, choice) in enumerate(choices.items())
    ]


@pytest.mark.parametrize("max_rows", [64, 11])
@pytest.mark.parametrize("depth", [0, 3])
def test_every_request_drafts_as_it_says_and_the_text_is_the_same(depth: int, max_rows: int) -> None:
    expected = [c.token_ids for c in toy_engine(LAW).generate([replace(r, speculation=None) for r in requests()])]
    policy = SeenByPolicy(depth)
    other = AdversaryDrafter(LAW.vocab)
    other.name = "blind-adversary"
    engine = toy_engine(
        LAW, drafter=OracleDrafter(ToyOracle(LAW)), others=[other], policy=policy, depth=8, max_rows=max_rows
    )
    completions = {f"{c.request_id}{c.index}": c for c in engine.generate(requests())}
    assert [c.token_ids for c in completions.values()] == expected
    by_name = {name: (c.stats.drafted, set(c.drafted_by), c.stats.rounds) for name, c in completions.items()}
    assert by_name["off0"] == (0, {""}, 24)
    assert (by_name["plain0"][0] > 0) == (depth > 0)
    assert by_name["other0"][0] > 0 and "oracle" not in by_name["other0"][1]
    if max_rows == 64:
        assert by_name["two0"] == by_name["two1"] == (by_name["two0"][0], {"oracle", ""}, 8)
        assert by_name["default0"][2] == 5  # four guesses and one token a round
        assert by_name["deepest0"][2] == 3  # as deep as the drafter goes
    assert policy.begun == ["plain"] and policy.decoding == policy.learned == {"plain"}
    assert policy.admitted == ({"plain"} if depth else set())
    assert "plain" in policy.ended
    engine.check()


def test_what_the_engine_lacks_is_refused() -> None:
    engine = toy_engine(LAW, drafter=NgramDrafter())
    with pytest.raises(RequestError, match="wants drafter 'medusa'; this engine has ngram"):
        engine.add(Request("r", (1,), PARAMS, speculation=RequestSpeculation("medusa")))
    with pytest.raises(RequestError, match="this engine has none"):
        toy_engine(LAW).add(Request("r", (1,), PARAMS, speculation=RequestSpeculation()))
    toy_engine(LAW).add(Request("r", (1,), PARAMS, speculation=RequestSpeculation("medusa", 0)))
    for depth in (-1, True, 2.5):
        with pytest.raises(RequestError, match="depth"):
            RequestSpeculation(depth=depth)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="drafter"):
        RequestSpeculation(3)  # type: ignore[arg-type]


def test_a_policy_that_is_replaced_decides_for_the_requests_that_do_not_choose() -> None:
    engine = toy_engine(LAW, drafter=NgramDrafter(), policy=SeenByPolicy(2))
    engine.policy = replaced = SeenByPolicy(3)
    engine.generate(
        [Request("r", (1, 2), PARAMS), Request("s", (1, 2), PARAMS, speculation=RequestSpeculation(depth=1))]
    )
    assert replaced.begun == ["r"]


def test_a_method_that_was_set_on_what_watches_a_policy_stays() -> None:
    engine = toy_engine(LAW, drafter=NgramDrafter(), policy=FixedDepth(2))
    watching, seen = WrappedPolicy(engine.policy), list[StepRecord]()
    watching.observe = seen.append  # type: ignore[method-assign]
    engine.policy = watching
    for number, speculation in enumerate([None, RequestSpeculation(depth=1), None]):
        before = len(seen)
        engine.generate([Request(f"{number}", (1, 2), PARAMS, speculation=speculation)])
        assert len(seen) > before


def test_guesses_that_the_policy_does_not_decide_about_leave_a_neighbours_tokens_their_time() -> None:
    """A request of many choices that asks for deep drafts made each step several times as long, for everybody."""
    sizes, clock, records = {"num_blocks": 1024, "max_rows": 256, "max_context": 900}, FakeClock(), list[StepRecord]()
    drafter, policy = OracleDrafter(ToyOracle(LAW)), FixedDepth(0)
    engine = toy_engine(LAW, drafter=drafter, policy=policy, depth=7, max_sequences=32, trace=Trace(clock), **sizes)
    engine.on_step = records.append
    forward = engine.runner.target.forward

    def slow_forward(batch: PackedBatch) -> TargetOutput:
        clock.advance(1e-3 * batch.rows)
        return forward(batch)

    engine.runner.target.forward = slow_forward  # type: ignore[method-assign]
    speculation = RequestSpeculation(depth=7)
    params = SamplingParams(max_tokens=400, ignore_eos=True, n=16, seed=1)
    engine.add(Request("many", (1, 2, 3), params, speculation=speculation, streamed=True))
    for _ in range(4):
        engine.step()
    assert records[-1].drafted > 80, "alone it takes what it likes"
    engine.add(Request("stream", (1, 2, 4), SamplingParams(max_tokens=400, ignore_eos=True), streamed=True))
    engine.step()
    records.clear()
    for _ in range(8):
        engine.step()
    assert all(0 < record.drafted <= 26 for record in records), [record.drafted for record in records]
    engine.abort("stream")
    engine.step()
    engine.step()
    assert records[-1].drafted > 80


class TimedDrafter(OracleDrafter):
    """Takes 20 ms a call."""

    name = "slow"

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(ToyOracle(LAW))
        self._clock = clock

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self._clock.advance(20e-3 if requests else 0.0)
        return super().propose(requests)


@pytest.mark.parametrize("tokens", [14, 80])
def test_what_requests_have_drafted_is_no_price_of_what_the_policy_plans(tokens: int) -> None:
    """A request that names a slow drafter had the policy believe that the quick one takes as long, so that nobody else
    got guesses, until long after it had ended."""
    clock = FakeClock()
    prices = LatencySurface([1, 64], [1e-3, 2e-3], drafters={"slow": DraftCurve([1, 8], [2e-2] * 2, [0.0] * 2)})
    policy = Adaptive(prices, drafters={name: DrafterCapabilities(4) for name in ("oracle", "slow")})
    engine = toy_engine(
        LAW, drafter=OracleDrafter(ToyOracle(LAW)), others=[TimedDrafter(clock)], policy=policy, trace=Trace(clock)
    )
    forward = engine.runner.target.forward

    def timed_forward(batch: PackedBatch) -> TargetOutput:
        clock.advance(1e-3 + (batch.rows - 1) * 1e-3 / 63)
        return forward(batch)

    engine.runner.target.forward = timed_forward  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    chosen = replace(params, max_tokens=tokens)
    speculation = RequestSpeculation("slow", 3)
    first, _ = engine.generate([Request("r", (1, 2), params), Request("s", (1, 3), chosen, speculation=speculation)])
    assert prices.draft_seconds("oracle", 1, 4) == 0
    assert first.stats.rounds < 100, "a plain step for each token would be 300"
