"""What a step did, counted from its values for those who learn from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wager.engine.sequence import sequence_id
from wager.types import Outcome, OutputDelta, Span, StepRecord


class StepCounter:
    """Counts in Python; see engine/native.py."""

    def record(
        self,
        spans: Sequence[Span],
        outcomes: Mapping[str, Outcome],
        deltas: Sequence[OutputDelta],
        seconds: Mapping[str, float],
        /,
    ) -> StepRecord:
        """What the step did and took."""
        drafted = sum(outcome.drafted for outcome in outcomes.values())
        return StepRecord(
            rows=sum(len(span.tokens) for span in spans) + drafted,
            sequences=len(spans),
            drafted=drafted,
            accepted=sum(name != "" for delta in deltas for name in delta.drafted_by),
            emitted=sum(len(delta.token_ids) for delta in deltas),
            seconds=seconds,
            context_lens=tuple(span.num_computed_tokens for span in spans),
        )

    def outputs(self, deltas: Sequence[OutputDelta], /) -> tuple[dict[str, Sequence[int]], list[str]]:
        """The tokens that became known of each sequence that goes on, and the ids of those that ended."""
        known: dict[str, Sequence[int]] = {}
        ended: list[str] = []
        for delta in deltas:
            seq_id = sequence_id(delta.request_id, delta.index)
            if delta.finish_reason is None:
                known[seq_id] = delta.token_ids
            else:
                ended.append(seq_id)
        return known, ended
