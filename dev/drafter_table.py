"""Drafters measured in turns on the same prompts: the file of results, what they amount to, and their tables.

A line of the file is one turn: a prompt answered plainly and with every drafter, one after the other. So each ratio
compares seconds that were measured within the same few seconds, whatever the machine's pace was. Other lines are a
drafter's curve, and the conditions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import TypeAdapter

from wager.errors import MALFORMED, UsageError
from wager.types import DRAFT_STAGE, POLICY_STAGE, Stats, StepRecord

PLAIN = "none"


@dataclass(slots=True)
class RowSeconds:
    """Steps of one number of rows, and their seconds without drafting and policy."""

    steps: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class DecodeSeconds:
    """Seconds of the steps that decode one sequence: by their rows, and of drafters and policy in all of them."""

    rows: dict[int, RowSeconds] = field(default_factory=dict)
    draft: float = 0.0
    policy: float = 0.0

    def add(self, record: StepRecord) -> None:
        """Count a step if it computes no prompt."""
        if not record.decodes_only:
            return
        draft, policy = record.seconds.get(DRAFT_STAGE, 0.0), record.seconds.get(POLICY_STAGE, 0.0)
        own = self.rows.setdefault(record.rows, RowSeconds())
        own.steps += 1
        own.seconds += sum(record.seconds.values()) - draft - policy
        self.draft += draft
        self.policy += policy


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """One drafter's answer in a turn: counts and seconds as in types.Stats, the seconds of its steps, and whether the
    token ids are those of plain decoding."""

    tokens: int
    rounds: int
    drafted: int
    accepted: int
    prefill_s: float
    decode_s: float
    steps: DecodeSeconds
    same: bool

    @classmethod
    def of(cls, stats: Stats, steps: DecodeSeconds, *, same: bool) -> Self:
        names = ("rounds", "drafted", "accepted", "prefill_s", "decode_s")
        return cls(stats.completion_tokens, *(getattr(stats, name) for name in names), steps, same)


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt's answers by the names of the drafters, PLAIN among them."""

    temperature: float
    prompt: str
    family: str
    answers: Mapping[str, TurnAnswer]


@dataclass(frozen=True, slots=True)
class FixedRounds:
    """Rounds in which a drafter makes so many guesses: mean tokens, bonus token included, and the shares of rounds that
    got 0, 1, ... of them."""

    tau: float
    lengths: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DrafterCurve:
    """What a drafter is worth at fixed numbers of guesses, on `prompts` prompts.

    `survival[d]`: the probability that a guess at depth d + 1 is accepted, in rounds of the most guesses. `rounds[k]`
    and `draft_s[k]` are those of k + 1 guesses, and the seconds of drafting them; `step_s` those of a plain step that
    was timed beside. `trees`: guesses are nodes.
    """

    drafter: str
    temperature: float
    prompts: int
    trees: bool
    survival: tuple[float, ...]
    rounds: tuple[FixedRounds, ...]
    draft_s: tuple[float, ...]
    step_s: float


@dataclass(slots=True)
class DrafterRuns:
    """All results of a file. `card` are the conditions, the same for all of them; `drafters` the names in the order
    they were given."""

    card: dict[str, Any]
    drafters: list[str] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    curves: list[DrafterCurve] = field(default_factory=list)

    def measured(self, temperature: float, prompt: str) -> set[str]:
        """The drafters whose answers to a prompt are there."""
        return {
            name
            for turn in self.turns
            if (turn.temperature, turn.prompt) == (temperature, prompt)
            for name in turn.answers
        }

    def curve(self, temperature: float, drafter: str) -> DrafterCurve | None:
        found = (each for each in self.curves if (each.temperature, each.drafter) == (temperature, drafter))
        return next(found, None)


class RunFile:
    """The file of a measurement, a line for each result as soon as it is there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> DrafterRuns | None:
        """What is in it; None if there is no file. A last line that was not written to its end is left out. UsageError
        for anything else."""
        if not self.path.exists():
            return None
        runs: DrafterRuns | None = None
        for number, line in enumerate(self._whole_text().splitlines(), 1):
            try:
                runs = _with_line(runs, json.loads(line))
            except MALFORMED as error:
                raise UsageError(
                    f"{self.path}, line {number}, is no result of measured drafters ({error!r}).",
                    "Name a file that dev/bench_drafters.py wrote, or none that exists.",
                ) from error
        return runs

    def begin(self, card: Mapping[str, Any], drafters: Sequence[str]) -> DrafterRuns:
        """The results so far, to which more will be added under the same conditions; UsageError if they differ."""
        runs = self.read() or DrafterRuns(dict(card))
        for name, value in card["settings"].items():
            before = runs.card["settings"].get(name)
            if before != value:
                raise UsageError(
                    f"{self.path} was measured with {name} = {before!r}, and this is {value!r}.", "Name another file."
                )
        self.path.write_text(self._whole_text() if self.path.exists() else "", encoding="utf-8")
        runs.drafters += [name for name in drafters if name not in runs.drafters]
        self._add("card", {**runs.card, "drafters": runs.drafters})
        return runs

    def add_turn(self, turn: Turn) -> None:
        self._add("turn", asdict(turn))

    def add_curve(self, curve: DrafterCurve) -> None:
        self._add("curve", asdict(curve))

    def _add(self, kind: str, values: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **values}, separators=(",", ":")) + "\n")

    def _whole_text(self) -> str:
        """All lines that were written to their ends."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{self.path} cannot be read: {error}.", "Name a file of measured drafters.") from error
        return text[: text.rfind("\n") + 1]


_TURN, _CURVE = TypeAdapter(Turn), TypeAdapter(DrafterCurve)


def _with_line(runs: DrafterRuns | None, values: dict[str, Any]) -> DrafterRuns:
    kind = values.pop("kind")
    if kind == "card":
        drafters = values.pop("drafters")
        before = runs or DrafterRuns(values)
        return DrafterRuns(values, drafters, before.turns, before.curves)
    if runs is None:
        raise ValueError("it has no conditions")
    if kind == "turn":
        runs.turns.append(_TURN.validate_python(values))
    elif kind == "curve":
        runs.curves.append(_CURVE.validate_python(values))
    else:
        raise ValueError(f"kind {kind!r}")
    return runs


# ---- figures ----------------------------------------------------------------------------------------------------

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


# ---- tables ----------------------------------------------------------------------------------------------------

_NONE = "–"


def tables(runs: DrafterRuns) -> str:
    """All tables, one temperature after the other."""
    temperatures = sorted({turn.temperature for turn in runs.turns})
    return "\n\n".join("\n\n".join(_of_temperature(runs, each)) for each in temperatures) + "\n"


def _of_temperature(runs: DrafterRuns, temperature: float) -> Iterator[str]:
    turns = [turn for turn in runs.turns if turn.temperature == temperature]
    names = [name for name in runs.drafters if any(name in turn.answers for turn in turns)]
    prices = RowPrices.of(turns)
    curves = {name: curve for name in names if (curve := runs.curve(temperature, name))}
    tokens = sum(turn.answers[PLAIN].tokens for turn in turns)
    sampled = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    yield f"### Weights `{runs.card['settings']['dtype']}`, {sampled}"
    yield f"{len(turns)} turns, {tokens} plain tokens. {_prices_in_words(prices)}"
    yield _speed_table(turns, names, curves, prices)
    yield "τ by family:"
    yield _family_table(turns, names)
    if curves:
        yield _curves_in_words(list(curves.values()))
        yield _curve_table(curves)


def _prices_in_words(prices: RowPrices) -> str:
    known = [
        f"{rows} rows {price:.2f}" for rows, price in zip(prices.rows, prices.prices, strict=True) if 1 < rows <= 16
    ]
    return f"A step of several rows, in plain steps: {', '.join(known)}." if known else "No step had several rows."


def _speed_table(
    turns: Sequence[Turn], names: Sequence[str], curves: Mapping[str, DrafterCurve], prices: RowPrices
) -> str:
    """tau, cost and speed-ups, those of each family too."""
    families = sorted({turn.family for turn in turns})
    costs = ["drafting a round", "1 guess", "most guesses"]
    columns = ["drafter", "prompts", "τ", *costs, "allowed", "speed-up", *families, "changed"]
    rows = []
    for name in names:
        figures = DrafterFigures.of(turns, name)
        if figures is None:
            continue
        own, curve = by_family(turns, name), curves.get(name)
        rows.append(
            [
                f"`{name}`",
                str(figures.prompts),
                f"{figures.tau:.2f}",
                f"{figures.draft_share:.1%}",
                *_draft_costs(curve),
                _allowed(curve, prices),
                f"**{figures.speedup:.2f}**",
                *(f"{own[family].speedup:.2f}" if family in own else _NONE for family in families),
                str(figures.changed),
            ]
        )
    return _markdown(columns, rows)


def _draft_costs(curve: DrafterCurve | None) -> list[str]:
    if curve is None:
        return [_NONE, _NONE]
    shares = [seconds / curve.step_s for seconds in curve.draft_s]
    return [f"{shares[0]:.1%}", f"{shares[-1]:.1%} ({len(shares)})"]


def _allowed(curve: DrafterCurve | None, prices: RowPrices) -> str:
    """The static optimum, and its guesses."""
    if curve is None:
        return _NONE
    optimum = static_optimum(curve, prices)
    return f"{optimum.speedup:.2f} ({optimum.guesses})"


def _family_table(turns: Sequence[Turn], names: Sequence[str]) -> str:
    families = sorted({turn.family for turn in turns})
    rows = []
    for name in names:
        own = by_family(turns, name)
        rows.append([f"`{name}`", *(f"{own[family].tau:.2f}" if family in own else _NONE for family in families)])
    return _markdown(["drafter", *families], rows)


def _curves_in_words(curves: Sequence[DrafterCurve]) -> str:
    deepest = max(len(curve.survival) for curve in curves)
    prompts = sorted({curve.prompts for curve in curves})
    counts = " or ".join(map(str, prompts))
    return (
        f"Survival by depth in rounds of {deepest} guesses (of trees: nodes) that are all verified, whatever the "
        f"policy would admit, and τ of fixed numbers of guesses; {counts} of the prompts:"
    )


def _curve_table(curves: Mapping[str, DrafterCurve]) -> str:
    deepest = max(len(curve.survival) for curve in curves.values())
    taus = sorted({1, min(3, deepest), deepest})
    columns = ["drafter", *(f"S_{depth}" for depth in range(1, deepest + 1)), *(f"τ of {guesses}" for guesses in taus)]
    rows = []
    for name, curve in curves.items():
        survival = [f"{value:.3f}" for value in curve.survival]
        survival += [_NONE] * (deepest - len(survival))
        tau = [f"{curve.rounds[guesses - 1].tau:.2f}" if guesses <= len(curve.rounds) else _NONE for guesses in taus]
        rows.append([f"`{name}`" + (" (tree)" if curve.trees else ""), *survival, *tau])
    return _markdown(columns, rows)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
