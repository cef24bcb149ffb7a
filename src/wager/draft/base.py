"""The five verbs of a drafter.

A drafter guesses and never decides: guesses cannot change the text, only how many passes it takes. Knows no scheduler,
no acceptance rule and no target; it sees tokens that are known, and asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from wager.kernels.base import TargetOutput
from wager.types import Draft, DraftRequest, SamplingParams


class Drafter(Protocol):
    """What the engine knows of a drafter. Everything is keyed by sequence id.

    `name` labels its guesses in events and metrics. `default_depth` is how many guesses it is asked for when nobody
    fixed a depth, `deepest` the most a policy asks it for. `needs_law` says that its guesses are draws from a law q, so
    that a distribution-exact rule must ask for that law (Ask.law); otherwise they are point masses. `branches` says
    that its drafts may be trees.
    """

    name: str
    default_depth: int
    max_depth: int
    samples: bool
    makes_trees: bool

    def begin(self, sequence: str, tokens: Sequence[int], params: SamplingParams) -> None:
        """A sequence starts with this prompt; penalties tell prompt and output apart.

        Preemption is none of a drafter's business: what is known stays known.
        """

    def propose(self, asks: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per ask, in order; an empty draft declines. What is written meanwhile is provisional."""

    def observe(self, output: TargetOutput) -> None:
        """What the target's last pass gave (its buffers; copy what is kept)."""

    def accept(self, sequence: str, tokens: Sequence[int]) -> None:
        """Tokens that became known: the only truth a drafter is told. Sufficient to rebuild its state."""

    def end(self, sequence: str) -> None:
        """The sequence is over or aborted. Unknown sequences are ignored."""
