"""Seconds of vLLM's steps: measured in passes over made-up tokens before vLLM serves, or in its first steps; kept in a
file by model, parallel layout and hardware; corrected by every step.

A pass is not a whole step: scheduling, sampling and messages between vLLM's processes come on top. What they take is
read off the first steps. Prices from a file, measured earlier or given by the user, are compared with the first steps
of this run; where they are far off, one line of log says so and they are measured anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Protocol

from wager.economics.calibration import FOLDER, Calibration, Setup, read_quick, write_quick
from wager.economics.surface import LatencySurface, StepPoint, fit_surface
from wager.errors import MALFORMED, UsageError
from wager.models import hub
from wager.trace import Clock
from wager_vllm.compat import Deployment, log
from wager_vllm.options import Options

_REPEATS = 4  # passes of each shape, of which the first is not timed
_MOST_SECONDS = 5.0  # from which no larger shape is begun
_CONTEXTS = (64, 1024)  # cached positions of a request
_OVERHEAD_STEPS = 6  # decoding steps that show what a step takes beside its pass
_ROUNDS = 5  # first steps at each depth, where passes cannot be timed
_UNCERTAINTY = 2.0  # of prices measured so: see economics/surface.py
_WATCHED, _FAR_OFF = 24, 1.6  # steps that a file's prices are compared with, and how far off they may be by the median
_FIRST_SAVED = 512  # steps until corrected prices are written; then after twice as many, and so on


class Passes(Protocol):
    """See compat.DummyPasses."""

    @property
    def max_rows(self) -> int: ...

    def agree(self, value: bool) -> bool: ...  # noqa: FBT001

    def run(self, rows: int, *, context: int, drafted: bool) -> int: ...


def setup_of(deployment: Deployment) -> Setup:
    """What prices are valid for."""
    layout = " ".join(f"{name}={size}" for name, size in deployment.layout.items())
    return Setup(
        machine=deployment.device,
        model=Path(deployment.model).name,
        shape=f"vllm-{deployment.fingerprint}",
        kernels=f"vLLM {deployment.version}, {deployment.execution}",
        threads=None,
        dtype=f"{deployment.dtype}, {layout}",
    )


def _folder() -> Path:
    return hub.cache_dir(FOLDER) / "vllm"


def stored_prices(deployment: Deployment, options: Options) -> LatencySurface | None:
    """From the file that the options name, or the one of an earlier run; None if there is none that can be used, and
    one line of log where it is damaged."""
    if options.prices is None:
        return read_quick(_folder(), setup_of(deployment))
    try:
        return Calibration.read(options.prices.expanduser()).surface()
    except (UsageError, *MALFORMED) as error:
        log.warning("The prices in %s are not used: %s", options.prices, str(error).replace("\n", " "))
        return None


def time_passes(passes: Passes, *, depth: int, max_context: int, most_rows: int, clock: Clock) -> list[StepPoint]:
    """Seconds of passes of growing numbers of rows: without drafts and with `depth` draft tokens for each request, over
    short contexts, and a few over long ones. Every worker of a tensor parallel group makes the same ones.

    Seconds are the clock's, not those of this thread's processor: a pass is awaited on the device and in the group's
    other workers, where this thread computes little of it. Other load therefore counts, and later steps correct it."""
    begun, points = clock(), list[StepPoint]()
    largest = min(passes.max_rows, most_rows)
    counts = [1]
    while counts[-1] < largest:
        counts.append(min(largest, 2 * counts[-1]))
    shapes = [(rows, _CONTEXTS[0], False) for rows in counts]
    shapes += [(rows, _CONTEXTS[0], True) for rows in counts if rows > 1]
    shapes += [(rows, _CONTEXTS[1], False) for rows in counts[:: max(1, len(counts) // 3)]]
    for rows, context, drafted in sorted(shapes):
        if not passes.agree(clock() - begun < _MOST_SECONDS):
            break
        context, taken, requests = min(context, max_context - depth - 1), list[float](), 1
        for _ in range(_REPEATS):
            before = clock()
            requests = passes.run(rows, context=context, drafted=drafted)
            taken.append(clock() - before)
        points.append(StepPoint(rows, requests, requests * context, max(1e-9, median(taken[1:]))))
    return points


class StepPrices:
    """The prices of one vLLM. `surface` is None while they are measured: then `depth_to_measure` says how deep the next
    step is to be. `changed` is called with a new surface, after which an earlier one is not used."""

    def __init__(
        self, deployment: Deployment, options: Options, *, changed: Callable[[LatencySurface], None], clock: Clock
    ) -> None:
        self.surface: LatencySurface | None = None
        self.source = "the first steps"
        self._deployment, self._setup, self._changed, self._clock = deployment, setup_of(deployment), changed, clock
        self._timed: list[StepPoint] = []  # passes, of which steps show what they take beside them
        self._points: list[StepPoint] = []  # first steps
        self._watched: list[float] = []  # log ratios of steps to what a file said
        self._watch: LatencySurface | None = None
        self._steps, self._next_save = 0, _FIRST_SAVED
        self._measures = options.measure != "never"
        found = stored_prices(deployment, options)
        if found is not None:
            self.source = "a file"
            self._watch = LatencySurface.from_dict(found.as_dict())
            self._use(found)
        elif not self._measures:
            self._use(_guess())
        self._passes_wanted = options.measure == "start" and found is None and deployment.alone

    def _use(self, surface: LatencySurface) -> None:
        self.surface = surface
        self._changed(surface)

    def model_ready(self, passes: Passes) -> None:
        """Time passes, if that is to be done: as the group's first worker says."""
        if not passes.agree(self._passes_wanted):
            return
        begun = self._clock()
        deployment = self._deployment
        self._timed = time_passes(
            passes,
            depth=deployment.depth,
            max_context=deployment.max_context,
            most_rows=deployment.max_requests * (1 + deployment.depth),
            clock=self._clock,
        )
        if (
            max([point.rows for point in self._timed], default=0) <= deployment.depth
        ):  # the deepest draft was not reached
            log.warning("Passes take so long that step times are measured in the first steps.")
            self._timed = []
            return
        log.info(
            "wager timed passes of %d to %d rows in %.1f s: %.2f to %.2f ms.",
            self._timed[0].rows,
            self._timed[-1].rows,
            self._clock() - begun,
            1e3 * self._timed[0].seconds,
            1e3 * self._timed[-1].seconds,
        )
        self.source = "passes at the start"

    def depth_to_measure(self, requests: int) -> int:
        """Draft tokens of each request in the next step, where it is one to measure."""
        if self._timed:
            return 0
        depth = max(0, min(self._deployment.depth, self._deployment.max_rows // max(1, requests) - 1))
        depths = sorted({0, 1, depth // 2, depth} & set(range(depth + 1)))
        return depths[len(self._points) % len(depths)]

    def observe(self, point: StepPoint) -> None:
        """A step that decoded alone was taken, without drafting and policy."""
        self._steps += 1
        if self.surface is None:
            self._points.append(point)
            self._finish_measuring()
        elif self._watch is not None:
            self._compare(self._watch, point)
        if self.surface is not None and self._steps >= self._next_save and self._deployment.leads:
            self._next_save = 2 * self._steps
            write_quick(_folder(), self._setup, self.surface)

    def _finish_measuring(self) -> None:
        if self._timed and len(self._points) >= _OVERHEAD_STEPS:
            passes = fit_surface(self._timed, uncertainty=_UNCERTAINTY)
            beside = median(
                point.seconds - passes.seconds(point.rows, point.requests, point.context_sum) for point in self._points
            )
            shifted = [
                StepPoint(point.rows, point.requests, point.context_sum, point.seconds + max(0.0, beside))
                for point in self._timed
            ]
            self._use(fit_surface(shifted, uncertainty=_UNCERTAINTY))
            log.info("A step takes %.2f ms beside its pass.", 1e3 * beside)
        elif not self._timed and len(self._points) >= 4 * _ROUNDS and len({point.rows for point in self._points}) > 1:
            self._use(fit_surface(_with_one_row(_medians(self._points)), uncertainty=_UNCERTAINTY))
        else:
            return
        self._points = []
        if self.surface is not None and self._deployment.leads:
            write_quick(_folder(), self._setup, self.surface)

    def _compare(self, believed: LatencySurface, point: StepPoint) -> None:
        """A step with what the file said of it, before this run corrected that."""
        expected = believed.seconds(point.rows, point.requests, point.context_sum)
        self._watched.append(math.log(point.seconds / expected))
        if len(self._watched) < _WATCHED:
            return
        off = median(self._watched)
        self._watch, self._watched = None, []
        if abs(off) <= math.log(_FAR_OFF):
            return
        then = "They are measured anew." if self._measures else "Steps correct them."
        log.warning("The stored step times are wrong or stale: steps take %.2f times as long. %s", math.exp(off), then)
        if self._measures:
            self.surface, self.source = None, "the first steps"


def _medians(points: Sequence[StepPoint]) -> list[StepPoint]:
    """One point of each number of rows and requests."""
    shapes = sorted({(point.rows, point.requests) for point in points})
    same = [[point for point in points if (point.rows, point.requests) == shape] for shape in shapes]
    return [sorted(group, key=lambda point: point.seconds)[len(group) // 2] for group in same]


def _with_one_row(points: Sequence[StepPoint]) -> list[StepPoint]:
    """The points, and what one row takes by the line through the least and the most rows: smaller batches may come."""
    least, most = points[0], points[-1]
    rise = max(0.0, most.seconds - least.seconds) / max(1, most.rows - least.rows)
    seconds = max(least.seconds / 2, least.seconds - rise * (least.rows - 1))
    one = StepPoint(1, 1, least.context_sum // least.requests, seconds)
    return [one, *points] if least.rows > 1 else list(points)


def _guess() -> LatencySurface:
    """Where nothing is measured: rows are cheap until there are many. Steps correct it."""
    return LatencySurface([1, 16, 64, 1024], [1e-2, 1.3e-2, 2e-2, 2e-1], uncertainty=4.0)
