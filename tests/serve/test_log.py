"""The log of the server: a line for every request that says how its answer ended, and lines for its own end."""

from __future__ import annotations

import json
import logging

import pytest

from serve.serving import CHAT, SHORT, running
from wager.serve.run import JsonLines

ROOMY = {"max_context": 8192}


def test_the_log_says_how_a_stream_was_cut(caplog: pytest.LogCaptureFixture) -> None:
    """Its status is 200: the head was sent before."""
    logger, endless = logging.getLogger("wager.serve"), {**SHORT, "max_tokens": 8000, "n": 8, "stream": True}
    with caplog.at_level(logging.INFO, logger.name), running(ROOMY, request_timeout=0.2) as server:
        assert "was not complete" in server.post(CHAT, endless).text
    with (
        caplog.at_level(logging.INFO, logger.name),
        running(ROOMY, drain_timeout=0.05) as server,
        server.client() as client,
        client.stream("POST", CHAT, json=endless) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        server.stop()
        assert '"finish_reason":"abort"' in "".join(lines)
    timed_out, drained = (record for record in caplog.records if hasattr(record, "said"))
    assert timed_out.said["status"] == drained.said["status"] == 200  # type: ignore[attr-defined]
    assert timed_out.fields["error"] == 504 and "finish_reason" not in timed_out.fields  # type: ignore[attr-defined]
    assert "abort" in drained.fields["finish_reason"].split(",")  # type: ignore[attr-defined]


def test_the_log_is_json_with_the_tokens_of_every_request(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("wager.serve")
    with caplog.at_level(logging.INFO, logger.name), running() as server:
        usage = server.post(CHAT, SHORT, headers={"x-request-id": "told"}).json()["usage"]
        server.post(CHAT, {**SHORT, "stream": True}, headers={"x-request-id": "streamed"})
        server.post(CHAT, {**SHORT, "speculation": {"drafter": "eagle3"}})
        server.post("/no%0D%0Asuch", {})
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records if record.name == logger.name]
    told, streamed, refused, wrong, *ended = lines[-6:]
    assert refused["status"] == 400 and "finish_reason" not in refused, "it did not begin"
    assert told["request_id"] == "told" and streamed["request_id"] == "streamed"
    for line in (told, streamed):
        assert (line["method"], line["path"], line["status"]) == ("POST", CHAT, 200)
        assert line["finish_reason"] == "length" and "error" not in line
        assert {name: line[name] for name in ("prompt_tokens", "completion_tokens")} == {
            name: usage[name] for name in ("prompt_tokens", "completion_tokens")
        }
    assert [line["message"].split(":")[0] for line in ended] == ["draining", "ended"]
    assert wrong["path"] == "/no??such" and wrong["status"] == 404 and "prompt_tokens" not in wrong
