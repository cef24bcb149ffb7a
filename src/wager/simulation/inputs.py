"""The options of `wager replay` as values: requests, what a step and each drafter cost, and how requests arrive.

A wrong value is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wager.config import DEFAULT_MODEL
from wager.economics.acceptance import CURVES
from wager.economics.options import parse_objective, parse_seconds
from wager.errors import UsageError
from wager.inputs import expand_path
from wager.planner import inputs as plan_inputs
from wager.planner.calibrated import CalibratedCostModel
from wager.planner.draft_cost import DraftCost
from wager.planner.latency import RooflineLatency
from wager.planner.roofline import CostModel
from wager.planner.values import parse_acceptances
from wager.simulation import loads as replay_loads
from wager.simulation.comparison import ReplaySetting
from wager.simulation.loads import DEFAULT_OUTPUT, DEFAULT_PROMPT, ReplayOptions
from wager.simulation.published_latency import PublishedLatency
from wager.simulation.synthetic import SyntheticDrafter, SyntheticTraces
from wager.simulation.traces import RecordedTraces, TraceSource
from wager.simulation.workload import Workload

CONSTANT_RATE_DEPTH = 8
"""How deep a drafter of one constant acceptance rate drafts, unless --max-depth says."""

PUBLISHED = "published"
"""The name of the published step times in --hardware."""

_MODEL, _HARDWARE = "Qwen3.6-35B-A3B", "B200"  # without --model and --hardware; those of the published step times
_STEP_FLAGS = ("tp", "ep", "locality", "popularity", "precision", "cache", "overhead")
_SHAPES = {"mtp": "mtp", "dflash": "block:16", "ngram": "free"}  # of drafters whose name says it
_LONGEST_POLICY_TIME = 60.0  # seconds a step


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
    """What the command simulates, and lines that say where its prices come from."""

    setting: ReplaySetting
    workloads: Sequence[Workload]
    step_times: str
    prices: Sequence[DrafterPrice]


def replay_query(options: ReplayOptions) -> ReplayQuery:
    """UsageError or ModelError names what is not known or out of range."""
    recorded = RecordedTraces.read(options.trace) if options.trace else None
    for flag, value in (("curve", options.curves), ("prompt", options.prompt), ("output", options.output)):
        if recorded and value:
            raise UsageError(f"A trace has its own answers, so --{flag} has no effect.", "Leave one of them out.")
    curves = {} if recorded else _curves(options)
    limits = dict(recorded.max_depths()) if recorded else {name: len(curve) for name, curve in curves.items()}
    cost = _cost(options)
    words = _shapes_by_drafter(options.shape, list(limits))
    prices, costs = [], {}
    for name, limit in limits.items():
        shape, reason = _shape(name, words, cost)
        costs[name] = _draft_cost(cost, shape, options)
        depth = _depth(costs[name], shape, limit, options)
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
    _check_context(cost, traces)
    published = _is_published(options)
    setting = ReplaySetting(
        traces,
        PublishedLatency({price.name: price.shape for price in prices}) if published else machine,
        parse_objective(options.objective),
        options.tp,
        _policy_seconds(options.policy_time),
        machine,
        plan_inputs.parse_hit_rate(options.hit_rate, draft_async=options.draft_async),
    )
    return ReplayQuery(setting, replay_loads.workloads(traces, options), _step_times(cost, published=published), prices)


# ---- requests -------------------------------------------------------------------------------------------------------


def _curves(options: ReplayOptions) -> dict[str, tuple[float, ...]]:
    """Survival by drafter."""
    curves: dict[str, tuple[float, ...]] = {}
    for word in [part.strip() for curve in options.curves or ("mtp",) for part in curve.split(",")]:
        name, survival = (word, CURVES[word]) if word in CURVES else _curve(word, options.max_depth)
        if name in curves:
            raise UsageError(f"There are two curves named {name!r}.", "Give every drafter a name of its own.")
        curves[name] = survival
    return curves


def _curve(word: str, max_depth: int | None) -> tuple[str, tuple[float, ...]]:
    """Name and survival of a curve that is not published."""
    if not replay_loads.is_number(word) and not expand_path(word).is_file():
        known = ", ".join(CURVES)
        raise UsageError(
            f"The curve {word!r} is not known.", f"Known by name: {known}. Or give a rate such as 0.7, or a JSON file."
        )
    [rates] = parse_acceptances(word)
    depth = rates.max_depth or max_depth or CONSTANT_RATE_DEPTH
    return rates.label, tuple([max(1e-4, chance) for chance in rates.survival(depth)])


def _draft_cost(cost: CostModel, shape: str, options: ReplayOptions) -> DraftCost:
    """On a device of its own if there is one for drafters; what takes no time needs none."""
    hardware, link = options.drafter_hardware, options.drafter_link
    if hardware is not None and _is_published(options):
        raise UsageError(
            "--drafter-hardware has no effect on the published step times.", "Name another --hardware, or leave it out."
        )
    if shape == "free":
        hardware = link = None
    return plan_inputs.draft_cost(cost, shape=shape, drafter_cost=None, hardware=hardware, link=link)


# ---- what steps and drafters cost -----------------------------------------------------------------------------------


def _is_published(options: ReplayOptions) -> bool:
    return options.hardware is not None and options.hardware.lower() == PUBLISHED


def _cost(options: ReplayOptions) -> CostModel:
    """Of the model on the hardware, as `plan` finds them; of the published step times, for memory and context."""
    if options.model is not None and options.hardware is None:
        raise UsageError("--model and --hardware go together.", "Say on which hardware: --hardware H100, or this.")
    settings = plan_inputs.PlanSettings(
        tp=options.tp,
        ep=options.ep,
        locality=options.locality,
        popularity=options.popularity,
        precision=options.precision,
        cache=options.cache,
        overhead=options.overhead,
    )
    if _is_published(options):
        changed = ["model"] * (options.model is not None) + settings.given(_STEP_FLAGS)
        if changed:
            cause = f"--{changed[0]} has no effect on the published step times: {_MODEL} on a {_HARDWARE}."
            raise UsageError(cause, "Name another --hardware, or leave it out.")
    if options.hardware is None or _is_published(options):
        return plan_inputs.plan_query(_MODEL, _HARDWARE, settings).cost
    return plan_inputs.plan_query(options.model or DEFAULT_MODEL, options.hardware, settings).cost


def _step_times(cost: CostModel, *, published: bool) -> str:
    """Where the seconds of a step come from."""
    where = f"{cost.model.name} on {cost.device.name}"
    if published:
        return f"{where}, as published (one maximum over a pass; the cost model adds up its parts)"
    if isinstance(cost, CalibratedCostModel):
        last = cost.measured.rows[-1]
        return f"{where} ({cost.device.label}); steps of more than {last} rows are extrapolated"
    spread = f", tp {cost.cluster.tp}" * (cost.cluster.tp > 1) + f", ep {cost.cluster.ep}" * (cost.cluster.ep > 1)
    return f"{where}{spread}, by the cost model of `wager plan`"


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
    curves = cost.measured.drafters if isinstance(cost, CalibratedCostModel) else {}
    if name in curves:
        return name, "as calibrated"
    if name in _SHAPES:
        return _SHAPES[name], "its own shape"
    return next(iter(curves), "mtp"), "no --drafter-shape given"


def _depth(cost: DraftCost, shape: str, limit: int, options: ReplayOptions) -> int:
    """How deep a drafter drafts: as far as its curve is known, its shape can, and --max-depth allows."""
    bounds = [limit, cost.max_depth, options.max_depth]
    depth = min([bound for bound in bounds if bound is not None])
    if depth < 1 <= limit:
        raise UsageError(f"A drafter of the shape {shape!r} drafts {depth} tokens.", "Give it room for one.")
    return depth


def _check_context(cost: CostModel, traces: TraceSource) -> None:
    if traces.longest_context() > cost.model.context:
        raise UsageError(
            f"A request of {traces.longest_context()} positions, prompt and answer, is out of range.",
            f"{cost.model.name} was made for 0 to {cost.model.context} positions.",
        )


def _policy_seconds(text: str) -> float | None:
    if text == "measured":
        return None
    seconds = parse_seconds("policy-time", text)
    if not seconds <= _LONGEST_POLICY_TIME:
        raise UsageError(f"policy-time = {text!r} is out of range.", "Give measured, or a time a step, such as 20us.")
    return seconds
