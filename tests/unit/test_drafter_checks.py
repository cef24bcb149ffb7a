"""Drafters of another tokenizer, vocabulary or chat template: refused or warned of, with the first difference."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from blank_heads import HEADS
from tiny_models import oracle, save
from tokenizer_models import SPECIAL, train
from tokenizers import Tokenizer as Backend

import wager
from wager.draft.store_file import build_store
from wager.draft.vocabulary import vocabulary_digest, vocabulary_sample
from wager.errors import ModelError, TokenizerError, UsageError
from wager.loading.load import load
from wager.loading.opened import template_difference
from wager.models.opening import open_model, target_fingerprint, tokenizer_fingerprint
from wager.models.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
OTHER = TEMPLATE.replace("<|start|>{{", "[{{").replace("}}\n{{ m['c", "}}]\n{{ m['c")
SAME_BUT_SPELLED_OTHERWISE = TEMPLATE.replace("m['role']", "m.role")


def directory(path: Path, backend: Backend, template: str | None = TEMPLATE, *, end: str = SPECIAL[1]) -> Path:
    """A model with random weights, a tokenizer and a template."""
    save(oracle("LlamaForCausalLM", vocab_size=backend.get_vocab_size(), head_dim=16), path)
    return with_tokenizer(path, backend, template, end=end)


def with_tokenizer(path: Path, backend: Backend, template: str | None, *, end: str = SPECIAL[1]) -> Path:
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def swapped(backend: Backend, first: int, second: int) -> Backend:
    """The same tokenizer with two tokens in each other's place."""
    description = json.loads(backend.to_str())
    vocabulary = description["model"]["vocab"]
    names = {token: text for text, token in vocabulary.items()}
    vocabulary[names[first]], vocabulary[names[second]] = second, first
    return Backend.from_str(json.dumps(description))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directory(tmp_path_factory.mktemp("target"), train("gpt-2"))


@pytest.fixture(scope="module")
def config(target: Path) -> wager.EngineConfig:
    return wager.EngineConfig.from_options(model=str(target), max_rows=32, max_sequences=4, threads=1, depth=2)


def token(path: Path, token_id: int) -> str:
    return Tokenizer.load(path).token(token_id)


def test_the_first_token_that_differs_is_named_with_what_to_do(
    config: wager.EngineConfig, target: Path, tmp_path: Path
) -> None:
    other = directory(tmp_path, swapped(train("gpt-2"), 100, 300))
    told = f"id 100 is {token(other, 100)!r}, but {token(target, 100)!r} in the target"
    for drafter in (f"model:{other}", f"model:tree:{other}", f"model:{other}+ngram", f"ngram//model:{other}"):
        with pytest.raises(TokenizerError) as refused:
            load(config.with_options(drafter=drafter))
        assert told in refused.value.message and str(other) in refused.value.message
        assert "tli:PATH" in refused.value.hint
    for name in ("tli", "slem"):  # which translate
        [note] = load(config.with_options(drafter=f"{name}:{other}")).notes
        assert told in note and str(other) in note


def test_a_draft_model_that_need_not_be_translated_is_said_to_be_one(
    config: wager.EngineConfig, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("tli", "slem"):
        load(config.with_options(drafter=f"{name}:{target}"))
        [record] = caplog.records
        assert "has the target's vocabulary" in record.getMessage() and "model:PATH" in record.getMessage()
        caplog.clear()


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (TEMPLATE, ""),
        (SAME_BUT_SPELLED_OTHERWISE, ""),
        (OTHER, "line 1 of a conversation is '[system]', but '<|start|>system' in the target's"),
        (TEMPLATE.replace("<|end|>", ""), "line 2 of a conversation is 'Be brief.', but 'Be brief.<|end|>'"),
        (TEMPLATE + "{{ nonsense.of.nothing }}", "line 4 of the template is "),
        (None, "it has none"),
    ],
)
def test_another_chat_template_is_warned_of_by_its_first_line(
    config: wager.EngineConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture, template: str | None, told: str
) -> None:
    draft = directory(tmp_path, train("gpt-2"), template)
    engine = load(config.with_options(drafter=f"model:{draft}"))
    assert engine.drafter_name == "model"
    messages = [record.getMessage() for record in caplog.records]
    if not told:
        assert messages == []
        return
    [message] = messages
    assert "differs in its chat template" in message and told in message and "answers stay the same" in message


def test_templates_without_a_system_message_are_compared_on_what_they_take(target: Path, tmp_path: Path) -> None:
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
    own, alike, other = (
        Tokenizer.load(directory(tmp_path / str(number), train("gpt-2"), template))
        for number, template in enumerate((refusing, refusing + "\n", refusing.replace("<|end|>", "<end>")))
    )
    assert template_difference(own, alike) == "" or "line" in template_difference(own, alike)
    assert "line 2 of a conversation is 'Hello.<end>', but 'Hello.<|end|>'" in template_difference(own, other)


def test_a_target_without_a_template_has_none_to_differ_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = directory(tmp_path / "target", train("gpt-2"), None)
    draft = directory(tmp_path / "draft", train("gpt-2"))
    load(wager.EngineConfig.from_options(model=str(plain), threads=1, depth=2, max_rows=32, drafter=f"model:{draft}"))
    assert caplog.records == []


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_has_a_tokenizer_of_its_own_is_compared(
    name: str, config: wager.EngineConfig, target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether or not it notes what it was trained for."""
    weights, tokenizer = open_model(str(target))[1:]
    noted = {"target": "it", "target_fingerprint": target_fingerprint(weights)}
    head = HEADS[name](tmp_path / "head", weights.spec)
    with_tokenizer(head, train("gpt-2"), TEMPLATE)
    load(config.with_options(drafter=f"{name}:{head}"))
    assert caplog.records == []
    with_tokenizer(head, train("gpt-2"), OTHER)
    load(config.with_options(drafter=f"{name}:{head}"))
    assert "line 1 of a conversation is '[system]'" in caplog.text
    with_tokenizer(head, swapped(train("gpt-2"), 100, 300), TEMPLATE)
    told = rf"another tokenizer.*: id 100 is {token(head, 100)!r}, but {token(target, 100)!r} in the target"
    with pytest.raises(ModelError, match=told.replace("|", r"\|")):
        load(config.with_options(drafter=f"{name}:{head}"))
    noting = HEADS[name](tmp_path / "head", weights.spec, wager={**noted, "tokenizer_fingerprint": "00"})
    with pytest.raises(ModelError, match=told.replace("|", r"\|")):
        load(config.with_options(drafter=f"{name}:{noting}"))
    (head / "tokenizer.json").write_text("{}")
    load(config.with_options(drafter=f"{name}:{HEADS[name](tmp_path / 'head', weights.spec)}"))
    assert "is not compared" in caplog.text
    right = {**noted, "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer)}
    load(config.with_options(drafter=f"{name}:{HEADS[name](tmp_path / 'head', weights.spec, wager=right)}"))


@pytest.mark.parametrize("name", HEADS)
def test_a_head_of_another_hidden_size_or_vocabulary_is_refused_with_both_numbers(
    name: str, config: wager.EngineConfig, target: Path, tmp_path: Path
) -> None:
    spec = open_model(str(target))[1].spec
    for field, there, here in (("hidden", 96, spec.hidden), ("vocab", spec.vocab + 16, spec.vocab)):
        head = HEADS[name](tmp_path / field, replace(spec, **{field: there}))
        with pytest.raises(ModelError) as refused:
            load(config.with_options(drafter=f"{name}:{head}"))
        told = refused.value.message
        assert str(there) in told and str(here) in told and str(head) in told, told


def test_a_store_names_a_token_that_differs(config: wager.EngineConfig, target: Path, tmp_path: Path) -> None:
    other = directory(tmp_path / "other", swapped(train("gpt-2"), 100, 300))
    tokenizer, store = Tokenizer.load(other), tmp_path / "answers.store"
    build_store(
        [([1], [5, 6, 7])],
        store,
        vocab=tokenizer.vocab_size,
        tokenizer=vocabulary_digest(tokenizer),
        sample=vocabulary_sample(tokenizer),
        provenance={"target": "that one"},
    )
    for name in ("store", "store:tree"):
        with pytest.raises(UsageError) as refused:
            load(config.with_options(drafter=f"{name}:{store}"))
        told = f"id 100 is {token(other, 100)!r}, but {token(target, 100)!r} in the target"
        assert told in refused.value.message and "that one" in refused.value.message
    load(config.with_options(model=str(other), drafter=f"store:{store}"))
