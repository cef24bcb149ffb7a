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


@pytest.mark.parametrize("drafter", ["failing", "garbage", "killed", "failing,ngram"])
def test_a_drafter_that_breaks_in_mid_flight(drafter: str, plain: list[str]) -> None:
    """The log names it, the metrics too; requests that come later may not ask for it, all others are answered."""
    with served("--drafter", drafter) as server:
        for _ in range(2):  # what fails, and when, is drawn from the first sequence's id
            assert texts(server) == plain
        found = server.metrics()
        first = drafter.split(",")[0]
        if drafter == "garbage":
            assert found["wager:drafter_failed,drafter=garbage"] in (0, 1)
            return
        assert found[f"wager:drafter_failed,drafter={first}"] == 1
        assert f"Drafter '{first}' failed and is switched off" in server.log
        if "ngram" in drafter:
            assert found["wager:drafter_failed,drafter=ngram"] == 0
        refused = server.post(CHAT, {**BODIES[0], "speculation": {"drafter": first}})
        assert refused.status_code == 400 and first in refused.json()["error"]["message"]
        with server.client() as http:
            assert http.get("/health").status_code == 200


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
