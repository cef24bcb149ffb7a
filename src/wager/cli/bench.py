"""`wager bench`: speed on a set of prompts, and with --compare the speed-up over plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wager.bench.workload import Prompt
from wager.cli import bench_load
from wager.config import EngineConfig
from wager.errors import UsageError
from wager.terminal import console, flags
from wager.types import OutputDelta, Request, SamplingParams

if TYPE_CHECKING:
    from wager.bench.measure import DecodeSteps, Measurement
    from wager.loading.load import LoadedEngine
    from wager.prompts import ChatTokenizer

FAST, PLAIN = "speculative", "plain"


@click.command("bench", cls=flags.Verb)
@flags.prompts_flags()
@click.option("--compare", is_flag=True, help="Run plain decoding too, in turns, and report the speed-up.")
@click.option(
    "--repeat",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    metavar="N",
    help="Passes over the prompts; times are medians over the passes.",
)
@click.option("--quality", is_flag=True, help="Compare the logits with those of bf16 weights on a fixed text first.")
@flags.framing_flags
@flags.engine_flags(prefix_cache=False)
@flags.sampling_flags(max_tokens=128, seed=0)
@flags.concurrency_flag
@flags.json_flag
@bench_load.load_flags
def command(
    *,
    prompts: list[Prompt],
    compare: bool,
    repeat: int,
    quality: bool,
    framing: flags.Framing,
    config: EngineConfig,
    params: SamplingParams,
    concurrency: int,
    json_path: Path | None,
    load: bench_load.LoadOptions | None,
) -> None:
    """Answer the prompts of FILE and report speed by task family.

    FILE holds one JSON object per line, {"id", "category", "prompt"} or Spec-Bench's {"question_id", "category",
    "turns"} (first turn). Without FILE a small set that comes with wager is used. The prefix cache is off by default.

    With --url a server answers them, under load, and the times are those its users see.
    """
    from wager.bench import measure

    if load:
        bench_load.measure_server(
            load,
            prompts,
            framing=framing,
            params=params,
            model=config.model.model,
            concurrency=concurrency,
            json_path=json_path,
        )
        return
    engines = _open_engines(config, compare=compare)
    found = _quality(engines[FAST]) if quality else None
    steps = {name: measure.DecodeSteps(concurrency) for name in engines}
    for name, engine in engines.items():
        engine.on_step = steps[name].add
    requests = to_requests(prompts, engines[FAST].tokenizer, framing=framing, params=params)
    with console.meter("answers") as update:
        records = measure.measure(
            engines,
            requests,
            concurrency=concurrency,
            repeats=repeat,
            on_output=count_answers(update, "Measuring", len(requests) * len(engines) * repeat),
        )
    settings = {**settings_of(config, params, framing), "concurrency": concurrency, "repeats": repeat}
    form = engines[FAST].target.decoder.weight_form
    card = {**card_of(config, engines[FAST], settings), "weights": form, "quality": found}
    result = _result(prompts, records, steps, card)
    if ahead := engines[FAST].ahead:
        result["summary"]["ahead"] = {name: figures.as_dict() for name, figures in ahead.items()}
    if json_path:
        console.write_json(result, json_path)
    for name, figures in ahead.items():
        console.say(f"{name}, ahead of the target: {figures}")
    _show(result, to_stdout=str(json_path) != "-")


def _open_engines(config: EngineConfig, *, compare: bool) -> dict[str, LoadedEngine]:
    """The engine to measure and, to compare, one of plain decoding on the same model."""
    from wager.cli.loading import open_engine

    if compare and config.speculation.drafter == "none":
        raise UsageError("--compare has nothing to compare: --drafter is none already.", "Name a drafter.")
    if compare and config.capacity.prefix_cache:
        raise UsageError(
            "--compare and --prefix-cache do not go together: engines that take turns on one cache reuse nothing.",
            "Leave one of them out.",
        )
    engines = {FAST: open_engine(config)}
    if compare:
        engines[PLAIN] = open_engine(config.with_options(drafter="none"), like=engines[FAST])
    return engines


def _quality(engine: LoadedEngine) -> dict[str, Any]:
    from wager.cli.quality import in_words, measure_quality

    found = measure_quality(engine)
    console.say(in_words(found))
    return found.as_dict()


def settings_of(config: EngineConfig, params: SamplingParams, framing: flags.Framing) -> dict[str, Any]:
    """Every option of a measurement, by its flat name."""
    return {**config.as_options(), **asdict(params), **asdict(framing)}


def card_of(config: EngineConfig, engine: LoadedEngine, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The conditions of a measurement: model, kernels, machine, settings, versions."""
    from wager.bench import report

    kernels = {"name": engine.kernels.name, "reason": engine.kernels.reason}
    return report.card(model=config.model.model, kernels=kernels, settings=settings)


def _result(
    prompts: Sequence[Prompt],
    records: Mapping[str, Measurement],
    steps: Mapping[str, DecodeSteps],
    card: dict[str, Any],
) -> dict[str, Any]:
    """The JSON of --json; see docs/bench.md."""
    from wager.bench import report

    rows = {name: report.rows(prompts, record) for name, record in records.items()}
    walls = {name: record.wall_s for name, record in records.items()}
    result: dict[str, Any] = {
        "card": card,
        "rows": rows[FAST],
        "summary": {**report.summary(rows[FAST], wall_s=walls[FAST]), "decode_steps": steps[FAST].as_dict()},
    }
    if PLAIN in records:
        ratios = report.compare(rows[PLAIN], rows[FAST], plain_wall_s=walls[PLAIN], wall_s=walls[FAST])
        plain = {**report.summary(rows[PLAIN], wall_s=walls[PLAIN]), "decode_steps": steps[PLAIN].as_dict()}
        fast_rate, plain_rate = steps[FAST].rate, steps[PLAIN].rate
        speedup = fast_rate / plain_rate if fast_rate and plain_rate else None
        result["compare"] = {"plain": plain, **ratios, "decode_step_speedup": speedup}
    return result


def to_requests(
    prompts: Sequence[Prompt], tokenizer: ChatTokenizer, *, framing: flags.Framing, params: SamplingParams
) -> list[Request]:
    """One request per prompt, by the prompt's id; '#' in an id is replaced: the engine numbers choices with it."""
    return [
        Request(str(prompt.id).replace("#", "-"), framing.encode(tokenizer, prompt.text), params) for prompt in prompts
    ]


def count_answers(update: console.Update, activity: str, total: int) -> Callable[[OutputDelta], None]:
    """A function to call with every delta, which shows how many answers have finished."""
    done = 0

    def count(delta: OutputDelta) -> None:
        nonlocal done
        if delta.finish_reason:
            done += 1
            update(activity, min(done, total), total)

    return count


def _show(result: Mapping[str, Any], *, to_stdout: bool) -> None:
    """The summary as a table: one line per family, then all."""
    summary, compare = result["summary"], result.get("compare")
    columns = ["tok/s", "prompts", "tokens", "decode", "e2e", "τ"]
    if compare:
        columns += ["decode ×", "median ×", "e2e ×", "slower", "differ"]
    lines = [(family, rates) for family, rates in summary["per_category"].items()]
    lines.append(("all", {"prompts": len(result["rows"]), **summary}))
    table = []
    for family, rates in lines:
        row = [family, str(rates["prompts"]), str(rates["tokens"]), _figure(rates["decode_tok_s"], 1)]
        row += [_figure(rates["e2e_tok_s"], 1), _figure(rates["mean_acceptance_length"], 2)]
        if compare:
            ratios = compare if family == "all" else compare["per_category"][family]
            keys = ("decode_speedup", "median_decode_speedup", "e2e_speedup")
            row += [_figure(ratios[key], 2) for key in keys] + [str(ratios["slower"]), str(ratios["differing"])]
        table.append(row)
    kernels = result["card"]["kernels"]["name"]
    speedup = compare and compare["decode_step_speedup"]
    if speedup:
        console.say(f"Steps that only decode, at full concurrency: {speedup:.2f} times plain (what plan predicts).")
    console.table(f"{result['card']['model']}, {kernels} kernels", columns, table, to_stdout=to_stdout)


def _figure(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
