"""Receipts of served answers: they verify, tell of their own request alone, and are refused where there can be none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serve.serving import CHAT, MESSAGES, NAME, Running, events_of, running
from wager import EngineConfig, Receipt
from wager.receipts import SigningKey, Verifier, read_receipts

COMPLETIONS, RESPONSES, MESSAGES_PATH = "/v1/completions", "/v1/responses", "/v1/messages"
BODY: Any = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0.8, "seed": 5, "receipts": True}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def verified(receipts: list[Receipt]) -> None:
    verifier = Verifier(receipts[0], EngineConfig.from_options(model="random:llama:tiny", threads=1))
    assert [verifier.verify(receipt).problems for receipt in receipts] == [()] * len(receipts)


def test_every_choice_of_an_answer_has_a_receipt(server: Running, tmp_path: Path) -> None:
    found: list[Receipt] = []
    for body in (
        {**BODY, "n": 3, "frequency_penalty": 0.5},
        {**BODY, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}, "max_tokens": 60},
        {**BODY, "temperature": 0, "stop": ["e"], "logprobs": True, "prediction": {"type": "content", "content": "x"}},
    ):
        answer = server.post(CHAT, body)
        path = tmp_path / "answer.json"
        path.write_text(answer.text, encoding="utf-8")
        receipts = read_receipts(path)
        texts = [choice["message"]["content"] for choice in answer.json()["choices"]]
        assert [receipt.text for receipt in receipts] == texts
        assert {receipt.model for receipt in receipts} == {NAME}
        assert "receipts" not in server.post(CHAT, {**body, "receipts": False}).json()
        found += receipts
    verified(found)


def test_a_stream_ends_with_its_receipts(server: Running, tmp_path: Path) -> None:
    body = {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 12, "temperature": 1, "receipts": True, "stream": True}
    path = tmp_path / "stream"
    path.write_text(server.post(COMPLETIONS, body).text, encoding="utf-8")
    events = [line[6:] for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])
    receipts = read_receipts(path)
    assert receipts == [Receipt.from_dict(each) for each in last["receipts"]]
    assert last["choices"] == [] and [receipt.prompt for receipt in receipts] == [(5, 6, 7), (8, 9)]
    chunks = [json.loads(event) for event in events[:-2]]
    for index, receipt in enumerate(receipts):
        parts = [each for chunk in chunks for each in chunk["choices"] if each["index"] == index]
        assert "".join(each["text"] for each in parts) == receipt.text
        assert receipt.params.seed is not None  # the one that it was given
    verified(receipts)


RESPONSE: Any = {"input": "one two three", "max_output_tokens": 16, "temperature": 0.8, "seed": 5, "receipts": True}
MESSAGE: Any = {"messages": MESSAGES, "max_tokens": 16, "temperature": 0.8, "stop_sequences": ["e"], "receipts": True}
TOOL: Any = {"type": "function", "name": "a", "parameters": SCHEMA}


def test_responses_and_messages_have_receipts_too(server: Running, tmp_path: Path) -> None:
    path = tmp_path / "answer.json"

    def of(kind: str, body: Any) -> Receipt:
        answer = server.post(kind, body)
        path.write_text(answer.text, encoding="utf-8")
        [receipt] = read_receipts(path)
        assert receipt.model == NAME
        path.write_text(server.post(kind, {**body, "stream": True}).text, encoding="utf-8")
        last = events_of(path.read_text(encoding="utf-8"))[-1 if kind == RESPONSES else -2]
        [streamed] = (last["response"] if kind == RESPONSES else last)["receipts"]
        assert read_receipts(path) == [Receipt.from_dict(streamed)]
        if "seed" in body:
            assert Receipt.from_dict(streamed).output == receipt.output
        assert "receipts" not in server.post(kind, {**body, "receipts": False}).json()
        refused = server.post(kind, {**body, "receipts": 1}).json()["error"]
        assert "receipts" in refused["message"]
        return receipt

    found = [of(RESPONSES, RESPONSE), of(MESSAGES_PATH, MESSAGE)]
    found.append(of(RESPONSES, {**RESPONSE, "tools": [TOOL], "tool_choice": "required", "max_output_tokens": 80}))
    verified(found)
    kept = server.post(RESPONSES, RESPONSE).json()
    assert server.get(f"{RESPONSES}/{kept['id']}").json()["receipts"] == kept["receipts"]


def test_receipts_that_cannot_be_are_refused(server: Running) -> None:
    body = {"prompt": "a", "max_tokens": 0, "echo": True, "receipts": True}
    refusal = server.post(COMPLETIONS, body).json()["error"]
    assert refusal["param"] == "receipts" and "no receipt of an answer without tokens" in refusal["message"]
    with running({"verify": "rejection"}) as other:
        answer = other.post(CHAT, BODY)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "receipts"
        assert "nobody could compute it again" in answer.json()["error"]["message"]


def test_a_server_with_a_key_signs(tmp_path: Path) -> None:
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    key = SigningKey(ed25519.Ed25519PrivateKey.generate())
    with running(receipt_key=key) as server:
        [value] = server.post(CHAT, BODY).json()["receipts"]
    receipt = Receipt.from_dict(value)
    assert receipt.signature is not None and receipt.signature.public_key == key.public_key
    assert list(receipt.problems_of_parts(key.public_key)) == []
    assert list(receipt.problems_of_parts("00")) != []
