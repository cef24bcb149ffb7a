"""What `explain` says, against scenarios whose truth is known: counts and seconds are recomputed from what the server
reported, not taken from the policy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import pytest

from wager.economics.options import Objective
from wager.economics.policy.adaptive import Adaptive
from wager.economics.policy.base import DrafterCapabilities, WrappedPolicy
from wager.economics.surface import LatencySurface
from wager.simulation.server import SimulatedServer, Workload
from wager.simulation.traces import SyntheticDrafter, SyntheticTraces
from wager.types import Draft, Plan, Span, StepRecord, Verdict

WINDOW = 64
"""Steps that explain looks back on."""

CURVE = (0.8, 0.6, 0.5, 0.4)
PLAIN = 8e-3
"""Seconds of a plain step of four sequences, on a machine whose rows cost next to nothing up to 32."""


class Watched(WrappedPolicy):
    """Notes every step of a policy, and what it said after it."""

    def __init__(self, policy: Adaptive) -> None:
        super().__init__(policy)
        self.plans: list[Plan] = []
        self.drafts: list[Mapping[str, Draft]] = []
        self.admitted: list[Mapping[str, Draft]] = []
        self.verdicts: list[list[Verdict]] = []
        self.records: list[StepRecord] = []
        self.said: list[str] = []

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        self.plans.append(dict(self.policy.plan(spans, budget)))
        return self.plans[-1]

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        self.drafts.append(dict(drafts))
        self.admitted.append(dict(self.policy.admit(drafts, budget)))
        return self.admitted[-1]

    def learn(self, verdicts: Iterable[Verdict]) -> None:
        self.verdicts.append(list(verdicts))
        self.policy.learn(self.verdicts[-1])

    def observe(self, record: StepRecord) -> None:
        self.records.append(record)
        self.policy.observe(record)
        self.said.append(self.policy.explain())


def watch(
    survival: tuple[float, ...],
    *,
    steps: int,
    users: int = 4,
    machine: LatencySurface | None = None,
    believed: LatencySurface | None = None,
    objective: Objective | None = None,
    request_sd: float = 0,
) -> Watched:
    """A policy on a machine, that believes it to be so (or another one)."""
    even = SyntheticDrafter(survival, request_sd=request_sd, round_sd=0, token_sd=0, score_sd=None)
    true = machine or LatencySurface([1, 32, 64], [PLAIN, PLAIN, 2 * PLAIN])
    policy = Watched(
        Adaptive(
            believed or LatencySurface.from_dict(true.as_dict()),
            drafters={"d": DrafterCapabilities(len(survival))},
            objective=objective or Objective(),
        )
    )
    workload = Workload(concurrency=users, rounds=steps * users)
    SimulatedServer(SyntheticTraces({"d": even}, output_tokens=4000), true, policy=policy, workload=workload).run()
    return policy


def found(pattern: str, text: str) -> list[float]:
    match = re.search(pattern, text)
    assert match, text
    return [float(value) for value in match.groups()]


@pytest.fixture(scope="module")
def usual() -> Watched:
    return watch(CURVE, steps=150)


@pytest.fixture(scope="module")
def early() -> Watched:
    return watch(CURVE, steps=40)


def test_counts_are_those_of_the_last_steps_and_of_this_one(usual: Watched) -> None:
    dear = LatencySurface([1, 32, 64], [PLAIN, 3 * PLAIN, 6 * PLAIN])
    of_many = watch(CURVE, steps=150, users=20, machine=dear, request_sd=2.0)
    assert any(0 < len(plan) < 14 for plan in of_many.plans[-WINDOW:]), "a part of the twenty draft"
    for run, end in ((usual, 10), (usual, 60), (usual, 100), (usual, 150), (of_many, 60), (of_many, 150)):
        window = slice(max(0, end - WINDOW), end)
        verified = sum(len(draft) for drafts in run.admitted[window] for draft in drafts.values())
        accepted = sum(len(verdict.accepted) for verdicts in run.verdicts[window] for verdict in verdicts)
        said = found(r"(\d+) draft tokens verified, (\d+) accepted \((\d+)%", run.said[end - 1])
        assert said == [verified, accepted, round(100 * accepted / verified)]
    for drafts, admitted, words in zip(usual.drafts, usual.admitted, usual.said, strict=True):
        now_drafted, kept = sum(map(len, drafts.values())), sum(map(len, admitted.values()))
        if drafts:
            assert found(r"(\d+) of (\d+) draft tokens? admitted", words) == [kept, now_drafted]
        else:
            assert "admitted" not in words


def test_observed_speed_is_tokens_over_seconds(usual: Watched) -> None:
    records = usual.records[-WINDOW:]
    tokens = sum(record.emitted for record in records)
    seconds = sum(sum(record.seconds.values()) for record in records)
    steps, said_tokens, said_seconds, ratio = found(
        r"last (\d+) steps: (\d+) tokens in ([\d.]+) s, ([\d.]+) times", usual.said[-1]
    )
    assert (steps, said_tokens) == (WINDOW, tokens)
    assert said_seconds == pytest.approx(seconds, rel=0.01)
    assert ratio == pytest.approx(tokens / seconds / (4 / PLAIN), rel=0.02), "a plain step takes 8 ms, for four tokens"
    assert ratio > 1.5
    assert "one more row costs less than 0.005 tokens" in usual.said[-1]


def test_a_loss_is_said_where_the_forecast_is_a_gain() -> None:
    """Rows are believed to be free and are not, so the first steps lose; the forecast is plain decoding's at least."""
    true = LatencySurface([1, 4, 32], [PLAIN, PLAIN, 20 * PLAIN])
    run = watch(CURVE, steps=7, machine=true, believed=LatencySurface([1, 4, 32], [PLAIN, PLAIN, PLAIN * 1.01]))
    tokens = sum(record.emitted for record in run.records)
    truth = tokens / sum(sum(record.seconds.values()) for record in run.records) / (4 / PLAIN)
    assert truth < 0.6
    assert found(r"s, ([\d.]+) times the tokens", run.said[-1])[0] == pytest.approx(truth, rel=0.35)
    assert found(r"s, ([\d.]+) times the tokens", run.said[-1])[0] < 0.8
    assert found(r"Forecast: ([\d.]+) times", run.said[-1])[0] > 1


def test_plain_steps_among_the_others_are_said() -> None:
    run = watch((0.4, 0.2), steps=WINDOW, machine=LatencySurface([1, 4, 32], [PLAIN, PLAIN, 4 * PLAIN]))
    plain = [sum(record.seconds.values()) for record in run.records if not record.drafted]
    assert 0 < len(plain) < WINDOW
    count, mean = found(r"(\d+) of them verified no draft token and took ([\d.]+) ms", run.said[-1])
    assert count == len(plain)
    assert mean == pytest.approx(1e3 * sum(plain) / len(plain), abs=0.01)


def test_a_prior_is_no_observation(early: Watched) -> None:
    policy = Adaptive(LatencySurface([1, 32], [PLAIN, PLAIN]), drafters={"d": DrafterCapabilities(4)})
    assert policy.explain() == "No sequence decodes in this step, so there is nothing to draft."
    policy.plan([Span("a", 9, (1,), True, 4)], 100)
    words = policy.explain()
    assert "by assumption: no observation yet" in words
    assert "No step was observed yet." in words
    assert "assumption" not in early.said[-1]


def test_the_step_that_ran_is_described() -> None:
    """A drafter that is always wrong: planning is skipped for most steps, and no sequence is said to have drafted."""
    run = watch((0.001,), steps=400, machine=LatencySurface([1, 4, 32], [PLAIN, PLAIN, 4 * PLAIN]))
    skipped = [index for index, words in enumerate(run.said) if "This step was not planned" in words]
    assert len(skipped) > 100
    assert any("d: not used. Its first token would be accepted" in words for words in run.said)
    for index, (plan, words) in enumerate(zip(run.plans, run.said, strict=True)):
        assert ("d: depth" in words or "exploration only" in words or "deep for every" in words) == bool(plan), words
        assert found(r"^(\d+) sequences decode", words) == [run.records[index].sequences]
        if index in skipped:
            assert not plan


def test_an_slo_that_cannot_be_met_is_said(usual: Watched) -> None:
    hopeless = watch(CURVE, steps=400, objective=Objective("slo", 1e-4))
    slowest = found(
        r"SLO of 0.1 ms a token cannot be met for 4 of 4 sequences: the slowest takes ([\d.]+) ms", hopeless.said[-1]
    )
    records = hopeless.records[-WINDOW:]
    pace = sum(sum(record.seconds.values()) for record in records) / sum(record.emitted for record in records) * 4
    assert slowest[0] / 1e3 == pytest.approx(pace, rel=0.35)
    assert "SLO of 100 ms a token is met." in watch(CURVE, steps=60, objective=Objective("slo", 0.1)).said[-1]
    assert "SLO" not in usual.said[-1]


def test_a_drafter_that_pauses_is_not_said_to_be_always_wrong(usual: Watched) -> None:
    policy = usual.policy
    policy.leave_out(frozenset(["d"]))
    policy.plan([Span(f"late {number}", 9, (1,), True, 4) for number in range(4)], 100)
    assert "d: not used." in policy.explain().splitlines()
    policy.leave_out(frozenset())
