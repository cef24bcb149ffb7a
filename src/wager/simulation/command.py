"""`wager replay`: policies on a simulated server, from recorded answers or published survival curves. No model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from wager.economics.options import DEEPEST
from wager.planner.command import deployment_flags, show
from wager.terminal import console, flags

_MAX_ROUNDS = 10_000_000


@click.command(
    "replay",
    cls=flags.Verb,
    main="policies concurrency rate load curves model hardware shape output json_path",
)
@click.argument("trace", required=False, metavar="[TRACE]", type=flags.InputPath())
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    help="none, fixed:K, threshold[:P] or adaptive; repeat it to compare. The best fixed depth is "
    "always simulated too.  [default: none, threshold, adaptive]",
)
@click.option(
    "--concurrency",
    metavar="N,...",
    help="Users who each send a new request as soon as the last is answered.  [default: 1,4,16,64,256]",
)
@click.option("--rate", metavar="R,...", help="Requests a second, arriving at random, instead of --concurrency.")
@click.option(
    "--load",
    multiple=True,
    metavar="recorded|FILE",
    help="Arrivals at given times, instead of --concurrency. recorded: those of TRACE. FILE: seconds, one a line. May "
    "be repeated.",
)
@click.option(
    "--curve",
    "curves",
    multiple=True,
    metavar="NAME|P|FILE",
    help="Survival of a synthetic drafter: mtp or dflash (published), a constant rate, or a JSON file as in "
    "`wager plan --acceptance`. Repeat it for several drafters.  [default: mtp]",
)
@click.option(
    "-m",
    "--model",
    metavar="MODEL",
    help="The target; see `wager plan`.  [default: plan's with --hardware, else Qwen3.6-35B-A3B]",
)
@click.option(
    "--hardware",
    metavar="NAME",
    help="Whose step times: a GPU by name, cpu, this (as calibrated) or a JSON "
    "file, see `wager plan`.  [default: B200]",
)
@click.option(
    "--believed",
    metavar="NAME|FILE",
    help="What policies believe that steps and drafts take until they learn: as on another --hardware.  [default: the "
    "truth]",
)
@click.option(
    "--drafter-shape",
    "shape",
    multiple=True,
    metavar="[NAME=]SHAPE",
    help="What drafting costs: free, mtp, block[:N], model:NAME; see `wager plan`. NAME is a curve or a "
    "drafter of TRACE; repeat it for several. Known by name: mtp, dflash (block:16), ngram (free) and, with "
    "--hardware this, calibrated ones; others are priced as mtp.",
)
@deployment_flags
@click.option(
    "--max-depth",
    type=flags.Count(1, DEEPEST),
    help="Deepest draft.  [default: what its curve and its shape allow, 8 for a constant rate]",
)
@click.option(
    "--objective",
    default="throughput",
    metavar="GOAL",
    help="Goal of the adaptive policy: throughput, latency, or slo:TIME (per token: slo:20ms).",
)
@click.option(
    "--prompt", type=flags.Count(min=1, max=10_000_000), help="Prompt tokens of synthetic requests.  [default: 1]"
)
@click.option(
    "--output", type=flags.Count(min=1, max=100_000), help="Answer tokens of synthetic requests.  [default: 1024]"
)
@click.option(
    "--rounds",
    type=flags.Count(min=1, max=_MAX_ROUNDS),
    default=20_000,
    help="Rounds to simulate per policy and workload, summed over synthetic requests; with --rate about as many, since "
    "requests are served to their end.",
)
@click.option("--seed", type=flags.Count(0, 2**64 - 1), default=0, help="Of synthetic requests and arrivals.")
@flags.json_flag
def command(*, policies: tuple[str, ...], json_path: Path | None, **values: Any) -> None:
    """Compare policies on a simulated server.

    TRACE holds the drafts of each drafter along recorded answers (docs/policy.md has the format). Without it requests
    are synthetic, and their drafts are accepted by published survival curves. Every policy serves the same requests;
    the simulated clock advances by the predicted time of each step.
    """
    from wager.simulation import report
    from wager.simulation.comparison import compare, fixed_policies
    from wager.simulation.options import ReplayOptions, replay_query

    if values["trace"]:
        flags.refuse(["curves", "prompt", "output", "rounds"], "with TRACE, which has answers of its own")
    if values["load"]:
        flags.refuse(["rounds"], "with --load: a request is served at each arrival")
    chosen = list(dict.fromkeys(policies)) or ["none", "threshold", "adaptive"]
    query = replay_query(ReplayOptions.of(values))
    names = list(dict.fromkeys([*fixed_policies(query.setting), *chosen]))
    with console.meter("simulations") as update:
        total = len(names) * len(query.workloads)
        points = compare(query.setting, names, query.workloads, on_point=lambda done: update("Simulating", done, total))
    if json_path:
        console.write_json(report.as_dict(query, points, values), json_path)
    if json_path != console.STDOUT:
        show(report.head(query), *report.table(points, chosen), report.notes(query, points))
