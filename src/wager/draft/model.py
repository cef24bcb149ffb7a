"""A smaller model of the same vocabulary guesses one token after the other.

It owns a cache and a page table like the target's, and is itself a `kernels.base.Target`. A round feeds every token it
has not seen yet and draws the first guess from the same pass, then feeds each guess to draw the next: k guesses, k
passes, batched over sequences. Keys and values of guesses are provisional: those that turn out true are kept, the
others are overwritten. A sequence that was not asked for a while simply owes more tokens.

Guesses are drawn with the target's own noise from q shaped by the request's own processors, so an identical model is
always right (Daliri et al. 2024, arXiv 2408.07978). What it is sure of is what q gives a guess before any shaping: the
survival of a guess is the product along its path, and a chain ends where that falls below what the ask wants, after
the guess that was in doubt and not before it. Knows no target, no acceptance rule and no policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from wager.draft.vocabulary import Vocabulary, check_same_vocabulary
from wager.errors import NumericsError
from wager.kernels.base import Kernels, Target, TargetOutput
from wager.kernels.noise import argmax_gumbel
from wager.kv.blocks import BlockPool
from wager.types import Draft, DraftRequest, SamplingParams, Span
from wager.verify.distribution import History, shape
from wager.verify.pack import pack

__all__ = ["DraftModel", "Vocabulary", "check_same_vocabulary"]


@dataclass(slots=True)
class _State:
    """One sequence as the drafter knows it. `cached` leading tokens have true keys and values; of the present `guesses`
    the first `checked` turned out right and the first `fed` have (provisional) keys and values."""

    tokens: list[int]
    history: History | None
    cached: int = 0
    guesses: list[int] = field(default_factory=list)
    checked: int = 0
    fed: int = 0


class _Round:
    """One ask being answered."""

    def __init__(self, ask: DraftRequest, state: _State, depth: int) -> None:
        self.ask = ask
        self.state = state
        self.depth = depth
        self.laws: list[NDArray[np.float64]] = []
        self.survival: list[float] = []

    @property
    def done(self) -> bool:
        doubtful = bool(self.survival) and self.survival[-1] < self.ask.min_survival
        return doubtful or len(self.state.guesses) >= self.depth

    def take(self, token: int, confidence: float) -> None:
        """One more guess, right with `confidence` if those above it are."""
        self.state.guesses.append(token)
        self.survival.append((self.survival[-1] if self.survival else 1.0) * confidence)

    def owed(self) -> int:
        """Known tokens that were not computed yet."""
        return len(self.state.tokens) - self.state.cached

    def span(self, room: int) -> Span:
        """The next rows: known tokens that are owed, at most `room` of them, or else the last guess."""
        state, owed = self.state, self.owed()
        if not owed:
            state.fed += 1
            return Span(self.ask.seq_id, len(state.tokens) + state.fed - 1, (state.guesses[-1],), True)
        rows = min(owed, room)
        start, state.cached = state.cached, state.cached + rows
        return Span(self.ask.seq_id, start, tuple(state.tokens[start : start + rows]), rows == owed)


class DraftModel:
    """Drafts with `target`, a model that is not the one to be verified.

    `vocab` is the verified model's number of logits; ids beyond it are never guessed, and law rows have that width
    (None: the draft model's own). `max_context` bounds positions (None: the cache alone does). `kernels` sample
    natively where given. A sequence is declined when the cache has no pages for it or the context is too long.
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
        self._kernels = kernels if self._vocab >= target.vocab else None  # native draws see every logit
        self._states: dict[str, _State] = {}

    # ---- the five verbs ---------------------------------------------------------------------------------------------

    def begin(self, sequence: str, tokens: Sequence[int], params: SamplingParams) -> None:
        """Remember the prompt; it is computed when the first guess is asked for."""
        self.end(sequence)
        self._states[sequence] = _State(list(tokens), None if params.plain else History(tokens))

    def accept(self, sequence: str, tokens: Sequence[int]) -> None:
        """Compare what became known with what was guessed: right guesses keep their keys and values."""
        state = self._states[sequence]
        for token in tokens:
            if state.checked < len(state.guesses):
                self._compare(state, token)
        state.tokens += tokens
        if state.history is not None:
            state.history.append(tokens)
        state.cached = min(state.cached, len(state.tokens) - 1)  # the last token's logits are still wanted
        if state.cached:
            self.block_pool.commit(sequence, state.tokens, length=state.cached)
        if state.checked >= state.fed:
            self.block_pool.trim(sequence, state.cached)

    def observe(self, output: TargetOutput) -> None:
        """Nothing: it has eyes of its own."""

    def end(self, sequence: str) -> None:
        if self._states.pop(sequence, None) is not None:
            self.block_pool.release(sequence)

    def propose(self, asks: Sequence[DraftRequest]) -> list[Draft]:
        """One chain per ask; it ends where the draft model's logits are not numbers."""
        rounds = [started for ask in asks if (started := self._start(ask)) is not None]
        waiting = list(rounds)
        while waiting:
            waiting.sort(key=_Round.owed)  # a prompt that takes several passes holds nobody else up
            spans, served = self._pass(waiting)
            tables = {span.seq_id: self.block_pool.block_table(span.seq_id) for span in spans}
            self._draw(served, self._target.forward(pack(spans, {}, tables)))
            waiting = [r for r in waiting if not r.done]
        drafts = {r.ask.seq_id: self._finish(r) for r in rounds}
        return [drafts.get(ask.seq_id) or Draft(ask.seq_id, drafter=self.name) for ask in asks]

    # ---- one round --------------------------------------------------------------------------------------------------

    def _start(self, ask: DraftRequest) -> _Round | None:
        """Reserve pages for everything the ask may write; None declines."""
        state = self._states[ask.seq_id]
        depth = ask.depth
        if self._max_context is not None:
            depth = min(depth, self._max_context - len(state.tokens) + 1)  # the last guess is never fed
        if depth < 1:
            return None
        if not self.block_pool.block_table(ask.seq_id):
            state.cached = self.block_pool.match_prefix(ask.seq_id, state.tokens)
        state.cached = min(state.cached, len(state.tokens) - 1)
        if not self.block_pool.reserve(ask.seq_id, len(state.tokens) + depth - 1):
            return None
        state.guesses, state.checked, state.fed = [], 0, 0
        return _Round(ask, state, depth)

    def _pass(self, waiting: Sequence[_Round]) -> tuple[list[Span], list[_Round]]:
        """Spans of one pass, and the rounds whose next guess comes out of it, in the order of the heads."""
        spans: list[Span] = []
        served: list[_Round] = []
        room = self._target.max_rows
        for r in waiting[: self._target.max_sequences]:
            if room < 1:
                break
            spans.append(r.span(room))
            room -= len(spans[-1].tokens)
            if spans[-1].needs_logits:
                served.append(r)
        return spans, served

    def _draw(self, served: Sequence[_Round], output: TargetOutput) -> None:
        native = [] if self._kernels is None else [row for row, r in enumerate(served) if _sampled_plainly(r.ask)]
        drawn = dict(zip(native, self._native(native, served, output), strict=True))
        whole = torch.logsumexp(output.logits[: len(served)], dim=1)
        for row, r in enumerate(served):
            try:
                token = drawn[row] if row in drawn else self._token(r, row, output)
            except NumericsError:
                token = -1
            if token < 0:  # not a number: this ask has its last guess, and no other ask suffers
                r.depth = len(r.state.guesses)
            else:
                r.take(token, math.exp(min(0.0, float(output.logits[row, token] - whole[row]))))

    def _token(self, r: _Round, row: int, output: TargetOutput) -> int:
        ask = r.ask
        if ask.params.plain and ask.params.greedy and self._vocab >= self._target.vocab:
            return int(output.greedy_tokens[row])
        logits: NDArray[np.float32] = output.logits[row].numpy()[: self._vocab]
        if ask.params.plain and not ask.needs_draft_probs:
            return int(argmax_gumbel(logits, ask.params.temperature, ask.seed, _position(r), ask.choice))
        history = r.state.history.extended(r.state.guesses) if r.state.history is not None else None
        shaped = shape(logits, ask.params, history)
        if not ask.needs_draft_probs:
            return shaped.choose(ask.seed, _position(r), ask.choice)
        r.laws.append(shaped.probabilities(self._vocab))
        return shaped.choose(ask.seed, _position(r), ask.choice, private=len(r.state.guesses) + 1)

    def _native(self, rows: Sequence[int], served: Sequence[_Round], output: TargetOutput) -> Iterable[int]:
        if self._kernels is None or not rows:
            return ()
        chosen = [served[row] for row in rows]
        tokens = self._kernels.sample(
            output.logits,
            torch.tensor(rows, dtype=torch.int32),
            torch.tensor([r.ask.params.temperature for r in chosen], dtype=torch.float64),
            torch.from_numpy(np.array([r.ask.seed for r in chosen], dtype=np.uint64).view(np.int64)),
            torch.tensor([_position(r) for r in chosen], dtype=torch.int32),
            torch.tensor([r.ask.choice for r in chosen], dtype=torch.int32),
        )
        return [int(token) for token in tokens]

    def _finish(self, r: _Round) -> Draft:
        guesses = r.state.guesses
        draft = Draft.chain(r.ask.seq_id, guesses, drafter=self.name, scores=r.survival)
        if not r.laws:
            return draft
        return Draft(draft.seq_id, draft.tokens, draft.parents, draft.scores, draft.drafter, np.stack(r.laws))

    @staticmethod
    def _compare(state: _State, token: int) -> None:
        if token != state.guesses[state.checked]:
            state.guesses, state.checked, state.fed = [], 0, 0
            return
        state.checked += 1
        if state.checked <= state.fed:
            state.cached += 1


def _position(r: _Round) -> int:
    """Absolute position of the next guess."""
    return r.ask.position + len(r.state.guesses)


def _sampled_plainly(ask: DraftRequest) -> bool:
    return ask.params.plain and not ask.params.greedy and not ask.needs_draft_probs
