"""For answers whose caller asks: who guessed which part of the text, what was guessed wrong, what drafting brought."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from wager.async_llm import ChoiceDelta
from wager.engine.guessed_text import GuessedText
from wager.models.tokenizer import IncrementalDecoder, Tokenizer
from wager.serve.answers import Answer
from wager.types import Completion, Draft, Request, Stats


class GuessReport:
    """Describes the deltas of an answer, in order. Rejected guesses are shown of the drafters `shown` (None: of all):
    those of others may be another request's text."""

    def __init__(
        self, tokenizer: Tokenizer, requests: Sequence[Request], *, shown: Collection[str] | None = None
    ) -> None:
        self._tokenizer, self._shown = tokenizer, shown
        prompts = [request.prompt for request in requests for _ in range(request.params.n)]
        self._texts = [GuessedText(IncrementalDecoder(tokenizer, after=prompt)) for prompt in prompts]

    def of(self, item: ChoiceDelta) -> dict[str, Any]:
        """`parts` of the text with the drafter of each ("": the model itself), the number of rejected guesses, and
        those of them that are shown."""
        delta, made = item.delta, item.round
        parts = self._texts[item.choice].split(delta.text, delta.token_ids, delta.drafted_by)
        discarded = made.discarded if made else ()
        rejected = [made.draft.tokens[node] for node in discarded if self._shows(made.draft, node)] if made else []
        return {
            "token_ids": delta.token_ids,
            "drafted_by": delta.drafted_by,
            "parts": [{"text": part.text, "drafter": part.drafter} for part in parts],
            "rejected": [self._tokenizer.decode([token], special=True) for token in rejected],
            "rejected_tokens": len(discarded),
            "drafter": made.draft.drafter if made else "",
        }

    def _shows(self, draft: Draft, node: int) -> bool:
        return self._shown is None or draft.drafter_of(node) in self._shown


def draft_report(answer: Answer, completions: Sequence[Completion]) -> dict[str, Any]:
    """What drafting brought to an answer: a row for each choice, and the seconds by stage of its steps."""
    return {
        "choices": [_choice_stats(completion.stats) for completion in completions],
        "stage_seconds": dict(answer.stage_seconds()),
    }


def _choice_stats(stats: Stats) -> dict[str, Any]:
    return {
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "drafter": stats.drafter,
        "prefill_s": stats.prefill_s,
        "decode_s": stats.decode_s,
        "preemptions": stats.preemptions,
        "seed": stats.seed,
    }
