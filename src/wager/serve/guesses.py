"""For answers whose caller asks: which part of the text who guessed, and which guesses were wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wager.engine.guessed_text import GuessedText
from wager.models.tokenizer import IncrementalDecoder, Tokenizer
from wager.serve.answers import ChoiceDelta
from wager.types import Request


class GuessReport:
    """Describes the deltas of an answer, in order."""

    def __init__(self, tokenizer: Tokenizer, requests: Sequence[Request]) -> None:
        self._tokenizer = tokenizer
        prompts = [request.prompt for request in requests for _ in range(request.params.n)]
        self._texts = [GuessedText(IncrementalDecoder(tokenizer, after=prompt)) for prompt in prompts]

    def of(self, item: ChoiceDelta) -> dict[str, Any]:
        """`parts` of the text with the drafter of each ("": the model itself), and `rejected` guesses."""
        delta, made = item.delta, item.round
        parts = self._texts[item.index].split(delta.text, delta.token_ids, delta.drafted_by)
        rejected = [made.draft.tokens[node] for node in made.discarded] if made else []
        return {
            "token_ids": delta.token_ids,
            "drafted_by": delta.drafted_by,
            "parts": [{"text": part.text, "drafter": part.drafter} for part in parts],
            "rejected": [self._tokenizer.decode([token], special=True) for token in rejected],
            "drafter": made.draft.drafter if made else "",
        }
