"""How varied texts are: where plain texts are nearly constant, their equality with others shows little."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from wager.types import Completion

FEW_BITS = 2.0
"""A text with less empirical entropy is nearly constant; four ids in turn have as much."""

JUDGED_TOKENS = 8
"""Shorter texts are not judged."""


@dataclass(frozen=True, slots=True)
class TextVariety:
    """Plain texts of one sampling mode. `distinct_ids` and `entropy_bits` (empirical, of a text's own token ids) are
    means over the texts; `nearly_constant` of the `judged` texts have less than FEW_BITS."""

    mode: str
    texts: int
    distinct_texts: int
    tokens: int
    distinct_ids: float
    entropy_bits: float
    judged: int
    nearly_constant: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def warning(self) -> str:
        """A sentence if most judged texts are nearly constant or all texts are the same, with figures; else empty."""
        figures = (
            f"{self.distinct_ids:.1f} distinct ids and {self.entropy_bits:.2f} bits of entropy in "
            f"{self.tokens / max(1, self.texts):.0f} tokens on average"
        )
        if 2 * self.nearly_constant > self.judged:
            return (
                f"{self.nearly_constant} of {self.judged} {self.mode} plain texts are nearly constant ({figures}), "
                "so that equal texts show little."
            )
        if self.texts > 1 and self.distinct_texts == 1 and self.judged:
            return (
                f"All {self.texts} {self.mode} plain texts are the same ({figures}), so that equal texts show little."
            )
        return ""


def variety_of(mode: str, answers: Collection[Completion]) -> TextVariety:
    """The variety of some answers."""
    texts = [answer.token_ids for answer in answers]
    bits = [entropy_bits(text) for text in texts]
    judged = [each for text, each in zip(texts, bits, strict=True) if len(text) >= JUDGED_TOKENS]
    return TextVariety(
        mode=mode,
        texts=len(texts),
        distinct_texts=len(set(texts)),
        tokens=sum(map(len, texts)),
        distinct_ids=sum(len(set(text)) for text in texts) / max(1, len(texts)),
        entropy_bits=sum(bits) / max(1, len(texts)),
        judged=len(judged),
        nearly_constant=sum(each < FEW_BITS for each in judged),
    )


def entropy_bits(ids: Sequence[int]) -> float:
    """The entropy of the frequencies of some ids, in bits; 0 for none."""
    return sum(n / len(ids) * math.log2(len(ids) / n) for n in Counter(ids).values())
