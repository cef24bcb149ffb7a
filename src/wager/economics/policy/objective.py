"""What a policy maximises, and from it the weight of a token of each sequence.

throughput: the weight w of the token's request. latency: the time per token averaged over sequences, sum w C / m, is
least where a token of a sequence that gets m tokens a step counts w / m^2, so the slowest count most. slo: w times a
factor (the multiplier of the constraint) that grows while the sequence is slower than its target and shrinks while it
is faster; one that stays too slow at the greatest factor is given up, so that the others do not pay for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wager.economics.options import Objective
from wager.economics.policy.base import SMOOTHING

_INITIAL_TOKENS = 1.5  # per step, expected of a sequence before any was observed
_GROWTH, _DECAY, _MAX_FACTOR = 1.05, 0.98, 8.0  # of the SLO's factor: change per step, and bound
_SLO_MARGIN = 0.93  # share of the SLO that is aimed at, since the time per token scatters
_MAX_LATE_STEPS = 80  # at the greatest factor, before a sequence is given up


class SequenceWeight:
    """What decides the weight of a sequence's tokens: its request's weight, its recent tokens per step, the factor of
    the SLO, and for how many steps it was late at the greatest factor. Written by ObjectiveWeights."""

    __slots__ = ("late_steps", "request_weight", "slo_factor", "tokens")

    def __init__(self, request_weight: float, tokens: float) -> None:
        self.request_weight, self.tokens, self.slo_factor, self.late_steps = request_weight, tokens, 1.0, 0


@dataclass(frozen=True, slots=True)
class SloReport:
    """Of the sequences that decode, how many are slower than the SLO, how many of these were given up, and the seconds
    per token of the slowest."""

    seconds_per_token: float
    late: int
    given_up: int
    slowest: float


class ObjectiveWeights:
    """Weights of tokens under an objective. A new sequence is taken to be as fast as the average one."""

    def __init__(self, objective: Objective) -> None:
        self._kind, self._slo = objective.kind, objective.seconds_per_token
        self._mean_tokens, self._step_seconds = _INITIAL_TOKENS, 0.0
        self._weighted = False  # whether there was a request of another weight than 1

    def start_sequence(self, request_weight: float) -> SequenceWeight:
        self._weighted |= request_weight != 1.0
        return SequenceWeight(request_weight, self._mean_tokens)

    @property
    def uniform(self) -> bool:
        """Whether a token of any sequence counts 1."""
        return self._kind == "throughput" and not self._weighted

    @property
    def learns(self) -> bool:
        """Whether weights depend on what sequences got."""
        return self._kind != "throughput"

    def weight(self, sequence: SequenceWeight) -> float:
        """Of one of its tokens."""
        if self._kind == "throughput":
            return sequence.request_weight
        if self._kind == "slo":
            return sequence.request_weight * sequence.slo_factor
        return sequence.request_weight * (self._mean_tokens / sequence.tokens) ** 2

    def learn(self, sequence: SequenceWeight, tokens: int) -> None:
        """The sequence got that many tokens in the step."""
        if self._kind == "throughput":
            return
        sequence.tokens += SMOOTHING * (tokens - sequence.tokens)
        self._mean_tokens += 0.2 * SMOOTHING * (tokens - self._mean_tokens)  # a mean over many sequences
        if self._kind == "slo" and self._step_seconds:
            late = self._step_seconds > _SLO_MARGIN * self._slo * sequence.tokens
            sequence.late_steps = 0 if not late else sequence.late_steps + (sequence.slo_factor >= _MAX_FACTOR)
            change = _GROWTH if late and sequence.late_steps < _MAX_LATE_STEPS else _DECAY
            sequence.slo_factor = min(_MAX_FACTOR, max(1.0, sequence.slo_factor * change))

    def observe(self, seconds: float) -> None:
        """The step took this long."""
        self._step_seconds += (SMOOTHING if self._step_seconds else 1.0) * (seconds - self._step_seconds)

    def slo_report(self, sequences: Sequence[SequenceWeight]) -> SloReport | None:
        """How an SLO is met lately; None under another objective, and before there is something to say."""
        if self._kind != "slo" or not sequences or not self._step_seconds:
            return None
        paces = [self._step_seconds / sequence.tokens for sequence in sequences]
        late = [sequence for sequence, pace in zip(sequences, paces, strict=True) if pace > self._slo]
        given_up = sum([sequence.late_steps >= _MAX_LATE_STEPS for sequence in late])
        return SloReport(self._slo, len(late), given_up, max(paces))
