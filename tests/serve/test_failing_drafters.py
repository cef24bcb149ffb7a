"""Drafters that raise, return garbage, die or are slow while requests run: these go on, with the same text."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from serve.real_server import RealServer, served
from serve.serving import CHAT, MESSAGES, running

BODIES: list[dict[str, Any]] = [
    {"messages": MESSAGES, "max_tokens": 120, "ignore_eos": True, "seed": seed, "temperature": 0.8 * (seed % 2)}
    for seed in range(16)
]


def texts(server: RealServer) -> list[str]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(server.text, BODIES))


@pytest.fixture(scope="module")
def plain() -> list[str]:
    with served("--drafter", "none") as server:
        return texts(server)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["failing", "garbage", "killed", "failing,ngram"])
def test_a_drafter_that_breaks_in_mid_flight(drafter: str, plain: list[str]) -> None:
    """The log names it, the metrics too; requests that come later are answered, also those that ask for it."""
    with served("--drafter", drafter) as server:
        for _ in range(2):  # what fails, and when, is drawn from the first sequence's id
            assert texts(server) == plain
        found = server.metrics()
        first = drafter.split(",")[0]
        assert found[f"wager:drafter_failed,drafter={first}"] in (0, 1)
        if drafter == "garbage":
            return
        assert found[f"wager:drafter_failures_total,drafter={first}"] > 0
        assert f"Drafter '{first}' failed and " in server.log
        if "ngram" in drafter:
            assert found["wager:drafter_failures_total,drafter=ngram"] == 0
        assert server.text({**BODIES[0], "speculation": {"drafter": first}}) == plain[0]
        with server.client() as http:
            assert http.get("/health").status_code == 200


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
