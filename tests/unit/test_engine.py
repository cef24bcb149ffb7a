"""The engine's promise on a target whose every answer is known: the text depends on prompt, params and seed alone."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from types import FrameType
from typing import Any

import pytest
from faulty_drafters import (
    DecliningDrafter,
    DuplicateSiblingsDrafter,
    FailingDrafter,
    GarbageDrafter,
    OutsideVocabularyDrafter,
    OverlongDrafter,
)

from wager.draft.base import Drafter
from wager.draft.combined import BackedDrafter, InnerDrafter, MergedDrafter
from wager.draft.lookup import LookupDrafter, LookupSources
from wager.draft.model import DraftModel
from wager.draft.ngram import NgramDrafter
from wager.draft.recycling import RecyclingDrafter
from wager.economics.policy.heuristics import FixedDepth
from wager.engine import core
from wager.engine.core import Engine
from wager.errors import RequestError, UsageError
from wager.testing import (
    AdversaryDrafter,
    OracleDrafter,
    RandomTreeDrafter,
    SetAcceptanceDrafter,
    ToyDistribution,
    ToyOracle,
    ToyTarget,
)
from wager.testing.toy import toy_engine
from wager.types import (
    Completion,
    Draft,
    DraftRequest,
    Grammar,
    Request,
    SamplingParams,
    StepRecord,
    Verdict,
    VerifyRule,
)
from wager.verify.distribution import History, process

LAW = ToyDistribution(vocab=48, order=2, sharpness=6.0, eos=3, eos_bias=-1.0)

PARAMS = {
    "greedy": SamplingParams(max_tokens=40, seed=1),
    "sampled": SamplingParams(max_tokens=40, temperature=0.8, seed=2),
    "truncated": SamplingParams(max_tokens=40, temperature=1.3, top_k=20, top_p=0.9, min_p=0.02, seed=3),
    "penalised": SamplingParams(
        max_tokens=40,
        temperature=0.7,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        logit_bias={5: 2.0, 7: -100.0},
        seed=4,
    ),
    "penalised-greedy": SamplingParams(max_tokens=40, repetition_penalty=1.5, frequency_penalty=1.0, seed=5),
    "endless": SamplingParams(max_tokens=60, temperature=1.0, ignore_eos=True, seed=6),
}

DRAFTERS = {
    "random-tree": lambda: RandomTreeDrafter(LAW.vocab, oracle=ToyOracle(LAW)),
    "ngram": lambda: NgramDrafter(),
    "recycle": lambda: RecyclingDrafter(LAW.vocab),
    "suffix:tree": lambda: LookupDrafter("suffix:tree", LookupSources(4, shared_tokens=200), trees=True),
    "suffix": lambda: LookupDrafter("suffix", LookupSources(4, shared_tokens=200)),
    "oracle": lambda law=LAW: OracleDrafter(ToyOracle(law)),
    "adversary": lambda: AdversaryDrafter(LAW.vocab, oracle=ToyOracle(LAW)),
    "blind-adversary": lambda: AdversaryDrafter(LAW.vocab),
    "set": lambda: SetAcceptanceDrafter(LAW.vocab, [0.8, 0.6, 0.4], oracle=ToyOracle(LAW)),
    "outside": lambda: OutsideVocabularyDrafter(LAW.vocab),
    "overlong": lambda: OverlongDrafter(),
    "silent": lambda: DecliningDrafter(),
    "twins": lambda: DuplicateSiblingsDrafter(),
    "garbage": lambda: GarbageDrafter(LAW.vocab, oracle=ToyOracle(LAW)),
    "dying": lambda: FailingDrafter(calls=20),
    "model": lambda: _model(),
    "model:tree": lambda: _model(trees=True),
    "staged": lambda: _model(inner=InnerDrafter(NgramDrafter(), vocab=LAW.vocab)),
    "staged-dying": lambda: _model(inner=InnerDrafter(FailingDrafter(calls=20), vocab=LAW.vocab)),
    "staged-twice": lambda: _model(
        inner=InnerDrafter(_model(inner=InnerDrafter(NgramDrafter(), vocab=LAW.vocab)), vocab=LAW.vocab)
    ),
    "merged": lambda: MergedDrafter([NgramDrafter(), _model()], vocab=LAW.vocab),
    "backed": lambda: BackedDrafter(DRAFTERS["suffix"](), _model(), vocab=LAW.vocab),
    "backed-odd": lambda: BackedDrafter(
        OverlongDrafter(), BackedDrafter(_model(trees=True), FailingDrafter(calls=20), vocab=LAW.vocab), vocab=LAW.vocab
    ),
    "remembers-merged": lambda: MergedDrafter([DRAFTERS["suffix"](), NgramDrafter()], vocab=LAW.vocab),
    "merged-odd": lambda: MergedDrafter(
        [FailingDrafter(calls=20), _model(trees=True), OutsideVocabularyDrafter(LAW.vocab), OverlongDrafter()],
        vocab=LAW.vocab,
    ),
}
NEAR = replace(LAW, drift=0.3, salt=4)


def _model(**options: Any) -> DraftModel:
    return DraftModel(ToyTarget(NEAR, num_blocks=60, max_rows=40), **options)


SETTINGS = {
    "narrow": {"num_blocks": 24, "max_rows": 9, "max_sequences": 3},
    "roomy": {"num_blocks": 256, "max_rows": 128},
    "no-prefix-cache": {"num_blocks": 24, "max_rows": 16, "prefix_cache": False},
}


def requests() -> list[Request]:
    shared = tuple(range(10, 42))
    prompts = [(1, 2, 3), shared + (5,), shared + (6, 7), tuple(itertools.islice(itertools.cycle((9, 8, 7)), 50))]
    return [
        Request(f"{name}-{i}", prompt, replace(params, seed=(params.seed or 0) + 100 * i))
        for name, params in PARAMS.items()
        for i, prompt in enumerate(prompts)
    ]


def plain(request: Request, choice: int = 0) -> tuple[int, ...]:
    """The text straight from the closed form: no engine, no cache."""
    params, out = request.params, []
    while len(out) < params.max_tokens and len(request.prompt) + len(out) < 512:
        shaped = process(LAW([*request.prompt, *out]), params, History(request.prompt, out))
        out.append(shaped.choose(params.seed or 0, len(request.prompt) + len(out), choice))
        if out[-1] == LAW.eos and not params.ignore_eos:
            break
    return tuple(out)


@pytest.fixture(scope="module")
def texts() -> Callable[[str], tuple[int, ...]]:
    """The text of a request by its name."""
    asked = {request.id: request for request in requests()}
    return cache(lambda name: plain(asked[name]))


@pytest.mark.parametrize(
    ("drafter", "setting", "every"),
    [
        ("random-tree", "narrow", 3),
        *((drafter, "narrow", 1) for drafter in (*DRAFTERS, "none")),
        *((name, setting, 1) for name in ("suffix", "merged", "none") for setting in ("roomy", "no-prefix-cache")),
    ],
)
def test_text_depends_on_prompt_params_and_seed_alone(
    drafter: str, setting: str, every: int, texts: Callable[[str], tuple[int, ...]]
) -> None:
    maker = DRAFTERS.get(drafter)
    engine = toy_engine(LAW, drafter=maker() if maker else None, depth=5, **SETTINGS[setting])
    for completion in engine.generate(requests()[::every]):
        assert completion.token_ids == texts(completion.request_id), (drafter, setting, completion.request_id)
    assert engine.scheduler.block_pool.num_free_blocks == engine.scheduler.block_pool.num_blocks


def test_forced_preemption_and_prefix_hits_change_nothing(texts: Callable[[str], tuple[int, ...]]) -> None:
    engine = toy_engine(LAW, drafter=DRAFTERS["random-tree"](), depth=6, num_blocks=256)
    preempted = hits = 0
    for _ in range(2):  # the second round finds its prompts in the prefix cache
        steps = itertools.count()

        def shake(_event: object, steps: itertools.count = steps) -> None:
            if next(steps) % 23 == 0:
                engine.preempt_all()

        for completion in engine.generate(requests()[::2], concurrency=5, on_output=shake):
            assert completion.token_ids == texts(completion.request_id)
            preempted += completion.stats.preemptions
            hits += completion.stats.cached_tokens
    assert preempted > 20
    assert hits > 32 * 6


def test_choices_share_the_prompt_and_differ_in_noise() -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=9, n=3, ignore_eos=True)
    request = Request("r", tuple(range(4, 44)), params)
    engine = toy_engine(LAW, drafter=NgramDrafter(), depth=4)
    done = engine.generate([request])
    assert [c.index for c in done] == [0, 1, 2]
    assert [c.token_ids for c in done] == [plain(request, choice) for choice in range(3)]
    assert [c.stats.cached_tokens for c in done] == [0, 32, 32]
    assert len({c.token_ids for c in done}) == 3


def test_an_oracle_is_accepted_whole_and_an_adversary_never() -> None:
    params = SamplingParams(max_tokens=41, temperature=0.9, seed=3, ignore_eos=True)
    best, worst = (
        toy_engine(LAW, drafter=DRAFTERS[name](), depth=4).generate([Request("a", (1, 2, 3), params)])[0]
        for name in ("oracle", "adversary")
    )
    assert best.token_ids == worst.token_ids
    assert best.drafted_by.count("oracle") == best.stats.accepted == best.stats.drafted > 0
    assert best.stats.rounds == 9  # five tokens a round
    assert worst.stats.accepted == 0 < worst.stats.drafted and worst.stats.rounds == 41


@pytest.mark.parametrize("drafter", ["suffix", "recycle", "remembers-merged"])
def test_what_drafters_remember_of_requests_can_be_forgotten(drafter: str) -> None:
    """A request that is answered again is guessed from its own answer, unless the drafters were told to forget it."""
    engine = toy_engine(LAW, drafter=DRAFTERS[drafter](), depth=4)
    request = Request("r", tuple(range(5)), SamplingParams(max_tokens=60, ignore_eos=True, seed=1))
    rounds = []
    for forgets in (False, False, True):
        if forgets:
            engine.forget_requests()
        rounds += [answer.stats.rounds for answer in engine.generate([request])]
    assert rounds[1] < rounds[0] == rounds[2]
    engine.add(request)
    with pytest.raises(UsageError, match="cannot forget"):
        engine.forget_requests()


def test_logprobs_are_the_targets_own_with_guesses_or_without() -> None:
    params = SamplingParams(max_tokens=24, temperature=1.0, top_k=5, seed=8, logprobs=3, ignore_eos=True)
    bare, guessed = (
        toy_engine(LAW, drafter=drafter, depth=4).generate([Request("r", (4, 5, 6), params)])[0]
        for drafter in (None, DRAFTERS["random-tree"]())
    )
    assert guessed.stats.accepted > 0 and bare.logprobs == guessed.logprobs
    assert [entry.token_id for entry in bare.logprobs] == list(bare.token_ids)
    assert all(len(entry.top_logprobs) == 3 for entry in bare.logprobs)


def test_a_text_ends_inside_a_round_at_a_stop_token_or_with_the_context() -> None:
    request = Request("r", (1, 2, 3), SamplingParams(max_tokens=40, temperature=0.9, seed=3, ignore_eos=True))
    whole = plain(request)
    for changes, tokens, reason in (
        ({"stop_token_ids": (whole[7],)}, whole[: whole.index(whole[7]) + 1], "stop"),
        ({"max_tokens": 2**63 - 1}, whole[:29], "length"),
    ):
        engine = toy_engine(LAW, drafter=DRAFTERS["oracle"](), depth=6, max_context=32)
        [done] = engine.generate([replace(request, params=replace(request.params, **changes))])
        assert (done.token_ids, done.finish_reason) == (tokens, reason)


def test_abort_ends_every_choice_and_frees_the_blocks() -> None:
    engine = toy_engine(LAW, drafter=NgramDrafter())
    engine.add(Request("r", (1, 2, 3), SamplingParams(max_tokens=400, n=2, ignore_eos=True)))
    for _ in range(5):
        engine.step()
    assert engine.abort("r") and not engine.abort("r")
    assert [(e.index, e.finish_reason) for e in engine.step()] == [(0, "abort"), (1, "abort")]
    assert not engine.busy
    engine.check()
    assert engine.scheduler.block_pool.num_free_blocks == engine.scheduler.block_pool.num_blocks


def test_last_outputs_of_an_aborted_request_come_though_a_policy_raises() -> None:
    class Raising(FixedDepth):
        def end(self, sequence: str) -> None:
            raise OSError(f"no end of {sequence}")

    engine = toy_engine(LAW, drafter=NgramDrafter())
    engine.policy = Raising(2)
    engine.add(Request("r", (1, 2, 3), SamplingParams(max_tokens=400, n=2, ignore_eos=True)))
    engine.step()
    with pytest.raises(OSError, match="no end of r"):
        engine.abort("r")
    assert [(e.index, e.finish_reason) for e in engine.step()] == [(0, "abort"), (1, "abort")]
    assert not engine.busy


@pytest.mark.parametrize("where", ["learn", "end", "leave_out"])
def test_a_policy_that_raises_where_texts_end_leaves_no_request_behind(where: str) -> None:
    told: list[str] = []

    class Raising(FixedDepth):
        def learn(self, verdicts: Iterable[Verdict]) -> None:
            self.fail("learn")

        def leave_out(self, drafters: frozenset[str]) -> None:
            self.fail("leave_out")

        def end(self, sequence: str) -> None:
            told.append(sequence)
            self.fail("end")

        def fail(self, here: str) -> None:
            if here == where and steps and "short" not in engine.open_requests:
                raise OSError(f"no {here}")

    def on_step(record: StepRecord) -> None:
        steps.append(record)

    engine, steps = toy_engine(LAW, drafter=NgramDrafter()), list[StepRecord]()
    engine.policy, engine.on_step = Raising(2), on_step
    observe = engine.proposer.observe

    def observed(*values: Any) -> None:
        observe(*values)
        engine.proposer.changed = True  # as where a drafter fails

    engine.proposer.observe = observed  # type: ignore[method-assign]
    engine.proposer = engine.proposer
    requests = [
        Request(name, (1, 2, 3), SamplingParams(max_tokens=tokens, n=2, ignore_eos=True))
        for name, tokens in (("short", 4), ("long", 400))
    ]
    with pytest.raises(OSError, match=f"no {where}"):
        engine.generate(requests)
    assert sorted(told) == ["long", "long#1", "short", "short#1"]
    assert not engine.busy and not engine.open_requests
    engine.policy = FixedDepth(2)
    assert {each.finish_reason for each in engine.generate(requests)} == {"length"}


@pytest.mark.parametrize("where", ["learn", "accept", "on_step", "propose"])
def test_a_step_that_raises_loses_no_token(where: str, texts: Callable[[str], tuple[int, ...]]) -> None:
    """As an interrupt may, or a policy or a callback of one's own; also none of an aborted request."""
    engine, calls = toy_engine(LAW, drafter=DRAFTERS["random-tree"](), num_blocks=256), itertools.count()
    holder = {"propose": engine.proposer, "accept": engine.runner, "learn": FixedDepth(4), "on_step": engine}[where]
    called = getattr(holder, where)

    def raising(*given: Any) -> Any:
        if next(calls) % 3 == 1:
            raise KeyboardInterrupt
        return called(*given) if called else None

    setattr(holder, where, raising)
    engine.policy = holder if isinstance(holder, FixedDepth) else FixedDepth(4)
    found = {request.id: list[int]() for request in requests()}
    for request in requests():
        engine.add(request)
    engine.add(Request("left", (1, 2, 3), SamplingParams(n=2)))
    engine.abort("left")
    aborted = 0
    while engine.busy:
        with suppress(KeyboardInterrupt):
            for delta in engine.step():
                aborted += delta.finish_reason == "abort"
                if delta.request_id != "left":
                    found[delta.request_id] += delta.token_ids
    assert all(tuple(text) == texts(name) for name, text in found.items()) and aborted == 2
    engine.check()


def test_requests_that_cannot_be_served_are_refused_by_name() -> None:
    engine = toy_engine(LAW, num_blocks=8, max_context=512)
    for request, words in [
        (lambda: Request("long", tuple([1] * 512)), "512 prompt tokens"),
        (lambda: Request("big", (1,), SamplingParams(max_tokens=400)), "401 tokens"),
        (lambda: Request("alien", (1, 99)), "token 99; .*tokenizer"),
        (lambda: Request("half", (1, 2.5)), "token 2.5"),  # type: ignore[arg-type]
        (lambda: Request("bias", (1,), SamplingParams(logit_bias={99: 1.0})), "token 99 .*out of logit_bias"),
        (lambda: Request("ids", (1,), SamplingParams(stop_token_ids=(-1,))), "token -1 .*out of stop_token_ids"),
        (lambda: Request("known", (1,), SamplingParams(grammar=Grammar.tokens([1, 99]))), "token 99 under grammar"),
        (lambda: Request("a#b", (1,)), "'#'"),
        (lambda: Request("\ud800", (1,)), r"id is '\\ud800'"),
        (lambda: Request(5, (1,)), "id is 5"),  # type: ignore[arg-type]
        (lambda: Request("anna's", (1,), tenant="\udc80"), r"tenant is '\\udc80'"),
        (lambda: Request("stop", (1,), SamplingParams(stop="x")), "tokenizer"),
    ]:
        with pytest.raises(RequestError, match=f"(?s){words}"):
            engine.add(request())
    assert not engine.busy
    engine.add(Request("twice", (1,), SamplingParams(max_tokens=3)))
    with pytest.raises(RequestError, match="in use"):
        engine.add(Request("twice", (1,), SamplingParams(max_tokens=3)))
    with pytest.raises(UsageError, match="temperature"):
        SamplingParams(temperature=-1)
    for tokens in ([], "abc"):
        with pytest.raises(UsageError, match="tokens"):
            Grammar.tokens(tokens)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="empty prompt"):
        Request("empty", ())


class FragileLaw(ToyDistribution):
    """Not a number after token 7, wherever it comes from."""

    def logits(self, tails, digests):  # type: ignore[no-untyped-def]
        z = super().logits(tails, digests)
        z[tails[:, 0] == 7] = float("nan")
        return z


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=5),
        SamplingParams(max_tokens=5, temperature=0.8, seed=1),
        SamplingParams(max_tokens=5, temperature=0.8, seed=1, top_p=0.9),
    ],
)
def test_numbers_that_are_not_end_their_request_and_no_other(params: SamplingParams) -> None:
    engine = toy_engine(FragileLaw(vocab=48, eos=7, eos_bias=-1000), drafter=NgramDrafter())
    good, bad = engine.generate([Request("good", (1, 2, 3), params), Request("bad", (1, 2, 7), params)])
    assert bad.finish_reason == "error" and "not finite" in bad.error and bad.token_ids == ()
    assert good.finish_reason == "length" and len(good.token_ids) == 5
    assert (engine.runner.target.cache.tokens < 48).all()


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_an_answer_that_every_token_ends_too_early_is_an_error(rule: VerifyRule) -> None:
    engine = toy_engine(LAW, drafter=NgramDrafter(), rule=rule)
    params = SamplingParams(max_tokens=5, min_tokens=3, stop_token_ids=range(LAW.vocab))
    good, bad = engine.generate(
        [Request("good", (1, 2, 3), SamplingParams(max_tokens=5)), Request("bad", (1,), params)]
    )
    assert (bad.finish_reason, bad.error_status, bad.token_ids) == ("error", 400, ()) and "min_tokens" in bad.error
    assert good.finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rule", ["traversal", "block", "rejection", "match"])
def test_a_row_that_fails_beyond_the_end_of_a_text_hurts_nobody(rule: VerifyRule, temperature: float) -> None:
    law = FragileLaw(vocab=48, order=1, sharpness=4.0)
    params = SamplingParams(max_tokens=200, temperature=temperature, seed=4, logit_bias={7: 3.0})

    def run(drafter: Drafter | None, **changes: object) -> Completion:
        engine = toy_engine(law, drafter=drafter, depth=6, rule=rule)
        return engine.generate([Request("r", (1, 2, 3), replace(params, **changes))])[0]

    bare, stopped = run(None), run(DRAFTERS["oracle"](law), stop_token_ids=(7,))
    assert bare.finish_reason == "error" and bare.token_ids[-1] == 7
    assert stopped.finish_reason == "stop"
    if rule == "match" or temperature == 0:  # under the other rules sampled texts differ by right
        guessed = run(DRAFTERS["oracle"](law))
        assert guessed.finish_reason == "error" and guessed.token_ids == stopped.token_ids == bare.token_ids


def test_blocks_of_a_failed_request_are_not_attached_again() -> None:
    engine = toy_engine(FragileLaw(vocab=48))
    for _ in range(2):
        [done] = engine.generate([Request("r", (*range(8, 41), 7), SamplingParams())])
        assert (done.finish_reason, done.stats.cached_tokens) == ("error", 0)


def test_a_failed_request_leaves_the_blocks_of_its_twin_alone() -> None:
    law = FragileLaw(vocab=48, order=1, sharpness=4.0)
    prompt = tuple(i % 40 + 8 for i in range(47))
    params = SamplingParams(max_tokens=30, temperature=0.9, seed=11)
    (alone,) = toy_engine(law).generate([Request("twin", prompt, params)])
    for last in range(2):  # whoever commits the common pages first
        engine = toy_engine(law, num_blocks=64)
        both = [Request("twin", prompt, params), Request("failing", (*prompt, 7), params)]
        done = engine.generate(both[:: 1 if last else -1])
        texts = {c.request_id: c for c in done}
        assert texts["failing"].finish_reason == "error"
        assert texts["twin"].token_ids == alone.token_ids


def test_the_block_rule_cuts_what_branches() -> None:
    engine = toy_engine(LAW, drafter=DuplicateSiblingsDrafter(), depth=4, rule="block")
    (done,) = engine.generate([Request("r", (1, 2, 3), SamplingParams(max_tokens=20, ignore_eos=True))])
    assert done.finish_reason == "length" and done.stats.drafted > 0


def test_a_batch_that_is_refused_half_way_leaves_nothing_behind() -> None:
    engine = toy_engine(LAW)
    good, bad = Request("a", (1, 2, 3), SamplingParams(max_tokens=5)), Request("b", (1, 99))
    for batch, concurrency, words in (([good, bad], None, "token 99"), ([good, good], 1, "Two requests")):
        with pytest.raises(RequestError, match=words):
            engine.generate(batch, concurrency=concurrency)
        assert not engine.busy
        assert len(engine.generate([good])) == 1
    assert engine.scheduler.block_pool.num_free_blocks == engine.scheduler.block_pool.num_blocks


def test_a_batch_that_is_refused_ends_no_request_of_another_caller() -> None:
    engine = toy_engine(LAW)
    engine.add(Request("a", (1, 2, 3), SamplingParams(max_tokens=5, ignore_eos=True)))
    with pytest.raises(RequestError, match="in use"):
        engine.generate([Request("b", (1, 2)), Request("a", (1, 2))])
    assert engine.open_requests == ["a"]


def crowd(*sizes: int) -> list[Request]:
    """Requests with prompts of these sizes."""
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    return [Request(str(at), tuple((at + i) % 40 + 4 for i in range(size)), params) for at, size in enumerate(sizes)]


def run_recorded(engine: Engine, requests: list[Request]) -> tuple[list[StepRecord], dict[str, tuple[int, ...]]]:
    records: list[StepRecord] = []
    engine.on_step = records.append
    return records, {done.request_id: done.token_ids for done in engine.generate(requests)}


@pytest.mark.parametrize(("drafter", "guessing"), [(OverlongDrafter, True), (DecliningDrafter, False)])
def test_prompts_get_the_rows_that_guesses_do_not_take(drafter: type[Drafter], guessing: bool) -> None:
    engine = toy_engine(LAW, drafter=drafter(), depth=15, num_blocks=512, max_rows=64, max_context=4096)
    records, _ = run_recorded(engine, crowd(4, 4, 4, 600))
    chunks = sorted(each.rows - each.drafted for each in records if each.rows - each.drafted > 8)
    assert all(each.rows <= 64 for each in records)
    if guessing:
        assert max(each.drafted for each in records[:6]) > 20, "they take what they take"
        assert 30 <= chunks[len(chunks) // 2] < 40, "half is the prompt's all the same"
    else:
        assert chunks[len(chunks) // 2] >= 56


def test_rows_that_are_kept_for_guesses_keep_no_sequence_waiting() -> None:
    engine = toy_engine(LAW, drafter=NgramDrafter(), num_blocks=256, max_rows=8)
    for i in range(8):
        engine.add(Request(f"r{i}", (1, 2, i), SamplingParams(max_tokens=300, ignore_eos=True)))
    for _ in range(40):
        engine.step()
    assert engine.scheduler.num_running == 8


@pytest.mark.parametrize("drafter", [None, OverlongDrafter])
def test_prompts_take_few_rows_while_others_decode_and_all_while_none_does(drafter: type[Drafter] | None) -> None:
    texts = []
    for most in (64, 16):
        sizes: dict[str, int] = {"num_blocks": 512, "max_rows": 64, "max_context": 4096, "max_prefill_rows": most}
        engine = toy_engine(LAW, drafter=drafter and drafter(), depth=3, **sizes)
        records, done = run_recorded(engine, crowd(4, 4, 1000, 1000))
        texts.append(done)
        first, *later = [each.rows - each.drafted for each in records]
        assert first == 64, "none decodes yet"
        assert max(later[10:]) > 50, "the short ones have ended"
        assert all(most - 16 <= known - 2 <= most for known in later[:10])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("rule", ["match", "rejection", "block", "traversal"])
def test_a_full_step_cuts_guesses_and_changes_nothing(rule: VerifyRule) -> None:
    """Draws have to fit before they are drawn, or what is kept would tell what was drawn."""
    drafter = DraftModel(ToyTarget(LAW, num_blocks=256, max_sequences=8))
    engine = toy_engine(LAW, drafter=drafter, depth=6, rule=rule, num_blocks=256, max_rows=24)
    requests = crowd(3, 5, 40, 60, 50)
    records, done = run_recorded(engine, requests)
    assert all(each.rows <= 24 for each in records)
    assert any(each.rows > 20 and 0 < each.drafted < 12 for each in records), "beside a prompt"
    assert done == {request.id: plain(request) for request in requests}  # greedy: every rule emits what the target says


# ---- calls that meet in one engine: within callbacks, within a step, and from several threads ------------------------


def request(name: str) -> Request:
    return Request(name, (1, 2, 3, 1, 2, 3, len(name)), SamplingParams(max_tokens=12, ignore_eos=True))


def engine() -> Engine:
    return toy_engine(LAW, drafter=NgramDrafter())


def calls_of(tried: Engine) -> dict[str, Callable[[], object]]:
    return {
        "step": tried.step,
        "preempt_all": tried.preempt_all,
        "add": lambda: tried.add(request("c")),
        "abort": lambda: tried.abort("a"),
        "generate": lambda: tried.generate([request("c")]),
    }


def tokens_of(completions: Sequence[Completion]) -> dict[str, tuple[int, ...]]:
    return {each.request_id: each.token_ids for each in completions}


def answers(*names: str) -> dict[str, tuple[int, ...]]:
    return tokens_of(engine().generate([request(name) for name in names]))


def run_with(tried: Engine, place: str, call: Callable[[], object]) -> list[Completion]:
    """Two requests; `call` is called once, at the third callback."""
    calls = []

    def callback(_: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            call()

    if place == "on_step":
        tried.on_step = callback
    return tried.generate([request("a"), request("bb")], on_output=callback if place == "on_output" else None)


# ---- callbacks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["on_step", "on_output"])
def test_a_callback_may_add_abort_and_preempt_and_not_step(place: str) -> None:
    tried, collected = engine(), []
    for name in ("step", "generate"):
        with pytest.raises(UsageError, match=f"Engine.{name} was called within {place} of the same engine"):
            run_with(tried, place, calls_of(tried)[name])
        assert not tried.busy or tried.step()  # what was aborted is still to be returned
    assert tokens_of(run_with(tried, place, lambda: tried.add(request("ccc")))) == answers("a", "bb")
    assert tokens_of(run_with(tried, place, tried.preempt_all)) == answers("a", "bb")
    ended = run_with(tried, place, lambda: collected.append(tried.abort("bb")))
    assert [each.finish_reason for each in ended] == ["length", "abort"]
    assert ended[0].token_ids == answers("a")["a"] and collected == [True]
    tried.check()


@pytest.mark.parametrize("name", ["step", "add", "abort", "preempt_all", "generate"])
def test_a_drafter_may_call_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    class Meddler(NgramDrafter):
        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            calls_of(tried)[name]()
            return []

    tried = toy_engine(LAW, drafter=Meddler())
    assert tokens_of(tried.generate([request("a")])) == answers("a")
    assert f"Engine.{name} was called within step of the same engine" in caplog.text
    tried.check()


# ---- threads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [13, 1])
def test_an_interrupt_at_any_line_of_the_engine_leaves_it_usable(stride: int) -> None:
    """But those of its guard, between which no signal is looked at, since they call nothing."""
    lines, params, answer = itertools.count(1, stride), SamplingParams(max_tokens=3, n=2), answers("a")

    def use(tried: Engine) -> None:
        tried.add(Request("left", (1, 2), params))
        tried.generate([Request("b", (1, 3), params)])
        tried.abort("left")

    def interrupted(tried: Engine, line: int) -> bool:
        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal line
            if frame.f_code.co_filename != core.__file__ or frame.f_code is core.CallGuard.call.__code__:
                return None
            line -= event == "line"
            if line == 0:
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            use(tried)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    while interrupted(tried := engine(), next(lines)):
        for name in tried.open_requests:
            tried.abort(name)
        for _ in range(3):
            tried.step()
        assert not tried.busy and not tried.open_requests
        tried.check()
        assert tokens_of(tried.generate([request("a")])) == answer
    assert next(lines) > 100


def test_a_second_thread_is_refused_by_name() -> None:
    """Whatever it calls; the answers of the first do not change."""
    tried, refusals = engine(), {}

    def meddle() -> None:
        for name, call in calls_of(tried).items():
            with pytest.raises(UsageError) as caught:
                call()
            refusals[name] = caught.value

    def from_another_thread() -> None:
        second = threading.Thread(target=meddle, name="second")
        second.start()
        second.join()

    assert tokens_of(run_with(tried, "on_output", from_another_thread)) == answers("a", "bb")
    assert refusals.keys() == calls_of(tried).keys()
    for name, refusal in refusals.items():
        assert f"Thread 'second' called Engine.{name} while thread 'MainThread'" in refusal.message
        assert "LLM" in refusal.hint
    assert tokens_of(tried.generate([request("a")])) == answers("a")


@pytest.mark.parametrize("concurrency", [0, -1, 1.5, True, "2"])
def test_a_concurrency_that_never_ends_is_refused(concurrency: Any) -> None:
    tried = engine()
    with pytest.raises(UsageError, match=f"concurrency = {concurrency!r} is not possible"):
        tried.generate([request("a")], concurrency=concurrency)
    assert not tried.busy
    assert tokens_of(tried.generate([request("a"), request("bb")], concurrency=1)) == answers("a", "bb")
