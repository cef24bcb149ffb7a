"""The lookup in learned texts in plain lists: the reference of csrc/corpus.h."""

from __future__ import annotations

from collections.abc import Sequence

DEPTH, SHORTEST, SAMPLES = 32, 2, 32


class PythonCorpus:
    """Segments of texts, the newest first."""

    def __init__(self, segments: Sequence[Sequence[Sequence[int]]]) -> None:
        self._segments = segments
        self.is_empty = not segments
        self._followers: dict[tuple[int, ...], list[tuple[int, float]]] = {}

    def find(self, text: Sequence[int], least: int) -> tuple[int, list[tuple[int, int]]]:
        """The length of the longest run before the end of `text` that is known, of `least` tokens or more, else 0; and
        what followed it, with how often each did among the places looked at, the most frequent first."""
        for length in range(min(DEPTH, len(text)), max(least, SHORTEST) - 1, -1):
            counts: dict[int, int] = {}
            for texts in self._segments:
                places = _places(texts, list(text[-length:]))
                samples = min(SAMPLES, len(places))
                for sample in reversed(range(samples)):
                    token = places[sample * len(places) // samples]
                    counts[token] = counts.get(token, 0) + 1
            if counts:
                return length, sorted(counts.items(), key=lambda item: -item[1])
        return 0, []

    def followers(self, run: Sequence[int]) -> list[tuple[int, float]]:
        """Tokens that followed a run of any length, and how often: the places looked at stand for all of them."""
        key = tuple(run)
        if key not in self._followers:
            found = self._followers[key] = []
            for texts in self._segments:
                places = _places(texts, list(run))
                samples = min(SAMPLES, len(places))
                for sample in reversed(range(samples)):
                    found.append((places[sample * len(places) // samples], len(places) / samples))
        return self._followers[key]


def _places(texts: Sequence[Sequence[int]], run: list[int]) -> list[int]:
    """The tokens behind a run, by the tokens before them, read backwards, then in their order."""
    found = []
    for number, each in enumerate(texts):
        for at in range(len(run), len(each)):
            if list(each[at - len(run) : at]) == run:
                found.append((list(reversed(each[max(0, at - DEPTH) : at])), number, at, each[at]))
    return [token for *_, token in sorted(found)]
