"""`wager replay`: policies on a simulated server, from recorded answers or published survival curves. No model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wager.cli import console, flags
from wager.errors import UsageError

if TYPE_CHECKING:
    from wager.economics.latency_model import LatencyModel
    from wager.economics.simulation.comparison import ReplayPoint, ReplaySetting
    from wager.economics.simulation.traces import TraceSource
    from wager.economics.simulation.workload import Workload

_DEFAULT_CONCURRENCY = "1,4,16,64,256"
_PROMPT, _OUTPUT = 1, 1024
_CONSTANT_RATE_DEPTH = 8
"""How deep a drafter of one constant acceptance rate drafts."""


@dataclass(frozen=True, slots=True)
class _Options:
    """The flags of the command, unparsed."""

    trace: Path | None
    concurrency: str | None
    rate: str | None
    curves: tuple[str, ...]
    model: str | None
    hardware: str | None
    shape: str | None
    tp: int
    ep: int
    locality: float
    objective: str
    prompt: int | None
    output: int | None
    rounds: int
    seed: int


@click.command("replay")
@click.argument("trace", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--policy", "policies", multiple=True, metavar="NAME",
              help="none, fixed:K, threshold[:P] or adaptive; repeat it to compare. The best fixed depth is "
              "always simulated too.  [default: none, threshold, adaptive]")  # fmt: skip
@click.option("--concurrency", metavar="N,...",
              help="Users who each send a new request as soon as the last is answered.  "
              f"[default: {_DEFAULT_CONCURRENCY}]")  # fmt: skip
@click.option("--rate", metavar="R,...", help="Requests a second, arriving at random, instead of --concurrency.")
@click.option("--curve", "curves", multiple=True, metavar="NAME|P|FILE",
              help="Survival of a synthetic drafter: mtp or dflash (published), a constant rate, or a JSON file as in "
              "`wager plan --acceptance`. Repeat it for several drafters.  [default: mtp]")  # fmt: skip
@click.option("--model", metavar="MODEL", help="Take step times of this model on --hardware, as `wager plan` computes "
              "them. Without both: Qwen3.6-35B-A3B on a B200, as published.")  # fmt: skip
@click.option("--hardware", metavar="NAME", help="A GPU by name, cpu, or a JSON file; see `wager plan`.")
@click.option("--drafter-shape", "shape", metavar="SHAPE", help="The cost of drafting there: free, mtp, block[:N] or "
              "model:NAME; see `wager plan`.  [default: mtp]")  # fmt: skip
@click.option("--tp", type=int, default=1, show_default=True, metavar="N", help="Devices that split every matrix.")
@click.option("--ep", type=int, default=1, show_default=True, metavar="N",
              help="Ranks that split the experts, each with the given workload.")  # fmt: skip
@click.option("--locality", type=float, default=1.0, show_default=True, metavar="X",
              help="T tokens of one request hit as many experts as T^X unrelated ones.")  # fmt: skip
@click.option("--objective", default="throughput", show_default=True, metavar="GOAL",
              help="Goal of the adaptive policy: throughput, latency, or slo:TIME (per token: slo:20ms).")  # fmt: skip
@click.option("--prompt", type=click.IntRange(min=1, max=10_000_000), metavar="N",
              help=f"Prompt tokens of synthetic requests.  [default: {_PROMPT}]")  # fmt: skip
@click.option("--output", type=click.IntRange(min=1, max=100_000), metavar="N",
              help=f"Answer tokens of synthetic requests.  [default: {_OUTPUT}]")  # fmt: skip
@click.option("--rounds", type=click.IntRange(min=1), default=20_000, show_default=True, metavar="N",
              help="Rounds to simulate per policy and workload, summed over synthetic requests.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
              help="Of synthetic requests and arrivals.")  # fmt: skip
@flags.json_flag
def command(*, policies: tuple[str, ...], json_path: Path | None, **values: Any) -> None:
    """Compare policies on a simulated server.

    TRACE holds the drafts of each drafter along recorded answers (docs/policy.md has the format). Without it requests
    are synthetic, and their drafts are accepted by published survival curves. Every policy serves the same requests;
    the simulated clock advances by the predicted time of each step.
    """
    from wager.economics.simulation.comparison import compare, fixed_policies

    console.check_writable(json_path)
    chosen = list(policies) or ["none", "threshold", "adaptive"]
    options = _Options(**values)
    setting = _setting(options)
    names = list(dict.fromkeys([*fixed_policies(setting), *chosen]))
    workloads = _workloads(setting, options)
    with console.meter("simulations") as update:
        done = 0

        def count(_point: ReplayPoint) -> None:
            nonlocal done
            done += 1
            update("Simulating", done, len(names) * len(workloads))

        points = compare(setting, names, workloads, on_point=count)
    if json_path:
        kept = {key: value for key, value in values.items() if value is not None and key != "trace"}
        console.write_json({"setting": {"trace": str(options.trace or ""), **kept},
                            "points": [point.as_dict() for point in points]}, json_path)  # fmt: skip
    if str(json_path) != "-":
        _show(points, chosen)


# ---- from flags to inputs of the simulation -------------------------------------------------------------------------


def _setting(options: _Options) -> ReplaySetting:
    from wager.economics.policy.objective import parse_objective
    from wager.economics.simulation.comparison import ReplaySetting
    from wager.economics.simulation.traces import RecordedTraces

    traces: TraceSource = RecordedTraces.read(options.trace) if options.trace else _synthetic_traces(options)
    if options.trace and options.curves:
        raise UsageError("A trace has its own acceptance, so --curve has no effect.", "Leave one of them out.")
    for flag, length in (("prompt", options.prompt), ("output", options.output)):
        if options.trace and length is not None:
            raise UsageError(f"A trace has its own lengths, so --{flag} has no effect.", "Leave one of them out.")
    return ReplaySetting(traces, _latency(traces, options), parse_objective(options.objective), options.tp)


def _synthetic_traces(options: _Options) -> TraceSource:
    from wager.cli import plan_inputs
    from wager.economics.simulation.synthetic import SyntheticDrafter, SyntheticTraces
    from wager.economics.survival import CURVES

    drafters = {}
    for word in options.curves or ("mtp",):
        if word in CURVES:
            drafters[word] = SyntheticDrafter(CURVES[word])
            continue
        [rates] = plan_inputs.parse_acceptances(word)
        survival = rates.survival(_CONSTANT_RATE_DEPTH if rates.max_depth is None else rates.max_depth)
        drafters[rates.label] = SyntheticDrafter(tuple(max(1e-4, chance) for chance in survival))
    return SyntheticTraces(
        drafters, prompt_tokens=options.prompt or _PROMPT, output_tokens=options.output or _OUTPUT, seed=options.seed
    )


def _latency(traces: TraceSource, options: _Options) -> LatencyModel:
    """Step times of --model on --hardware, or the published ones without them."""
    from wager.cli import plan_inputs
    from wager.economics.simulation.published_latency import PublishedLatency

    if options.model is None or options.hardware is None:
        if options.model or options.hardware:
            raise UsageError("--model and --hardware go together.", "Give both, or none for the published step times.")
        _refuse_without_model(options)
        return PublishedLatency()
    from wager.economics.costmodel.experts import ExpertRouting
    from wager.economics.costmodel.latency import RooflineLatency
    from wager.economics.costmodel.roofline import CostModel

    cost = CostModel(plan_inputs.find_plan_model(options.model), plan_inputs.find_hardware(options.hardware),
                     routing=ExpertRouting(locality=options.locality), tp=options.tp, ep=options.ep)  # fmt: skip
    drafter = plan_inputs.draft_cost(cost, shape=options.shape, drafter_cost=None)
    first = traces.request(0)
    context = first.prompt_tokens + first.output_tokens / 2
    return RooflineLatency(cost, drafters=dict.fromkeys(traces.max_depths(), drafter), context=context)


def _refuse_without_model(options: _Options) -> None:
    for flag, is_set in (
        ("drafter-shape", options.shape is not None),
        ("tp", options.tp != 1),
        ("ep", options.ep != 1),
        ("locality", options.locality != 1.0),
    ):
        if is_set:
            raise UsageError(f"--{flag} has no effect on the published step times.", "Give --model and --hardware.")


def _workloads(setting: ReplaySetting, options: _Options) -> list[Workload]:
    """Synthetic requests run for a number of rounds; of a trace every answer is served to its end."""
    from wager.economics.simulation.traces import RecordedTraces
    from wager.economics.simulation.workload import Workload

    if options.rate and options.concurrency:
        raise UsageError("--rate and --concurrency are two kinds of workload.", "Give one of them.")
    answers = len(setting.traces) if isinstance(setting.traces, RecordedTraces) else 0
    seed, rounds = options.seed, options.rounds
    if options.rate:
        rates = _parse_numbers("rate", options.rate)
        requests = answers or max(100, 3 * rounds // (options.output or _OUTPUT))
        return [Workload(rate=rate, requests=requests, seed=seed) for rate in rates]
    users = [int(number) for number in _parse_numbers("concurrency", options.concurrency or _DEFAULT_CONCURRENCY)]
    return [
        Workload(concurrency=count, requests=max(answers, 4 * count) if answers else None,
             rounds=max(rounds, 60 * count), seed=seed)
        for count in users
    ]  # fmt: skip


def _parse_numbers(name: str, text: str) -> list[float]:
    numbers = []
    for word in text.split(","):
        try:
            number = float(word)
        except ValueError:
            number = -1.0
        if not 0 < number < float("inf") or (name == "concurrency" and number != int(number)):
            kind = "whole numbers" if name == "concurrency" else "numbers"
            raise UsageError(
                f"{name} = {word.strip()!r} is out of range.", f"Write --{name} 1,4,16 with {kind} above 0."
            )
        numbers.append(number)
    return numbers


# ---- the table ------------------------------------------------------------------------------------------------------


def _show(points: Sequence[ReplayPoint], chosen: Sequence[str]) -> None:
    """For each workload the best fixed depth, then the chosen policies."""
    columns = ["workload", "policy", "tok/s", "per user", "per device", "τ", "drafted", "admitted", "vs fixed",
               "frontier"]  # fmt: skip
    rows = [_row(point) for point in points if point.policy == point.best_fixed or point.policy in chosen]
    console.table("", columns, rows, to_stdout=True)


def _row(point: ReplayPoint) -> list[str]:
    if point.concurrency:
        workload = f"{point.concurrency} user{'s' * (point.concurrency > 1)}"
    else:
        workload = f"{point.rate:g} a second"
    best = point.policy == point.best_fixed and point.policy != "none"
    name = f"{point.policy} (best)" if best else point.policy
    return [
        workload, name, f"{point.throughput:.0f}", f"{point.per_user:.1f}", f"{point.per_device:.0f}",
        f"{point.tau:.2f}", f"{point.drafted:.2f}", f"{point.admitted:.2f}", f"{-100 * point.regret:+.1f} %",
        "•" if point.frontier else "",
    ]  # fmt: skip
