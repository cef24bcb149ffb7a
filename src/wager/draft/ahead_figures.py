"""What a drafter that drafts ahead reports: drafts that were ready, and the seconds of its calls."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class AheadFigures:
    """What drafting ahead did so far. `hits` and `misses` count drafts that were ready and those that were not, of
    which `left_out` were not made at all; `waited_s` is what requests for drafts took, as the step saw it, `drafted_s`
    what the drafter's thread spent on drafting; `branches` counts outcomes for which drafts were made."""

    hits: int = 0
    misses: int = 0
    left_out: int = 0
    waited_s: float = 0.0
    drafted_s: float = 0.0
    branches: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Hits among all requests but the first of a sequence; None before any."""
        requests = self.hits + self.misses
        return self.hits / requests if requests else None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "hit_rate": self.hit_rate}

    def __str__(self) -> str:
        rate = "" if self.hit_rate is None else f" ({self.hit_rate:.0%})"
        return (
            f"{self.hits} drafts ready{rate}, {self.misses} not ({self.left_out} of them left out); "
            f"waited {self.waited_s:.2f} s for {self.drafted_s:.2f} s of drafting"
        )


class DraftedBatch(NamedTuple):
    """One call of the drafter: sequences, the depth of the deepest, and what it took."""

    requests: int
    depth: int
    seconds: float
