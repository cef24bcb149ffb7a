"""The dashboard's files and numbers, without a browser."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from serve.serving import Running, running
from wager.economics.policy.heuristics import FixedDepth
from wager.engine.draft_counts import DraftCounter, DrafterCounts
from wager.engine.grammar_drafts import DraftOfSeveral
from wager.serve import live
from wager.serve.live import PAGE_PATHS
from wager.types import Draft, Verdict

BODY = {"messages": [{"role": "user", "content": "one two one two"}], "max_tokens": 20, "ignore_eos": True}


def test_every_file_of_the_page_is_served_without_a_key_and_may_load_nothing_else() -> None:
    folder = Path(live.__file__).parent / "dashboard"
    assert {f"/{path.name}" for path in folder.iterdir()} - {"/index.html"} == set(PAGE_PATHS) - {"/"}
    with running(api_keys=("correct-horse-battery",)) as server, server.client() as http:
        assert http.get("/live").status_code == 401
        for path in PAGE_PATHS:
            answer = http.get(path)
            assert answer.status_code == 200 and answer.text.strip()
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
            kind = {"css": "text/css", "js": "text/javascript"}.get(path.rpartition(".")[2], "text/html")
            assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
        assert "<style" not in (page := http.get("/").text) and "style=" not in page and "onclick" not in page


def test_the_numbers_add_up(server: Running) -> None:
    answer = server.post("/v1/chat/completions", BODY).json()
    time.sleep(live._FRESH_S)
    with server.client() as http:
        found = http.get("/live").json()
    assert found["tokens"] == answer["usage"]["completion_tokens"] == 20
    assert (found["running"], found["waiting"], found["max_running"]) == (0, 0, 8)
    assert found["steps"] > 0 < found["stage_seconds"]["forward"]
    assert found["collapsed"] == {} and "figures" in found and isinstance(found["policy"], str)


def test_many_pages_ask_the_engine_no_more_often_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server, server.client() as http:
        asked = []
        explain = server.llm.engine.policy.explain
        monkeypatch.setattr(server.llm.engine.policy, "explain", lambda: (asked.append(time.monotonic()), explain())[1])
        end = time.monotonic() + 1.2
        answers = []
        while time.monotonic() < end:
            answers.append(http.get("/live").json()["uptime_s"])
        assert len(answers) > 20 and len(asked) <= 4
        assert len(set(answers)) == len(asked)


def test_a_failed_engine_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server, server.client() as http:
        monkeypatch.setattr(server.llm.engine.runner.target, "forward", lambda _batch: 1 / 0)
        assert server.post("/v1/chat/completions", BODY).status_code >= 500
        answer = http.get("/live")
        assert answer.status_code == 503 and "engine" in answer.json()["error"]["message"].lower()


def test_drafts_are_counted_by_their_depth_and_by_their_guesses() -> None:
    tree = Draft("s", (1, 2, 3, 4), (-1, 0, 0, 1), drafter="suffix")  # three deep
    chain = Draft.chain("s", (1, 2), drafter="suffix")
    forced = DraftOfSeveral("s", (1, 2, 3), (-1, 0, 1), (), "ngram", None, ("grammar", "ngram", "ngram"))
    counter = DraftCounter(FixedDepth(3))
    for draft, accepted in ((tree, (0, 2)), (chain, ()), (forced, (0, 1))):
        counter._count_draft(draft, Verdict("s", accepted, (9,) * (len(accepted) + 1)))
    assert counter.drafters["suffix"] == DrafterCounts([0, 0, 1, 0, 1], [1, 0, 1], [0, 0, 1, 1])
    assert counter.drafters["ngram"] == DrafterCounts([0, 0, 1], [0, 1], [0, 0, 1])
    assert counter.drafters["grammar"] == DrafterCounts([0, 1], [0, 1], [0, 1])
