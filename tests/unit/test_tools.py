"""Tool calls: the grammar that demands them, and the parser that finds them in an answer."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from wager.constrain.compiler import GrammarCompiler
from wager.constrain.tools import TextDelta, ToolCallDelta, ToolCallParser, ToolFormat, tool_grammar
from wager.errors import UsageError
from wager.serve.blocks import BlockReader
from wager.types import Grammar, OutputDelta

EOS, OPEN, CLOSE, CALLS = 256, 257, 258, 259
_CONTROL = {OPEN: "<tool_call>", CLOSE: "</tool_call>", CALLS: "[TOOL_CALLS]"}


class ByteTokenizer:
    """A token for every byte, and control tokens."""

    vocab_size = 260
    eos_ids = (EOS,)

    def token_bytes(self, token_id: int, /) -> bytes:
        return bytes([token_id]) if token_id < 256 else _CONTROL.get(token_id, "<|end|>").encode()

    def is_control(self, token_id: int, /) -> bool:
        return token_id >= 256

    def encode_text(self, text: str, /) -> list[int]:
        return list(text.encode())


COMPILER = GrammarCompiler(ByteTokenizer())


class ToolCall(NamedTuple):
    """A call of function `name`; `arguments` is JSON text, cut off where the answer was."""

    name: str
    arguments: str


def parse_tool_calls(text: str, form: ToolFormat, size: int = 1000) -> tuple[str, list[ToolCall]]:
    """The content and the calls of an answer that comes in pieces of a size."""
    parser = ToolCallParser(form)
    parts = [part for at in range(0, len(text), size) for part in parser.push(text[at : at + size])]
    content = ""
    calls = list[ToolCall]()
    for part in (*parts, *parser.push("", last=True)):
        if isinstance(part, TextDelta):
            content += part.text
        elif part.name is not None:
            calls.append(ToolCall(part.name, ""))
        else:
            calls[part.index] = ToolCall(calls[part.index].name, calls[part.index].arguments + part.arguments)
    return content, calls


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city",
            "parameters": {
                "$id": "https://example.org/weather",
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"$ref": "#/$defs/days"},
                    "hours": {"$ref": "#hours"},
                },
                "required": ["city"],
                "additionalProperties": False,
                "$defs": {"days": {"type": "integer"}, "some": {"$anchor": "hours", "type": "integer"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
FORMS = {
    "json": ToolFormat.of("no tools"),
    "hermes": ToolFormat.of("... <tool_call> ..."),
    "hermes-control": ToolFormat.of("<tool_call>", {v: k for k, v in _CONTROL.items()}.get),
    "mistral": ToolFormat.of("[TOOL_CALLS]"),
    "mistral-control": ToolFormat.of("[TOOL_CALLS]", {v: k for k, v in _CONTROL.items()}.get, lambda token_id: True),
    "granite": ToolFormat.of("<|tool_call|>", {"<|tool_call|>": CALLS}.get, lambda token_id: True),
    "llama3": ToolFormat.of("Environment: ipython"),
}
CALL = ToolCall("weather", '{"city": "Sai\\"gon {", "days": 3}')
NOW = ToolCall("now", "{}")


def written(form: ToolFormat, calls: Sequence[ToolCall]) -> str:
    """Calls as a model writes them."""
    bodies = [f'{{"name": {json.dumps(c.name)}, "{form.arguments}": {c.arguments}}}' for c in calls]
    joined = form.separator.join(f"{form.begin}{body}{form.end}" for body in bodies)
    return f"{form.opening}{joined}{form.closing}"


def tokens(form: ToolFormat, text: str) -> list[int]:
    """A text in tokens, control tokens of the form included."""
    for tag, number in (form.ids or {}).items():
        before, found, after = text.partition(tag)
        if found:
            return [*tokens(form, before), number, *tokens(form, after)]
    return list(text.encode())


def shown(form: ToolFormat, text: str) -> str:
    """As decoded text shows it."""
    for tag in form.hidden:
        text = text.replace(tag, "")
    return text


def accepts(grammar: Grammar | None, ids: Sequence[int]) -> bool:
    """Whether a grammar allows tokens one by one and may end after them."""
    assert grammar is not None
    compiled = COMPILER.compile(grammar).compiled
    assert compiled is not None
    state = compiled.start()
    for token in ids:
        allowed = state.allowed(())
        if allowed is None or token not in allowed:
            return False
        state.append([token])
    allowed = state.allowed(())
    return allowed is not None and EOS in allowed


@pytest.mark.parametrize("name", FORMS)
def test_what_is_demanded_may_be_written_and_nothing_else(name: str) -> None:
    form = FORMS[name]
    required = tool_grammar(TOOLS, "required", form=form)
    auto = tool_grammar(TOOLS, "auto", form=form)
    named = tool_grammar(TOOLS, {"type": "function", "function": {"name": "weather"}}, form=form)
    single = tool_grammar(TOOLS, "required", form=form, parallel=False)
    once = tool_grammar(TOOLS, "auto", form=form, parallel=False)
    for calls in ([CALL], [NOW], [CALL, NOW, CALL]):
        ids = tokens(form, written(form, calls))
        assert accepts(required, ids), (name, calls)
        assert accepts(single, ids) == accepts(once, ids) == (len(calls) == 1)
        assert accepts(named, ids) == (calls == [CALL])
    assert accepts(auto, tokens(form, written(form, [CALL]))) and accepts(auto, list(b"The weather is fine."))
    assert accepts(auto, [])
    assert not accepts(required, list(b"The weather")) and not accepts(required, [])
    for wrong in ('{"name": "weather", "X": {"days": 3}}', '{"name": "nothing", "X": {}}'):
        body = wrong.replace("X", form.arguments)
        text = f"{form.opening}{form.begin}{body}{form.end}{form.closing}"
        assert not accepts(required, tokens(form, text))
        assert not accepts(auto, tokens(form, text))
    assert tool_grammar(TOOLS, "none", form=form) is None


def test_text_may_come_before_calls_where_a_tag_tells_them_apart() -> None:
    for name in ("hermes", "hermes-control", "mistral", "mistral-control", "granite"):
        form = FORMS[name]
        auto = tool_grammar(TOOLS, "auto", form=form)
        assert accepts(auto, tokens(form, "Let me see. " + written(form, [CALL]))), name
        assert not accepts(auto, tokens(form, "Let me see. " + written(form, [ToolCall("nothing", "{}")]))), name


def test_the_parser_finds_what_was_written_however_it_is_cut() -> None:
    for form in FORMS.values():
        for size in (1, 3, 7, 1000):
            check_parser(form, size)


def check_parser(form: ToolFormat, size: int) -> None:
    tagged = bool(form.opening + form.begin) and not form.hidden
    for before in ("", "Let me see.\n") if tagged else ("",):
        for calls in ([CALL], [NOW], [CALL, NOW, CALL]):
            text = shown(form, before + written(form, calls))
            content, found = parse_tool_calls(text, form, size)
            assert (content.strip(), found) == (before.strip(), calls)
    for text in ("The weather is <tool fine> [TOOL, and {nothing} is called.", "", " a \n"):
        assert parse_tool_calls(text, form) == (text, [])


def test_calls_that_are_cut_off_keep_what_is_known() -> None:
    form = FORMS["hermes"]
    assert parse_tool_calls('<tool_call>\n{"name": "weather", "arguments": {"city": "Sa', form) == (
        "",
        [ToolCall("weather", '{"city": "Sa')],
    )
    assert parse_tool_calls('<tool_call>\n{"name": "wea', form) == ('<tool_call>\n{"name": "wea', [])


def test_a_closing_tag_that_is_cut_off_is_no_text() -> None:
    for form in FORMS.values():
        text = shown(form, written(form, [CALL]))
        for end in range(text.index(CALL.arguments) + len(CALL.arguments), len(text) + 1):
            assert parse_tool_calls(text[:end], form) == ("", [CALL]), (form, text[:end])


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_tag_without_a_call_is_text_that_does_not_wait_and_calls_may_follow(size: int) -> None:
    for form in (FORMS["hermes"], FORMS["mistral"]):
        tag = (form.opening + form.begin).strip()
        for wrong in (
            f"Write {tag} first.",
            f'{tag}{{"name": "a\nb", "{form.arguments}": 1}}',
            f'{tag}{{"name": "now", 1',
        ):
            text = f"{wrong} {written(form, [CALL])}"
            blocks = BlockReader(form)
            for at in range(0, len(text), size):
                list(blocks.push(OutputDelta("r", 0, text=text[at : at + size])))
                told = sum(len(block.text) for block in blocks.blocks)
                assert size == 1000 or at > len(wrong) or told > at - 60
            assert [(block.name, block.text) for block in blocks.blocks] == [(None, wrong), CALL], (form, wrong)
    for answer in ('{"name": "Ann", "age"', f'{{"name": "{"a" * 129}'):
        parts = ToolCallParser(FORMS["llama3"]).push(answer)
        assert "".join(part.text for part in parts if isinstance(part, TextDelta)) == answer


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_an_answer_has_its_parts_in_one_order_whole_and_streamed(form: ToolFormat) -> None:
    """Of blocks, as the Responses API and Anthropic's Messages have them; also where it was cut off."""
    begin, calls, head = form.opening + form.begin, written(form, [NOW, CALL]), f'{{"name": "now", "{form.arguments}": '
    pieces = (calls, calls[:-9], begin, begin.strip(), form.end + form.closing, head, head[:9], "5", "}", "a \n")
    for two in itertools.product(pieces, repeat=2):
        text, found = shown(form, "".join(two)), []
        for size in (1, 3, 20, len(text) + 1):
            blocks = BlockReader(form)
            for at in range(0, len(text) + 1, size):
                reason: Any = "length" if at + size > len(text) else None
                list(blocks.push(OutputDelta("r", 0, text=text[at : at + size], finish_reason=reason)))
            found.append([(block.name, block.text) for block in blocks.blocks])
        assert found == found[:1] * 4, text


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("value", ["5", "null", '"a } b"', "[1, [2]]"])
def test_arguments_that_are_no_object_end_where_the_call_does(value: str, size: int) -> None:
    for form in FORMS.values():
        text = shown(form, written(form, [ToolCall("now", value), NOW]))
        blocks = BlockReader(form)
        for at in range(0, len(text), size):
            list(blocks.push(OutputDelta("r", 0, text=text[at : at + size])))
        assert [(block.name, block.text) for block in blocks.blocks] == [("now", value), NOW], form


def test_what_stands_before_a_call_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may write it without end, and all streams would wait for the parser."""
    parser = ToolCallParser(FORMS["hermes"])
    read, skipped = list[int](), parser._skipped
    found = SimpleNamespace(match=lambda text, at=0: (read.append(len(text) - at), skipped.match(text, at))[1])
    monkeypatch.setattr(parser, "_skipped", found)
    for text in ("<tool_call>", *(" ,\n<tool_call>" for _ in range(500))):
        assert parser.push(text) == []
    assert sum(read) < 20_000
    assert parser.push('{"name": "now", "arguments": {}') == [ToolCallDelta(0, "now"), ToolCallDelta(0, None, "{}")]


def test_arguments_stream_before_the_call_is_whole() -> None:
    parser = ToolCallParser(FORMS["hermes"])
    begun = parser.push('Well, <tool_call>\n{"name": "now", "arguments": {"a"')
    assert begun == [TextDelta("Well,", 0), ToolCallDelta(0, "now"), ToolCallDelta(0, None, '{"a"')]
    assert parser.push(": 1") == [ToolCallDelta(0, None, ": 1")]


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        ([], "auto", "must be a list"),
        ({}, "auto", "must be a list"),
        ([{"type": "code"}], "auto", r"tools\[0\] is no function"),
        ([{"function": {"name": "a b"}}], "auto", "has the name 'a b'"),
        ([{"function": {"name": "a" * 129}}], "auto", "has the name"),
        ([{"function": {"name": "a", "parameters": []}}], "auto", "no JSON schema"),
        (
            [{"function": {"name": "a", "parameters": {"type": ["array", "null"]}}}],
            "auto",
            r'of type \["array", "null"\]',
        ),
        ([*TOOLS, TOOLS[0]], "auto", "'weather' twice"),
        (TOOLS, "sometimes", "tool_choice"),
        (TOOLS, {"function": {"name": "other"}}, '"other", which is not'),
        (TOOLS, {"function": 3}, "tool_choice"),
    ],
)
def test_impossible_tools_are_refused_by_name(tools: object, choice: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tool_grammar(tools, choice, form=FORMS["json"])
