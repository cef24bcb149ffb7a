"""`wager acceptance`: how often the tokens of a drafter are accepted on the user's prompts, by depth and category."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wager.bench.workload import Prompt
from wager.cli.bench import card_of, count_answers, settings_of, to_requests
from wager.config import EngineConfig
from wager.drafter_spec import parse_drafters
from wager.economics.options import DEEPEST
from wager.errors import UsageError
from wager.terminal import console, flags
from wager.types import OutputDelta, Request, SamplingParams

if TYPE_CHECKING:
    from wager.cli.acceptance_report import MeasuredDrafter
    from wager.loading.load import LoadedEngine

_CONCURRENCY = 8
"""Answers generated together. It changes neither texts nor drafts."""

_PATH = flags.OutputPath()


@click.command("acceptance", cls=flags.Verb)
@flags.prompts_flags()
@flags.framing_flags
@flags.engine_flags(
    drafter=flags.drafter_flag(several=True, default=("auto",)),
    only=("model", "kv_dtype", "threads", "memory", "max_context"),
)
@click.option(
    "--depth",
    type=click.IntRange(1, DEEPEST),
    metavar="N",
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
    type=_PATH,
    metavar="FILE",
    help="Write what was drafted at every position, for `wager replay`.",
)
@click.option(
    "--plot",
    "plot_path",
    type=_PATH,
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
    from wager.cli import acceptance_report

    specs = _drafter_specs(drafters)
    if trace_path:
        _refuse_traces_of_trees(specs)
    _check_outputs(specs, output_path, plot_path, others=(trace_path, json_path))
    with console.meter("answers") as update:
        count = count_answers(update, "Answering and drafting", len(prompts) * len(specs))
        engine, measured = _measure(
            prompts,
            specs,
            config,
            depth=depth,
            on_output=count,
            requests=lambda engine: to_requests(prompts, engine.tokenizer, framing=framing, params=params),
        )
    settings = {**settings_of(config, params, framing), "drafter": list(specs), "depth": depth}
    results = [drafter.as_dict(settings) for drafter in measured]
    if output_path:
        console.write_json(results[0], output_path)
    if trace_path:
        acceptance_report.write_trace(measured, prompts, trace_path)
    if plot_path:
        acceptance_report.plot(measured, plot_path)
    if json_path:
        card = card_of(config, engine, settings)
        console.write_json({"card": card, "drafters": dict(zip(_names(measured), results, strict=True))}, json_path)
    acceptance_report.show(measured, to_stdout="-" not in (str(json_path), str(output_path)))
    for path in (output_path, trace_path, plot_path):
        if path and str(path) != "-":
            console.say(f"written to {path}")


def _names(measured: Sequence[MeasuredDrafter]) -> list[str]:
    return [drafter.name for drafter in measured]


def _refuse_traces_of_trees(specs: Sequence[str]) -> None:
    for text in specs:
        if any(spec.makes_trees for spec in parse_drafters(text)):
            raise UsageError(f"Drafter {text} makes trees, and a trace holds chains.", "Leave out --trace, or it.")


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
    specs: Sequence[str], output_path: Path | None, plot_path: Path | None, *, others: Sequence[Path | None]
) -> None:
    """Refuse paths that cannot be written, before anything is measured."""
    if output_path and len(specs) > 1:
        raise UsageError(
            f"--output holds the acceptance of one drafter, and there are {len(specs)}: {', '.join(specs)}.",
            "Name one drafter, or use --json for all of them.",
        )
    paths = [path for path in (output_path, plot_path, *others) if path is not None]
    for path in paths:
        if paths.count(path) > 1:
            raise UsageError(f"Two results are to be written to {path}.", "Give each a path of its own.")
    if plot_path:
        from wager.terminal import plots

        plots.check_suffix(plot_path)


def _measure(
    prompts: Sequence[Prompt],
    specs: Sequence[str],
    config: EngineConfig,
    *,
    depth: int | None,
    requests: Callable[[LoadedEngine], list[Request]],
    on_output: Callable[[OutputDelta], None],
) -> tuple[LoadedEngine, list[MeasuredDrafter]]:
    """Answer the prompts once with each drafter, on one loaded model; the last engine, and what was measured."""
    from wager.cli.acceptance_report import MeasuredDrafter
    from wager.cli.loading import open_engine
    from wager.profiling.draft_records import record_drafts

    config = config.with_options(prefix_cache=False, policy="fixed", depth=1)
    engine = open_engine(config.with_options(drafter=specs[0]))
    measured: list[MeasuredDrafter] = []
    for spec in specs:
        if measured:
            engine = open_engine(config.with_options(drafter=spec), like=engine)
        name = spec if engine.drafter_name in _names(measured) else engine.drafter_name
        recording = record_drafts(engine, requests(engine), depth=depth, concurrency=_CONCURRENCY, on_output=on_output)
        measured.append(MeasuredDrafter.of(name, recording, [prompt.category for prompt in prompts]))
    return engine, measured
