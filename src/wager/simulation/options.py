"""The options of `wager replay` as values: requests, what a step and each drafter cost, and how requests arrive.

A wrong value is an error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from wager.arch import ModelSpec
from wager.config import DEFAULT_MODEL
from wager.economics.acceptance import CURVES
from wager.economics.options import parse_objective
from wager.economics.surface import LatencySurface
from wager.errors import UsageError
from wager.inputs import expand_path
from wager.planner.acceptance import parse_acceptances
from wager.planner.cost import CostModel
from wager.planner.inputs import check_origin, number
from wager.planner.options import PlanSettings, draft_cost, target_cost
from wager.prompts import read_arrivals
from wager.simulation.comparison import ReplaySetting
from wager.simulation.latency import RooflineLatency, calibrated
from wager.simulation.server import Workload
from wager.simulation.traces import RecordedTraces, SyntheticDrafter, SyntheticTraces, TraceSource

CONSTANT_RATE_DEPTH = 8
"""How deep a drafter of one constant acceptance rate drafts, unless --max-depth says."""

_MODEL, _HARDWARE = "Qwen3.6-35B-A3B", "B200"  # without --model and --hardware; those of the published curves
_SHAPES = {"mtp": "mtp", "dflash": "block:16", "ngram": "free"}  # of drafters whose name says it
_OPEN_LOOP_USERS = 256  # up to which prices are believed to be calibrated, where users are not given

DEFAULT_CONCURRENCY = "1,4,16,64,256"
DEFAULT_PROMPT, DEFAULT_OUTPUT = 1, 1024

_TOKENS_PER_ROUND = 3
"""By which --rounds says how many requests of an open loop are served: the same under all policies, to their end."""

_MAX_BYTES = 8e9  # of synthetic requests that run at once


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The flags of the command, unparsed; `deployment` are those that it shares with `wager plan`."""

    trace: Path | None
    concurrency: str | None
    rate: str | None
    load: tuple[str, ...]
    curves: tuple[str, ...]
    model: str | None
    hardware: str | None
    believed: str | None
    shape: tuple[str, ...]
    max_depth: int | None
    objective: str
    prompt: int | None
    output: int | None
    rounds: int
    seed: int
    deployment: PlanSettings

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ReplayOptions:
        """The flags by their names, those of the deployment among them."""
        own = {field.name for field in fields(cls)} & set(values)
        shared = {name: value for name, value in values.items() if name not in own}
        return cls(**{name: values[name] for name in own}, deployment=PlanSettings(**shared))


@dataclass(frozen=True, slots=True)
class DrafterPrice:
    """What a drafter's time is computed from: its shape, why that one (`reason`), and how deep it drafts."""

    name: str
    shape: str
    reason: str
    depth: int

    def line(self) -> str:
        """For the head of the output."""
        price = "takes no time" if self.shape == "free" else f"priced as {self.shape}"
        return f"{self.name}: {price} ({self.reason}), at most {self.depth} deep"


@dataclass(frozen=True, slots=True)
class ReplayQuery:
    """What the command simulates, lines that say where its prices come from, and the prompt of synthetic requests."""

    setting: ReplaySetting
    workloads: Sequence[Workload]
    step_times: str
    prices: Sequence[DrafterPrice]
    locality: float
    believed: str = ""
    prompt: int = 1


def replay_query(options: ReplayOptions) -> ReplayQuery:
    """UsageError or ModelError names what is not known or out of range."""
    recorded = RecordedTraces.read(options.trace) if options.trace else None
    cost = _cost(options)
    curves = {} if recorded else _curves(options, cost.model)
    limits = dict(recorded.max_depths()) if recorded else {name: len(curve) for name, curve in curves.items()}
    words = _shapes_by_drafter(options.shape, list(limits))
    prices, costs = [], {}
    for name, limit in limits.items():
        shape, reason = _shape(name, words, cost)
        costs[name] = draft_cost(cost, PlanSettings(shape=shape))
        bounds = [limit, costs[name].max_depth, options.max_depth]
        depth = min([bound for bound in bounds if bound is not None])
        if depth < 1 <= limit:
            raise UsageError(f"A drafter of the shape {shape!r} drafts {depth} tokens.", "Give it room for one.")
        prices.append(DrafterPrice(name, shape, reason, depth))
    depths = {price.name: price.depth for price in prices}
    traces: TraceSource
    if recorded:
        traces = recorded.truncate(depths)
    else:
        traces = SyntheticTraces(
            {name: SyntheticDrafter(curve[: depths[name]]) for name, curve in curves.items()},
            prompt_tokens=options.prompt or DEFAULT_PROMPT,
            output_tokens=options.output or DEFAULT_OUTPUT,
            seed=options.seed,
        )
    machine = RooflineLatency(cost, drafters=costs, context=traces.mean_context())
    if traces.longest_context() > cost.model.context:
        raise UsageError(
            f"A request of {traces.longest_context()} positions, prompt and answer, is out of range.",
            f"{cost.model.name} was made for 0 to {cost.model.context} positions.",
        )
    loads = workloads(traces, options)
    believed = _believed(options, machine, prices, loads)
    objective = parse_objective(options.objective)
    setting = ReplaySetting(traces, machine, objective, options.deployment.tp, believed)
    prompt = 1 if recorded else options.prompt or DEFAULT_PROMPT
    return ReplayQuery(setting, loads, _step_times(cost), prices, cost.routing.locality, options.believed or "", prompt)


# ---- requests -------------------------------------------------------------------------------------------------------


def _curves(options: ReplayOptions, model: ModelSpec) -> dict[str, tuple[float, ...]]:
    """Survival by drafter. Where no model was named, that of a file may be any."""
    curves: dict[str, tuple[float, ...]] = {}
    for word in [part.strip() for curve in options.curves or ("mtp",) for part in curve.split(",")]:
        name, survival = (word, CURVES[word]) if word in CURVES else _curve(word, options, model)
        if name in curves:
            raise UsageError(f"There are two curves named {name!r}.", "Give every drafter a name of its own.")
        curves[name] = survival
    return curves


def _curve(word: str, options: ReplayOptions, model: ModelSpec) -> tuple[str, tuple[float, ...]]:
    """Name and survival of a curve that is not published."""
    try:
        float(word)
    except ValueError as error:
        if not expand_path(word).is_file():
            cause = f"The curve {word!r} is not known."
            hint = f"Known by name: {', '.join(CURVES)}. Or give a rate such as 0.7, or a JSON file."
            raise UsageError(cause, hint) from error
    [rates] = parse_acceptances(word)
    if rates.noted:
        allowed = options.deployment.any_model or options.model is None
        check_origin(rates.noted, options.model or model.name, model, allowed=allowed)
    depth = rates.max_depth or options.max_depth or CONSTANT_RATE_DEPTH
    return rates.label, tuple([max(1e-4, chance) for chance in rates.survival(depth)])


# ---- what steps and drafters cost -----------------------------------------------------------------------------------


def _cost(options: ReplayOptions) -> CostModel:
    """The model on the hardware, as `plan` finds them."""
    if options.model is not None and options.hardware is None:
        raise UsageError("--model and --hardware go together.", "Say on which hardware: --hardware H100, or this.")
    return target_cost(_model(options), options.hardware or _HARDWARE, options.deployment)


def _model(options: ReplayOptions) -> str:
    return _MODEL if options.hardware is None else options.model or DEFAULT_MODEL


def _step_times(cost: CostModel) -> str:
    """Where the seconds of a step come from."""
    where = f"{cost.model.name} on {cost.device.name}"
    if cost.measured is not None:
        last = cost.measured.rows[-1]
        return f"{where} ({cost.device.label}); steps of more than {last} rows are extrapolated"
    spread = f", tp {cost.cluster.tp}" * (cost.cluster.tp > 1) + f", ep {cost.cluster.ep}" * (cost.cluster.ep > 1)
    return f"{where}{spread}, by the cost model of `wager plan`"


def _believed(
    options: ReplayOptions, machine: RooflineLatency, prices: Sequence[DrafterPrice], loads: Sequence[Workload]
) -> LatencySurface | None:
    """The prices of --believed, as a policy has them after a calibration."""
    if options.believed is None:
        return None
    cost = target_cost(_model(options), options.believed, options.deployment)
    costs = {price.name: draft_cost(cost, PlanSettings(shape=price.shape)) for price in prices}
    other = RooflineLatency(cost, drafters=costs, context=machine.context)
    users = max([load.concurrency or _OPEN_LOOP_USERS for load in loads])
    depths = {price.name: price.depth for price in prices}
    return calibrated(other, depths, users=users, context=machine.context)


def _shapes_by_drafter(words: Sequence[str], drafters: Sequence[str]) -> Mapping[str, str]:
    """The shapes of --drafter-shape by drafter; "" is that of all others."""
    shapes: dict[str, str] = {}
    for word in words:
        name, equals, shape = word.partition("=")
        if not equals or name.startswith("model:"):
            name, shape = "", word
        if name and name not in drafters:
            raise UsageError(f"--drafter-shape {word} names an unknown drafter.", f"Known are: {', '.join(drafters)}.")
        if name in shapes:
            raise UsageError(f"--drafter-shape {word}: that drafter has a shape already.", "Give one for each.")
        shapes[name] = shape
    return shapes


def _shape(name: str, words: Mapping[str, str], cost: CostModel) -> tuple[str, str]:
    """The shape of a drafter, and why that one."""
    if name in words or "" in words:
        return words.get(name, words.get("", "")), "as given"
    curves = {} if cost.measured is None else cost.measured.drafters
    if name in curves:
        return name, "as calibrated"
    if name in _SHAPES:
        return _SHAPES[name], "its own shape"
    return next(iter(curves), "mtp"), "no --drafter-shape given"


# ---- how requests arrive --------------------------------------------------------------------------------------------


def workloads(traces: TraceSource, options: ReplayOptions) -> list[Workload]:
    """Synthetic requests run for a number of rounds; of a trace every answer is served to its end."""
    kinds = {"concurrency": options.concurrency, "rate": options.rate, "load": options.load or None}
    given = [flag for flag, value in kinds.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]} are two kinds of workload.", "Give one of them.")
    answers = len(traces) if isinstance(traces, RecordedTraces) else 0
    arrivals = traces.arrivals if isinstance(traces, RecordedTraces) else None
    rounds, seed = options.rounds, options.seed
    requests = answers or math.ceil(_TOKENS_PER_ROUND * rounds / (options.output or DEFAULT_OUTPUT))
    if options.rate is not None:
        return [Workload(rate=rate, requests=requests, seed=seed) for rate in _numbers("rate", options.rate)]
    loads = options.load or (("recorded",) if arrivals and options.concurrency is None else ())
    if loads:
        return [_load(word, arrivals, seed=seed) for word in loads]
    words = DEFAULT_CONCURRENCY if options.concurrency is None else options.concurrency
    users = [int(number) for number in _numbers("concurrency", words)]
    closed = [
        Workload(
            concurrency=count,
            requests=max(answers, 4 * count) if answers else None,
            rounds=max(rounds, 60 * count),
            seed=seed,
        )
        for count in users
    ]
    if isinstance(traces, SyntheticTraces) and max(users) * traces.request_bytes > _MAX_BYTES:
        cause = f"{max(users)} requests of that length take {max(users) * traces.request_bytes / 1e9:.0f} GB to draw."
        raise UsageError(cause, "Give a smaller --concurrency or --output.")
    return closed


def _load(word: str, arrivals: tuple[float, ...] | None, *, seed: int) -> Workload:
    """`recorded` (the trace's own arrivals), or a file of arrivals."""
    if word != "recorded":
        return Workload(arrivals=read_arrivals(expand_path(word)), seed=seed)
    if arrivals is None:
        raise UsageError("There are no recorded arrivals.", 'Give a trace whose rows have an "arrival" in seconds.')
    return Workload(arrivals=arrivals, seed=seed)


def _numbers(name: str, text: str) -> list[float]:
    numbers = []
    for word in text.split(","):
        value = number(word)
        if not 0 < value < float("inf") or (name == "concurrency" and value != int(value)):
            kind = "whole numbers" if name == "concurrency" else "numbers"
            raise UsageError(
                f"{name} = {word.strip()!r} is out of range.", f"Write --{name} 1,4,16 with {kind} above 0."
            )
        numbers.append(value)
    return list(dict.fromkeys(numbers))
