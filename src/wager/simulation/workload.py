"""How requests arrive at the simulated server, and how it batches them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, pairwise

import numpy as np

from wager.errors import UsageError

MAX_BATCH = 16_384
"""Most sequences of a step, and so the most users that all run at once."""

MAX_RATE, MIN_RATE = 1e6, 1e-6
"""Requests a second: beyond these a simulation would not end, or its seconds would not be numbers."""


@dataclass(frozen=True, slots=True)
class DailyLoad:
    """Arrivals that rise and fall: `low` requests a second at both ends of a day of `seconds`, `peak` in its middle,
    a cosine between; day after day."""

    peak: float
    low: float
    seconds: float

    def __post_init__(self) -> None:
        if not (MIN_RATE <= self.peak <= MAX_RATE and 0 <= self.low <= self.peak):
            cause = f"A load between {self.low:g} and {self.peak:g} requests a second is out of range."
            raise UsageError(cause, f"The peak is between {MIN_RATE:g} and {MAX_RATE:g}, the low between 0 and it.")
        if not 0 < self.seconds < 1e9:
            raise UsageError(f"A day of {self.seconds:g} seconds is out of range.", "Give a length above 0, as 600s.")

    def rate(self, now: float) -> float:
        """Requests a second at that time."""
        return self.low + (self.peak - self.low) * (1 - math.cos(2 * math.pi * now / self.seconds)) / 2


@dataclass(frozen=True, slots=True)
class Workload:
    """Closed loop: `concurrency` users, each sending a new request as soon as the last one is answered. Open loop:
    requests arrive at random, `rate` a second on average or as a `day` goes; or at the given `arrivals` in seconds.

    The simulation ends after `requests` finished requests; or, with None, after `rounds` rounds summed over requests,
    and then the first users' requests start at random points of their answers, as on a server that has been running.
    `max_batch` bounds the sequences of a step, `prefill_chunk` its prompt rows.
    """

    concurrency: int | None = None
    rate: float | None = None
    requests: int | None = None
    rounds: int = 20_000
    max_batch: int = MAX_BATCH
    prefill_chunk: int = 512
    seed: int = 0
    day: DailyLoad | None = None
    arrivals: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        kinds = (self.concurrency, self.rate, self.day, self.arrivals)
        if sum([kind is not None for kind in kinds]) != 1:
            raise UsageError("A workload has one kind of arrivals.", "Give a concurrency, a rate, a day or arrivals.")
        for name in ("concurrency", "rate", "requests", "rounds", "max_batch", "prefill_chunk"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"{name} = {value} is out of range.", f"{name} must be above 0.")
        if self.rate is not None and not MIN_RATE <= self.rate <= MAX_RATE:
            hint = f"Give {MIN_RATE:g} to {MAX_RATE:g} requests a second."
            raise UsageError(f"rate = {self.rate:g} is out of range.", hint)
        if self.concurrency is not None and self.concurrency > MAX_BATCH:
            raise UsageError(f"concurrency = {self.concurrency} is out of range.", f"At most {MAX_BATCH} users.")
        if self.arrivals is not None:
            self._check_arrivals(self.arrivals)

    def _check_arrivals(self, arrivals: tuple[float, ...]) -> None:
        wrong = [time for time in arrivals if not 0 <= time < 1e12]
        if wrong or not arrivals or any(later < earlier for earlier, later in pairwise(arrivals)):
            cause = f"An arrival at {wrong[0]!r} seconds is out of range." if wrong else "Arrivals do not ascend."
            raise UsageError(cause if arrivals else "There are no arrivals.", "Give ascending seconds from 0 on.")
        if self.requests is not None and self.requests > len(arrivals):
            raise UsageError(f"There are {len(arrivals)} arrivals for {self.requests} requests.")

    @property
    def closed(self) -> bool:
        """Whether requests wait for earlier ones: throughput is then the server's own, not that of the arrivals."""
        return self.concurrency is not None

    @property
    def num_requests(self) -> int | None:
        """Requests after which the simulation ends: None if it ends after rounds."""
        return len(self.arrivals) if self.arrivals is not None and self.requests is None else self.requests

    @property
    def label(self) -> str:
        """In words, for a table."""
        if self.day is not None:
            return f"{self.day.low:g} to {self.day.peak:g} a second"
        if self.arrivals is not None:
            return f"{len(self.arrivals)} arrivals"
        return f"{self.rate:g} a second" if self.rate else f"{self.concurrency} user{'s' * (self.concurrency != 1)}"

    def arrival_times(self, rng: np.random.Generator) -> Iterator[float]:
        """Seconds at which requests arrive, ascending; of an open loop."""
        if self.arrivals is not None:
            return iter(self.arrivals)
        return self._daily_arrivals(self.day, rng) if self.day else self._random_arrivals(self.rate or 1.0, rng)

    def _random_arrivals(self, rate: float, rng: np.random.Generator) -> Iterator[float]:
        """A Poisson process, from an arrival at 0."""
        now = 0.0
        for _ in count():
            yield now
            now += float(rng.exponential(1 / rate))

    def _daily_arrivals(self, day: DailyLoad, rng: np.random.Generator) -> Iterator[float]:
        """A Poisson process whose rate changes: one at the peak's rate, thinned (Lewis and Shedler, 1979)."""
        now = 0.0
        for _ in count():
            now += float(rng.exponential(1 / day.peak))
            if rng.random() * day.peak < day.rate(now):
                yield now
