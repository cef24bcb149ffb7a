"""One ragged pass of the target, and the acceptance rule applied to every sequence's rows.

Under `match` a row's token is computed only when the accepted path reaches it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from wager.economics.policy.base import draft_selector
from wager.engine.sequence import EngineSequence
from wager.errors import GrammarError, NumericsError, UsageError
from wager.kernels._native import BatchPacker, BlockPool
from wager.kernels.base import TappedTarget, Target, TargetOutput
from wager.kernels.cpu import Kernels, SampleRequest
from wager.kernels.sampling import RowSampler, token_matcher
from wager.types import Draft, Outcome, PackedBatch, Span, TokenLogprob, Verdict, VerifyRule
from wager.verify import accept
from wager.verify.distribution import History, ProcessedDistribution, choose, process, token_logprob
from wager.verify.pack import pack

NOT_FINITE = "The model produced a logit that is not finite at position {}."


class InvalidRow(Exception):
    """A row whose logits are not finite, or of which the grammar allows no token. What comes before it on the path is
    valid."""

    def __init__(self, row: int, error: NumericsError | GrammarError) -> None:
        super().__init__(str(error))
        self.row = row
        self.error = error


@dataclass(frozen=True)
class TargetTokens(Sequence[int]):
    """The target's token after each row of one span, computed on demand: index 0 is the root (the last known
    token), 1 + i follows node i of the draft. `first` is the span's first row of logits."""

    sequence: EngineSequence
    draft: Draft
    output: TargetOutput
    first: int
    kernels: Kernels
    sampler: RowSampler

    def __len__(self) -> int:
        return 1 + len(self.draft)

    def __getitem__(self, row: int) -> int:  # type: ignore[override]
        try:
            return self._token(row)
        except (NumericsError, GrammarError) as error:
            raise InvalidRow(row, error) from error

    def _token(self, row: int) -> int:
        s, params, position = self.sequence, self.sequence.params, self.position(row)
        if params.temperature_only:
            if params.greedy:
                token = int(self.output.greedy_tokens[self.first + row])
            else:
                request = SampleRequest(self.first + row, params.temperature, s.seed, position, s.choice)
                [token] = self.kernels.sample(self.output.logits, [request])
            if token < 0:
                raise NumericsError(NOT_FINITE.format(position))
            history = self.history(row)  # without penalties: a grammar's
            allowed = None if history is None else history.allowed()
            if allowed is None or token in allowed:  # the best token of all is also the best of those allowed
                return token
        return choose(
            self.sampler,
            self.logits(row),
            params,
            self.history(row),
            seed=s.seed,
            position=position,
            choice=s.choice,
        )

    def position(self, row: int) -> int:
        """Absolute position of the token that follows the row."""
        depth = 0 if row == 0 else self.draft.depths[row - 1]
        return self.sequence.num_tokens + depth

    def logits(self, row: int) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self.output.logits[self.first + row]
        return logits

    def history(self, row: int) -> History | None:
        """None if the request's distributions depend on none."""
        history = self.sequence.history
        if history is None or row == 0:
            return history
        return history.extended([self.draft.tokens[node] for node in self.draft.path(row - 1)])

    def distribution(self, row: int) -> ProcessedDistribution:
        """The processed distribution after a row; raises InvalidRow."""
        try:
            return process(self.logits(row), self.sequence.params, self.history(row))
        except (NumericsError, GrammarError) as error:
            raise InvalidRow(row, error) from error


@dataclass(frozen=True)
class TargetProbs(Sequence[NDArray[np.float64]]):
    """The target's processed distribution p after each row, float64 [vocab], computed on demand."""

    rows: TargetTokens
    vocab: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> NDArray[np.float64]:  # type: ignore[override]
        return self.rows.distribution(row).probabilities(self.vocab)


class Runner:
    """Runs passes of a target and applies `rule` to them. `kernels` sample (None: on one thread). `buffers`
    are those that the target's passes read, if a batch can be packed there."""

    def __init__(
        self,
        target: Target,
        *,
        rule: VerifyRule,
        kernels: Kernels | None = None,
        buffers: BatchPacker | None = None,
    ) -> None:
        self.target = target
        self.rule = rule
        self.buffers = buffers
        self._kernels = kernels or Kernels(threads=1)
        self._matcher = token_matcher(self._kernels, follows=rule == "match")
        self._sampler = RowSampler(self._kernels)

    def pack_and_forward(self, spans: Sequence[Span], drafts: Mapping[str, Draft], pool: BlockPool) -> TargetOutput:
        """One pass over the rows of spans and drafts; see verify.pack.pack."""
        if self.buffers is None:
            return self.forward(pack(spans, drafts, pool))
        return self.target.forward(self.buffers.pack(spans, drafts, pool))  # which hold no more than it takes

    def forward(self, batch: PackedBatch) -> TargetOutput:
        """One pass over all rows of the step. UsageError if they are more than the target takes."""
        if batch.rows > self.target.max_rows:
            raise UsageError(
                f"A step has {batch.rows} rows; the target takes {self.target.max_rows}.",
                "A policy may admit at most the rows of its budget.",
            )
        return self.target.forward(batch)

    def tap(self, layers: Collection[int]) -> None:
        """From now on passes give the residual stream after these layers, and after no others; a target without layers
        is left as it is."""
        if isinstance(self.target, TappedTarget):
            self.target.tap(layers)

    def accept(
        self,
        spans: Sequence[Span],
        drafts: Mapping[str, Draft],
        output: TargetOutput,
        sequences: Mapping[str, EngineSequence],
    ) -> dict[str, Outcome]:
        """The outcome of every span that needs logits, by sequence. Under `match` most are found in
        csrc/match_bindings.cpp, all at once; what is left to `_outcome` are other rules, logits that more than
        temperature and filters change, log probabilities, and rows that are not finite."""
        outcomes, left = self._matcher.match(spans, drafts, sequences, output.greedy_tokens, output.logits)
        for seq_id, first in left:
            draft = drafts.get(seq_id) or Draft(seq_id)
            rows = TargetTokens(sequences[seq_id], draft, output, first, self._kernels, self._sampler)
            outcomes[seq_id] = self._outcome(rows)
        return outcomes

    def _outcome(self, rows: TargetTokens) -> Outcome:
        draft, error, status = rows.draft, "", 0
        try:
            verdict = _VERIFIERS[self.rule](rows, self.target.vocab)
        except InvalidRow as invalid:  # the accepted path led to the row, so its guesses are the target's own tokens
            path = draft.path(invalid.row - 1)
            verdict = Verdict(draft.seq_id, path, tuple(draft.tokens[node] for node in path))
            error, status = str(invalid.error), invalid.error.status
        drafted_by = (*map(draft.drafter_of, verdict.accepted), "")[: len(verdict.tokens)]
        return Outcome(verdict, len(draft), drafted_by, _logprobs(rows, verdict), error, status)


def _reading_all(rule: Callable[..., Verdict], rows: TargetTokens, vocab: int) -> Verdict:
    """By a rule that reads all rows before it decides: a guess whose row is invalid is left out, with all that follows
    it."""
    draft, kept = rows.draft, [-1]
    for node, parent in enumerate(draft.parents):
        if parent in kept:
            try:
                rows.distribution(1 + node)
            except InvalidRow:
                continue
            kept.append(node)
    probs, part = TargetProbs(rows, vocab), draft_selector.keep(draft, kept[1:])
    valid = probs if part is draft else [probs[1 + node] for node in kept]
    verdict = rule(part, valid, coins=_coins(rows))
    return verdict._replace(accepted=tuple(kept[1 + node] for node in verdict.accepted))


_VERIFIERS: Mapping[VerifyRule, Callable[[TargetTokens, int], Verdict]] = {
    "match": lambda rows, _: accept.match(rows.draft, rows),
    "rejection": lambda rows, vocab: accept.rejection(rows.draft, TargetProbs(rows, vocab), coins=_coins(rows)),
    "block": partial(_reading_all, accept.block),
    "traversal": partial(_reading_all, accept.traversal),
}


def _coins(rows: TargetTokens) -> accept.NoiseCoins:
    s = rows.sequence
    return accept.NoiseCoins(s.seed, s.num_tokens, s.choice)


def _logprobs(rows: TargetTokens, verdict: Verdict) -> tuple[TokenLogprob, ...]:
    top = rows.sequence.params.logprobs
    if top is None:
        return ()
    return tuple(
        token_logprob(rows.output.model_logits(rows.first + row), token, top)
        for row, token in zip(verdict.logits_rows, verdict.tokens, strict=False)  # a failed row emits no token
    )
