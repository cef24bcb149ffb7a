"""Drafters that read the target's states and are not used: they rest, are shown nothing, cost next to nothing, change
no token, and are used again when they are good."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from blank_heads import HEADS
from test_collapse import LAW, ROWS, SECONDS, Service, TurningDrafter

from wager.config import EngineConfig
from wager.draft.base import ComputedRows, Drafter
from wager.draft.combined import BackedDrafter
from wager.economics.policy.adaptive import Adaptive
from wager.economics.policy.base import SLOW_INTERVAL, DrafterCapabilities
from wager.economics.policy.exploration import DrafterReadiness
from wager.economics.policy.heuristics import FixedDepth
from wager.economics.policy.state import PlainStep, PolicyStep
from wager.economics.surface import LatencySurface
from wager.engine.proposer import Proposer
from wager.kernels.arrays import Array
from wager.kernels.base import TargetOutput
from wager.loading.load import LoadedEngine, load
from wager.testing import FakeClock, ToyOracle
from wager.testing.drafters import TargetOracle
from wager.types import (
    NO_TENANT,
    Draft,
    DraftDecision,
    DraftRequest,
    OutputDelta,
    PackedBatch,
    Plan,
    Request,
    RequestSpeculation,
    SamplingParams,
    Span,
    StepRecord,
    Verdict,
)

WARM_UP = 16


class ReadingDrafter(TurningDrafter):
    """Drafts only behind a position whose state it was shown. `seen`: of each draft the states before it without a gap,
    as far as the beginning of its text (then -1)."""

    taps = (0, 2)

    def __init__(self, clock: FakeClock, oracle: TargetOracle) -> None:
        super().__init__(clock, oracle)
        self.shown: dict[str, set[int]] = {}
        self.seen: list[int] = []
        self.passes = 0

    def read(self, output: TargetOutput, computed: Sequence[ComputedRows]) -> None:
        self.passes += 1
        for rows in computed:
            self.shown.setdefault(rows.seq_id, set()).update(range(rows.start, rows.start + len(rows.rows)))

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts: list[Draft] = []
        for request, draft in zip(requests, super().propose(requests), strict=True):
            shown, last = self.shown.get(request.seq_id, set()), request.position - 2
            seen = next((n for n in range(last + 1) if last - n not in shown), -1)
            if seen:
                self.seen.append(seen)
            drafts.append(draft if seen else Draft(request.seq_id, drafter=self.name))
        return drafts


def reading(concurrency: int) -> tuple[Service, ReadingDrafter, list[frozenset[int]]]:
    """A service, its drafter, and what its target is told to tap."""
    service, tapped = Service(concurrency, ReadingDrafter, WARM_UP), list[frozenset[int]]()

    def tap(layers: Collection[int]) -> None:
        tapped.append(frozenset(layers))

    service.engine.runner.target.tap = tap  # type: ignore[attr-defined]
    assert isinstance(service.drafter, ReadingDrafter)
    return service, service.drafter, tapped


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_drafter_that_is_always_wrong_rests_and_one_that_is_right_again_is_used(concurrency: int) -> None:
    service, drafter, tapped = reading(concurrency)
    plain = Service(concurrency)
    plain.engine.policy = FixedDepth(0)
    drafter.good = False
    texts, expected = service.serve(40), plain.serve(40)
    steps = len(service.records)
    assert tapped[0] == frozenset() and set(tapped) == {frozenset(), frozenset({0, 2})}
    assert drafter.passes < 0.25 * steps
    late = [each for each in drafter.seen if each >= 0]
    assert late and min(late) >= WARM_UP, "it is asked when it has seen enough"
    assert len(drafter.seen) < 0.06 * steps * concurrency
    assert service.speed(0) > 0.97 * plain.speed(0)

    drafter.good = True
    texts, expected = texts + service.serve(40), expected + plain.serve(40)
    assert not service.policy.inactive_drafters and tapped[-1] == {0, 2}
    used = [record.drafted > 0 for record in service.records[steps:]]
    assert sum(used[-200:]) > 180, "it is in use"
    started = [seq_id for seq_id, shown in drafter.shown.items() if 0 in shown and int(seq_id[1:]) >= 70]
    assert len(started) == 10, "prompts that come while it is awake are shown whole"
    assert all(drafter.shown[seq_id] >= set(range(40)) for seq_id in started)
    assert texts == expected


def test_it_says_who_rests() -> None:
    service, drafter, _ = reading(1)
    drafter.good = False
    service.serve(3)
    assert service.policy.inactive_drafters == {"set"}
    assert "Inactive, and shown no states until tried again: set." in service.policy.explain()


@pytest.mark.slow
def test_a_request_that_names_a_drafter_wakes_it_before_its_prompt() -> None:
    service, drafter, tapped = reading(1)
    drafter.good = False
    service.serve(3)
    assert tapped[-1] == frozenset()
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for name in ("set", ""):
        chosen = Request(f"x{name}", (1, 2, 3, 4), params, speculation=RequestSpeculation(drafter=name, depth=3))
        service.engine.generate([chosen])
        assert drafter.shown[f"x{name}"] >= set(range(20)), "whole"
    service.serve(2)
    assert tapped[-1] == frozenset()


class _Known(ReadingDrafter):
    """Keeps what it is told of texts, unless it `fails`."""

    def __init__(self, name: str, taps: tuple[int, ...]) -> None:
        super().__init__(FakeClock(), ToyOracle(LAW))
        self.name, self.taps, self.fails = name, taps, False
        self.texts: dict[str, list[int]] = {}

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        self.texts[seq_id] = list(tokens)

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        if self.fails:
            raise RuntimeError("no more")
        self.texts[seq_id] += tokens

    def end(self, seq_id: str) -> None:
        self.texts.pop(seq_id, None)


def test_one_that_wakes_is_up_to_date_and_one_that_fails_then_is_tapped_for_no_more() -> None:
    one, two, tapped = _Known("one", (0, 2)), _Known("two", (1,)), list[frozenset[int]]()
    proposer = Proposer(one, two, vocab=LAW.vocab)
    output = TargetOutput(np.empty((0, LAW.vocab)), np.empty(0, np.int32))
    sequences: dict[str, Any] = {}

    def rest(*names: str) -> None:
        proposer.set_inactive(frozenset(names), sequences, lambda layers: tapped.append(frozenset(layers)))

    def step(known: dict[str, list[int]], *ended: str) -> None:
        for seq_id, tokens in known.items():
            sequences[seq_id].tokens += tokens
        for seq_id in ended:
            del sequences[seq_id]
        proposer.observe(output, known, ended)

    def begin(seq_id: str, tokens: list[int]) -> None:
        sequences[seq_id] = SimpleNamespace(tokens=list(tokens), prompt_tokens=len(tokens), params=SamplingParams())
        proposer.begin(seq_id, tokens, SamplingParams())

    begin("a", [1, 2])
    begin("b", [3])
    rest("one")
    assert proposer.taps == {1} and tapped == [{1}]
    step({"a": [4], "b": [5]})
    begin("c", [6, 7])
    rest("one", "two")
    assert tapped[1:] == [frozenset()] and not proposer.reads_passes
    step({"a": [8], "c": [9, 10]}, "b")
    assert one.texts == {"a": [1, 2], "c": [6, 7]} and two.texts == {"a": [1, 2, 4], "c": [6, 7]}
    rest("two")
    assert one.texts == {seq_id: each.tokens for seq_id, each in sequences.items()}
    two.fails = True
    begin("d", [12])
    rest()  # which it fails for all three sequences
    assert proposer.name == "one" and proposer.taps == {0, 2} and tapped[2:] == [{0, 2}]
    step({"a": [11]})
    assert one.texts["a"] == [1, 2, 4, 8, 11]


# ---- which rest -----------------------------------------------------------------------------------------------------


def step(number: int, seconds: float) -> PolicyStep:
    return PolicyStep(number, plain=PlainStep((1, 1, 100), 1.0, seconds, 1 / seconds))


@pytest.mark.parametrize(("warm_up", "seconds", "rests"), [(16, 2.5e-3, True), (0, 2.5e-3, False), (16, 0.2, False)])
def test_only_those_rest_whose_states_cost_something(warm_up: int, seconds: float, *, rests: bool) -> None:
    """Not those that read none, nor beside a target whose steps are so long that it makes no difference."""
    capabilities = dict.fromkeys(("a", "b"), DrafterCapabilities(4, warm_up=warm_up))
    readiness, standing = DrafterReadiness(capabilities), {"r": DraftDecision(2, "b")}
    for number in range(1, SLOW_INTERVAL + 1):
        readiness.update(step(number, seconds), standing)
    assert not readiness.inactive and not readiness.unready(SLOW_INTERVAL)
    readiness.update(step(SLOW_INTERVAL + 1, seconds), standing)
    assert readiness.inactive == ({"a"} if rests else set())
    readiness.update(step(50, seconds), {"r": DraftDecision(2, "a")})
    assert not readiness.inactive and readiness.unready(50) == ({"a"} if rests else set())
    assert not readiness.unready(50 + WARM_UP)


def test_a_plan_that_wants_a_drafter_that_rests_waits_until_it_has_seen_enough() -> None:
    policy = Adaptive(
        LatencySurface(ROWS, SECONDS), drafters={"set": DrafterCapabilities(8, warm_up=WARM_UP)}, exploration_share=0.0
    )
    asked: list[bool] = []
    rested: list[bool] = []
    for number in range(900):
        spans = [Span("r", 100 + number, (0,), True, 8)]
        plan = policy.plan(spans, 100)
        asked.append(bool(plan))
        rested.append(bool(policy.inactive_drafters))
        drafts = {name: Draft.chain(name, [1] * each.depth, drafter="set") for name, each in plan.items()}
        rows = 1 + sum(map(len, policy.admit(drafts, 100).values()))
        policy.learn([Verdict("r", (), (0,))])
        policy.observe(StepRecord(rows, 1, rows - 1, 0, 1, {"forward": SECONDS[0]}, (100 + number,)))
        if number == 400:
            assert policy.inactive_drafters
            for _ in range(2000):
                policy.acceptance["set"].learn_round(policy._sequences["r"].acceptance["set"], accepted=8, tested=8)
    woke = rested.index(False, 400)
    assert asked.index(True, 400) == woke + WARM_UP


# ---- heads ----------------------------------------------------------------------------------------------------------


class Napping(FixedDepth):
    """Drafts to a depth, except that all of its drafters rest for 15 steps of 40."""

    def __init__(self, depth: int, names: frozenset[str]) -> None:
        super().__init__(depth)
        self._names, self.steps = names, 0

    @property
    def inactive_drafters(self) -> frozenset[str]:
        return self._names if 10 <= self.steps % 40 < 25 else frozenset()

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        self.steps += 1
        return {} if self.inactive_drafters else super().plan(spans, budget)


def watch(engine: LoadedEngine, drafter: Any, texts: dict[str, list[int]]) -> list[tuple[bool, set[int], int]]:
    """Of each pass whether the drafter rests, what was tapped, and for how many sequences it drafted. The tokens that
    it was given are put into `texts`, and are all of its sequence when it is asked."""
    passes: list[tuple[bool, set[int], int]] = []
    forward, begin, accept, propose = engine.target.decoder.forward, drafter.begin, drafter.accept, drafter.propose
    drafted, last = 0, dict[int, tuple[Array, Array]]()  # what was tapped last: where it lies, and what it was

    def watched(batch: PackedBatch) -> TargetOutput:
        nonlocal drafted, last
        output, rests = forward(batch), bool(engine.policy.inactive_drafters)
        passes.append((rests, set(output.taps), drafted))
        drafted = 0
        if not rests:
            last = {layer: (rows, rows.copy()) for layer, rows in output.taps.items() if layer < engine.spec.num_layers}
        assert all(np.array_equal(rows, before) for rows, before in last.values()), "nothing is copied"
        return output

    def begun(seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str) -> None:
        texts[seq_id] = list(tokens)
        begin(seq_id, tokens, params, tenant=tenant)

    def accepted(seq_id: str, tokens: Sequence[int]) -> None:
        texts[seq_id] += tokens
        accept(seq_id, tokens)

    def proposed(asked: Sequence[DraftRequest]) -> list[Draft]:
        nonlocal drafted
        for request in asked:
            assert texts[request.seq_id] == list(engine.scheduler.sequences[request.seq_id].tokens)
        drafts: list[Draft] = propose(asked)
        drafted = sum(len(draft) > 0 for draft in drafts)
        return drafts

    engine.target.decoder.forward = watched  # type: ignore[method-assign]
    drafter.begin, drafter.accept, drafter.propose = begun, accepted, proposed
    return passes


@pytest.mark.parametrize(
    ("kind", "trees"),
    [
        pytest.param(kind, trees, marks=() if (kind, trees) == ("eagle3", False) else pytest.mark.slow)
        for kind in HEADS
        for trees in (False, True)
    ],
)
def test_heads_that_rest_change_no_token_and_draft_again(kind: str, tmp_path: Path, *, trees: bool) -> None:
    """Requests come, end and are preempted while they rest and while they do not."""
    config = EngineConfig.from_options(model="random:llama:tiny", drafter="none", threads=1, max_rows=32)
    plain = load(config)
    path = HEADS[kind](tmp_path, plain.spec)
    name = f"{kind}:tree" if trees else kind
    engine = load(config.with_options(drafter=f"{name}:{path}", depth=3, policy="fixed"), target=plain.target)
    drafter: Drafter = engine.proposer.drafters[name]
    engine.policy = Napping(3, frozenset({name}))
    texts: dict[str, list[int]] = {}
    params = [SamplingParams(max_tokens=60, ignore_eos=True, temperature=t, seed=5) for t in (0.0, 0.9)]
    params.append(SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.8, repetition_penalty=1.2, seed=3))
    asked = [Request(f"r{i}", tuple(range(3 + i, 12 + 5 * i)), params[i % 3]) for i in range(7)]
    expected = [each.token_ids for each in plain.generate(asked, concurrency=3)]
    passes = watch(engine, drafter, texts)

    def preempt(_: OutputDelta) -> None:
        if len(passes) % 37 == 0:
            engine.preempt_all()

    assert [each.token_ids for each in engine.generate(asked, concurrency=3, on_output=preempt)] == expected
    assert not engine.proposer.failures[name]
    resting = [each for each in passes if each[0]]
    assert len(resting) > 20 and all(not tapped and not drafted for _, tapped, drafted in resting)
    reads = set(drafter.taps)  # type: ignore[attr-defined]
    assert {frozenset(tapped) for rests, tapped, _ in passes if not rests} == {frozenset(reads)}
    woke = [at for at in range(1, len(passes)) if passes[at - 1][0] and not passes[at][0]]
    assert woke and all(any(drafted for *_, drafted in passes[at + 2 : at + 6]) for at in woke)


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("mtp", marks=pytest.mark.slow)])
def test_a_head_that_rests_behind_another_drafter_is_not_tapped_for_and_drafts_again(kind: str, tmp_path: Path) -> None:
    config = EngineConfig.from_options(model="random:llama:tiny", drafter="none", threads=1, max_rows=32)
    plain = load(config)
    params = [SamplingParams(max_tokens=60, ignore_eos=True, temperature=t, seed=5) for t in (0.0, 0.9)]
    requests = [Request(f"r{i}", tuple(range(3 + i, 12 + 5 * i)), params[i % 2]) for i in range(7)]
    expected = [each.token_ids for each in plain.generate(requests, concurrency=3)]
    written = f"suffix..{kind}:{HEADS[kind](tmp_path, plain.spec)}"
    engine = load(config.with_options(drafter=written, depth=3, policy="fixed"), target=plain.target)
    [drafter] = engine.proposer.drafters.values()
    assert isinstance(drafter, BackedDrafter)
    passes: list[tuple[int, bool]] = []  # of each how often the head was asked before it, and whether layers are tapped
    asked, forward = 0, engine.target.decoder.forward
    propose = drafter._members[1].propose

    def proposed(of: Sequence[DraftRequest]) -> dict[str, Draft]:
        nonlocal asked
        drafts = propose(of)
        asked += any(map(len, drafts.values()))
        return drafts

    def watched(batch: PackedBatch) -> TargetOutput:
        output = forward(batch)
        passes.append((asked, bool(output.taps)))
        if len(passes) % 60 == 10:
            drafter._learned.get(NO_TENANT).until = drafter._calls + 40
        return output

    engine.target.decoder.forward = watched  # type: ignore[method-assign]
    drafter._members[1].propose = proposed  # type: ignore[method-assign,assignment]
    assert [each.token_ids for each in engine.generate(requests, concurrency=3)] == expected
    assert not drafter._members[1]._failures and not engine.proposer.failures
    tapped = [tap for _, tap in passes]
    assert tapped[0] and sum(not tap for tap in tapped) > 20
    woke = tapped.index(True, tapped.index(False))
    assert passes[woke][0] == passes[woke - 1][0] and passes[-1][0] > passes[woke][0], "it is asked some steps later"
