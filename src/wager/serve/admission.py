"""Who is let in: a bounded queue in front of the engine, and none while the server drains."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from wager.serve.errors import ApiError

_RECENT = 64
"""Ended requests whose rate tells when a place will be free."""


class Admission:
    """Counts the sequences that were let in. `running` may decode at once; beyond them `max_waiting` may wait, and
    whoever comes then is refused with 429 and the seconds after which a place is likely to be free."""

    def __init__(self, *, running: int, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = running + max_waiting
        self._clock = clock
        self._ended: deque[float] = deque(maxlen=_RECENT)
        self.open = 0
        """Sequences that were let in and have not ended."""
        self.draining = False
        """Whether nobody is let in any more."""

    @contextmanager
    def place(self, sequences: int) -> Iterator[None]:
        """Room for so many sequences, while the block lasts. ApiError 400, 429 or 503 if there is none."""
        if self.draining:
            raise ApiError(503, "The server is shutting down.", "Try another one.", retry_after=30)
        if sequences > self._most:
            raise ApiError(400, f"The request has {sequences} choices.", f"Ask for at most {self._most}.", param="n")
        if self.open + sequences > self._most:
            wait = self.retry_after(self.open + sequences - self._most)
            raise ApiError(
                429, f"{self.open} requests wait or run already.", f"Try again in {wait} s.", retry_after=wait
            )
        self.open += sequences
        try:
            yield
        finally:
            self.open -= sequences
            self._ended.extend([self._clock()] * min(sequences, _RECENT))

    def retry_after(self, places: int) -> int:
        """Whole seconds, 1 to 60, in which so many sequences end at the rate of late."""
        if len(self._ended) < 2:
            return 1
        spent = self._clock() - self._ended[0]
        return max(1, min(60, round(places * spent / len(self._ended))))
