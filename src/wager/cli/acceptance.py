"""`wager acceptance`: how often the tokens of a drafter are accepted, by depth: on the user's prompts, and by category.
served_acceptance.py has what --metrics asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wager.cli.measuring import card_of, count_answers, settings_of, to_requests
from wager.cli.served_acceptance import DEPTH_COLUMNS, NONE, depth_rows, interval, metrics_flags
from wager.config import EngineConfig
from wager.drafter_spec import DrafterSpec, parse_drafters
from wager.economics.options import DEEPEST
from wager.errors import UsageError, WagerError
from wager.profiling.acceptance import AcceptanceCounts, DrafterAcceptance
from wager.prompts import Prompt, encode_answer
from wager.terminal import console, flags
from wager.types import SamplingParams

if TYPE_CHECKING:
    from wager.loading.load import LoadedEngine
    from wager.planner.plan import Deployment
    from wager.profiling.acceptance import DraftRecording

_CONCURRENCY = 8
"""Answers generated together. It changes neither texts nor drafts."""


@click.command(
    "acceptance",
    cls=flags.Verb,
    main="recorded hardware metrics seconds limit model drafter depth max_tokens output_path trace_path json_path",
)
@metrics_flags
@flags.prompts_flags()
@flags.framing_flags
@flags.engine_flags(
    drafter=flags.drafter_flag(several=True, default=("auto",)),
    only=("model", "kv_dtype", "threads", "memory", "max_context"),
)
@click.option(
    "--recorded",
    is_flag=True,
    help="Draft along the answers that the log FILE holds, in its order, instead of answering anew: no model runs. For "
    "drafters that read texts alone; without --drafter ngram, suffix and auto.",
)
@click.option(
    "--hardware",
    metavar="NAME|FILE",
    help="With --recorded: state the speed-up to expect there, as `wager plan` does; this is this machine, calibrated.",
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
@flags.json_flag
def command(
    *,
    prompts: list[Prompt],
    framing: flags.Framing,
    config: EngineConfig,
    drafters: tuple[str, ...],
    recorded: bool,
    hardware: str | None,
    depth: int | None,
    params: SamplingParams,
    output_path: Path | None,
    trace_path: Path | None,
    json_path: Path | None,
) -> None:
    """Measure how often a drafter's tokens are accepted on the prompts of FILE, by depth and category.

    FILE is as for `wager bench`; without it a small set that comes with wager is used. The model answers every prompt,
    and the drafter drafts at every position of the answer; nothing is verified, so the text is that of plain decoding.
    From this follow the rounds of every fixed depth: each begins where the last one ended.

    Survival S_k is the probability that the draft token at depth k is reached and accepted, in rounds of the deepest
    depth; a round without a draft counts as not accepted. Alpha is accepted / (accepted + first rejections), the rate
    of one draft token. τ is tokens per pass of the model, the bonus token included. Intervals hold 95 % over resampled
    prompts. For a drafter that makes trees --depth is the number of guesses, and the likeliest of them are verified;
    several drafters are compared at equal guesses.
    """
    from wager.planner.options import PlanSettings, plan_deployment

    _check_recorded(hardware, recorded=recorded)
    specs = _drafter_specs(_TEXT_DRAFTERS if recorded and not flags.wrote("drafter") else drafters)
    _check_outputs(specs, output_path, trace_path)
    deployment = plan_deployment(config.model.model, hardware, PlanSettings(shape="free")) if hardware else None
    if recorded:
        measured, prompts, card = _replayed(prompts, config.model.model, specs, framing=framing, depth=depth)
        settings: dict[str, Any] = {"model": config.model.model}
    else:
        settings = {**settings_of(config, params, framing, prompts), "drafter": list(specs), "depth": depth}
        measured, engine = _generated(prompts, config, specs, framing=framing, params=params, depth=depth)
        card = card_of(config, engine, settings)
    results = {drafter.name: drafter.as_dict(settings) for drafter in measured}
    console.write_json(results[measured[0].name], output_path)
    if trace_path:
        _write_trace(measured, prompts, trace_path)
    if json_path:
        console.write_json({"card": card, "drafters": results}, json_path)
    to_stdout = console.STDOUT not in (json_path, output_path)
    _show(measured, to_stdout=to_stdout)
    if deployment:
        _show_speedups(measured, deployment, f"expected on {hardware}, one request at a time", to_stdout=to_stdout)
    for path in (output_path, trace_path):
        if path and path != console.STDOUT:
            console.say(f"written to {path}")


def _generated(
    prompts: Sequence[Prompt],
    config: EngineConfig,
    specs: Sequence[str],
    *,
    framing: flags.Framing,
    params: SamplingParams,
    depth: int | None,
) -> tuple[list[MeasuredDrafter], LoadedEngine]:
    """Each drafter along the model's answers, and the engine of the last one."""
    from wager.cli.loading import open_engine
    from wager.models.companions import drafter_fingerprint
    from wager.profiling.acceptance import record_drafts

    measured: list[MeasuredDrafter] = []
    with console.meter("answers") as update:
        on_output = count_answers(update, "Answering and drafting", len(prompts) * len(specs))
        fixed = config.with_options(prefix_cache=False, policy="fixed", depth=1)
        others = [fixed.with_options(drafter=spec) for spec in specs[1:]]
        engine = open_engine(fixed.with_options(drafter=specs[0]), shared_by=others)
        for spec in specs:
            if measured:
                engine = open_engine(fixed.with_options(drafter=spec), like=engine)
            name = spec if engine.drafter_name in [drafter.name for drafter in measured] else engine.drafter_name
            requests = to_requests(prompts, engine.tokenizer, framing=framing, params=params)
            recording = record_drafts(engine, requests, depth=depth, concurrency=_CONCURRENCY, on_output=on_output)
            [own] = parse_drafters(spec)
            target = engine.target.opened
            read = drafter_fingerprint(own, target.path)
            fingerprints = {**target.fingerprints, "drafter_fingerprint": read}
            measured.append(MeasuredDrafter(name, recording, prompts, fingerprints))
    return measured, engine


# ---- recorded answers ------------------------------------------------------------------------------------------------

_TEXT_DRAFTERS = ("ngram", "suffix", "auto")

_RECORDED_FLAGS = {"recorded", "hardware", "file", "path", "limit", "model", "drafter", "depth", "raw", "system"}
_RECORDED_FLAGS |= {"output_path", "trace_path", "json_path"}
"""Options that have an effect with --recorded."""


def _check_recorded(hardware: str | None, *, recorded: bool) -> None:
    """UsageError for options without effect."""
    if hardware is not None and not recorded:
        raise UsageError("--hardware has no effect without --recorded.", "Use `wager plan --acceptance` (see -o).")
    if recorded:
        flags.refuse(flags.given().keys() - _RECORDED_FLAGS, "with --recorded: no model runs")


def _replayed(
    prompts: Sequence[Prompt], model: str, specs: Sequence[str], *, framing: flags.Framing, depth: int | None
) -> tuple[list[MeasuredDrafter], list[Prompt], dict[str, Any]]:
    """Each drafter along the answers of the log, the prompts that have one, and the conditions. Of the model its
    tokenizer is read, and what tells it from others."""
    from wager.bench.machine import card
    from wager.draft.registry import DrafterParts, build_drafter
    from wager.loading.drafters import open_store, shipped_store
    from wager.models.companions import drafter_fingerprint
    from wager.models.opening import fingerprints, open_model
    from wager.models.tokenizer import num_tokens
    from wager.profiling.acceptance import replay_drafts

    answered = [prompt for prompt in prompts if prompt.answer]
    if not answered:
        hint = 'A row has an "answer", "completion" or "response", or is a conversation (docs/acceptance.md).'
        raise UsageError("No request of the log has an answer.", hint)
    if len(answered) < len(prompts):
        console.say(f"{len(prompts) - len(answered)} of {len(prompts)} requests have no answer and are left out.")
    parsed = {text: spec for text in specs for spec in parse_drafters(text)}
    for spec in parsed.values():
        if not spec.reads_texts_alone:
            raise UsageError(f"Drafter {spec} needs a model that runs, and with --recorded none does.", "Leave it out.")
    _, weights, tokenizer = open_model(model)
    stores = {
        spec: open_store(Path(spec.argument or ""), tokenizer) if spec.name == "store" else None
        for text, spec in parsed.items()
        if text != "auto"
    }
    if "auto" in parsed:
        shipped = shipped_store(tokenizer)
        stores.setdefault(DrafterSpec("store", str(shipped.path)) if shipped else parsed["auto"], shipped)
    origin = fingerprints(weights, tokenizer)
    measured: list[MeasuredDrafter] = []
    with console.meter("answers") as update:
        pairs = [
            (
                framing.encode(tokenizer, prompt.content),
                encode_answer(tokenizer, prompt.answer),
            )
            for prompt in answered
        ]
        total, done = len(pairs) * len(stores), count(1)
        for spec, store in stores.items():
            drafter = build_drafter(spec, DrafterParts(num_tokens(tokenizer), store=store))
            recording = replay_drafts(
                drafter, pairs, depth=depth, on_answer=lambda: update("Drafting", next(done), total)
            )
            about = {**origin, "drafter_fingerprint": drafter_fingerprint(spec)}
            measured.append(MeasuredDrafter(spec.label, recording, answered, about))
    return measured, answered, card(model=model, settings={"drafter": list(specs), "depth": depth})


def _show_speedups(measured: Sequence[MeasuredDrafter], deployment: Deployment, title: str, *, to_stdout: bool) -> None:
    """What `wager plan` expects of each drafter for one request, at its best depth."""
    from wager.planner.acceptance import AcceptanceRates, MeasuredRound
    from wager.planner.drafting import calibrated_draft_cost

    timed = deployment.cost.measured
    curves = timed.drafters if timed else {}
    rows = []
    for drafter in measured:
        total = drafter.total
        survival = [each.value or 0.0 for each in total.survival]
        rounds = tuple(MeasuredRound(each.tau.value or 1.0, each.lengths) for each in total.depths)
        rates = AcceptanceRates.measured(drafter.name, survival, rounds)
        planned = deployment
        if drafter.name in curves:
            planned = replace(deployment, drafter=calibrated_draft_cost(drafter.name, curves[drafter.name]))
        best = planned.choose(planned.outcomes(rates, batch=1, context=total.context or 1.0))
        rows.append([drafter.name, str(best.depth), f"{best.tokens:.2f}", f"{best.speedup:.2f}"])
    console.table(title, ["", "depth", "τ", "speed-up"], rows, to_stdout=to_stdout)


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


def _check_outputs(specs: Sequence[str], output_path: Path | None, trace_path: Path | None) -> None:
    """UsageError for results that cannot be written, before anything is measured."""
    for text in specs if trace_path else ():
        if any(spec.makes_trees for spec in parse_drafters(text)):
            raise UsageError(f"Drafter {text} makes trees, and a trace holds chains.", "Leave out --trace, or it.")
    if output_path and len(specs) > 1:
        raise UsageError(
            f"--output holds the acceptance of one drafter, and there are {len(specs)}: {', '.join(specs)}.",
            "Name one drafter, or use --json for all of them.",
        )


class MeasuredDrafter:
    """One drafter: its drafts along the answers, and its acceptance over all prompts and by category. `fingerprints`
    are those of the model and of the drafter."""

    def __init__(
        self, name: str, recording: DraftRecording, prompts: Sequence[Prompt], fingerprints: Mapping[str, str]
    ) -> None:
        self.name, self.recording, self.fingerprints = name, recording, fingerprints
        counts = AcceptanceCounts(recording.answers, recording.depth)
        self.total = counts.estimate()
        groups: dict[str, list[int]] = {}
        for index, prompt in enumerate(prompts):
            groups.setdefault(prompt.category, []).append(index)
        self.categories = {name: counts.estimate(groups[name]) for name in sorted(groups)}

    def as_dict(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The file of --output; docs/acceptance.md lists the keys."""
        conditions = ("model", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")
        return {
            **{key: settings.get(key) for key in conditions},
            **self.fingerprints,
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


def _show(measured: Sequence[MeasuredDrafter], *, to_stdout: bool) -> None:
    """Two tables for each drafter, by category and by depth; of several drafters one of them at equal guesses."""
    for drafter in measured:
        rows = [_category_row(category, estimate) for category, estimate in drafter.categories.items()]
        deepest = drafter.recording.depth
        size = f"trees of {deepest} guesses" if drafter.recording.trees else f"drafts of {deepest}"
        columns = ["", "prompts", "tokens", "coverage", "α", "τ", "S_1", f"S_{deepest}"]
        title = f"{drafter.name}, {size}, by category (95 % intervals)"
        console.table(title, columns, [*rows, _category_row("all", drafter.total)], to_stdout=to_stdout)
        columns = (
            [*DEPTH_COLUMNS[:4], "τ of k guesses", *DEPTH_COLUMNS[5:]] if drafter.recording.trees else DEPTH_COLUMNS
        )
        title = f"{drafter.name}, by depth, all prompts"
        console.table(title, columns, depth_rows(drafter.total), to_stdout=to_stdout)
    if len(measured) > 1:
        # the guesses of a round are as many rows of a step: a chain's length, a tree's nodes
        columns = ["guesses", *(drafter.name for drafter in measured)]
        taus = [[interval(rounds.tau) for rounds in drafter.total.depths] for drafter in measured]
        by_guesses = enumerate(zip_longest(*taus, fillvalue=NONE), 1)
        rows = [[str(guesses), *row] for guesses, row in by_guesses]
        console.table("τ at equal guesses, all prompts", columns, rows, to_stdout=to_stdout)


def _category_row(name: str, estimate: DrafterAcceptance) -> list[str]:
    rates = (estimate.alpha, estimate.tau, estimate.survival[0], estimate.survival[-1])
    counts = (name, str(estimate.prompts), str(estimate.tokens), f"{estimate.coverage:.0%}")
    return [*counts, *map(interval, rates)]
