"""Drafters that raise, return garbage, die or are slow while requests run: these go on, with the same text."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from serve.serving import CHAT, MESSAGES, Running, running

BODIES: list[dict[str, Any]] = [
    {"messages": MESSAGES, "max_tokens": 60, "ignore_eos": True, "seed": seed, "temperature": 0.8 * (seed % 2)}
    for seed in range(8)
]


def texts(server: Running, **fields: Any) -> list[str]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda body: server.text({**body, **fields}), BODIES))


@pytest.mark.parametrize("fault", ["it raises", "its tokens are unknown"])
def test_a_drafter_that_breaks_in_mid_flight(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    """The log names it, the metrics too; requests that come later are answered, also those that ask for it."""
    with running({"depth": None, "drafter": "ngram,recycle"}) as server:
        plain = texts(server, speculation="off")
        drafter = server.llm.engine.proposer.drafters["ngram"]
        propose = drafter.propose

        def broken(requests: Any) -> Any:
            drafts = propose(requests)
            if fault == "it raises" and drafts:
                raise RuntimeError("no more")
            return [replace(draft, tokens=(10**6,) * len(draft)) for draft in drafts]

        drafter.propose = broken  # type: ignore[method-assign]
        assert texts(server) == plain
        assert server.text({**BODIES[0], "speculation": {"drafter": "ngram"}}) == plain[0]
        found = server.metrics()
    name = "wager:drafter_failures_total,drafter="
    assert found[f"{name}recycle"] == 0
    if fault == "it raises":
        assert found[f"{name}ngram"] > 0 and "Drafter 'ngram' failed and " in caplog.text


def test_a_request_that_names_a_drafter_that_pauses_is_answered() -> None:
    """With plain decoding; the metrics say that it pauses, and that it does so no more."""
    body = {"messages": MESSAGES, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    named = {**body, "speculation": {"drafter": "ngram", "depth": 4}}
    with running({"depth": None, "drafter": "ngram"}) as server:
        drafter = server.llm.engine.proposer.drafters["ngram"]
        observe, failing = drafter.observe, True

        def fails(output: Any) -> None:
            if failing:
                raise RuntimeError("no more")
            observe(output)

        drafter.observe = fails  # type: ignore[method-assign]
        plain = server.post(CHAT, body).json()["choices"]
        assert server.metrics()["wager:drafter_failed,drafter=ngram"] == 1
        failing = False
        answer = server.post(CHAT, named)
        assert answer.status_code == 200 and answer.json()["choices"] == plain
        assert server.metrics()["wager:drafter_failed,drafter=ngram"] == 1
        long = {**named, "max_tokens": 100}
        assert server.post(CHAT, long).status_code == 200
        found = server.metrics()
        assert found["wager:drafter_failed,drafter=ngram"] == 0
        assert found["wager:drafter_failures_total,drafter=ngram"] == 1
        assert found["wager:spec_decode_num_drafts_total,drafter=ngram"] > 0
        assert server.post(CHAT, named).json()["choices"] == plain


@pytest.mark.slow
def test_a_drafter_that_becomes_slow_is_not_asked_any_more() -> None:
    """The policy learns what it takes within some calls, and pays for its trials; the text stays. Steps take 0.1 ms."""
    body = {"messages": MESSAGES, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    with running({"depth": None, "drafter": "ngram"}) as server:
        plain = server.post(CHAT, body).json()["choices"]
        drafter = server.llm.engine.proposer.drafters["ngram"]
        calls, propose = [], drafter.propose

        def slow(requests: Any) -> Any:
            calls.append(len(requests))
            time.sleep(0.02)
            return propose(requests)

        drafter.propose = slow  # type: ignore[method-assign]
        for answers in range(40):
            if calls and answers >= 10:
                break
            assert server.post(CHAT, body).json()["choices"] == plain
        assert 0 < len(calls) < 60
