"""Drafts recorded along plain answers give the rounds of an engine that drafts to a fixed depth, exactly, and the trace
that is written of them gives the same rounds in `wager replay`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from wager.draft.base import Drafter
from wager.draft.model import DraftModel
from wager.draft.ngram import NgramDrafter
from wager.economics.policy.fixed import FixedDepth
from wager.economics.simulation.published_latency import PublishedLatency
from wager.economics.simulation.server import SimulatedServer
from wager.economics.simulation.traces import RecordedTraces
from wager.economics.simulation.workload import Workload
from wager.errors import UsageError, WagerError
from wager.profiling.draft_records import DraftedAnswer, PositionDraft, record_drafts
from wager.testing import FailingDrafter, RandomTreeDrafter, SetAcceptanceDrafter, ToyDistribution, ToyOracle, ToyTarget
from wager.testing.engines import toy_engine
from wager.types import Completion, OutputDelta, Request, SamplingParams

VOCAB = 12
TEXT = ToyDistribution(vocab=VOCAB, order=2, sharpness=9.0, memory=0.0, eos=0, eos_bias=-1.0)
"""A chain of few states, so that lookup finds continuations; texts end by themselves or by length."""

SIMILAR = ToyDistribution(vocab=VOCAB, order=2, sharpness=9.0, memory=0.0, eos=0, eos_bias=-1.0, drift=0.5, salt=7)

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": NgramDrafter,
    "ngram:1": lambda: NgramDrafter(1),
    "set": lambda: SetAcceptanceDrafter(VOCAB, (0.8, 0.6, 0.5), oracle=ToyOracle(TEXT)),
    "model": lambda: DraftModel(ToyTarget(SIMILAR), vocab=VOCAB),
}


def requests(params: SamplingParams, *, count: int = 10) -> list[Request]:
    rng = np.random.default_rng(5)
    return [Request(f"q{i}", tuple(rng.integers(1, VOCAB, 6 + i).tolist()), params) for i in range(count)]


GREEDY = SamplingParams(max_tokens=60, seed=3)
SAMPLED = SamplingParams(max_tokens=60, temperature=0.8, top_k=9, seed=3)


def engine_rounds(answered: list[Request], drafter: Drafter, depth: int) -> tuple[list[list[int]], list[Completion]]:
    """Tokens emitted in each round of each answer by an engine that verifies drafts of a fixed depth."""
    emitted: dict[str, list[int]] = {request.id: [] for request in answered}

    def count(delta: OutputDelta) -> None:
        if delta.token_ids:
            emitted[delta.request_id].append(len(delta.token_ids))

    answers = toy_engine(TEXT, drafter=drafter, depth=depth, num_blocks=200).generate(
        answered, concurrency=1, on_output=count
    )
    return [emitted[request.id] for request in answered], answers


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_recorded_rounds_are_those_of_the_engine_at_every_depth(name: str, params: SamplingParams) -> None:
    answered = requests(params)
    recording = record_drafts(toy_engine(TEXT, drafter=DRAFTERS[name](), num_blocks=200), answered, concurrency=4)
    assert recording.depth == DRAFTERS[name]().max_depth
    drafted = 0
    for depth in (1, 2, 4, recording.depth):
        emitted, answers = engine_rounds(answered, DRAFTERS[name](), depth)
        for answer, recorded, per_round in zip(answers, recording.answers, emitted, strict=True):
            rounds = recorded.rounds_at(depth)
            starts = [each.position for each in rounds] + [len(answer.token_ids)]
            assert [end - start for start, end in zip(starts, starts[1:], strict=False)] == per_round
            assert sum(each.drafted for each in rounds) == answer.stats.drafted
            assert sum(each.accepted for each in rounds) == answer.stats.accepted
            drafted += answer.stats.drafted
    assert drafted > 100


@pytest.mark.parametrize("name", ["ngram", "model"])
def test_replaying_the_trace_at_a_fixed_depth_gives_the_rounds_of_the_engine(name: str, tmp_path: Path) -> None:
    answered = requests(SAMPLED)
    drafter = DRAFTERS[name]()
    recording = record_drafts(toy_engine(TEXT, drafter=drafter, num_blocks=200), answered, concurrency=4)
    rows = [
        {"id": i, "prompt_tokens": each.prompt_tokens, "tokens": len(each.drafts),
         "drafters": {drafter.name: each.trace_values((0.5,) * 15)}}
        for i, each in enumerate(recording.answers)
    ]  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    traces = RecordedTraces.read(path)
    for depth in (1, 3, recording.depth):
        _, answers = engine_rounds(answered, DRAFTERS[name](), depth)
        workload = Workload(concurrency=1, requests=len(answers))
        result = SimulatedServer(
            traces, PublishedLatency({drafter.name: "free"}), policy=FixedDepth(depth), workload=workload
        ).run()
        assert result.tokens == sum(len(answer.token_ids) for answer in answers)
        assert result.rounds == sum(answer.stats.rounds for answer in answers)


def test_the_text_is_that_of_plain_decoding() -> None:
    answered = requests(SAMPLED, count=3)
    plain = toy_engine(TEXT, num_blocks=200).generate(answered)
    recording = record_drafts(toy_engine(TEXT, drafter=NgramDrafter(), num_blocks=200), answered)
    assert [len(answer.drafts) for answer in recording.answers] == [len(answer.token_ids) for answer in plain]


def test_a_missing_estimate_in_a_trace_is_the_measured_survival() -> None:
    answer = DraftedAnswer.of(
        (4, 5, 6), [PositionDraft(2, (4, 9)), PositionDraft(1, (6,), (0.7,)), PositionDraft(0)], prompt_tokens=3
    )
    assert answer.trace_values((0.6, 0.3)) == {"right": [1, 0, 0], "scores": [[0.6, 0.3], [0.7], []]}


def test_what_cannot_be_measured_is_refused() -> None:
    def record(drafter: Drafter, depth: int | None = None) -> None:
        record_drafts(toy_engine(TEXT, drafter=drafter, num_blocks=200), requests(GREEDY, count=2), depth=depth)

    with pytest.raises(UsageError, match="'random-tree' makes trees"):
        record(RandomTreeDrafter(VOCAB))
    with pytest.raises(UsageError, match="Depth 16 is out of range: ngram drafts at most 15"):
        record(NgramDrafter(), 16)
    with pytest.raises(WagerError, match="'failing' failed"):
        record(FailingDrafter())
