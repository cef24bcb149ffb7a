"""The stores that come with wager, each built for a model: `--drafter auto` takes the one that fits the tokenizer."""

from __future__ import annotations

from pathlib import Path

from wager.draft.store_file import StoreFile, read_store_header
from wager.draft.vocabulary import vocabulary_digest
from wager.models.tokenizer import Tokenizer, num_tokens

FOLDER = Path(__file__).parents[1] / "stores"


def shipped_store(tokenizer: Tokenizer) -> StoreFile | None:
    """The store that was built for this tokenizer, open; None if there is none. UsageError if it is damaged."""
    digest = ""
    for path in sorted(FOLDER.glob("*.store")):
        digest = digest or vocabulary_digest(tokenizer)
        if read_store_header(path).tokenizer == digest:
            return StoreFile(path, vocab=num_tokens(tokenizer), tokenizer=digest)
    return None
