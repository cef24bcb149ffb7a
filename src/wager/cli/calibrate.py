"""`wager calibrate`: measures a model's step times on this machine, fits a latency model, tests and stores it."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wager.config import EngineConfig
from wager.economics.calibration import FOLDER, Calibration, Setup, find_calibration, remove_quick
from wager.economics.surface import DraftCurve, LatencySurface
from wager.errors import UsageError
from wager.terminal import console, flags

if TYPE_CHECKING:
    from wager.loading.load import LoadedEngine
    from wager.profiling.calibrate import StepTimer

DISTURBED = 0.25
"""An error (90th percentile) above this means that other programs ran meanwhile."""

_LONGEST = 86_400
"""Seconds that a calibration may take."""

_DRAFT_SHARE = 0.1
_SAME = 0.015
"""Costs of a row that differ by less, as shares of a step of one row, count as the same."""

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_SEQUENCES = ((1, 32), (1, 1024), (1, 4096), (4, 32), (4, 1024), (16, 256))


@click.command("calibrate", cls=flags.Verb)
@flags.engine_flags(
    drafter=flags.drafter_flag(several=True, default=("ngram",)),
    only=("model", "dtype", "kv_dtype", "threads", "memory", "max_context"),
)
@click.option("--seconds", type=float, default=60.0, metavar="S", help="How long to measure.")
@click.option(
    "--check",
    "checking",
    is_flag=True,
    help="Store nothing: predict steps of random shapes from what is stored, and report the errors.",
)
@click.option("--replace", is_flag=True, help="Store the result even if the stored calibration is better.")
@flags.json_flag
def command(
    *,
    config: EngineConfig,
    drafters: tuple[str, ...],
    seconds: float,
    checking: bool,
    replace: bool,
    json_path: Path | None,
) -> None:
    """Time real steps of the model on this machine and fit a latency model to them.

    Steps with 1 to 128 rows, 1 to 32 requests and short to long contexts are timed in shuffled order, and drafting with
    each --drafter. The fit is tested on steps that it was not fitted to, and stored in the user's cache folder, where
    the engine and `wager plan --hardware this` find it; one that was measured for longer and fits better is kept unless
    --replace is given. Run no other programs meanwhile.
    """
    from wager.cli.loading import open_engine
    from wager.loading.load import calibration_setup
    from wager.models import hub

    if not 0 < seconds <= _LONGEST:
        hint = f"Give a time above 0 and at most a day, {_LONGEST} seconds, such as --seconds 60."
        raise UsageError(f"seconds = {seconds:g} is out of range.", hint)
    if checking and replace:
        raise UsageError("--check stores nothing, so --replace has no effect.", "Give one of them.")
    engine = open_engine(config.with_options(drafter="none"))
    folder, name = hub.cache_dir(FOLDER), Path(config.model.model).name
    current = calibration_setup(
        engine.kernels, engine.spec, model=name, dtype=engine.target.opened.formats(engine.kernels)
    )
    if checking:
        stored = find_calibration(folder, current)
        if stored.calibration is None:
            raise UsageError(stored.reason, f"Calibrate first: wager calibrate --model {config.model.model}.")
        _check(engine, stored.calibration, seconds=seconds, json_path=json_path)
        return
    calibration = _measure(engine, current, config, ",".join(drafters).split(","), seconds=seconds)
    _store(calibration, folder, replace=replace, json_path=json_path)


def _measure(
    engine: LoadedEngine, setup: Setup, config: EngineConfig, drafters: Sequence[str], *, seconds: float
) -> Calibration:
    """Time drafting with each drafter, and then steps."""
    from wager.cli.loading import open_engine
    from wager.engine.proposer import Proposer
    from wager.models.tokenizer import num_tokens
    from wager.profiling.calibrate import calibrate, time_drafting

    timer, vocab = _step_timer(engine), engine.target.decoder.vocab
    curves: dict[str, DraftCurve] = {}
    for spec in drafters:
        loaded = open_engine(config.with_options(drafter=spec, policy="fixed"), like=engine).proposer.drafters
        timer.start_sequences((timer.limits.text_lengths()[-1],))
        for name, drafter in loaded.items():
            if name in curves:
                raise UsageError(f"Two drafters have the name {name!r}.", "Calibrate with one of them.")
            curves[name] = time_drafting(
                Proposer(drafter, vocab=vocab),
                vocab=vocab,
                tokens=min(vocab, num_tokens(engine.tokenizer)),
                hidden=engine.spec.hidden,
                seconds=seconds * _DRAFT_SHARE,
                clock=time.perf_counter,
                between=lambda: timer.step((3,)),
            )
        timer.end_sequences()
    with console.meter("seconds") as update:
        return calibrate(
            timer,
            setup,
            seconds=seconds,
            drafters=curves,
            report=lambda passed: update("Timing steps", int(passed), math.ceil(seconds)),
        )


def _store(calibration: Calibration, folder: Path, *, replace: bool, json_path: Path | None) -> None:
    """Write and show a calibration; unless `replace`, a better one is kept, and one disturbed by other programs does
    not replace an undisturbed one."""
    previous = None if replace else find_calibration(folder, calibration.setup).calibration
    disturbed = calibration.errors.p90 > DISTURBED
    kept = None
    if previous and (previous.is_better_than(calibration) or (disturbed and previous.errors.p90 <= DISTURBED)):
        kept = previous
    path = None if kept else calibration.write(folder)
    console.write_json({**calibration.as_dict(), "path": path and str(path)}, json_path)
    if json_path != console.STDOUT:
        _show(calibration)
    if kept:
        console.say(
            f"not stored: the calibration made {kept.age} is kept, measured for {kept.seconds:g} s, whose error was "
            f"{kept.errors}; --replace stores the new one"
        )
    else:
        remove_quick(folder, calibration.setup)
        console.say(f"stored in {path}")


def _step_timer(engine: LoadedEngine) -> StepTimer:
    from wager.models.tokenizer import IncrementalDecoder
    from wager.profiling.calibrate import StepTimer

    return StepTimer(
        engine.runner,
        max_context=engine.scheduler.max_context,
        decoder=lambda prompt: IncrementalDecoder(engine.tokenizer, after=prompt),
    )


def _check(engine: LoadedEngine, calibration: Calibration, *, seconds: float, json_path: Path | None) -> None:
    from wager.profiling.calibrate import check_calibration

    with console.meter("seconds") as update:
        check = check_calibration(
            _step_timer(engine),
            calibration,
            seconds=seconds,
            seed=secrets.randbits(32),
            report=lambda passed: update("Timing steps", int(passed), math.ceil(seconds)),
        )
    console.write_json({"setup": asdict(calibration.setup), **asdict(check)}, json_path)
    if json_path != console.STDOUT:
        click.echo(f"{check.stored.count} steps of random shapes, calibrated {calibration.age}:")
        click.echo(f"  as stored: off by {check.stored}")
        click.echo(f"  corrected by the steps before, as in the engine: off by {check.corrected}")


def _show(calibration: Calibration) -> None:
    setup, surface, errors = calibration.setup, calibration.surface(), calibration.errors
    threads = f", {setup.threads} threads" if setup.threads else ""
    title = f"Milliseconds of a step: {setup.model}, {setup.kernels}{threads}, {setup.machine}"
    columns = ["requests x context", *(f"{rows} rows" if rows > 1 else "1 row" for rows in _ROWS)]
    console.table(title, columns, _table(calibration), to_stdout=True)
    costs = [
        f"{cost:.1%}{' of a one-row step' if not index else ''} up to {rows} rows"
        for index, (rows, cost) in enumerate(row_costs(surface))
    ]
    lines = [
        f"Another row costs {', then '.join(costs)}.",
        f"A step of one row takes {1e3 * surface.seconds(1, 1, 0):.2f} ms; another request adds "
        f"{1e6 * surface.per_request:.0f} µs; 1000 cached positions add {1e9 * surface.per_context:.0f} µs to a "
        f"request and {1e9 * surface.per_pair:.0f} µs to each of its rows.",
        *(
            f"Drafting 4 tokens with {name} takes {1e6 * surface.draft_seconds(name, 1, 4):.0f} µs for one request, "
            f"{1e6 * surface.draft_seconds(name, 16, 4):.0f} µs for 16."
            for name in surface.drafters
        ),
        f"On {errors.count} step shapes that were not fitted the prediction is off by {errors}.",
    ]
    if errors.p90 > DISTURBED:
        lines.append("The error is large: other programs ran meanwhile, or too little was timed. Calibrate again.")
    for line in lines:
        click.echo(click.wrap_text(line, width=100, subsequent_indent="  "))


def _table(calibration: Calibration) -> list[list[str]]:
    """Milliseconds by rows, for requests and contexts that were timed or lie between."""
    surface, points = calibration.surface(), calibration.points
    most, longest = max(p.requests for p in points), max(p.context_sum / p.requests for p in points)
    table = []
    for requests, context in _SEQUENCES:
        if requests <= most and context <= longest:
            seconds = {rows: surface.seconds(rows, requests, requests * context) for rows in _ROWS if rows >= requests}
            cells = [f"{1e3 * seconds[rows]:.2f}" if rows in seconds else "–" for rows in _ROWS]
            table.append([f"{requests} x {context}", *cells])
    return table


def row_costs(surface: LatencySurface) -> list[tuple[int, float]]:
    """The cost of another row by ranges of rows in which it is about the same: up to how many rows, and as a share of a
    step of one row."""
    one = surface.seconds(1, 1, 0)
    ranges: list[tuple[int, int]] = []

    def cost(left: int, right: int) -> float:
        return max(0.0, surface.seconds(right, 1, 0) - surface.seconds(left, 1, 0)) / one / (right - left)

    for left, right in pairwise(_ROWS):
        before = ranges[-1] if ranges else (left, right)
        same = abs(cost(left, right) - cost(*before)) <= max(_SAME, 0.35 * cost(*before))
        ranges = [*ranges[:-1], (before[0], right)] if same else [*ranges, (left, right)]
    return [(right, cost(left, right)) for left, right in ranges]
