"""Who may ask, and what is said about it: keys, origins, request ids, the log."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import wager
from in_process import Call
from in_process import wager as command  # noqa: F401
from serve.serving import CHAT, LONG, SHORT, running
from wager.serve.limits import read_api_keys
from wager.serve.run import JsonLines, TextLines


def test_keys_are_needed_but_not_for_health(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# keys\n\nfirst-key-0123456789\n second-key-0123456789 \n")
    with running(api_keys=read_api_keys(path)) as server:
        assert server.post(CHAT, SHORT).status_code == 401
        for wrong in ("Bearer first-key-012345678", "Basic first-key-0123456789", "first-key-0123456789", "Bearer"):
            refused = server.post(CHAT, SHORT, headers={"authorization": wrong})
            assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
        for key in ("first-key-0123456789", "second-key-0123456789"):
            assert server.post(CHAT, SHORT, headers={"authorization": f"Bearer {key}"}).status_code == 200
        with server.client() as http:
            assert http.get("/health").status_code == 200
            assert http.get("/v1/models").status_code == 401
    path.write_text("short\n")
    with pytest.raises(wager.UsageError, match="Line 1"):
        read_api_keys(path)
    path.write_text("#\n")
    with pytest.raises(wager.UsageError, match="no API key"):
        read_api_keys(path)


def test_other_origins_may_call_only_if_they_were_named_and_read_why_they_are_refused() -> None:
    asked = {"origin": "https://example.org", "access-control-request-method": "POST"}
    with running() as server, server.client() as http:
        assert "access-control-allow-origin" not in http.get("/health", headers=asked).headers
    with running(cors=("https://example.org",), api_keys=("first-key-0123456789",)) as server, server.client() as http:
        assert http.options(CHAT, headers=asked).headers["access-control-allow-origin"] == "https://example.org"
        other = http.get("/health", headers={"origin": "https://example.com"})
        assert "access-control-allow-origin" not in other.headers
        refused = http.post(CHAT, json=SHORT, headers={"origin": "https://example.org"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://example.org"
    assert "x-request-id" in refused.headers["access-control-expose-headers"]


@pytest.mark.parametrize("origin", ["a.example", "https://a.example/", "https://", "HTTPS://a.example", "https:// a"])
def test_others_are_refused_before_a_model_is_loaded(command: Call, origin: str) -> None:  # noqa: F811
    ended = command("serve", "--cors", origin, "--port", "0", "--model", "nope")
    assert ended.code == 2 and f"{origin!r} is not an origin" in ended.err


def test_options_that_a_server_does_without_are_named(command: Call, tmp_path: Path) -> None:  # noqa: F811
    options = tmp_path / "options.toml"
    options.write_text('top-p = 0.5\nmax-tokens = 9\ntemperature = 0.5\ndrafter = "ngram"\n')
    ended = command("serve", "--share-between-keys", "--port", "0", "--model", "nope")
    assert ended.code == 2 and "--share-between-keys has no effect without keys" in ended.err
    ended = command("serve", "--config", str(options), "--port", "0", "--cors", "nope")
    assert ended.code == 2 and "max-tokens, top-p of the --config file have no effect" in ended.err


def test_the_log_and_the_metrics_say_how_a_stream_was_cut(caplog: pytest.LogCaptureFixture) -> None:
    """Its status is 200: the head was sent before."""
    logger, endless = logging.getLogger("wager.serve"), {**SHORT, "max_tokens": 8000, "n": 8, "stream": True}
    with caplog.at_level(logging.INFO, logger.name), running({"max_context": 8192}, request_timeout=0.2) as server:
        assert "was not complete" in server.post(CHAT, endless).text
        assert server.metrics()[f"wager:http_requests_total,path={CHAT},status=504"] == 1, "alerts see it"
    [cut, _] = (record for record in caplog.records if hasattr(record, "said"))
    assert cut.said["status"] == 200 and cut.fields["error"] == 504  # type: ignore[attr-defined]
    assert "finish_reason" not in cut.fields  # type: ignore[attr-defined]


def test_the_log_says_what_a_request_cost_and_nothing_of_its_text_or_key(caplog: pytest.LogCaptureFixture) -> None:
    """By the names of the answer's own report, whether or not that was asked for."""
    logger, keys = logging.getLogger("wager.serve"), ("correct-horse-battery", "staple-of-all-staples")
    options: Any = {"api_keys": keys, "operator_keys": ("the-operators-own-key", keys[1])}
    body = {**LONG, "messages": [{"role": "user", "content": "secret " * 40}], "max_tokens": 60, "n": 2}
    with caplog.at_level(logging.INFO, logger.name), running(**options) as server:
        heads = [{"authorization": f"Bearer {key}"} for key in (*keys, "of-nobody-at-all")]
        answer = server.post(CHAT, {**body, "speculation_stats": True}, headers=heads[0]).json()
        for head in heads:
            server.post(CHAT, {**body, "stream": True}, headers=head)
    records = [record for record in caplog.records if hasattr(record, "said")]
    lines = [json.loads(JsonLines().format(record)) for record in records]
    told, *streamed, unknown = lines
    choices = answer["speculation"]["choices"]
    for name in ("rounds", "drafted", "accepted"):
        assert [line[name] for line in (told, streamed[0])] == [sum(each[name] for each in choices)] * 2
    assert told["accepted"] > 0 and told["drafter"] == "ngram" and told["completion_tokens"] == 120
    assert told["mean_acceptance_length"] == pytest.approx(120 / told["rounds"], abs=1e-3)
    assert streamed[0]["cached_tokens"] > told["cached_tokens"] == 0
    stages = {f"{name}_s": value for name, value in answer["speculation"]["stage_seconds"].items()}
    assert {"draft_s", "forward_s", "accept_s"} <= stages.keys()
    assert {name: told[name] for name in stages} == pytest.approx(stages, abs=1e-5)
    assert told["queue_s"] >= 0 < told["prefill_s"] < told["seconds"] > told["decode_s"] > 0
    assert [line.get("tenant") for line in lines] == ["api-key-1", "api-key-1", "operator-key-2", None]
    assert unknown["status"] == 401 and "drafted" not in unknown
    written = "".join([*map(json.dumps, lines), *map(TextLines().format, records)])
    assert not any(word in written for word in ("secret", *keys, answer["choices"][0]["message"]["content"][:12]))


def test_the_log_names_the_drafters_that_may_guess_for_a_request(caplog: pytest.LogCaptureFixture) -> None:
    said = {"none": "off", "suffix": {"drafter": "suffix"}, "ngram": {"depth": 1}, "ngram,suffix": None}
    with caplog.at_level(logging.INFO, "wager.serve"), running({"drafter": "ngram,suffix", "depth": None}) as server:
        for each in said.values():
            assert server.post(CHAT, {**SHORT, "speculation": each}).status_code == 200
    assert [record.fields["drafter"] for record in caplog.records if hasattr(record, "said")] == [*said]  # type: ignore[attr-defined]


def test_the_log_is_json_with_the_tokens_of_every_request(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("wager.serve")
    with caplog.at_level(logging.INFO, logger.name), running() as server:
        answer = server.post(CHAT, SHORT, headers={"x-request-id": "told"})
        usage = answer.json()["usage"]
        assert answer.headers["x-request-id"] == "told" and answer.json()["id"] == "chatcmpl-told"
        server.post(CHAT, {**SHORT, "stream": True}, headers={"x-request-id": "streamed"})
        strange = server.post(CHAT, {**SHORT, "speculation": {"drafter": "eagle3"}}, headers={"x-request-id": "a b"})
        assert len(strange.headers["x-request-id"]) == 32
        server.post("/no%0D%0Asuch", {})
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records if record.name == logger.name]
    told, streamed, refused, wrong, *ended = lines[-6:]
    assert refused["status"] == 400 and "finish_reason" not in refused, "it did not begin"
    assert told["request_id"] == "told" and streamed["request_id"] == "streamed"
    for line in (told, streamed):
        assert "tenant" not in line, "there are no keys"
        assert (line["method"], line["path"], line["status"]) == ("POST", CHAT, 200)
        assert line["finish_reason"] == "length" and "error" not in line
        assert {name: line[name] for name in ("prompt_tokens", "completion_tokens")} == {
            name: usage[name] for name in ("prompt_tokens", "completion_tokens")
        }
    assert [line["message"].split(":")[0] for line in ended] == ["draining", "ended"]
    assert wrong["path"] == "/no??such" and wrong["status"] == 404 and "prompt_tokens" not in wrong
