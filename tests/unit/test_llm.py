"""LLM and AsyncLLM on a small random model: prompts, completions, streams that end early, are cancelled or dropped, an
engine that fails, closing."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wager
from wager.async_llm import ChoiceDelta
from wager.constrain.compiler import GrammarCompiler
from wager.loading.load import LoadedEngine
from wager.types import SamplingParams

PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
OPTIONS: dict[str, Any] = dict(max_context=256, max_sequences=4, max_rows=64, threads=1, drafter="ngram", depth=3)
CONVERSATION = [{"role": "user", "content": "one two three one two three one two three"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[wager.LLM]:
    with wager.LLM("random:llama:tiny", **OPTIONS) as made:
        yield made


def free_blocks(llm: wager.LLM | wager.AsyncLLM) -> int:
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


def test_sampling_options_of_the_configuration_are_the_default(llm: wager.LLM) -> None:
    with wager.LLM("random:llama:tiny", **OPTIONS, max_tokens=5, ignore_eos=True, seed=1, temperature=0.5) as other:
        assert other.config.sampling == SamplingParams(max_tokens=5, ignore_eos=True, seed=1, temperature=0.5)
        default = other.generate("abc")
        assert len(default.token_ids) == 5
        assert default.token_ids == llm.generate("abc", other.config.sampling).token_ids
        changed = wager.LLM(config=other.config, max_tokens=3)
        assert (changed.config.model.model, changed.config.sampling.max_tokens) == ("random:llama:tiny", 3)
        changed.close()


# ---- conversations --------------------------------------------------------------------------------------------------


def test_chat_answers_one_conversation_or_several(llm: wager.LLM) -> None:
    one = llm.chat(CONVERSATION, PARAMS)
    text = llm.tokenizer.chat(CONVERSATION)
    assert one.token_ids == llm.generate(llm.tokenizer.encode(text, special=False), PARAMS).token_ids
    other = [{"role": "system", "content": "be"}, {"role": "user", "content": "x"}]
    both = llm.chat([CONVERSATION, other], PARAMS)
    assert both[0].token_ids == one.token_ids
    assert both[1].stats.prompt_tokens == len(llm.tokenizer.encode(llm.tokenizer.chat(other), special=False))


# ---- streams --------------------------------------------------------------------------------------------------------


def test_a_chat_template_may_come_from_a_file(llm: wager.LLM, tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    with wager.LLM("random:llama:tiny", chat_template=path, **OPTIONS) as own:
        assert own.chat([{"role": "user", "content": "hi"}], PARAMS).token_ids == llm.generate("[hi]", PARAMS).token_ids
    path.write_text("{% for %}")
    with pytest.raises(wager.TokenizerError, match="template is damaged"):
        wager.LLM("random:llama:tiny", chat_template=path)
    with pytest.raises(wager.UsageError, match=r"none\.jinja"):
        wager.LLM("random:llama:tiny", chat_template=tmp_path / "none.jinja")


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


def test_a_stream_that_is_left_early_frees_its_blocks(llm: wager.LLM) -> None:
    before = free_blocks(llm)
    long = replace(PARAMS, max_tokens=200)
    with pytest.raises(ZeroDivisionError):
        for _ in llm.stream("abc", long):
            _ = 1 / 0
    assert free_blocks(llm) == before
    with llm.stream("abc", long) as stream:
        next(stream)
        assert free_blocks(llm) < before
    stream.close()
    assert list(stream) == []
    assert free_blocks(llm) == before
    assert not llm.engine.scheduler.num_running
    llm.generate("abc", PARAMS)
    assert not llm.engine.scheduler.busy


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
        (lambda llm: llm.generate(np.int64(5)), "type int64"),
        (lambda llm: llm.generate([[1, 2], 3]), r"3 \(int\) is not a sequence"),
        (lambda llm: llm.generate([1, "abc"]), r"token 'abc' \(str\) at index 1"),
    ],
)
def test_what_cannot_be_answered_is_named(llm: wager.LLM, call: Any, message: str) -> None:
    with pytest.raises(wager.UsageError, match=message):
        call(llm)
    assert not llm.engine.scheduler.busy


def test_threads_that_leave_their_streams_disturb_nobody(llm: wager.LLM) -> None:
    """Each of them gets its own text; streams that are left early, dropped or aborted free their blocks."""
    before = free_blocks(llm)
    alone = {i: llm.generate(f"{i} {i} {i} abc", PARAMS).token_ids for i in range(8)}

    def answer(index: int) -> list[tuple[int, ...]]:
        prompt, long, found = f"{index} {index} {index} abc", replace(PARAMS, max_tokens=200), []
        for turn in range(index, index + 8):
            if turn % 4 == 1:
                for _ in llm.stream(prompt, long):
                    break
            elif turn % 4 == 2:
                stream = llm.stream(prompt, long)
                next(stream)
                stream.abort()
                assert [delta.finish_reason for delta in stream][-1] == "abort"
            elif turn % 4 == 3:
                found.append(tuple(token for delta in llm.stream(prompt, PARAMS) for token in delta.token_ids))
            else:
                found.append(llm.generate(prompt, PARAMS).token_ids)
        return found

    with ThreadPoolExecutor(8) as pool:
        for index, found in enumerate(pool.map(answer, range(8))):
            assert found == [alone[index]] * 4
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
    made = wager.LLM("random:llama:tiny", **OPTIONS)
    begun, answers = threading.Barrier(5), []

    def answer() -> None:
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
    assert len(answers) == 4 and {each.finish_reason for each in answers} <= {"abort", "length"}


# ---- token ids of other types ---------------------------------------------------------------------------------------


def test_arrays_and_tensors_are_prompts(llm: wager.LLM) -> None:
    ids = llm.tokenizer.encode("abc abc abc")
    one = llm.generate(ids, PARAMS).token_ids
    same = [np.array(ids), np.array(ids, dtype=np.uint16), torch.tensor(ids), [np.int64(id) for id in ids], deque(ids)]
    for prompt in same:
        assert llm.generate(prompt, PARAMS).token_ids == one  # type: ignore[call-overload]
        assert sum((delta.token_ids for delta in llm.stream(prompt, PARAMS)), ()) == one  # type: ignore[arg-type]
    assert [each.token_ids for each in llm.generate([*same, "abc abc abc"], PARAMS)] == [one] * 6  # type: ignore[list-item]
    assert llm.generate(range(3, 9), PARAMS).token_ids == llm.generate([3, 4, 5, 6, 7, 8], PARAMS).token_ids


# ---- AsyncLLM --------------------------------------------------------------------------------------------------------

LONG = replace(PARAMS, max_tokens=200)
PROMPTS = ["abc abc abc", "x", "one two one two one"]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


def made() -> wager.AsyncLLM:
    return wager.AsyncLLM("random:llama:tiny", **OPTIONS)


def slow_down(llm: wager.AsyncLLM, seconds: float) -> None:
    """Every step takes so much longer: on a busy machine an answer ends before the event loop has its turn."""
    step = llm.engine.step

    def slow() -> Any:
        time.sleep(seconds)
        return step()

    llm.engine.step = slow  # type: ignore[method-assign]


async def reads(stream: wager.AsyncOutputStream) -> list[list[ChoiceDelta]]:
    found = []
    while some := await stream.next_deltas():
        found.append(some)
    return found


async def until_idle(llm: wager.AsyncLLM) -> None:
    while llm.engine.busy:
        await asyncio.sleep(0.005)


def test_concurrent_answers_are_those_of_the_synchronous_interface() -> None:
    with wager.LLM("random:llama:tiny", **OPTIONS) as llm:
        plain = [llm.generate(prompt, PARAMS).token_ids for prompt in PROMPTS]
        talk = llm.chat([{"role": "user", "content": "hello"}], PARAMS).token_ids

    async def work() -> None:
        async with made() as llm:
            answers = await asyncio.gather(*(llm.generate(prompt, PARAMS) for prompt in PROMPTS * 3))
            assert [answer.token_ids for answer in answers] == plain * 3
            together = await llm.generate(PROMPTS, PARAMS)
            assert [answer.token_ids for answer in together] == plain
            turns = [{"role": "user", "content": "hello"}]
            assert (await llm.chat(turns, PARAMS)).token_ids == talk
            assert [answer.token_ids for answer in await llm.chat([turns, turns], PARAMS)] == [talk, talk]
            choices: Any = await llm.generate("abc", replace(PARAMS, n=3))
            assert [choice.index for choice in choices] == [0, 1, 2]
            assert len({choice.token_ids for choice in choices}) == 3

    run(work())


def test_a_stream_yields_every_delta_one_by_one_or_gathered() -> None:
    async def work() -> None:
        async with made() as llm:
            whole = await llm.generate("abc abc abc", PARAMS)
            deltas = [delta async for delta in llm.stream("abc abc abc", PARAMS)]
            assert sum((delta.token_ids for delta in deltas), ()) == whole.token_ids
            assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
            stream = llm.stream("abc abc abc", PARAMS)
            gathered = [*chain(*await reads(stream))]
            assert sum((item.delta.token_ids for item in gathered), ()) == whole.token_ids
            assert stream.completions()[0].token_ids == whole.token_ids
            several = llm.open_stream(*(llm.request(tuple(llm.tokenizer.encode(each)), PARAMS) for each in PROMPTS))
            found: dict[int, tuple[int, ...]] = dict.fromkeys(range(3), ())
            for item in chain(*await reads(several)):
                found[item.choice] += item.delta.token_ids
            assert [*found.values()] == [each.token_ids for each in several.completions()]
            assert found[0] == whole.token_ids

    run(work())


def test_readers_take_turns_when_only_some_are_woken_after_a_step() -> None:
    async def work() -> None:
        async with made() as llm:
            llm.streams_per_step = 1
            whole = await asyncio.gather(*(llm.generate("x", replace(PARAMS, seed=seed)) for seed in range(4)))
            slow_down(llm, 0.03)
            streams = [llm.stream("x", replace(PARAMS, seed=seed)) for seed in range(4)]
            for answer, items in zip(whole, await asyncio.gather(*(reads(each) for each in streams)), strict=True):
                deltas = [item.delta for part in items for item in part]
                assert sum((delta.token_ids for delta in deltas), ()) == answer.token_ids
                assert len(items) < len(deltas)  # several steps at once
                assert len(items[0]) == 1  # the first one waited for nobody

    run(work())


@pytest.mark.slow
def test_cancelled_dropped_and_closed_requests_free_their_blocks() -> None:
    async def work() -> None:
        async with made() as llm:
            slow_down(llm, 0.01)
            free = free_blocks(llm)
            task = asyncio.create_task(llm.generate("abc", LONG))
            stream = llm.stream("xyz", LONG)
            await anext(stream)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            del stream
            gc.collect()
            async with llm.stream("left", LONG) as left:
                await anext(left)
            async with llm.stream("abc", LONG) as never_begun:
                pass
            assert [delta async for delta in never_begun] == []
            await until_idle(llm)
            assert free_blocks(llm) == free
            kept = llm.stream("kept", LONG)
            await anext(kept)
            kept.abort()
            assert [delta.finish_reason async for delta in kept][-1] == "abort"

    run(work())


def test_closing_ends_what_runs_and_refuses_what_comes() -> None:
    async def work() -> None:
        llm = made()
        slow_down(llm, 0.01)
        stream = llm.stream("abc", LONG)
        await anext(stream)
        await llm.close()
        await llm.close()
        assert [delta.finish_reason async for delta in stream][-1] == "abort"
        with pytest.raises(wager.ClosedError):
            await llm.generate("abc", PARAMS)

    run(work())


@pytest.mark.parametrize("error", [wager.CacheIntegrityError("Two blocks are one."), SystemExit("over")])
def test_whatever_ends_the_engines_thread_is_told(error: BaseException) -> None:
    async def work() -> None:
        async with made() as llm:
            slow_down(llm, 0.01)
            stream = llm.stream("abc", LONG)
            await anext(stream)

            def fail() -> Any:
                raise error

            llm.engine.step = fail  # type: ignore[method-assign]
            words = "Two blocks" if isinstance(error, wager.WagerError) else "SystemExit"
            with pytest.raises(wager.WagerError, match=words):
                async for _ in stream:
                    pass
            assert llm.failure is not None
            with pytest.raises(wager.ClosedError, match=words):
                await llm.generate("abc", PARAMS)

    run(work())


# ---- ends ------------------------------------------------------------------------------------------------------------


def test_one_event_loop_at_a_time() -> None:
    """Another is refused while the first is open; when that is closed what ran in it ends, and the next may come."""
    llm = made()
    slow_down(llm, 0.01)
    left: list[wager.AsyncOutputStream] = []

    async def begin() -> None:
        left.append(llm.stream("left", LONG))
        await anext(left[0])

    async def work() -> tuple[int, ...]:
        return (await llm.generate("abc", PARAMS)).token_ids

    first = asyncio.new_event_loop()
    first.run_until_complete(begin())
    with pytest.raises(wager.UsageError, match="two event loops"):
        run(work())
    first.close()
    assert run(work()) == run(work())

    async def end() -> None:
        await until_idle(llm)
        assert not llm._streams
        await llm.close()

    run(end())


def test_a_stream_that_is_closed_while_it_starts_does_not_run() -> None:
    """Its grammar is compiled before the engine gets it."""

    async def work() -> None:
        async with made() as llm:
            compiled, compile_ = asyncio.Event(), llm.engine.grammars.compile  # type: ignore[union-attr]
            loop = asyncio.get_running_loop()

            def slow(grammar: wager.Grammar, *, tenant: str) -> wager.Grammar:
                asyncio.run_coroutine_threadsafe(compiled.wait(), loop).result(30)
                return compile_(grammar, tenant=tenant)

            llm.engine.grammars.compile = slow  # type: ignore[union-attr, method-assign]
            stream = llm.stream("abc", SamplingParams(max_tokens=100, grammar=wager.Grammar.regex("[ab]+")))
            starting = asyncio.create_task(stream.start())
            await asyncio.sleep(0.02)
            assert (await llm.generate("abc", PARAMS)).token_ids  # nobody waits for the compiler
            stream.close()
            compiled.set()
            await starting
            assert not llm.engine.open_requests

    run(work())


def test_a_grammar_is_compiled_once_for_its_tenant_and_not_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def compile(self: GrammarCompiler, grammar: wager.Grammar, *, inner: Any = GrammarCompiler._compile) -> Any:
        threads.append(threading.current_thread().name)
        return inner(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "_compile", compile)

    async def work() -> None:
        async with made() as llm:
            params = SamplingParams(max_tokens=4, grammar=wager.Grammar.regex("[ab]+"))
            async with llm.open_stream(llm.request((97,), params, tenant="anna")) as stream:
                await stream.complete()

    run(work())
    assert len(threads) == 1 and "wager-engine" not in threads


@pytest.mark.slow
def test_a_process_may_end_while_requests_run() -> None:
    """Nobody closed the model, and its thread is within a pass."""
    program = """
import asyncio, sys, wager

llm = wager.AsyncLLM("random:llama:tiny", threads=1, drafter="ngram")
stream = llm.stream("abc", wager.SamplingParams(max_tokens=8000, ignore_eos=True))
loop = asyncio.new_event_loop()
loop.run_until_complete(anext(stream))
slow_to_free = [[number] for number in range(3_000_000)]
sys.exit(3)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (3, "")
