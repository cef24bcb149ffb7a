"""Drafters of the simulated server that draft while the target verifies: which drafts are ready, and what is waited.

A draft is ready with the given probability, decided by the request's number and place in its answer alone, so that
every policy meets the same ones; a request's first draft never is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Never

from wager.simulation.requests import SimulatedDraft, SimulatedRequest

Price = Callable[[Collection[int]], float]
"""Seconds of drafting for as many sequences as there are numbers, each with that number of passes."""

_MASK = (1 << 53) - 1


class SimulatedAheadDrafter:
    """One drafter, whose drafts are ready with probability `hit_rate`; what a policy learns from (AheadCounts)."""

    least_drafted = 1

    def __init__(self, hit_rate: float, *, seed: int = 0) -> None:
        self.hits = self.misses = 0
        self._hit_rate, self._seed = hit_rate, seed
        self._drafted_for: set[str] = set()
        self._last_step = 0.0

    def take_drafted(self) -> Sequence[Never]:
        """Its seconds are those of the latency model: there is nothing to learn."""
        return ()

    def waited(self, drafted: Sequence[tuple[SimulatedRequest, SimulatedDraft]], price: Price) -> float:
        """What the step waits for these drafts; the step before it took `_last_step`."""
        missed: list[int] = []
        for request, draft in drafted:
            if request.seq_id not in self._drafted_for:
                missed.append(draft.passes)
            elif self._is_ready(request):
                self.hits += 1
            else:
                self.misses += 1
                missed.append(draft.passes)
        self._drafted_for = {request.seq_id for request, _ in drafted}
        waited = price(missed) if missed else 0.0
        if len(missed) < len(drafted):
            waited += max(0.0, price([draft.passes + 1 for _, draft in drafted]) - self._last_step)
        return waited

    def step_took(self, seconds: float) -> None:
        """The pass beside which the next drafts are made."""
        self._last_step = seconds

    def _is_ready(self, request: SimulatedRequest) -> bool:
        place = hash((self._seed, request.times.number, request.done, 0x9E3779B9)) & _MASK
        return place < self._hit_rate * (_MASK + 1)
