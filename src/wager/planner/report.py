"""The results of `wager plan`: summary, table, notes, and the JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from typing import Any

from wager.planner.acceptance import AcceptanceRates
from wager.planner.drafting import PassDraftCost, StagedDraftCost
from wager.planner.inputs import check_finite
from wager.planner.options import PlanGrid
from wager.planner.plan import SPARE_SHARE, BatchRange, Deployment, PlanPoint

_COLUMNS = (
    "context",
    "accept",
    "batch",
    "depth",
    "speed-up",
    "tok/round",
    "plain",
    "step",
    "draft",
    "tok/s/user",
    "tok/s",
    "slower at",
    "break-even",
    "waits for",
    "memory",
)

_MEANINGS = (
    "Columns: context: positions that each request has cached; accept: the probability that a draft token is "
    "accepted if those before it were; batch: requests decoded together; depth: the number of draft tokens that is "
    "fastest (off: none; +: the deepest that was tried); speed-up: over plain decoding at the same batch; "
    "tok/round: tokens that a request gets from a step, accepted ones and the model's own one; plain: time of a "
    "step without draft tokens; step: of one that verifies them; draft: of making them; tok/s/user: tokens a second "
    "of one request; tok/s: of all; slower at: depths slower than plain decoding; break-even: the acceptance from "
    "which one draft token pays off; waits for: the part that takes most of the step, its share, and what it waits "
    "for: memory (reading bytes), compute (arithmetic), both (some layers each), link (between devices) or a fixed "
    "time; memory: taken on every device (!: more than there is)."
)


@dataclass(frozen=True, slots=True)
class LosingBatches:
    """The batch sizes at which no depth is faster than plain decoding, at one context and acceptance."""

    context: int
    acceptance: AcceptanceRates
    ranges: Sequence[BatchRange]


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The results at every point of the grid, and where plain decoding is fastest."""

    deployment: Deployment
    grid: PlanGrid
    points: tuple[PlanPoint, ...]
    losing_batches: tuple[LosingBatches, ...]

    @classmethod
    def build(cls, deployment: Deployment, grid: PlanGrid) -> PlanReport:
        """UsageError for a point that is out of range."""
        cells = [(context, rate) for context in grid.contexts for rate in grid.acceptances]
        points = [
            deployment.point(rate, batch=batch, context=context) for context, rate in cells for batch in grid.batches
        ]
        losing = [
            LosingBatches(context, rate, deployment.losing_batches(rate, batches=grid.batches, context=context))
            for context, rate in cells
        ]
        return cls(deployment, grid, tuple(points), tuple(losing))

    # ---- text -------------------------------------------------------------------------------------------------------

    def summary(self) -> list[str]:
        """What is planned: the model, the device, the drafter, the memory."""
        cost, drafter = self.deployment.cost, self.deployment.drafter
        model, device, cluster = cost.model, cost.device, cost.cluster
        precision = model.precision
        stored = dict.fromkeys((precision.weights.name, precision.experts.name if model.sparse else ""))
        head = "" if precision.head.name in stored else f", head {precision.head.name}"
        peaks = ", ".join(f"{kind} {_amount(peak, 'FLOP/s')}" for kind, peak in device.peaks.items())
        kinds = [f"{kind} parallel" for kind, size in (("tensor", cluster.tp), ("expert", cluster.ep)) if size > 1]
        groups = f", {cluster.groups} groups of {cluster.tp}" if len(kinds) > 1 else ""
        spread = f" x {cluster.devices} ({' and '.join(kinds)}{groups})" if kinds else ""
        memory = "memory unknown" if device.memory is None else f"{_amount(device.memory, 'B')} memory"
        weights = f", {_amount(drafter.resident_bytes, 'B')} of weights" if drafter.resident_bytes else ""
        return [
            f"model     {model.name}: {model.parameters / 1e9:.4g}B parameters, {model.active / 1e9:.3g}B a token, "
            f"{model.num_layers} layers, {' and '.join(filter(None, stored))}{head} ({model.source})",
            f"hardware  {device.name}{spread}: {peaks}, {_amount(device.bandwidth, 'B/s')}, {memory} ({device.label})",
            f"drafter   {drafter.name}{weights}{self._placement()}",
            f"memory    {self._memory()}",
        ]

    def _placement(self) -> str:
        """What the drafter runs on, where that is not what the target runs on, and beside what."""
        device = self.deployment.drafter.own_device
        return (f", on {device.name} of its own" if device else "") + (
            ", beside verification" if self.deployment.asynchronous else ""
        )

    def _memory(self) -> str:
        first = self.points[0].memory
        drafts = f" + drafter {_amount(first.drafter, 'B')}" if first.drafter else ""
        largest = [(context, self.deployment.largest_batch(max(1, context))) for context in self.grid.contexts]
        batches = "; ".join(
            "the device's memory is unknown"
            if most is None
            else f"at context {context} the largest batch that fits is {most}"
            if most
            else f"at context {context} not even one request fits"
            for context, most in largest[: 1 if first.memory is None else None]
        )
        return f"weights {_amount(first.weights, 'B')}{drafts} a device; {batches} ({SPARE_SHARE:.0%} kept free)"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Columns and rows; one row a point."""
        word = rank_word(self.deployment)
        columns = [f"tok/s/{word}" if word and column == "tok/s" else column for column in _COLUMNS]
        return columns, [self._row(point) for point in self.points]

    def _row(self, point: PlanPoint) -> list[str]:
        chosen, binding = point.chosen, point.step.parts[point.step.binding]
        share = binding.seconds / point.step.seconds
        fits = {None: "", True: "", False: " !"}[point.fits]
        depth = "off" if not chosen.depth else f"{chosen.depth}{'+' * point.at_max_depth}"
        pays = "–" if len(point.outcomes) == 1 else "never" if point.break_even is None else f"{point.break_even:.2f}"
        return [
            str(point.context),
            point.acceptance,
            str(point.batch),
            depth,
            f"{chosen.speedup:.3f}",
            f"{chosen.tokens:.2f}",
            _time(point.plain_step.seconds),
            _time(chosen.step_s),
            _time(chosen.draft_s) if chosen.draft_s else "–",
            f"{point.tokens_per_second:,.1f}",
            f"{point.batch * point.tokens_per_second:,.0f}",
            _slower_depths(point),
            pays,
            f"{point.step.binding} {share:.0%} {binding.bound}",
            _amount(point.memory.total, "B") + fits,
        ]

    def notes(self) -> list[str]:
        """Where plain decoding is fastest, what bounds the step, and the meaning of the columns."""
        tried = self.deployment.max_depth > 0 or self.deployment.depth is not None
        lines = [self._losing_batches(losing) for losing in self.losing_batches if tried]
        lines += [self._waiting(context) for context in self.grid.contexts]
        lines += remarks(self.deployment, self.points)
        return [*lines, self._assumed(), _MEANINGS]

    def _assumed(self) -> str:
        """What no datasheet says."""
        drafter = self.deployment.drafter
        rates = ", ".join(rate.label for rate in self.grid.acceptances if isinstance(rate.rates, float))
        words = []
        if isinstance(drafter, PassDraftCost) and drafter.taps and drafter.own_device is None:
            words.append(f"that there is a drafter of the shape {drafter.name} for the model (--drafter-shape)")
        if rates:
            words.append(f"the acceptance {rates} at every depth (--acceptance; `wager acceptance` measures yours)")
        if self.deployment.cost.measured is None:
            words.append("kernels as fast as the figures of the device allow")
        return f"Assumed, not measured: {'; '.join(words) or 'nothing'}."

    def _losing_batches(self, losing: LosingBatches) -> str:
        where = f"Plain decoding at context {losing.context}, acceptance {losing.acceptance.label}"
        low, high = min(self.grid.batches), max(self.grid.batches)
        if low == high:
            text = "is fastest: no depth pays off" if losing.ranges else "is not the fastest: some depth pays off"
            return f"{where}, {text} at batch {low}."
        if not losing.ranges:
            return f"{where}, is never fastest: some depth pays off at every batch from {low} to {high}."
        if losing.ranges == [BatchRange(low, high)]:
            return f"{where}, is always fastest: no depth pays off at any batch from {low} to {high}."
        spans = " and ".join(str(a) if a == b else f"{a} to {b}" for a, b in losing.ranges)
        return f"{where}, is fastest at batch {spans}; elsewhere from {low} to {high} some depth pays off."

    def _waiting(self, context: int) -> str:
        """The part that takes most of plain decoding at each batch, its bound, and the cost of one more row."""
        points = sorted({point.batch: point for point in self.points if point.context == context}.items())
        words = []
        for (name, bound), run in groupby(points, key=lambda item: item[1].plain_bound):
            batches = list(run)
            low, high = batches[0], batches[-1]
            span = f"batch {low[0]}" if low[0] == high[0] else f"batch {low[0]} to {high[0]}"
            costs = [point.marginal_costs["step"] for _, point in batches]
            shown = [f"{max(0.0, cost):.0%}" for cost in (min(costs), max(costs))]
            marginal = " to ".join(dict.fromkeys(shown))
            words.append(f"{span}: {name} ({bound}), one more row adds {marginal} of what a row takes on average")
        return f"What plain decoding waits for at context {context}: " + "; ".join(words) + "."

    # ---- JSON -------------------------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """The JSON of `wager plan --json`. UsageError for a figure that is not finite."""
        values = self._values()
        check_finite(values)
        return values

    def _values(self) -> dict[str, Any]:
        cost, drafter = self.deployment.cost, self.deployment.drafter
        model, device = cost.model, cost.device
        largest = {str(context): self.deployment.largest_batch(max(1, context)) for context in self.grid.contexts}
        return {
            "points": [point.as_dict() for point in self.points],
            "model": {
                "name": model.name,
                "source": model.source,
                "parameters": model.parameters,
                "active": model.active,
                "layers": model.num_layers,
                "context": model.context,
                "resident_bytes": model.resident_bytes,
                "streamed_bytes": model.streamed_bytes,
                "elements": dict(model.elements()),
                "kv_bytes": {str(context): model.kv_bytes(context) for context in self.grid.contexts},
                "precision": asdict(model.precision),
            },
            "hardware": {
                **device.as_dict(),
                "tp": cost.cluster.tp,
                "ep": cost.cluster.ep,
                "groups": cost.cluster.groups,
                "balanced": cost.balanced,
                "link_latency": cost.cluster.latency,
                "ridge": {kind: device.ridge(kind) for kind in device.peaks},
                "largest_batch": largest,
            },
            "drafter": {
                "name": drafter.name,
                "resident_bytes": drafter.resident_bytes,
                "device_bytes": drafter.device_bytes,
                "own_device": drafter.own_device.name if drafter.own_device else None,
                "max_depth": drafter.max_depth,
                "max_context": drafter.max_context,
                "hit_rate": self.deployment.hit_rate,
                "draft_outcomes": self.deployment.draft_outcomes,
            },
            "remarks": remarks(self.deployment, self.points),
            "routing": {"locality": cost.routing.locality, "popularity": cost.routing.popularity},
            "gutter": [
                {
                    "context": losing.context,
                    "acceptance": losing.acceptance.label,
                    "batches": [list(batches) for batches in losing.ranges],
                }
                for losing in self.losing_batches
            ],
        }


def _slower_depths(point: PlanPoint) -> str:
    """Depths at which plain decoding is faster, as ranges."""
    depths, last = point.losing_depths, point.outcomes[-1].depth
    if not depths:
        return "none"
    if len(depths) == last:
        return "all"
    cuts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(depths)) if b != a + 1), len(depths)]
    runs = [depths[a:b] for a, b in pairwise(cuts)]
    return ", ".join(f"≥{r[0]}" if r[-1] == last else str(r[0]) if len(r) == 1 else f"{r[0]}–{r[-1]}" for r in runs)


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _amount(value: float, unit: str) -> str:
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.4g} {letter}{unit}"
    return f"{value:.0f} {unit}"


# ---- remarks ---------------------------------------------------------------------------------------------------------


def remarks(deployment: Deployment, points: Sequence[PlanPoint]) -> list[str]:
    """What a figure assumes or a reader would not expect, most important first."""
    return [
        *_memory(points),
        *_depth(deployment, points),
        *_routing(deployment),
        *_groups(deployment),
        *_key_value_heads(deployment),
        *_vocabulary(deployment),
        *_asynchronous(deployment),
        *_measurements(deployment),
    ]


def rank_word(deployment: Deployment) -> str:
    """Whose batch and tokens a figure is: of a rank or a group under expert parallelism, else of all devices."""
    cluster = deployment.cost.cluster
    return "" if cluster.groups == 1 else "rank" if cluster.tp == 1 else "group"


def _memory(points: Sequence[PlanPoint]) -> list[str]:
    lines = []
    if any(point.memory.fits is False for point in points):
        lines.append("Memory: rows marked ! do not fit on the device; their times are a lower bound.")
    if any(point.drafter_memory is not None and point.drafter_memory.fits is False for point in points):
        lines.append("Memory: rows marked ! do not fit on the drafter's own device.")
    return lines


def _depth(deployment: Deployment, points: Sequence[PlanPoint]) -> list[str]:
    if deployment.depth is None and deployment.max_depth == 0:
        return ["No draft depth was tried (--max-depth 0): the figures are those of plain decoding."]
    if any(point.at_max_depth for point in points):
        return [
            f"Depth {deployment.max_depth}+ is the deepest that was tried (--max-depth {deployment.max_depth}); a "
            "deeper one may be faster."
        ]
    return []


def _routing(deployment: Deployment) -> list[str]:
    routing, experts = deployment.cost.routing, deployment.cost.model.experts
    if experts is None or (routing.popularity is None and routing.locality == 1):
        return []
    words = []
    if routing.popularity is not None:
        times = max(routing.popularity) * experts.count / experts.active
        words.append(f"chosen by the given popularity (the most popular one {times:.1f} times as often as on average)")
    if routing.locality < 1:
        words.append(f"T tokens of one request choose as many distinct ones as T^{routing.locality:.3g} unrelated ones")
    return [f"Experts: {', and '.join(words)}."]


def _groups(deployment: Deployment) -> list[str]:
    cluster, word = deployment.cost.cluster, rank_word(deployment)
    if not word:
        return []
    whose = f"group of {cluster.tp} devices" if word == "group" else "rank"
    spread = (
        "the experts are balanced, so every rank reads the mean"
        if deployment.cost.balanced
        else ("a step waits for the rank with most experts to read")
    )
    return [
        f"Expert parallelism: batch and tok/s are those of one {whose}, memory that of one device; all "
        f"{cluster.groups} decode {cluster.groups} times as many (tokens_per_s_all in the JSON). Experts: {spread}."
    ]


def _key_value_heads(deployment: Deployment) -> list[str]:
    cost, tp = deployment.cost, deployment.cost.cluster.tp
    heads = {
        stream.shards
        for layer in cost.model.layers
        for stream in layer.attention.streams(1, 1, cost.model.precision)
        if stream.shards % tp
    }
    return [
        f"Tensor parallelism: {shards} key-value head{'s' if shards > 1 else ''} over {tp} devices: each keeps "
        f"{-(-shards // tp)} of them, so together they keep {-(-shards // tp) * tp / shards:.3g} times the cache."
        for shards in sorted(heads)
    ]


def _vocabulary(deployment: Deployment) -> list[str]:
    target, drafter = deployment.cost.model, deployment.drafter
    small = drafter.model if isinstance(drafter, StagedDraftCost) else drafter
    if not isinstance(small, PassDraftCost) or small.taps or small.cost.model.vocab == target.vocab:
        return []
    return [
        f"Vocabulary: {small.cost.model.name} has {small.cost.model.vocab} tokens, {target.name} {target.vocab}. "
        "If the tokenizer is the same and only the padding differs, the pair is run as it is; else guesses must be "
        "translated (--drafter tli:PATH or slem:PATH), which is not priced here and lowers acceptance."
    ]


def _asynchronous(deployment: Deployment) -> list[str]:
    if not deployment.asynchronous:
        return []
    if deployment.hit_rate is not None:
        share = f"{deployment.hit_rate:.0%} of the rounds take"
    else:
        number = deployment.draft_outcomes
        share = f"rounds whose outcome was one of the {number} likeliest, for all sequences of a batch, take"
    lines = [
        f"Asynchronous drafting: {share} the longer of step and draft, the others "
        "their sum. Drafting for several outcomes is priced as one draft."
    ]
    drafter = deployment.drafter
    if isinstance(drafter, PassDraftCost | StagedDraftCost) and drafter.own_device is None:
        lines.append(
            "The drafter has no device of its own (--drafter-hardware) and competes with the step it runs beside: the "
            "times are a lower bound."
        )
    if isinstance(drafter, PassDraftCost) and drafter.taps:
        lines.append(
            f"{drafter.name} reads hidden states of the step that it runs beside, which are not known yet: it must "
            "guess from older ones."
        )
    return lines


def _measurements(deployment: Deployment) -> list[str]:
    measured = deployment.cost.measured
    if measured is None:
        return []
    return [
        f"Steps of up to {measured.rows[-1]} rows were measured, larger ones are extrapolated; "
        "their parts are the roofline's shares of them."
    ]
