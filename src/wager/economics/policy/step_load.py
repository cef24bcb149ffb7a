"""The step without drafts: its rows, what it takes, and what a second is worth in it.

All of it changes slowly while the same sequences decode, so it is computed anew every few steps; in a large batch, of
which some sequences end in nearly every step, also only then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from wager.economics.latency import LatencyCache
from wager.economics.policy.base import UPDATE_INTERVAL
from wager.economics.policy.goodput import GoodputEstimator
from wager.economics.policy.objective import ObjectiveWeights
from wager.types import Span

if TYPE_CHECKING:
    from wager.economics.policy.sequence_state import PolicyStep, SequencePolicyState

_SIMILAR = 16  # a batch of which no more than one in so many sequences came, and no more ended, counts as the same


class StepLoad(NamedTuple):
    """A step without drafts: its rows, its sequences and the cached positions of all of them; the weight of one token
    of each sequence that decodes, together; its seconds; and the weighted tokens that a second must yield."""

    rows: int = 0
    sequences: int = 0
    context_sum: int = 0
    weight: float = 0.0
    plain_seconds: float = 0.0
    goodput: float = 0.0

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, sequences and context_sum."""
        return self[:3]

    @property
    def speculation_gain(self) -> float:
        """Seconds of plain decoding that speculation lately saves in the time of a plain step."""
        return (self.goodput * self.plain_seconds / self.weight - 1) * self.plain_seconds


class StepLoads:
    """Computes the load of steps; `weights` are those of the sequences' tokens."""

    def __init__(self, latency: LatencyCache, weights: ObjectiveWeights, *, goodput: GoodputEstimator) -> None:
        self._latency, self._weights, self._goodput = latency, weights, goodput
        self._load, self._next = StepLoad(), 0  # the last one, and the step in which it is computed anew

    def load(self, step: PolicyStep, *, new: int) -> StepLoad:
        """Of a step, in which `new` sequences decode for the first time."""
        spans, decoding = step.all_spans, step.spans
        load, count = self._load, len(spans)
        before = load.sequences
        few = before // _SIMILAR
        decodes = len(decoding) == count and load.rows == before  # and computes no prompts, like the last one computed
        similar = decodes and new <= few and -few <= count - before <= few
        if not similar or step.number >= self._next:
            self._load, self._next = self._compute(spans, decoding, step.states), step.number + UPDATE_INTERVAL
        return self._load

    def _compute(
        self, spans: Sequence[Span], decoding: Sequence[Span], states: Mapping[str, SequencePolicyState]
    ) -> StepLoad:
        count, weight = len(decoding), float(len(decoding))
        if not count:
            return StepLoad()
        context = cached = sum([span.num_computed_tokens for span in spans])
        if count < len(spans):
            cached = sum([span.num_computed_tokens for span in decoding])
        if not self._weights.uniform:
            weight = sum([self._weights.weight(states[span.seq_id].weight) for span in decoding])
        plain = self._latency.plain_seconds(count, cached)
        rows = sum([len(span.tokens) for span in spans])
        return StepLoad(rows, len(spans), context, weight, plain, self._goodput.ratio(count) * weight / plain)
