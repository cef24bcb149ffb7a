"""What `wager acceptance` reports: tables, a file for `wager plan`, a trace for `wager replay`, a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wager.bench.workload import Prompt
from wager.errors import WagerError
from wager.profiling.acceptance import DrafterAcceptance, Estimate, estimate_acceptance
from wager.profiling.draft_records import DraftRecording
from wager.terminal import console

_NONE = "–"


@dataclass(frozen=True, slots=True)
class MeasuredDrafter:
    """One drafter: its drafts along the answers, and its acceptance over all prompts and by category."""

    name: str
    recording: DraftRecording
    total: DrafterAcceptance
    categories: Mapping[str, DrafterAcceptance]

    @classmethod
    def of(cls, name: str, recording: DraftRecording, categories: Sequence[str]) -> MeasuredDrafter:
        """`categories` has one for each answer."""
        groups = {
            category: [answer for answer, own in zip(recording.answers, categories, strict=True) if own == category]
            for category in sorted(set(categories))
        }
        estimates = {category: estimate_acceptance(group, recording.depth) for category, group in groups.items()}
        return cls(name, recording, estimate_acceptance(recording.answers, recording.depth), estimates)

    def as_dict(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The file of --output; docs/acceptance.md lists the keys."""
        conditions = ("model", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")
        return {
            **{key: settings[key] for key in conditions},
            "drafter": self.name,
            "depth": self.recording.depth,
            "trees": self.recording.trees,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            **self.total.as_dict(),
            "categories": {category: estimate.as_dict() for category, estimate in self.categories.items()},
        }


def write_trace(measured: Sequence[MeasuredDrafter], prompts: Sequence[Prompt], path: Path) -> None:
    """A row for each answer, as simulation/traces.py reads it. WagerError if drafters were given different answers."""
    rows = []
    for index, prompt in enumerate(prompts):
        answers = {drafter.name: drafter.recording.answers[index] for drafter in measured}
        lengths = {(answer.prompt_tokens, len(answer.drafts)) for answer in answers.values()}
        if len(lengths) > 1:
            raise WagerError(f"The answers to prompt {prompt.id} differ between drafters.", "Run `wager prove`.")
        [(prompt_tokens, tokens)] = lengths
        survival = {drafter.name: [each.value or 0.0 for each in drafter.total.survival] for drafter in measured}
        drafters = {name: answer.trace_values(survival[name]) for name, answer in answers.items()}
        rows.append(
            {
                "id": prompt.id,
                "category": prompt.category,
                "prompt_tokens": prompt_tokens,
                "tokens": tokens,
                "drafters": drafters,
            }
        )
    text = "".join(json.dumps(row, separators=(",", ":"), ensure_ascii=False) + "\n" for row in rows)
    console.write_text(text, path)


def plot(measured: Sequence[MeasuredDrafter], path: Path) -> None:
    """Survival by depth: of one drafter by category too, of several drafters over all prompts."""
    from wager.terminal import plots

    figure = plots.new_figure(7.0, 4.5)
    [only] = measured if len(measured) == 1 else [None]
    curves = [_curve(drafter.name, drafter.total, banded=True) for drafter in measured]
    if only is not None and len(only.categories) > 1:
        curves += [_curve(category, estimate, banded=False) for category, estimate in only.categories.items()]
    plots.draw_survival(figure.add_subplot(), curves)
    plots.write_figure(figure, path)


def _curve(label: str, acceptance: DrafterAcceptance, *, banded: bool) -> Any:
    from wager.terminal import plots

    survival = acceptance.survival
    bounded = banded and all(each.low is not None for each in survival)
    low = [each.low or 0.0 for each in survival] if bounded else []
    high = [each.high or 0.0 for each in survival] if bounded else []
    return plots.SurvivalCurve(label, [each.value or 0.0 for each in survival], low, high)


def show(measured: Sequence[MeasuredDrafter], *, to_stdout: bool) -> None:
    """Two tables for each drafter, by category and by depth; of several drafters one of them at equal guesses."""
    for drafter in measured:
        rows = [_category_row(category, estimate) for category, estimate in drafter.categories.items()]
        deepest = drafter.recording.depth
        size = f"trees of {deepest} guesses" if drafter.recording.trees else f"drafts of {deepest}"
        columns = ["", "prompts", "tokens", "coverage", "α", "τ", "S_1", f"S_{deepest}"]
        title = f"{drafter.name}, {size}, by category (95 % intervals)"
        console.table(title, columns, [*rows, _category_row("all", drafter.total)], to_stdout=to_stdout)
        drafted = "τ of k guesses" if drafter.recording.trees else "τ if drafted to k"
        columns = ["depth k", "S_k", "given a draft", "S_k / S_k-1", drafted, "drafted a round"]
        title = f"{drafter.name}, by depth, all prompts"
        console.table(title, columns, _depth_rows(drafter.total), to_stdout=to_stdout)
    if len(measured) > 1:
        columns = ["guesses", *(drafter.name for drafter in measured)]
        console.table("τ at equal guesses, all prompts", columns, _equal_rows(measured), to_stdout=to_stdout)


def _equal_rows(measured: Sequence[MeasuredDrafter]) -> list[list[str]]:
    """τ of every drafter by the guesses of a round, which are as many rows of a step: a chain's length, a tree's
    nodes."""
    deepest = max(drafter.recording.depth for drafter in measured)
    rows = []
    for guesses in range(1, deepest + 1):
        depths = [drafter.total.depths[:guesses] for drafter in measured]
        taus = [_interval(each[-1].tau) if len(each) == guesses else _NONE for each in depths]
        rows.append([str(guesses), *taus])
    return rows


def _category_row(name: str, estimate: DrafterAcceptance) -> list[str]:
    first, last = estimate.survival[0], estimate.survival[-1]
    return [
        name,
        str(estimate.prompts),
        str(estimate.tokens),
        f"{estimate.coverage:.0%}",
        *map(_interval, (estimate.alpha, estimate.tau, first, last)),
    ]


def _depth_rows(acceptance: DrafterAcceptance) -> list[list[str]]:
    rows, above = [], 1.0
    for rounds, survival, given in zip(acceptance.depths, acceptance.survival, acceptance.given_draft, strict=True):
        reached = survival.value or 0.0
        rate = f"{reached / above:.3f}" if above else _NONE
        rows.append(
            [
                str(rounds.depth),
                _interval(survival),
                f"{given:.3f}",
                rate,
                _interval(rounds.tau),
                f"{rounds.drafted:.2f}",
            ]
        )
        above = reached
    return rows


def _interval(estimate: Estimate) -> str:
    """0.312 [0.28, 0.35]; without the interval where there is none."""
    if estimate.value is None:
        return _NONE
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} [{estimate.low:.2f}, {estimate.high:.2f}]"
