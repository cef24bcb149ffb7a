"""Calibrates: times the real step over many shapes, and drafting, and fits what was found.

The shapes and the fit are economics', the stage on which steps are taken is rehearsal's; here the time is divided.
Knows no files and no model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from wager.arch.spec import ModelSpec
from wager.economics.latency.calibration import Calibration, Errors, Setup, draft_curve, fingerprint, typical
from wager.economics.latency.draft_curve import DraftCurve
from wager.economics.latency.shapes import REQUESTS, drawn, grid, sketch
from wager.economics.latency.surface import LatencySurface, StepPoint
from wager.engine.proposer import Proposer
from wager.engine.runner import Runner
from wager.errors import UsageError
from wager.kernels import machine
from wager.kernels.base import Kernels
from wager.profiling.timed_steps import Report, Stage, TimedStep, rehearse
from wager.trace import Clock, Trace
from wager.types import DraftRequest, SamplingParams

HELD_OUT = 32
"""Shapes drawn at random that judge the fit."""

_QUICK_CONTEXT, _QUICK_TOKENS, _QUICK_DOUBT = 512, 3072, 3.0
_DEPTHS = (1, 2, 4, 8)
_DRAFT_ROUNDS = 12
_PERIOD, _PROMPT = 11, 44


def setup(kernels: Kernels, spec: ModelSpec, *, model: str) -> Setup:
    """What a calibration made here and now holds for; `model` is the name that people know it by."""
    dtype = str(kernels.act).removeprefix("torch.")
    threads = getattr(kernels, "threads", None)  # the reference path computes in one thread and has no say
    return Setup(machine(), model, fingerprint(spec), kernels.name, threads, dtype)


def calibrate(
    stage: Stage,
    setup: Setup,
    *,
    seconds: float,
    drafters: Mapping[str, DraftCurve] | None = None,
    report: Report | None = None,
) -> Calibration:
    """Time a grid of shapes, and shapes drawn at random to judge the fit by, for about `seconds`."""
    fitted, held_out = grid(stage.limits), drawn(stage.limits, HELD_OUT, seed=0)
    taken = rehearse(stage, [*fitted, *held_out], seconds=seconds, held_out=len(held_out), report=report)
    found = typical([(timed.shape, timed.point) for timed in taken], fitted=range(len(fitted)))
    return Calibration.fit(
        setup,
        [point for shape, point in found.items() if shape < len(fitted)],
        [point for shape, point in found.items() if shape >= len(fitted)],
        seconds=seconds,
        drafters=drafters,
    )


def quick_surface(
    runner: Runner, *, max_context: int, seconds: float = 0.5, trace: Trace | None = None
) -> LatencySurface:
    """A surface from about `seconds` of measuring, for an engine that was never calibrated.

    Call it before anyone uses the target: afterwards its cache holds nothing of worth, and no page table knows of it.
    UsageError if the cache is too small to measure in.
    """
    stage = Stage(runner, max_context=max_context, longest=_QUICK_CONTEXT, tokens=_QUICK_TOKENS, trace=trace)
    shapes = sketch(stage.limits)
    taken = rehearse(stage, shapes, seconds=seconds, seed=None, repeats=1)
    found = _quickest(taken)
    if len({point.rows for point in found}) == 1:
        return LatencySurface([found[0].rows], [median(point.seconds for point in found)])
    return LatencySurface.fit(found, doubt=_QUICK_DOUBT)


def _quickest(taken: Sequence[TimedStep]) -> list[StepPoint]:
    """The quickest step of every shape: of a few, taken in rounds, a pause of the machine spoils any other measure."""
    quickest: dict[int, StepPoint] = {}
    for timed in sorted(taken, key=lambda timed: timed.point.seconds):
        quickest.setdefault(timed.shape, timed.point)
    return list(quickest.values())


@dataclass(frozen=True, slots=True)
class Check:
    """How far predictions were from single steps of shapes never seen before: as stored, and corrected by every step
    before, as an engine does."""

    stored: Errors
    corrected: Errors


def check(
    stage: Stage, calibration: Calibration, *, seconds: float, seed: int, shapes: int = 40, report: Report | None = None
) -> Check:
    """Take steps of freshly drawn shapes for about `seconds`, and predict each before it is taken into account."""
    stored, learning = calibration.surface(), calibration.surface()
    before: list[float] = []
    after: list[float] = []
    taken = rehearse(stage, drawn(stage.limits, shapes, seed=seed), seconds=seconds, report=report)
    for timed in taken:
        shape = (timed.point.rows, timed.point.requests, timed.point.context_sum)
        before.append(stored.seconds(*shape))
        after.append(learning.seconds(*shape))
        learning.observe(timed.record)
    measured = [timed.point.seconds for timed in taken]
    return Check(Errors.of(before, measured), Errors.of(after, measured))


# ---- drafting -----------------------------------------------------------------------------------------------------


def time_drafting(
    drafting: Proposer, *, vocab: int, seconds: float, clock: Clock, between: Callable[[], object] = lambda: None
) -> DraftCurve:
    """What drafting costs by requests and depth, for about `seconds` or a dozen rounds, whichever ends first.

    The texts repeat themselves, so that lookups find something to copy. `between` is called before each call, as a pass
    of the target would be: it leaves the processor's caches cold. Asks that the drafter declined are not counted;
    UsageError if it declined them all.
    """
    name, names = drafting.name, [f"text {i}" for i in range(REQUESTS[-1])]
    rng = random.Random(0)
    texts = {each: _Periodic(rng, vocab) for each in names}
    for each in names:
        drafting.begin(each, texts[each].known, _GREEDY)
    asked = [(requests, depth) for requests in REQUESTS for depth in _DEPTHS]
    taken: dict[tuple[int, int], list[float]] = {}
    begun, rounds = clock(), 0
    while rounds < _DRAFT_ROUNDS and (rounds < 2 or clock() - begun < seconds):
        rng.shuffle(asked)
        for requests, depth in asked:
            chosen = {each: texts[each] for each in names[:requests]}
            between()
            took = _draft(drafting, chosen, depth, clock)
            if took and rounds:  # the first round computes prompts
                taken.setdefault((requests, depth), []).append(took)
        rounds += 1
    for each in names:
        drafting.end(each)
    if not taken:
        raise UsageError(f"Drafter {name!r} made no guesses that could be timed.", "Leave it out of --drafter.")
    return draft_curve({shape: median(each) for shape, each in taken.items()})


_GREEDY = SamplingParams(ignore_eos=True)


class _Periodic:
    """A text that repeats a few tokens for ever."""

    def __init__(self, rng: random.Random, vocab: int) -> None:
        self._period = [rng.randrange(vocab) for _ in range(_PERIOD)]
        self.known = [self.next(at) for at in range(_PROMPT)]

    def next(self, at: int) -> int:
        return self._period[at % _PERIOD]


def _draft(drafting: Proposer, texts: Mapping[str, _Periodic], depth: int, clock: Clock) -> float | None:
    """Seconds of one call, after which every text goes on by a token; None if somebody got no guess."""
    begun = clock()
    asks = [DraftRequest(name, len(text.known), depth, _GREEDY, 0, 0, False) for name, text in texts.items()]
    drafts = drafting.draft(asks, dict.fromkeys(texts, depth), drafter=drafting.name)
    took = clock() - begun
    for name, text in texts.items():
        text.known.append(text.next(len(text.known)))
        drafting.accept(name, text.known[-1:])
    return took if len(drafts) == len(texts) else None
