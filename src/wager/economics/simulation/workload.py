"""How requests arrive at the simulated server, and how it batches them."""

from __future__ import annotations

from dataclasses import dataclass

from wager.errors import UsageError


@dataclass(frozen=True, slots=True)
class Workload:
    """Closed loop: `concurrency` users, each sending a new request as soon as the last one is answered. Open loop:
    requests arrive at random, `rate` a second on average.

    The simulation ends after `requests` finished requests; or, with None, after `rounds` rounds summed over requests,
    and then the first users' requests start at random points of their answers, as on a server that has been running.
    `max_batch` bounds the sequences of a step, `prefill_chunk` its prompt rows.
    """

    concurrency: int | None = None
    rate: float | None = None
    requests: int | None = None
    rounds: int = 20_000
    max_batch: int = 4096
    prefill_chunk: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise UsageError("A workload is either closed or open.", "Give a concurrency or a rate, not both.")
        for name in ("concurrency", "rate", "requests", "rounds", "max_batch", "prefill_chunk"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"{name} = {value} is out of range.", f"{name} must be above 0.")
