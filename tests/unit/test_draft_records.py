"""Drafts recorded along plain answers give the rounds of an engine that drafts to a fixed depth, exactly."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from faulty_drafters import FailingDrafter

from wager.draft.base import Drafter
from wager.draft.lookup import LookupDrafter, LookupSources
from wager.draft.model import DraftModel
from wager.draft.ngram import NgramDrafter
from wager.errors import UsageError, WagerError
from wager.profiling.acceptance import AnswerPath, DraftedAnswer, PositionDraft, record_drafts, replay_drafts
from wager.testing import SetAcceptanceDrafter, ToyDistribution, ToyOracle, ToyTarget
from wager.testing.toy import toy_engine
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
    "suffix:tree": lambda: LookupDrafter("suffix:tree", LookupSources(4, 0, None), trees=True),
    "model:tree": lambda: DraftModel(ToyTarget(SIMILAR), vocab=VOCAB, trees=True),
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


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_recorded_rounds_are_those_of_the_engine_at_every_depth(name: str, params: SamplingParams) -> None:
    """Of a tree, which is recorded anew for each number of nodes, those of an engine that verifies as many."""
    make, answered, trees = DRAFTERS[name], requests(params), name.endswith(":tree")
    drafted = branched = 0
    for depth in (1, 3, 7) if trees else (1, 2, 4, make().max_depth):
        engine = toy_engine(TEXT, drafter=make(), num_blocks=200)
        recording = record_drafts(engine, answered, depth=depth if trees else None, concurrency=1 if trees else 4)
        assert (recording.depth, recording.trees) == (depth if trees else make().max_depth, trees)
        emitted, answers = engine_rounds(answered, make(), depth)
        for answer, recorded, per_round in zip(answers, recording.answers, emitted, strict=True):
            rounds = recorded.rounds_at(depth)
            starts = [each.position for each in rounds] + [len(answer.token_ids)]
            assert [end - start for start, end in zip(starts, starts[1:], strict=False)] == per_round
            assert sum(each.drafted for each in rounds) == answer.stats.drafted
            assert sum(each.accepted for each in rounds) == answer.stats.accepted
            drafted += answer.stats.drafted
            branched += sum(bool(draft.parents) for draft in recorded.drafts)
    assert drafted > 100 and (branched > 50) == trees


@pytest.mark.slow
@pytest.mark.parametrize("tree", [False, True])
def test_drafts_along_recorded_answers_are_those_of_the_engine_that_gave_them(tree: bool) -> None:
    """Those before included, which the drafter remembers."""
    makers: list[Callable[[], Drafter]] = [lambda: LookupDrafter("suffix", LookupSources(8, 4096, None), trees=tree)]
    for make in makers if tree else [*makers, NgramDrafter]:
        engine = toy_engine(TEXT, drafter=make(), num_blocks=200)
        every = requests(SamplingParams(max_tokens=300, temperature=0, seed=3))
        found = zip(every, engine_rounds(every, make(), 1)[1], strict=True)
        ended = [(request, answer) for request, answer in found if answer.finish_reason == "stop"]
        assert len(ended) > 3
        asked, answered = [request for request, _ in ended], [(each.prompt, answer.token_ids) for each, answer in ended]
        expected = record_drafts(engine, asked, concurrency=1)
        assert replay_drafts(make(), answered) == expected
        assert sum(len(draft.tokens) for answer in expected.answers for draft in answer.drafts) > 50


def accepted_of_the_likeliest(draft: PositionDraft, ahead: list[int], guesses: int) -> tuple[int, bool]:
    """How many tokens of the answer the likeliest guesses hold, node by node, and whether one was wrong there."""
    kept: list[int] = []
    while len(kept) < min(guesses, len(draft.tokens)):
        free = [node for node in range(len(draft.tokens)) if node not in kept]
        open_nodes = [node for node in free if draft.parents[node] in (-1, *kept)]
        kept.append(max(open_nodes, key=lambda node: (draft.scores[node], -node)))
    at, count = -1, 0
    while True:
        below = [node for node in kept if draft.parents[node] == at]
        right = [node for node in below if ahead[count : count + 1] == [draft.tokens[node]]]
        if not right:
            return count, bool(below)
        at, count = right[0], count + 1


def test_acceptance_of_every_number_of_guesses_agrees_with_enumeration() -> None:
    rng = np.random.default_rng(3)
    rejected = accepted = 0
    for _ in range(300):
        size = int(rng.integers(1, 10))
        parents = [-1, *(int(rng.integers(-1, node)) for node in range(1, size))]
        scores: list[float] = []
        tokens: list[int] = []
        for node, parent in enumerate(parents):
            above = 1.0 if parent < 0 else scores[parent]
            scores.append(above * float(rng.choice([1.0, 0.5, 0.3])))
            taken = [tokens[other] for other in range(node) if parents[other] == parent]
            tokens.append(int(rng.choice([token for token in range(12) if token not in taken][: 3 + len(taken)])))
        draft = PositionDraft(size, tuple(tokens), tuple(scores), tuple(parents))
        ahead = rng.integers(0, 3, 6).tolist()
        path = AnswerPath.of(draft, ahead)
        for guesses in range(size + 2):
            count, wrong = accepted_of_the_likeliest(draft, ahead, guesses)
            assert path.accepted(guesses) == count
            assert (path.guessed[count] <= guesses) == wrong
            accepted += count
            rejected += wrong
    assert min(accepted, rejected) > 300


def test_a_missing_estimate_in_a_trace_is_the_measured_survival() -> None:
    answer = DraftedAnswer.of(
        (4, 5, 6), [PositionDraft(2, (4, 9)), PositionDraft(1, (6,), (0.7,)), PositionDraft(0)], prompt_tokens=3
    )
    assert answer.trace_values((0.6, 0.3)) == {"right": [1, 0, 0], "scores": [[0.6, 0.3], [0.7], []]}


def test_what_cannot_be_measured_is_refused() -> None:
    def record(drafter: Drafter, depth: int | None = None) -> None:
        record_drafts(toy_engine(TEXT, drafter=drafter, num_blocks=200), requests(GREEDY, count=2), depth=depth)

    with pytest.raises(UsageError, match="Depth 16 is out of range: ngram drafts at most 15"):
        record(NgramDrafter(), 16)
    with pytest.raises(WagerError, match="'failing' failed"):
        record(FailingDrafter())
