"""The reduced vocabulary of a drafter: the target's ids it can guess, as the most frequent ones of its data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wager.errors import UsageError


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """`ids` int64 [Vd], ascending: draft token j is the target's token ids[j], of `size` in all."""

    ids: NDArray[np.int64]
    size: int

    @classmethod
    def of(
        cls, texts: Iterable[Sequence[int]], *, size: int, most: int | None, always: Iterable[int] = ()
    ) -> DraftVocabulary:
        """The `most` most frequent ids of the texts (None: all of the target's `size`), equals by id; `always` among
        them whatever their frequency."""
        if most is None or most >= size:
            return cls(np.arange(size, dtype=np.int64), size)
        counts = np.zeros(size, np.int64)
        for text in texts:
            np.add.at(counts, np.asarray(text, np.int64), 1)
        kept = set(always)
        if most < max(1, len(kept)):
            raise UsageError(f"A draft vocabulary of {most} tokens is too small.", f"Take {max(1, len(kept))} or more.")
        for token in np.argsort(-counts, kind="stable").tolist():
            if len(kept) >= most:
                break
            kept.add(token)
        return cls(np.array(sorted(kept), np.int64), size)

    @property
    def whole(self) -> bool:
        """Whether every token of the target can be guessed."""
        return len(self.ids) == self.size

    def offsets(self) -> NDArray[np.int64]:
        """d2t as the format has it: target id minus draft id."""
        found: NDArray[np.int64] = self.ids - np.arange(len(self.ids))
        return found

    def known(self) -> NDArray[np.bool_]:
        """t2d: bool [size], whether the target's token can be guessed."""
        found = np.zeros(self.size, bool)
        found[self.ids] = True
        return found
