"""LLM on a small random model: prompts, completions, streams that end early, closing."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import wager
from wager.loading.load import LoadedEngine
from wager.types import SamplingParams

PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
OPTIONS: dict[str, Any] = dict(max_context=256, max_sequences=4, max_rows=64, threads=1, drafter="ngram", depth=3)
CONVERSATION = [{"role": "user", "content": "one two three one two three one two three"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[wager.LLM]:
    with wager.LLM("random:llama:tiny", **OPTIONS) as made:
        yield made


def free_blocks(llm: wager.LLM) -> int:
    return llm.engine.scheduler.block_pool.num_free_blocks


# ---- answers --------------------------------------------------------------------------------------------------------


def test_one_prompt_gives_one_completion_and_a_list_a_list(llm: wager.LLM) -> None:
    one = llm.generate("abc abc abc", PARAMS)
    assert isinstance(one, wager.Completion)
    assert (len(one.token_ids), one.finish_reason, one.index) == (12, "length", 0)
    assert one.text == llm.tokenizer.decode(one.token_ids)
    several = llm.generate(["abc abc abc", "x", [1, 2, 3]], PARAMS)
    assert [each.stats.prompt_tokens for each in several] == [11, 1, 3]
    assert several[0].token_ids == one.token_ids
    ids = llm.tokenizer.encode("abc abc abc")
    assert llm.generate(ids, PARAMS).token_ids == llm.generate([tuple(ids)], PARAMS)[0].token_ids == one.token_ids
    assert llm.generate([], PARAMS) == [] == llm.chat([], PARAMS)


def test_all_choices_come_in_order(llm: wager.LLM) -> None:
    several = llm.generate(["abc", "x"], replace(PARAMS, n=3))
    assert [(each.stats.prompt_tokens, each.index) for each in several] == [(p, i) for p in (3, 1) for i in range(3)]
    alone: Any = llm.generate("abc", replace(PARAMS, n=3))
    assert [each.token_ids for each in alone] == [each.token_ids for each in several[:3]]
    assert len({each.token_ids for each in alone}) == 3


def test_sampling_options_of_the_configuration_are_the_default(llm: wager.LLM) -> None:
    with wager.LLM("random:llama:tiny", **OPTIONS, max_tokens=5, ignore_eos=True, seed=1, temperature=0.5) as other:
        assert other.config.sampling == SamplingParams(max_tokens=5, ignore_eos=True, seed=1, temperature=0.5)
        default = other.generate("abc")
        assert len(default.token_ids) == 5
        assert default.token_ids == llm.generate("abc", other.config.sampling).token_ids
        changed = wager.LLM(config=other.config, max_tokens=3)
        assert (changed.config.model.model, changed.config.sampling.max_tokens) == ("random:llama:tiny", 3)
        changed.close()


def test_stats_and_logprobs_have_the_usual_names(llm: wager.LLM) -> None:
    answer = llm.generate("abc abc abc", replace(PARAMS, logprobs=2))
    stats = answer.stats
    assert stats.total_tokens == stats.prompt_tokens + stats.completion_tokens == 11 + 12
    assert [each.token_id for each in answer.logprobs] == list(answer.token_ids)
    assert all(len(each.top_logprobs) == 2 for each in answer.logprobs)


# ---- conversations --------------------------------------------------------------------------------------------------


def test_chat_answers_one_conversation_or_several(llm: wager.LLM) -> None:
    one = llm.chat(CONVERSATION, PARAMS)
    text = llm.tokenizer.chat(CONVERSATION)
    assert one.token_ids == llm.generate(llm.tokenizer.encode(text, special=False), PARAMS).token_ids
    other = [{"role": "system", "content": "be"}, {"role": "user", "content": "x"}]
    both = llm.chat([CONVERSATION, other], PARAMS)
    assert both[0].token_ids == one.token_ids
    assert both[1].stats.prompt_tokens == len(llm.tokenizer.encode(llm.tokenizer.chat(other), special=False))


def test_a_continued_conversation_reuses_its_prefix(llm: wager.LLM) -> None:
    messages = [{"role": "user", "content": "a prompt of its own, long enough for several blocks of the cache"}]
    first = llm.chat(messages, PARAMS)
    messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "go on"}]
    second = llm.chat(messages, PARAMS)
    again = llm.chat(messages, PARAMS)
    assert first.stats.cached_tokens < 16 <= second.stats.cached_tokens < again.stats.cached_tokens
    assert again.token_ids == second.token_ids


# ---- streams --------------------------------------------------------------------------------------------------------


def test_a_streams_deltas_join_to_the_answer(llm: wager.LLM) -> None:
    complete = llm.generate("abc abc abc", PARAMS)
    stream = llm.stream("abc abc abc", PARAMS)
    with pytest.raises(wager.RequestError, match="not ended yet"):
        stream.completions()
    deltas = list(stream)
    assert len(deltas) > 1
    assert "".join(delta.text for delta in deltas) == complete.text
    assert sum((delta.token_ids for delta in deltas), ()) == complete.token_ids
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert (deltas[-1].finish_reason, deltas[-1].stats.completion_tokens) == ("length", 12)  # type: ignore[union-attr]
    assert stream.completions()[0].token_ids == complete.token_ids
    assert list(stream) == []
    assert [each.text for each in llm.stream(CONVERSATION, PARAMS)][-1] is not None


@pytest.mark.parametrize("way", ["break", "close", "with", "error"])
def test_a_stream_that_is_left_early_frees_its_blocks(llm: wager.LLM, way: str) -> None:
    before = free_blocks(llm)
    long = replace(PARAMS, max_tokens=200)
    if way == "break":
        for _ in llm.stream("abc", long):
            break
    elif way == "close":
        stream = llm.stream("abc", long)
        next(stream)
        assert free_blocks(llm) < before
        stream.close()
        stream.close()
        assert list(stream) == []
    elif way == "with":
        with llm.stream("abc", long) as stream:
            next(stream)
    else:
        with pytest.raises(ZeroDivisionError):
            for _ in llm.stream("abc", long):
                _ = 1 / 0
    assert free_blocks(llm) == before
    assert not llm.engine.scheduler.num_running
    llm.generate("abc", PARAMS)
    assert not llm.engine.scheduler.busy


def test_an_aborted_stream_ends_with_its_reason_and_stats(llm: wager.LLM) -> None:
    stream = llm.stream("abc", replace(PARAMS, max_tokens=200, n=2))
    next(stream)
    stream.abort()
    endings = [delta for delta in stream if delta.finish_reason]
    assert [delta.finish_reason for delta in endings] == ["abort", "abort"]
    assert all(delta.stats for delta in endings)
    assert {each.finish_reason for each in stream.completions()} == {"abort"}


# ---- refusals and closing -------------------------------------------------------------------------------------------


def test_an_invalid_prompt_is_refused_and_none_of_its_list_runs(llm: wager.LLM) -> None:
    before = free_blocks(llm)
    for call in (llm.generate, llm.stream):
        with pytest.raises(wager.RequestError, match="empty"):
            call("", PARAMS)
        with pytest.raises(wager.RequestError, match="256"):
            call("x" * 300, PARAMS)
        with pytest.raises(wager.RequestError, match="-7"):
            call([3, -7], PARAMS)
        with pytest.raises(wager.UsageError, match="float"):
            call(1.5, PARAMS)  # type: ignore[arg-type]
    with pytest.raises(wager.UsageError, match="type dict"):
        llm.generate(CONVERSATION, PARAMS)  # type: ignore[call-overload]
    with pytest.raises(wager.RequestError, match="256"):
        llm.generate(["abc", "x" * 300], PARAMS)
    assert free_blocks(llm) == before
    assert not llm.engine.scheduler.busy


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"draftr": "ngram"}, "'draftr' is not known.*'drafter'"),
        ({"temperature": -1}, "temperature = -1"),
    ],
)
def test_options_are_refused_before_anything_is_loaded(options: dict[str, Any], named: str) -> None:
    with pytest.raises(wager.UsageError, match=f"(?s){named}"):
        wager.LLM("no-such-model-anywhere", **options)


def test_a_closed_llm_is_an_error_and_its_streams_end_as_aborted() -> None:
    made = wager.LLM("random:llama:tiny", **OPTIONS)
    assert isinstance(made.engine, LoadedEngine)
    stream = made.stream("abc", replace(PARAMS, max_tokens=200))
    next(stream)
    made.close()
    made.close()
    assert [delta.finish_reason for delta in stream][-1] == "abort"
    stream.close()
    for call in (lambda: made.generate("abc"), lambda: made.chat(CONVERSATION), lambda: made.stream("abc")):
        with pytest.raises(wager.ClosedError, match="closed"):
            call()
    with pytest.raises(wager.ClosedError):
        _ = made.engine


def test_every_error_is_exported_and_importing_is_quick() -> None:
    from wager import errors

    named = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert named <= set(wager.__all__)
    assert [name for name in wager.__all__ if not hasattr(wager, name)] == []
    code = "import wager, sys; sys.exit(any(name in sys.modules for name in ('torch', 'tokenizers', 'jinja2')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


NO_PROMPTS: list[tuple[Any, str]] = [
    (5, "type int"),
    (np.int64(5), "type int64"),
    (torch.tensor(5), "type Tensor"),
    ([1, 2.5], r"token 2.5 \(float\) at index 1"),
    ([True, 1], r"token True \(bool\) at index 0"),
    ([[1, 2], 3], r"3 \(int\) is not a sequence"),
    ([[1, [2]]], r"token \[2\] \(list\) at index 1"),
    ([1, "abc"], r"token 'abc' \(str\) at index 1"),
    ({1, 2}, "type set"),
    (None, "type NoneType"),
]


def _generate(prompt: Any, llm: wager.LLM) -> Any:
    return llm.generate(prompt, PARAMS)


# ---- wrong values, and threads --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(b"abc"), "A prompt of type bytes"),
        (lambda llm: llm.generate("abc", {"max_tokens": 3}), "params of type dict"),
        (lambda llm: llm.generate(["abc", "x"], [PARAMS, PARAMS]), "params of type list"),
        (lambda llm: llm.chat("hello"), "A conversation of type str"),
        (lambda llm: llm.chat([{"content": "hello"}]), "Message 1 of the conversation has no text under 'role'"),
        (lambda llm: llm.chat([*CONVERSATION, {"role": "user", "content": None}]), "Message 2 .* under 'content'"),
        (lambda llm: llm.chat([CONVERSATION, "hello"]), "A conversation of type str"),
        *((partial(_generate, prompt), named) for prompt, named in NO_PROMPTS),
    ],
)
def test_what_cannot_be_answered_is_named(llm: wager.LLM, call: Any, message: str) -> None:
    with pytest.raises(wager.UsageError, match=message):
        call(llm)
    assert not llm.engine.scheduler.busy


def test_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(wager.MemoryPlanError, match=r"more than the [\d.]+ GiB of this machine"):
        wager.LLM("random:llama:tiny", memory="100TiB")


def test_threads_that_leave_their_streams_disturb_nobody(llm: wager.LLM) -> None:
    """Each of them gets its own text; streams that are left early, dropped or aborted free their blocks."""
    before = free_blocks(llm)
    alone = {i: llm.generate(f"{i} {i} {i} abc", PARAMS).token_ids for i in range(8)}
    answers: dict[tuple[int, int], tuple[int, ...]] = {}
    failures: list[BaseException] = []

    def answer(index: int, turn: int) -> None:
        prompt = f"{index} {index} {index} abc"
        if turn % 4 == 1:
            for _ in llm.stream(prompt, replace(PARAMS, max_tokens=200)):
                break
        elif turn % 4 == 2:
            stream = llm.stream(prompt, replace(PARAMS, max_tokens=200))
            next(stream)
            stream.abort()
            assert [delta.finish_reason for delta in stream][-1] == "abort"
        elif turn % 4 == 3:
            answers[index, turn] = tuple(token for delta in llm.stream(prompt, PARAMS) for token in delta.token_ids)
        else:
            answers[index, turn] = llm.generate(prompt, PARAMS).token_ids

    def run(index: int) -> None:
        try:
            for turn in range(8):
                answer(index, turn + index)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(answers) == 32
    assert all(tokens == alone[index] for (index, _), tokens in answers.items())
    assert not llm.engine.busy or llm.generate("x", PARAMS)
    assert free_blocks(llm) == before and not llm.engine.busy


def test_a_stream_that_is_dropped_within_a_step_ends_after_it(llm: wager.LLM) -> None:
    """As the garbage collector may drop it anywhere."""
    before, expected = free_blocks(llm), llm.generate("abc abc", PARAMS).token_ids
    dropped = [llm.stream("abc abc abc", replace(PARAMS, max_tokens=200)) for _ in range(2)]
    drafter = llm.engine.proposer.drafters["ngram"]
    observe = drafter.observe

    def drop(output: Any) -> None:
        if dropped:
            del dropped[0]
        observe(output)

    drafter.observe = drop  # type: ignore[method-assign]
    try:
        next(dropped[1])
        assert llm.generate("abc abc", PARAMS).token_ids == expected
    finally:
        del drafter.observe
    assert not dropped and "ngram" in llm.engine.proposer.drafters
    assert free_blocks(llm) == before
    llm.generate("x", PARAMS)
    assert not llm.engine.busy


def test_closing_ends_what_other_threads_wait_for() -> None:
    for _ in range(2):
        made = wager.LLM("random:llama:tiny", **OPTIONS)
        begun, answers = threading.Barrier(5), []

        def answer(made: wager.LLM = made, begun: Any = begun, answers: list[Any] = answers) -> None:
            stream = made.stream("abc", replace(PARAMS, max_tokens=240))
            begun.wait()
            deque(stream, maxlen=0)
            answers.extend(stream.completions())

        threads = [threading.Thread(target=answer) for _ in range(4)]
        for thread in threads:
            thread.start()
        begun.wait()
        made.close()
        for thread in threads:
            thread.join()
        assert len(answers) == 4
        assert {each.finish_reason for each in answers} <= {"abort", "length"}


def test_steps_within_a_callback_are_refused(llm: wager.LLM) -> None:
    expected = llm.generate("abc", PARAMS).token_ids
    llm.engine.on_step = lambda _: llm.generate("abc", PARAMS)
    try:
        with pytest.raises(wager.UsageError, match=r"Engine.step was called within on_step"):
            llm.generate("abc", PARAMS)
    finally:
        llm.engine.on_step = lambda _: None
    assert llm.generate("abc", PARAMS).token_ids == expected
    assert not llm.engine.busy


# ---- token ids of other types ---------------------------------------------------------------------------------------


def test_arrays_and_tensors_are_prompts(llm: wager.LLM) -> None:
    ids = llm.tokenizer.encode("abc abc abc")
    one = llm.generate(ids, PARAMS).token_ids
    same = [np.array(ids), np.array(ids, dtype=np.uint16), torch.tensor(ids), [np.int64(id) for id in ids], deque(ids)]
    for prompt in same:
        assert llm.generate(prompt, PARAMS).token_ids == one  # type: ignore[call-overload]
        assert sum((delta.token_ids for delta in llm.stream(prompt, PARAMS)), ()) == one  # type: ignore[arg-type]
    assert [each.token_ids for each in llm.generate([*same, "abc abc abc"], PARAMS)] == [one] * 6  # type: ignore[list-item]
    for batch in (np.array([ids, ids]), torch.tensor([ids, ids])):
        assert [each.token_ids for each in llm.generate(batch, PARAMS)] == [one] * 2  # type: ignore[call-overload]
    assert llm.generate(range(3, 9), PARAMS).token_ids == llm.generate([3, 4, 5, 6, 7, 8], PARAMS).token_ids
