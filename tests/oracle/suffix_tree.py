"""What followed each run of tokens in texts, and how often, in plain dicts: the reference of csrc/suffix_tree.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Followers(NamedTuple):
    """What followed the longest known ending of a text: its number of tokens `length`, how often anything followed,
    `seen`, and the followers with how often each did, the most frequent first, of equals the latest. `latest` are those
    that came last, in the same order."""

    length: int
    seen: int
    tokens: tuple[tuple[int, int], ...]
    latest: tuple[tuple[int, int], ...] = ()


LATEST = 32
"""Followers that `Followers.latest` has at most."""


class SuffixCounts:
    """Counts the followers of every run of 1 to `longest` tokens."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._followers: dict[tuple[int, ...], dict[int, int]] = {}  # in the order in which each came last

    def append(self, text: Sequence[int], token: int) -> None:
        """Count `token` after the endings of `text`."""
        for ending in self._endings(text):
            counts = self._followers.setdefault(ending, {})
            counts[token] = counts.pop(token, 0) + 1

    def add(self, text: Sequence[int]) -> None:
        for end, token in enumerate(text):
            self.append(text[:end], token)

    def remove(self, text: Sequence[int]) -> None:
        """Take out a text that was added, before all that were added later."""
        for end, token in enumerate(text):
            for ending in self._endings(text[:end]):
                counts = self._followers[ending]
                counts[token] -= 1
                if not counts[token]:
                    del counts[token]

    def followers(self, text: Sequence[int]) -> Followers:
        for ending in self._endings(text):
            if counts := self._followers.get(ending):
                latest_first = list(reversed(counts.items()))
                every, latest = (
                    sorted(some, key=lambda item: -item[1]) for some in (latest_first, latest_first[:LATEST])
                )
                return Followers(len(ending), sum(counts.values()), tuple(every), tuple(latest))
        return Followers(0, 0, ())

    def latest_of(self, run: Sequence[int]) -> list[tuple[int, int]]:
        """The followers of this very run that came last, LATEST at most, the latest first, with their counts."""
        return list(reversed(self._followers.get(tuple(run), {}).items()))[:LATEST]

    def latest(self, text: Sequence[int]) -> list[list[tuple[int, int]]]:
        """The followers of each known ending that came last, LATEST at most, the latest first, with their counts."""
        found = [self.latest_of(ending) for ending in self._endings(text)]
        return [followers for followers in found if followers]

    def _endings(self, text: Sequence[int]) -> list[tuple[int, ...]]:
        """The endings of a text, the longest first."""
        return [tuple(text[len(text) - size :]) for size in range(min(self._longest, len(text)), 0, -1)]
