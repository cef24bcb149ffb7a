"""Shows the target's passes to the drafters that read them: its states, or its rows of logits.

A drafter that rests is shown no states, and what only such drafters read is not tapped. Rows are shown to it all the
same: what it learns from them is of other texts, too. One that pauses because it failed is shown nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from wager.draft.base import ComputedRows, Drafter, LogitsRows, RowReader, StateReader
from wager.kernels.base import TargetOutput
from wager.types import Draft, Outcome, Span


class PassReaders:
    """Those among `drafters`. `drop` is called with the name and the error of one that fails.

    `taps` are the layers whose residual stream passes must give: those that a drafter which does not rest reads.
    `reads_passes`: whether something is to be shown; `reads_states`: whether some drafter reads states, or did.
    """

    def __init__(self, drafters: Sequence[Drafter], *, drop: Callable[[str, Exception], None]) -> None:
        self.resting: frozenset[str] = frozenset()
        self._pausing: frozenset[str] = frozenset()
        self._states: dict[str, StateReader] = {}
        self._rows: dict[str, RowReader] = {}
        for drafter in drafters:
            if isinstance(drafter, StateReader) and drafter.taps is not None:
                self._states[drafter.name] = drafter
            if isinstance(drafter, RowReader) and drafter.reads_rows:
                self._rows[drafter.name] = drafter
        self._drop, self.reads_states = drop, bool(self._states)
        self._choose()

    def rest(self, names: frozenset[str], *, pausing: Collection[str] = ()) -> None:
        """Those named rest or pause from now on, and no others."""
        self.resting, self._pausing = names, frozenset(pausing)
        self._choose()

    def _choose(self) -> None:
        awake = {name: each for name, each in self._states.items() if name not in self.resting | self._pausing}
        self._awake = list(awake.items())
        self._shown_rows = [(name, each) for name, each in self._rows.items() if name not in self._pausing]
        self.reads_passes = bool(self._awake or self._shown_rows)
        self.taps = frozenset(layer for reader in awake.values() for layer in reader.taps or ())

    def show(
        self,
        output: TargetOutput,
        spans: Sequence[Span],
        drafts: Mapping[str, Draft],
        outcomes: Mapping[str, Outcome],
    ) -> None:
        """A pass's states and rows to the drafters that read them."""
        computed = computed_rows(spans, outcomes) if self._awake else []
        for name, reader in self._awake:
            try:
                reader.read(output, computed)
            except Exception as error:
                self._drop(name, error)
        shown_rows = [each for each in self._shown_rows if each[0] not in self._pausing]
        rows = logits_rows(spans, drafts) if shown_rows else []
        for name, row_reader in shown_rows:
            try:
                row_reader.read_rows(output, rows)
            except Exception as error:
                self._drop(name, error)


def computed_rows(spans: Sequence[Span], outcomes: Mapping[str, Outcome]) -> list[ComputedRows]:
    """Which rows of a pass are known tokens now: those of its spans, each followed by its accepted guesses."""
    computed, first, logits_row = [], 0, 0
    for span in spans:
        outcome = outcomes.get(span.seq_id)
        count, accepted = len(span.tokens), () if outcome is None else outcome.verdict.accepted
        rows = (*range(first, first + count), *(first + count + node for node in accepted))
        last = -1 if outcome is None else logits_row + (1 + accepted[-1] if accepted else 0)
        computed.append(ComputedRows(span.seq_id, span.num_computed_tokens, rows, last))
        drafted = 0 if outcome is None else outcome.drafted
        first += count + drafted
        logits_row += 0 if outcome is None else 1 + drafted
    return computed


def logits_rows(spans: Sequence[Span], drafts: Mapping[str, Draft]) -> list[LogitsRows]:
    """The rows of logits by sequence: they follow the last known token of a span, and its guesses."""
    rows, first = [], 0
    for span in spans:
        if span.needs_logits:
            draft = drafts.get(span.seq_id)
            tokens = (span.tokens[-1], *(draft.tokens if draft else ()))
            rows.append(LogitsRows(span.seq_id, first, tokens))
            first += len(tokens)
    return rows
