"""Grammars on the real model and its own tokenizer: the same tokens with and without speculation, and tokens saved."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import wager
from wager.draft.ngram import NgramDrafter
from wager.loading.load import LoadedEngine, load
from wager.prompts import encode_chat
from wager.types import Grammar, Request, SamplingParams

pytestmark = pytest.mark.real

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar.json_schema(SCHEMA),
    "object": Grammar.json_object(any_whitespace=True),
    "regex": Grammar.regex("[A-Z][a-z]+( [a-z]+){2,6}[.!]"),
    "choice": Grammar.choice(["🙂 <|im_end|>", 'Zürich \\"quoted\\"']),
}


@pytest.fixture(scope="module")
def plain(smollm2: Path) -> LoadedEngine:
    return load(
        wager.EngineConfig.from_options(
            model=str(smollm2), drafter="none", max_context=512, cache_tokens=4096, max_rows=64
        )
    )


@pytest.fixture(scope="module")
def requests(plain: LoadedEngine) -> list[Request]:
    question = "Describe a person in JSON: name, age, city. <|im_end|>"
    prompt = encode_chat(plain.tokenizer, [{"role": "user", "content": question}])
    return [
        Request(f"{name}-{temperature}", prompt, SamplingParams(48, temperature, seed=3, grammar=grammar))
        for name, grammar in GRAMMARS.items()
        for temperature in (0.0, 0.9)
    ]


@pytest.mark.slow
def test_outputs_fit_and_do_not_depend_on_guesses(plain: LoadedEngine, requests: list[Request]) -> None:
    alone = {c.request_id: c for c in plain.generate(requests, concurrency=1)}
    quick = load(plain.target.config.with_options(depth=8), target=plain.target, drafter=NgramDrafter())
    together = {c.request_id: c for c in quick.generate(requests)}
    assert {i: c.token_ids for i, c in together.items()} == {i: c.token_ids for i, c in alone.items()}
    control = {token for token in range(plain.tokenizer.vocab_size) if plain.tokenizer.is_control(token)}
    for name, completion in alone.items():
        assert not control & set(completion.token_ids[:-1])
        if completion.finish_reason == "stop":
            assert fits(name.partition("-")[0], completion.text), completion.text
    assert all(alone[f"{name}-0.0"].finish_reason == "stop" for name in ("schema", "choice"))
    person = together["schema-0.0"]
    assert person.drafted_by.count("grammar") >= 8  # {"name": , "age": and , "city":, as they are usually written
    assert person.stats.rounds < alone["schema-0.0"].stats.rounds


def fits(name: str, text: str) -> bool:
    if name == "schema":
        value = json.loads(text)
        return list(value) == ["name", "age", "city"] and type(value["age"]) is int and type(value["city"]) is str
    if name == "object":
        return isinstance(json.loads(text), dict)
    if name == "choice":
        return text in json.loads(GRAMMARS["choice"].text)
    return re.fullmatch(GRAMMARS["regex"].text, text) is not None
