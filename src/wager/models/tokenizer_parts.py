"""The parts of a tokenizer, as read from its files for the Tokenizer class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tokenizers import Tokenizer as Backend

Spelling = Literal["byte-level", "sentencepiece"]
"""How bytes are written in the vocabulary: one character for each byte (GPT-2), or as text with ▁ for a space and
<0xNN> for other bytes."""

SpacePrefix = Literal["none", "text", "fragment"]
"""Where encoding puts a space that decoding removes: nowhere, before the text, or before every fragment of the text,
that is, also after every special or user-defined token (SentencePiece in GGUF files)."""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """The parts of a tokenizer; `where` names the file or directory it was read from.

    `special` ids are left out of decoded text; `literal` ids are spelled as text, not as bytes. `named` are the special
    tokens that a chat template may use.
    """

    backend: Backend
    spelling: Spelling
    vocab_size: int
    eos_ids: tuple[int, ...]
    where: str
    special: frozenset[int] = frozenset()
    literal: frozenset[int] = frozenset()
    space_prefix: SpacePrefix = "none"
    named: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None
