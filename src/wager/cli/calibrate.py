"""`wager calibrate`: measures a model's step times on this machine, or takes those of another from a table or from the
chunks of a server; fits a latency model, tests and stores it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby, pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from wager.config import EngineConfig
from wager.drafter_spec import parse_drafters
from wager.economics.calibration import (
    FOLDER,
    Calibration,
    Setup,
    check_folder,
    find_calibration,
    remove_quick,
    sizes_of,
)
from wager.economics.surface import DraftCurve, LatencySurface, StepPoint
from wager.errors import RequestError, UsageError, WagerError
from wager.terminal import console, flags

if TYPE_CHECKING:
    from wager.bench.load import OpenAIServer
    from wager.loading.load import LoadedEngine
    from wager.profiling.calibrate import StepTimer
    from wager.profiling.external import ServedShape

DISTURBED = 0.25
"""An error (90th percentile) above this means that other programs ran meanwhile."""

_MOST_USERS, _LONGEST_PROMPT = 1024, 1 << 20

_LONGEST = 86_400
"""Seconds that a calibration may take."""

SERVED = "served"
"""The name of a server's drafter."""

_DRAFT_SHARE = 0.1
_SAME = 0.015
"""Costs of a row that differ by less, as shares of a step of one row, count as the same."""

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_SEQUENCES = ((1, 32), (1, 1024), (1, 4096), (4, 32), (4, 1024), (16, 256))


@click.command("calibrate", cls=flags.Verb, main="model drafter seconds replace table url json_path")
@flags.engine_flags(
    drafter=flags.drafter_flag(several=True, default=("ngram",)),
    only=("model", "dtype", "kv_dtype", "threads", "memory", "max_context"),
)
@click.option("--seconds", type=float, default=60.0, metavar="S", help="How long to measure.")
@click.option("--replace", is_flag=True, help="Store the result even if the stored calibration is better.")
@click.option(
    "--table",
    type=flags.InputPath(),
    metavar="FILE",
    help="Measure nothing: fit the step times of another machine in FILE, CSV or JSON with the columns rows, context, "
    "batch and seconds (docs/calibrate.md).",
)
@click.option(
    "--url",
    metavar="URL",
    help="Measure the server at URL, any with OpenAI's API, from the times of its chunks, for about --seconds.",
)
@click.option("--append", is_flag=True, help="Add to the steps in the file of --json: of the server started otherwise.")
@click.option("--concurrency", default="1,2,4,8,16", metavar="N,...", help="Requests at once that --url is asked for.")
@click.option("--prompt-tokens", default="64,512", metavar="N,...", help="Tokens of their prompts, about.")
@click.option(
    "--depth",
    metavar="N,...",
    help="Draft depths that a wager server is asked for [default: 0,1,3,7]; of another server the depth that it was "
    "started with, where its /metrics do not count draft tokens.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0.001, 86400),
    default=600.0,
    metavar="SECONDS",
    help="A request to --url without a whole answer after this time has failed.",
)
@click.option("--api-key-file", type=flags.InputPath(), help="The key of the server at --url, as for `wager bench`.")
@flags.json_flag
def command(
    *,
    config: EngineConfig,
    drafters: tuple[str, ...],
    seconds: float,
    replace: bool,
    json_path: Path | None,
    **external: Any,
) -> None:
    """Time real steps of the model on this machine and fit a latency model to them.

    Steps with 1 to 128 rows, 1 to 32 requests and short to long contexts are timed in shuffled order, and drafting with
    each --drafter. The fit is tested on steps that it was not fitted to, and stored in the user's cache folder, where
    the engine and `wager plan --hardware this` find it; one that was measured for longer and fits better is kept unless
    --replace is given. Run no other programs meanwhile.

    With --table or --url the step times are those of another machine or engine. Nothing is stored: --json writes the
    file for the --hardware of `wager plan` and `wager replay`.
    """
    from wager.cli.loading import open_engine
    from wager.loading.load import calibration_setup
    from wager.models import hub

    kind = _kind(external)
    if not 0 < seconds <= _LONGEST:
        hint = f"Give a time above 0 and at most a day, {_LONGEST} seconds, such as --seconds 60."
        raise UsageError(f"seconds = {seconds:g} is out of range.", hint)
    if kind:
        default = click.get_current_context().get_parameter_source("model") is ParameterSource.DEFAULT
        model = None if default else config.model.model
        options = {**external, "seconds": seconds, "json": json_path}
        found = (_from_table if kind == "table" else _from_server)(model, options)
        console.write_json(found.as_dict(), json_path)
        if json_path != console.STDOUT:
            _show(found)
            console.say(f"wager plan --hardware {json_path or 'FILE, written by --json FILE,'} plans with it")
        return
    folder, name = hub.cache_dir(FOLDER), Path(config.model.model).name
    check_folder(folder)
    console.say(f"Loading, and then measuring for about {seconds:g} s (--seconds). Run no other programs meanwhile.")
    specs = ",".join(drafters).split(",")
    drafting = [config.with_options(drafter=spec, policy="fixed") for spec in specs]
    engine = open_engine(config.with_options(drafter="none"), shared_by=drafting)
    current = calibration_setup(
        engine.kernels, engine.spec, model=name, dtype=engine.target.opened.formats(engine.kernels)
    )
    calibration = _measure(engine, current, config, specs, seconds=seconds)
    _store(calibration, folder, replace=replace, json_path=json_path)


_RESULT = {"model", "json_path"}
_FLAGS = {
    "table": {*_RESULT, "table"},
    "url": {*_RESULT, "url", "append", "seconds", "concurrency", "prompt_tokens", "depth", "timeout", "api_key_file"},
}
"""Options that have an effect with --table and with --url; of those that both lack, none has."""


def _kind(external: Mapping[str, Any]) -> str | None:
    """`table`, `url`, or None for this machine. UsageError for an option without effect."""
    kind = next((name for name in _FLAGS if external[name]), None)
    if kind:
        flags.refuse(flags.given().keys() - _FLAGS[kind], f"with --{kind}")
    else:
        flags.refuse(external, "without --url or --table")
    return kind


def _from_table(model: str | None, options: Mapping[str, Any]) -> Calibration:
    from wager.planner.calibrated import known_spec
    from wager.profiling.external import read_table

    path = options["table"]
    if model is None:
        raise UsageError(f"{path} does not say whose step times it holds.", "Name the model: --model Llama-3.1-8B.")
    points, unused = read_table(path)
    if unused:
        console.say(f"columns of {path} that are not used: {', '.join(unused)}")
    spec, precision = known_spec(model)
    setup = Setup(path.stem, model, sizes_of(spec), f"a table of {len(points)} steps", None, precision.weights.name)
    return Calibration.cross_validate(setup, points, seconds=0.0)


def _from_server(model: str | None, options: Mapping[str, Any]) -> Calibration:
    """Measure a server; with --append beside what was measured before. What the times hold is said."""
    from wager.bench import load
    from wager.cli.measuring import read_key
    from wager.planner.calibrated import known_spec
    from wager.profiling.external import measure_server

    server = load.OpenAIServer.parse(options["url"], key=read_key(options["api_key_file"]))
    software = load.ask_model(server)
    spec, precision = known_spec(model or software["id"])
    by = software["owned_by"] or software["header"] or "a server that does not name itself"
    setup = Setup(server.host, model or software["id"], sizes_of(spec), f"served by {by}", None, precision.weights.name)
    before = _before(setup, options["json"]) if options["append"] else ()
    server = _answering(server, dict.fromkeys((setup.model, software["id"])), timeout=options["timeout"])
    wager = software["owned_by"] == "wager"
    shapes = _shapes(options, (0, 1, 3, 7) if wager else (None,))
    if not wager and len({shape.depth for shape in shapes}) > 1:
        raise UsageError(f"--depth {options['depth']}: only wager can be asked for several.", "Give the server's own.")
    console.say(f"Asking the server for about {options['seconds']:g} s (--seconds).")
    with console.meter("seconds") as update:
        found = measure_server(
            server,
            shapes,
            seconds=options["seconds"],
            timeout=options["timeout"],
            clock=time.perf_counter,
            counted=wager,
            fields=_speculation if wager else lambda _shape: {},
            report=lambda passed: update("Asking", int(passed), math.ceil(options["seconds"])),
        )
    for reason, shapes_of in groupby(sorted(found.missed, key=found.missed.__getitem__), found.missed.__getitem__):
        names = ", ".join(f"{shape.users} x {shape.prompt}" for shape in shapes_of)
        console.say(f"not measured, requests x tokens of their prompts {names}: {reason}")
    points = [*before, *found.points]
    if not found.points:
        raise WagerError("No step of the server was measured.", "Give longer --timeout, or fewer --concurrency.")
    for line in _caveats(points, merged=found.tokens / max(1, found.chunks)):
        console.say(line)
    return Calibration.cross_validate(setup, points, seconds=options["seconds"], speculation=SERVED)


def _shapes(options: Mapping[str, Any], depths: Sequence[int | None]) -> list[ServedShape]:
    """Every combination of the options, with these depths where none are given. UsageError for one out of range."""
    from wager.economics.options import DEEPEST
    from wager.planner.inputs import parse_integers
    from wager.profiling.external import ServedShape

    limits = {"concurrency": (1, _MOST_USERS), "prompt-tokens": (1, _LONGEST_PROMPT), "depth": (0, DEEPEST)}
    chosen: dict[str, Sequence[int | None]] = {"depth": depths}
    for name, (least, most) in limits.items():
        text = options[name.replace("-", "_")]
        if text is not None:
            values = chosen[name] = parse_integers(name, text)
            if not least <= min(values) <= max(values) <= most:
                raise UsageError(f"--{name} {text} is out of range.", f"Each is from {least} to {most}.")
    return [ServedShape(*shape) for shape in product(*(chosen[name] for name in limits))]  # type: ignore[arg-type]


def _speculation(shape: ServedShape) -> dict[str, Any]:
    return {"speculation": {"depth": shape.depth} if shape.depth else "off"}


def _answering(server: OpenAIServer, names: Iterable[str], *, timeout: float) -> OpenAIServer:
    """The server as it can be asked: for the first of these models that it answers for, and for answers that do not end
    early, if it knows the field. WagerError if it answers in no way."""
    from wager.bench.load import find_fields
    from wager.prompts import Prompt

    prompt = Prompt(0, "", "one two three")
    plain = server.with_fields(temperature=0, stream=True, stream_options={"include_usage": True}, max_tokens=16)
    ways = [{"model": name, **extra} for name in names for extra in ({"ignore_eos": True}, {})]
    for fields in ways[:-1]:
        with suppress(RequestError):
            return find_fields(plain.with_fields(**fields), prompt, timeout=timeout)
    return find_fields(plain.with_fields(**ways[-1]), prompt, timeout=timeout)


def _before(setup: Setup, path: Path | None) -> tuple[StepPoint, ...]:
    """The steps that a file holds; UsageError if they are of another server or model."""
    if path is None or path == console.STDOUT:
        raise UsageError("--append needs a file with steps.", "Give it with --json FILE.")
    stored = Calibration.read(path)
    differing = stored.setup.differences(setup)
    if differing:
        raise UsageError(f"The calibration in {path} was made for {', '.join(differing)}.", "Give another --json.")
    return stored.points


def _caveats(points: Sequence[StepPoint], *, merged: float) -> Iterator[str]:
    """What the times of chunks do not tell apart, as far as it concerns these."""
    yield (
        "These are times between chunks while all requests decode. The server's scheduling and HTTP, the network and "
        "this client are part of them."
    )
    if not any(point.drafted for point in points):
        yield (
            "No step with draft tokens was measured: rows cannot be told from requests and are priced as more of "
            "these. Start the server with speculation, and measure it with --append."
        )
    elif all(point.drafted for point in points):
        yield (
            "No step without draft tokens was measured: what drafting takes is part of the rows. Start the server "
            "without speculation, and measure it with --append."
        )
    else:
        depths = {round(point.rows / point.requests - 1) for point in points if point.drafted}
        one = "" if len(depths) > 1 else " (of one depth: half of it is counted for each call, half by the depth)"
        yield f"What steps with draft tokens take beyond their rows is the time of the drafter {SERVED!r}{one}."
    if merged > 1:
        yield f"A chunk had {merged:.2f} tokens."


def _measure(
    engine: LoadedEngine, setup: Setup, config: EngineConfig, drafters: Sequence[str], *, seconds: float
) -> Calibration:
    """Time drafting with each drafter, and then steps."""
    from wager.cli.loading import open_engine
    from wager.engine.proposer import Proposer
    from wager.models.companions import drafter_fingerprint
    from wager.models.tokenizer import num_tokens
    from wager.profiling.calibrate import calibrate, time_drafting

    timer, vocab = _step_timer(engine), engine.target.decoder.vocab
    curves: dict[str, DraftCurve] = {}
    for spec in drafters:
        drafting = open_engine(config.with_options(drafter=spec, policy="fixed"), like=engine)
        timer.start_sequences((timer.limits.text_lengths()[-1],))
        pool = drafting.scheduler.block_pool
        # There may be places for the recurrent states of fewer texts; no drafter reads the cache of such a target.
        reserve = pool.reserve if engine.spec.recurrent is None else lambda seq_id, positions: True
        for name, drafter in drafting.proposer.drafters.items():
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
                reserve=reserve,
            )
            [own] = parse_drafters(spec)
            curves[name].fingerprint = drafter_fingerprint(own, engine.target.opened.path)
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
    if setup.foreign and errors.p90 > DISTURBED:
        lines.append("The error is large: the steps scatter, or depend on more than rows, requests and contexts.")
    elif errors.p90 > DISTURBED:
        lines.append("The error is large: other programs ran meanwhile, or too little was timed. Calibrate again.")
    for line in lines:
        click.echo(console.wrapped(line))


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
