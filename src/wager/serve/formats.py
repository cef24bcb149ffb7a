"""The JSON of answers: what OpenAI's API calls completions and chat completions, whole and in chunks."""

from __future__ import annotations

import codecs
import json
import secrets
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wager.constrain.tools import TextDelta, ToolCallDelta, ToolCallParser, ToolFormat
from wager.draft.prediction import Alignment
from wager.types import Completion, OutputDelta, TokenLogprob

TokenBytes = Callable[[int], bytes]
"""The bytes of a token id."""


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt that the answer tells of: its text, if the answer begins with that, and the log-probabilities of its
    tokens but the first, if they were asked for."""

    text: str | None
    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprob] = ()


class CompletionFormat:
    """Choices of /v1/completions. `head` has the fields that every object of the answer repeats, `logprobs`: whether
    they were asked for. `prompts`: what of them the answer tells, each of which has `choices`; `prompt_logprobs`: as
    vLLM gives them. `plain`: a delta that does not end its choice is its text, and all else about it is the same
    for all of them."""

    def __init__(
        self,
        head: Mapping[str, Any],
        token_bytes: TokenBytes,
        *,
        logprobs: bool,
        prompts: Sequence[EchoedPrompt] = (),
        choices: int = 1,
        prompt_logprobs: bool = False,
    ) -> None:
        self.head = self.chunk_head = head
        self.plain = not logprobs
        self._prompts, self._choices, self._prompt_logprobs = prompts, choices, prompt_logprobs
        self._token_bytes = token_bytes
        self._logprobs = logprobs
        self._characters: dict[int, tuple[codecs.IncrementalDecoder, int]] = {}  # of a choice's text so far

    def first(self, index: int) -> dict[str, Any] | None:
        """The object that opens a choice in a stream: there is none, but for the text of a prompt."""
        text = self._prompts[index // self._choices].text if self._prompts else None
        return None if text is None else {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def part(self, index: int, delta: OutputDelta | Completion) -> dict[str, Any]:
        """The object of a delta, or of a whole choice."""
        logprobs = self._lists(index, delta.logprobs) if self._logprobs else None
        return {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish_reason}

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """The object of a whole choice."""
        if not self._prompts:
            return self.part(index, completion)
        prompt = self._prompts[index // self._choices]
        told = self._lists_of_prompt(index, prompt) if self._logprobs and prompt.text is not None else None
        found = self.part(index, completion)
        found["text"] = (prompt.text or "") + completion.text
        if told is not None:
            found["logprobs"] = {name: [*told[name], *values] for name, values in found["logprobs"].items()}
        if self._prompt_logprobs:
            found["prompt_logprobs"] = prompt_logprobs(prompt, self._token_bytes)
        return found

    def _lists_of_prompt(self, index: int, prompt: EchoedPrompt) -> dict[str, Any]:
        """The lists of a prompt's tokens. The first has nothing before it that it could follow."""
        first = TokenLogprob(prompt.tokens[0], 0.0, ())
        lists = self._lists(index, [first, *prompt.logprobs])
        lists["token_logprobs"][0] = lists["top_logprobs"][0] = None
        return lists

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


def prompt_logprobs(prompt: EchoedPrompt, token_bytes: TokenBytes) -> list[dict[str, Any] | None]:
    """As vLLM gives them: for each token of a prompt but the first its own and those of the likeliest, by their ids."""
    found: list[dict[str, Any] | None] = [None]
    for item in prompt.logprobs:
        ranked = {token: (value, rank) for rank, (token, value) in enumerate(item.top_logprobs, 1)}
        ranked.setdefault(item.token_id, (item.logprob, 0))
        found.append(
            {
                str(token): {"logprob": value, "rank": rank or None, "decoded_token": token_text(token_bytes(token))}
                for token, (value, rank) in ranked.items()
            }
        )
    return found


class ChatFormat:
    """Choices of /v1/chat/completions, as those of CompletionFormat. `calls`: how tool calls are written, if there are
    tools; `calls_functions`: they are answered as `function_call`, the first form that the API had."""

    def __init__(
        self,
        head: Mapping[str, Any],
        token_bytes: TokenBytes,
        *,
        logprobs: bool,
        calls: ToolFormat | None,
        calls_functions: bool = False,
    ) -> None:
        self.head = head
        self._called = "function_call" if calls_functions else "tool_calls"
        self.chunk_head = {**head, "object": "chat.completion.chunk"}
        self.plain = not logprobs and calls is None
        self._token_bytes = token_bytes
        self._logprobs = logprobs
        self._calls = calls
        self._writers: dict[int, CallWriter] = {}

    def first(self, index: int) -> dict[str, Any]:
        """The object that opens a choice in a stream."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, index: int, delta: OutputDelta) -> dict[str, Any]:
        """The object of a delta."""
        reason: str | None = delta.finish_reason
        if self._calls is None:
            content: dict[str, Any] = {"content": delta.text} if delta.text or reason is None else {}
        else:
            writer = self._writers.setdefault(index, CallWriter(self._calls))
            content = writer.push(delta.text, last=reason is not None)
            if self._called == "function_call":
                _as_function_call(content)
            reason = self._called if reason == "stop" and writer.called else reason
        logprobs = self._content(delta.logprobs) if delta.logprobs else None
        return {"index": index, "delta": content, "logprobs": logprobs, "finish_reason": reason}

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """The object of a whole choice."""
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        reason: str = completion.finish_reason
        if self._calls is not None:
            content, calls = read_calls(self._calls, completion.text)
            message["content"] = content or (None if calls else "")
            if calls:
                message["tool_calls"] = calls
                if self._called == "function_call":
                    _as_function_call(message)
                reason = self._called if reason == "stop" else reason
        logprobs = self._content(completion.logprobs) if self._logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

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


AnswerFormat = CompletionFormat | ChatFormat


def _as_function_call(message: dict[str, Any]) -> None:
    """Its call in the form that the API had first."""
    for call in message.pop("tool_calls", ()):
        message["function_call"] = call["function"]


def answer_head(kind: str, request_id: str, model: str) -> dict[str, Any]:
    """What every object of one answer repeats; the time is in whole seconds."""
    prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
    return {"id": f"{prefix}-{request_id}", "object": kind, "created": int(time.time()), "model": model}


class CallWriter:
    """Calls of one choice as OpenAI's API writes them, in pieces and whole."""

    def __init__(self, form: ToolFormat) -> None:
        self._parser = ToolCallParser(form)

    @property
    def called(self) -> bool:
        return bool(self._parser.calls)

    def push(self, text: str, *, last: bool) -> dict[str, Any]:
        """The `delta` object of a piece of text, with one entry for each call, which clients expect; `last`: none
        follows."""
        content, calls = "", list[dict[str, Any]]()
        for part in self._parser.push(text, last=last):
            if isinstance(part, TextDelta):
                content += part.text
            elif calls and calls[-1]["index"] == part.index:
                calls[-1]["function"]["arguments"] += part.arguments
            else:
                calls.append(_call_part(part))
        return {**({"content": content} if content else {}), **({"tool_calls": calls} if calls else {})}


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _call_part(call: ToolCallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": new_call_id(), "type": "function", "function": function}


def read_calls(form: ToolFormat, text: str) -> tuple[str | None, list[dict[str, Any]]]:
    """The content of a whole answer, if it has one, and its calls."""
    delta = CallWriter(form).push(text, last=True)
    keys = ("id", "type", "function")
    return delta.get("content"), [{key: call[key] for key in keys} for call in delta.get("tool_calls", ())]


def token_text(value: bytes) -> str:
    """The text of a token's bytes; `bytes:\\xe2\\x82` where they are not whole characters, as OpenAI writes them."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in value)


def _appeared(prediction: Sequence[int], completion: Completion) -> int:
    """Tokens of the prediction that appeared in a choice where it was expected to go on. The choice is followed as the
    drafter of that name does; it depends on the texts alone, not on what was drafted."""
    alignment = Alignment(list(prediction))
    found = set[int]()
    for token in completion.token_ids:
        place = alignment.next
        if alignment.agreed and place < len(prediction) and alignment.tokens[place] == token:
            found.add(place)
        alignment.unread.append(token)
        alignment.catch_up()
    return len(found)


def usage(completions: Sequence[Completion], *, prompts: int, prediction: Sequence[int] | None) -> dict[str, Any]:
    """Token counts of an answer to `prompts` prompts, whose choices share their prompt's tokens. `prediction`
    is the request's, if it has one."""
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
    if prediction is not None:
        accepted = sum(_appeared(prediction, each) for each in completions)
        counted["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": len(prediction) * len(completions) - accepted,
        }
    return counted


def encoded(value: Any) -> bytes:
    """JSON in UTF-8. Numbers that JSON lacks become null: a logprob may be minus infinity."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


_PADDED = 128
"""Bytes of which the size of an obfuscated object is a multiple."""


def obfuscated(value: Mapping[str, Any]) -> dict[str, Any]:
    """With random characters that hide how long its text is from who sees an encrypted stream, as in OpenAI's API: the
    length of a delta would tell the number of its tokens, and so which guesses were right."""
    size = len(encoded({**value, "obfuscation": ""}))
    return {**value, "obfuscation": secrets.token_urlsafe(_PADDED)[: -size % _PADDED]}


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
