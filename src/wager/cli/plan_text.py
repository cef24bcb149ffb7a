"""The bill of `wager plan` in words and figures: opening lines, a table, notes, and the JSON. Draws nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from typing import Any

from wager.cli.plan_inputs import Grid
from wager.economics.costmodel.bill import AcceptanceRates, PlanPoint, PlanQuery
from wager.economics.costmodel.calibrated import CalibratedCostModel
from wager.economics.costmodel.memory import SPARE, largest_batch

Gutter = list[tuple[int, int]]
_COLUMNS = ("context", "accept", "batch", "depth", "speed-up", "tok/round", "plain", "step", "draft", "tok/s each",
            "tok/s", "loses", "1st guess", "waits for", "memory")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """Every point of the grid with its bill, and where off wins, by context and acceptance."""

    question: PlanQuery
    grid: Grid
    points: tuple[PlanPoint, ...]
    gutters: tuple[tuple[int, AcceptanceRates, Gutter], ...]

    @classmethod
    def of(cls, question: PlanQuery, grid: Grid) -> Answer:
        cells = [(context, rate) for context in grid.contexts for rate in grid.acceptances]
        return cls(
            question,
            grid,
            tuple(
                question.point(rate, batch=batch, context=context) for context, rate in cells for batch in grid.batches
            ),
            tuple(
                (context, rate, question.gutter(rate, batches=grid.batches, context=context)) for context, rate in cells
            ),
        )

    # ---- for people -------------------------------------------------------------------------------------------------

    def opening(self) -> list[str]:
        """What is billed: the model, the machine, the drafter, the memory."""
        cost, drafter = self.question.cost, self.question.drafter
        model, device, cluster = cost.model, cost.device, cost.cluster
        stored = dict.fromkeys((model.precision.weights.name, model.precision.experts.name if model.sparse else ""))
        peaks = ", ".join(f"{kind} {_amount(peak, 'FLOP/s')}" for kind, peak in device.peaks.items())
        kind = "tensor" if cluster.tp > 1 else "expert"
        spread = f" x {cluster.devices} ({kind} parallel)" if cluster.devices > 1 else ""
        memory = "memory unknown" if device.memory is None else f"{_amount(device.memory, 'B')} memory"
        own = f", {_amount(drafter.resident_bytes, 'B')} of weights" if drafter.resident_bytes else ""
        return [
            f"model     {model.name}: {model.parameters / 1e9:.4g}B parameters, {model.active / 1e9:.3g}B a token, "
            f"{model.num_layers} layers, {' and '.join(filter(None, stored))} ({model.source})",
            f"hardware  {device.name}{spread}: {peaks}, {_amount(device.bandwidth, 'B/s')}, {memory} ({device.label})",
            f"drafter   {drafter.name}{own}",
            f"memory    {self._memory()}",
        ]

    def _memory(self) -> str:
        cost, drafter = self.question.cost, self.question.drafter
        first = self.points[0].memory
        drafts = f" + drafter {_amount(first.drafter, 'B')}" if first.drafter else ""
        found = [(context, largest_batch(cost, drafter, context=max(1, context))) for context in self.grid.contexts]
        room = "; ".join(
            "the device's is unknown" if most is None
            else f"at context {context} the largest batch that fits is {most}" if most
            else f"at context {context} not even one request fits"
            for context, most in found[: 1 if first.memory is None else None]
        )  # fmt: skip
        return f"weights {_amount(first.weights, 'B')}{drafts} a device; {room} ({SPARE:.0%} kept free)"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Columns and rows; one row a point."""
        return list(_COLUMNS), [self._row(point) for point in self.points]

    def _row(self, point: PlanPoint) -> list[str]:
        chosen, binding = point.chosen, point.step.parts[point.step.binding]
        share = binding.seconds / point.step.seconds
        fits = {None: "", True: "", False: " !"}[point.memory.fits]
        return [
            str(point.context), point.acceptance, str(point.batch), "off" if not chosen.depth else str(chosen.depth),
            f"{chosen.speedup:.3f}", f"{chosen.tokens:.2f}", _time(point.plain.seconds), _time(chosen.step_s),
            _time(chosen.draft_s) if chosen.draft_s else "–", f"{point.tokens_per_second:,.1f}",
            f"{point.batch * point.tokens_per_second:,.0f}", _losing(point),
            "never" if point.break_even is None else f"{point.break_even:.2f}",
            f"{point.step.binding} {share:.0%} {binding.bound}", _amount(point.memory.total, "B") + fits,
        ]  # fmt: skip

    def notes(self) -> list[str]:
        """What the table means: the gutter, what binds, and how columns are to be read."""
        lines = [self._gutter(*each) for each in self.gutters]
        lines += [self._binding(context) for context in self.grid.contexts]
        if any(point.memory.fits is False for point in self.points):
            lines.append("Memory: rows marked ! do not fit on the device; their times are a bound, not a forecast.")
        cost = self.question.cost
        if isinstance(cost, CalibratedCostModel):
            most = cost.surface.rows[-1]
            lines.append(
                f"Steps of up to {most} rows were measured, larger ones lie on the last line; parts are the roofline's."
            )
        lines.append(
            "Columns: speed-up is over plain decoding at the same batch; loses: depths slower than plain decoding; "
            "1st guess: the acceptance from which one guess pays; tok/round counts the bonus token."
        )
        return lines

    def _gutter(self, context: int, rate: AcceptanceRates, runs: Gutter) -> str:
        where = f"Gutter at context {context}, acceptance {rate.label}"
        low, high = min(self.grid.batches), max(self.grid.batches)
        if not runs:
            return f"{where}: none. Some depth pays at every batch from {low} to {high}."
        if runs == [(low, high)]:
            return f"{where}: everywhere. No depth pays at any batch from {low} to {high}; leave speculation off."
        spans = " and ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs)
        return f"{where}: off wins at batch {spans}; elsewhere from {low} to {high} some depth pays."

    def _binding(self, context: int) -> str:
        """How what plain decoding waits for changes with the batch, and what one more row costs there."""
        points = sorted({point.batch: point for point in self.points if point.context == context}.items())
        words = []
        for (name, bound), run in groupby(points, key=lambda item: _waits(item[1])):
            batches = list(run)
            low, high = batches[0], batches[-1]
            span = f"batch {low[0]}" if low[0] == high[0] else f"batch {low[0]} to {high[0]}"
            rises = [point.prices["step"] for _, point in batches]
            prices = [f"{rise:.2f}" for rise in (min(rises), max(rises))]
            price = " to ".join(dict.fromkeys(prices))
            words.append(f"{span}: {name} ({bound}), one more row costs {price} of an average one")
        return f"What binds plain decoding at context {context}: " + "; ".join(words) + "."

    # ---- for programs -----------------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """The JSON of `wager plan --json`."""
        cost, drafter = self.question.cost, self.question.drafter
        model, device = cost.model, cost.device
        rooms = {str(c): largest_batch(cost, drafter, context=max(1, c)) for c in self.grid.contexts}
        return {
            "points": [point.as_dict() for point in self.points],
            "model": {
                "name": model.name, "source": model.source, "parameters": model.parameters, "active": model.active,
                "layers": model.num_layers, "context": model.context, "resident_bytes": model.resident_bytes,
                "streamed_bytes": model.streamed_bytes, "elements": dict(model.elements()),
                "kv_bytes": {str(context): model.kv_bytes(context) for context in self.grid.contexts},
                "precision": asdict(model.precision),
            },
            "hardware": {
                **device.as_dict(), "tp": cost.cluster.tp, "ep": cost.cluster.ep,
                "ridge": {kind: device.ridge(kind) for kind in device.peaks}, "largest_batch": rooms,
            },
            "drafter": {"name": drafter.name, "resident_bytes": drafter.resident_bytes},
            "routing": {"locality": cost.routing.locality},
            "gutter": [
                {"context": context, "acceptance": rate.label, "batches": [list(run) for run in runs]}
                for context, rate, runs in self.gutters
            ],
        }  # fmt: skip


def _waits(point: PlanPoint) -> tuple[str, str]:
    return point.plain.binding, point.plain.parts[point.plain.binding].bound


def _losing(point: PlanPoint) -> str:
    """Depths at which plain decoding wins, as runs."""
    losing, last = point.losing, point.found[-1].depth
    if not losing:
        return "none"
    if len(losing) == last:
        return "all"
    cuts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(losing)) if b != a + 1), len(losing)]
    runs = [losing[a:b] for a, b in pairwise(cuts)]
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
