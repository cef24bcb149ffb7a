"""Drafts made ahead are those that the drafter would make when they are requested, whatever was verified meanwhile."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from wager.draft.ahead import AheadDrafter, OutcomeRates, _cut, below
from wager.draft.base import DrafterStoppedError
from wager.draft.combined import InnerDrafter
from wager.draft.model import DraftModel
from wager.draft.ngram import NgramDrafter
from wager.engine.core import Engine
from wager.kernels.base import TargetOutput
from wager.testing import ToyDistribution, ToyOracle, ToyTarget
from wager.testing.toy import toy_engine
from wager.types import Draft, DraftRequest, PackedBatch, Request, SamplingParams

VOCAB = 32
LAW = ToyDistribution(vocab=VOCAB)
NEAR = replace(LAW, drift=0.15, salt=4)
"""A draft model's: mostly right."""

PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=8, top_p=0.9),
    SamplingParams(repetition_penalty=1.4, presence_penalty=0.5),
]


def draft_model(*, trees: bool = False, num_blocks: int = 200, max_rows: int = 64, staged: bool = False) -> DraftModel:
    inner = InnerDrafter(NgramDrafter(), vocab=VOCAB) if staged else None
    return DraftModel(ToyTarget(NEAR, num_blocks=num_blocks, max_rows=max_rows), trees=trees, inner=inner)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("wager-draft-")]


# --- what is drafted ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_blocks", "staged"), [(200, False), (200, True), (12, False)])
@pytest.mark.parametrize("params", PARAMS)
def test_guesses_are_the_models_own_through_any_history(params: SamplingParams, num_blocks: int, staged: bool) -> None:
    rng, oracle = random.Random(num_blocks), ToyOracle(NEAR)
    inner = draft_model(num_blocks=num_blocks, staged=staged)
    drafter = AheadDrafter(inner, rows=6)
    known: dict[str, list[int]] = {}
    guessed = 0
    for step in range(60):
        if len(known) < 3:
            tokens = np.random.default_rng(step % 4).integers(0, VOCAB, 18).tolist()
            known[f"s{step}"] = tokens
            drafter.begin(f"s{step}", tokens, params)
        chosen = [name for name in known if rng.random() < 0.9]
        requests = [DraftRequest(name, len(known[name]), rng.randint(1, 4), params, seed=7) for name in chosen]
        for request, draft in zip(requests, drafter.propose(requests), strict=True):
            text = known[request.seq_id]
            size = len(draft)
            guessed += size
            assert (draft.seq_id, draft.drafter) == (request.seq_id, "model") and size <= request.depth
            own = oracle.next_tokens(request._replace(depth=size), text, 18)
            assert list(draft.tokens) == own and len(draft.scores) == size
        for name, text in known.items():  # the target's own tokens: a part of the guesses, then another or the next
            truth = ToyOracle(LAW).next_tokens(
                DraftRequest(name, len(text), rng.randint(1, 5), params, seed=7), text, 18
            )
            text += truth
            drafter.accept(name, truth[:1])
            drafter.accept(name, truth[1:])
        for name in [name for name in known if len(known[name]) > 60 or rng.random() < 0.03]:
            drafter.end(name)
            del known[name]
    figures = drafter.figures
    assert figures.hits > 8 and figures.misses > 8 and figures.branches > figures.hits
    assert guessed > 100
    for name in known:
        drafter.end(name)
    drafter._thread.give((done := threading.Event()).set)
    assert done.wait(10) and not inner._states, "no continuation is left behind by those that went on"
    drafter.close()
    assert not threads()
    inner.block_pool.check({})  # every continuation was ended


def test_a_whole_draft_and_a_second_choice_are_hits() -> None:
    """With a draft model that equals the target every round is accepted to its end, and foreseen."""
    drafter = AheadDrafter(DraftModel(ToyTarget(LAW)))
    engine = toy_engine(LAW, drafter=drafter, depth=3)
    engine.generate([Request("a", (1, 2, 3), SamplingParams(max_tokens=40, temperature=0.9, seed=3))])
    assert drafter.figures.misses == 0 and drafter.figures.hits >= 8
    drafter.close()
    inner = draft_model()
    inner.num_alternatives = 2
    inner.begin("s", [1, 2, 3], SamplingParams())
    (draft,) = inner.propose([DraftRequest("s", 3, 3, SamplingParams(), seed=0)])
    for depth, alternatives in enumerate(inner.alternatives("s")):
        logits = NEAR([1, 2, 3, *draft.tokens[:depth]])
        order = np.argsort(-logits, kind="stable")
        assert [draft.tokens[depth], *alternatives] == order[:3].tolist()
    outcomes = OutcomeRates().likely(draft, inner.alternatives("s"))
    assert {tokens for _, tokens, _ in outcomes} >= {draft.tokens, (*draft.tokens[:1], inner.alternatives("s")[1][0])}
    assert sum(chance for chance, _, _ in outcomes) < 1 and len(outcomes) == 7


class Observed(DraftModel):
    """Notes what was requested, and how many passes each call took. The first pass of the second call lasts until
    drafts are waited for."""

    def __init__(self, law: ToyDistribution) -> None:
        outer = self

        class Target(ToyTarget):
            def forward(self, batch: PackedBatch) -> TargetOutput:
                outer.passes[-1] += 1
                while len(outer.passes) == 2 and outer.thread.awaited is None:
                    time.sleep(0.001)
                return super().forward(batch)

        super().__init__(Target(law, num_blocks=200))
        self.thread: Any = None
        self.requests: list[Sequence[DraftRequest]] = []
        self.passes: list[int] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.requests.append(requests)
        self.passes.append(0)
        return super().propose(requests)


@pytest.mark.parametrize("foreseen", [True, False])
def test_drafts_that_cannot_be_what_is_waited_for_are_ended_and_not_learned_from(foreseen: bool) -> None:
    inner = Observed(LAW)
    drafter = AheadDrafter(inner)
    inner.thread = drafter._thread
    ask = DraftRequest("s", 3, 3, SamplingParams(), seed=0, min_survival=1e-9)
    drafter.begin("s", [1, 2, 3], SamplingParams())
    [draft] = drafter.propose([ask])
    likely = {draft.tokens[0], *inner.alternatives(next(iter(inner._states)))[0]}
    tokens = list(draft.tokens) if foreseen else [next(token for token in range(VOCAB) if token not in likely)]
    drafter.accept("s", tokens)
    drafter.propose([ask._replace(position=3 + len(tokens))])
    expected = [3, 4] if foreseen else [3, 1, 3]
    assert inner.passes[: len(expected)] == expected
    calls = [call[:2] for call in drafter.figures.calls]
    assert calls[0] == (1, 3) and calls[1] == ((4, 4) if foreseen else (1, 3))
    ahead = [(each.depth, each.min_survival < 1e-9) for each in inner.requests[1]]
    assert sorted(ahead) == [(3, False)] * 3 + [(4, True)], "where it draws the token itself, that is a guess as well"
    drafter.close()


def test_a_draft_made_ahead_is_cut_to_what_is_requested() -> None:
    draft = Draft.chain("branch", [1, 2, 3, 4], drafter="x", scores=[0.9, 0.4, 0.3, 0.2])
    for depth, least, tokens in ((4, 0.0, (1, 2, 3, 4)), (4, 0.5, (1, 2)), (1, 0.5, (1,)), (4, 0.95, (1,))):
        cut = _cut(DraftRequest("s", 3, depth, SamplingParams(), seed=0, min_survival=least), draft)
        assert (cut.seq_id, cut.tokens) == ("s", tokens)


# --- the production path --------------------------------------------------------------------------------------


def test_it_is_noted_whose_sequences_run() -> None:
    drafter = AheadDrafter(DraftModel(ToyTarget(LAW)))
    seen = []
    for call in (
        lambda: drafter.begin("a", [1], SamplingParams(), tenant="anna"),
        lambda: drafter.begin("b", [1], SamplingParams(), tenant="ben"),
        lambda: drafter.end("a"),
        lambda: drafter.end("b"),
    ):
        call()
        seen.append(drafter.figures.whose)
    drafter.close()
    assert seen == ["anna", None, "ben", "ben"]


def test_what_earlier_requests_taught_is_forgotten() -> None:
    inner = draft_model(trees=True)
    drafter = AheadDrafter(inner)
    engine = toy_engine(LAW, drafter=drafter, depth=3)
    for tenants in (("several",), ("anna", "ben")):
        engine.generate([Request(name, (1, 2, 3), SamplingParams(max_tokens=20), tenant=name) for name in tenants])
    figures = drafter.figures
    alone, together = figures.rates.get("several").drafts, figures.mixed.drafts
    assert alone and together and alone + together <= figures.hits + figures.misses
    assert len(drafter._thread._rates) == 3 and len(inner.rank_rates) > 0
    engine.forget_requests()
    assert not len(figures.rates) and not figures.mixed.drafts
    drafter.close()
    assert not len(drafter._thread._rates) and not len(inner.rank_rates)


def requests(params: SamplingParams) -> list[Request]:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, VOCAB, size).tolist() for size in (5, 40, 17, 33, 21)]
    prompts[3][:16] = prompts[1][:16]
    return [
        Request(f"r{i}", tuple(prompt), replace(params, max_tokens=30 + 7 * i, seed=i))
        for i, prompt in enumerate(prompts)
    ]


def texts(engine: Engine, params: SamplingParams, *, disturbed: bool = False) -> list[tuple[int, ...]]:
    """The answers of five requests together; `disturbed`: with preemptions, and other requests aborted on the way."""
    if not disturbed:
        return [answer.token_ids for answer in engine.generate(requests(params))]
    done: dict[str, list[int]] = {}
    for request in requests(params):
        engine.add(request)
    for step in range(10_000):
        if step % 5 == 1:
            engine.add(Request(f"other{step}", (1, 2, step % VOCAB), SamplingParams(max_tokens=50)))
        if step % 5 == 3:
            assert engine.abort(f"other{step - 2}")
        if step % 7 == 6:
            engine.preempt_all()
        for delta in engine.step():
            done.setdefault(delta.request_id, []).extend(delta.token_ids)
        if not engine.busy:
            break
    engine.check()
    return [tuple(done[request.id]) for request in requests(params)]


@pytest.mark.parametrize("disturbed", [False, True])
@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("params", PARAMS)
def test_texts_are_the_targets_own(params: SamplingParams, trees: bool, disturbed: bool) -> None:
    expected = texts(toy_engine(LAW), params)
    drafter = AheadDrafter(draft_model(trees=trees), rows=8)
    engine = toy_engine(LAW, drafter=drafter, depth=4, num_blocks=40)
    for _ in range(2):  # the second time with a warm prefix cache
        assert texts(engine, params, disturbed=disturbed) == expected
    figures = drafter.figures
    assert figures.hits > 10 and figures.misses > 10
    assert engine.proposer.name == "model"
    drafter.close()
    assert not threads()


# --- failures -------------------------------------------------------------------------------------------------


class Garbage(DraftModel):
    """Continuations whose drafts are nonsense."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft(r.seq_id, (VOCAB + 5, -1, 3), (-1, 7, 0), (2.0, 2.0, 2.0), "x") for r in requests]


class Dead(DraftModel):
    """Hangs after some calls, until it is released."""

    def __init__(self, target: ToyTarget, calls: int) -> None:
        super().__init__(target)
        self.calls, self.released = calls, threading.Event()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.calls -= 1
        if self.calls < 0:
            self.released.wait(20)
        return super().propose(requests)


class Failing(DraftModel):
    """Raises from every draft but its first ones."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        if max(request.position for request in requests) > 50:
            raise RuntimeError("the drafter failed")
        return super().propose(requests)


@pytest.mark.parametrize("made", [Failing, Garbage])
def test_a_drafter_that_fails_or_talks_nonsense_changes_nothing(
    made: Callable[[ToyTarget], DraftModel], caplog: pytest.LogCaptureFixture
) -> None:
    inner = made(ToyTarget(NEAR))
    drafter = AheadDrafter(inner)
    engine = toy_engine(LAW, drafter=drafter, depth=4)
    assert texts(engine, PARAMS[1]) == texts(toy_engine(LAW), PARAMS[1])
    if made is Failing:
        assert "Drafter 'model' failed and pauses for 16 steps: RuntimeError: the drafter failed" in caplog.text
    drafter.close()
    assert not inner._states


def test_nothing_is_kept_for_a_thread_that_an_error_ended() -> None:
    class Refusing(DraftModel):
        def begin(self, *args: Any, **more: Any) -> None:
            raise RuntimeError("the drafter failed")

    inner = Refusing(ToyTarget(LAW))
    drafter = AheadDrafter(inner)
    drafter.begin("a", [1, 2], SamplingParams())
    drafter._thread.join(10)
    for _ in range(20):
        drafter.begin("b", [1, 2], SamplingParams())
        drafter.end("b")
    assert drafter._thread._calls.qsize() < 3
    inner.rank_rates.get("anna")
    drafter.forget()
    assert not len(inner.rank_rates)
    with pytest.raises(DrafterStoppedError, match="RuntimeError: the drafter failed"):
        drafter.propose([DraftRequest("a", 2, 3, SamplingParams(), seed=0)])
    ended = weakref.ref(drafter._thread)
    drafter.end("a")
    drafter.begin("c", [1, 2], SamplingParams())  # gets a new one
    gc.collect()
    assert ended() is None
    drafter.close()


@pytest.mark.slow
@pytest.mark.parametrize("calls", [0, 1, 5])
def test_a_drafter_that_hangs_is_not_waited_for_again_and_no_request_is_lost(
    calls: int, caplog: pytest.LogCaptureFixture
) -> None:
    dead = Dead(ToyTarget(NEAR), calls)
    drafter = AheadDrafter(dead, patience_s=0.2)
    engine = toy_engine(LAW, drafter=drafter, depth=4)
    begin = time.monotonic()
    assert texts(engine, PARAMS[0]) == texts(toy_engine(LAW), PARAMS[0])
    assert time.monotonic() - begin < 10
    assert "TimeoutError: it has not answered for 0.2 s" in caplog.text
    assert len(threads()) == 1, "another one would use the drafter beside it"
    dead.released.set()
    for thread in threads():
        thread.join(5)
    assert not threads()


@pytest.mark.slow
def test_an_engine_that_is_dropped_leaves_no_thread() -> None:
    engine = toy_engine(LAW, drafter=AheadDrafter(draft_model()), depth=4)
    engine.generate(requests(PARAMS[0])[:2])
    assert threads()
    del engine
    gc.collect()
    assert not threads()


# --- the parts ------------------------------------------------------------------------------------------------


def test_rates_are_learned_from_rounds() -> None:
    rates, draft, alternatives = OutcomeRates(), Draft.chain("s", [1, 2, 3], drafter="x"), [(4, 5), (6, 7), (8, 9)]
    for _ in range(300):
        rates.learn(draft, [1, 2, 8])  # always the second choice at the third place
    assert rates.guess_rate(0) > 0.95 and rates.guess_rate(2) < 0.1
    assert rates.likely(draft, alternatives)[0][1:] == ((1, 2, 8), False)
    for _ in range(300):
        rates.learn(draft, [1, 2, 3, 0])
    assert rates.likely(draft, alternatives)[0][1:] == ((1, 2, 3), True)
    tree = Draft("s", (1, 2, 3), (-1, -1, 0), (0.5, 0.4, 0.1), "x")
    assert rates.likely(tree, ()) == [(0.4, (2,), True), (0.1, (1, 3), True)]


def test_what_lies_below_a_node() -> None:
    tree = Draft("s", (1, 2, 3, 4, 5), (-1, 0, 0, 2, -1), (0.8, 0.4, 0.3, 0.2, 0.1), "x")
    rest = below(tree, 0)
    assert rest.tokens == (2, 3, 4) and rest.parents == (-1, -1, 1)
    assert np.allclose(rest.scores, (0.5, 0.375, 0.25)) and below(tree, -1) is tree and len(below(tree, 4)) == 0
