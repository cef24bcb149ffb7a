"""`wager bench`: speed on a set of prompts, with --compare the speed-up over plain decoding, with --url a server's."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from wager.cli.measuring import (
    card_of,
    count_answers,
    duration,
    key_flag,
    longest_seconds,
    read_key,
    sampling_of,
    settings_of,
    to_requests,
)
from wager.config import EngineConfig
from wager.errors import UsageError, WagerError
from wager.inputs import shown
from wager.prompts import Prompt, read_arrivals, read_prompts, spread
from wager.terminal import console, flags
from wager.types import SamplingParams

if TYPE_CHECKING:
    from wager.bench.load import LoadRun, OpenAIServer
    from wager.bench.measure import DecodeSteps, Measurement
    from wager.loading.load import LoadedEngine

FAST, PLAIN = "speculative", "plain"

_QUALITY_ROWS = 128

_SHARED_FLAGS = {"model", "concurrency", "file", "path", "limit", "raw", "system", "seed", "stop", "max_tokens"}
_SHARED_FLAGS |= {"temperature", "json_path", *flags.SAMPLING_HELP}
"""Options that have an effect with --url and without."""


@click.command(
    "bench",
    cls=flags.Verb,
    main="compare repeat quality limit model drafter depth temperature max_tokens concurrency json_path url "
    "requests replay",
)
@flags.prompts_flags()
@click.option("--compare", is_flag=True, help="Run plain decoding too, in turns, and report the speed-up.")
@click.option(
    "--repeat", type=flags.Count(1, 1000), default=1, help="Passes over the prompts; times are medians over the passes."
)
@click.option("--quality", is_flag=True, help="Compare the logits with those of bf16 weights on a fixed text first.")
@flags.framing_flags
@flags.engine_flags(prefix_cache=False)
@flags.sampling_flags(max_tokens=128, seed=0)
@flags.concurrency_flag
@flags.json_flag
@click.option(
    "--url",
    metavar="URL",
    help="Measure the server at URL, any with OpenAI's API, with --concurrency users. See docs/bench-load.md.",
)
@click.option("--requests", type=flags.Count(1, 10_000_000), help="Requests to send.  [default: one for each prompt]")
@click.option(
    "--replay",
    type=flags.InputPath(),
    help="Send each request of a log at its recorded time, whatever is outstanding; with FILE the prompts of FILE at "
    "the times of the log.",
)
@click.option(
    "--speed",
    type=click.FloatRange(0, 1e6, min_open=True),
    default=1.0,
    metavar="X",
    help="How many times as fast as recorded a log is replayed.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0.001, 86400),
    default=600.0,
    metavar="SECONDS",
    help="A request without a whole answer after this time has failed.",
)
@click.option(
    "--acceptance",
    is_flag=True,
    help="Report acceptance by category too: wager's answers say it; other servers are asked one category after "
    "the other, and their /metrics read between.",
)
@click.option("--body", metavar="JSON", help="Fields added to every request; null removes a field.")
@click.option(
    "--acceptance-file",
    "acceptance_path",
    type=flags.OutputPath(),
    metavar="FILE",
    help="Write the server's acceptance by depth over the run, as `wager acceptance --metrics` does.",
)
@key_flag
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
    **server: Any,
) -> None:
    """Answer the prompts of FILE and report speed by category.

    FILE holds one JSON object per line: {"prompt"}, {"messages"}, a body of OpenAI's batch API, a recorded
    conversation, or another form that docs/bench.md lists, with a "category" if there is one. Without FILE a small set
    that comes with wager is used. The prefix cache is off by default.

    With --url a server answers them, and the times are those its users see.
    """
    from wager.bench import measure
    from wager.cli.loading import open_engine

    given = flags.given()
    if server["url"]:
        flags.refuse(given.keys() - server.keys() - _SHARED_FLAGS, "with --url", "It is an option of the server's own.")
    else:
        flags.refuse(server, "without --url", "Give the URL of a server.")
    if not server["replay"]:
        flags.refuse(("speed",), "without --replay", "Give a log.")
    if server["url"]:
        default = click.get_current_context().get_parameter_source("model") is ParameterSource.DEFAULT
        server |= {"model": None if default else config.model.model, "concurrency": concurrency}
        if server["replay"]:
            prompts = _replayed(server, prompts, given)
        _bench_server(server, prompts, framing, params, json_path=json_path)
        return
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
    found = _quality(engines[FAST]) if quality else None
    steps = {name: measure.DecodeSteps(concurrency) for name in engines}
    for name, engine in engines.items():
        engine.on_step = steps[name].add
    requests = to_requests(prompts, engines[FAST].tokenizer, framing=framing, params=params)
    seconds = longest_seconds(engines[FAST], requests, together=concurrency) * len(engines) * repeat
    sides = ["speculative and plain"] * compare + [f"{repeat} times each"] * (repeat > 1)
    console.say(f"{', '.join([f'{len(requests)} prompts', *sides])}: at most {duration(seconds)}.")
    with console.meter("answers") as update:
        records = measure.measure(
            engines,
            requests,
            concurrency=concurrency,
            repeats=repeat,
            on_output=count_answers(update, "Measuring", len(requests) * len(engines) * repeat),
        )
    settings = {**settings_of(config, params, framing, prompts), "concurrency": concurrency, "repeats": repeat}
    form = engines[FAST].target.decoder.weight_form
    card = {**card_of(config, engines[FAST], settings), "weights": form, "quality": found}
    result = _result(prompts, records, steps, card)
    if ahead := engines[FAST].ahead:
        result["summary"]["ahead"] = {name: figures.as_dict() for name, figures in ahead.items()}
    console.write_json(result, json_path)
    for name, figures in ahead.items():
        console.say(f"{name}, ahead of the target: {figures}")
    _show(result, to_stdout=json_path != console.STDOUT)


def _quality(engine: LoadedEngine) -> dict[str, Any]:
    """How far the engine's logits are from those of weights and cache in bfloat16. Loads the model once more and
    overwrites the engine's cache. UsageError if neither is quantised or the model's weights are drawn quantised,
    MemoryPlanError if there is no room for both."""
    from wager.bench.quality import WINDOW, compare_logits, fixed_text, logits_of, windows
    from wager.kernels.base import BLOCK_SIZE
    from wager.loading import memory
    from wager.loading.opened import PassLimits
    from wager.models.hub import is_random

    target, kernels = engine.target, engine.kernels
    if target.opened.formats(kernels) == str(kernels.act):
        raise UsageError(
            f"--quality compares with bfloat16, and the weights of {target.opened.path.name} are {kernels.act}.",
            "Leave it out, or quantise them with --dtype q8 or q4, or the cache with --kv-dtype q8.",
        )
    if target.decoder.weight_form != str(kernels.act) and is_random(str(target.opened.path)):
        raise UsageError(
            "--quality has nothing to compare with: a random model has other weights under every --dtype.",
            "Give a trained model.",
        )
    context = min(WINDOW, target.opened.limits.context)
    limits = PassLimits(_QUALITY_ROWS, 1, context, logits_rows=_QUALITY_ROWS)
    reference = replace(target.opened, dtype="bf16", limits=limits)
    plan = memory.plan(
        budget=memory.budget()[0],
        weights=reference.weight_bytes(kernels),
        workspace=reference.workspace_bytes(kernels),
        states=reference.states_bytes,
        drafter=0,
        token_bytes=reference.token_bytes(kernels),
        max_context=context,
        cache_tokens=-(-context // BLOCK_SIZE) * BLOCK_SIZE,
    )
    decoder = reference.load(kernels, plan.num_blocks)
    target.claim_cache(None)
    text = list(windows(engine.tokenizer.encode(fixed_text()), size=context))
    found = compare_logits(partial(logits_of, decoder), partial(logits_of, target.decoder), text)
    console.say(
        f"Against bfloat16, over {found.tokens} tokens: KL {found.kl:.4f} (99th percentile {found.kl_99:.3f}), the "
        f"same most likely token at {found.top1:.1%}, perplexity {found.perplexity:.2f} (bfloat16 "
        f"{found.reference_perplexity:.2f})."
    )
    return asdict(found)


def _result(
    prompts: Sequence[Prompt],
    records: Mapping[str, Measurement],
    steps: Mapping[str, DecodeSteps],
    card: dict[str, Any],
) -> dict[str, Any]:
    """The JSON of --json; see docs/bench.md."""
    from wager.bench import measure

    rows = {name: measure.rows(prompts, record) for name, record in records.items()}
    summaries = {
        name: {**measure.summary(rows[name], wall_s=record.wall_s), "decode_steps": steps[name].as_dict()}
        for name, record in records.items()
    }
    result: dict[str, Any] = {"card": card, "rows": rows[FAST], "summary": summaries[FAST]}
    if PLAIN in records:
        plain_wall, wall = records[PLAIN].wall_s, records[FAST].wall_s
        ratios = measure.compare(rows[PLAIN], rows[FAST], plain_wall_s=plain_wall, wall_s=wall)
        fast_rate, plain_rate = steps[FAST].rate, steps[PLAIN].rate
        speedup = fast_rate / plain_rate if fast_rate and plain_rate else None
        result["compare"] = {"plain": summaries[PLAIN], **ratios, "decode_step_speedup": speedup}
    return result


def _show(result: Mapping[str, Any], *, to_stdout: bool) -> None:
    """The summary as a table: one line per family, then all."""
    summary, compare = result["summary"], result.get("compare")
    columns = ["tok/s", "prompts", "tokens", "decode", "e2e", "τ"]
    if compare:
        columns += ["decode ×", "median ×", "e2e ×", "slower", "differ"]
    lines = list(summary["per_category"].items())
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


def _figure(value: float | None, digits: int, factor: float = 1.0) -> str:
    return "–" if value is None else f"{factor * value:.{digits}f}"


def _replayed(options: Mapping[str, Any], prompts: Sequence[Prompt], given: Collection[str]) -> list[Prompt]:
    """The requests of --replay in the order in which they arrived, or, if `given` has a FILE, its prompts at their
    times. UsageError for options that have no effect then."""
    from wager.bench.load import distinct

    if "concurrency" in given:
        raise UsageError("--concurrency has no effect with --replay.", "Requests are sent when they arrived.")
    if {"file", "path"} & {*given}:
        times = enumerate(read_arrivals(options["replay"]))
        found = [replace(distinct(prompts, number), arrival=time) for number, time in times]
    else:
        found = spread(read_prompts(options["replay"], timed=True), click.get_current_context().params["limit"])
        found = sorted(flags.as_given(found), key=lambda prompt: prompt.arrival or 0.0)
    wanted = options["requests"] or len(found)
    if wanted > len(found):
        raise UsageError(f"{options['replay']} has {len(found)} requests, not {wanted}.", "Give a smaller --requests.")
    return found[:wanted]


def _bench_server(
    options: Mapping[str, Any],
    prompts: Sequence[Prompt],
    framing: flags.Framing,
    params: SamplingParams,
    *,
    json_path: Path | None,
) -> None:
    """Measure a server, write the results and show them. WagerError if no request was answered."""
    from wager.bench import load
    from wager.bench.machine import card

    added = _body_fields(options["body"])
    server, software = _asked_server(options, _request_fields(params) | added)
    prompts = [replace(prompt.without(*added), content=framing.frame(prompt.content)) for prompt in prompts]
    server = load.find_fields(server, prompts[0], timeout=options["timeout"])
    path: Path | None = options["acceptance_path"]
    before = load.read_metrics(server) if path else None
    by_category = options["acceptance"] and software.get("owned_by") != "wager"
    runs = _load_runs(server, options, prompts, by_category=by_category)
    named = ("url", "requests", "timeout", "acceptance", "body", "model", "concurrency", "speed")
    settings = {name: options[name] for name in named} | sampling_of(prompts, params) | asdict(framing)
    settings["replay"] = options["replay"] and str(options["replay"])
    model = server.fields["model"]
    conditions = card(
        model=model, settings=settings, kind="load", url=server.url, server=software, prompts=len(prompts)
    )
    result: dict[str, Any] = {"card": conditions, "rows": load.rows(runs), "summary": load.summary(runs)}
    console.write_json(result, json_path)
    _show_server(result, to_stdout=json_path != console.STDOUT)
    if before and path:
        from wager.cli.served_acceptance import report_served

        after = load.read_metrics(server)
        counted = model if any(key.model == model for key in after.counts) else None  # it may be called otherwise
        report_served(before, after, model=counted, outputs=[path], to_stdout=json_path != console.STDOUT)
    if not result["summary"]["ok"]:
        failure = result["summary"]["failures"][0]
        raise WagerError(f"No request was answered: {failure['message']}.", "Check the server's own log.")


def _asked_server(options: Mapping[str, Any], fields: Mapping[str, Any]) -> tuple[OpenAIServer, dict[str, Any]]:
    """The server at --url with the fields of its requests, and what it says of itself if it was asked."""
    from wager.bench import load

    server = load.OpenAIServer.parse(options["url"], key=read_key(options["api_key_file"]))
    ask_model = options["model"] is None or options["acceptance"]
    software = load.ask_model(server) if ask_model else {"id": options["model"]}
    asked = {"speculation_stats": True} if options["acceptance"] and software.get("owned_by") == "wager" else {}
    fields = {**asked, "model": options["model"] or software["id"], **fields}
    return replace(server, fields=fields), software


def _load_runs(
    server: OpenAIServer, options: Mapping[str, Any], prompts: Sequence[Prompt], *, by_category: bool
) -> list[LoadRun]:
    """All requests in one run, or each category in one of its own. UsageError for that with --replay."""
    from wager.bench import load

    numbers = range(options["requests"] or len(prompts))
    groups, arrivals = [list(numbers)], None
    if options["replay"]:
        arrivals = [((each.arrival or 0.0) - (prompts[0].arrival or 0.0)) / options["speed"] for each in prompts]
        console.say(f"Replaying {len(prompts)} requests that arrive within {arrivals[-1]:.4g} s.")
    else:
        how_long = "how long it takes is the server's to say; progress follows"
        console.say(f"{len(numbers)} requests, {options['concurrency']} at a time: {how_long}.")
    if by_category:
        if arrivals:
            raise UsageError(
                "--acceptance asks this server one category after the other, which --replay does not.",
                "Leave it out: the acceptance of all requests is in the summary.",
            )
        categories = [load.distinct(prompts, number).category for number in numbers]
        groups = [[n for n in numbers if categories[n] == each] for each in sorted({*categories})]
    runs: list[LoadRun] = []
    with console.meter("answers") as update:

        def count(answered: int) -> None:
            update("Measuring", sum(len(run.answers) for run in runs) + answered, len(numbers))

        users, timeout = options["concurrency"], options["timeout"]
        for group in groups:
            runs.append(
                load.run_load(
                    server, prompts, numbers=group, users=users, arrivals=arrivals, timeout=timeout, on_answer=count
                )
            )
    return runs


def _request_fields(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters are sent where they differ from their defaults: not every server knows all of them."""
    plain, always = SamplingParams(), ("max_tokens", "temperature", *(["seed"] if params.temperature else []))
    names = [*flags.SAMPLING_HELP, "stop", "stop_token_ids", "ignore_eos", "logit_bias"]
    chosen = [*always, *(name for name in names if getattr(params, name) != getattr(plain, name))]
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return {**{name: getattr(params, name) for name in chosen}, **stream}


def _body_fields(text: str | None) -> dict[str, Any]:
    """The fields that --body adds. UsageError for what is no object, or would replace the prompt or the stream."""
    try:
        fields = json.loads(text or "{}")
        json.dumps(fields, allow_nan=False)
    except (ValueError, RecursionError):
        fields = None
    given = shown(str(text))
    if not isinstance(fields, dict):
        raise UsageError(f"--body {given} is not a JSON object.", """Write it as '{"cache_prompt": false}'.""")
    if {"stream", "messages", "prompt"} & fields.keys():
        raise UsageError(f"--body {given} replaces what the client itself sets.", "Leave out stream and prompts.")
    return fields


def _show_server(result: Mapping[str, Any], *, to_stdout: bool) -> None:
    """The times of all requests, then speed and acceptance by category, then failures."""
    summary, spread = result["summary"], ("mean", "p50", "p90", "p99", "max")
    names = {"ttft_s": "TTFT", "itl_s": "between chunks", "tpot_s": "TPOT", "e2e_s": "end to end"}
    rows = [[label, *(_figure(summary[name][key], 1, 1e3) for key in spread)] for name, label in names.items()]
    caption = (
        f"{summary['output_tok_s']:.1f} tokens/s, {summary['request_s']:.3g} requests/s: {summary['ok']} of "
        f"{summary['requests']} requests answered in {summary['duration_s']:.1f} s, {summary['tokens']} tokens "
        f"(counted by {summary['tokens_from']}) in {summary['chunks']} chunks"
    )
    title = f"{result['card']['model']} at {result['card']['url']}"
    console.table(title, ["ms", *spread], rows, to_stdout=to_stdout, caption=caption)
    rows = []
    for category, figures in [*summary["per_category"].items(), ("all", summary)]:
        acceptance = figures["acceptance"] or {"mean_acceptance_length": None, "accepted_share": None}
        row = [category, str(figures["requests"]), str(figures["tokens"]), _figure(figures["output_tok_s"], 1)]
        row += [_figure(figures[name]["p50"], 1, 1e3) for name in ("ttft_s", "itl_s", "tpot_s")]
        row += [_figure(figures["tokens_per_chunk"], 2)]
        row += [_figure(acceptance["mean_acceptance_length"], 2), _figure(acceptance["accepted_share"], 2)]
        rows.append(row)
    columns = ["by category", "requests", "tokens", "tok/s", "TTFT, ms", "between", "TPOT", "a chunk", "τ", "accepted"]
    console.table("", columns, rows, to_stdout=to_stdout)
    for failure in summary["failures"]:
        console.say(f"{failure['count']} failed ({failure['kind']}): {failure['message']}")
    if late := summary["client"]["sent_late"]:
        longest = 1e3 * summary["client"]["sent_late_max_s"]
        console.say(
            f"The client sent {late} requests over 10 ms after their time, the latest {longest:.0f} ms after it."
        )
    if summary["client"]["late"]:
        console.say("The client itself used over half a processor: its own delays are part of these times.")
