"""Drafters that fail, in any call, once or always: every text stays that of plain decoding, only the sequence or the
drafter to blame is left out, and it is used again when a pause is over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from blank_heads import HEADS
from every_drafter import every_drafter
from grammar_toys import COMPILER
from grammar_toys import LAW as JSON_LAW

from wager.config import EngineConfig
from wager.draft.ahead import AheadDrafter
from wager.draft.base import ComputedRows, Drafter
from wager.draft.combined import InnerDrafter, MergedDrafter
from wager.draft.model import DraftModel
from wager.draft.ngram import NgramDrafter
from wager.economics.policy.adaptive import Adaptive
from wager.economics.policy.base import DrafterCapabilities
from wager.economics.surface import LatencySurface
from wager.engine.proposer import FIRST_PAUSE, LONGEST_PAUSE
from wager.kernels.base import TargetOutput
from wager.loading.load import load
from wager.testing import FakeClock, OracleDrafter, RandomTreeDrafter, ToyDistribution, ToyOracle, ToyTarget
from wager.testing.drafters import HistoryDrafter
from wager.testing.toy import toy_engine
from wager.trace import Trace
from wager.types import (
    Completion,
    Draft,
    DraftRequest,
    Grammar,
    Request,
    RequestSpeculation,
    SamplingParams,
)

LAW = ToyDistribution(vocab=48, order=2, sharpness=6.0)
KINDS = ("begin", "propose", "observe", "accept", "end", "read", "read_rows", "answer")

Failing = Callable[[str, frozenset[str]], bool]
"""Whether a call of a kind about some sequences fails."""


class FaultyDrafter(HistoryDrafter):
    """Drafts as `inner` and raises where `fails` says so. `wrong` are calls that no engine may make."""

    name = "faulty"
    reads_rows = True
    taps = ()

    def __init__(self, inner: HistoryDrafter, fails: Failing) -> None:
        super().__init__()
        self.inner, self.fails = inner, fails
        self.makes_trees = inner.makes_trees
        self.wrong: list[str] = []
        self.raised = self.asked = 0

    def _call(self, kind: str, *seq_ids: str) -> bool:
        if self.fails(kind, frozenset(seq_ids)):
            self.raised += 1
            if kind != "answer":
                raise RuntimeError(f"{kind} failed")
            return False
        return True

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = "") -> None:
        if seq_id in self.inner.known:
            self.wrong.append(f"{seq_id} begins again")
        self._call("begin", seq_id)
        self.inner.begin(seq_id, tokens, params)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.asked += len(requests)
        for request in requests:
            if len(self.inner.known.get(request.seq_id, ())) != request.position:
                self.wrong.append(f"{request.seq_id} is not up to date")
        self._call("propose", *(request.seq_id for request in requests))
        drafts = [replace(draft, drafter=self.name) for draft in self.inner.propose(requests)]
        good = self._call("answer", *(request.seq_id for request in requests))
        return drafts if good else [*drafts, None]  # type: ignore[list-item]

    def observe(self, output: TargetOutput) -> None:
        self._call("observe")

    def read(self, output: TargetOutput, computed: Sequence[ComputedRows]) -> None:
        self._call("read")

    def read_rows(self, output: TargetOutput, tokens: Sequence[int]) -> None:
        self._call("read_rows")

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        if seq_id not in self.inner.known:
            self.wrong.append(f"{seq_id} is unknown")
            return
        self._call("accept", seq_id)
        self.inner.accept(seq_id, tokens)

    def end(self, seq_id: str) -> None:
        self.inner.end(seq_id)
        self._call("end", seq_id)


def oracle() -> HistoryDrafter:
    return OracleDrafter(ToyOracle(LAW))


def trees() -> HistoryDrafter:
    return RandomTreeDrafter(LAW.vocab, oracle=ToyOracle(LAW))


def fails_at(kind: str, *calls: int) -> Failing:
    """These calls of a kind fail, counted from 1."""
    made = iter(range(1, 1_000_000))
    return lambda called, _: called == kind and next(made) in calls


def always(kind: str) -> Failing:
    return lambda called, _: called == kind


def requests(count: int = 6, tokens: int = 40, first: int = 0) -> list[Request]:
    """Greedy, sampled and with penalties, of different lengths."""
    kinds = [
        SamplingParams(max_tokens=tokens, ignore_eos=True),
        SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.8, seed=5),
        SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.9, repetition_penalty=1.2, seed=6),
    ]
    made = range(first, first + count)
    return [Request(f"r{i}", tuple((7 * i + j) % 48 for j in range(3 + i % 5)), kinds[i % 3]) for i in made]


def ids(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [each.token_ids for each in completions]


def plain(asked: Sequence[Request]) -> list[tuple[int, ...]]:
    return ids(toy_engine(LAW).generate([replace(each, speculation=None) for each in asked]))


def drafted(completions: Sequence[Completion]) -> list[int]:
    return [each.stats.drafted for each in completions]


# ---- once -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("made", [oracle, trees])
@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_that_fails_once_is_used_again(
    kind: str, made: Callable[[], HistoryDrafter], concurrency: int
) -> None:
    asked = requests(12)
    drafter = FaultyDrafter(made(), fails_at(kind, 3))
    engine = toy_engine(LAW, drafter=drafter)
    answers = engine.generate(asked, concurrency=concurrency)
    assert ids(answers) == plain(asked)
    assert drafter.raised == engine.proposer.failures["faulty"] == 1 and not drafter.wrong
    assert min(drafted(answers)[-4:]) > 5, "by the last ones it is used"
    assert not engine.proposer.failed and not drafter.inner.known
    engine.check()


def test_only_the_sequence_it_failed_for_is_left_out() -> None:
    """Of four together the first accept of one fails, behind four guesses; nobody waits."""
    asked = requests(4)
    drafter = FaultyDrafter(oracle(), lambda kind, seq_ids: kind == "accept" and "r2" in seq_ids)
    engine = toy_engine(LAW, drafter=drafter)
    answers = engine.generate(asked)
    assert ids(answers) == plain(asked) and not drafter.wrong and drafter.raised == 1
    assert [each.stats.rounds for each in answers] == [8, 8, 36, 8] and not engine.proposer.failed


def test_the_one_to_blame_among_several_is_found() -> None:
    asked = requests(4, tokens=120)
    drafter = FaultyDrafter(oracle(), lambda kind, seq_ids: kind == "propose" and "r1" in seq_ids)
    engine = toy_engine(LAW, drafter=drafter)
    answers = engine.generate(asked)
    assert ids(answers) == plain(asked) and not drafter.wrong
    assert drafter.raised == 2, "together, and alone"
    assert drafted(answers)[1] == 0
    without = (120 - FIRST_PAUSE - 1) / 5
    assert all(each.stats.rounds < FIRST_PAUSE + without + 5 for each in answers if each.request_id != "r1")


def test_a_request_that_names_a_drafter_that_pauses_is_decoded_plainly() -> None:
    failing = True
    drafter = FaultyDrafter(oracle(), lambda kind, _: kind == "observe" and failing)
    engine = toy_engine(LAW, drafter=drafter, others=[NgramDrafter()])
    engine.generate(requests(1, tokens=3))
    assert list(engine.proposer.failed) == ["faulty"] and engine.proposer.name == "ngram"
    failing = False
    asked = [
        replace(each, id=f"x{each.id}", speculation=RequestSpeculation("faulty", 3)) for each in requests(3, tokens=60)
    ]
    answers = engine.generate(asked)
    assert ids(answers) == plain(asked)
    assert not engine.proposer.failed and engine.proposer.name == "faulty,ngram"
    assert all(count > 10 for count in drafted(answers)), "and with drafts as soon as the pause is over"


# ---- always ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pauses_grow_while_it_fails_soon_and_begin_anew_when_it_has_worked() -> None:
    failing = True
    drafter = FaultyDrafter(oracle(), lambda kind, _: kind == "observe" and failing)
    engine = toy_engine(LAW, drafter=drafter, num_blocks=200)
    steps: list[int] = []  # how often it had failed by then
    engine.on_step = lambda _: steps.append(drafter.raised)

    def tried() -> list[int]:
        """Steps between failures."""
        failed = [at for at, count in enumerate(steps) if count > (steps[at - 1] if at else 0)]
        return [after - before for before, after in zip(failed, failed[1:], strict=False)]

    engine.generate([replace(each, params=SamplingParams(max_tokens=180)) for each in requests(1)])
    assert tried() == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE] and steps[0] == 1
    assert LONGEST_PAUSE == 2**8 * FIRST_PAUSE
    failing = False
    while engine.proposer.failed or len(steps) < 1500:
        engine.generate([replace(each, params=SamplingParams(max_tokens=480)) for each in requests(1)])
    failing = True
    steps.clear()
    engine.generate([replace(each, params=SamplingParams(max_tokens=60)) for each in requests(1)])
    assert steps[0] == steps[FIRST_PAUSE - 1] == steps[FIRST_PAUSE] - 1


@pytest.mark.slow
def test_what_a_failing_drafter_was_to_do_another_one_does() -> None:
    """The adaptive policy does not plan with one that pauses, says so, and plans with it again afterwards."""
    clock, failing = FakeClock(), True
    drafter = FaultyDrafter(oracle(), lambda kind, _: kind == "propose" and failing)
    other = OracleDrafter(ToyOracle(LAW))
    policy = Adaptive(
        LatencySurface([1, 2, 4, 8, 16], [5e-3, 5.1e-3, 5.2e-3, 5.4e-3, 6e-3]),
        drafters={"faulty": DrafterCapabilities(8), "oracle": DrafterCapabilities(1)},
    )
    engine = toy_engine(LAW, drafter=drafter, others=[other], policy=policy, depth=8, trace=Trace(clock))
    forward = engine.runner.target.forward

    def timed(batch):  # type: ignore[no-untyped-def]
        clock.advance(5e-3)
        return forward(batch)

    engine.runner.target.forward = timed  # type: ignore[method-assign]
    asked = requests(40, tokens=60)
    answers, said = [], list[str]()
    engine.on_step = lambda _: said.append(engine.policy.explain())
    answers += engine.generate(asked[:20], concurrency=2)
    paused = [text for text in said if "Failed, and not asked until a pause is over: faulty." in text]
    assert FIRST_PAUSE < len(paused) < len(said)
    by = [name for each in answers[10:] for name in each.drafted_by]
    assert by.count("oracle") > 0.3 * len(by) and "faulty" not in by
    failing = False
    answers += engine.generate(asked[20:], concurrency=2)
    later = requests(100, tokens=60, first=40)
    answers += engine.generate(later, concurrency=2)
    assert not engine.proposer.failed and "Failed, and not" not in said[-1]
    assert "faulty" in [name for each in answers[-20:] for name in each.drafted_by]
    assert ids(answers) == plain([*asked, *later])


# ---- threads, and drafters in others ------------------------------------------------------------------------------


class FailingModel(DraftModel):
    """Fails in some calls of `propose`, counted from 1."""

    def __init__(self, *calls: int, **options: object) -> None:
        super().__init__(ToyTarget(replace(LAW, drift=0.1, salt=3), num_blocks=200, max_rows=64), **options)  # type: ignore[arg-type]
        self.calls, self.made = calls, 0

    def propose(self, asked: Sequence[DraftRequest]) -> list[Draft]:
        self.made += 1
        if self.made in self.calls:
            raise RuntimeError("the model failed")
        return super().propose(asked)


@pytest.mark.slow
@pytest.mark.parametrize("made", [FailingModel, lambda *calls: FailingModel(*calls, trees=True)])
def test_one_with_threads_gets_a_new_one(made: Callable[..., DraftModel], caplog: pytest.LogCaptureFixture) -> None:
    inner = made(5, 20)
    drafter = AheadDrafter(inner)
    engine = toy_engine(LAW, drafter=drafter, num_blocks=200)
    asked = requests(40, tokens=60)
    answers = engine.generate(asked, concurrency=3)
    assert ids(answers) == plain(asked)
    assert engine.proposer.failures["model"] == 2 and not engine.proposer.failed
    assert min(drafted(answers)[-6:]) > 10 and drafter.figures.hits > 50
    assert "Drafter 'model' failed and pauses for 16 steps: RuntimeError: the model failed" in caplog.text
    drafter.close()
    assert inner.block_pool.num_free_blocks == inner.block_pool.num_blocks, "nothing of before is left"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["begin", "propose", "observe", "accept", "end", "read_rows"])
def test_one_beside_another_is_asked_again(kind: str) -> None:
    part = FaultyDrafter(oracle(), fails_at(kind, 4))
    engine = toy_engine(LAW, drafter=MergedDrafter([part, NgramDrafter()], vocab=LAW.vocab), num_blocks=200)
    asked = requests(20)
    answers = engine.generate(asked, concurrency=3)
    assert ids(answers) == plain(asked)
    assert part.raised == 1 and not part.wrong and not engine.proposer.failures["faulty//ngram"]
    assert all(each.stats.rounds < 15 for each in answers[-4:]), "its guesses are right"


def test_one_that_works_for_another_is_asked_again() -> None:
    part = FaultyDrafter(oracle(), fails_at("propose", 4))
    drafter = DraftModel(ToyTarget(LAW, num_blocks=200, max_rows=64), inner=InnerDrafter(part, vocab=LAW.vocab))
    engine = toy_engine(LAW, drafter=drafter, num_blocks=200)
    asked = requests(8)
    assert ids(engine.generate(asked, concurrency=3)) == plain(asked)
    assert part.raised == 1 and not part.wrong and part.asked > 40


# ---- heads ----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def seen(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, "wager"):
        yield


@pytest.mark.parametrize("method", ["read", "propose", "accept"])
@pytest.mark.parametrize("name", [*HEADS, "eagle3:tree", "medusa:tree", "dflash:tree"])
def test_heads_that_fail_draft_again(name: str, method: str, tmp_path: Path) -> None:
    """A head that failed is shown states again, and drafts, for running requests too, when its pause is over."""
    config = EngineConfig.from_options(model="random:llama:tiny", drafter="none", threads=1, max_rows=32)
    base = load(config)
    path = HEADS[name.partition(":")[0]](tmp_path, base.spec)
    engine = load(config.with_options(drafter=f"{name}:{path}", depth=3, policy="fixed"), target=base.target)
    drafter: Drafter = engine.proposer.drafters[name]
    working, calls = getattr(drafter, method), 0

    def fails_once(*given: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise MemoryError("no room")
        return working(*given)

    setattr(drafter, method, fails_once)
    sampled = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.9, seed=5)
    asked = [Request(f"r{i}", tuple(range(3 + i, 12 + 5 * i)), sampled) for i in range(3)]
    late: list[int] = []
    engine.on_step = lambda record: late.append(record.drafted)
    answers = engine.generate(asked)
    assert ids(answers) == ids(base.generate(asked))
    assert engine.proposer.failures[name] == 1 and not engine.proposer.failed
    assert sum(late[45:55]) > 5, "drafts again"


# ---- what failed before ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("verify", ["match", "rejection"])
def test_trees_keep_within_the_context(verify: str, threads: int, tmp_path: Path) -> None:
    """60 tokens and 36 more fill it: the rows of a tree behind the last ones must not lie beyond."""
    base = {"model": "random:llama:tiny", "threads": 1, "max_rows": 64, "max_context": 96}
    engine = load(EngineConfig.from_options(**base, drafter="none"))
    written = every_drafter("random:llama:tiny", tmp_path)
    names = ["model:tree", "layers:tree"]
    if not threads:
        names += ["eagle3:tree", "mtp:tree", "medusa:tree", "dflash:tree"]
    elif verify != "match":
        return
    asked = [
        Request(
            f"r{i}",
            tuple((7 * i + j * j) % 83 for j in range(60 - 3 * i)),
            SamplingParams(max_tokens=36 + 3 * i, ignore_eos=True, temperature=0.8 * (i % 2), seed=i),
        )
        for i in range(3)
    ]
    expected = ids(engine.generate(asked))
    for name in names:
        options = {"drafter": written[name], "depth": 8, "verify": verify}
        if threads:
            options["draft_threads"] = threads
        speculating = load(EngineConfig.from_options(**base, **options), target=engine.target)
        answers = speculating.generate(asked, concurrency=3)
        assert not speculating.proposer.failures[name], name
        assert min(drafted(answers)) > 20 and (verify != "match" or ids(answers) == expected)
        speculating.close()


@pytest.mark.slow
@pytest.mark.parametrize("as_trees", [False, True])
def test_grammars_and_drafts_made_ahead_go_together(*, as_trees: bool) -> None:
    """Continuations copy how far a sequence has come in its grammar, or in its counts for penalties."""
    near = ToyTarget(replace(JSON_LAW, drift=0.2, salt=4), num_blocks=120, max_rows=64)
    drafter = AheadDrafter(DraftModel(near, trees=as_trees))
    engine = toy_engine(JSON_LAW, drafter=drafter, num_blocks=200, grammars=COMPILER)
    alone = toy_engine(JSON_LAW, num_blocks=200, grammars=COMPILER)
    grammar = Grammar.regex('(true|ab|name|"[abc]*"){3,30}')
    asked = [
        Request(f"r{i}", (4, 5, 6 + i), SamplingParams(max_tokens=40, temperature=0.9, seed=i, grammar=grammar))
        for i in range(6)
    ]
    asked += [replace(each, id=f"free{each.id}", params=replace(each.params, grammar=None)) for each in asked]
    asked += [
        replace(each, id=f"counted{each.id}", params=replace(each.params, repetition_penalty=1.2)) for each in asked
    ]
    answers = engine.generate(asked, concurrency=4)
    assert ids(answers) == ids(alone.generate(asked))
    assert not engine.proposer.failures["model"] and drafter.figures.hits > 20
    assert sum("model" in each.drafted_by for each in answers[:6]) > 3
    drafter.close()
