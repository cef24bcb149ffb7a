"""From a draft model's rows of logits to guesses: one token a row, several candidates, or siblings with their q.

Under `match` guesses are drawn with the target's own noise from q, processed by the request's own parameters, so that
an identical model is always right (Daliri et al. 2024, arXiv 2408.07978). Rules that keep the distribution get guesses
drawn with private noise, and the q each of them was drawn from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wager.errors import GrammarError, NumericsError
from wager.kernels.base import TargetOutput
from wager.kernels.cpu import Kernels, SampleRequest
from wager.kernels.noise import argmax_gumbel, gumbel
from wager.kernels.sampling import RowSampler
from wager.types import Draft, DraftRequest
from wager.verify.distribution import History, ProcessedDistribution, choose, largest, process, without_replacement

_SEARCHED = 256
"""Likeliest ids of a row among which candidates are searched: noise is computed for these alone."""


def draws(request: DraftRequest) -> bool:
    """Whether guesses are drawn from a q that the rule needs."""
    return request.needs_draft_probs and not request.params.greedy


@dataclass(frozen=True, slots=True)
class GuessedRow:
    """A row of logits from which the guess after `path` is taken: the guesses after the last known token, none for the
    first. `history` is that of the known tokens (None: the request has no penalties). `branch` numbers the rows of
    one depth of a tree, so that their private draws are independent."""

    row: int
    request: DraftRequest
    path: Sequence[int] = ()
    history: History | None = None
    branch: int = 0

    @property
    def position(self) -> int:
        """Absolute position of the guess."""
        return self.request.position + len(self.path)

    @property
    def private(self) -> int:
        """What the guess's private noise is keyed by: it differs in every round that guesses a position."""
        return len(self.path) + 1 + (self.branch << 8)


class Guess(NamedTuple):
    """A token (-1: the row's logits are not finite), its probability under q before processing and, where it was
    requested, the q that it was drawn from, float64 [vocab]."""

    token: int
    probability: float = 0.0
    probs: NDArray[np.float64] | None = None


def child_of(parents: Sequence[int], tokens: Sequence[int], node: int, token: int) -> int | None:
    """The child of a tree's node (-1: the root) with that token."""
    for child in range(node + 1, len(tokens)):
        if parents[child] == node and tokens[child] == token:
            return child
    return None


class GuessedChain:
    """At most `depth` guesses of a request, drawn one after the other, and their survival."""

    def __init__(self, request: DraftRequest, history: History | None, depth: int) -> None:
        self.request, self.history, self.depth = request, history, depth
        self.tokens: list[int] = []
        self.survival: list[float] = []
        self.probs: list[NDArray[np.float64]] = []

    @property
    def done(self) -> bool:
        unlikely = bool(self.survival) and self.survival[-1] < self.request.min_survival
        return unlikely or len(self.tokens) >= self.depth

    def row(self, index: int) -> GuessedRow:
        """Row `index` of logits as that of the next guess."""
        return GuessedRow(index, self.request, tuple(self.tokens), self.history)

    def add(self, guess: Guess, *, rate: float | None = None) -> None:
        """The next guess, which is accepted with probability `rate` if those before it are (None: its own). Without a
        token (logits that are not finite) the chain ends."""
        if guess.token < 0:
            self.depth = len(self.tokens)
            return
        self.tokens.append(guess.token)
        before = self.survival[-1] if self.survival else 1.0
        self.survival.append(before * (guess.probability if rate is None else rate))
        if guess.probs is not None:
            self.probs.append(guess.probs)

    def draft(self, drafter: str) -> Draft:
        probs = np.stack(self.probs) if self.probs else None
        return Draft.chain(self.request.seq_id, self.tokens, drafter=drafter, scores=self.survival, draft_probs=probs)


class Candidate(NamedTuple):
    """A token that may follow a node, and the probability that it is right if the node is."""

    token: int
    probability: float


class GuessSampler:
    """Guesses of a model with `width` logits, for a verified model of `vocab`: ids beyond either are never guessed.

    `kernels` sample natively, if they are given and the model has no more ids than the verified one.
    """

    def __init__(self, width: int, *, vocab: int, kernels: Kernels | None = None) -> None:
        self.vocab = vocab
        self._whole = vocab >= width
        self._exponentials = np.empty(vocab, np.float32)  # kept: a row's worth of fresh memory takes longer
        self._kernels = kernels if self._whole else None
        self._sampler = RowSampler(kernels or Kernels())

    def row(self, output: TargetOutput, index: int) -> NDArray[np.float32]:
        """The logits of a row by the verified model's ids, float32 [ids]."""
        logits: NDArray[np.float32] = output.logits[index][: self.vocab]
        return logits

    def known_ids(self, tokens: Sequence[int]) -> list[int]:
        """Known tokens of the verified model in the draft model's ids."""
        return list(tokens)

    def verified_ids(self, tokens: Sequence[int]) -> Sequence[int]:
        """The verified model's ids of the draft model's; the others below return the draft model's."""
        return tokens

    def own_id(self, token: int) -> int:
        """The draft model's id of one of the verified model's that it guesses; -1 if it has none."""
        return token

    def guesses(self, output: TargetOutput, rows: Sequence[GuessedRow]) -> list[Guess]:
        """One token for each row."""
        drawn = self._drawn_natively(output, rows)
        return [self._guess(output, each, drawn.get(id(each))) for each in rows]

    def alternatives(self, output: TargetOutput, row: GuessedRow, token: int, count: int) -> list[int]:
        """At most `count` tokens that come next after the guess `token`, likeliest first, in the draft model's ids."""
        if not (self._whole and row.request.params.plain and row.request.params.greedy):
            ranked = self.candidates(output, row, count + 1)
            return [each.token for each in ranked if each.token != token][:count]
        logits, found, kept = output.logits[row.row], [token], list[np.float32]()
        for _ in range(min(count, len(logits) - 1)):  # one at a time, in place: a tenth of the time of candidates
            kept.append(logits[found[-1]])
            logits[found[-1]] = -np.inf
            found.append(int(logits.argmax()))
        logits[found[:-1]] = kept
        return found[1:]

    def candidates(self, output: TargetOutput, row: GuessedRow, count: int) -> list[Candidate]:
        """The `count` likeliest tokens under the row's noise, best first; none if logits are not finite.

        The probability of each is a share of exp(T (log q + g)), so that of q itself where the request is greedy:
        the nearer the best ones are, the likelier the target, whose logits differ a little, prefers another.
        """
        if row.request.params.plain:
            return self._plain_candidates(self.row(output, row.row), row, count)
        try:
            distribution = self._processed(output, row)
        except (NumericsError, GrammarError):
            return []
        scores = distribution.scores
        best = largest(scores, _SEARCHED)
        values = scores[best]
        if not distribution.greedy:
            ids = best if distribution.ids is None else distribution.ids[best]
            request = row.request
            noise = gumbel(request.seed, row.position, ids, choice=request.choice)
            values = (values + noise) * request.params.temperature
        order = np.argsort(-values, kind="stable")[:count]
        top = values[order[0]]
        # what lies below the searched ids counts where there is no noise
        everything = scores if distribution.greedy else values
        total = float(np.exp(everything - top).sum())
        shares = np.exp(values[order] - top) / total
        return self._owned(best[order] if distribution.ids is None else distribution.ids[best[order]], shares)

    def _plain_candidates(self, logits: NDArray[np.float32], row: GuessedRow, count: int) -> list[Candidate]:
        """Candidates of a request whose distribution is a softmax of the logits: few passes over them."""
        params, top = row.request.params, logits.max()
        if not (math.isfinite(top) and math.isfinite(logits.min())):
            return []
        best = largest(logits, count if params.greedy else _SEARCHED)
        values = logits[best].astype(np.float64)
        if params.greedy:
            total = self._sum_exp(logits, top)
        else:
            noise = gumbel(row.request.seed, row.position, best, choice=row.request.choice)
            values += params.temperature * noise
            top = values.max()
            total = float(np.exp(values - top).sum())
        order = np.argsort(-values, kind="stable")[:count]
        return self._owned(best[order], np.exp(values[order] - top) / total)

    def _sum_exp(self, logits: NDArray[np.float32], top: np.float32) -> float:
        """The sum of exp(logits - top)."""
        found = np.subtract(logits, top, out=self._exponentials[: len(logits)])
        return float(np.exp(found, out=found).sum(dtype=np.float64))

    def _owned(self, tokens: NDArray[np.int64], shares: NDArray[np.float64]) -> list[Candidate]:
        owned = [(self.own_id(int(token)), float(share)) for token, share in zip(tokens, shares, strict=True)]
        return [Candidate(token, share) for token, share in owned if token >= 0]

    def siblings(
        self, output: TargetOutput, row: GuessedRow, count: int
    ) -> tuple[list[Candidate], NDArray[np.float64]]:
        """At most `count` tokens drawn from q without replacement, in the order of the draw, with private noise, and
        the distribution that each was drawn from, float64 [tokens, vocab]."""
        try:
            distribution = self._processed(output, row)
        except (NumericsError, GrammarError):
            return [], np.zeros((0, self.vocab))
        q, request = distribution.probabilities(self.vocab), row.request
        ranked = distribution.top(count, request.seed, row.position, request.choice, private=row.private)
        tokens = [token for token in ranked if q[token] > 0]
        return [Candidate(self.own_id(token), float(q[token])) for token in tokens], without_replacement(q, tokens)

    def _processed(self, output: TargetOutput, row: GuessedRow) -> ProcessedDistribution:
        return process(self.row(output, row.row), row.request.params, self._history(row))

    def _history(self, row: GuessedRow) -> History | None:
        return None if row.history is None else row.history.extended(self.verified_ids(row.path))

    def _allows(self, row: GuessedRow, token: int) -> bool:
        """Whether the request's grammar allows the best token of all: then it is also the best of those allowed."""
        if row.request.params.grammar is None or token < 0:
            return True
        history = self._history(row)
        allowed = history.allowed() if history else None
        return allowed is None or token in allowed

    def _guess(self, output: TargetOutput, row: GuessedRow, drawn: int | None) -> Guess:
        logits = self.row(output, row.row)
        try:
            token, probs = (drawn, None) if drawn is not None else self._drawn(output, row, logits)
        except (NumericsError, GrammarError):
            return Guess(-1)
        if token < 0 or self.own_id(token) < 0:
            return Guess(-1)
        return Guess(self.own_id(token), self._probability(logits, token), probs)

    def _probability(self, logits: NDArray[np.float32], token: int) -> float:
        """The probability of a token under the softmax of the logits."""
        top = logits.max()
        with np.errstate(all="ignore"):
            return min(1.0, math.exp(float(logits[token]) - float(top)) / self._sum_exp(logits, top))

    def _drawn(
        self, output: TargetOutput, row: GuessedRow, logits: NDArray[np.float32]
    ) -> tuple[int, NDArray[np.float64] | None]:
        request = row.request
        params = request.params
        if params.temperature_only and (not request.needs_draft_probs or (params.greedy and self._whole)):
            if params.greedy and self._whole:
                token = int(output.greedy_tokens[row.row])
            else:
                token = int(argmax_gumbel(logits, params.temperature, request.seed, row.position, request.choice))
            if self._allows(row, token):
                return token, None
        if not request.needs_draft_probs:
            place = {"seed": request.seed, "position": row.position, "choice": request.choice}
            return choose(self._sampler, logits, params, self._history(row), **place), None
        distribution = self._processed(output, row)
        token = distribution.choose(request.seed, row.position, request.choice, private=row.private)
        return token, distribution.probabilities(self.vocab)

    def _drawn_natively(self, output: TargetOutput, rows: Sequence[GuessedRow]) -> dict[int, int]:
        """The tokens of those rows that it is possible for, by the row's identity."""
        if self._kernels is None:
            return {}
        asked = {
            id(each): SampleRequest(each.row, request.params.temperature, request.seed, each.position, request.choice)
            for each in rows
            if (request := each.request).params.plain and not request.params.greedy and not request.needs_draft_probs
        }
        return dict(zip(asked, self._kernels.sample(output.logits, list(asked.values())), strict=True)) if asked else {}
