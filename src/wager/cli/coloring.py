"""Colours text by the drafter that guessed it: one colour a drafter, none for the target's own tokens.

If NO_COLOR is set, guessed text is put in brackets instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import click

from wager.engine.guessed_text import GuessedText, TokenText

_COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "bright_red")


class DraftColorer:
    """Colours streamed text. `token_text` gives the text that each token adds, so that text is assigned to its drafter.

    Text may lag behind its tokens (stop strings, unfinished characters); it is assigned in order of arrival.
    """

    def __init__(self, token_text: TokenText) -> None:
        self._text = GuessedText(token_text)
        self._colours: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._plain = bool(os.environ.get("NO_COLOR"))

    def paint(self, text: str, tokens: Sequence[int], drafted_by: Sequence[str]) -> str:
        """`text` with colours; `tokens` and the drafter of each ("": the target) arrived with it."""
        for drafter in drafted_by:
            self._counts[drafter] = self._counts.get(drafter, 0) + 1
        parts = self._text.split(text, tokens, drafted_by)
        return "".join(self._style(part.drafter)(part.text) for part in parts)

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
