"""Tools of a chat: what the template is told of them, what the answer must be like, and the calls in it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from wager.constrain.tool_calls import ToolCallDelta, ToolCallParser
from wager.constrain.tools import ToolFormat, tool_grammar, tools_message
from wager.errors import UsageError
from wager.models.tokenizer import Tokenizer
from wager.serve.bodies import ChatBody, ChatMessage
from wager.serve.errors import ApiError
from wager.serve.strict_json import read_json
from wager.types import Grammar


@dataclass(frozen=True, slots=True)
class ChatTools:
    """The tools of one request, and how its model writes calls. `grammar` is None where nothing is demanded;
    `callable`: whether they may be called (tool_choice is not "none")."""

    tools: Sequence[Mapping[str, Any]]
    form: ToolFormat
    grammar: Grammar | None
    callable: bool = True

    @classmethod
    def of(cls, body: ChatBody, tokenizer: Tokenizer) -> ChatTools | None:
        """None for a request without tools. ApiError 400 names what is wrong with them."""
        if not body.tools:
            if body.tool_choice not in (None, "none"):
                raise ApiError(400, "tool_choice needs tools.", "Send tools too.", param="tool_choice")
            return None
        choice = body.tool_choice or "auto"
        if choice != "none" and body.response_format is not None and body.response_format.type != "text":
            raise ApiError(400, "tools and response_format exclude each other.", "Send one.", param="response_format")
        form = ToolFormat.of(tokenizer.chat_template, tokenizer.control_id, lambda text: _hidden(tokenizer, text))
        try:
            grammar = tool_grammar(body.tools, choice, form=form, parallel=body.parallel_tool_calls is not False)
        except UsageError as error:
            name = "tool_choice" if error.message.startswith("tool_choice") else "tools"
            raise ApiError(400, error.message, error.hint, param=name) from None
        return cls(body.tools, form, grammar, choice != "none")

    @property
    def variables(self) -> Mapping[str, Any]:
        """What the chat template gets."""
        return {"tools": self.tools} if self.form.in_template else {}

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The conversation, with a system message of the tools where the template does not know them."""
        if self.form.in_template:
            return list(messages)
        told, first = tools_message(self.tools), messages[0]
        if first["role"] == "system":
            return [{**first, "content": f"{first['content']}\n\n{told}"}, *messages[1:]]
        return [{"role": "system", "content": told}, *messages]


def _hidden(tokenizer: Tokenizer, text: str) -> bool:
    control = tokenizer.control_id(text)
    return control is not None and tokenizer.is_special(control)


def template_message(message: ChatMessage, *, knows_tools: bool) -> dict[str, Any]:
    """A message as chat templates take them; calls in it as objects, or as text for a template without tools."""
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": message.text}
    if message.name:
        found["name"] = message.name
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        calls = [_call(call) for call in message.tool_calls]
        if knows_tools:
            found["tool_calls"] = calls
        else:
            written = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
            found["content"] = "\n".join([*([message.text] if message.text else []), *written])
    return found


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call of an earlier answer, with its arguments as an object, which templates expect; as the text that they are
    where that was cut off."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ApiError(400, "A tool call has no function with a name.", "Send calls as they came.", param="messages")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = read_json(arguments)
    return {"type": "function", "id": call.get("id"), "function": {"name": function["name"], "arguments": arguments}}


class CallWriter:
    """Calls of one choice as OpenAI's API writes them, in pieces and whole."""

    def __init__(self, form: ToolFormat) -> None:
        self._parser = ToolCallParser(form)
        self._ids: list[str] = []

    @property
    def called(self) -> bool:
        return bool(self._parser.calls)

    def push(self, text: str, *, last: bool) -> dict[str, Any]:
        """The `delta` object of a piece of text; `last`: none follows."""
        pieces = [self._parser.push(text), *([self._parser.flush()] if last else [])]
        content = "".join(piece.content for piece in pieces)
        calls = [self._part(call) for piece in pieces for call in piece.calls]
        return {**({"content": content} if content else {}), **({"tool_calls": calls} if calls else {})}

    def _part(self, call: ToolCallDelta) -> dict[str, Any]:
        if call.name is None:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        self._ids.append(f"call_{uuid.uuid4().hex[:24]}")
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, "id": self._ids[-1], "type": "function", "function": function}


def whole_calls(delta: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The calls of a whole answer, from the `delta` of all its text."""
    calls: list[dict[str, Any]] = []
    for part in delta.get("tool_calls", ()):
        if "id" in part:
            calls.append({key: part[key] for key in ("id", "type", "function")})
        else:
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return calls
