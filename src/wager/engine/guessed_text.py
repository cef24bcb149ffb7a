"""Which part of a streamed text which drafter guessed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class TokenText(Protocol):
    """An incremental detokenizer: the text each token adds."""

    def push(self, token: int, /) -> str: ...


@dataclass(frozen=True, slots=True)
class GuessedPart:
    """A part of a text, and the drafter that guessed it ("": the target itself)."""

    text: str
    drafter: str


class GuessedText:
    """Splits streamed text. `token_text` gives the text that each token adds, so that text is assigned to its drafter.

    Text may lag behind its tokens (stop strings, unfinished characters); it is assigned in order of arrival.
    """

    def __init__(self, token_text: TokenText) -> None:
        self._token_text = token_text
        self._expected: deque[tuple[int, str]] = deque()  # characters to come, and their drafter

    def split(self, text: str, tokens: Sequence[int], drafted_by: Sequence[str]) -> list[GuessedPart]:
        """The parts of `text`; `tokens` and the drafter of each ("": the target) arrived with it."""
        for token, drafter in zip(tokens, drafted_by, strict=True):
            size = len(self._token_text.push(token))
            if size:
                self._expected.append((size, drafter))
        parts = []
        while text:
            size, drafter = self._expected.popleft() if self._expected else (len(text), "")
            if size > len(text):
                self._expected.appendleft((size - len(text), drafter))
            parts.append(GuessedPart(text[:size], drafter))
            text = text[size:]
        return parts
