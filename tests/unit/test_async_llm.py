"""AsyncLLM on a small random model: the texts of LLM, streams that are cancelled and dropped, an engine that fails."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import Coroutine
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

import wager
from wager.async_llm import ChoiceDelta
from wager.types import SamplingParams

PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
LONG = replace(PARAMS, max_tokens=200)
OPTIONS: dict[str, Any] = dict(max_context=256, max_sequences=4, max_rows=64, threads=1, drafter="ngram", depth=3)
PROMPTS = ["abc abc abc", "x", "one two one two one"]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


def made() -> wager.AsyncLLM:
    return wager.AsyncLLM("random:llama:tiny", **OPTIONS)


def free_blocks(llm: wager.AsyncLLM) -> int:
    return llm.engine.scheduler.block_pool.num_free_blocks


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
def test_requests_that_cannot_be_served_are_refused_and_the_others_go_on() -> None:
    async def work() -> None:
        async with made() as llm:
            running = asyncio.create_task(llm.generate("abc", PARAMS))
            with pytest.raises(wager.RequestError, match="2000"):
                await llm.generate([5] * 2000, PARAMS)
            with pytest.raises(wager.UsageError, match="conversation"):
                await llm.chat("hello", PARAMS)  # type: ignore[arg-type]
            request = llm.request((1, 2, 3), LONG)
            first, second = llm.open_stream(request), llm.open_stream(request)
            await first.start()
            with pytest.raises(wager.RequestError, match="in use"):
                await second.start()
            with pytest.raises(wager.RequestError, match="not ended"):
                first.completions()
            with pytest.raises(wager.RequestError, match="2000"):
                await llm.generate(["abc", [5] * 2000, "x"], LONG)
            assert len((await running).token_ids) == 12
            assert [delta.finish_reason async for delta in first][-1] == "length"
            await until_idle(llm)
            assert not llm._streams

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

            def slow(grammar: wager.Grammar) -> wager.Grammar:
                asyncio.run_coroutine_threadsafe(compiled.wait(), loop).result(30)
                return compile_(grammar)

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
