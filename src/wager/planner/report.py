"""The results of `wager plan`: summary, table, notes, and the JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from typing import Any

from wager.arch import RELEASED_HEADS, TABLE, WITH_MTP
from wager.economics.acceptance import CURVES, MEASURED_ON
from wager.errors import UsageError
from wager.models.weights import num_parameters
from wager.planner.acceptance import AcceptanceRates
from wager.planner.drafting import PassDraftCost
from wager.planner.plan import SPARE_SHARE, Deployment, PlanPoint

LARGEST_GRID, MOST_CELLS = 2000, 200
"""Points of a plan, and pairs of context and acceptance, each of which takes up to half a second."""

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
    "fastest (off: none; +: the deepest that was tried; with --tree nodes/levels); speed-up: over plain decoding at "
    "the same batch; "
    "tok/round: tokens that a request gets from a step, accepted ones and the model's own one; plain: time of a "
    "step without draft tokens; step: of one that verifies them; draft: of making them; tok/s/user: tokens a second "
    "of one request; tok/s: of all; slower at: depths slower than plain decoding; break-even: the acceptance from "
    "which one draft token pays off; waits for: the part that takes most of the step, its share, and what it waits "
    "for: memory (reading bytes), compute (arithmetic), both (some layers each), link (between devices) or a fixed "
    "time; memory: taken on every device (!: more than there is)."
)


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The results for all combinations of batches, contexts and acceptances; and by context and acceptance where plain
    decoding is fastest: the first and last of each range of batch sizes. `price`: dollars an hour of one device."""

    deployment: Deployment
    batches: Sequence[int]
    contexts: Sequence[int]
    acceptances: Sequence[AcceptanceRates]
    points: tuple[PlanPoint, ...]
    losing_batches: Mapping[tuple[int, AcceptanceRates], Sequence[tuple[int, int]]]
    price: float | None = None

    @classmethod
    def build(
        cls,
        deployment: Deployment,
        *,
        batches: Sequence[int],
        contexts: Sequence[int],
        acceptances: Sequence[AcceptanceRates],
        price: float | None = None,
    ) -> PlanReport:
        """UsageError for a point that is out of range, and for absurdly many of them."""
        cells = [(context, rate) for context in contexts for rate in acceptances]
        if len(cells) * len(batches) > LARGEST_GRID or len(cells) > MOST_CELLS:
            raise UsageError(
                f"{len(batches)} batches, {len(contexts)} contexts and {len(acceptances)} acceptance rates are "
                f"{len(cells) * len(batches)} points.",
                f"Plan at most {LARGEST_GRID} at once, of {MOST_CELLS} pairs of context and acceptance.",
            )
        points = [deployment.point(rate, batch=batch, context=context) for context, rate in cells for batch in batches]
        losing = {
            (context, rate): deployment.losing_batches(rate, batches=batches, context=context)
            for context, rate in cells
        }
        return cls(deployment, batches, contexts, acceptances, tuple(points), losing, price)

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
        tree = self.deployment.tree
        shape = f", trees of up to {tree.width} children a node" if tree else ""
        parameters = num_parameters(model)
        return [
            f"model     {model.name}: {parameters / 1e9:.4g}B parameters, {model.active / 1e9:.3g}B a token, "
            f"{model.num_layers} layers, {' and '.join(filter(None, stored))}{head} ({model.source})"
            + (f"; {model.left_out}" if model.left_out else ""),
            f"hardware  {device.name}{spread}: {peaks}, {_amount(device.bandwidth, 'B/s')}, {memory} ({device.label})",
            f"drafter   {drafter.name}{weights}{shape}",
            f"memory    {self._memory()}",
        ]

    def _memory(self) -> str:
        first = self.points[0].memory
        drafts = f" + drafter {_amount(first.drafter, 'B')}" if first.drafter else ""
        if first.memory is None:
            batches = "the device's memory is unknown"
        else:
            batches = "; ".join(
                f"at context {context} the largest batch that fits is {most}"
                if most
                else f"at context {context} not even one request fits"
                for context, most in self._largest_batches().items()
            )
        return f"weights {_amount(first.weights, 'B')}{drafts} a device; {batches} ({SPARE_SHARE:.0%} kept free)"

    def _largest_batches(self) -> dict[int, int | None]:
        return {context: self.deployment.largest_batch(max(1, context)) for context in self.contexts}

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Columns and rows; one row a point."""
        word = rank_word(self.deployment)
        columns = [f"tok/s/{word}" if word and column == "tok/s" else column for column in _COLUMNS]
        rows = [self._row(point) for point in self.points]
        if self.price is not None:
            columns.append("$/M tokens")
            for row, point in zip(rows, self.points, strict=True):
                row.append("{plain:,.3g} → {speculative:,.3g}".format(**self.dollars(point)))
        return columns, rows

    def dollars(self, point: PlanPoint) -> dict[str, float]:
        """Dollars for a million tokens of answers, of the devices' time: decoding without and with draft tokens, and
        with the prompts of these answers computed on the same devices."""
        devices, each = self.deployment.cost.cluster.tp, point.group_batch  # of a group
        rate = (self.price or 0.0) * devices / 3600 * 1e6
        plain, speculative = point.request_seconds
        return {
            "plain": rate * point.plain_step.seconds / each,
            "speculative": rate / (each * point.tokens_per_second),
            "plain_with_prompts": rate * plain / point.output,
            "with_prompts": rate * speculative / point.output,
        }

    def _row(self, point: PlanPoint) -> list[str]:
        chosen, binding = point.chosen, point.step.parts[point.step.binding]
        share = binding.seconds / point.step.seconds
        levels = "" if chosen.levels is None else f"/{chosen.levels}"
        depth = "off" if not chosen.depth else f"{chosen.depth}{levels}{'+' * point.at_max_depth}"
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
            token_rate(point.tokens_per_second),
            token_rate(point.group_batch * point.tokens_per_second),
            _slower_depths(point),
            pays,
            f"{point.step.binding} {share:.0%} {binding.bound}",
            _amount(point.memory.total, "B") + " !" * (point.memory.fits is False),
        ]

    def notes(self) -> list[str]:
        """Where plain decoding is fastest, what bounds the step, and the meaning of the columns."""
        tried = self.deployment.max_depth > 0 or self.deployment.depth is not None
        lines = [self._losing_batches(*cell) for cell in self.losing_batches if tried]
        lines += [self._waiting(context) for context in self.contexts]
        lines += [self._prefill(context) for context in self.contexts if context]
        return [*lines, *remarks(self.deployment, self.points), self._assumed(), _MEANINGS]

    @property
    def lacks_mtp(self) -> bool:
        """Whether an MTP module is planned that the published model is known not to have."""
        name = self.deployment.cost.model.name
        return self.deployment.drafter.name == "mtp" and name in TABLE and name not in WITH_MTP

    def _assumed(self) -> str:
        """The acceptance and the drafter that the plan assumes, since no datasheet has them."""
        drafter = self.deployment.drafter
        rates = ", ".join(rate.label for rate in self.acceptances if isinstance(rate.rates, float))
        words = []
        name, tree = self.deployment.cost.model.name, self.deployment.tree
        released = drafter.name.partition(":")[0] in RELEASED_HEADS or (drafter.name == "mtp" and name in WITH_MTP)
        if isinstance(drafter, PassDraftCost) and drafter.reads_states and not released:
            none = f"; the release of {name} has no MTP module" if self.lacks_mtp else ""
            words.append(f"that there is a drafter of the shape {drafter.name} for the model (--drafter-shape{none})")
        grows = isinstance(drafter, PassDraftCost) and drafter.max_depth is None
        if grows and tree is None and any(rate.noted and rate.noted.get("trees") for rate in self.acceptances):
            words.append("a pass of the drafter for every node of the measured trees (--tree: one for every level)")
        if tree and not all(rate.rounds for rate in self.acceptances):
            words.append(
                f"that a sibling is right {tree.sibling:g} of the time where those before it are wrong (--tree)"
            )
        if rates:
            words.append(f"the acceptance {rates} at every depth (--acceptance; `wager acceptance` measures yours)")
        curves = ", ".join(rate.label for rate in self.acceptances if rate.label in CURVES and rate.noted is None)
        if curves and name != MEASURED_ON:
            words.append(f"the acceptance {curves}, which was measured with {MEASURED_ON}")
        if self.deployment.cost.measured is None:
            words.append("kernels as fast as the figures of the device allow")
        return f"Assumed, not measured: {'; '.join(words) or 'nothing'}."

    def _losing_batches(self, context: int, acceptance: AcceptanceRates) -> str:
        where, ranges = (
            f"Plain decoding at context {context}, acceptance {acceptance.label}",
            self.losing_batches[context, acceptance],
        )
        low, high = min(self.batches), max(self.batches)
        if low == high:
            text = "is fastest: no depth pays off" if ranges else "is not the fastest: some depth pays off"
            return f"{where}, {text} at batch {low}."
        if not ranges:
            return f"{where}, is never fastest: some depth pays off at every batch from {low} to {high}."
        if ranges == [(low, high)]:
            return f"{where}, is always fastest: no depth pays off at any batch from {low} to {high}."
        spans = " and ".join(str(a) if a == b else f"{a} to {b}" for a, b in ranges)
        return f"{where}, is fastest at batch {spans}; elsewhere from {low} to {high} some depth pays off."

    def _waiting(self, context: int) -> str:
        """The part that takes most of plain decoding at each batch, its bound, and the cost of one more row."""
        by_batch = {point.batch: point for point in self.points if point.context == context}
        points = [by_batch[batch] for batch in sorted(by_batch)]
        words = []
        for (name, bound), run in groupby(points, key=_plain_bound):
            together = list(run)
            low, high = together[0].batch, together[-1].batch
            span = f"batch {low}" if low == high else f"batch {low} to {high}"
            costs = [point.marginal_costs["step"] for point in together]
            shown = [f"{max(0.0, cost):.0%}" for cost in (min(costs), max(costs))]
            marginal = " to ".join(dict.fromkeys(shown))
            words.append(f"{span}: {name} ({bound}), one more row adds {marginal} of what a row takes on average")
        return f"What plain decoding waits for at context {context}: " + "; ".join(words) + "."

    def _prefill(self, context: int) -> str:
        """Prompts and answers on the same devices."""
        label = self.points[-1].acceptance
        points = [point for point in self.points if (point.context, point.acceptance) == (context, label)]
        prefill, output = points[0].prefill[0], points[0].output
        words = []
        for point in {points[0].batch: points[0], points[-1].batch: points[-1]}.values():
            plain, speculative = point.request_seconds
            words.append(
                f"at batch {point.batch} the prompt is {prefill / plain:.0%} of the devices' time, and prompt and "
                f"answer together are {plain / speculative:.3g} times as fast"
            )
        acceptance = f", acceptance {label}" if len(self.acceptances) > 1 else ""
        return (
            f"Prompts of {context} tokens and answers of {output}{acceptance}: a prompt alone takes {_time(prefill)}; "
            f"{'; '.join(words)}."
        )

    # ---- JSON -------------------------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """The JSON of `wager plan --json`."""
        cost, drafter = self.deployment.cost, self.deployment.drafter
        model, device = cost.model, cost.device
        return {
            "points": [
                {**point.as_dict(), "dollars": None if self.price is None else self.dollars(point)}
                for point in self.points
            ],
            "model": {
                "name": model.name,
                "source": model.source,
                "left_out": model.left_out,
                "parameters": num_parameters(model),
                "active": model.active,
                "layers": model.num_layers,
                "context": model.context,
                "resident_bytes": model.resident_bytes,
                "streamed_bytes": model.streamed_bytes,
                "elements": dict(model.elements()),
                "kv_bytes": {str(context): model.kv_bytes(context) for context in self.contexts},
                "precision": asdict(model.precision),
            },
            "hardware": {
                **device.as_dict(),
                "tp": cost.cluster.tp,
                "ep": cost.cluster.ep,
                "groups": cost.cluster.groups,
                "balanced": cost.balanced,
                "total_batch": self.deployment.share < 1,
                "link_latency": cost.cluster.latency,
                "ridge": {kind: device.ridge(kind) for kind in device.peaks},
                "largest_batch": {str(context): most for context, most in self._largest_batches().items()},
            },
            "price": self.price,
            "drafter": {
                "name": drafter.name,
                "resident_bytes": drafter.resident_bytes,
                "device_bytes": drafter.device_bytes,
                "max_depth": drafter.max_depth,
                "max_context": drafter.max_context,
                "tree": None if self.deployment.tree is None else asdict(self.deployment.tree),
            },
            "remarks": list(remarks(self.deployment, self.points)),
            "routing": {"locality": cost.routing.locality, "popularity": cost.routing.popularity},
            "gutter": [
                {"context": context, "acceptance": rate.label, "batches": [list(batches) for batches in ranges]}
                for (context, rate), ranges in self.losing_batches.items()
            ],
        }


def _plain_bound(point: PlanPoint) -> tuple[str, str]:
    """The part that takes most of a plain step, and what it waits for."""
    part = point.plain_step.binding
    return part, point.plain_step.parts[part].bound


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


def token_rate(per_second: float) -> str:
    """Tokens a second, in three figures where they are few."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def _amount(value: float, unit: str) -> str:
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.4g} {letter}{unit}"
    return f"{value:.0f} {unit}"


# ---- remarks ---------------------------------------------------------------------------------------------------------


def rank_word(deployment: Deployment) -> str:
    """Whose batch and tokens a figure is: of a rank or a group under expert parallelism, else of all devices."""
    cluster = deployment.cost.cluster
    return "" if cluster.groups == 1 else "rank" if cluster.tp == 1 else "group"


def remarks(deployment: Deployment, points: Sequence[PlanPoint]) -> Iterator[str]:
    """What a figure assumes or a reader would not expect, most important first."""
    if any(point.memory.fits is False for point in points):
        yield "Memory: rows marked ! do not fit on the device; their times are a lower bound."
    deepest = deployment.max_depth
    if deployment.depth is None and deepest == 0:
        yield "No draft depth was tried (--max-depth 0): the figures are those of plain decoding."
    elif any(point.at_max_depth for point in points):
        yield f"Depth {deepest}+ is the deepest that was tried (--max-depth {deepest}); a deeper one may be faster."
    yield from _of_the_cluster(deployment)
    target, drafter = deployment.cost.model, deployment.drafter
    if isinstance(drafter, PassDraftCost) and not drafter.reads_states and drafter.cost.model.vocab != target.vocab:
        yield (
            f"Vocabulary: {drafter.cost.model.name} has {drafter.cost.model.vocab} tokens, {target.name} "
            f"{target.vocab}. If the tokenizer is the same and only the padding differs, the pair is run as it is; "
            "else guesses must be translated (--drafter tli:PATH or slem:PATH), which is not priced here and lowers "
            "acceptance."
        )
    if measured := deployment.cost.measured:
        yield (
            f"Steps of up to {measured.rows[-1]} rows were measured, larger ones are extrapolated; their parts are the "
            "roofline's shares of them."
        )


def _of_the_cluster(deployment: Deployment) -> Iterator[str]:
    """How experts are chosen and spread, and which heads several devices keep."""
    cost = deployment.cost
    cluster, routing, experts = cost.cluster, cost.routing, cost.model.experts
    words = []
    if experts is not None and routing.popularity is not None:
        times = max(routing.popularity) * experts.count / experts.active
        words.append(f"chosen by the given popularity (the most popular one {times:.1f} times as often as on average)")
    if experts is not None and routing.locality < 1:
        words.append(f"T tokens of one request choose as many distinct ones as T^{routing.locality:.3g} unrelated ones")
    if words:
        yield f"Experts: {', and '.join(words)}."
    if word := rank_word(deployment):
        whose = f"group of {cluster.tp} devices" if word == "group" else "rank"
        balanced = "the experts are balanced, so every rank reads the mean"
        spread = balanced if cost.balanced else "a step waits for the rank with most experts to read"
        batches = "a batch is divided among all, tok/s" if deployment.share < 1 else "batch and tok/s"
        yield (
            f"Expert parallelism: {batches} are those of one {whose}, memory that of one device; all "
            f"{cluster.groups} decode {cluster.groups} times as many (tokens_per_s_all in the JSON). Experts: {spread}."
        )
    streams = [each for layer in cost.model.layers for each in layer.attention.streams(1, 1, cost.model.precision)]
    for shards in sorted({stream.shards for stream in streams if stream.shards % cluster.tp}):
        kept = -(-shards // cluster.tp)
        yield (
            f"Tensor parallelism: {shards} key-value head{'s' if shards > 1 else ''} over {cluster.tp} devices: each "
            f"keeps {kept} of them, so together they keep {kept * cluster.tp / shards:.3g} times the cache."
        )
