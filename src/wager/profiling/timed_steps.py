"""Takes real steps of chosen shapes: the whole engine on a target, with a policy and a drafter that do as told.

What sequences have cached was never computed: their pages are zeroed and declared to be known, since no kernel's time
depends on the numbers it reads. That makes long contexts free. Page table and scheduler are the stage's own, so an
engine on the same target keeps all it has but the contents of the cache. Knows no fit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from wager.economics.latency.shapes import DEEPEST, ShapeLimits, StepShape
from wager.economics.latency.surface import StepPoint
from wager.economics.policy.base import FixedDepth
from wager.engine.core import Engine
from wager.engine.detokenizer import TokenDecoder
from wager.engine.proposer import Proposer
from wager.engine.runner import Runner
from wager.engine.scheduler import Scheduler
from wager.errors import UsageError
from wager.kernels.base import BLOCK_SIZE, TargetOutput
from wager.kv.blocks import BlockPool
from wager.kv.paged_cache import PagedKVCache
from wager.trace import Trace
from wager.types import DRAFT_STAGE, Draft, DraftDecision, DraftRequest, Plan, Request, SamplingParams, Span, StepRecord

Report = Callable[[float], None]
"""Told the seconds that have passed."""

LONGEST = 4096
"""Positions of the longest text."""

_SEQUENCES = 32
_VISIT, _REPEATS = 4, 2
"""Shapes that are timed between one entrance of sequences and the next, and steps of each."""


class _Script(FixedDepth):
    """A policy that asks for as many guesses as the shape says, and keeps the records."""

    def __init__(self) -> None:
        super().__init__(0)
        self.depths: Mapping[str, int] = {}
        self.records: list[StepRecord] = []

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        del budget  # shapes are chosen to fit
        wanted = {span.seq_id: min(self.depths.get(span.seq_id, 0), span.max_draft_tokens) for span in spans}
        return {seq_id: DraftDecision(depth) for seq_id, depth in wanted.items() if depth}

    def observe(self, record: StepRecord) -> None:
        self.records.append(record)


class _Babble:
    """A drafter that draws its guesses at random, so that all but none is right."""

    name = "babble"
    default_depth = max_depth = DEEPEST
    samples = False
    makes_trees = False

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._rng = random.Random(0)

    def propose(self, asks: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft.chain(ask.seq_id, self.words(ask.depth), drafter=self.name) for ask in asks]

    def words(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocab) for _ in range(count)]

    def begin(self, sequence: str, tokens: Sequence[int], params: SamplingParams) -> None: ...

    def accept(self, sequence: str, tokens: Sequence[int]) -> None: ...

    def end(self, sequence: str) -> None: ...

    def observe(self, output: TargetOutput) -> None: ...


class Stage:
    """An engine of its own on `runner`'s target, whose cache already holds texts of all lengths that the limits allow.

    Nobody else may use the target meanwhile, and what its cache held before is lost: an engine that shares it must
    forget its prefixes. `tokens` bounds all texts together. `decoder` makes the detokenizers whose time a real step
    pays too. UsageError if the cache is too small.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_context: int,
        longest: int = LONGEST,
        sequences: int = _SEQUENCES,
        tokens: int | None = None,
        decoder: Callable[[], TokenDecoder] | None = None,
        trace: Trace | None = None,
    ) -> None:
        target, trace = runner.target, trace or Trace()
        self.clock = trace.clock
        self.limits = _limits(runner, max_context=max_context, longest=longest, sequences=sequences, tokens=tokens)
        self._script, self._babble = _Script(), _Babble(target.vocab)
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
            policy=self._script,
            proposer=Proposer(self._babble, vocab=target.vocab),
            decoder=decoder,
            trace=trace,
        )
        self._texts = [self._furnish(i, length) for i, length in enumerate(self.limits.texts())]
        self._running: list[str] = []

    def _furnish(self, index: int, length: int) -> list[int]:
        """A text whose pages are held for good, so that every request that begins with it finds them computed."""
        table, name = self._scheduler.block_pool, f"text {index}"
        words = self._babble.words(length + 1)
        table.reserve(name, length)
        for page in table.block_table(name):
            self._engine.runner.target.cache.clear(page)  # writes it: memory never written is not memory yet
        table.commit(name, words, length=length)
        return words

    def enter(self, contexts: Sequence[int]) -> None:
        """One running sequence per context (multiples of PAGE, within the texts), and a first step, not timed."""
        for index, context in enumerate(contexts):
            name = f"r{index}"
            most = min(LONGEST, self._scheduler.max_context - context - 1)
            params = SamplingParams(max_tokens=most, ignore_eos=True)
            self._engine.add(Request(name, tuple(self._texts[index][: context + 1]), params))
            self._running.append(name)
        self.step((0,) * len(contexts))

    def step(self, depths: Sequence[int]) -> StepRecord | None:
        """One step with that many guesses for each; None if it came out otherwise (a sequence had ended)."""
        self._script.depths = dict(zip(self._running, depths, strict=True))
        self._script.records.clear()
        self._scheduler.max_draft_tokens = max(depths)
        self._engine.step()
        shape = (len(depths) + sum(depths), len(depths))
        return next((each for each in self._script.records if (each.rows, each.sequences) == shape), None)

    def leave(self) -> None:
        """End all sequences; the texts stay."""
        for name in self._running:
            self._engine.abort(name)
        self._engine.step()
        self._running.clear()


def _limits(runner: Runner, *, max_context: int, longest: int, sequences: int, tokens: int | None) -> ShapeLimits:
    """What fits. The scheduler wants free pages for a whole prompt before it looks which of them it has, and every
    sequence needs some to grow; where a shape finds too few all the same, its steps come out otherwise."""
    target = runner.target
    cached = target.cache.num_blocks * BLOCK_SIZE
    growth = min(BLOCK_SIZE * (DEEPEST + 2), max_context // 2)  # a visit's steps and their guesses
    context = min(longest, max_context - growth, cached // 4)
    sequences = min(sequences, target.max_sequences, target.max_rows)
    left = cached - context - BLOCK_SIZE - min(target.max_rows + 3 * BLOCK_SIZE * sequences, cached // 4)
    left = left if tokens is None else min(left, tokens)
    if min(context, left) < BLOCK_SIZE:
        raise UsageError(
            f"A cache of {cached} tokens for contexts of {max_context} is too small to measure steps in.",
            "Raise --memory or --max-context.",
        )
    return ShapeLimits(target.max_rows, sequences, context // BLOCK_SIZE * BLOCK_SIZE, left)


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One step that was taken, of the shape with that index."""

    shape: int
    record: StepRecord

    @property
    def point(self) -> StepPoint:
        """What it was, with its seconds without drafting."""
        record = self.record
        seconds = sum(taken for stage, taken in record.seconds.items() if stage != DRAFT_STAGE)
        return StepPoint(record.rows, record.sequences, sum(record.context_lens), seconds)


def rehearse(
    stage: Stage, shapes: Sequence[StepShape], *, seconds: float, seed: int | None = 0, held_out: int = 0,
    repeats: int = _REPEATS, report: Report | None = None,
) -> list[TimedStep]:  # fmt: skip
    """Steps of every shape again and again for `seconds`, in the order they were taken.

    Rounds are shuffled, so that a machine that is slow for a while is slow for all shapes alike; with `seed` None they
    go in order, and where time is short the last shapes are never reached. A shape is timed `repeats` times a visit.
    The last `held_out` shapes are not for fitting. Whatever it takes, two of the others are timed, and one of these.
    """
    rng = None if seed is None else random.Random(seed)
    fitted = len(shapes) - held_out
    begun = stage.clock()
    passed, taken = 0.0, list[TimedStep]()
    while True:
        for visit in _visits(shapes, rng):
            stage.enter(shapes[visit[0]].contexts)
            for index in visit:
                records = [stage.step(shapes[index].depths) for _ in range(repeats)]
                taken += [TimedStep(index, record) for record in records if record is not None]
                passed = stage.clock() - begun
                if report:
                    report(min(passed, seconds))
                if passed >= seconds and _enough(taken, fitted=fitted, judged=held_out > 0):
                    stage.leave()
                    return taken
            stage.leave()
        if passed >= seconds:
            return taken


def _enough(taken: Sequence[TimedStep], *, fitted: int, judged: bool) -> bool:
    rows = {timed.record.rows for timed in taken if timed.shape < fitted}
    return len(rows) > 1 and (not judged or any(timed.shape >= fitted for timed in taken))


def _visits(shapes: Sequence[StepShape], rng: random.Random | None) -> Iterator[list[int]]:
    """Indices of all shapes, a few at a time that share their contexts."""
    order = list(range(len(shapes)))
    if rng:
        rng.shuffle(order)
        order.sort(key=lambda index: shapes[index].contexts)  # stable: still shuffled among equals
    visits = []
    for _, same in groupby(order, key=lambda index: shapes[index].contexts):
        group = list(same)
        visits += [group[at : at + _VISIT] for at in range(0, len(group), _VISIT)]
    if rng:
        rng.shuffle(visits)
    return iter(visits)
