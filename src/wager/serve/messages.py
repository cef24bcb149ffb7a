"""Anthropic's Messages API: bodies as conversations, and answers as blocks and events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field

from wager.async_llm import ChoiceDelta
from wager.constrain.tools import ToolFormat
from wager.errors import WagerError
from wager.models.tokenizer import Tokenizer
from wager.serve.blocks import AnswerBlock, BlockChange, BlockReader, named_event
from wager.serve.bodies import ChatBody, Items, RequestFields, Strict, read_fields, read_functions, read_parts
from wager.serve.errors import field_error, messages_error
from wager.types import Completion

# ---- bodies ----------------------------------------------------------------------------------------------------------


class TurnOfMessages(Strict):
    role: Literal["user", "assistant", "system"]
    content: str | Items[dict[str, Any]]


class OutputConfig(Strict):
    effort: str | None = None
    format: dict[str, Any] | None = None


class TokenCountBody(Strict):
    """POST /v1/messages/count_tokens."""

    PARAMS: ClassVar[Mapping[str, str]] = {
        "prompt": "messages",
        "response_format": "output_config",
        "stop": "stop_sequences",
        "chat_template_kwargs": "thinking",
    }

    model: str | None = None
    messages: Items[TurnOfMessages] = Field(min_length=1)
    system: str | Items[dict[str, Any]] | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None


class MessagesBody(TokenCountBody, RequestFields):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    top_k: int | None = Field(None, ge=-1)
    stop_sequences: Items[str] | None = Field(None, max_length=16)


_THOUGHTS = ("thinking", "redacted_thinking")


def as_chat(body: TokenCountBody, left_out: list[str] | None) -> ChatBody:
    """The chat that a body asks for. A last message of the assistant is continued."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": read_parts(body.system, "system", "system")})
    for number, turn in enumerate(body.messages):
        _add_turn(messages, turn, f"messages.{number}")
    values: dict[str, Any] = {"messages": messages}
    if body.output_config and body.output_config.effort:  # not of a chat, where it may say to think at all
        values["chat_template_kwargs"] = {"reasoning_effort": body.output_config.effort}
    if body.messages[-1].role == "assistant":
        if messages[-1]["content"] or "tool_calls" in messages[-1]:
            values["continue_final_message"] = True
        else:  # an answer that begins with nothing
            messages.pop()
    choice, parallel = _tool_choice(body.tool_choice)
    tools = read_functions(body.tools or (), _function, left_out)
    values |= {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}
    if isinstance(body, MessagesBody):
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k", "speculation", "receipts")
        values |= {name: getattr(body, name) for name in names}
        values["stop"] = body.stop_sequences
        values["response_format"] = _response_format(body)
    return read_fields(ChatBody, {name: value for name, value in values.items() if value is not None}, left_out)


def _add_turn(messages: list[dict[str, Any]], turn: TurnOfMessages, place: str) -> None:
    """A turn as one message, or several where it has results of tools, which come before its text."""
    if isinstance(turn.content, str):
        messages.append({"role": turn.role, "content": turn.content})
        return
    texts, calls = [], []
    for number, block in enumerate(turn.content):
        kind, where = block.get("type"), f"{place}.content.{number}"
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "tool_use" and turn.role == "assistant":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and turn.role == "user":
            text = read_parts(block.get("content") or "", f"{where}.content", "messages")
            given = block.get("tool_use_id")
            call = None if given is None else str(given)
            messages.append({"role": "tool", "tool_call_id": call, "content": text})
        elif kind not in _THOUGHTS:
            message = f"The block {where} of type {str(kind)[:40]!r} is not possible."
            raise field_error(
                "messages", message, "Send text, tool_use and tool_result: this model reads nothing else."
            )
    if texts or calls or turn.role == "assistant":
        found = {"role": turn.role, "content": "\n".join(texts) if turn.role == "user" else "".join(texts)}
        messages.append({**found, **({"tool_calls": calls} if calls else {})})


_OF_TOOL = ("type", "input_schema", "cache_control")
"""Keys of a tool that are none of a function."""


def _function(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    if tool.get("type") == "function":
        hint = 'Here a tool is {"name": ..., "description": ..., "input_schema": ...}.'
        raise field_error("tools", "A tool has the form of OpenAI's API.", hint)
    if tool.get("type", "custom") not in ("custom", None):
        return None
    named = {key: tool[key] for key in tool if key not in _OF_TOOL and tool[key] is not None}
    return {**named, "parameters": tool.get("input_schema") or {}}


def _tool_choice(choice: Mapping[str, Any] | None) -> tuple[Any, bool]:
    """The choice as chats have it, and whether several calls may follow each other."""
    if choice is None:
        return "auto", True
    parallel = not choice.get("disable_parallel_tool_use")
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, parallel
    return {"any": "required"}.get(str(kind), str(kind)), parallel


def _response_format(body: MessagesBody) -> dict[str, Any] | None:
    given = body.output_format or (body.output_config and body.output_config.format)
    if not given:
        return None
    if given.get("type") != "json_schema":
        raise field_error("output_config", "Its format is no json_schema.", "Send a json_schema, or none.")
    return {"type": "json_schema", "json_schema": {"schema": given.get("schema")}}


# ---- answers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MessageForm:
    """How one answer is written."""

    id: str
    model: str
    calls: ToolFormat | None

    kept: ClassVar[None] = None

    def writer(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> MessageWriter:
        del tokenizer
        return MessageWriter(self, len(prompt))


_NO_REASONS = {"stop_reason": None, "stop_sequence": None, "stop_details": None, "container": None}

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class MessageWriter:
    """Writes the events of one answer, in the order of Anthropic's API, and the answer itself."""

    end = b""

    def __init__(self, form: MessageForm, prompt_tokens: int) -> None:
        self._form = form
        self._prompt_tokens = prompt_tokens
        self._reader = BlockReader(form.calls)
        self._begun = False

    def whole(self, completion: Completion, usage: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
        """The object of a complete answer, with further fields."""
        for _ in self._reader.push(completion):
            pass
        content = [_block(block, block.text, block.arguments) for block in self._reader.blocks]
        return {**self._object(content, _whole_usage(_usage(usage))), **self._reasons(completion), **further}

    def events(self, items: Sequence[ChoiceDelta]) -> bytes:
        parts = [] if self._begun else self._begin()
        for item in items:
            for change in self._reader.push(item.delta):
                parts += self._change(change)
        return b"".join(parts)

    def last(self, completion: Completion, usage: Mapping[str, Any], further: Mapping[str, Any]) -> tuple[bytes, None]:
        """The events behind the last delta, of which the first has the further fields. No answer is kept."""
        told = named_event(
            {"type": "message_delta", "delta": self._reasons(completion), "usage": _usage(usage), **further}
        )
        return told + named_event({"type": "message_stop"}), None

    def failed(self, error: WagerError) -> bytes:
        """The event of an error."""
        return named_event(messages_error(error))

    def _begin(self) -> list[bytes]:
        self._begun = True
        message = {**self._object([], _whole_usage(_counts(self._prompt_tokens, None, 0))), **_NO_REASONS}
        return [named_event({"type": "message_start", "message": message}), named_event({"type": "ping"})]

    @staticmethod
    def _change(change: BlockChange) -> list[bytes]:
        block, at = change.block, change.block.index
        if change.kind == "begin":
            return [named_event({"type": "content_block_start", "index": at, "content_block": _block(block, "", {})})]
        if change.kind == "end":
            return [named_event({"type": "content_block_stop", "index": at})]
        is_text = block.name is None
        delta = {
            "type": "text_delta" if is_text else "input_json_delta",
            "text" if is_text else "partial_json": change.text,
        }
        return [named_event({"type": "content_block_delta", "index": at, "delta": delta})]

    def _object(self, content: Sequence[Mapping[str, Any]], usage: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": self._form.id,
            "type": "message",
            "role": "assistant",
            "model": self._form.model,
            "content": content,
            "usage": usage,
        }

    def _reasons(self, completion: Completion) -> dict[str, Any]:
        """Why it ended, and the stop sequence that ended it."""
        reason = _STOP_REASONS.get(completion.finish_reason, "end_turn")
        if completion.stop_string:
            reason = "stop_sequence"
        elif reason == "end_turn" and self._reader.called:
            reason = "tool_use"
        return {**_NO_REASONS, "stop_reason": reason, "stop_sequence": completion.stop_string or None}


def _block(block: AnswerBlock, text: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    if block.name is None:
        return {"type": "text", "text": text}
    name = {"id": block.id.replace("call_", "toolu_"), "name": block.name}
    return {"type": "tool_use", **name, "input": arguments, "caller": {"type": "direct"}}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens of prompt and answer; those of the prompt that were cached are counted apart."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return _counts(usage["prompt_tokens"] - cached, cached, usage["completion_tokens"])


def _counts(read: int, cached: int | None, written: int) -> dict[str, Any]:
    return {
        "input_tokens": read,
        "cache_creation_input_tokens": None if cached is None else 0,
        "cache_read_input_tokens": cached,
        "output_tokens": written,
        "output_tokens_details": None,
        "server_tool_use": None,
    }


def _whole_usage(counts: Mapping[str, Any]) -> dict[str, Any]:
    """With what a message says besides, and an event does not."""
    return {**counts, "cache_creation": None, "inference_geo": None, "service_tier": None}
