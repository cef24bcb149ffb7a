"""The rounds that are recorded add up to the answer and its stats, and say of each guess what became of it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from faulty_drafters import DuplicateSiblingsDrafter

from wager.economics.policy.base import draft_selector
from wager.economics.policy.heuristics import FixedDepth
from wager.engine.core import Engine
from wager.engine.rounds import Round, RoundRecorder
from wager.testing import (
    AdversaryDrafter,
    FakeClock,
    OracleDrafter,
    RandomTreeDrafter,
    SetAcceptanceDrafter,
    ToyDistribution,
    ToyOracle,
)
from wager.testing.toy import toy_engine
from wager.trace import Trace
from wager.types import Completion, Draft, OutputDelta, Request, SamplingParams

LAW = ToyDistribution(vocab=48, order=2, sharpness=6.0, eos=3, eos_bias=-1.0)
DRAFTERS = {
    "random-tree": lambda: RandomTreeDrafter(LAW.vocab, oracle=ToyOracle(LAW)),
    "oracle": lambda: OracleDrafter(ToyOracle(LAW)),
    "adversary": lambda: AdversaryDrafter(LAW.vocab, oracle=ToyOracle(LAW)),
    "set": lambda: SetAcceptanceDrafter(LAW.vocab, [0.8, 0.6, 0.4], oracle=ToyOracle(LAW)),
    "twins": lambda: DuplicateSiblingsDrafter(),
}
PARAMS = {
    "greedy": SamplingParams(max_tokens=40, seed=1),
    "sampled": SamplingParams(max_tokens=40, temperature=0.8, seed=2),
    "endless": SamplingParams(max_tokens=43, temperature=1.0, ignore_eos=True, seed=6),
}


def requests() -> list[Request]:
    prompts = [(1, 2, 3), tuple(range(10, 42)), tuple(itertools.islice(itertools.cycle((9, 8, 7)), 50))]
    return [
        Request(f"{name}-{i}", prompt, params) for name, params in PARAMS.items() for i, prompt in enumerate(prompts)
    ]


class EverySecondLeaf(FixedDepth):
    """Drafts at a fixed depth, and admits all guesses but every second leaf of each draft."""

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        kept = {}
        for seq_id, draft in super().admit(drafts, budget).items():
            leaves = [node for node in range(len(draft)) if node not in draft.parents]
            nodes = [node for node in range(len(draft)) if node not in leaves[::2]]
            if nodes:
                kept[seq_id] = draft_selector.keep(draft, nodes)
        return kept


Answer = tuple[Completion, list[Round]]


def record(engine: Engine, wanted: Iterable[Request], *, preempt_every: int | None = None) -> list[Answer]:
    """Every answer with its rounds."""
    recorder, rounds, deltas = RoundRecorder.attach(engine), defaultdict(list), itertools.count(1)

    def take(delta: OutputDelta) -> None:
        if found := recorder.take(delta):
            rounds[delta.request_id, delta.index].append(found)
        if preempt_every and next(deltas) % preempt_every == 0:
            engine.preempt_all()

    return [(done, rounds[done.request_id, done.index]) for done in engine.generate(wanted, on_output=take)]


def check(answer: Completion, rounds: Sequence[Round]) -> None:
    """The rounds of one answer against its tokens, its drafters and its stats."""
    assert tuple(itertools.chain(*(item.emitted for item in rounds))) == answer.token_ids
    stats = answer.stats
    assert len(rounds) == stats.rounds
    assert sum(len(item.accepted) for item in rounds) == stats.accepted
    assert sum(len(item.accepted) + len(item.discarded) for item in rounds) == stats.drafted
    own = sum(item.target_token is not None for item in rounds)
    assert stats.accepted + own == stats.completion_tokens
    by = [[item.draft.drafter] * len(item.accepted) + [""] * (item.target_token is not None) for item in rounds]
    assert tuple(itertools.chain(*by)) == answer.drafted_by
    for item in rounds:
        parts = [*item.accepted, *item.discarded, *item.unverified]
        assert sorted(parts) == list(range(len(item.draft)))
        assert item.verified == tuple(sorted([*item.accepted, *item.discarded]))
        assert tuple(item.draft.tokens[node] for node in item.accepted) == item.emitted[: len(item.accepted)]
        assert [item.draft.parents[node] for node in item.accepted] == [-1, *item.accepted][: len(item.accepted)]


@pytest.mark.parametrize("policy", [EverySecondLeaf(7), FixedDepth(5)], ids=["leaves left out", "fixed"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_rounds_add_up_to_the_answer_and_its_stats(drafter: str, policy: FixedDepth) -> None:
    """And a recorder changes no decision."""
    engine, bare = (
        toy_engine(LAW, drafter=DRAFTERS[drafter](), policy=policy, depth=7, num_blocks=256, max_rows=128)
        for _ in range(2)
    )
    recorded = record(engine, requests())
    for (answer, rounds), plain in zip(recorded, bare.generate(requests()), strict=True):
        check(answer, rounds)
        assert answer.token_ids == plain.token_ids
        assert (answer.stats.rounds, answer.stats.drafted) == (plain.stats.rounds, plain.stats.drafted)
    items = [item for _, rounds in recorded for item in rounds]
    assert any(item.unverified for item in items) == isinstance(policy, EverySecondLeaf)
    if drafter != "oracle":
        assert any(item.corrected for item in items)
    if drafter == "random-tree":
        assert any(not item.draft.is_chain and item.accepted and item.discarded for item in items)
    assert engine.policy.explain() == policy.explain()


def test_each_guess_of_a_chain_is_judged_by_the_text() -> None:
    """Computed from the text alone: guesses count up to the first that differs from it."""
    engine = toy_engine(LAW, drafter=DRAFTERS["set"](), depth=4, num_blocks=256, max_rows=128)
    seen = {"corrected": 0, "bonus": 0, "cut": 0}
    for answer, rounds in record(engine, requests()):
        done = 0
        for item in rounds:
            text, guesses = answer.token_ids[done:], item.draft.tokens
            right = next((i for i, guess in enumerate(guesses) if [guess] != list(text[i : i + 1])), len(guesses))
            assert item.accepted == tuple(range(right))
            assert item.discarded == tuple(range(right, len(guesses)))
            assert item.target_token == (text[right] if right < len(text) else None)
            assert item.corrected == (right < len(guesses) and right < len(text))
            seen["corrected"] += item.corrected
            seen["bonus"] += right == len(guesses)
            seen["cut"] += right == len(text)
            done += len(item.emitted)
    assert min(seen.values()) > 0, seen


def test_choices_preemption_and_prompts_in_chunks() -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=9, n=3, ignore_eos=True)
    wanted = [Request("chunked", tuple(range(10, 40)), params), Request("short", (1, 2), params)]
    engine = toy_engine(LAW, drafter=DRAFTERS["random-tree"](), depth=4, num_blocks=64, max_rows=9)
    recorded = record(engine, wanted, preempt_every=7)
    assert [(answer.request_id, answer.index) for answer, _ in recorded] == [
        (name, index) for name in ("chunked", "short") for index in range(3)
    ]
    for answer, rounds in recorded:
        check(answer, rounds)
        assert max(item.rows for item in rounds) <= 9
    assert sum(answer.stats.preemptions for answer, _ in recorded) > 5


def test_the_output_of_an_abort_has_no_round() -> None:
    engine = toy_engine(LAW, drafter=DRAFTERS["oracle"](), depth=2, max_rows=32)
    recorder = RoundRecorder.attach(engine)
    engine.add(Request("a", (1, 2), PARAMS["endless"]))
    [delta] = engine.step()
    found = recorder.take(delta)
    assert found is not None
    assert found.rows == 2 + 2
    engine.abort("a")
    [last] = engine.step()
    assert (last.finish_reason, recorder.take(last)) == ("abort", None)


def test_seconds_are_those_of_the_step_in_three_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    drafter, policy = DRAFTERS["oracle"](), FixedDepth(2)
    engine = toy_engine(LAW, drafter=drafter, depth=2, max_rows=32, trace=Trace(clock))

    def slow(owner: Any, name: str, seconds: float) -> None:
        call = getattr(owner, name)

        def slower(*given: object) -> object:
            clock.advance(seconds)
            return call(*given)

        monkeypatch.setattr(owner, name, slower)

    slow(drafter, "propose", 10.0)
    slow(policy, "plan", 1.0)
    slow(engine.runner.target, "forward", 100.0)
    engine.policy = policy
    for _, rounds in record(engine, [Request("a", (1, 2), SamplingParams(max_tokens=6, ignore_eos=True))]):
        assert [(r.seconds.draft, r.seconds.forward, r.seconds.rest) for r in rounds] == [(10.0, 100.0, 1.0)] * 2
        assert [r.seconds.total for r in rounds] == [111.0] * 2
