"""The events of a streamed answer. Nearly all are a piece of text in an object that is otherwise constant, which is
encoded once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from json.encoder import encode_basestring
from typing import Any

from wager.async_llm import ChoiceDelta
from wager.serve.errors import error_body, failed_answer
from wager.serve.formats import AnswerFormat, encoded
from wager.serve.guesses import GuessReport
from wager.types import Completion, OutputDelta

_TEXT = "\u2402"  # stands where the text goes; no object has it elsewhere


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """How an answer is streamed. `usage` and `details` make objects of the completed choices; `guesses` describes what
    was guessed in each delta. Without `details` or `guesses` there are none. With `prompt_tokens` every chunk has the
    usage so far. `timeout`: seconds after which the answer ends with an error."""

    format: AnswerFormat
    include_usage: bool
    usage: Callable[[Sequence[Completion]], dict[str, Any]]
    timeout: float
    prompt_tokens: int | None = None
    details: Callable[[Sequence[Completion]], dict[str, Any]] | None = None
    guesses: GuessReport | None = None


class ChunkWriter:
    """Writes the events of one answer, in order."""

    def __init__(self, plan: StreamPlan) -> None:
        self._plan, self._format = plan, plan.format
        self._base = plan.format.envelope(stream=True) | ({"usage": None} if plan.include_usage else {})
        self._constant = plan.format.plain and plan.guesses is None and plan.prompt_tokens is None
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # of opened choices: what is before and behind a text
        self._tokens = 0

    def events(self, items: Sequence[ChoiceDelta]) -> bytes:
        """The events of some deltas: texts of one choice that follow each other are one event; deltas that add nothing
        to be seen have none."""
        parts: list[bytes] = []
        for (index, plain), run in groupby(items, key=self._kind):
            frame = self._frames.get(index)
            if frame is None:
                frame = self._frames[index] = self._open(index, parts)
            if not plain:
                for item in run:
                    self._add(item, parts)
            elif text := "".join([item.delta.text for item in run]):
                parts += (frame[0], encode_basestring(text).encode("utf-8", "replace"), frame[1])
        return b"".join(parts)

    def last(self, completions: Sequence[Completion]) -> bytes:
        """The events behind the last delta: usage and details, where they are wanted."""
        plan, found = self._plan, b""
        if plan.include_usage:
            found += event(self._format.envelope(stream=True) | {"choices": [], "usage": plan.usage(completions)})
        if plan.details is not None:
            details = {"choices": [], "speculation": plan.details(completions)}
            found += event(self._format.envelope(stream=True) | details)
        return found

    def _kind(self, item: ChoiceDelta) -> tuple[int, bool]:
        """Its choice, and whether its text is all there is to say."""
        return item.choice, self._constant and item.delta.finish_reason is None

    def _open(self, index: int, parts: list[bytes]) -> tuple[bytes, bytes]:
        first = self._format.first(index)
        if first is not None:
            parts.append(event(self._base | {"choices": [first]}))
        choice = self._format.part(index, OutputDelta("", index, text=_TEXT)) if self._constant else {}
        before, _, behind = event(self._base | {"choices": [choice]}).partition(
            json.dumps(_TEXT, ensure_ascii=False).encode()
        )
        return before, behind

    def _add(self, item: ChoiceDelta, parts: list[bytes]) -> None:
        plan, delta = self._plan, item.delta
        self._tokens += len(delta.token_ids)
        if plan.prompt_tokens is not None:
            self._base["usage"] = {
                "prompt_tokens": plan.prompt_tokens,
                "completion_tokens": self._tokens,
                "total_tokens": plan.prompt_tokens + self._tokens,
            }
        if not (delta.text or delta.finish_reason or delta.logprobs or plan.guesses):
            return
        choice = self._format.part(item.choice, delta)
        if plan.guesses is not None:
            choice["speculation"] = plan.guesses.of(item)
        parts.append(event(self._base | {"choices": [choice]}))
        if delta.finish_reason == "error":
            parts.append(event(error_body(failed_answer(delta))))


def event(value: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + encoded(value) + b"\n\n"
