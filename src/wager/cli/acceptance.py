"""`wager acceptance`: how often the tokens of a drafter are accepted on the user's prompts, by depth and category."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wager.cli.bench import card_of, count_answers, settings_of, to_requests
from wager.config import EngineConfig
from wager.drafter_spec import parse_drafters
from wager.economics.options import DEEPEST
from wager.errors import UsageError, WagerError
from wager.profiling.acceptance import DrafterAcceptance, Estimate, estimate_acceptance
from wager.prompts import Prompt
from wager.terminal import console, flags
from wager.types import SamplingParams

if TYPE_CHECKING:
    from wager.profiling.acceptance import DraftedAnswer, DraftRecording

_NONE = "–"

_CONCURRENCY = 8
"""Answers generated together. It changes neither texts nor drafts."""


@click.command("acceptance", cls=flags.Verb)
@flags.prompts_flags()
@flags.framing_flags
@flags.engine_flags(
    drafter=flags.drafter_flag(several=True, default=("auto",)),
    only=("model", "kv_dtype", "threads", "memory", "max_context"),
)
@click.option(
    "--depth",
    type=flags.Count(1, DEEPEST),
    help="Deepest draft to measure, or largest tree. Without it as the drafter can.",
)
@flags.sampling_flags(max_tokens=128, seed=0)
@click.option(
    "-o",
    "--output",
    "output_path",
    type=flags.OutputPath(allow_dash=True),
    metavar="FILE",
    help="Write the file that `wager plan --acceptance` reads; for one drafter.",
)
@click.option(
    "--trace",
    "trace_path",
    type=flags.OutputPath(),
    metavar="FILE",
    help="Write what was drafted at every position, for `wager replay`.",
)
@click.option(
    "--plot",
    "plot_path",
    type=flags.OutputPath(),
    metavar="PATH",
    help="Plot survival by depth with its intervals: .png, .svg or .pdf.",
)
@flags.json_flag
def command(
    *,
    prompts: list[Prompt],
    framing: flags.Framing,
    config: EngineConfig,
    drafters: tuple[str, ...],
    depth: int | None,
    params: SamplingParams,
    output_path: Path | None,
    trace_path: Path | None,
    plot_path: Path | None,
    json_path: Path | None,
) -> None:
    """Measure how often a drafter's tokens are accepted on the prompts of FILE, by depth and category.

    FILE is as for `wager bench`; without it a small set that comes with wager is used. The model answers every prompt,
    and the drafter drafts at every position of the answer; nothing is verified, so the text is that of plain decoding.
    From this follow the rounds of every fixed depth: each begins where the last one ended.

    Survival S_k is the probability that the draft token at depth k is reached and accepted, in rounds of the deepest
    depth; a round without a draft counts as not accepted. Alpha is accepted / (accepted + first rejections), the rate
    of one draft token. τ is tokens per pass of the model, the bonus token included. Intervals hold 95 % over resampled
    prompts. Of a drafter that makes trees --depth is the number of guesses, and the likeliest of them are verified;
    several drafters are compared at equal guesses.
    """
    from wager.cli.loading import open_engine
    from wager.profiling.acceptance import record_drafts

    specs = _drafter_specs(drafters)
    _check_outputs(specs, output_path, trace_path, plot_path, json_path)
    measured: list[MeasuredDrafter] = []
    with console.meter("answers") as update:
        count = count_answers(update, "Answering and drafting", len(prompts) * len(specs))
        fixed = config.with_options(prefix_cache=False, policy="fixed", depth=1)
        engine = open_engine(fixed.with_options(drafter=specs[0]))
        for spec in specs:
            if measured:
                engine = open_engine(fixed.with_options(drafter=spec), like=engine)
            name = spec if engine.drafter_name in [drafter.name for drafter in measured] else engine.drafter_name
            requests = to_requests(prompts, engine.tokenizer, framing=framing, params=params)
            recording = record_drafts(engine, requests, depth=depth, concurrency=_CONCURRENCY, on_output=count)
            measured.append(MeasuredDrafter(name, recording, prompts))
    settings = {**settings_of(config, params, framing, prompts), "drafter": list(specs), "depth": depth}
    results = {drafter.name: drafter.as_dict(settings) for drafter in measured}
    console.write_json(results[measured[0].name], output_path)
    if trace_path:
        _write_trace(measured, prompts, trace_path)
    if plot_path:
        _plot(measured, plot_path)
    if json_path:
        console.write_json({"card": card_of(config, engine, settings), "drafters": results}, json_path)
    _show(measured, to_stdout=console.STDOUT not in (json_path, output_path))
    for path in (output_path, trace_path, plot_path):
        if path and path != console.STDOUT:
            console.say(f"written to {path}")


def _drafter_specs(drafters: Sequence[str]) -> tuple[str, ...]:
    """The drafters to measure, each by itself. UsageError for none, or one that is named twice."""
    specs: list[str] = []
    for text in drafters:  # what auto stands for depends on the model
        specs += [text] if text.strip() == "auto" else map(str, parse_drafters(text))
    if not specs:
        raise UsageError("There is nothing to measure: --drafter is none.", "Name a drafter, such as ngram.")
    for spec in specs:
        if specs.count(spec) > 1:
            raise UsageError(f"Drafter {spec} is named twice.", "Name each once.")
    return tuple(specs)


def _check_outputs(
    specs: Sequence[str],
    output_path: Path | None,
    trace_path: Path | None,
    plot_path: Path | None,
    json_path: Path | None,
) -> None:
    """UsageError for results that cannot be written, before anything is measured."""
    for text in specs if trace_path else ():
        if any(spec.makes_trees for spec in parse_drafters(text)):
            raise UsageError(f"Drafter {text} makes trees, and a trace holds chains.", "Leave out --trace, or it.")
    if output_path and len(specs) > 1:
        raise UsageError(
            f"--output holds the acceptance of one drafter, and there are {len(specs)}: {', '.join(specs)}.",
            "Name one drafter, or use --json for all of them.",
        )
    for path, results in Counter((output_path, trace_path, plot_path, json_path)).items():
        if path and results > 1:
            raise UsageError(f"Two results are to be written to {path}.", "Give each a path of its own.")
    if plot_path:
        from wager.terminal import plots

        plots.check_suffix(plot_path)


class MeasuredDrafter:
    """One drafter: its drafts along the answers, and its acceptance over all prompts and by category."""

    def __init__(self, name: str, recording: DraftRecording, prompts: Sequence[Prompt]) -> None:
        self.name, self.recording = name, recording
        self.total = estimate_acceptance(recording.answers, recording.depth)
        groups: dict[str, list[DraftedAnswer]] = {}
        for prompt, answer in zip(prompts, recording.answers, strict=True):
            groups.setdefault(prompt.category, []).append(answer)
        self.categories = {name: estimate_acceptance(groups[name], recording.depth) for name in sorted(groups)}

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


def _write_trace(measured: Sequence[MeasuredDrafter], prompts: Sequence[Prompt], path: Path) -> None:
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
        about = {"id": prompt.id, "category": prompt.category, "prompt_tokens": prompt_tokens, "tokens": tokens}
        rows.append({**about, "drafters": drafters})
    text = "".join(json.dumps(row, separators=(",", ":"), ensure_ascii=False) + "\n" for row in rows)
    console.write_text(text, path)


def _plot(measured: Sequence[MeasuredDrafter], path: Path) -> None:
    """Survival by depth: of one drafter by category too, of several drafters over all prompts."""
    from wager.terminal import plots

    curves = [(drafter.name, drafter.total) for drafter in measured]
    if len(measured) == 1 and len(measured[0].categories) > 1:
        curves += measured[0].categories.items()
    lines: list[plots.SurvivalCurve] = []
    for name, estimate in curves:
        survival = estimate.survival
        bounded = len(lines) < len(measured) and all(each.low is not None for each in survival)
        low, high = ([getattr(each, end) or 0.0 for each in survival if bounded] for end in ("low", "high"))
        lines.append(plots.SurvivalCurve(name, [each.value or 0.0 for each in survival], low, high))
    figure = plots.new_figure(7.0, 4.5)
    plots.draw_survival(figure.add_subplot(), lines)
    plots.write_figure(figure, path)


def _show(measured: Sequence[MeasuredDrafter], *, to_stdout: bool) -> None:
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
        # the guesses of a round are as many rows of a step: a chain's length, a tree's nodes
        columns = ["guesses", *(drafter.name for drafter in measured)]
        taus = [[_interval(rounds.tau) for rounds in drafter.total.depths] for drafter in measured]
        by_guesses = enumerate(zip_longest(*taus, fillvalue=_NONE), 1)
        rows = [[str(guesses), *row] for guesses, row in by_guesses]
        console.table("τ at equal guesses, all prompts", columns, rows, to_stdout=to_stdout)


def _category_row(name: str, estimate: DrafterAcceptance) -> list[str]:
    rates = (estimate.alpha, estimate.tau, estimate.survival[0], estimate.survival[-1])
    counts = (name, str(estimate.prompts), str(estimate.tokens), f"{estimate.coverage:.0%}")
    return [*counts, *map(_interval, rates)]


def _depth_rows(acceptance: DrafterAcceptance) -> list[list[str]]:
    rows, above = [], 1.0
    for rounds, survival, given in zip(acceptance.depths, acceptance.survival, acceptance.given_draft, strict=True):
        reached = survival.value or 0.0
        rate = f"{reached / above:.3f}" if above else _NONE
        drafted = f"{rounds.drafted:.2f}"
        rows.append([str(rounds.depth), _interval(survival), f"{given:.3f}", rate, _interval(rounds.tau), drafted])
        above = reached
    return rows


def _interval(estimate: Estimate) -> str:
    """0.312 [0.28, 0.35]; without the interval where there is none."""
    if estimate.value is None:
        return _NONE
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} [{estimate.low:.2f}, {estimate.high:.2f}]"
