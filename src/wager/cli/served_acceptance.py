"""Acceptance by depth from a server's counters: `wager acceptance --metrics`, `wager bench --acceptance-file`."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from wager.bench.scrape import Scrape, SpeculationCounts
from wager.cli.measuring import key_flag, read_key
from wager.drafter_spec import parse_drafters
from wager.economics.acceptance import constant_rate
from wager.economics.options import DEEPEST
from wager.errors import UsageError
from wager.inputs import expand_path, read_text
from wager.profiling.acceptance import DrafterAcceptance, Estimate
from wager.terminal import console, flags

NONE = "–"
DEPTH_COLUMNS = ["depth k", "S_k", "given a draft", "S_k / S_k-1", "τ if drafted to k", "drafted a round"]

_SERVED_FLAGS = {"metrics", "seconds", "api_key_file", "file", "model", "drafter", "depth", "output_path", "json_path"}
"""Options that have an effect with --metrics."""

_LONGEST_S = 31 * 86_400


def metrics_flags(function: flags.Function) -> flags.Function:
    """--metrics and what belongs to it: with it the counters of a server are read, and the command is not called."""

    @click.option(
        "--metrics",
        metavar="URL|FILE",
        help="Take acceptance by depth from the /metrics of a server (vLLM, llama.cpp, SGLang, wager) instead. URL: "
        "over --seconds, or until Ctrl-C. FILE: a saved page, since the server's start, or until that of [FILE]. "
        "--model chooses among several, --drafter one drafter of several; --depth is SGLang's, where it does not say.",
    )
    @click.option(
        "--seconds",
        type=click.FloatRange(0, _LONGEST_S),
        metavar="S",
        help="How long to count at the --metrics of URL; 0: what was counted since its start.",
    )
    @key_flag
    @functools.wraps(function)
    def command(*, metrics: str | None, seconds: float | None, api_key_file: Path | None, **values: Any) -> Any:
        if not (metrics and "://" in metrics):
            flags.refuse(("seconds", "api_key_file"), "without --metrics URL")
        if metrics is None:
            return function(**values)
        flags.refuse(flags.given().keys() - _SERVED_FLAGS, "with --metrics", "It is an option of the server's own.")
        if "://" in metrics and values["file"]:
            raise UsageError("A URL is read twice by itself, so FILE has no effect.", "Give two files, or the URL.")
        before, after = _readings(metrics, values["file"], seconds=seconds, key=api_key_file)
        json_path = values["json_path"]
        outputs = [path for path in (values["output_path"], json_path) if path]
        return report_served(
            before,
            after,
            model=values["model"] if flags.wrote("model") else None,
            drafter=",".join(spec.label for text in values["drafter"] for spec in parse_drafters(text))
            if flags.wrote("drafter")
            else None,
            depth=values["depth"],
            outputs=outputs,
        )

    return command


def _readings(
    metrics: str, later: Path | None, *, seconds: float | None, key: Path | None
) -> tuple[Scrape | None, Scrape]:
    """What --metrics says, earlier (None: at the server's start) and later."""
    from wager.bench.load import OpenAIServer, read_metrics

    if "://" not in metrics:
        pages = [
            Scrape.parse(read_text(path, "file", "Save the text of /metrics."), str(path))
            for path in (expand_path(metrics), later)
            if path
        ]
        return (None, pages[0]) if len(pages) == 1 else (pages[0], pages[1])
    server = OpenAIServer.parse(metrics, key=read_key(key))
    before = read_metrics(server)
    if seconds == 0:
        return None, before
    console.say(f"Counting at {before.where} " + ("until Ctrl-C." if seconds is None else f"for {seconds:g} s."))
    try:
        time.sleep(_LONGEST_S if seconds is None else seconds)
    except KeyboardInterrupt:
        console.say()
    return before, read_metrics(server)


def report_served(
    before: Scrape | None,
    after: Scrape,
    *,
    outputs: Sequence[Path],
    to_stdout: bool = True,
    model: str | None = None,
    drafter: str | None = None,
    depth: int | None = None,
) -> None:
    """Write and show the acceptance between two readings of a server's counters (None: since its start). UsageError for
    counters that are missing, do not rise or go back, and for several models of which none is named."""
    to_stdout = to_stdout and console.STDOUT not in outputs
    counts = (after if before is None else after.since(before)).speculation(model=model, drafter=drafter)
    about = {
        "model": counts.by.model or model,
        "drafter": counts.by.drafter or drafter or counts.by.engine,
        "engine": counts.by.engine,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if counts.by.engine == "sglang":
        values, lines = _mean_alone(counts, depth)
    elif depth is not None:
        raise UsageError(f"--depth has no effect on counters by depth, as {after.where} has them.", "Leave it out.")
    else:
        from wager.profiling.acceptance import served_acceptance

        acceptance = served_acceptance(counts)
        counted = {name: getattr(counts, name) for name in ("drafts", "drafted")}
        values = {"depth": len(acceptance.depths), **counted, **acceptance.as_dict()}
        lines = _remarks(counts, acceptance)
        since = "its start" if before is None else before.where if before.where != after.where else "then"
        title = f"{about['drafter']}, drafts of {values['depth']}, as counted by {after.where} since {since}"
        console.table(title, DEPTH_COLUMNS, depth_rows(acceptance), to_stdout=to_stdout)
    for path in outputs:
        console.write_json(about | values, path)
    for line in lines:
        click.echo(console.wrapped(line), err=not to_stdout)
    for path in outputs:
        if path != console.STDOUT:
            console.say(f"written to {path}; wager plan --acceptance {path}")


def _remarks(counts: SpeculationCounts, acceptance: DrafterAcceptance) -> list[str]:
    """What was counted, and what cannot be read from it."""
    deepest, mean = len(acceptance.depths), counts.drafted / counts.drafts
    accepted, tau, alpha = sum(counts.accepted), interval(acceptance.tau), interval(acceptance.alpha)
    lines = [
        f"{counts.drafts} drafts of {mean:.2f} tokens, of which {accepted} of {counts.drafted} were accepted: "
        f"{1 + accepted / counts.drafts:.2f} tokens a draft, bonus token included (what servers log).",
        f"Of {acceptance.rounds} rounds {acceptance.coverage:.1%} had a draft: S_k and τ = {tau} are of all rounds, "
        f"α = {alpha} of draft tokens."
        if acceptance.coverage is not None
        else f"Rounds without a draft are not counted: S_k and τ = {tau} are of rounds with one, α = {alpha}.",
        f"The server drafted to {deepest}: τ of smaller depths follows from the same S_k and is the least that it can "
        "be. Intervals take rounds as independent, and are the least too.",
    ]
    if mean < deepest - 0.005:
        lines.append(
            f"Drafts had {mean:.2f} of {deepest} tokens on average: in S_k a position that a draft lacks counts as not "
            "accepted. That is right for a drafter which found no more; where the server chose the depth, S_k of deep "
            "positions is too low: have it draft to one depth."
            + " Given a draft: of drafts with that position."
            * bool(counts.reaching)
        )
    return lines


def _mean_alone(counts: SpeculationCounts, depth: int | None) -> tuple[dict[str, Any], list[str]]:
    """The file and what to say of a server that tells no more than tokens by round, SGLang."""
    steps = depth or counts.steps
    if not steps:
        raise UsageError("SGLang tells no draft steps (sglang:spec_num_steps).", "Give --depth, its number of steps.")
    tau = counts.length
    if not 1 <= tau <= steps + 1 or steps > DEEPEST:
        raise UsageError(f"τ = {tau:.3g} is impossible with drafts of {steps} steps.", "Give the steps with --depth.")
    alpha = constant_rate(tau, steps)
    counted = {"drafts": counts.drafts} if counts.drafts else {}
    which = (
        f"{counts.drafts} rounds of requests that ended" if counts.drafts else "the rounds since its last line of log"
    )
    lines = [
        f"SGLang tells a mean alone: in {which} τ is {tau:.3f}, bonus token included.",
        f"ASSUMED: every draft token is accepted with one probability. At {steps} steps τ gives α = {alpha:.3f}. Real "
        "rates change with depth, so a plan for other depths is a guess, and there is no interval.",
    ]
    return {"depth": steps, **counted, "tau": tau, "alpha": alpha, "acceptance": [alpha] * steps}, lines


def depth_rows(acceptance: DrafterAcceptance) -> list[list[str]]:
    rows, above = [], 1.0
    for rounds, survival, given in zip(acceptance.depths, acceptance.survival, acceptance.given_draft, strict=True):
        reached = survival.value or 0.0
        rate = f"{reached / above:.3f}" if above else NONE
        drafted = f"{rounds.drafted:.2f}"
        rows.append([str(rounds.depth), interval(survival), f"{given:.3f}", rate, interval(rounds.tau), drafted])
        above = reached
    return rows


def interval(estimate: Estimate) -> str:
    """0.312 [0.28, 0.35]; without the interval where there is none."""
    if estimate.value is None:
        return NONE
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} [{estimate.low:.2f}, {estimate.high:.2f}]"
