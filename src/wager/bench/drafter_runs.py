"""Drafters measured in turns on the same prompts, and the file of results that a measurement goes on from.

A line of the file is one turn: a prompt answered plainly and with every drafter, one after the other. So each ratio
compares seconds that were measured within the same few seconds, whatever the machine's pace was. Other lines are a
drafter's curve, and the conditions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

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
        return cls(
            stats.completion_tokens,
            stats.rounds,
            stats.drafted,
            stats.accepted,
            stats.prefill_s,
            stats.decode_s,
            steps,
            same,
        )


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
                    f"{self.path} was measured with {name} = {before!r}, and this is {value!r}.",
                    "Name another file.",
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


def _with_line(runs: DrafterRuns | None, values: dict[str, Any]) -> DrafterRuns:
    kind = values.pop("kind")
    if kind == "card":
        drafters = values.pop("drafters")
        before = runs or DrafterRuns(values)
        return DrafterRuns(values, drafters, before.turns, before.curves)
    if runs is None:
        raise ValueError("it has no conditions")
    if kind == "turn":
        runs.turns.append(_turn(values))
    elif kind == "curve":
        runs.curves.append(_curve(values))
    else:
        raise ValueError(f"kind {kind!r}")
    return runs


def _turn(values: dict[str, Any]) -> Turn:
    answers = {}
    for name, answer in values.pop("answers").items():
        steps = answer.pop("steps")
        rows = {int(rows): RowSeconds(**each) for rows, each in steps.pop("rows").items()}
        answers[name] = TurnAnswer(**answer, steps=DecodeSeconds(rows, **steps))
    return Turn(**values, answers=answers)


def _curve(values: dict[str, Any]) -> DrafterCurve:
    rounds = tuple(FixedRounds(each["tau"], tuple(each["lengths"])) for each in values.pop("rounds"))
    survival, draft_s = tuple(values.pop("survival")), tuple(values.pop("draft_s"))
    return DrafterCurve(**values, survival=survival, rounds=rounds, draft_s=draft_s)
