"""Colours text by the drafter that guessed it: one colour a drafter, none for the target's own tokens.

If NO_COLOR is set, guessed text is put in brackets instead.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import click

_COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "bright_red")


class TokenText(Protocol):
    """An incremental detokenizer: the text each token adds."""

    def push(self, token: int, /) -> str: ...


class DraftColorer:
    """Colours streamed text. `token_text` gives the text that each token adds, so that text is assigned to its drafter.

    Text may lag behind its tokens (stop strings, unfinished characters); it is assigned in order of arrival.
    """

    def __init__(self, token_text: TokenText) -> None:
        self._token_text = token_text
        self._expected: deque[tuple[int, str]] = deque()  # characters to come, and their drafter
        self._colours: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._plain = bool(os.environ.get("NO_COLOR"))

    def paint(self, text: str, tokens: Sequence[int], drafted_by: Sequence[str]) -> str:
        """`text` with colours; `tokens` and the drafter of each ("": the target) arrived with it."""
        for token, drafter in zip(tokens, drafted_by, strict=True):
            self._counts[drafter] = self._counts.get(drafter, 0) + 1
            size = len(self._token_text.push(token))
            if size:
                self._expected.append((size, drafter))
        painted = []
        while text:
            size, drafter = self._expected.popleft() if self._expected else (len(text), "")
            if size > len(text):
                self._expected.appendleft((size - len(text), drafter))
            painted.append(self._style(drafter)(text[:size]))
            text = text[size:]
        return "".join(painted)

    def legend(self) -> str:
        """How many tokens came from the target and from each drafter, in their colours."""
        drafters = [self._style(name)(f"{name} {count}") for name, count in sorted(self._counts.items()) if name]
        return ", ".join([f"target {self._counts.get('', 0)}", *drafters])

    def _style(self, drafter: str) -> Callable[[str], str]:
        if not drafter:
            return lambda text: text
        if self._plain:
            return lambda text: f"[{text}]"
        colour = self._colours.setdefault(drafter, _COLOURS[len(self._colours) % len(_COLOURS)])
        return lambda text: click.style(text, fg=colour)
