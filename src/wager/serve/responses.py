"""OpenAI's Responses API: bodies as conversations, and answers as items and events.

An answer is kept, unless `store` is false, so that it can be read again and continued with `previous_response_id`: for
an hour, in memory, at most 16 MiB for each key, and for that key alone.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from wager.async_llm import ChoiceDelta
from wager.constrain.tools import ToolFormat
from wager.errors import WagerError
from wager.models.tokenizer import IncrementalDecoder, Tokenizer
from wager.serve.blocks import AnswerBlock, BlockChange, BlockReader, as_message, named_event
from wager.serve.bodies import (
    ChatBody,
    Items,
    RequestFields,
    StreamOptions,
    Strict,
    read_fields,
    read_functions,
    read_parts,
)
from wager.serve.errors import ApiError, error_message, field_error
from wager.serve.formats import obfuscated, token_text
from wager.types import Completion, TokenLogprob

# ---- bodies ----------------------------------------------------------------------------------------------------------


class TextOptions(Strict):
    """What the text of an answer must be: `format` is chats' `response_format` with the schema beside its type."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningOptions(Strict):
    """`effort` goes to the chat template; nothing of a thought is summed up."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None


class ResponsesBody(RequestFields):
    """POST /v1/responses."""

    PARAMS: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "prompt": "input",
        "response_format": "text.format",
        "max_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning",
        "verbosity": "text.verbosity",
    }

    input: str | Items[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    max_tool_calls: int | None = Field(None, ge=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    seed: int | None = None
    text: TextOptions | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include: Items[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[str, str] | None, Field(max_length=16)] = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())


_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text")


def read_items(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Items of an input as messages of a conversation. ApiError names one that is not possible."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(given):
        _add_item(messages, item, f"input.{number}")
    return messages


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], place: str) -> None:
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        messages.append({"role": item.get("role"), "content": _text(item.get("content"), f"{place}.content")})
    elif kind in ("function_call", "custom_tool_call"):
        given = item.get("arguments") if kind == "function_call" else json.dumps({"input": item.get("input")})
        call = {"name": item.get("name"), "arguments": given}
        found = {"id": item.get("call_id"), "type": "function", "function": call}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(found)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        text = _text(item.get("output"), f"{place}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
    elif kind != "reasoning":  # thoughts are not sent again
        message = f"The item {place} of type {str(kind)[:40]!r} is not possible."
        raise field_error("input", message, "Send messages, function calls and their outputs.")


def _text(content: Any, place: str) -> str:
    return "" if content is None else read_parts(content, place, "input", kinds=_TEXT_PARTS, joint="")


def _function(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    return {key: tool[key] for key in tool if key != "type"} if tool.get("type") == "function" else None


def as_chat(
    body: ResponsesBody, earlier: Sequence[Mapping[str, Any]], left_out: list[str] | None
) -> tuple[ChatBody, list[dict[str, Any]]]:
    """The chat that a body asks for, after the messages `earlier`; and its conversation without the instructions, which
    hold for this answer alone."""
    turns = [*map(dict, earlier), *read_items(body.input or [])]
    if not turns:
        raise field_error(
            "input", "There is no input.", "Send a text, or items; messages belong to /v1/chat/completions."
        )
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    values: dict[str, Any] = {
        "messages": [*system, *turns],
        "max_tokens": body.max_output_tokens,
        "tools": read_functions(body.tools or (), _function, left_out),
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "logprobs": body.wants_logprobs or None,
        "top_logprobs": body.top_logprobs,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "verbosity": body.text.verbosity if body.text else None,
        "response_format": _response_format(body.text.format) if body.text and body.text.format else None,
        **{
            name: getattr(body, name)
            for name in ("temperature", "top_p", "seed", "stream", "chat_template_kwargs", "speculation", "receipts")
        },
    }
    return read_fields(ChatBody, {name: value for name, value in values.items() if value is not None}, left_out), turns


def _tool_choice(choice: str | Mapping[str, Any] | None) -> Any:
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("type") != "json_schema":
        return dict(given)
    return {"type": "json_schema", "json_schema": {key: given[key] for key in given if key != "type"}}


# ---- answers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """How one answer is written: `fields` are those of the object that repeat the request's, `kept` the conversation
    that it belongs to, if that is to be kept; `padded`: events with deltas are `obfuscated`."""

    id: str
    fields: Mapping[str, Any]
    calls: ToolFormat | None
    logprobs: bool
    kept: Sequence[Mapping[str, Any]] | None
    padded: bool = False

    def writer(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> ResponseWriter:
        return ResponseWriter(self, tokenizer, prompt)


def response_fields(body: ResponsesBody, model: str, temperature: float) -> dict[str, Any]:
    """What an answer repeats of its request."""
    return {
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "service_tier": "default",
        "temperature": temperature if body.temperature is None else body.temperature,
        "text": {"format": (body.text and body.text.format) or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": [
            {"description": None, "parameters": None, "strict": None, **tool}
            for tool in body.tools or ()
            if tool.get("type") == "function"
        ],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
    }


class ResponseWriter:
    """Writes the events of one answer, in the order of OpenAI's API, and the answer itself."""

    end = b""

    def __init__(self, form: ResponseForm, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._form = form
        self._token_bytes = tokenizer.token_bytes
        self._reader = BlockReader(form.calls, IncrementalDecoder(tokenizer, after=prompt) if form.logprobs else None)
        self._items: list[dict[str, Any]] = []
        self._sequence = 0
        self._begun = False

    # ---- whole -------------------------------------------------------------------------------------------------------

    def whole(self, completion: Completion, usage: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
        """The object of a complete answer, with further fields."""
        if not self._begun:
            self._begun = True
            for change in self._reader.push(completion):
                if change.kind == "end":
                    self._items.append(self._item(change.block, _status(change)))
        incomplete = {"reason": "max_output_tokens"} if completion.finish_reason == "length" else None
        status = "incomplete" if incomplete else "completed"
        counted = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        return {**self._object(status, usage=counted, incomplete=incomplete), **further}

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of its conversation."""
        return as_message(self._reader.blocks)

    # ---- events ------------------------------------------------------------------------------------------------------

    def events(self, items: Sequence[ChoiceDelta]) -> bytes:
        parts = [] if self._begun else self._begin()
        for item in items:
            for change in self._reader.push(item.delta):
                parts += self._change(change)
        return b"".join(parts)

    def last(
        self, completion: Completion, usage: Mapping[str, Any], further: Mapping[str, Any]
    ) -> tuple[bytes, dict[str, Any]]:
        """The event behind the last delta, and the answer, which it holds."""
        found = self.whole(completion, usage, further)
        return self._event(f"response.{found['status']}", response=found), found

    def failed(self, error: WagerError) -> bytes:
        """The events of an error."""
        code = "invalid_prompt" if error.status < 500 else "server_error"
        reason = {"code": code, "message": error_message(error)}
        begin = b"" if self._begun else b"".join(self._begin())
        return begin + self._event("response.failed", response=self._object("failed", error=reason))

    def _begin(self) -> list[bytes]:
        self._begun = True
        started = self._object("in_progress")
        return [self._event(f"response.{name}", response=started) for name in ("created", "in_progress")]

    def _change(self, change: BlockChange) -> list[bytes]:
        block, place = change.block, {"output_index": change.block.index, "item_id": self._id(change.block)}
        part_place = {**place, "content_index": 0}
        added = {"output_index": block.index, "item": self._item(block, "in_progress")}
        if change.kind == "begin":
            events = [self._event("response.output_item.added", **added)]
            if block.name is None:
                events.append(self._event("response.content_part.added", **part_place, part=self._part(block)))
            return events
        if change.kind == "grow":
            if block.name is not None:
                return [self._event("response.function_call_arguments.delta", **place, delta=change.text)]
            told = [self._logprob(each, whole=False) for each in change.logprobs] if self._form.logprobs else []
            return [self._event("response.output_text.delta", **part_place, delta=change.text, logprobs=told)]
        item = self._item(block, _status(change))
        self._items.append(item)
        if block.name is not None:
            done = self._event("response.function_call_arguments.done", **place, arguments=block.text, name=block.name)
            return [done, self._event("response.output_item.done", output_index=block.index, item=item)]
        told = [self._logprob(each, whole=False) for each in block.logprobs] if self._form.logprobs else []
        return [
            self._event("response.output_text.done", **part_place, text=block.text, logprobs=told),
            self._event("response.content_part.done", **part_place, part=self._part(block)),
            self._event("response.output_item.done", output_index=block.index, item=item),
        ]

    def _event(self, kind: str, **fields: Any) -> bytes:
        value = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return named_event(obfuscated(value) if self._form.padded and "delta" in fields else value)

    # ---- objects -----------------------------------------------------------------------------------------------------

    def _object(
        self,
        status: str,
        *,
        usage: Mapping[str, Any] | None = None,
        incomplete: Mapping[str, Any] | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {
            "id": self._form.id,
            **self._form.fields,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": incomplete,
            "output": list(self._items),
            **({"usage": usage} if usage else {}),
        }

    @staticmethod
    def _id(block: AnswerBlock) -> str:
        return block.id.replace("call_", "msg_" if block.name is None else "fc_")

    def _item(self, block: AnswerBlock, status: str) -> dict[str, Any]:
        if block.name is None:
            content = [] if status == "in_progress" else [self._part(block)]
            return {
                "id": self._id(block),
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": content,
            }
        return {
            "id": self._id(block),
            "type": "function_call",
            "call_id": block.id,
            "name": block.name,
            "arguments": block.text,
            "status": status,
        }

    def _part(self, block: AnswerBlock) -> dict[str, Any]:
        told = [self._logprob(each, whole=True) for each in block.logprobs] if self._form.logprobs else []
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": told}

    def _logprob(self, item: TokenLogprob, *, whole: bool) -> dict[str, Any]:
        tops = [self._entry(token, value, whole=whole) for token, value in item.top_logprobs]
        return {**self._entry(item.token_id, item.logprob, whole=whole), "top_logprobs": tops}

    def _entry(self, token: int, logprob: float, *, whole: bool) -> dict[str, Any]:
        value = self._token_bytes(token)
        return {"token": token_text(value), "logprob": logprob, **({"bytes": list(value)} if whole else {})}


def _status(end: BlockChange) -> str:
    return "incomplete" if end.cut else "completed"


def new_response_id() -> str:
    return f"resp_{uuid.uuid4().hex}"


# ---- answers that are kept -------------------------------------------------------------------------------------------


KEPT_S = 3600.0
"""Seconds for which an answer is kept."""

KEPT_BYTES = 16 << 20
"""The most bytes of answers and conversations that are kept for one key; the oldest go first."""


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """An answer, and the conversation up to its end, both in JSON."""

    response: bytes
    conversation: bytes
    until: float

    @property
    def size(self) -> int:
        return len(self.response) + len(self.conversation)


@dataclass
class ResponseStore:
    """The answers that are kept, for each tenant apart: what one keeps, reads or deletes changes nothing for others."""

    most_bytes: int = KEPT_BYTES
    seconds: float = KEPT_S
    clock: Callable[[], float] = time.monotonic
    _kept: dict[str, OrderedDict[str, KeptResponse]] = field(default_factory=dict)

    def put(self, tenant: str, name: str, response: bytes, conversation: bytes) -> None:
        """Keep an answer, unless it alone is too much."""
        item = KeptResponse(response, conversation, self.clock() + self.seconds)
        kept = self._of(tenant)
        if item.size > self.most_bytes:
            return
        kept[name] = item
        size = sum(each.size for each in kept.values())
        while size > self.most_bytes:
            size -= kept.popitem(last=False)[1].size
        self._kept[tenant] = kept

    def get(self, tenant: str, name: str) -> KeptResponse | None:
        return self._of(tenant).get(name)

    def delete(self, tenant: str, name: str) -> bool:
        """Whether it was there."""
        return self._of(tenant).pop(name, None) is not None

    def _of(self, tenant: str) -> OrderedDict[str, KeptResponse]:
        """What is kept for a tenant; of all tenants only what is not over is."""
        now = self.clock()
        for name, kept in list(self._kept.items()):
            while kept and next(iter(kept.values())).until <= now:
                kept.popitem(last=False)
            if not kept:
                del self._kept[name]
        return self._kept.get(tenant) or OrderedDict()


def not_kept(name: str) -> ApiError:
    return ApiError(
        404,
        f"There is no response {name[:80]!r}.",
        "It was not stored, or not with this key, or it is over: responses are kept for an hour.",
        param="previous_response_id",
        code="previous_response_not_found",
    )
