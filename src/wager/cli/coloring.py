"""Colours text by who guessed it: one colour a drafter, none for the target's own tokens.

Where colour is unwanted (NO_COLOR) guessed text stands in brackets. Knows text and origins, no engine.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import click

_COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "bright_red")


class Pieces(Protocol):
    """An incremental detokenizer: the text each token adds."""

    def push(self, token: int, /) -> str: ...


class Painter:
    """Paints streamed text. `pieces` says how much text each token brought, so that text can be laid to its guesser.

    Text may lag behind its tokens (stop strings, unfinished characters); it is laid to tokens in order of arrival.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._waiting: deque[tuple[int, str]] = deque()
        self._colours: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._plain = bool(os.environ.get("NO_COLOR"))

    def paint(self, text: str, tokens: Sequence[int], origins: Sequence[str]) -> str:
        """`text` with colours; `tokens` and their `origins` ("" is the target) arrived with it."""
        for token, origin in zip(tokens, origins, strict=True):
            self._counts[origin] = self._counts.get(origin, 0) + 1
            size = len(self._pieces.push(token))
            if size:
                self._waiting.append((size, origin))
        painted = []
        while text:
            size, origin = self._waiting.popleft() if self._waiting else (len(text), "")
            if size > len(text):
                self._waiting.appendleft((size - len(text), origin))
            painted.append(self._style(origin)(text[:size]))
            text = text[size:]
        return "".join(painted)

    def legend(self) -> str:
        """Who guessed how many tokens, each in its own colour."""
        guessed = [self._style(name)(f"{name} {count}") for name, count in sorted(self._counts.items()) if name]
        return ", ".join([f"target {self._counts.get('', 0)}", *guessed])

    def _style(self, origin: str) -> Callable[[str], str]:
        if not origin:
            return lambda text: text
        if self._plain:
            return lambda text: f"[{text}]"
        colour = self._colours.setdefault(origin, _COLOURS[len(self._colours) % len(_COLOURS)])
        return lambda text: click.style(text, fg=colour)
