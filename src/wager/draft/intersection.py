"""Guesses of a model with another vocabulary: of the tokens that both vocabularies have.

Token-level intersection (Timor et al. 2025, arXiv 2502.05202): q is restricted to the tokens of the same bytes, and its
ids are the target's, so the noise is that of the target's ids and every acceptance rule takes it as any q. Known tokens
that the other vocabulary lacks are spelled in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wager.draft.guessing import GuessSampler
from wager.draft.vocabulary import TextVocabulary
from wager.errors import TokenizerError
from wager.kernels.base import TargetOutput

_ABSENT = -1e4
"""The logit of a token that the model does not have: finite, and its exponential is 0."""

_LEAST_SHARE = 0.05
"""Of the target's tokens that a draft model must have."""


class SharedIds:
    """The tokens that two vocabularies have in common: `verified` and `draft` ids, [n] each, ascending by the first.

    Ordinary tokens are the same if their bytes are, special ones if they are written alike, and those that end a text
    by that. Raises TokenizerError if hardly any token is shared.
    """

    def __init__(self, target: TextVocabulary, draft: TextVocabulary) -> None:
        self._target, self._draft = target, draft
        known = {_key(draft, token): token for token in reversed(range(draft.vocab_size))}  # the lowest of equal ones
        pairs = {
            token: known[key]
            for token in range(target.vocab_size)
            if (key := _key(target, token)) in known and (isinstance(key, str) or key)
        }
        if draft.eos_ids:
            for token in target.eos_ids:
                pairs.setdefault(token, min(draft.eos_ids))
        if len(pairs) < _LEAST_SHARE * target.vocab_size:
            raise TokenizerError(
                f"The draft model's vocabulary has {len(pairs)} of the target's {target.vocab_size} tokens.",
                "Draft by text (--drafter slem:PATH), which needs no token in common.",
            )
        self.verified = np.array(sorted(pairs), np.int64)
        self.draft = np.array([pairs[token] for token in sorted(pairs)], np.int64)
        self._own = pairs
        self._verified = {own: token for token, own in reversed(pairs.items())}
        self._spelled: dict[int, list[int]] = {}

    def own_id(self, token: int) -> int:
        """The draft model's id of a target's token; -1 if it has none."""
        return self._own.get(token, -1)

    def verified_id(self, own: int) -> int:
        """The target's id of a draft model's token that is shared."""
        return self._verified[own]

    def own(self, token: int) -> list[int]:
        """A known token of the target in the draft model's ids: itself, or its text encoded, or its bytes."""
        own = self._own.get(token)
        if own is not None:
            return [own]
        if token not in self._spelled:
            self._spelled[token] = spell(self._draft, self._target.token_bytes(token))
        return self._spelled[token]


def spell(vocabulary: TextVocabulary, text: bytes) -> list[int]:
    """Text encoded, and bytes that are no whole characters one by one, as far as there are such tokens."""
    ids: list[int] = []
    while text:
        try:
            return ids + vocabulary.encode(text.decode(), special=False)
        except UnicodeDecodeError as error:
            if error.start:
                ids += vocabulary.encode(text[: error.start].decode(), special=False)
            single = {vocabulary.token_bytes(token): token for token in reversed(range(vocabulary.vocab_size))}
            broken = text[error.start : error.end]
            ids += [single[byte] for byte in (broken[i : i + 1] for i in range(len(broken))) if byte in single]
            text = text[error.end :]
    return ids


def _key(vocabulary: TextVocabulary, token: int) -> str | bytes:
    return vocabulary.token(token) if vocabulary.is_special(token) else vocabulary.token_bytes(token)


class IntersectionSampler(GuessSampler):
    """Guesses by the logits of a model that shares some tokens with the verified one."""

    def __init__(self, width: int, *, vocab: int, shared: SharedIds) -> None:
        super().__init__(width, vocab=vocab)
        self._whole = False  # the model's own greedy token may be one that is not shared
        self._shared = shared
        inside = (shared.verified < vocab) & (shared.draft < width)
        self._targets, self._sources = shared.verified[inside], shared.draft[inside]

    def row(self, output: TargetOutput, index: int) -> NDArray[np.float32]:
        logits = output.logits[index]
        row = np.full(self.vocab, _ABSENT, np.float32)
        # one logit that is not finite spoils the row, shared or not
        row[self._targets] = logits[self._sources] if np.isfinite(logits).all() else np.nan
        return row

    def verified_ids(self, tokens: Sequence[int]) -> Sequence[int]:
        return [self._shared.verified_id(token) for token in tokens]

    def own_id(self, token: int) -> int:
        return self._shared.own_id(token)
