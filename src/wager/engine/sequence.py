"""One choice of one request while it runs: its tokens, how many of them are computed, its text and its counters.

Mutable, and written by the scheduler alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from wager.engine.detokenizer import Detokenizer
from wager.types import FinishReason, GrammarState, Request, SamplingParams, Stats
from wager.verify.distribution import History


def sequence_id(request_id: str, choice: int) -> str:
    """Choice 0 has the request's own id; the others add their number."""
    return request_id if choice == 0 else f"{request_id}#{choice}"


@dataclass(slots=True)
class SequenceCounters:
    """Running counts behind `Stats`; times are clock readings in seconds, negative while unset."""

    admitted_at: float = -1.0
    first_token_at: float = -1.0
    last_token_at: float = -1.0
    cached_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0


class Sequence:
    """`num_computed_tokens` counts the leading tokens whose keys and values are in the cache."""

    def __init__(
        self,
        request: Request,
        choice: int,
        *,
        seed: int,
        text: Detokenizer | None,
        eos: Collection[int],
        drafter: str,
    ) -> None:
        self.id = sequence_id(request.id, choice)
        self.request, self.request_id = request, request.id
        self.choice = choice
        self.seed = seed
        self.tokens = list(request.prompt)
        self.num_computed_tokens = 0
        self.overtaken = 0  # by sequences that came later, while it was the first that waits
        self.drafter = drafter
        self.counters = SequenceCounters()
        self.max_length = len(request.prompt) + request.params.max_tokens
        params = request.params
        tokens_alone = params.filters_only and params.logprobs is None
        self.greedy = tokens_alone and params.greedy
        """Whether its tokens are the greedy ones and nothing else is reported of them."""
        self.temperature = float(params.temperature) if tokens_alone and not params.greedy else None
        """Of tokens that are sampled with nothing but filters, and of which nothing else is reported."""
        self.filters = None if params.plain else params.filters
        self.constrained = params.grammar is not None
        """Whether its output follows a grammar, which may end it."""
        self._history: History | None = None
        self._in_history = 0
        self.text = text
        self.stop_ids = frozenset(request.params.stop_token_ids) | (
            frozenset() if request.params.ignore_eos else frozenset(eos)
        )

    @property
    def history(self) -> History | None:
        """What penalties and grammar depend on, kept from when it is first asked for; None if there are none."""
        if self._history is None:
            self._history, self._in_history = History.of(self.request.prompt, self.params), self.prompt_tokens
        if self._history is not None and self._in_history < len(self.tokens):
            self._history.append(self.tokens[self._in_history :])
            self._in_history = len(self.tokens)
        return self._history

    @property
    def grammar(self) -> GrammarState | None:
        """How far its output has come in its grammar, if it has one."""
        history = self.history
        return None if history is None else history.grammar

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens that are not computed yet; at least one while the sequence runs."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    def extend(self, tokens: Iterable[int], *, max_context: int) -> tuple[str, FinishReason | None]:
        """Add emitted tokens up to one that ends the sequence. Returns the text that became certain, and why the
        sequence ends if it does."""
        known, detokenizer, text = self.tokens, self.text, ""
        longest = min(self.max_length, max_context)
        for token in tokens:
            known.append(token)
            if token in self.stop_ids:
                return text + self._flush(), "stop"
            if detokenizer is not None:
                text += detokenizer.push(token)
                if detokenizer.stopped:
                    return text, "stop"
            if self.constrained and self._grammar_is_complete():
                return text + self._flush(), "stop"
            if len(known) >= longest:
                return text + self._flush(), "length"
        return text, None

    def _grammar_is_complete(self) -> bool:
        grammar = self.grammar
        return grammar is not None and grammar.complete()

    def _flush(self) -> str:
        return self.text.flush() if self.text else ""

    def stats(self) -> Stats:
        counters = self.counters
        started = counters.first_token_at >= 0
        return Stats(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.output_tokens,
            seed=self.seed,
            cached_tokens=counters.cached_tokens,
            prefill_s=counters.first_token_at - counters.admitted_at if started else 0.0,
            decode_s=counters.last_token_at - counters.first_token_at if started else 0.0,
            rounds=counters.rounds,
            drafted=counters.drafted,
            accepted=counters.accepted,
            preemptions=counters.preemptions,
            drafter=self.drafter,
        )
