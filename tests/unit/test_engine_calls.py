"""Calls that meet in one engine: within callbacks, within a step, and from several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from wager.draft.ngram import NgramDrafter
from wager.engine.core import Engine
from wager.errors import UsageError
from wager.testing import ToyDistribution
from wager.testing.toy import toy_engine
from wager.types import Completion, Draft, DraftRequest, Request, SamplingParams

LAW = ToyDistribution(vocab=48, memory=0.5)


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


def test_four_threads_either_answer_rightly_or_are_refused() -> None:
    tried = engine()
    names = {thread: [f"{'x' * thread}-{i}" for i in range(10)] for thread in range(1, 5)}
    results: dict[int, object] = {}

    def go(thread: int) -> None:
        try:
            results[thread] = tokens_of(tried.generate([request(name) for name in names[thread]]))
        except UsageError as error:
            results[thread] = error

    threads = [threading.Thread(target=go, args=(thread,)) for thread in names]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(results) == 4 and any(isinstance(result, dict) for result in results.values())
    for thread, result in results.items():
        assert isinstance(result, UsageError) or result == answers(*names[thread])
    tried.check()


@pytest.mark.parametrize("concurrency", [0, -1, 1.5, True, "2"])
def test_a_concurrency_that_never_ends_is_refused(concurrency: Any) -> None:
    tried = engine()
    with pytest.raises(UsageError, match=f"concurrency = {concurrency!r} is not possible"):
        tried.generate([request("a")], concurrency=concurrency)
    assert not tried.busy
    assert tokens_of(tried.generate([request("a"), request("bb")], concurrency=1)) == answers("a", "bb")
