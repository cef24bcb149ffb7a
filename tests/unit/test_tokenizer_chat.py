"""Chat templates: the text equals that of transformers; a template that refuses is an error with its message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizer_models import copy, gguf_metadata, save, sentencepiece_metadata, train, write

from wager.errors import TokenizerError
from wager.models.tokenizer import Tokenizer

CHAT = [
    {"role": "system", "content": 'Be brief. 日本 "quoted" <b>&</b>'},
    {"role": "user", "content": "Hi\n\nthere"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "  Bye?  "},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("folder"))


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("spm") / "t.gguf", sentencepiece_metadata())


def test_chat_agrees_with_transformers(folder: Path) -> None:
    ours, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for prompt in (True, False):
        expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
        assert ours.chat(CHAT, add_generation_prompt=prompt) == expected


TEMPLATES = {
    "blocks": "{% for m in messages %}\n    {% if m.role == 'user' %}\n  U {{ m.content | trim }}\n    {%- endif %}\n"
    "{% endfor %}\n",
    "loop controls": "{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}"
    "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}|{% endfor %}",
    "json": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content|length %}"
    "{% endfor %}{{ ns.n }}",
    "flags": "{{ add_generation_prompt }} {{ tools is none }} {{ documents is defined }} {{ unheard is defined }} "
    "{{ eos_token }}",
    "date": "{{ strftime_now('%Y') | length }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_functions_that_templates_use_exist(name: str, folder: Path, tmp_path: Path) -> None:
    copy(folder, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name], encoding="utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert Tokenizer.load(tmp_path).chat(CHAT) == expected
    assert len(expected) > 3 or name in ("date", "namespace")


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for m in messages %}", "damaged"),
        ("{{ messages[0].content.nothing.here }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ 1 // 0 }}", "refuses"),
        ("{{ messages[0]['content'] + 1 }}", "refuses"),
    ],
)
def test_a_template_that_refuses_is_an_error_with_its_message(template: str, named: str, tmp_path: Path) -> None:
    metadata = {**gguf_metadata(train("smollm"), "smollm"), "tokenizer.chat_template": template}
    tokenizer = Tokenizer.load(write(tmp_path / "t.gguf", metadata))
    with pytest.raises(TokenizerError, match=named):
        tokenizer.chat(CHAT)


def test_an_absent_template_is_named(spm: Path) -> None:
    with pytest.raises(TokenizerError, match=r"t\.gguf has no chat template") as caught:
        Tokenizer.load(spm).chat(CHAT)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("{{ 1 }}", "1"),
        ([{"name": "tool_use", "template": "{{ 2 }}"}, {"name": "default", "template": "{{ 3 }}"}], "3"),
    ],
)
def test_a_template_in_the_configuration(stored: Any, expected: str, folder: Path, tmp_path: Path) -> None:
    copy(folder, tmp_path, chat_template=stored)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    assert Tokenizer.load(tmp_path).chat(CHAT) == expected
