"""Tokens to text, one token at a time, with stop strings.

Text that might be the beginning of a stop string is held back until it is known not to be one, so that streamed
text is never withdrawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class TokenDecoder(Protocol):
    """Incremental decoder of a tokenizer: holds back bytes that do not make a character yet."""

    @property
    def known_texts(self) -> Mapping[int, str]:
        """Texts of some tokens: those that `push` would give after what came so far, without a change of its state. A
        dict's subclass may find more of them when they are asked for with `[]`."""

    def push(self, token: int, /) -> str: ...

    def flush(self) -> str: ...


class Detokenizer:
    """Text of one choice. `stopped` turns true at the first stop string; what follows it is never shown."""

    def __init__(self, decoder: TokenDecoder, stop: Sequence[str] = ()) -> None:
        self._decoder = decoder
        self._stop = tuple(stop)
        self._prefixes = [_HeldPrefix(each) for each in self._stop]
        self._held = ""
        self.stopped = False
        self.unstopped = None if stop else decoder
        """The decoder where there are no stop strings: its texts are shown as they are."""

    def push(self, token: int) -> str:
        """Text that became certain with this token."""
        text = self._decoder.push(token)
        return self._advance(text, last=False) if self._stop else text

    def flush(self) -> str:
        """What is still held back, at the end of the text."""
        return self._advance(self._decoder.flush(), last=True)

    def _advance(self, text: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        self._held += text
        starts = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if starts:
            self.stopped = True
            shown, self._held = self._held[: min(starts)], ""
            return shown
        keep = 0 if last else max((prefix.push(text) for prefix in self._prefixes), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown


class _HeldPrefix:
    """How much of a stop string the text may have begun, by Knuth, Morris and Pratt: a few operations a character,
    however long the string is."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = [0]  # of each prefix met so far, the longest proper prefix of it that also ends it
        self._length = 0

    def push(self, text: str) -> int:
        """The length of the longest end of all text so far that is a prefix of the stop string. The string itself must
        not have come."""
        stop, borders, length = self._stop, self._borders, self._length
        for character in text:
            while length and stop[length] != character:
                length = borders[length - 1]
            length += stop[length] == character
            if length > len(borders):
                border = borders[-1]
                while border and stop[border] != character:
                    border = borders[border - 1]
                borders.append(border + (stop[border] == character))
        self._length = length
        return length
