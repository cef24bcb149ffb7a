"""What `wager prove` found: the table of its trials, one line for each drafter, and a file to go on from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from wager.bench.comparison import Difference, TokenComparison
from wager.bench.variety import TextVariety
from wager.errors import MALFORMED, UsageError, WagerError
from wager.terminal import console

_WRONG = frozenset({"none", "adversary"})
"""Drafters of which no accepted guess is expected."""


@dataclass(frozen=True, slots=True)
class DrafterProof:
    """All trials of one drafter together. `failure`: why it failed, if it did and was not made to; `note` says what
    they do not show."""

    drafter: str
    trials: int
    tokens: int
    differing: int
    finish_reasons: int
    finish_reasons_differing: int
    drafted: int
    accepted: int
    failures: int
    failure: str
    note: str

    @property
    def line(self) -> str:
        """In words."""
        note = f"; {self.note}" if self.note else ""
        failures = f", {self.failures} warnings that it failed" if self.failures else ""
        return (
            f"{self.drafter}: {self.tokens} token ids and {self.finish_reasons} finish reasons, "
            f"{self.differing + self.finish_reasons_differing} differ; {self.drafted} guesses, {self.accepted} "
            f"accepted{failures}{note}."
        )


def summed_up(trials: Sequence[TokenComparison], *, failure: str = "") -> DrafterProof:
    """The trials of one drafter, at least one."""
    drafter, drafted = trials[0].drafter, sum(trial.drafted for trial in trials)
    accepted = sum(trial.accepted for trial in trials)
    note = ""
    if drafter != "none" and not drafted:
        note = "it guessed nothing, so nothing is proven of it"
    elif drafter not in _WRONG and not accepted:
        note = "no guess was accepted, so nothing is proven of accepted ones"
    return DrafterProof(
        drafter,
        len(trials),
        sum(trial.tokens for trial in trials),
        sum(trial.differing for trial in trials),
        sum(trial.answers for trial in trials),
        sum(trial.finish_reasons_differing for trial in trials),
        drafted,
        accepted,
        sum(trial.failures for trial in trials),
        failure,
        note,
    )


def earlier_trials(path: Path | None, settings: Mapping[str, Any]) -> dict[str, list[TokenComparison]]:
    """The trials in a file of --json by drafter, none if there is no file yet. UsageError if it was written with other
    settings, or is none of `wager prove`."""
    if path is None or str(path) == "-":
        raise UsageError("--resume needs a file to go on from.", "Give it with --json PATH.")
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        found = dict(value["card"]["settings"])
        trials = [_comparison(trial) for trial in value["outcomes"]]
        failed = {str(each["drafter"]) for each in value["drafters"] if each["failure"]}
    except (OSError, *MALFORMED) as error:
        raise UsageError(f"{path} is no file of `wager prove` to go on from: {error}.", "Give another path.") from error
    now = json.loads(json.dumps(settings))
    other = [name for name in now if name != "drafter" and found.get(name) != now[name]]
    if other:
        raise UsageError(
            f"{path} was written with another {other[0]}: {found.get(other[0])!r}, not {now[other[0]]!r}.",
            "Give another path, or the same options.",
        )
    by_drafter: dict[str, list[TokenComparison]] = {}
    for trial in trials:
        if trial.drafter not in failed:
            by_drafter.setdefault(trial.drafter, []).append(trial)
    return by_drafter


def _comparison(value: Mapping[str, Any]) -> TokenComparison:
    known = {each.name: value[each.name] for each in fields(TokenComparison)}
    texts = {each.name for each in fields(TokenComparison) if each.type == "str"}
    counts = {each.name for each in fields(TokenComparison) if each.type == "int"}
    if not all(isinstance(known[name], str) for name in texts) or not all(type(known[name]) is int for name in counts):
        raise TypeError("a text or a count is of another type")
    known |= {"notes": tuple(known["notes"]), "first": Difference(**known["first"]) if known["first"] else None}
    return TokenComparison(**known)


@dataclass(slots=True)
class Proof:
    """The trials so far: `card` says under which conditions, `path` is that of --json."""

    card: dict[str, Any]
    path: Path | None
    trials: list[TokenComparison]
    drafters: list[DrafterProof] = field(init=False)
    varieties: Sequence[TextVariety] = ()

    def __post_init__(self) -> None:
        names = dict.fromkeys(trial.drafter for trial in self.trials)
        self.drafters = [summed_up([trial for trial in self.trials if trial.drafter == name]) for name in names]

    def add(self, trials: Sequence[TokenComparison], *, failure: str) -> None:
        """All the trials of one drafter. The file of --json is written, and a line says what was found."""
        self.trials += trials
        self.drafters.append(summed_up(trials, failure=failure))
        console.say(self.drafters[-1].line)
        if self.path and str(self.path) != "-":
            console.write_json(self.as_dict(), self.path)

    @property
    def summary(self) -> dict[str, int]:
        return {
            "tokens": sum(trial.tokens for trial in self.trials),
            "differing": sum(trial.differing for trial in self.trials),
            "finish_reasons": sum(trial.answers for trial in self.trials),
            "finish_reasons_differing": sum(trial.finish_reasons_differing for trial in self.trials),
        }

    @property
    def warnings(self) -> list[str]:
        return [variety.warning for variety in self.varieties if variety.warning]

    def as_dict(self) -> dict[str, Any]:
        """The JSON of --json; see docs/guarantees.md."""
        return {
            "card": self.card,
            "plain": [variety.as_dict() for variety in self.varieties],
            "outcomes": [trial.as_dict() for trial in self.trials],
            "drafters": [asdict(drafter) for drafter in self.drafters],
            "summary": self.summary,
            "warnings": self.warnings,
        }

    def report(self) -> None:
        """The tables. WagerError if anything differs, or a drafter failed that was not made to."""
        if self.path:
            console.write_json(self.as_dict(), self.path)
        to_stdout = str(self.path) != "-"
        _show_trials(f"{self.card['model']}, {self.card['kernels']['name']} kernels", self.trials, to_stdout=to_stdout)
        _show_drafters(self.drafters, to_stdout=to_stdout)
        for warning in self.warnings:
            console.say(f"Warning: {warning} Give other prompts, or a model whose texts vary.")
        summary = self.summary
        if summary["differing"] or summary["finish_reasons_differing"]:
            raise _difference_error(self.trials, summary)
        for drafter in self.drafters:
            if drafter.failure:
                raise WagerError(
                    f"Drafter {drafter.drafter} failed during the proof: {drafter.failure}.",
                    "Without guesses nothing is proven.",
                )
        count = f"{summary['tokens']} token ids and {summary['finish_reasons']} finish reasons"
        console.say(f"{count} compared, none differs.")


def _show_trials(title: str, trials: Sequence[TokenComparison], *, to_stdout: bool) -> None:
    columns = ["trial", "tokens", "differ", "ends differ", "τ", "guesses", "accepted", "preempted", "cached"]
    notes = list(dict.fromkeys(note for trial in trials for note in trial.notes))
    columns += ["note"] if notes else []
    lines = [_line(trial, notes) for trial in trials]
    caption = "\n".join(f"Note {number}: {note}." for number, note in enumerate(notes, 1))
    console.table(title, columns, lines, to_stdout=to_stdout, caption=caption)


def _show_drafters(drafters: Sequence[DrafterProof], *, to_stdout: bool) -> None:
    columns = ["drafter", "tokens", "differ", "ends differ", "guesses", "accepted", "log warnings"]
    lines = [
        [
            each.drafter,
            *map(str, (each.tokens, each.differing, each.finish_reasons_differing)),
            *map(str, (each.drafted, each.accepted, each.failures)),
        ]
        for each in drafters
    ]
    caption = "\n".join(f"{each.drafter}: {each.note}." for each in drafters if each.note)
    console.table("By drafter", columns, lines, to_stdout=to_stdout, caption=caption)


def _difference_error(comparisons: Sequence[TokenComparison], summary: Mapping[str, int]) -> WagerError:
    """The error that counts the differences and names the first."""
    trial, first = next((trial, trial.first) for trial in comparisons if trial.first)
    count = f"{summary['differing']} of {summary['tokens']} token ids"
    if reasons := summary["finish_reasons_differing"]:
        count += f" and {reasons} of {summary['finish_reasons']} finish reasons"
    place = f"token {first.position}: plain {first.plain}, speculative {first.speculative}"
    if first.plain is None and first.speculative is None:
        place = f"after token {first.position}: plain ends with {first.plain_finish_reason}, "
        place += f"speculative with {first.finish_reason}"
    cause = f" ({first.error})" if first.error else ""
    return WagerError(
        f"{count} differ; first with {trial.drafter}, {trial.mode}, {trial.condition}: prompt {first.prompt}, "
        f"{place}{cause}.",
        "This is a defect in wager: please report it with the output of --json.",
    )


def _line(trial: TokenComparison, notes: Sequence[str]) -> list[str]:
    """A line of the table; `notes` are those of all trials, referred to by number."""
    tau = trial.tokens / trial.rounds if trial.rounds else 0.0
    counts = (trial.drafted, trial.accepted, trial.preemptions, trial.prefix_hit_tokens)
    name = f"{trial.drafter}, {trial.mode}, {trial.condition}"
    line = [name, str(trial.tokens), str(trial.differing), str(trial.finish_reasons_differing), f"{tau:.2f}"]
    numbers = ", ".join(str(notes.index(note) + 1) for note in trial.notes)
    return [*line, *map(str, counts), *([numbers] if notes else [])]
