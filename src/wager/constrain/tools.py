"""Tool calls: as a grammar that says what a model must write, and found in an answer while it is written.

Models are trained on a form of their own, which their chat template shows: JSON between <tool_call> tags (Hermes,
Qwen), a JSON object with "parameters" (Llama 3), a JSON list after [TOOL_CALLS] (Mistral) or <|tool_call|> (Granite 3).
A model whose template knows no tools learns of them from `tools_message`, and writes JSON between the tags of Hermes,
which most instruct models were trained on. Tools and the choice among them are given as in OpenAI's API.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wager.constrain.schemas import ONE_LINE
from wager.errors import UsageError
from wager.types import Grammar

MAX_TOOLS = 128

_TOOL_KEYS = ("type", "function")
_FUNCTION_KEYS = ("name", "description", "parameters", "strict")  # schemas are enforced, whatever strict says
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")  # OpenAI's have 64 at most, Anthropic's 128
_TAG = re.compile(r"</?\w+>|<\|\w+\|>|\[[A-Z_]+\]")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls: `begin`, a JSON object with the name and, under `arguments`, the arguments, `end`;
    `separator` between calls. `opening` and `closing` stand around all of them. `ids` has the ids of those of these
    texts that are control tokens, and of them `hidden` those that decoded text leaves out.
    """

    name: str
    begin: str = ""
    end: str = ""
    separator: str = "\n"
    opening: str = ""
    closing: str = ""
    arguments: str = "arguments"
    ids: Mapping[str, int] | None = None
    hidden: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        template: str | None,
        control_id: Callable[[str], int | None] = lambda text: None,
        is_special: Callable[[int], bool] = lambda token_id: False,
    ) -> ToolFormat:
        """The form that a chat template shows. `control_id` gives the id of a text that is a control token,
        `is_special` tells whether decoded text leaves it out."""
        found = next((make for mark, make in _BY_MARK if mark in (template or "")), _UNKNOWN)
        tags = _TAG.findall(found.begin + found.end + found.opening)
        ids = {tag: number for tag in tags if (number := control_id(tag)) is not None}
        hidden = frozenset(tag for tag, number in ids.items() if is_special(number))
        return replace(found, ids=ids, hidden=hidden)

    @property
    def in_template(self) -> bool:
        """Whether the chat template tells the model of its tools."""
        return self.name != _UNKNOWN.name


_UNKNOWN = ToolFormat("tags", "<tool_call>\n", "\n</tool_call>")

_BY_MARK: Sequence[tuple[str, ToolFormat]] = (
    ("<tool_call>", ToolFormat("hermes", "<tool_call>\n", "\n</tool_call>")),
    ("[TOOL_CALLS]", ToolFormat("mistral", separator=", ", opening="[TOOL_CALLS][", closing="]")),
    ("<|tool_call|>", ToolFormat("granite", separator=", ", opening="<|tool_call|>[", closing="]")),
    ("<|python_tag|>", ToolFormat("llama3", separator="; ", arguments="parameters")),
    ("ipython", ToolFormat("llama3", separator="; ", arguments="parameters")),
)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, Any]


def read_tools(tools: object) -> list[Tool]:
    """Tools as in OpenAI's API. UsageError that names what is wrong."""
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not 0 < len(tools) <= MAX_TOOLS:
        raise UsageError("tools must be a list.", f"Give 1 to {MAX_TOOLS} of them.")
    found = [_read_tool(tool, number) for number, tool in enumerate(tools)]
    twice = sorted({tool.name for tool in found if sum(other.name == tool.name for other in found) > 1})
    if twice:
        raise UsageError(f"tools has the name {twice[0]!r} twice.", "Give every function its own name.")
    return found


def tool_grammar(
    tools: object,
    tool_choice: object = "auto",
    *,
    form: ToolFormat,
    parallel: bool = True,
    schema: str | None = None,
) -> Grammar | None:
    """What the answer must be like; None if nothing is demanded (tool_choice "none"). Where it need not be a call it is
    JSON of `schema` (JSON text), if there is one.

    `tool_choice` is "auto" (text, and calls after it), "required" (calls), "none", or {"type": "function", "function":
    {"name": ...}} (one call of that function). `parallel`: several calls may follow each other.
    """
    found = read_tools(tools)
    if tool_choice == "none":
        return None
    if isinstance(tool_choice, Mapping):
        function = tool_choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        found = [tool for tool in found if tool.name == name]
        parallel = False
        if not found:
            raise UsageError(
                f"tool_choice names {json.dumps(name)[:80]}, which is not among the tools.", "Name one of the tools."
            )
    elif tool_choice not in ("auto", "required"):
        raise UsageError(
            f"tool_choice = {json.dumps(tool_choice)[:80]} is not possible.", 'Give "auto", "required" or "none".'
        )
    rules = [f"tool_{number}: %json {_call_schema(tool, form)}" for number, tool in enumerate(found)]
    if tool_choice == "auto" and schema is not None:
        answer = json.dumps({**json.loads(schema), "x-guidance": ONE_LINE}, ensure_ascii=False)
        lines = ["start: calls | answer", f"answer: %json {answer}"]
    else:
        lines = _free_start(form, parallel=parallel) if tool_choice == "auto" else ["start: calls"]
    lines += _calls(form, parallel=parallel) if "calls" in lines[0] else []
    lines.append("tool: " + " | ".join(f"tool_{number}" for number in range(len(found))))
    return Grammar.lark("\n".join([*lines, *rules]))


def tools_message(tools: object) -> str:
    """The system message that tells a model of tools its chat template does not know."""
    described = [
        {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        for tool in read_tools(tools)
    ]
    written = json.dumps(described, ensure_ascii=False)
    return (
        f"You have these tools:\n<tools>{written}</tools>\n\n"
        "If a tool helps with the question, call it in this format, with values from the question:\n"
        '<tool_call>\n{"name": "func_name1", "arguments": {"argument1": "value1", "argument2": "value2"}}\n'
        "</tool_call>\n"
        "If none does, answer yourself."
    )


def _calls(form: ToolFormat, *, parallel: bool) -> list[str]:
    """The rule of one call or several."""
    one = " ".join([*_terminal(form.begin, form), "tool", *_terminal(form.end, form)])
    more = f"({json.dumps(form.separator)} {one})*" if parallel else ""
    opening = " ".join(_terminal(form.opening, form))
    closing = " ".join(_terminal(form.closing, form))
    return [f"calls: {opening} {one} {more} {closing}"]


def _free_start(form: ToolFormat, *, parallel: bool) -> list[str]:
    """The rules of text that calls may follow. They begin at the tag; without one, text begins otherwise than calls."""
    tag = form.opening + form.begin
    if not tag:
        return ["start: calls | OTHER", r"OTHER: /([^{\s](.|\n)*)?/"]
    if any(tag.startswith(text) for text in form.ids or ()):  # no text holds a control token
        return ["start: TEXT calls?", r"TEXT: /(.|\n)*/"]
    one = " ".join(["tool", *_terminal(form.end, form)])
    several = parallel and form.closing
    more = f"({json.dumps(form.separator)} {' '.join(_terminal(form.begin, form))} {one})*" if several else ""
    return [
        "start: tagged* TEXT" if parallel and not form.closing else "start: tagged | TEXT",
        r"TEXT: /(.|\n)*/",
        f"before[lazy]: TEXT {json.dumps(tag, ensure_ascii=False)}",
        f"tagged: before {one} {more} {' '.join(_terminal(form.closing, form))}",
    ]


def _terminal(text: str, form: ToolFormat) -> list[str]:
    """A text in Lark: control tokens by their ids, the rest in quotes."""
    for tag, number in (form.ids or {}).items():
        if tag in text:
            before, _, after = text.partition(tag)
            return [*_terminal(before, form), f"<[{number}]>", *_terminal(after, form)]
    return [json.dumps(text, ensure_ascii=False)] if text else []


def _call_schema(tool: Tool, form: ToolFormat) -> str:
    arguments = _moved(tool.parameters, form.arguments)
    arguments.pop("$id", None)  # references would be to it
    schema = {
        "type": "object",
        "properties": {"name": {"const": tool.name}, form.arguments: {**arguments, "type": "object"}},
        "required": ["name", form.arguments],
        "additionalProperties": False,
        "x-guidance": ONE_LINE,
    }
    return json.dumps(schema, ensure_ascii=False)


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to itself hold where it stands in another one."""
    if isinstance(schema, Mapping):
        return {
            key: _moved_ref(value, place) if key == "$ref" else _moved(value, place) for key, value in schema.items()
        }
    return [_moved(each, place) for each in schema] if isinstance(schema, list | tuple) else schema


def _moved_ref(reference: Any, place: str) -> Any:
    local = isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))  # others name anchors
    return f"#/properties/{place}{reference[1:]}" if local else reference


def known_tools(tools: Sequence[Any], left_out: list[str]) -> list[Any]:
    """Tools without keys that are not known, which are named in `left_out`."""
    return [_known_tool(tool, number, left_out) for number, tool in enumerate(tools)]


def _known_tool(tool: Any, number: int, left_out: list[str]) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or not isinstance(function, Mapping):
        return tool
    left_out += [f"tools[{number}].{key[:80]}" for key in tool if key not in _TOOL_KEYS and key != "cache_control"]
    left_out += [f"tools[{number}].function.{key[:80]}" for key in function if key not in _FUNCTION_KEYS]
    known = {key: value for key, value in function.items() if key in _FUNCTION_KEYS}
    return {**{key: value for key, value in tool.items() if key in _TOOL_KEYS}, "function": known}


def _read_tool(tool: object, number: int) -> Tool:
    where = f"tools[{number}]"
    function = (
        tool.get("function") if isinstance(tool, Mapping) and tool.get("type", "function") == "function" else None
    )
    if not isinstance(tool, Mapping) or not isinstance(function, Mapping):
        raise UsageError(f"{where} is no function.", 'A tool is {"type": "function", "function": {"name": ...}}.')
    unknown = [*(key for key in tool if key not in _TOOL_KEYS), *(key for key in function if key not in _FUNCTION_KEYS)]
    if unknown:
        raise UsageError(
            f"{where} has the unknown key {str(unknown[0])[:80]!r}.", f"A function has {', '.join(_FUNCTION_KEYS)}."
        )
    name = function.get("name")
    parameters = function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{where} has the name {name!r}.", "Names have 1 to 128 letters, digits, _ . and -.")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise UsageError(f"{where} has parameters that are no JSON schema.", "Give an object, or leave them out.")
    kind = (parameters or {}).get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise UsageError(f"{where} has parameters of type {json.dumps(kind)[:80]}.", "They are an object.")
    description = function.get("description") or ""
    return Tool(name, str(description), dict(parameters or {"type": "object", "properties": {}}))


# ---- calls in an answer ----------------------------------------------------------------------------------------------


_BEGUN = re.compile(rf'\{{"name":"(?:{_NAME.pattern})?(?:"(.*))?')
"""A call whose name has begun, without blanks, and what follows the name."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of call `index`: its name once, when it is known; `arguments` is JSON text to be joined."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A text that belongs to no call, and the number of characters of the answer before it."""

    text: str
    begin: int


class ToolCallParser:
    """Reads an answer in `form` piece by piece: give every text to `push`.

    Text that might be the beginning of a call is held back until it is certain. A tag without a call behind it is
    content. Where no tag is shown, an answer has calls only if it begins with them.
    """

    def __init__(self, form: ToolFormat) -> None:
        opening = _visible(form.opening, form)
        begin = _visible(form.begin, form)
        self._tag = "" if form.hidden else (opening + begin).strip()
        self._end = _visible(form.end, form).strip()
        before = [r"[\s,;]", *(re.escape(text.strip()) for text in (begin, opening) if text.strip())]
        self._skipped = re.compile(f"(?:{'|'.join(before)})*")
        self._arguments = form.arguments
        self._head = re.compile(rf'\{{\s*"name"\s*:\s*"({_NAME.pattern})"\s*,\s*"{form.arguments}"\s*:\s*(?=\S)')
        self._closing = [text for text in (self._end, _visible(form.closing, form).strip()) if text]
        self._held = ""
        self._pushed = 0  # characters
        self._at = 0  # where a call may begin in what is held: what is before it is read once
        self._parts: list[TextDelta | ToolCallDelta] = []  # what a text adds
        self._last = False  # whether no text follows that one
        self._state = "content" if self._tag else "start"
        self._value = _JsonValue()
        self.calls = 0
        """Calls whose names are known so far."""

    def push(self, text: str, *, last: bool = False) -> list[TextDelta | ToolCallDelta]:
        """What becomes certain with this text, in the order of the answer; `last`: none follows."""
        self._held += text
        self._pushed += len(text)
        self._parts, self._last = [], last
        while getattr(self, f"_read_{self._state}")():  # a further part, as far as it is known
            pass
        if last:
            if self._state in ("content", "start", "call"):
                self._add_beginning(len(self._held))
            self._held = ""
        return self._parts

    def _add_beginning(self, size: int) -> None:
        """Add so many characters of what is held back to the content."""
        if size:
            self._parts.append(TextDelta(self._held[:size], self._pushed - len(self._held)))
            self._held = self._held[size:]

    def _read_content(self) -> bool:
        """Text up to the tag of a call, as far as it cannot be a part of one; whether to go on."""
        if not self._tag:
            self._add_beginning(len(self._held))
            return False
        at = self._held.find(self._tag)
        if at >= 0:
            self._add_beginning(len(self._held[:at].rstrip()))  # blanks before a call are none of the text
            self._state = "call"
            return True
        self._add_beginning(len(self._held) - (0 if self._last else _kept(self._held, self._tag)))
        return False

    def _read_start(self) -> bool:
        """Without a tag an answer is a call if it begins as one."""
        text = self._held.lstrip()
        if not text:
            return False
        self._state = "call" if text[0] in "{[" else "content"
        return True

    def _read_call(self) -> bool:
        skipped = self._skipped.match(self._held, self._at)
        at, self._at = skipped.end() if skipped else 0, 0
        rest = self._held[at:].removeprefix("[" if not self._tag else "")
        head = self._head.match(rest)
        if head is None:
            if self._may_begin("".join(rest.split())):
                self._at = at
                return False
            self._add_beginning(len(self._held) - len(self._held.lstrip()) + 1)  # behind which the next tag is found
            self._state = "content"
            return True
        self._parts.append(ToolCallDelta(self.calls, head[1]))
        self.calls += 1
        self._held = rest[head.end() :]
        self._state = "arguments"
        self._value = _JsonValue()
        return True

    def _may_begin(self, text: str) -> bool:
        """Whether a call may begin with a text, given without blanks."""
        begun = _BEGUN.fullmatch(text)
        if begun is None:
            return '{"name":"'.startswith(text) or self._tag.startswith(text)  # written twice
        return begun[1] is None or f',"{self._arguments}":'.startswith(begun[1])

    def _read_arguments(self) -> bool:
        count = self._value.take(self._held)
        if count:
            self._parts.append(ToolCallDelta(self.calls - 1, None, self._held[:count]))
        self._held = self._held[count:]
        if self._value.ended:
            self._state = "after"
        return self._value.ended

    def _read_after(self) -> bool:
        """The end of a call, then the next one, or content."""
        rest = self._held.lstrip().removeprefix("}").lstrip()
        for closing in self._closing:
            if rest and closing.startswith(rest):
                return False  # it is not all there, or the limit cut it
            rest = rest.removeprefix(closing).lstrip()
        if not rest:
            return False
        following = rest.lstrip(",; \n")
        if not following:
            return False
        self._held = following
        self._state = "call" if following[0] == "{" and not self._end else "content"
        return True


class _JsonValue:
    """Where a JSON value within an object ends in a text that grows."""

    def __init__(self) -> None:
        self.ended = False
        self._depth = 0
        self._in_string = self._escaped = False

    def take(self, text: str) -> int:
        """The characters of a further piece that belong to it."""
        for count, character in enumerate(text, 1):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self.ended = self._depth <= 1
                if self.ended:
                    return count if self._depth else count - 1  # a number or a text ends before what it stands in
                self._depth -= 1
        return len(text)


def _visible(text: str, form: ToolFormat) -> str:
    """A text of the form as decoded text shows it."""
    for tag in form.hidden:
        text = text.replace(tag, "")
    return text


def _kept(text: str, tag: str) -> int:
    """How many of the last characters may be the beginning of the tag, with the spaces before it."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-size:]):
            return size + len(text[:-size]) - len(text[:-size].rstrip())
    return len(text) - len(text.rstrip())
