"""Whether two tokenizers have the same token at every id: a draft model's ids, and those of a store, are used as the
target's. Padding, ids without a token, is no difference (models/tokenizer.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from wager.errors import TokenizerError
from wager.models.tokenizer import Tokenizer, num_tokens, unpadded

_DIGESTED = 4096
"""Token ids that a digest reads, evenly spread: all of a large vocabulary would take a tenth of a second."""


def vocabulary_digest(vocabulary: Tokenizer) -> str:
    """SHA-256, in hex, of the number of tokens and of some 4,096 of them; those of two tokenizers differ."""
    found = hashlib.sha256(str(num_tokens(vocabulary)).encode())
    for text in vocabulary_sample(vocabulary):
        found.update(b"\0" + text.encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def vocabulary_sample(vocabulary: Tokenizer) -> list[str]:
    """The tokens that a digest reads."""
    return [vocabulary.token(token_id) for token_id in _sampled(num_tokens(vocabulary))]


def _sampled(size: int) -> range:
    return range(0, size, max(1, size // _DIGESTED))


def sample_difference(target: Tokenizer, sample: Sequence[str], size: int) -> str:
    """As `vocabulary_difference`, where of a vocabulary of `size` ids only a sample is known."""
    for token_id, text in zip(_sampled(size), sample, strict=False):
        if found := _difference(token_id, unpadded(token_id, text), _token(target, token_id)):
            return found
    own = num_tokens(target)
    return f"there are {size} token ids, but {own} in the target" if size != own else ""


def vocabulary_difference(target: Tokenizer, draft: Tokenizer) -> str:
    """The first id that is not the same token in both, with both tokens: the end of a sentence; "" if there is none. An
    id that has a token in neither is no difference."""
    for token_id in range(max(target.vocab_size, draft.vocab_size)):
        if found := _difference(token_id, _token(draft, token_id), _token(target, token_id)):
            return found
    return ""


def _token(vocabulary: Tokenizer, token_id: int) -> str | None:
    return unpadded(token_id, vocabulary.token(token_id)) if token_id < vocabulary.vocab_size else None


def _difference(token_id: int, in_draft: str | None, in_target: str | None) -> str:
    if in_draft == in_target:
        return ""
    if in_draft is None:
        return f"there is no id {token_id}, which is {in_target!r} in the target"
    if in_target is None:
        return f"id {token_id} is {in_draft!r}, and the target has none"
    return f"id {token_id} is {in_draft!r}, but {in_target!r} in the target"


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer, *, where: str = "") -> None:
    """Raise TokenizerError unless every token of the target has the same id in the draft model's vocabulary, and no
    others are there. The error names the first id that differs and both tokens; `where` says whose it is."""
    if found := vocabulary_difference(target, draft):
        raise TokenizerError(
            f"The draft model's vocabulary differs{where}: {found}.",
            "Draft in its own vocabulary (--drafter tli:PATH or slem:PATH), or without a model (--drafter ngram).",
        )
