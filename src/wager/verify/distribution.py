"""From a row of logits and a request's parameters to its processed distribution, and to tokens drawn from it.

Order of the processors, the one of vLLM and the OpenAI API: repetition penalty (prompt and output), frequency and
presence penalties (output), logit bias, grammar, temperature, top-k, top-p, min-p. Everything is float64 from float32
logits in one fixed order (value descending, id ascending), so that a row has one result wherever it is computed.
A drafter processes its own logits with the same function; that is what makes q comparable with p.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wager.elementary import exp, log
from wager.errors import GrammarError, NumericsError, UsageError
from wager.kernels import noise
from wager.kernels.sampling import RowSampler
from wager.types import AllowedTokens, GrammarState, SamplingParams, TokenLogprob

_NUCLEUS_GUESSES = (2.0**-6, 2.0**-10, 2.0**-14)
"""Shares of the mass outside the nucleus that single ids are compared with, to find it among few candidates."""

_DISTANCES = (5.0, 10.0)
"""From the largest entry: within them the largest ones are looked for before all of a row is partitioned."""


@dataclass(frozen=True, slots=True)
class ProcessedDistribution:
    """One processed row: `scores` (z / T, or z when greedy; float64 [m]) of the surviving `ids` (ascending; None: all).

    `private` in the methods below is the depth of a guess drawn from the drafter's private noise (rejection, block);
    0 is the shared field of `match`.
    """

    ids: NDArray[np.int64] | None
    scores: NDArray[np.float64]
    greedy: bool = False

    def _noisy(self, seed: int, position: int, choice: int, private: int) -> NDArray[np.float64]:
        if self.greedy or len(self.scores) == 1:
            return self.scores
        domain = noise.DRAFT if private else noise.FIELD
        field = noise.gumbel(
            seed, position, self.ids, choice=choice, vocab=len(self.scores), domain=domain, depth=private
        )
        field += self.scores
        return field

    def _id(self, index: int) -> int:
        return index if self.ids is None else int(self.ids[index])

    def choose(self, seed: int, position: int, choice: int = 0, *, private: int = 0) -> int:
        """The token at `position`: argmax(score + g), a draw from the distribution; ties go to the lowest id."""
        return self._id(int(self._noisy(seed, position, choice, private).argmax()))

    def top(self, count: int, seed: int, position: int, choice: int = 0, *, private: int = 0) -> list[int]:
        """The `count` best ids by score + g, best first: Gumbel top-b, a draw without replacement."""
        values = self._noisy(seed, position, choice, private)
        best = largest(values, max(1, count))
        return [self._id(int(i)) for i in best[np.argsort(-values[best], kind="stable")][:count]]

    def probabilities(self, vocab: int) -> NDArray[np.float64]:
        """Exact probabilities over the whole vocabulary, float64 [vocab]; a point mass when greedy."""
        probs = np.zeros(vocab)
        if self.greedy:
            probs[self._id(int(self.scores.argmax()))] = 1.0
            return probs
        weights = exp(self.scores - self.scores.max())
        probs[slice(len(weights)) if self.ids is None else self.ids] = weights / weights.sum()
        return probs


def process(
    logits: NDArray[np.float32], params: SamplingParams, history: History | None = None
) -> ProcessedDistribution:
    """The processed distribution of one row of logits, float32 [V].

    `history` is what penalties and grammar depend on; without these it is not read. Raises NumericsError if a logit is
    NaN or infinite, before the processors or after them: like `Tape.argmax` and `Kernels.sample`, it treats -inf as
    invalid, not as a ban (bans are finite: `logit_bias`); GrammarError as `History.allowed`.
    """
    z = logits.astype(np.float64)
    changed = changed_logits(logits, params, history)
    if changed is not None:
        z[changed[0]] = changed[1]
    if not params.greedy:
        z /= params.temperature
    _require_finite(z)  # the processors keep what is not finite, so one check at their end covers both
    ids = allowed_ids(len(z), params, history)
    if ids is not None:
        z = z[ids]
    if params.greedy:
        return ProcessedDistribution(ids, z, greedy=True)
    for kept in (_top_k, _top_p, _min_p):
        keep = kept(z, params)
        if keep is not None:
            ids, z = (keep if ids is None else ids[keep]), z[keep]
    return ProcessedDistribution(ids, z)


def choose(
    sampler: RowSampler,
    logits: NDArray[np.float32],
    params: SamplingParams,
    history: History | None,
    *,
    seed: int,
    position: int,
    choice: int,
) -> int:
    """The token at `position` from one row of logits, float32 [V], found natively where that is possible;
    `process(...).choose(...)` is its definition. Arguments and errors as for `process`."""
    token = None
    with suppress(GrammarError):  # the definition says whether that is the first error
        token = sampler.sample(
            logits,
            params,
            edits=changed_logits(logits, params, history),
            allowed=allowed_ids(len(logits), params, history),
            seed=seed,
            position=position,
            choice=choice,
        )
    return process(logits, params, history).choose(seed, position, choice) if token is None else token


def without_replacement(probs: NDArray[np.float64], tokens: Sequence[int]) -> NDArray[np.float64]:
    """The distributions siblings were drawn from when `tokens` come from `probs` [V] one by one, none twice: [n, V].

    Row j is `probs` without tokens[:j], renormalised: what `Draft.draft_probs` must hold for Gumbel top-b
    children (Kool et al. 2019, arXiv 1903.06059). Raises UsageError if no probability was left for a token.
    """
    rows = np.empty((len(tokens), len(probs)))
    left = probs.copy()
    for row, token in zip(rows, tokens, strict=True):
        total = left.sum()
        if not (total > 0 and left[token] > 0):
            raise UsageError(f"Token {token} cannot be drawn: no probability is left for it.")
        np.divide(left, total, out=row)
        left[token] = 0.0
    return rows


def token_logprob(logits: NDArray[np.float32], token: int, top: int = 0) -> TokenLogprob:
    """log p(token) under the unprocessed softmax of a row, float32 [V], with the `top` likeliest ids, best first.

    Raises NumericsError if a logit is NaN or infinite.
    """
    z = logits.astype(np.float64)
    _require_finite(z)
    z -= z.max()
    normaliser = np.log(np.exp(z).sum())
    ids = largest(z, min(top, len(z))) if top else np.zeros(0, np.int64)
    ids = ids[np.argsort(-z[ids], kind="stable")]
    alternatives = tuple((int(i), float(z[i] - normaliser)) for i in ids)
    return TokenLogprob(token, float(z[token] - normaliser), alternatives)


def allowed_ids(vocab: int, params: SamplingParams, history: History | None) -> NDArray[np.int64] | None:
    """The ids below `vocab` that the request's grammar and min_tokens allow, ascending; None for all. GrammarError if
    they allow none, and as `History.allowed`."""
    if history is not None and history.excluded:
        ids = np.setdiff1d(np.arange(vocab), history.excluded, assume_unique=True)
        if not len(ids):
            raise GrammarError("Every token ends the answer before min_tokens.", "Lower min_tokens.")
        return ids
    allowed = history.allowed() if history is not None and params.grammar is not None else None
    if allowed is None:
        return None
    ids = allowed.ids(vocab)
    if not len(ids):
        raise GrammarError("The grammar allows no token that the model has.", "Use the model's own tokenizer.")
    return ids


def changed_logits(
    logits: NDArray[np.float32], params: SamplingParams, history: History | None
) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
    """The ids [m], none twice, whose logits penalties and biases change, and their new values [m]; None if none are."""
    penalised = _penalised_logits(logits, params, history)
    if not params.logit_bias:
        return penalised
    ids, addends = params.biases.arrays
    if ids.max() >= len(logits):  # a draft model may have fewer rows than the target, whose ids they are
        there = ids < len(logits)
        ids, addends = ids[there], addends[there]
    if penalised is None:
        return ids, logits[ids].astype(np.float64) + addends
    either = np.union1d(ids, penalised[0])
    values = logits[either].astype(np.float64)
    values[np.searchsorted(either, penalised[0])] = penalised[1]
    values[np.searchsorted(either, ids)] += addends
    return either, values


def _penalised_logits(
    logits: NDArray[np.float32], params: SamplingParams, history: History | None
) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
    if history is None or not params.penalises:
        return None
    ids, counts = history.counts()
    values = logits[ids].astype(np.float64)
    if params.repetition_penalty != 1:
        values = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    values -= params.frequency_penalty * counts
    values -= params.presence_penalty * (counts > 0)
    return ids, values


def _require_finite(z: NDArray[np.float64]) -> None:
    if np.isfinite(z.min()) and np.isfinite(z.max()):  # NaN wins every comparison in numpy's min and max
        return
    nans, infinite = int(np.isnan(z).sum()), int(np.isinf(z).sum())
    cause = f"A row of logits is not finite: {nans} NaN and {infinite} infinite among {len(z)}."
    raise NumericsError(cause, "The weights are damaged, or the sampling parameters overflow.")


def largest(x: NDArray[np.floating], count: int) -> NDArray[np.int64]:
    """Indices, ascending, of the `count` largest entries of x; of equals the lowest index first."""
    if count >= len(x):
        return np.arange(len(x))
    best = x.max()
    for distance in _DISTANCES:
        near = np.flatnonzero(x >= best - distance)
        if len(near) >= count:
            return near[_cut(x[near], count, _threshold(x[near], count))]
    return _cut(x, count, _threshold(x, count))


def _threshold(x: NDArray[np.floating], count: int) -> np.floating:
    """The smallest of the `count` largest."""
    smallest: np.floating = np.partition(x, len(x) - count)[len(x) - count]
    return smallest


def _cut(x: NDArray[np.floating], count: int, threshold: np.floating) -> NDArray[np.int64]:
    """Indices of the `count` largest, given the smallest value among them."""
    keep = np.flatnonzero(x >= threshold)
    surplus = len(keep) - count
    if surplus > 0:
        ties = np.flatnonzero(x[keep] == threshold)
        keep = np.delete(keep, ties[len(ties) - surplus :])
    return keep


def _top_k(x: NDArray[np.float64], params: SamplingParams) -> NDArray[np.int64] | None:
    return largest(x, params.top_k) if 0 < params.top_k < len(x) else None


def _top_p(x: NDArray[np.float64], params: SamplingParams) -> NDArray[np.int64] | None:
    """The smallest leading set whose probability reaches top_p.

    Every id above a threshold is a leading set too: if that of one threshold is likely enough, it contains the nucleus
    and is the only set that is sorted.
    """
    if params.top_p >= 1 or len(x) == 1:
        return None
    best = x.max()
    weights = exp(x - best)
    total = weights.sum()
    nucleus = params.top_p * total
    candidates = x
    for share in _NUCLEUS_GUESSES:
        some = weights >= share * (1 - params.top_p) * total
        if weights[some].sum() >= nucleus:
            candidates = x[some]
            break
    ranked = -np.sort(-candidates)
    mass = exp(ranked - best).cumsum()
    count = min(int(np.searchsorted(mass, nucleus)) + 1, len(ranked))
    return _cut(x, count, ranked[count - 1])


def _min_p(x: NDArray[np.float64], params: SamplingParams) -> NDArray[np.int64] | None:
    """Ids at least min_p times as likely as the likeliest."""
    if params.min_p <= 0:
        return None
    return np.flatnonzero(x >= x.max() + log(params.min_p))


# ---- what a distribution depends on besides the logits: penalties count tokens, a grammar follows them ---------------


class _TokenCounts:
    """Distinct ids of a sequence, and how often each is in its output; grows by doubling."""

    __slots__ = ("counts", "ids", "index", "size")

    def __init__(self, prompt: Iterable[int]) -> None:
        unique = dict.fromkeys(prompt)
        self.index = {token: slot for slot, token in enumerate(unique)}
        self.size = len(unique)
        self.ids = np.zeros(self.size + 64, np.int64)
        self.ids[: self.size] = list(unique)
        self.counts = np.zeros(self.size + 64, np.int64)

    def add(self, token: int) -> None:
        slot = self.index.get(token)
        if slot is None:
            slot = self.index[token] = self.size
            if slot == len(self.ids):
                self.ids = np.concatenate((self.ids, np.zeros_like(self.ids)))
                self.counts = np.concatenate((self.counts, np.zeros_like(self.counts)))
            self.ids[slot] = token
            self.size += 1
        self.counts[slot] += 1


@dataclass(slots=True)
class _Ends:
    """Tokens that end the output, and how many others are missing before one may."""

    missing: int
    stop_ids: tuple[int, ...]


class History:
    """The tokens that a position's penalties depend on, and its grammar.

    The engine keeps one per sequence and appends committed tokens; `extended` gives the history of a guess further down
    a path. A view shares its base and is valid until the base is appended to. `grammar` is the state of the output's
    grammar before `output`.
    """

    __slots__ = ("_counts_by_id", "_ends", "_path", "grammar")

    def __init__(
        self,
        prompt: Sequence[int] = (),
        output: Sequence[int] = (),
        *,
        grammar: GrammarState | None = None,
        ends: _Ends | None = None,
    ) -> None:
        self._ends = ends
        self._counts_by_id = _TokenCounts(prompt)
        self._path: tuple[int, ...] = ()
        self.grammar = grammar
        self.append(output)

    @classmethod
    def of(cls, prompt: Sequence[int], params: SamplingParams, *, stop_ids: Sequence[int] = ()) -> History | None:
        """The history of a request that begins; None if its distributions need none. `stop_ids` end its output."""
        if not params.needs_history:
            return None
        compiled = params.grammar and params.grammar.compiled
        ends = _Ends(params.min_tokens, tuple(sorted(set(stop_ids)))) if params.min_tokens else None
        return cls(prompt, grammar=compiled.start() if compiled else None, ends=ends)

    def append(self, tokens: Iterable[int]) -> None:
        """Tokens that are now part of the output."""
        if self._path:
            raise UsageError("A view of a history cannot be appended to.", "Append to the history it was taken from.")
        added = list(tokens)
        for token in added:
            self._counts_by_id.add(token)
        if self._ends is not None:
            self._ends.missing -= len(added)
        if self.grammar is not None and added:
            self.grammar.append(added)

    def copy(self) -> History:
        """One that is appended to by itself. A view cannot be copied."""
        if self._path:
            raise UsageError("A view of a history cannot be copied.", "Copy the history it was taken from.")
        made = object.__new__(History)
        made._counts_by_id, made._path = deepcopy(self._counts_by_id), ()
        made.grammar = self.grammar and self.grammar.copy()
        made._ends = copy(self._ends)
        return made

    def extended(self, path: Sequence[int]) -> History:
        """The history after the further tokens of `path`; copies nothing but the path."""
        view = object.__new__(History)
        view._counts_by_id = self._counts_by_id
        view._path = self._path + tuple(path)
        view.grammar = self.grammar
        view._ends = self._ends
        return view

    @property
    def excluded(self) -> tuple[int, ...]:
        """The ids that would end the output too early."""
        ends = self._ends
        return ends.stop_ids if ends is not None and ends.missing > len(self._path) else ()

    def allowed(self) -> AllowedTokens | None:
        """The tokens that the grammar allows next; None for all of them: without a grammar, and behind a guess that is
        not allowed itself, since such a guess is never accepted. GrammarError if the grammar cannot go on."""
        return None if self.grammar is None else self.grammar.allowed(self._path)

    def counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Distinct ids of prompt and output, and how often each is in the output; both int64 [m], not to be written."""
        counts_by_id = self._counts_by_id
        ids, counts = counts_by_id.ids[: counts_by_id.size], counts_by_id.counts[: counts_by_id.size]
        if not self._path:
            return ids, counts
        counts = counts.copy()
        fresh: dict[int, int] = {}
        for token in self._path:
            slot = counts_by_id.index.get(token)
            if slot is None:
                fresh[token] = fresh.get(token, 0) + 1
            else:
                counts[slot] += 1
        return (
            np.concatenate((ids, np.array(list(fresh), np.int64))),
            np.concatenate((counts, np.array(list(fresh.values()), np.int64))),
        )
