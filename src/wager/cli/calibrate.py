"""`wager calibrate`: what a step costs on this machine, for this model: measured, fitted, judged, stored."""

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

from wager.cli import console, flags
from wager.config import EngineConfig
from wager.economics.latency.calibration import FOLDER, Calibration, find
from wager.economics.latency.draft_curve import DraftCurve
from wager.economics.latency.surface import LatencySurface
from wager.errors import UsageError

if TYPE_CHECKING:
    from wager.build.load import LoadedEngine
    from wager.profiling.timed_steps import Stage

DISTURBED = 0.25
"""An error (90th percentile) above this says that something else ran meanwhile."""

_DRAFT_SHARE = 0.1
_SAME = 0.015
"""Prices of a row this close, in one-row steps, are one tread of the staircase."""

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_SEQUENCES = ((1, 32), (1, 1024), (1, 4096), (4, 32), (4, 1024), (16, 256))


@click.command("calibrate")
@flags.engine_flags(
    drafter=flags.drafter_flag(several=True, default=("ngram",)),
    only=("model", "kernels", "threads", "memory", "max_context"),
)
@click.option("--seconds", type=float, default=60.0, show_default=True, metavar="S", help="Measure for about so long.")
@click.option(
    "--check",
    "checking",
    is_flag=True,
    help="Store nothing: predict steps of freshly drawn shapes with what is stored, and say how far off it is.",
)
@flags.json_flag
def command(
    *, config: EngineConfig, drafters: tuple[str, ...], seconds: float, checking: bool, json_path: Path | None
) -> None:
    """Time real steps of the model on this machine and fit what a step costs.

    Steps with 1 to 128 rows, 1 to 32 requests and short to long contexts are timed in shuffled rounds, and drafting
    with each --drafter. The fit is judged by other steps, which it never saw, and stored in the user's cache folder,
    where `wager plan --hardware this` finds it. Leave the machine alone meanwhile.
    """
    from wager.cli.loading import open_engine
    from wager.models import hub
    from wager.profiling import calibrate as calibrating

    if not 0 < seconds < math.inf:
        raise UsageError(f"seconds = {seconds:g} is out of range.", "Measure for more than no time: --seconds 60.")
    console.check_writable(json_path)
    engine = open_engine(config.with_options(drafter="none"))
    folder, name = hub.cache_dir(FOLDER), Path(config.model.model).name
    setup = calibrating.setup(engine.kernels, engine.spec, model=name)
    if checking:
        found, why = find(folder, setup)
        if found is None:
            raise UsageError(why, f"Calibrate first: wager calibrate --model {config.model.model}.")
        _check(engine, found, seconds=seconds, json_path=json_path)
        return
    stage = _stage(engine)
    curves: dict[str, DraftCurve] = {}
    for each in ",".join(drafters).split(","):
        asked = config.with_options(drafter=each, policy="fixed")
        curve = _time_drafters(engine, stage, asked, seconds=seconds * _DRAFT_SHARE)
        if curve.keys() & curves.keys():
            raise UsageError(f"Two drafters go by the name {next(iter(curve))!r}.", "Calibrate with one of them.")
        curves |= curve
    with console.meter("seconds") as update:
        calibration = calibrating.calibrate(
            stage,
            setup,
            seconds=seconds,
            drafters=curves,
            report=lambda passed: update("Timing steps", int(passed), math.ceil(seconds)),
        )
    before, _ = find(folder, setup)
    spoilt = calibration.errors.p90 > DISTURBED
    kept = before if spoilt and before and before.errors.p90 <= DISTURBED else None
    path = None if kept else calibration.write(folder)
    if json_path:
        console.write_json({**calibration.as_dict(), "path": path and str(path)}, json_path)
    if str(json_path) != "-":
        _show(calibration)
    if kept:
        console.say(f"not stored: the one made {kept.age} is kept, which was off by {kept.errors}")
    else:
        console.say(f"stored in {path}")


def _stage(engine: LoadedEngine) -> Stage:
    from wager.models.tokenizer import IncrementalDecoder
    from wager.profiling.timed_steps import Stage

    return Stage(
        engine.runner,
        max_context=engine.scheduler.max_context,
        decoder=lambda: IncrementalDecoder(engine.tokenizer),
    )


def _time_drafters(
    engine: LoadedEngine, stage: Stage, config: EngineConfig, *, seconds: float
) -> dict[str, DraftCurve]:
    """The curves of a configuration's drafters, by the names that they go by in the engine; nothing for `none`."""
    from wager.cli.loading import open_engine
    from wager.engine.proposer import Proposer
    from wager.profiling.calibrate import time_drafting

    vocab = engine.target.decoder.vocab
    drafters = open_engine(config, like=engine).proposer.drafters
    stage.enter((stage.limits.texts()[-1],))
    curves = {
        name: time_drafting(
            Proposer(drafter, vocab=vocab),
            vocab=vocab,
            seconds=seconds,
            clock=time.perf_counter,
            between=lambda: stage.step((3,)),
        )
        for name, drafter in drafters.items()
    }
    stage.leave()
    return curves


def _check(engine: LoadedEngine, calibration: Calibration, *, seconds: float, json_path: Path | None) -> None:
    from wager.profiling import calibrate as calibrating

    with console.meter("seconds") as update:
        found = calibrating.check(
            _stage(engine),
            calibration,
            seconds=seconds,
            seed=secrets.randbits(32),
            report=lambda passed: update("Timing steps", int(passed), math.ceil(seconds)),
        )
    if json_path:
        console.write_json({"setup": asdict(calibration.setup), **asdict(found)}, json_path)
    if str(json_path) != "-":
        click.echo(f"{found.stored.count} steps of freshly drawn shapes, calibrated {calibration.age}:")
        click.echo(f"  as stored: off by {found.stored}")
        click.echo(f"  corrected by the steps before, as in the engine: off by {found.corrected}")


# ---- in words and figures -----------------------------------------------------------------------------------------


def _show(calibration: Calibration) -> None:
    setup, surface = calibration.setup, calibration.surface()
    threads = f", {setup.threads} threads" if setup.threads else ""
    title = f"Milliseconds of a step: {setup.model}, {setup.kernels}{threads}, {setup.machine}"
    columns = ["requests x context", *(f"{rows} rows" if rows > 1 else "1 row" for rows in _ROWS)]
    console.table(title, columns, _table(calibration), to_stdout=True)
    for line in (*_prices(surface), *_drafting(surface), *_judgement(calibration)):
        click.echo(click.wrap_text(line, width=100, subsequent_indent="  "))


def _table(calibration: Calibration) -> list[list[str]]:
    """Milliseconds by rows, for requests and contexts that were timed or lie between."""
    surface, points = calibration.surface(), calibration.points
    most, longest = max(p.requests for p in points), max(p.context_sum / p.requests for p in points)
    return [
        [f"{requests} x {context}",
         *(f"{1e3 * surface.seconds(rows, requests, requests * context):.2f}" if rows >= requests else "–"
           for rows in _ROWS)]
        for requests, context in _SEQUENCES if requests <= most and context <= longest
    ]  # fmt: skip


def _prices(surface: LatencySurface) -> list[str]:
    """What one more row costs, tread by tread, and what contexts cost."""
    one = surface.seconds(1, 1, 0)
    words = [f"{price:.1%}{' of a one-row step' if not at else ''} up to {rows} rows"
             for at, (rows, price) in enumerate(staircase(surface))]  # fmt: skip
    return [
        f"Another row costs {', then '.join(words)}.",
        f"A step of one row takes {1e3 * one:.2f} ms; another request adds {1e6 * surface.per_request:.0f} µs; 1000 "
        f"cached positions add {1e9 * surface.per_context:.0f} µs to a request and {1e9 * surface.per_pair:.0f} µs to "
        "each of its rows.",
    ]


def staircase(surface: LatencySurface) -> list[tuple[int, float]]:
    """Runs of rows with about the same price: the last row of each, and what a row costs in one-row steps."""
    one = surface.seconds(1, 1, 0)
    treads: list[tuple[int, int]] = []

    def price(left: int, right: int) -> float:
        return max(0.0, surface.seconds(right, 1, 0) - surface.seconds(left, 1, 0)) / one / (right - left)

    for left, right in pairwise(_ROWS):
        before = treads[-1] if treads else (left, right)
        alike = abs(price(left, right) - price(*before)) <= max(_SAME, 0.35 * price(*before))
        treads = [*treads[:-1], (before[0], right)] if alike else [*treads, (left, right)]
    return [(right, price(left, right)) for left, right in treads]


def _drafting(surface: LatencySurface) -> list[str]:
    return [
        f"Drafting 4 guesses with {name} takes {1e6 * surface.draft_seconds(name, 1, 4):.0f} µs for one request, "
        f"{1e6 * surface.draft_seconds(name, 16, 4):.0f} µs for 16."
        for name in surface.drafters
    ]


def _judgement(calibration: Calibration) -> Sequence[str]:
    errors = calibration.errors
    said = f"On {errors.count} kinds of step that were not fitted the prediction is off by {errors}."
    if errors.p90 > DISTURBED:
        return [said, "That is much: something else ran meanwhile, or too little was timed. Calibrate again."]
    return [said]
