"""Whether two tokenizers have the same token at every id: a draft model's ids, and those of a store, are used as the
target's."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Protocol

from wager.errors import TokenizerError


class Vocabulary(Protocol):
    """What the comparison needs of a tokenizer."""

    vocab_size: int

    def token(self, token_id: int) -> str:
        """The token as the vocabulary spells it."""


class TextVocabulary(Vocabulary, Protocol):
    """What drafting in another vocabulary needs of a tokenizer; see models.tokenizer.Tokenizer."""

    @property
    def eos_ids(self) -> Collection[int]:
        """The ids that end a text."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...

    def encode(self, text: str, *, special: bool = True) -> list[int]: ...


_DIGESTED = 4096
"""Token ids that a digest reads, evenly spread: all of a large vocabulary would take a tenth of a second."""


def vocabulary_digest(vocabulary: Vocabulary) -> str:
    """SHA-256, in hex, of the number of token ids and of the tokens at some 4,096 of them; those of two tokenizers
    differ."""
    size = vocabulary.vocab_size
    found = hashlib.sha256(str(size).encode())
    for token_id in range(0, size, max(1, size // _DIGESTED)):
        found.update(b"\0" + vocabulary.token(token_id).encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def check_same_vocabulary(target: Vocabulary, draft: Vocabulary) -> None:
    """Raise TokenizerError unless every id of the target is the same token in the draft model's vocabulary.

    The error names the first id that differs and both tokens, or the two sizes.
    """
    for token_id in range(min(target.vocab_size, draft.vocab_size)):
        in_target, in_draft = target.token(token_id), draft.token(token_id)
        if in_target != in_draft:
            raise TokenizerError(
                f"The draft model's vocabulary differs: id {token_id} is {in_draft!r}, but {in_target!r} "
                "in the target.",
                "A draft model must share the target's tokenizer; drafting by n-grams (--drafter ngram) always works.",
            )
    if target.vocab_size != draft.vocab_size:
        raise TokenizerError(
            f"The draft model's vocabulary has {draft.vocab_size} tokens, the target's {target.vocab_size}.",
            "A draft model must share the target's tokenizer; drafting by n-grams (--drafter ngram) always works.",
        )
