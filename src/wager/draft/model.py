"""A drafter that runs a smaller model of the same vocabulary, one token after the other.

It has a cache and a block pool of its own. A round computes every known token that it has not seen yet and draws the
first guess from the same pass, then feeds each guess to draw the next: k guesses, k passes, batched over sequences.
Keys and values of guesses are provisional: those of guesses that turn out right are kept, the others are overwritten.
A sequence for which no draft was requested for a while has more tokens to compute the next time.

Guesses are drawn with the target's own noise from q, processed by the request's own parameters, so an identical model
is always right (Daliri et al. 2024, arXiv 2408.07978). The confidence of a guess is its probability under q before
processing; survival is the product along the path, and a chain ends after the first guess whose survival is below the
request's `min_survival`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from wager.draft.vocabulary import Vocabulary, check_same_vocabulary
from wager.errors import NumericsError
from wager.kernels.base import Kernels, Target, TargetOutput
from wager.kernels.noise import argmax_gumbel
from wager.kernels.sampling import SampleRequest, sample_rows
from wager.kv.blocks import BlockPool
from wager.types import Draft, DraftRequest, SamplingParams, Span
from wager.verify.distribution import History, process
from wager.verify.pack import pack

__all__ = ["DraftModel", "Vocabulary", "check_same_vocabulary"]


@dataclass(slots=True)
class _DraftSequence:
    """One sequence in the drafter's cache. The first `num_computed_tokens` have final keys and values; of the current
    `guesses` the first `num_confirmed` turned out right and the first `num_fed` have provisional keys and values."""

    tokens: list[int]
    history: History | None
    num_computed_tokens: int = 0
    guesses: list[int] = field(default_factory=list)
    num_confirmed: int = 0
    num_fed: int = 0


class _DraftRound:
    """One draft request in progress."""

    def __init__(self, request: DraftRequest, state: _DraftSequence, depth: int) -> None:
        self.request = request
        self.state = state
        self.depth = depth
        self.probs: list[NDArray[np.float64]] = []
        self.survival: list[float] = []

    @property
    def done(self) -> bool:
        unlikely = bool(self.survival) and self.survival[-1] < self.request.min_survival
        return unlikely or len(self.state.guesses) >= self.depth

    def append(self, token: int, confidence: float) -> None:
        """One more guess, right with probability `confidence` if those before it are."""
        self.state.guesses.append(token)
        self.survival.append((self.survival[-1] if self.survival else 1.0) * confidence)

    def num_pending(self) -> int:
        """Known tokens that were not computed yet."""
        return len(self.state.tokens) - self.state.num_computed_tokens

    def span(self, room: int) -> Span:
        """The next rows: known tokens that are not computed yet, at most `room` of them, or else the last guess."""
        state, pending = self.state, self.num_pending()
        if not pending:
            state.num_fed += 1
            return Span(self.request.seq_id, len(state.tokens) + state.num_fed - 1, (state.guesses[-1],), True)
        rows = min(pending, room)
        start, state.num_computed_tokens = state.num_computed_tokens, state.num_computed_tokens + rows
        return Span(self.request.seq_id, start, tuple(state.tokens[start : start + rows]), rows == pending)


class DraftModel:
    """Drafts with `target`, a model that is not the one to be verified.

    `vocab` is the verified model's number of logits; ids beyond it are never guessed, and rows of draft_probs have that
    width (None: the draft model's own). `max_context` bounds positions (None: the cache alone does). `kernels` sample
    natively where given. A sequence is declined when the cache has no blocks for it or the context is too long.
    """

    default_depth = 4
    max_depth = 8
    samples = True
    makes_trees = False

    def __init__(
        self,
        target: Target,
        *,
        vocab: int | None = None,
        max_context: int | None = None,
        kernels: Kernels | None = None,
        prefix_cache: bool = True,
        name: str = "model",
    ) -> None:
        self.name = name
        self.block_pool = BlockPool(target.cache.num_blocks, prefix_cache=prefix_cache)
        self._target = target
        self._vocab = target.vocab if vocab is None else vocab
        self._max_context = max_context
        self._kernels = (
            kernels if self._vocab >= target.vocab else None
        )  # native sampling uses all of the target's logits
        self._states: dict[str, _DraftSequence] = {}

    # ---- the interface of a drafter ----------------------------------------------------------------------------------

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams) -> None:
        """Remember the prompt; it is computed when the first draft is requested."""
        self.end(seq_id)
        self._states[seq_id] = _DraftSequence(list(tokens), None if params.plain else History(tokens))

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        """Compare the tokens that became known with the guesses: right guesses keep their keys and values."""
        state = self._states[seq_id]
        for token in tokens:
            if state.num_confirmed < len(state.guesses):
                self._compare(state, token)
        state.tokens += tokens
        if state.history is not None:
            state.history.append(tokens)
        # the last token's logits are still needed
        state.num_computed_tokens = min(state.num_computed_tokens, len(state.tokens) - 1)
        if state.num_computed_tokens:
            self.block_pool.commit(seq_id, state.tokens, length=state.num_computed_tokens)
        if state.num_confirmed >= state.num_fed:
            self.block_pool.trim(seq_id, state.num_computed_tokens)

    def observe(self, output: TargetOutput) -> None:
        """Ignored: the target's output is not used."""

    def end(self, seq_id: str) -> None:
        if self._states.pop(seq_id, None) is not None:
            self.block_pool.release(seq_id)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One chain per request; it ends where the draft model's logits are not finite."""
        rounds = [started for request in requests if (started := self._start(request)) is not None]
        waiting = list(rounds)
        while waiting:
            waiting.sort(key=_DraftRound.num_pending)  # a prompt that takes several passes does not delay the others
            spans, served = self._pass(waiting)
            block_tables = {span.seq_id: self.block_pool.block_table(span.seq_id) for span in spans}
            self._draw(served, self._target.forward(pack(spans, {}, block_tables)))
            waiting = [r for r in waiting if not r.done]
        drafts = {r.request.seq_id: self._finish(r) for r in rounds}
        return [drafts.get(request.seq_id) or Draft(request.seq_id, drafter=self.name) for request in requests]

    # ---- one round --------------------------------------------------------------------------------------------------

    def _start(self, request: DraftRequest) -> _DraftRound | None:
        """Reserve blocks for everything that the request may write; None declines it."""
        state = self._states[request.seq_id]
        depth = request.depth
        if self._max_context is not None:
            depth = min(depth, self._max_context - len(state.tokens) + 1)  # the last guess is never fed
        if depth < 1:
            return None
        if not self.block_pool.block_table(request.seq_id):
            state.num_computed_tokens = self.block_pool.match_prefix(request.seq_id, state.tokens)
        state.num_computed_tokens = min(state.num_computed_tokens, len(state.tokens) - 1)
        if not self.block_pool.reserve(request.seq_id, len(state.tokens) + depth - 1):
            return None
        state.guesses, state.num_confirmed, state.num_fed = [], 0, 0
        return _DraftRound(request, state, depth)

    def _pass(self, waiting: Sequence[_DraftRound]) -> tuple[list[Span], list[_DraftRound]]:
        """Spans of one pass, and the rounds whose next guess comes from it, in the order of the rows of logits."""
        spans: list[Span] = []
        served: list[_DraftRound] = []
        room = self._target.max_rows
        for r in waiting[: self._target.max_sequences]:
            if room < 1:
                break
            spans.append(r.span(room))
            room -= len(spans[-1].tokens)
            if spans[-1].needs_logits:
                served.append(r)
        return spans, served

    def _draw(self, served: Sequence[_DraftRound], output: TargetOutput) -> None:
        native = [] if self._kernels is None else [row for row, r in enumerate(served) if _sampled_natively(r.request)]
        drawn = dict(zip(native, self._native(native, served, output), strict=True))
        normaliser = _log_sum_exp(output.logits[: len(served)])
        for row, r in enumerate(served):
            try:
                token = drawn[row] if row in drawn else self._token(r, row, output)
            except NumericsError:
                token = -1
            if token < 0:  # not finite: this chain ends here, the others go on
                r.depth = len(r.state.guesses)
            else:
                r.append(token, math.exp(min(0.0, float(output.logits[row, token] - normaliser[row]))))

    def _token(self, r: _DraftRound, row: int, output: TargetOutput) -> int:
        request = r.request
        if request.params.plain and request.params.greedy and self._vocab >= self._target.vocab:
            return int(output.greedy_tokens[row])
        logits: NDArray[np.float32] = output.logits[row][: self._vocab]
        if request.params.plain and not request.needs_draft_probs:
            return int(argmax_gumbel(logits, request.params.temperature, request.seed, _position(r), request.choice))
        history = r.state.history.extended(r.state.guesses) if r.state.history is not None else None
        distribution = process(logits, request.params, history)
        if not request.needs_draft_probs:
            return distribution.choose(request.seed, _position(r), request.choice)
        r.probs.append(distribution.probabilities(self._vocab))
        return distribution.choose(request.seed, _position(r), request.choice, private=len(r.state.guesses) + 1)

    def _native(self, rows: Sequence[int], served: Sequence[_DraftRound], output: TargetOutput) -> list[int]:
        if self._kernels is None or not rows:
            return []
        requests = [
            SampleRequest(row, r.request.params.temperature, r.request.seed, _position(r), r.request.choice)
            for row, r in ((row, served[row]) for row in rows)
        ]
        return sample_rows(self._kernels, output.logits, requests)

    def _finish(self, r: _DraftRound) -> Draft:
        guesses = r.state.guesses
        draft = Draft.chain(r.request.seq_id, guesses, drafter=self.name, scores=r.survival)
        if not r.probs:
            return draft
        return Draft(draft.seq_id, draft.tokens, draft.parents, draft.scores, draft.drafter, np.stack(r.probs))

    @staticmethod
    def _compare(state: _DraftSequence, token: int) -> None:
        if token != state.guesses[state.num_confirmed]:
            state.guesses, state.num_confirmed, state.num_fed = [], 0, 0
            return
        state.num_confirmed += 1
        if state.num_confirmed <= state.num_fed:
            state.num_computed_tokens += 1


def _position(r: _DraftRound) -> int:
    """Absolute position of the next guess."""
    return r.request.position + len(r.state.guesses)


def _log_sum_exp(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of each row [n, vocab]; NaN where a logit is not finite."""
    with np.errstate(all="ignore"):
        most: NDArray[np.float32] = logits.max(axis=1)
        sums: NDArray[np.float32] = most + np.log(np.exp(logits - most[:, None]).sum(axis=1))
    return sums


def _sampled_natively(request: DraftRequest) -> bool:
    return request.params.plain and not request.params.greedy and not request.needs_draft_probs
