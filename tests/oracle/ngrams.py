"""What the n-gram index (csrc/ngrams.h) copies, by looking at the whole text."""

from __future__ import annotations

from collections.abc import Sequence


def copied(text: Sequence[int], longest: int, most: int) -> list[int]:
    """What followed the most recent occurrence of the longest known ending of 1 to `longest` tokens; a copy that
    reaches the end goes on periodically."""
    for length in range(min(longest, len(text) - 1), 0, -1):
        for after in range(len(text) - 1, length - 1, -1):
            if text[after - length : after] == text[-length:]:
                return [text[after + index % (len(text) - after)] for index in range(most)]
    return []
