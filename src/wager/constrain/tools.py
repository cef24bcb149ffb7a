"""Tool calls as a grammar: what a model must write to call one of a request's tools.

Models are trained on a form of their own, which their chat template shows: JSON between <tool_call> tags (Hermes,
Qwen), a JSON object with "parameters" (Llama 3), a JSON list after [TOOL_CALLS] (Mistral). A model whose template knows
no tools writes a JSON object with "arguments", and is told of its tools by `tools_message`. Tools and the choice among
them are given as in OpenAI's API.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wager.errors import UsageError
from wager.types import Grammar

MAX_TOOLS = 128

_TOOL_KEYS = ("type", "function")
_FUNCTION_KEYS = ("name", "description", "parameters", "strict")  # schemas are enforced, whatever strict says
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_TAG = re.compile(r"</?\w+>|\[[A-Z_]+\]")
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


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
        is_hidden: Callable[[str], bool] = lambda text: False,
    ) -> ToolFormat:
        """The form that a chat template shows. `control_id` gives the id of a text that is a control token,
        `is_hidden` tells whether decoded text leaves it out."""
        found = next((make for mark, make in _BY_MARK if mark in (template or "")), ToolFormat("json"))
        tags = _TAG.findall(found.begin + found.end + found.opening)
        ids = {tag: number for tag in tags if (number := control_id(tag)) is not None}
        hidden = frozenset(tag for tag in ids if is_hidden(tag))
        return replace(found, ids=ids, hidden=hidden)

    @property
    def in_template(self) -> bool:
        """Whether the chat template tells the model of its tools."""
        return self.name != "json"


_BY_MARK: Sequence[tuple[str, ToolFormat]] = (
    ("<tool_call>", ToolFormat("hermes", "<tool_call>\n", "\n</tool_call>")),
    ("[TOOL_CALLS]", ToolFormat("mistral", separator=", ", opening="[TOOL_CALLS][", closing="]")),
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
    tools: object, tool_choice: object = "auto", *, form: ToolFormat, parallel: bool = True
) -> Grammar | None:
    """What the answer must be like; None if nothing is demanded (tool_choice "none").

    `tool_choice` is "auto" (text, and calls after it), "required" (calls), "none", or {"type": "function", "function":
    {"name": ...}} (one call of that function). `parallel`: several calls may follow each other.
    """
    found = read_tools(tools)
    if tool_choice == "none":
        return None
    if isinstance(tool_choice, Mapping):
        function = tool_choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        found, parallel = [tool for tool in found if tool.name == name], False
        if not found:
            raise UsageError(f"tool_choice names {name!r}, which is not among the tools.", "Name one of the tools.")
    elif tool_choice not in ("auto", "required"):
        raise UsageError(f"tool_choice = {tool_choice!r} is not possible.", 'Give "auto", "required" or "none".')
    rules = [f"tool_{number}: %json {_call_schema(tool, form)}" for number, tool in enumerate(found)]
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
    return (
        "You may call these functions, whose parameters are JSON schemas:\n"
        + "\n".join([json.dumps(tool, ensure_ascii=False) for tool in described])
        + '\nTo call one, answer with a JSON object alone: {"name": "the name", "arguments": {...}}.'
    )


def _calls(form: ToolFormat, *, parallel: bool) -> list[str]:
    """The rule of one call or several."""
    one = " ".join([*_terminal(form.begin, form), "tool", *_terminal(form.end, form)])
    more = f"({json.dumps(form.separator)} {one})*" if parallel else ""
    opening, closing = " ".join(_terminal(form.opening, form)), " ".join(_terminal(form.closing, form))
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
        "start: tagged* TEXT" if parallel and not form.closing else "start: tagged? TEXT",
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
    schema = {
        "type": "object",
        "properties": {"name": {"const": tool.name}, form.arguments: _moved(tool.parameters, form.arguments)},
        "required": ["name", form.arguments],
        "additionalProperties": False,
        "x-guidance": _ONE_LINE,
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
    local = isinstance(reference, str) and reference.startswith("#")
    return f"#/properties/{place}{reference[1:]}" if local else reference


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
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{where} has the name {name!r}.", "Names have 1 to 64 letters, digits, _ . and -.")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise UsageError(f"{where} has parameters that are no JSON schema.", "Give an object, or leave them out.")
    description = function.get("description") or ""
    return Tool(name, str(description), dict(parameters or {"type": "object", "properties": {}}))
