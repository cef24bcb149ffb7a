"""Which ids of a vocabulary are padding: those without a token.

Models of one family round the rows of their matrices up differently (Qwen2.5-0.5B has 151,936 rows for 151,665 tokens,
7B 152,064), and llama.cpp's converter names the rest in a GGUF file: [PAD151665] and so on.
"""

from __future__ import annotations

from typing import Protocol


class Vocabulary(Protocol):
    """The tokens of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    def token(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty for an id that it has no token for."""


def unpadded(token_id: int, text: str) -> str | None:
    """The token `text` of an id, None where it is padding."""
    return text if text not in ("", f"[PAD{token_id}]") else None


def num_tokens(vocabulary: Vocabulary) -> int:
    """How many ids there are up to the last one with a token: without the padding behind."""
    size = vocabulary.vocab_size
    while size and unpadded(size - 1, vocabulary.token(size - 1)) is None:
        size -= 1
    return size
