"""The vocabulary of a head: which of the target's ids it can guess."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wager.errors import ModelError
from wager.kernels.arrays import Array
from wager.models.head_files import HeadFiles


@dataclass(frozen=True, eq=False)
class HeadVocabulary:
    """`ids` int64 [draft ids]: the target's id of each id of the head; `size`: the target's vocabulary."""

    ids: Array
    size: int

    @property
    def whole(self) -> bool:
        """Whether the head's ids are the target's."""
        return len(self.ids) == self.size and bool((self.ids == np.arange(self.size)).all())


def read_vocabulary(files: HeadFiles, *, draft: int, size: int) -> HeadVocabulary:
    """From d2t (the target's id minus the head's own) and t2d (which ids of the target it has), for a head of `draft`
    ids and a target of `size`. Without d2t the ids are the target's. ModelError if they contradict each other."""
    if "d2t" not in files.shapes:
        if draft != size:
            raise ModelError(
                f"The head in {files.where} guesses {draft} ids of a vocabulary of {size} and has no d2t to say which.",
                "The head was trained for another target, or is incomplete.",
            )
        return HeadVocabulary(np.arange(size), size)
    for name, shape in vocabulary_shapes(files, draft=draft, size=size).items():
        files.check_shape(name, shape)
    ids = np.arange(draft) + files.integers("d2t")
    known = files.integers("t2d").astype(bool) if "t2d" in files.shapes else None
    if known is not None and not _agree(ids, known):
        offsets = files.integers("d2t")
        absolute = bool(offsets.min() >= 0) and bool(offsets.max() < size) and _agree(offsets, known)
        raise ModelError(
            f"d2t and t2d in {files.where} name different ids"
            + (": d2t holds the target's ids, and must hold their distance from the head's own." if absolute else "."),
            "Export the head again.",
        )
    if ids.min() < 0 or ids.max() >= size or len(np.unique(ids)) < draft:
        raise ModelError(
            f"d2t in {files.where} names ids that the target's vocabulary of {size} does not have, or one twice.",
            "The head was trained for another target, or d2t does not hold distances.",
        )
    return HeadVocabulary(ids, size)


def vocabulary_shapes(files: HeadFiles, *, draft: int, size: int) -> dict[str, tuple[int, ...]]:
    """The shapes of d2t and t2d, if the head has them."""
    shapes: Sequence[tuple[str, tuple[int, ...]]] = (("d2t", (draft,)), ("t2d", (size,)))
    return {name: shape for name, shape in shapes if name in files.shapes}


def _agree(ids: Array, known: Array) -> bool:
    return bool(ids.min() >= 0) and bool(ids.max() < len(known)) and np.array_equal(np.sort(ids), np.flatnonzero(known))
