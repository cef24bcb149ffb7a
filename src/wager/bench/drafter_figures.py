"""What measured drafters amount to: tau, speed-ups over plain decoding, and the speed-up that a fixed number of guesses
allows with their acceptance, the seconds of drafting and what rows cost on the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wager.bench.drafter_runs import PLAIN, DrafterCurve, Turn, TurnAnswer

_FEWEST_STEPS = 8
"""Steps of a number of rows from which their price is taken."""


@dataclass(frozen=True, slots=True)
class RowPrices:
    """Seconds of a step by its rows, in plain steps of one row: ascending knots, linear in between and beyond."""

    rows: tuple[int, ...]
    prices: tuple[float, ...]

    def price(self, rows: int) -> float:
        """Of a step of so many rows."""
        if rows > self.rows[-1] and len(self.rows) > 1:
            slope = (self.prices[-1] - self.prices[-2]) / (self.rows[-1] - self.rows[-2])
            return self.prices[-1] + slope * (rows - self.rows[-1])
        return float(np.interp(rows, self.rows, self.prices))

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> RowPrices:
        """From the steps of all drafters, each against the mean plain step of its own turn. A price is never below that
        of fewer rows."""
        seconds: dict[int, float] = {}
        expected: dict[int, float] = {}
        steps: dict[int, int] = {}
        for turn in turns:
            plain = turn.answers[PLAIN].steps.rows.get(1)
            if plain is None:
                continue
            for name, answer in turn.answers.items():
                for rows, each in answer.steps.rows.items() if name != PLAIN else ():
                    seconds[rows] = seconds.get(rows, 0.0) + each.seconds
                    expected[rows] = expected.get(rows, 0.0) + each.steps * plain.seconds / plain.steps
                    steps[rows] = steps.get(rows, 0) + each.steps
        known = [rows for rows in sorted(seconds) if rows > 1 and steps[rows] >= _FEWEST_STEPS]
        prices = np.maximum.accumulate([1.0, *(seconds[rows] / expected[rows] for rows in known)])
        return cls((1, *known), tuple(prices.tolist()))


@dataclass(frozen=True, slots=True)
class StaticOptimum:
    """The number of guesses in every step at which tokens come fastest, and how much faster than without; 0 where none
    pay."""

    guesses: int
    speedup: float


def static_optimum(curve: DrafterCurve, prices: RowPrices) -> StaticOptimum:
    """max over k of tau_k / (price of the rows of a round + drafting): what a policy that always makes the same number
    of guesses could reach. A round that gets fewer guesses verifies fewer rows."""
    best = StaticOptimum(0, 1.0)
    for guesses, (rounds, draft_s) in enumerate(zip(curve.rounds, curve.draft_s, strict=True), 1):
        rows = sum(share * prices.price(1 + length) for length, share in enumerate(rounds.lengths))
        speedup = rounds.tau / (rows + draft_s / curve.step_s)
        if speedup > best.speedup:
            best = StaticOptimum(guesses, speedup)
    return best


@dataclass(frozen=True, slots=True)
class DrafterFigures:
    """One drafter on some turns. `speedup`: decode seconds of plain decoding over the drafter's, on the same prompts;
    `draft_share`: seconds of drafting a round, in plain steps; `changed`: answers whose token ids are others than plain
    decoding's."""

    prompts: int
    tau: float
    speedup: float
    draft_share: float
    changed: int

    @classmethod
    def of(cls, turns: Sequence[Turn], drafter: str) -> DrafterFigures | None:
        """None if it was not measured in any of them."""
        pairs = [(turn.answers[PLAIN], turn.answers[drafter]) for turn in turns if drafter in turn.answers]
        if not pairs:
            return None
        rounds = sum(own.rounds for _, own in pairs)
        return cls(
            prompts=len(pairs),
            tau=sum(own.tokens for _, own in pairs) / rounds,
            speedup=_ratio(sum(plain.decode_s for plain, _ in pairs), sum(own.decode_s for _, own in pairs)),
            draft_share=_ratio(sum(own.steps.draft for _, own in pairs), sum(_plain_seconds(*pair) for pair in pairs)),
            changed=sum(not own.same for _, own in pairs),
        )


def _plain_seconds(plain: TurnAnswer, own: TurnAnswer) -> float:
    """What the drafter's decoding steps would take as plain ones."""
    steps = sum(each.steps for each in own.steps.rows.values())
    rows = plain.steps.rows.get(1)
    return steps * rows.seconds / rows.steps if rows else 0.0


def by_family(turns: Sequence[Turn], drafter: str) -> Mapping[str, DrafterFigures]:
    """The figures of each family of prompts, by its name."""
    families = sorted({turn.family for turn in turns})
    found = {
        family: DrafterFigures.of([turn for turn in turns if turn.family == family], drafter) for family in families
    }
    return {family: figures for family, figures in found.items() if figures}


def _ratio(over: float, under: float) -> float:
    return over / under if under > 0 else float("nan")
