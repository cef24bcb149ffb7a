"""Calibrates a model on this machine: times real steps of many shapes, and drafters, and fits a latency model to them.

Steps are those of an engine on the target, with a scripted policy and drafter. Cached contexts are not computed: their
blocks are zeroed and marked as computed, since no kernel's time depends on the values it reads. So long contexts take
no time to prepare. The timer has its own block pool and scheduler; an engine on the same target loses only the
contents of its cache.

To time drafters no target runs: the texts are made up, and a drafter that reads the target's states or rows is shown
random ones, since no drafter's time depends on their values.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

import numpy as np
from numpy.typing import NDArray

from wager.draft.base import Drafter
from wager.economics.calibration import Calibration, Setup
from wager.economics.policy.heuristics import FixedDepth
from wager.economics.surface import DraftCurve, DraftPoint, LatencySurface, StepPoint, fit_draft_curve, fit_surface
from wager.engine.core import Engine
from wager.engine.outputs import TokenDecoder
from wager.engine.proposer import Proposer
from wager.engine.runner import Runner
from wager.engine.scheduler import Scheduler
from wager.errors import NumericsError, UsageError
from wager.kernels._native import BlockPool
from wager.kernels.base import BLOCK_SIZE, TargetOutput
from wager.kv.paged_cache import PagedKVCache
from wager.trace import Clock, Trace
from wager.types import (
    DRAFT_STAGE,
    NO_TENANT,
    Draft,
    DraftDecision,
    DraftRequest,
    Outcome,
    Plan,
    Request,
    SamplingParams,
    Span,
    StepRecord,
    Verdict,
)

CONTEXT_STEP = 16
"""Contexts are multiples of this many positions (the cache's block size), so that whole blocks are reused."""

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
REQUESTS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (32, 256, 1024, 4096)
MAX_DEPTH = 16
"""Most draft tokens of a sequence, but for the first column of the grid: one short sequence with all rows."""

_TRIES = 20


@dataclass(frozen=True, slots=True)
class StepShape:
    """One kind of step: for each sequence the positions cached before it, and its number of draft tokens."""

    contexts: tuple[int, ...]
    depths: tuple[int, ...]

    @property
    def rows(self) -> int:
        """All rows of the pass: a known token of each sequence, and the draft tokens."""
        return len(self.depths) + sum(self.depths)


@dataclass(frozen=True, slots=True)
class ShapeLimits:
    """What an engine has room for: rows of a pass, sequences in it, positions of one sequence, and positions of all
    texts together."""

    rows: int
    sequences: int
    context: int
    tokens: int

    def text_lengths(self) -> list[int]:
        """Lengths of the sequences' texts, the longest first: text i has `longest / (i + 1)`, for the largest `longest`
        that fits. So n sequences can have `longest / n` each, for every n. Fewer texts than sequences where there is
        no room.
        """
        low, high = 0, self.tokens // CONTEXT_STEP + 1  # in blocks
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if sum(self._lengths(middle)) <= self.tokens else (low, middle)
        return self._lengths(low)

    def _lengths(self, blocks: int) -> list[int]:
        longest = self.context // CONTEXT_STEP
        return [CONTEXT_STEP * min(longest, blocks // (i + 1)) for i in range(min(self.sequences, blocks))]


def uniform_shape(rows: int, requests: int, context: int) -> StepShape:
    """`rows` spread evenly over `requests` sequences of one context."""
    share, more = divmod(rows, requests)
    return StepShape((context,) * requests, tuple(share - 1 + (i < more) for i in range(requests)))


def grid_shapes(limits: ShapeLimits) -> list[StepShape]:
    """The shapes to fit: rows x requests x context, within the limits."""
    texts = limits.text_lengths()
    shapes = []
    for requests in (n for n in REQUESTS if n <= len(texts)):
        longest = texts[requests - 1]
        contexts = [*(c for c in CONTEXTS if c < 0.7 * longest), longest]
        for context in contexts:
            single_short = requests == 1 and context == contexts[0]
            most = limits.rows if single_short else min(limits.rows, requests * (MAX_DEPTH + 1))
            shapes += [uniform_shape(rows, requests, context) for rows in ROWS if requests <= rows <= most]
    return shapes


def quick_shapes(limits: ShapeLimits) -> list[StepShape]:
    """A dozen shapes, the most informative first, for when there is no time for a grid: one sequence, all
    sequences, a few long ones; the cost of many sequences does not follow from that of few."""
    texts = limits.text_lengths()
    most, few = len(texts), min(4, len(texts))
    sizes = [(rows, 1, CONTEXT_STEP) for rows in (1, 16, 8, 4, 2, 32, 12, 24)]
    sizes += [(rows, most, CONTEXT_STEP) for rows in (most, 2 * most, most + most // 2)]
    sizes += [(rows, few, texts[few - 1]) for rows in (4, 16)]
    shapes = [uniform_shape(*size) for size in sizes if size[1] <= size[0] <= limits.rows]
    return list(dict.fromkeys(shapes))


def random_shapes(limits: ShapeLimits, count: int, *, seed: int) -> list[StepShape]:
    """Random shapes, none of them in the grid, as an engine meets them: any number of sequences (few as often as many),
    contexts equal or not, draft tokens for none, the same number for all, or for each its own. Fewer than `count` where
    the limits leave no others."""
    rng = random.Random(seed)
    texts, fitted = limits.text_lengths(), set(grid_shapes(limits))
    shapes: list[StepShape] = []
    for _ in range(_TRIES * count):
        requests = round(math.exp(rng.uniform(0, math.log(len(texts) + 0.49))))
        shape = StepShape(_contexts(rng, texts[:requests]), _depths(rng, requests))
        if shape.rows <= min(limits.rows, ROWS[-1]) and shape not in fitted:
            shapes.append(shape)
    return shapes[:count]


def _contexts(rng: random.Random, texts: Sequence[int]) -> tuple[int, ...]:
    if rng.random() < 0.5:
        return (_length(rng, texts[-1]),) * len(texts)
    return tuple(_length(rng, text) for text in texts)


def _length(rng: random.Random, most: int) -> int:
    """Short as often as long (log-uniform)."""
    return CONTEXT_STEP * round(math.exp(rng.uniform(0, math.log(most / CONTEXT_STEP))))


def _depths(rng: random.Random, requests: int) -> tuple[int, ...]:
    kind, deepest = rng.random(), rng.randint(1, MAX_DEPTH)
    if kind < 0.2:
        return (0,) * requests
    if kind < 0.5:
        return (deepest,) * requests
    return tuple(rng.choice((0, rng.randint(0, deepest))) for _ in range(requests))


# ---- timing steps ---------------------------------------------------------------------------------------------------

ProgressReport = Callable[[float], None]
"""Called with the elapsed seconds."""

LONGEST = 4096
"""Positions of the longest text."""

_SEQUENCES = 32
_GROUP, _REPEATS = 4, 2
"""Shapes that are timed with one set of running sequences, and steps of each."""

_FEWEST_COUNTS = 3
"""Row counts that are timed however long a step takes: a line through two of them is too far off in between."""


class _ScriptedPolicy(FixedDepth):
    """A policy that plans the draft depths of the shape, and keeps the step records."""

    def __init__(self) -> None:
        super().__init__(0)
        self.depths: Mapping[str, int] = {}
        self.records: list[StepRecord] = []

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        del budget  # shapes are chosen to fit
        depths = {span.seq_id: min(self.depths.get(span.seq_id, 0), span.max_draft_tokens) for span in spans}
        return {seq_id: DraftDecision(depth) for seq_id, depth in depths.items() if depth}

    def observe(self, record: StepRecord) -> None:
        self.records.append(record)


class _RandomDrafter(Drafter):
    """A drafter of random tokens, of which almost none are accepted."""

    name = "random"
    default_depth = max_depth = MAX_DEPTH

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._rng = random.Random(0)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft.chain(r.seq_id, self.random_tokens(r.depth), drafter=self.name) for r in requests]

    def random_tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocab) for _ in range(count)]

    def begin(
        self, sequence: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT
    ) -> None: ...

    def accept(self, sequence: str, tokens: Sequence[int]) -> None: ...

    def end(self, sequence: str) -> None: ...


class StepTimer:
    """A separate engine on `runner`'s target, whose cache already holds texts of all lengths within the limits.

    The target must not be used otherwise meanwhile, and the earlier contents of its cache are lost: an engine that
    shares it must reset its prefix cache. `tokens` limits the sum of all texts. `decoder` creates the detokenizers
    whose time is part of a real step. UsageError if the cache is too small.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_context: int,
        longest: int = LONGEST,
        sequences: int = _SEQUENCES,
        tokens: int | None = None,
        decoder: Callable[[Sequence[int]], TokenDecoder] | None = None,
        trace: Trace | None = None,
    ) -> None:
        target, trace = runner.target, trace or Trace()
        self.clock = trace.clock
        self.limits = _limits(runner, max_context=max_context, longest=longest, sequences=sequences, tokens=tokens)
        self._policy, self._drafter = _ScriptedPolicy(), _RandomDrafter(target.vocab)
        self._scheduler = Scheduler(
            PagedKVCache(BlockPool(target.cache.num_blocks, prefix_cache=True), target.cache),
            max_rows=target.max_rows,
            max_sequences=target.max_sequences,
            max_context=max_context,
            max_draft_tokens=0,
            clock=trace.clock,
        )
        self._engine = Engine(
            runner,
            self._scheduler,
            policy=self._policy,
            proposer=Proposer(self._drafter, vocab=target.vocab),
            decoder=decoder,
            trace=trace,
        )
        self._texts = [self._prefill_cache(i, length) for i, length in enumerate(self.limits.text_lengths())]
        self._running: list[str] = []

    def _prefill_cache(self, index: int, length: int) -> list[int]:
        """A text whose blocks are never freed, so that every request that begins with it finds them computed."""
        pool, name = self._scheduler.block_pool, f"text {index}"
        tokens = self._drafter.random_tokens(length + 1)
        pool.reserve(name, length)
        for block in pool.block_table(name):
            self._engine.runner.target.cache.clear(block)  # writes it: the system maps memory on the first write
        pool.commit(name, tokens, length=length)
        return tokens

    def start_sequences(self, contexts: Sequence[int]) -> None:
        """One running sequence per context (a multiple of CONTEXT_STEP, within its text), and one untimed step."""
        held = self._scheduler.block_pool.num_blocks * BLOCK_SIZE
        for index, context in enumerate(contexts):
            name = f"r{index}"
            most = min(LONGEST, min(self._scheduler.max_context, held) - context - 1)
            params = SamplingParams(max_tokens=most, ignore_eos=True)
            self._engine.add(Request(name, tuple(self._texts[index][: context + 1]), params))
            self._running.append(name)
        self.step((0,) * len(contexts))

    def step(self, depths: Sequence[int]) -> StepRecord | None:
        """One step with a draft depth for each sequence; None if its shape differs because a sequence had ended.
        NumericsError if the model's logits are not finite."""
        self._policy.depths = dict(zip(self._running, depths, strict=True))
        self._policy.records.clear()
        self._scheduler.max_draft_tokens = max(depths)
        for delta in self._engine.step():
            if delta.finish_reason == "error":
                raise NumericsError(delta.error, "Its weights are damaged, or overflow their number type.")
        shape = (len(depths) + sum(depths), len(depths))
        return next((record for record in self._policy.records if (record.rows, record.sequences) == shape), None)

    def end_sequences(self) -> None:
        """End all sequences; the texts stay cached."""
        for name in self._running:
            self._engine.abort(name)
        self._engine.step()
        self._running.clear()


def _limits(runner: Runner, *, max_context: int, longest: int, sequences: int, tokens: int | None) -> ShapeLimits:
    """The shapes that fit in the cache. The scheduler needs free blocks for an entire prompt before it looks up which
    are cached, and every sequence needs some to grow; steps of a shape that still gets too few are discarded."""
    target = runner.target
    cached = target.cache.num_blocks * BLOCK_SIZE
    growth = min(BLOCK_SIZE * (MAX_DEPTH + 2), max_context // 2)  # steps of one group, with draft tokens
    context = min(longest, max_context - growth, cached // 4)
    sequences = min(sequences, target.max_sequences, target.max_rows)
    remaining = cached - context - BLOCK_SIZE - min(target.max_rows + 3 * BLOCK_SIZE * sequences, cached // 4)
    remaining = remaining if tokens is None else min(remaining, tokens)
    if min(context, remaining) < BLOCK_SIZE:
        raise UsageError(
            f"A cache of {cached} tokens for contexts of {max_context} is too small to measure steps in.",
            "Raise --memory or --max-context.",
        )
    return ShapeLimits(target.max_rows, sequences, context // BLOCK_SIZE * BLOCK_SIZE, remaining)


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One timed step; `shape` is the index of its shape."""

    shape: int
    record: StepRecord

    @property
    def point(self) -> StepPoint:
        """Rows, sequences and contexts of the step, and its seconds without drafting."""
        record = self.record
        seconds = sum(taken for stage, taken in record.seconds.items() if stage != DRAFT_STAGE)
        return StepPoint(record.rows, record.sequences, sum(record.context_lens), seconds)


def time_steps(
    timer: StepTimer,
    shapes: Sequence[StepShape],
    *,
    seconds: float,
    seed: int | None = 0,
    held_out: int = 0,
    repeats: int = _REPEATS,
    report: ProgressReport | None = None,
) -> list[TimedStep]:
    """Time steps of every shape repeatedly for `seconds`; returns them in the order they were run.

    Passes over the shapes are shuffled, so that a machine that is slow for a while is slow for all shapes alike; with
    `seed` None they go in order, and where time is short the last shapes are never reached. A shape is timed `repeats`
    times in a row. The last `held_out` shapes are not for fitting. At least three different row counts of the
    others and one held-out shape are timed, even if that takes longer.
    """
    rng = None if seed is None else random.Random(seed)
    fitted = len(shapes) - held_out
    begun = timer.clock()
    passed, taken = 0.0, list[TimedStep]()
    while True:
        for group in _groups(shapes, rng):
            timer.start_sequences(shapes[group[0]].contexts)
            for index in group:
                records = [timer.step(shapes[index].depths) for _ in range(repeats)]
                taken += [TimedStep(index, record) for record in records if record is not None]
                passed = timer.clock() - begun
                if report:
                    report(min(passed, seconds))
                rows = {timed.record.rows for timed in taken if timed.shape < fitted}
                tested = not held_out or any(timed.shape >= fitted for timed in taken)
                if passed >= seconds and len(rows) >= _FEWEST_COUNTS and tested:
                    timer.end_sequences()
                    return taken
            timer.end_sequences()
        if passed >= seconds:
            return taken


def _groups(shapes: Sequence[StepShape], rng: random.Random | None) -> list[list[int]]:
    """Indices of all shapes, in groups of a few that share their contexts."""
    order = list(range(len(shapes)))
    if rng:
        rng.shuffle(order)
        order.sort(key=lambda index: shapes[index].contexts)  # stable: still shuffled among equals
    groups = []
    for _, equal in groupby(order, key=lambda index: shapes[index].contexts):
        indices = list(equal)
        groups += [indices[start : start + _GROUP] for start in range(0, len(indices), _GROUP)]
    if rng:
        rng.shuffle(groups)
    return groups


_WINDOW, _ITERATIONS = 8, 6
"""Steps before and after one that give the machine's speed at that time, and how often speed and fit are alternated."""


def typical_steps(samples: Sequence[tuple[int, StepPoint]], *, fitted: Container[int]) -> dict[int, StepPoint]:
    """The typical step of each shape, from steps (index of the shape, what was measured) of many shapes in the order
    they were taken; `fitted` holds the shapes that a surface may be fitted to.

    A shared machine changes its speed from second to second. Where steps that lie close together are all slower than a
    surface expects, that is put down to the machine; the median of the rest is the shape's own.
    """
    members: dict[int, list[int]] = {}
    for at, (shape, _) in enumerate(samples):
        members.setdefault(shape, []).append(at)
    points = [point for _, point in samples]
    log = np.log([point.seconds for point in points])
    slowdown = np.zeros(len(log))
    for _ in range(_ITERATIONS):
        typical = {
            shape: _median([points[at] for at in own], log[own] - slowdown[own]) for shape, own in members.items()
        }
        to_fit = [point for shape, point in typical.items() if shape in fitted]
        if len({point.rows for point in to_fit}) < 2:
            return typical
        expected = fit_surface(to_fit)
        residual = log - np.log([expected.seconds(p.rows, p.requests, p.context_sum) for p in points])
        slowdown = np.array(
            [np.median(residual[max(0, at - _WINDOW) : at + _WINDOW + 1]) for at in range(len(residual))]
        )
        slowdown -= np.median(slowdown)
    return typical


def _median(points: Sequence[StepPoint], log: NDArray[np.float64]) -> StepPoint:
    cached = round(float(np.median([point.context_sum for point in points])))
    return StepPoint(points[0].rows, points[0].requests, cached, float(np.exp(np.median(log))))


# ---- timing drafters ------------------------------------------------------------------------------------------------

_DEPTHS = (1, 2, 4, 8)
_ROUNDS = 12
_PERIOD, _REPETITIONS = 11, 4
"""Tokens after which a text repeats, and how often its prompt has them."""

_GREEDY = SamplingParams(ignore_eos=True)


def time_drafting(
    proposer: Proposer,
    *,
    vocab: int,
    hidden: int,
    seconds: float,
    clock: Clock,
    tokens: int | None = None,
    between: Callable[[], object] = lambda: None,
    reserve: Callable[[str, int], bool] = lambda seq_id, positions: True,
    batches: Sequence[int] = REQUESTS,
) -> DraftCurve:
    """Seconds of drafting by requests (`batches`, ascending) and depth, timed for about `seconds` or a dozen rounds,
    whichever ends first. `vocab` and `hidden` are the target's numbers of logits and of elements of a state; texts
    are made of ids below `tokens` (None: `vocab`), since a draft model may lack the target's padding.

    The texts are periodic, so that lookup drafters find continuations. `between` is called before each call, as a pass
    of the target would be: it leaves the processor's caches cold; `reserve` with a text and its positions before one is
    asked about, for a drafter that reads the target's cache; more texts than it has room for are not asked about. Calls
    in which a request got no draft are not counted; UsageError if there is no other.
    """
    name, rng, states = proposer.name, random.Random(0), np.random.default_rng(0)
    reads_passes = proposer.reads_passes
    texts: dict[str, list[int]] = {}
    for number in range(batches[-1]):
        period = [rng.randrange(vocab if tokens is None else tokens) for _ in range(_PERIOD)]
        texts[f"text {number}"] = period * _REPETITIONS
        proposer.begin(f"text {number}", texts[f"text {number}"], _GREEDY)

    def grow(requests: int) -> None:
        """One more token becomes known of the first texts."""
        following = {seq_id: texts[seq_id][-_PERIOD] for seq_id in [*texts][:requests]}
        if reads_passes:
            _show_pass(proposer, texts, following, vocab=vocab, hidden=hidden, rng=states)
        for seq_id, token in following.items():
            texts[seq_id].append(token)
            proposer.accept(seq_id, [token])

    grow(len(texts))
    calls = [(requests, depth) for requests in batches for depth in _DEPTHS]
    taken: dict[tuple[int, int], list[float]] = {}
    begun, rounds = clock(), 0
    while rounds < _ROUNDS and (rounds < 2 or clock() - begun < seconds):
        rng.shuffle(calls)
        for requests, depth in calls:
            known = {seq_id: len(texts[seq_id]) for seq_id in [*texts][:requests]}
            if not all(reserve(seq_id, positions) for seq_id, positions in known.items()):
                continue
            between()
            asked = [DraftRequest(seq_id, at, depth, _GREEDY, seed=0, computed=at - 1) for seq_id, at in known.items()]
            called = clock()
            drafts = proposer.draft(asked, {each.seq_id: depth for each in asked}, drafter=name)
            took = clock() - called
            grow(requests)
            if took and rounds and len(drafts) == requests:  # the first round computes prompts
                taken.setdefault((requests, depth), []).append(took)
        rounds += 1
    for seq_id in texts:
        proposer.end(seq_id)
    if not taken:
        raise UsageError(f"Drafter {name!r} made no draft that could be timed.", "Leave it out of --drafter.")
    return fit_draft_curve([DraftPoint(*call, median(times)) for call, times in taken.items()])


def _show_pass(
    proposer: Proposer,
    texts: Mapping[str, Sequence[int]],
    following: Mapping[str, int],
    *,
    vocab: int,
    hidden: int,
    rng: np.random.Generator,
) -> None:
    """The target's pass over what it has not computed of some texts, after which they are known to go on with the
    tokens `following`: random states and logits, for a drafter that reads them."""
    spans = []
    for seq_id in following:
        last = len(texts[seq_id]) - 1
        start = last if last >= _PERIOD * _REPETITIONS else 0  # of a prompt it has computed nothing yet
        spans.append(Span(seq_id, start, tuple(texts[seq_id][start:]), needs_logits=True))
    states = rng.standard_normal((sum(len(span.tokens) for span in spans), hidden), np.float32)
    output = TargetOutput(
        logits=rng.standard_normal((len(spans), vocab), np.float32),
        greedy_tokens=np.array([*following.values()], np.int32),
        last_hidden=states[: len(spans)],
        taps=dict.fromkeys(proposer.taps, states),
    )
    outcomes = {seq_id: Outcome(Verdict(seq_id, (), (token,))) for seq_id, token in following.items()}
    proposer.show(output, spans, {}, outcomes)


# ---- calibrations ---------------------------------------------------------------------------------------------------

HELD_OUT = 32
"""Number of random shapes that the fit is tested with."""

_QUICK_CONTEXT, _QUICK_TOKENS = 512, 3072
_QUICK_UNCERTAINTY = 3.0
"""Uncertainty of a quick surface relative to that of a full calibration."""


def calibrate(
    timer: StepTimer,
    setup: Setup,
    *,
    seconds: float,
    drafters: Mapping[str, DraftCurve] | None = None,
    report: ProgressReport | None = None,
) -> Calibration:
    """Time a grid of shapes, and random shapes to test the fit with, for about `seconds`."""
    fitted, held_out = grid_shapes(timer.limits), random_shapes(timer.limits, HELD_OUT, seed=0)
    taken = time_steps(timer, [*fitted, *held_out], seconds=seconds, held_out=len(held_out), report=report)
    typical = typical_steps([(step.shape, step.point) for step in taken], fitted=range(len(fitted)))
    return Calibration.fit(
        setup,
        [point for shape, point in typical.items() if shape < len(fitted)],
        [point for shape, point in typical.items() if shape >= len(fitted)],
        seconds=seconds,
        drafters=drafters,
    )


def quick_surface(runner: Runner, *, max_context: int, seconds: float, trace: Trace | None = None) -> LatencySurface:
    """A surface from about `seconds` of measuring, for an engine that was never calibrated. Steps are timed by what the
    calling thread computes (`trace`: by another clock): beside other programs wall seconds of so few steps said that a
    cached position cost more than all rows, which no later step corrects.

    Call it before the target is used: its cache is overwritten, whatever a block pool has recorded about it. UsageError
    if the cache is too small to measure in.
    """
    trace = trace or Trace(time.thread_time)
    timer = StepTimer(runner, max_context=max_context, longest=_QUICK_CONTEXT, tokens=_QUICK_TOKENS, trace=trace)
    taken = time_steps(timer, quick_shapes(timer.limits), seconds=seconds, seed=None, repeats=1)
    fastest: dict[int, StepPoint] = {}  # of so few steps, a pause of the machine would distort any other statistic
    for step in sorted(taken, key=lambda step: step.point.seconds):
        fastest.setdefault(step.shape, step.point)
    points = list(fastest.values())
    if len({point.rows for point in points}) == 1:
        typical = median(point.seconds for point in points)
        return LatencySurface([points[0].rows], [typical], uncertainty=_QUICK_UNCERTAINTY)
    return fit_surface(points, uncertainty=_QUICK_UNCERTAINTY)
