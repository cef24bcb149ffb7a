"""The JSON of answers: what OpenAI's API calls completions and chat completions, whole and in chunks."""

from __future__ import annotations

import codecs
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from wager.constrain.tools import ToolCallDelta, ToolCallParser, ToolFormat
from wager.draft.prediction import Alignment
from wager.types import Completion, OutputDelta, TokenLogprob

TokenBytes = Callable[[int], bytes]
"""The bytes of a token id."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every object of one answer repeats: its id, the model's name, the time in whole seconds."""

    id: str
    model: str
    created: int

    @classmethod
    def of(cls, request_id: str, model: str) -> AnswerHead:
        return cls(request_id, model, int(time.time()))


class AnswerFormat(Protocol):
    """How the choices of an answer are written. `plain`: a delta that does not end its choice is its text, and all
    else about it is the same for all of them."""

    head: AnswerHead
    plain: bool

    def first(self, index: int) -> Mapping[str, Any] | None:
        """The choice object that opens choice `index` in a stream, if there is one."""

    def part(self, index: int, delta: OutputDelta) -> dict[str, Any]:
        """The choice object of a delta."""

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """The choice object of a whole choice."""

    def envelope(self, *, stream: bool) -> dict[str, Any]:
        """All of the object but its choices and usage."""


class CompletionFormat:
    """Choices of /v1/completions. `logprobs`: whether they were asked for."""

    def __init__(self, head: AnswerHead, token_bytes: TokenBytes, *, logprobs: bool) -> None:
        self.head = head
        self.plain = not logprobs
        self._token_bytes = token_bytes
        self._logprobs = logprobs
        self._characters: dict[int, tuple[codecs.IncrementalDecoder, int]] = {}  # of a choice's text so far

    def first(self, index: int) -> None:
        return None

    def part(self, index: int, delta: OutputDelta) -> dict[str, Any]:
        return self._object(index, delta.text, delta.logprobs, delta.finish_reason)

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        return self._object(index, completion.text, completion.logprobs, completion.finish_reason)

    def envelope(self, *, stream: bool) -> dict[str, Any]:
        head = self.head
        return {"id": head.id, "object": "text_completion", "created": head.created, "model": head.model}

    def _object(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], finish_reason: str | None
    ) -> dict[str, Any]:
        found = self._lists(index, logprobs) if self._logprobs else None
        return {"index": index, "text": text, "logprobs": found, "finish_reason": finish_reason}

    def _lists(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        characters, offset = self._characters.get(index) or (codecs.getincrementaldecoder("utf-8")("replace"), 0)
        tokens = [self._text(item.token_id) for item in logprobs]
        offsets = []
        for item, token in zip(logprobs, tokens, strict=True):
            added = characters.decode(self._token_bytes(item.token_id))
            before = len(added) - len(token) if added.endswith(token) else 0  # what earlier bytes did not complete
            offsets.append(offset + before)
            offset += len(added)
        self._characters[index] = characters, offset
        return {
            "tokens": tokens,
            "token_logprobs": [item.logprob for item in logprobs],
            "top_logprobs": [self._alternatives(item) for item in logprobs],
            "text_offset": offsets,
        }

    def _alternatives(self, item: TokenLogprob) -> dict[str, float]:
        """The token itself and the likeliest ones, of which it may be one."""
        found = ((item.token_id, item.logprob), *item.top_logprobs)
        return {self._text(token): logprob for token, logprob in found}

    def _text(self, token_id: int) -> str:
        """A token's text; bytes that are no text as OpenAI writes them."""
        return token_text(self._token_bytes(token_id))


class ChatFormat:
    """Choices of /v1/chat/completions. `logprobs`: whether they were asked for. `calls` makes what finds tool calls in
    a choice, if there are tools."""

    def __init__(
        self,
        head: AnswerHead,
        token_bytes: TokenBytes,
        *,
        logprobs: bool,
        calls: Callable[[], CallWriter] | None = None,
    ) -> None:
        self.head = head
        self.plain = not logprobs and calls is None
        self._token_bytes = token_bytes
        self._logprobs = logprobs
        self._calls = calls
        self._writers: dict[int, CallWriter] = {}

    def first(self, index: int) -> Mapping[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, index: int, delta: OutputDelta) -> dict[str, Any]:
        reason: str | None = delta.finish_reason
        if self._calls is None:
            content: dict[str, Any] = {"content": delta.text} if delta.text or reason is None else {}
        else:
            writer = self._writers.setdefault(index, self._calls())
            content = writer.push(delta.text, last=reason is not None)
            reason = "tool_calls" if reason == "stop" and writer.called else reason
        logprobs = self._content(delta.logprobs) if delta.logprobs else None
        return {"index": index, "delta": content, "logprobs": logprobs, "finish_reason": reason}

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        reason: str = completion.finish_reason
        if self._calls is not None:
            written = self._calls().push(completion.text, last=True)
            calls = whole_calls(written)
            message["content"] = written.get("content") or (None if calls else "")
            if calls:
                message["tool_calls"] = calls
                reason = "tool_calls" if reason == "stop" else reason
        logprobs = self._content(completion.logprobs) if self._logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def envelope(self, *, stream: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if stream else "chat.completion"
        return {"id": self.head.id, "object": kind, "created": self.head.created, "model": self.head.model}

    def _content(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._entry(item.token_id, item.logprob),
                    "top_logprobs": [self._entry(token, logprob) for token, logprob in item.top_logprobs],
                }
                for item in logprobs
            ],
            "refusal": None,
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        value = self._token_bytes(token_id)
        return {"token": token_text(value), "logprob": logprob, "bytes": list(value)}


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


def token_text(value: bytes) -> str:
    """The text of a token's bytes; `bytes:\\xe2\\x82` where they are not whole characters, as OpenAI writes them."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in value)


@dataclass(frozen=True, slots=True)
class PredictionUse:
    """`accepted`: tokens of the prediction that appeared in the answer, where the prediction was expected to go on;
    `rejected`: those that did not. Sums over the choices."""

    accepted: int
    rejected: int


def prediction_use(prediction: Sequence[int], completions: Sequence[Completion]) -> PredictionUse:
    """Follow each choice through the prediction, as the drafter of that name does. It depends on the texts alone, not
    on what was drafted."""
    accepted = sum(len(_places(prediction, completion)) for completion in completions)
    return PredictionUse(accepted, len(prediction) * len(completions) - accepted)


def _places(prediction: Sequence[int], completion: Completion) -> set[int]:
    """The places of the prediction whose tokens appeared."""
    alignment = Alignment(list(prediction))
    found = set[int]()
    for token in completion.token_ids:
        place = alignment.next
        if alignment.agreed and place < len(prediction) and alignment.tokens[place] == token:
            found.add(place)
        alignment.unread.append(token)
        alignment.catch_up()
    return found


def usage(completions: Sequence[Completion], *, prompts: int, predicted: PredictionUse | None) -> dict[str, Any]:
    """Token counts of an answer to `prompts` prompts, whose choices share their prompt's tokens. `predicted` is the use
    of the request's prediction, if it has one."""
    per_prompt = len(completions) // max(1, prompts)
    firsts = completions[::per_prompt] if per_prompt else []
    prompt_tokens = sum(each.stats.prompt_tokens for each in firsts)
    completion_tokens = sum(each.stats.completion_tokens for each in completions)
    counted: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(each.stats.cached_tokens for each in firsts)},
    }
    if predicted is not None:
        counted["completion_tokens_details"] = {
            "accepted_prediction_tokens": predicted.accepted,
            "rejected_prediction_tokens": predicted.rejected,
        }
    return counted


def encoded(value: Any) -> bytes:
    """JSON in UTF-8. Numbers that JSON lacks become null: a logprob may be minus infinity."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


_BLOCK = 64
"""Items of a list that are encoded in one call, which holds the interpreter's lock."""


def encoded_in_parts(value: Mapping[str, Any]) -> bytes:
    """As `encoded`, for an answer of many logprobs: no call of the encoder takes long, so that other threads can run
    between them."""
    return b"".join(_parts(value, 5))


def _parts(value: Any, levels: int) -> Iterator[bytes]:
    """`levels`: of objects and lists whose members are encoded one by one; the lists below them are, by blocks."""
    if levels and isinstance(value, dict):
        for place, (key, each) in enumerate(value.items()):
            yield (b"," if place else b"{") + encoded(key) + b":"
            yield from _parts(each, levels - 1)
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and len(value) > _BLOCK:
        for at in range(0, len(value), _BLOCK):
            yield (b"," if at else b"[") + encoded(value[at : at + _BLOCK])[1:-1]
        yield b"]"
    elif levels and isinstance(value, list) and value:
        for place, each in enumerate(value):
            yield b"," if place else b"["
            yield from _parts(each, levels - 1)
        yield b"]"
    else:
        yield encoded(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
