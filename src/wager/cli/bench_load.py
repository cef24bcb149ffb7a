"""`wager bench --url`: the load client of bench/load_client.py on the command line."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from wager.bench.workload import Prompt
from wager.cli import load_inputs
from wager.errors import UsageError, WagerError
from wager.terminal import console, flags
from wager.types import SamplingParams

if TYPE_CHECKING:
    from wager.bench.load_answer import TimedAnswer
    from wager.bench.load_client import LoadPlan, LoadRun
    from wager.bench.load_target import LoadTarget
    from wager.bench.slo import ServiceLevel

_LOAD_FLAGS = (
    click.option(
        "--url",
        metavar="URL",
        help="Measure the server at URL, any with OpenAI's API, in place of an engine of this process: "
        "--concurrency users, or --rate. See docs/bench-load.md.",
    ),
    click.option(
        "--rate",
        type=click.FloatRange(1e-3, 1e5),
        metavar="R",
        help="Requests a second, arriving at random (Poisson) whether or not earlier ones are answered.",
    ),
    click.option(
        "--requests",
        type=click.IntRange(1, 10_000_000),
        metavar="N",
        help="Requests to send.  [default: one for each prompt, or with --duration no limit]",
    ),
    click.option(
        "--first",
        type=click.IntRange(0, 1_000_000_000),
        default=0,
        show_default=True,
        metavar="N",
        help="Number of the first request. Runs against one server take others, so that it has seen no prompt before.",
    ),
    click.option("--duration", metavar="TIME", help="Send no request after this time, such as 60s."),
    click.option(
        "--warm-up",
        "warm_up",
        type=click.IntRange(1, 10_000),
        default=4,
        show_default=True,
        metavar="N",
        help="Short requests that are not measured, before the others.",
    ),
    click.option(
        "--timeout",
        default="600s",
        show_default=True,
        metavar="TIME",
        help="A request without a whole answer after this time has failed.",
    ),
    click.option(
        "--slo",
        metavar="NAME:TIME,...",
        help="Count the requests that keep these: ttft, itl (longest), tpot, e2e, as ttft:500ms,itl:50ms.",
    ),
    click.option("--body", metavar="JSON", help="Fields added to every request, as an object; null removes a field."),
    click.option(
        "--chunk-usage",
        "chunk_usage",
        is_flag=True,
        help="Ask for the tokens of every chunk (vLLM's continuous_usage_stats) if the server knows how.",
    ),
    click.option(
        "--api-key-file",
        "api_key_file",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help=f"The server's key.  [default: the environment variable {load_inputs.KEY_VARIABLE}, if set]",
    ),
    click.option(
        "--compare-with",
        "compare_with",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Compare with an earlier result of --url, as --json wrote it.",
    ),
    click.option(
        "--plot",
        type=flags.OutputPath(),
        metavar="FILE",
        help="Plot the measured server's times and its run to a .png, .svg or .pdf file.",
    ),
)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options of `wager bench` that are for servers alone, as given."""

    url: str
    rate: float | None
    requests: int | None
    first: int
    duration: str | None
    warm_up: int
    timeout: str
    slo: str | None
    body: str | None
    chunk_usage: bool
    api_key_file: Path | None
    compare_with: Path | None
    plot: Path | None


def load_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """--url and what belongs to it; the command receives `load`, which is None without --url. UsageError for options
    that have no effect with it, or without it."""

    @functools.wraps(function)
    def command(**values: Any) -> Any:
        given = {name: values.pop(name) for name in LoadOptions.__slots__}
        kept = {
            "model",
            "concurrency",
            "file",
            "path",
            "limit",
            "raw",
            "system",
            "seed",
            "stop",
            "max_tokens",
            "temperature",
            "json_path",
            *flags.SAMPLING_HELP,
        }
        for param in click.get_current_context().command.params:
            name = param.name or ""
            if click.get_current_context().get_parameter_source(name) is not ParameterSource.COMMANDLINE:
                continue
            if given["url"] is None and name in given:
                raise UsageError(f"{param.opts[0]} has no effect without --url.", "Give the URL of a server.")
            if given["url"] is not None and name not in (*given, *kept):
                raise UsageError(f"{param.opts[0]} has no effect with --url.", "It is an option of the server's own.")
        return function(load=None if given["url"] is None else LoadOptions(**given), **values)

    return flags.add(list(_LOAD_FLAGS))(command)


@dataclass(frozen=True, slots=True)
class LoadQuery:
    """What is asked of which server, parsed and checked."""

    target: LoadTarget
    plan: LoadPlan
    prompts: Sequence[Prompt]
    slo: ServiceLevel | None
    before: dict[str, Any] | None
    settings: dict[str, Any]


def measure_server(
    load: LoadOptions,
    prompts: Sequence[Prompt],
    *,
    framing: flags.Framing,
    params: SamplingParams,
    model: str,
    concurrency: int,
    json_path: Path | None,
) -> None:
    """Run the load test, write its results and show them. WagerError if no request was answered."""
    if load.plot:
        from wager.cli import load_plots

        load_plots.check_suffix(load.plot)
    from wager.cli import load_loop

    query = _query(load, prompts, framing, params, concurrency)
    source = click.get_current_context().get_parameter_source("model")
    named = model if source is not ParameterSource.DEFAULT else None
    run, loop = load_loop.run(_measure(query, load.warm_up, named))
    result = _result(query, run, loop)
    if json_path:
        console.write_json(result, json_path)
    if load.plot:
        load_plots.write(result, query.before, load.plot)
    from wager.cli import load_text

    load_text.show(result, to_stdout=str(json_path) != "-")
    if not result["summary"]["ok"]:
        worst = (result["summary"]["failures"] or [{"message": "none was sent"}])[0]
        raise WagerError(f"No request was answered: {worst['message']}.", "See the table of failures.")


def _query(
    load: LoadOptions, prompts: Sequence[Prompt], framing: flags.Framing, params: SamplingParams, concurrency: int
) -> LoadQuery:
    import time

    from wager.bench import load_comparison, load_http, load_target
    from wager.bench.load_client import LoadPlan
    from wager.bench.slo import ServiceLevel

    server = load_http.ServerAddress.parse(load.url)
    given = click.get_current_context().get_parameter_source("concurrency")
    if load.rate is not None and given is ParameterSource.DEFAULT:
        concurrency = flags.MOST_CONCURRENT
    plan = LoadPlan(
        concurrency=concurrency,
        rate=load.rate,
        requests=load.requests or (None if load.duration else len(prompts)),
        duration=load_inputs.seconds("--duration", load.duration),
        timeout=load_inputs.seconds("--timeout", load.timeout) or 0.0,
        seed=params.seed or 0,
        first=load.first,
    )
    form = load_target.RequestForm(
        model="",
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        seed=params.seed,
        messages=None if framing.raw else framing.messages,
        options={**load_inputs.other_fields(params), **load_inputs.body_fields(load.body)},
        stream_options=load_target.USAGE_BY_CHUNK if load.chunk_usage else load_target.USAGE,
    )
    connections = load_http.Connections(server, time.perf_counter)
    target = load_target.LoadTarget(server, connections, form, load_inputs.read_key(load.api_key_file))
    before = load_comparison.read_result(load.compare_with) if load.compare_with else None
    slo = ServiceLevel.parse(load.slo) if load.slo else None
    return LoadQuery(target, plan, prompts, slo, before, _settings(load, plan, params, framing))


def _settings(load: LoadOptions, plan: LoadPlan, params: SamplingParams, framing: flags.Framing) -> dict[str, Any]:
    """Every option of the measurement, by name; of the key only that there is none."""
    options = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(load).items()}
    options.pop("api_key_file")
    settings = {**options, **asdict(params), **asdict(framing), **asdict(plan)}
    return dict(json.loads(json.dumps(settings)))  # as an earlier result has them


async def _measure(query: LoadQuery, warm_up: int, model: str | None) -> LoadRun:
    from dataclasses import replace

    from wager.bench.load_client import LoadClient

    target, plan = query.target, query.plan
    _allow_sockets(plan.concurrency)
    try:
        target.form = replace(target.form, model=model or await target.ask_model())
        await target.warm_up(warm_up, plan.concurrency)
        with console.meter("answers") as update:
            done = 0

            def count(_answer: TimedAnswer) -> None:
                nonlocal done
                done += 1
                update("Measuring", done, max(done, plan.requests or done + 1))

            return await LoadClient(plan, target.connections, target.asks(query.prompts), on_answer=count).run()
    finally:
        target.connections.close()


def _allow_sockets(count: int) -> None:
    """Raise this process's limit of open files, as far as the system lets it, so that it holds that many sockets."""
    with suppress(ImportError, OSError, ValueError):  # Windows has neither the module nor the limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = count + 256
        if soft != resource.RLIM_INFINITY and soft < wanted:
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _result(query: LoadQuery, run: LoadRun, loop: str) -> dict[str, Any]:
    """The JSON of --json; see docs/bench-load.md."""
    from datetime import UTC, datetime

    from wager.bench import load_comparison, load_figures
    from wager.bench.machine import describe, versions

    users = query.plan.concurrency if query.plan.rate is None else None
    figures = load_figures.LoadFigures(run, users=users, slo=query.slo)
    result: dict[str, Any] = {
        "card": {
            "kind": load_comparison.KIND,
            "model": query.target.form.model,
            "url": query.target.server.url,
            "server": dict(query.target.software),
            "stream_options": query.target.form.stream_options,
            "prompts": len(query.prompts),
            "loop": loop,
            "machine": describe().as_dict(),
            "settings": query.settings,
            "versions": versions(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        },
        "rows": load_figures.rows(run.answers, query.slo),
        "summary": figures.summary(),
        "distributions": figures.distributions(),
        "timeline": figures.timeline(),
    }
    if query.before:
        result["compare"] = load_comparison.compare(result, query.before)
    return result
