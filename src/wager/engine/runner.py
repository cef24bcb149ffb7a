"""From spans and drafts to rulings: pack, one ragged pass of the target, and the acceptance rule.

Knows no queue and no pages beyond the integers it is handed. Under `match` a row's token is computed only when the
accepted path reaches it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from wager.engine.sequence import Ruling
from wager.engine.sequence import Sequence as Running
from wager.errors import NumericsError
from wager.kernels.base import Kernels, Target, TargetOutput
from wager.kernels.noise import argmax_gumbel
from wager.types import Draft, Span, TokenLogprob, Verdict, VerifyRule
from wager.verify import accept
from wager.verify.distribution import History, Shaped, shape, token_logprob
from wager.verify.pack import pack

NO_DRAFT = Draft("")

NOT_A_NUMBER = "The model produced a logit that is not a number at position {}."


class RowFailed(Exception):
    """A row whose numbers are not numbers: everything before it on the path still holds."""

    def __init__(self, row: int, error: NumericsError) -> None:
        super().__init__(str(error))
        self.row = row
        self.error = error


@dataclass(frozen=True)
class _TargetTokens(Sequence[int]):
    """The target's token after each row of one span, computed when asked for: 0 is the root, 1 + i follows node i."""

    sequence: Running
    draft: Draft
    output: TargetOutput
    first: int  # head row of the root
    kernels: Kernels | None

    def __len__(self) -> int:
        return 1 + len(self.draft)

    def __getitem__(self, row: int) -> int:  # type: ignore[override]
        params = self.sequence.params
        if not params.plain:
            return self.shaped(row).choose(self.sequence.seed, self.position(row), self.sequence.choice)
        if params.greedy:
            return self._number(int(self.output.greedy_tokens[self.first + row]), row)
        return self._number(self._sampled(row), row)

    def position(self, row: int) -> int:
        """Absolute position of the token that follows the row."""
        depth = 0 if row == 0 else self.draft.depths[row - 1]
        return len(self.sequence.tokens) + depth

    def logits(self, row: int) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self.output.logits[self.first + row].numpy()
        return logits

    def history(self, row: int) -> History:
        if row == 0:
            return self.sequence.history
        return self.sequence.history.extended([self.draft.tokens[node] for node in self.draft.path(row - 1)])

    def shaped(self, row: int) -> Shaped:
        """The processed distribution of a row."""
        try:
            return shape(self.logits(row), self.sequence.params, self.history(row))
        except NumericsError as error:
            raise RowFailed(row, error) from error

    def _sampled(self, row: int) -> int:
        s, position = self.sequence, self.position(row)
        if self.kernels is None:
            return int(argmax_gumbel(self.logits(row), s.params.temperature, s.seed, position, s.choice))
        return int(
            self.kernels.sample(
                self.output.logits,
                torch.tensor([self.first + row], dtype=torch.int32),
                torch.tensor([s.params.temperature], dtype=torch.float64),
                torch.from_numpy(np.array([s.seed], dtype=np.uint64).view(np.int64)),
                torch.tensor([position], dtype=torch.int32),
                torch.tensor([s.choice], dtype=torch.int32),
            )[0]
        )

    def _number(self, token: int, row: int) -> int:
        if token < 0:
            raise RowFailed(row, NumericsError(NOT_A_NUMBER.format(self.position(row))))
        return token


@dataclass(frozen=True)
class _TargetProbs(Sequence[NDArray[np.float64]]):
    """The target's processed law after each row, float64 [vocab], computed when asked for."""

    rows: _TargetTokens
    vocab: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> NDArray[np.float64]:  # type: ignore[override]
        return self.rows.shaped(row).probabilities(self.vocab)


class Runner:
    """Verifies spans against a target. `kernels` samples natively where it can; without, numpy does."""

    def __init__(self, target: Target, *, rule: VerifyRule, kernels: Kernels | None = None) -> None:
        self.target = target
        self.rule = rule
        self.kernels = kernels

    def forward(
        self, spans: Sequence[Span], drafts: Mapping[str, Draft], tables: Mapping[str, Sequence[int]]
    ) -> TargetOutput:
        """One pass over all rows of the step."""
        return self.target.forward(pack(spans, drafts, tables))

    def accept(
        self, spans: Sequence[Span], drafts: Mapping[str, Draft], output: TargetOutput, sequences: Mapping[str, Running]
    ) -> dict[str, Ruling]:
        """What the pass means for every live span."""
        rulings = {}
        for span, first in _first_heads(spans, drafts):
            draft = drafts.get(span.seq_id, NO_DRAFT)
            rulings[span.seq_id] = self._ruling(
                _TargetTokens(sequences[span.seq_id], draft, output, first, self.kernels)
            )
        return rulings

    def _ruling(self, rows: _TargetTokens) -> Ruling:
        draft, error = rows.draft, ""
        try:
            verdict = self._verdict(rows)
        except RowFailed as failed:  # the path led there, so its guesses are the target's own tokens
            path = draft.path(failed.row - 1)
            verdict = Verdict(draft.seq_id, path, tuple(draft.tokens[node] for node in path))
            error = str(failed.error)
        origins = (*(draft.drafter for _ in verdict.accepted), "")[: len(verdict.tokens)]
        return Ruling(verdict.tokens, verdict.accepted, origins, _logprobs(rows, verdict), len(draft), error)

    def _verdict(self, rows: _TargetTokens) -> Verdict:
        if self.rule == "match":
            return accept.match(rows.draft, rows)
        s = rows.sequence
        chance = accept.FieldChance(s.seed, len(s.tokens), s.choice)
        laws = _TargetProbs(rows, self.target.vocab)
        if self.rule == "rejection":
            return accept.rejection(rows.draft, laws, chance=chance)
        return accept.block(_finite(rows), laws, chance=chance)


def _finite(rows: _TargetTokens) -> Draft:
    """The guesses before the first row that is not a number: the block rule looks at all rows before it decides."""
    for row in range(1, len(rows)):
        try:
            rows.shaped(row)
        except RowFailed:
            return rows.draft.truncate(row - 1)
    return rows.draft


def _first_heads(spans: Sequence[Span], drafts: Mapping[str, Draft]) -> Iterator[tuple[Span, int]]:
    """Live spans with the head row of their root (heads lie in the order of spans, then nodes)."""
    first = 0
    for span in spans:
        if span.needs_logits:
            yield span, first
            first += 1 + len(drafts.get(span.seq_id, NO_DRAFT))


def _logprobs(rows: _TargetTokens, verdict: Verdict) -> tuple[TokenLogprob, ...]:
    top = rows.sequence.params.logprobs
    if top is None:
        return ()
    return tuple(
        token_logprob(rows.logits(row), token, top)
        for row, token in zip(verdict.logits_rows, verdict.tokens, strict=False)  # one row fewer speaks when one failed
    )
