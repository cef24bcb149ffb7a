"""What users give a model: texts, token ids and conversations; what is none of these is refused by name. And the one
reader of files of prompts, of logs, and of times at which requests arrived; docs/bench.md lists the forms.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TypeGuard

from wager.errors import UsageError
from wager.inputs import csv_rows, read_text, shown
from wager.types import SamplingParams, as_token_ids, listed

Message = Mapping[str, Any]
"""A chat message: {"role": "system" | "user" | "assistant", "content": text}."""

PromptType = str | Sequence[int]
"""A text, encoded as it is (no chat template, control tokens in it are parsed), or its token ids: integers of any type,
arrays and tensors included."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of a prompt. Control tokens written out in it are parsed as such only if `parse_special`."""

    text: str
    parse_special: bool = False


class ChatTokenizer(Protocol):
    """The methods of a tokenizer by which prompts are encoded."""

    def encode(self, text: str, *, special: bool = True) -> list[int]: ...

    def chat_parts(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[TextPart]: ...

    def encode_parts(self, parts: Iterable[TextPart], /) -> list[int]: ...

    def encode_text(self, text: str, /) -> list[int]: ...


def encode_chat(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> tuple[int, ...]:
    """Token ids of a conversation in the model's chat template, up to the position where the answer begins.

    Control tokens come from the template alone: text of messages that spells one is encoded as ordinary text.
    """
    return tuple(tokenizer.encode_parts(tokenizer.chat_parts(messages, add_generation_prompt=True)))


def encode_prompts(tokenizer: ChatTokenizer, prompts: object) -> tuple[list[tuple[int, ...]], bool]:
    """Token ids of one prompt or of several, and whether it was one. UsageError that names what is neither."""
    given = listed(prompts)
    if isinstance(given, bytes | bytearray | memoryview) or not isinstance(given, Sequence):
        raise not_a_prompt(prompts)
    if isinstance(given, str) or (given and isinstance(listed(given[0]), int | float)):
        return [encode_prompt(tokenizer, given)], True
    return [encode_prompt(tokenizer, prompt) for prompt in given], False


def encode_chats(tokenizer: ChatTokenizer, messages: object) -> tuple[list[tuple[int, ...]], bool]:
    """Token ids of one conversation or of several, and whether it was one. UsageError that names what is neither."""
    several = isinstance(messages, Sequence) and not isinstance(messages, str)
    one = not several or (bool(messages) and isinstance(messages[0], Mapping))  # type: ignore[index]
    conversations: Sequence[Any] = [messages] if one else messages  # type: ignore[assignment]
    for conversation in conversations:
        check_conversation(conversation)
    return [encode_chat(tokenizer, turns) for turns in conversations], one


def check_conversation(messages: object) -> None:
    """UsageError unless it is a list of messages, each with a role and a content."""
    if not is_conversation(messages):
        raise UsageError(
            f"A conversation of type {type(messages).__name__} cannot be answered.",
            'A conversation is a list of messages such as {"role": "user", "content": "Hello"}; texts go to generate.',
        )
    for number, message in enumerate(messages, 1):
        for key in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
                raise UsageError(
                    f"Message {number} of the conversation has no text under {key!r}.",
                    'A message is a mapping such as {"role": "user", "content": "Hello"}.',
                )


def not_a_prompt(value: object, reason: str = "") -> UsageError:
    """The refusal of a value that is no prompt."""
    return UsageError(
        f"A prompt of type {type(value).__name__} cannot be answered{': ' if reason else ''}{reason}.",
        "A prompt is a text or a sequence of token ids; conversations go to chat.",
    )


def encode_prompt(tokenizer: ChatTokenizer, prompt: object) -> tuple[int, ...]:
    """Token ids of a prompt: a text's, or those given. UsageError that names what is neither."""
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt))
    try:
        return as_token_ids(prompt)
    except TypeError as error:
        raise not_a_prompt(prompt, str(error)) from None


def is_conversation(value: object) -> TypeGuard[Sequence[Message]]:
    """Whether it is one conversation rather than a list of them, or a prompt."""
    return isinstance(value, Sequence) and not isinstance(value, str) and bool(value) and isinstance(value[0], Mapping)


# ---- files of prompts and logs ---------------------------------------------------------------------------------------

OTHER = "other"
"""The category of what names none."""

SAMPLING_FIELDS = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
)
"""Fields of a request that SamplingParams has too, under the same names."""

_FAMILIES = ("translation", "summarization", "qa", "math_reasoning", "rag")
"""Spec-Bench's categories that are not MT-Bench's."""
_ROLES = {"human": "user", "user": "user", "system": "system", "tool": "tool", "observation": "tool"}
_ROLES |= dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard"), "assistant")
"""By ShareGPT's names."""
_PROMPTS = ("messages", "conversations", "conversation", "turns", "prompt", "prompt_token_ids", "input")
_TIMES = ("arrival", "timestamp", "created", "time")
_RENAMED = {"max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens", "stop_sequences": "stop"}
_ANSWERS = ("response", "answer", "completion", "output", "generated_text", "choices")
_MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id")
_BODY = ("tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort")
"""Fields of a request besides SAMPLING_FIELDS that are taken from a row in which other columns may stand too."""
_CLIENTS = ("model", "stream", "stream_options", "metadata", "user", "store", "instructions", "system")
"""Fields of a whole body that are not sent again."""
_MILLISECONDS = 1e11
"""A larger number counts the milliseconds since 1970; as seconds it would be in the year 5138."""
_LATEST = 1e15

BUILTIN = Path(__file__).with_name("prompts.jsonl")
"""The built-in prompts: three of every family of Spec-Bench."""

_HINT = 'A row is {"prompt": TEXT} or {"messages": [...]} or another form of docs/bench.md.'
_TIME_HINT = 'Give a time on every line: seconds, or a row with "timestamp", "created" or "arrival".'


Answer = str | tuple[int, ...] | None
"""What was answered, as a text or token ids; None if it was not recorded."""

Content = str | tuple[int, ...] | tuple[Message, ...]
"""A text, token ids, or a conversation up to where the answer begins."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request of a file or a log. `fields` are those that its body set, by OpenAI's names; `arrival` is when it
    arrived, in seconds, `answer` what was answered, as a text or token ids (None: not recorded)."""

    id: str | int
    category: str
    content: Content
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrival: float | None = None
    answer: Answer = None

    @property
    def text(self) -> str:
        """The text, of a conversation that of all its messages; of token ids empty."""
        if is_conversation(self.content):
            return "\n".join(message["content"] for message in self.content)
        return self.content if isinstance(self.content, str) else ""

    def params(self, default: SamplingParams) -> SamplingParams:
        """As `default`, with the request's own fields."""
        return replace(default, **{name: self.fields[name] for name in SAMPLING_FIELDS if name in self.fields})

    def without(self, *names: str) -> Prompt:
        """Without its own fields of these names."""
        return replace(self, fields={name: value for name, value in self.fields.items() if name not in names})


def as_conversation(content: Content, *, system: str | None = None) -> Content:
    """A text as the conversation that it begins; a conversation with the system message, if it has none; token ids as
    they are."""
    first = [] if system is None else [{"role": "system", "content": system}]
    if isinstance(content, str):
        return (*first, {"role": "user", "content": content})
    if is_conversation(content) and content[0]["role"] != "system":
        return (*first, *content)
    return content


def encode_content(tokenizer: ChatTokenizer, content: Content) -> tuple[int, ...]:
    """Token ids of a prompt; a conversation's in the model's chat template."""
    return encode_chat(tokenizer, content) if is_conversation(content) else encode_prompt(tokenizer, content)


def encode_answer(tokenizer: ChatTokenizer, answer: Answer) -> Sequence[int]:
    """Token ids of what was answered; none where it was not recorded."""
    return tokenizer.encode_text(answer) if isinstance(answer, str) else answer or ()


def read_prompts(path: Path, *, timed: bool = False, text: str | None = None) -> list[Prompt]:
    """The requests of a file or a log, or of its `text`, if that was read; if `timed`, each with its time. UsageError
    names the file, the line and what was found."""
    rows = read_rows(path, "prompt file", _HINT, text)
    found = [prompt for where, number, row in rows for prompt in _requests(row, where, number, timed=timed)]
    if not found:
        raise UsageError(f"{path} holds no prompts.", _HINT)
    seen: set[str | int] = set()
    for prompt in found:
        if prompt.id in seen:
            raise UsageError(f"{path} has two prompts with the id {prompt.id!r}.", "Ids must differ.")
        seen.add(prompt.id)
    return found


def spread(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """At most `limit` prompts: as equal a share of each category as possible, spaced evenly within the category."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    groups: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(prompt.category, []).append(index)
    shares = dict.fromkeys(groups, 0)
    while sum(shares.values()) < limit:
        short = (name for name in groups if shares[name] < len(groups[name]))
        shares[min(short, key=shares.__getitem__)] += 1
    taken = {group[step * len(group) // shares[name]] for name, group in groups.items() for step in range(shares[name])}
    return [prompt for index, prompt in enumerate(prompts) if index in taken]


def read_arrivals(path: Path) -> tuple[float, ...]:
    """When requests arrived, ascending, in seconds from the first on: a time on every line, or a log with times.
    UsageError names the file, the line and what was found."""
    times: list[float] = []
    for where, number, row in read_rows(path, "file of arrivals", _TIME_HINT):
        if isinstance(row, dict) and _prompt_key(row):
            times += [prompt.arrival or 0.0 for prompt in _requests(row, where, number, timed=True)]
        else:
            times.append(_time(row if isinstance(row, dict) else {_TIMES[0]: row}, where))
    if not times:
        raise UsageError(f"{path} holds no arrivals.", _TIME_HINT)
    first = min(times)
    return tuple(sorted(time - first for time in times))


def arrival_seconds(value: object) -> float:
    """A time in seconds: a number (beyond 1e11 it counts milliseconds), or a date of ISO 8601, in UTC if it names no
    zone. ValueError, in words, for anything else."""
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if isinstance(value, str) and math.isnan(seconds):
        try:
            date = datetime.fromisoformat(re.sub(r" (?=[+-])|UTC$", "", value.strip().upper()).strip())
            seconds = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            pass
    if isinstance(value, bool) or not 0 <= seconds <= _LATEST:
        raise ValueError(f"{_short(value)} is not a time: seconds from 0 on, or a date of ISO 8601")
    return seconds / 1e3 if seconds > _MILLISECONDS else seconds


def read_rows(path: Path, what: str, hint: str, text: str | None = None) -> Iterator[tuple[str, int, Any]]:
    """Each row of a file with its place and number: a JSON value a line, a list of them, or CSV with a header."""
    text = read_text(path, what, hint) if text is None else text
    first = text.partition("\n")[0].strip()
    if first.startswith("["):
        for number, value in enumerate(_json(text, str(path), hint), 1):
            yield f"{path}, entry {number}", number, value
    elif first.strip('"').lower() in (*_PROMPTS, *_TIMES) or re.match(r'([^\W\d]|[",]).*[,;\t]|,', first):
        try:
            for number, (at, row) in enumerate(csv_rows(text), 1):
                yield f"{path}, line {at}", number, {name: _cell(name, value) for name, value in row.items()}
        except ValueError as error:
            raise UsageError(f"{path}, {error}.", hint) from error
    else:
        for number, line in enumerate(text.split("\n"), 1):  # JSON may hold U+2028, which ends no line
            value = _json(line, f"{path}, line {number}", hint) if line.strip() else {"logger": ""}
            if not isinstance(value, dict) or "logger" not in value or "completion_tokens" in value:
                yield f"{path}, line {number}", number, value  # the server's own log has lines of other events too


def _cell(name: str, value: str) -> Any:
    """A value of a CSV file: None where it is empty, and numbers of the fields of a request as such."""
    if value and name != "stop" and name in (*SAMPLING_FIELDS, *_RENAMED):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value or None


def _json(text: str, where: str, hint: str) -> Any:
    try:
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{where}: half a surrogate pair is no text.", "Write valid Unicode.") from error
    except (ValueError, RecursionError) as error:
        cause = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise UsageError(f"{where}: not JSON ({cause}).", hint) from error
    return value


def _short(value: object) -> str:
    """In a message, of any length."""
    return shown(json.dumps(value, default=str))[1:-1]


def _requests(row: Any, where: str, number: int, *, timed: bool) -> Iterator[Prompt]:
    """The requests of a row: of a recorded conversation one for each message that was answered."""
    hint = f"{_HINT} Times without prompts need a FILE of prompts beside them." if timed else _HINT
    if not isinstance(row, dict):
        raise UsageError(f"{where}: not an object.", hint)
    bodies = ("body", "request", *["params"] * (_prompt_key(row) is None))  # beside a prompt these are settings
    body = next((row[name] for name in bodies if isinstance(row.get(name), dict)), row)
    identity = next((row[name] for name in ("id", "question_id", "custom_id") if row.get(name) is not None), number)
    if not isinstance(identity, str | int):
        raise UsageError(f"{where}: the id {_short(identity)} is neither a text nor a number.", _HINT)
    named = [of.get(key) for of in (row, body.get("metadata")) if isinstance(of, dict) for key in ("category", "task")]
    category = next((each for each in named if isinstance(each, str) and each.strip()), OTHER)
    if "turns" in row and "question_id" in row and category not in _FAMILIES:
        category = "mt_bench"  # of whose eight categories Spec-Bench has ten prompts each
    fields, key = _fields(body, row, where), _prompt_key(body, own=body is not row)
    recorded = _recorded_answer(row)
    if key is None:
        raise UsageError(f"{where}: there is no prompt, messages, conversations or turns.", hint)
    if body is not row and str(row.get("url", "completions")).rpartition("/")[2] not in ("completions", "responses"):
        raise UsageError(f"{where}: url = {_short(row['url'])} asks for no text.", "Leave the row out.")
    contents = list(_contents(body, key, where, own=body is not row))
    for turn, (content, message, answer) in enumerate(contents, 1):
        times = {**body, **row, **message} if turn == 1 else message
        time = _time(times, where if turn == 1 else f"{where}: turn {turn} of the conversation") if timed else None
        name = f"{identity}/{turn}" if len(contents) > 1 else identity
        if answer is None and turn == len(contents):
            answer = recorded
        yield Prompt(name, category, content, fields, time, answer)


def _prompt_key(body: Mapping[str, Any], *, own: bool = False) -> str | None:
    """The key under which a row has a prompt; "input" is one in a body of its `own` alone, since datasets have such
    columns."""
    return next((name for name in (_PROMPTS if own else _PROMPTS[:-1]) if body.get(name) is not None), None)


def _contents(
    body: Mapping[str, Any], key: str, where: str, *, own: bool
) -> Iterator[tuple[Content, Mapping[str, Any], Answer]]:
    """What is asked, the message that asks it, and the message of a recorded conversation that answers it."""
    value = body[key]
    if key == "turns":
        value = value[0] if isinstance(value, list) and value else ""  # the later ones need answers, which it lacks
    system = body.get("instructions") or body.get("system")  # of Anthropic's API a text or blocks of it
    system = system if isinstance(system, str) or is_conversation(system) else None
    if isinstance(value, str) and system:
        value = [{"role": "user", "content": value}]
    first = value[0] if isinstance(value, list) and value else None
    if key.startswith("conversation") or key == "messages" or isinstance(first, dict):
        if not isinstance(value, list) or (key == "messages" and not value):
            raise UsageError(f"{where}: {key} = {_short(value)} is no list of messages.", _HINT)
        messages = [_message(each, f"{where}: message {place} of {key}") for place, each in enumerate(value, 1)]
        if system:
            said = _message({"role": "system", "content": system}, f"{where}: system")
            messages = [said, *messages[messages[:1] == [said] :]]
        roles = [message["role"] for message in messages]
        ends = [len(messages)]
        if key.startswith("conversation") or (not own and roles[-1] == "assistant"):  # recorded, with its answers
            asked = [place for place, role in enumerate(roles, 1) if role in ("user", "tool")]
            ends = [place for place in asked if roles[place : place + 1] in ([], ["assistant"])]
        clean = [{name: message[name] for name in _MESSAGE if name in message} for message in messages]
        answers = [_answer_of(messages[end]) if end < len(messages) else None for end in ends]
        yield from ((tuple(clean[:end]), messages[end - 1], answer) for end, answer in zip(ends, answers, strict=True))
    elif first is not None and all(type(token) is int and token >= 0 for token in value):
        yield tuple(value), {}, None
    elif not isinstance(value, str) and value != []:
        raise UsageError(f"{where}: {key} = {_short(value)} is neither a text, token ids nor messages.", _HINT)
    elif not value or not value.strip():
        raise UsageError(f"{where}: the prompt is empty or not a text.", _HINT)
    else:
        yield value, {}, None


def _recorded_answer(row: Mapping[str, Any]) -> Answer:
    """What a row says was answered: a text or token ids under one of _ANSWERS, or a response of OpenAI's or Anthropic's
    APIs, alone or as a line of a batch's output."""
    value: Any = next((row[name] for name in _ANSWERS if row.get(name)), None)
    if isinstance(value, dict):
        value = value["body"] if isinstance(value.get("body"), dict) else value
        value = next((value[name] for name in ("choices", "output") if value.get(name)), value)
    if not isinstance(value, list):
        return _answer_of(value) if isinstance(value, dict) else value if isinstance(value, str) else None
    if all(type(token) is int and token >= 0 for token in value):
        return tuple(value)
    items = [each.get("message", each) for each in value if isinstance(each, dict) and not each.get("index")]
    return "".join(text for each in items if isinstance(each, dict) and (text := _answer_of(each))) or None


def _answer_of(message: Mapping[str, Any]) -> str | None:
    """The text of an answering message, and its tool calls as the JSON that models write."""
    texts = [message.get("text"), message.get("content", message.get("value"))]
    parts = [each for text in texts if text for each in (text if isinstance(text, list) else [text])]
    said = [part.get("text") if isinstance(part, dict) else part for part in parts]
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            said.append(json.dumps({name: function.get(name) for name in ("name", "arguments")}, ensure_ascii=False))
    return "".join(each for each in said if isinstance(each, str)) or None


def _time(row: Mapping[str, Any], where: str) -> float:
    """When a request arrived, in seconds."""
    value = next((row[name] for name in _TIMES if row.get(name) is not None), None)
    if value is None:
        raise UsageError(f"{where} has no {', '.join(_TIMES[:-1])} or {_TIMES[-1]}.", _TIME_HINT)
    try:
        seconds = arrival_seconds(value)
    except ValueError as error:
        raise UsageError(f"{where}: {error}.", _TIME_HINT) from error
    if "logger" in row and isinstance(row.get("seconds"), float):  # it is when the answer ended, so much later
        seconds -= row["seconds"]
    mooncake = "hash_ids" in row and type(value) is int and seconds == value  # whose whole numbers are milliseconds
    return seconds / 1e3 if mooncake else seconds


def _message(value: Any, where: str) -> dict[str, Any]:
    """With a role and a text, that of its parts if it has several."""
    if not isinstance(value, dict):
        raise UsageError(f"{where} is {_short(value)}, not an object.", _HINT)
    role = value.get("role") or _ROLES.get(str(value.get("from")))
    if not isinstance(role, str):
        raise UsageError(f"{where} has no role: {_short(value)}.", 'It has a "role", or ShareGPT\'s "from".')
    content = value.get("content", value.get("value"))
    if content is None and value.get("tool_calls"):
        content = ""
    if isinstance(content, list):
        texts = [str(part["text"]) for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        content = "".join(texts) if len(texts) == len(content) else None
    if not isinstance(content, str):
        raise UsageError(f"{where} has no text: {_short(value)}.", "Images and sound are not read.")
    return {**value, "role": role, "content": content}


def _fields(body: Mapping[str, Any], row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What the body of a request sets: of a body of its own everything, of a row in which it stands what is known."""
    found = {_RENAMED.get(name, name): value for name, value in body.items() if value is not None}
    known = {*SAMPLING_FIELDS, *_BODY} if body is row else {*found} - {*_CLIENTS, *_PROMPTS}
    found = {name: value for name, value in found.items() if name in known}
    try:
        if "logit_bias" in found:
            found["logit_bias"] = {int(token): bias for token, bias in dict(found["logit_bias"]).items()}
        if found:
            Prompt(0, "", "", found).params(SamplingParams())
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", error.hint) from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where}: a field has the wrong type ({error}).", _HINT) from error
    return found
