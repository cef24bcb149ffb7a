"""Whether a draft that is not ready is made after all, while the target waits.

It pays where the guesses that it gains come faster than tokens come anyway: gained guesses / seconds of drafting above
tokens / seconds of all steps. Left out, the step yields one token, and the next draft is made beside it.
"""

from __future__ import annotations

_SMOOTHING = 0.1  # weight of a new figure in a running mean
_RETRY_INTERVAL = 16  # misses after which one is drafted for whatever it costs, to learn what it costs now


class _Mean:
    """A running mean; None before the first figure."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, figure: float) -> None:
        self.value = figure if self.value is None else self.value + _SMOOTHING * (figure - self.value)


class MissChoice:
    """`always`: what is chosen, whatever is measured (None: what pays)."""

    def __init__(self, always: bool | None = None) -> None:  # noqa: FBT001
        self._always = always
        self._gained, self._seconds, self._tokens, self._step = _Mean(), _Mean(), _Mean(), _Mean()
        self._known_since = 0
        self._asked_at: float | None = None
        self._misses = 0

    def became_known(self, tokens: int) -> None:
        """So many tokens more became known."""
        self._known_since += tokens

    def asked(self, now: float) -> None:
        """Drafts are requested: a step has ended."""
        if self._asked_at is not None and self._known_since:
            self._tokens.add(self._known_since)
            self._step.add(now - self._asked_at)
        self._asked_at, self._known_since = now, 0

    def gained(self, guesses: int) -> None:
        """So many guesses of a draft were accepted."""
        self._gained.add(guesses)

    def drafted(self, seconds: float) -> None:
        """Drafts that had been missed took so long."""
        self._seconds.add(seconds)

    def drafts(self, missed: int) -> bool:
        """Whether to draft for so many misses."""
        if self._always is not None:
            return self._always
        self._misses += 1
        gained, seconds, tokens, step = (m.value for m in (self._gained, self._seconds, self._tokens, self._step))
        if gained is None or seconds is None or tokens is None or step is None or self._misses % _RETRY_INTERVAL == 0:
            return True
        return missed * gained * step > tokens * seconds
