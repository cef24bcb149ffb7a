"""Finds tool calls in an answer while it is written: text that is content, names, and arguments as they grow."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from wager.constrain.tools import ToolFormat

_STRING = r'"(?:[^"\\]|\\.)*"'


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of call `index`: its name once, when it is known; `arguments` is JSON text to be joined."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What a piece of an answer adds to its content and to its calls."""

    content: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of function `name`; `arguments` is JSON text, cut off where the answer was."""

    name: str
    arguments: str


class ToolCallParser:
    """Reads an answer in `form` piece by piece: give every text to `push`, then call `flush`.

    Text that might be the beginning of a call is held back until it is certain. What looks like a call and has no name
    is content. Where no tag is shown, an answer has calls only if it begins with them.
    """

    def __init__(self, form: ToolFormat) -> None:
        opening, begin = _visible(form.opening, form), _visible(form.begin, form)
        self._tag = "" if form.hidden else (opening + begin).strip()
        self._end = _visible(form.end, form).strip()
        before = [r"[\s,;]", *(re.escape(text.strip()) for text in (begin, opening) if text.strip())]
        self._skipped = re.compile(f"(?:{'|'.join(before)})*")
        self._head = re.compile(rf"\{{\s*\"name\"\s*:\s*({_STRING})\s*,\s*\"{form.arguments}\"\s*:\s*(?=\S)", re.DOTALL)
        self._closing = [text for text in (self._end, _visible(form.closing, form).strip()) if text]
        self._held = ""
        self._state = "content" if self._tag else "start"
        self._value = _JsonValue()
        self.calls = 0
        """Calls whose names are known so far."""

    def push(self, text: str) -> AnswerDelta:
        """What becomes certain with this text."""
        self._held += text
        content: list[str] = []
        calls: list[ToolCallDelta] = []
        while self._step(content, calls, last=False):
            pass
        return AnswerDelta("".join(content), tuple(calls))

    def flush(self) -> AnswerDelta:
        """What is left at the end of the answer."""
        content: list[str] = []
        calls: list[ToolCallDelta] = []
        while self._step(content, calls, last=True):
            pass
        if self._state in ("content", "start", "call") and self._held:
            content.append(self._held)
        self._held = ""
        return AnswerDelta("".join(content), tuple(calls))

    def _step(self, content: list[str], calls: list[ToolCallDelta], *, last: bool) -> bool:
        """Go on by one part of the answer, as far as it is known; whether to go on."""
        if self._state == "content":
            return self._read_content(content, last=last)
        if self._state == "start":
            return self._read_start(content)
        if self._state == "call":
            return self._read_head(calls)
        if self._state == "arguments":
            return self._read_arguments(calls)
        return self._read_after(last=last)

    def _read_content(self, content: list[str], *, last: bool) -> bool:
        """Text up to the tag of a call, as far as it cannot be a part of one."""
        if not self._tag:
            content.append(self._held)
            self._held = ""
            return False
        at = self._held.find(self._tag)
        if at >= 0:
            content.append(self._held[:at].rstrip())
            self._held, self._state = self._held[at:], "call"
            return True
        kept = 0 if last else _kept(self._held, self._tag)
        content.append(self._held[: len(self._held) - kept])
        self._held = self._held[len(self._held) - kept :]
        return False

    def _read_start(self, content: list[str]) -> bool:
        """Without a tag an answer is a call if it begins as one."""
        begun = self._held.lstrip()
        if not begun:
            return False
        self._state = "call" if begun[0] in "{[" else "content"
        return True

    def _read_head(self, calls: list[ToolCallDelta]) -> bool:
        skipped = self._skipped.match(self._held)
        rest = self._held[skipped.end() if skipped else 0 :].removeprefix("[" if not self._tag else "")
        head = self._head.match(rest)
        if head is None:
            return False
        calls.append(ToolCallDelta(self.calls, json.loads(head[1])))
        self.calls += 1
        self._held, self._state, self._value = rest[head.end() :], "arguments", _JsonValue()
        return True

    def _read_arguments(self, calls: list[ToolCallDelta]) -> bool:
        count = self._value.take(self._held)
        if count:
            calls.append(ToolCallDelta(self.calls - 1, None, self._held[:count]))
        self._held = self._held[count:]
        if self._value.ended:
            self._state = "after"
        return self._value.ended

    def _read_after(self, *, last: bool) -> bool:
        """The end of a call, then the next one, or content."""
        rest = self._held.lstrip().removeprefix("}").lstrip()
        for closing in self._closing:
            if rest and closing.startswith(rest) and not last:
                return False  # it is not all there
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
    """Where a JSON object ends in a text that grows."""

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
                self._depth -= 1
                if not self._depth:
                    self.ended = True
                    return count
        return len(text)


def parse_tool_calls(text: str, form: ToolFormat) -> tuple[str, list[ToolCall]]:
    """The content and the calls of a whole answer."""
    parser = ToolCallParser(form)
    content, calls = "", list[ToolCall]()
    for delta in (parser.push(text), parser.flush()):
        content += delta.content
        for part in delta.calls:
            if part.name is not None:
                calls.append(ToolCall(part.name, ""))
            calls[part.index] = ToolCall(calls[part.index].name, calls[part.index].arguments + part.arguments)
    return content, calls


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
