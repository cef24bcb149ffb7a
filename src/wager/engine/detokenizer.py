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
        keep = 0 if last else self._length_to_hold()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def _length_to_hold(self) -> int:
        """Length of the longest suffix of the held text that is a prefix of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for size in range(min(longest, len(self._held)), 0, -1):
            suffix = self._held[-size:]
            if any(stop.startswith(suffix) for stop in self._stop):
                return size
        return 0
