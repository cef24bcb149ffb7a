"""How streams and loops of an AsyncLLM end: closed before they begin, a second event loop, the end of its thread."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import wager
from unit.test_async_llm import LONG, PARAMS, made, run, slow_down, until_idle
from wager.types import SamplingParams


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


def test_a_stream_that_is_closed_first_never_starts() -> None:
    async def work() -> None:
        async with made() as llm:
            async with llm.stream("abc", LONG) as stream:
                pass
            assert [delta async for delta in stream] == []
            assert not llm.engine.open_requests

    run(work())


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


def test_whatever_ends_the_engines_thread_is_told() -> None:
    async def work() -> None:
        async with made() as llm:
            slow_down(llm, 0.01)
            stream = llm.stream("abc", LONG)
            await anext(stream)

            def leave() -> Any:
                raise SystemExit("over")

            llm.engine.step = leave  # type: ignore[method-assign]
            with pytest.raises(wager.WagerError, match="SystemExit"):
                async for _ in stream:
                    pass

    run(work())


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
    environment = {**os.environ, "PYTHONPATH": str(Path(wager.__file__).parents[1])}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment
    )
    assert (ended.returncode, ended.stderr) == (3, "")
