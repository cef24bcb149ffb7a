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
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def request(name: str) -> Request:
    return Request(name, (1, 2, 3, 1, 2, 3, len(name)), PARAMS)


def engine() -> Engine:
    return toy_engine(LAW, drafter=NgramDrafter())


def answers(*names: str) -> dict[str, tuple[int, ...]]:
    return tokens_of(engine().generate([request(name) for name in names]))


def tokens_of(completions: Sequence[Completion]) -> dict[str, tuple[int, ...]]:
    return {each.request_id: each.token_ids for each in completions}


def run_with(tried: Engine, place: str, call: Callable[[], object]) -> list[Completion]:
    """Two requests; `call` is called once, at the third callback."""
    calls = []

    def callback(_: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            call()

    if place == "on_step":
        tried.on_step = callback
        return tried.generate([request("a"), request("bb")])
    return tried.generate([request("a"), request("bb")], on_output=callback)


# ---- callbacks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["on_step", "on_output"])
@pytest.mark.parametrize("name", ["step", "generate"])
def test_steps_within_a_callback_are_refused_by_name(place: str, name: str) -> None:
    tried = engine()
    calls = {"step": tried.step, "generate": lambda: tried.generate([request("inner")])}
    with pytest.raises(UsageError, match=f"Engine.{name} was called within {place} of the same engine"):
        run_with(tried, place, calls[name])
    assert not tried.busy or tried.step()  # what was aborted is still to be returned
    assert tokens_of(tried.generate([request("a"), request("bb")], on_output=None)) == answers("a", "bb")
    tried.check()


@pytest.mark.parametrize("place", ["on_step", "on_output"])
def test_requests_may_be_added_and_preempted_within_a_callback(place: str) -> None:
    tried, collected = engine(), []
    assert tokens_of(run_with(tried, place, lambda: tried.add(request("ccc")))) == answers("a", "bb")
    assert tokens_of(run_with(tried, place, tried.preempt_all)) == answers("a", "bb")
    ended = run_with(tried, place, lambda: collected.append(tried.abort("bb")))
    assert [each.finish_reason for each in ended] == ["length", "abort"]
    assert ended[0].token_ids == answers("a")["a"]
    assert collected == [True]


@pytest.mark.parametrize("name", ["step", "add", "abort", "preempt_all", "generate"])
def test_a_drafter_may_call_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    class Meddler(NgramDrafter):
        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            del requests
            arguments: dict[str, tuple[Any, ...]] = {
                "add": (request("c"),),
                "abort": ("a",),
                "generate": ([request("c")],),
            }
            getattr(tried, name)(*arguments.get(name, ()))
            return []

    tried = toy_engine(LAW, drafter=Meddler())
    assert tokens_of(tried.generate([request("a")])) == answers("a")
    assert f"Engine.{name} was called within step of the same engine" in caplog.text
    tried.check()


# ---- threads --------------------------------------------------------------------------------------------------------


def test_a_second_thread_is_refused_by_name() -> None:
    """Whatever it calls; the answers of the first do not change."""
    tried, refusals = engine(), []
    calls: list[Callable[[], object]] = [
        tried.step,
        tried.preempt_all,
        lambda: tried.add(request("c")),
        lambda: tried.abort("a"),
        lambda: tried.generate([request("c")]),
    ]

    def meddle() -> None:
        for call in calls:
            with pytest.raises(UsageError) as caught:
                call()
            refusals.append(caught.value)

    def from_another_thread() -> None:
        second = threading.Thread(target=meddle, name="second")
        second.start()
        second.join()

    done = run_with(tried, "on_output", from_another_thread)
    assert tokens_of(done) == answers("a", "bb")
    assert len(refusals) == len(calls)
    for name, refusal in zip(("step", "preempt_all", "add", "abort", "generate"), refusals, strict=True):
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
    served = [thread for thread, result in results.items() if isinstance(result, dict)]
    assert served and len(results) == 4
    for thread, result in results.items():
        assert isinstance(result, UsageError) or result == answers(*names[thread])
    tried.check()


# ---- concurrency ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [0, -1, 1.5, True, "2"])
def test_a_concurrency_that_never_ends_is_refused(concurrency: Any) -> None:
    tried = engine()
    with pytest.raises(UsageError, match=f"concurrency = {concurrency!r} is not possible"):
        tried.generate([request("a")], concurrency=concurrency)
    assert not tried.busy
    assert tokens_of(tried.generate([request("a"), request("bb")], concurrency=1)) == answers("a", "bb")
