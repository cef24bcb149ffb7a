"""Drafts while the target verifies: speculative speculative decoding (arXiv 2603.03251).

After a draft was handed over, a thread drafts for its likeliest outcomes: each is a sequence of its own on the
drafter, which shares the keys and values of the text before it, and all get their drafts in the same passes. If
verification says one of them, its draft is there at once (a hit) and it goes on as the sequence; else (a miss) the
draft is made after all, while the target waits.

Which outcomes are likely is learned from the rounds. A round that accepts a whole draft ends in a token that the
drafter would draw next; one that ends before it most often ends in the token that came second for the drafter. Under
`match` both draw with the same noise, which makes that far likelier than chance.

A policy is told what a step waits for such a drafter: see DraftsAheadLatency.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from operator import itemgetter
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from wager.draft.base import Drafter, DrafterStoppedError
from wager.economics.latency import LatencyModel
from wager.economics.policy.base import SMOOTHING
from wager.kernels import _native
from wager.tenants import PerTenant
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams, StepRecord

if TYPE_CHECKING:
    from wager.draft.model import DraftModel
    from wager.draft.other_vocabulary import TextRouteDrafter

    ForkingDrafter = DraftModel | TextRouteDrafter

ALTERNATIVE_RATES = (0.69, 0.18)
"""How often the second choice of a drafter is right, and the third, where its first is wrong, under `match`: the lower
ends of what was found on synthetic rows at temperature 1 (0.69 to 0.79, with the third 0.87 to 0.94)."""

_ROWS = 4  # outcomes drafted for at a time, unless there are more sequences: up to there a row of a pass costs little
_LEAST_CHANCE = 0.05  # of a sequence's second outcome and further ones: less likely ones would delay the others
_MORE_NODES = 2  # of a tree beyond those requested: some are spent on the token that comes first
_DECAY = 0.98  # of what is known of guesses, with every round: about the last 50 count
_GUESS_RATE, _PRIOR = 0.7, 4.0  # of right guesses until rounds have shown it, and how many rounds that counts for
_HIT_RATE, _MEMORY = 0.5, 200.0  # until there are drafts, and how many of them count later
_PATIENCE_S = 60.0  # without a pass of the drafter, after which it counts as stalled
_JOIN_S = 2.0  # that closing waits for the calls that were given


# ---- outcomes of a round ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Branch:
    """A continuation of a sequence, which the drafter calls `name`: known tokens, then `tokens`, then a draft, whose
    guesses have these `alternatives`."""

    name: str
    tokens: tuple[int, ...]
    draft: Draft = field(default_factory=lambda: Draft(""))
    alternatives: Sequence[Sequence[int]] = ()

    def begins(self, unread: Sequence[int]) -> bool:
        """Whether `unread`, the tokens that became known, begin with its own."""
        return self.tokens == tuple(unread[: len(self.tokens)])

    def after(self, unread: Sequence[int]) -> Branch | None:
        """With the guesses behind `unread` alone; None if these are no path of it."""
        guessed = unread[len(self.tokens) :]
        _, path = _native.compare(self.draft, guessed)
        if not self.begins(unread) or len(path) < len(guessed):
            return None
        node = path[-1] if path else -1
        return replace(self, draft=below(self.draft, node), alternatives=self.alternatives[node + 1 :])


def below(draft: Draft, node: int) -> Draft:
    """What a draft guesses behind one of its nodes, as a draft of its own; scores are given that the node is right."""
    if node < 0:
        return draft
    place = {node: -1}
    for each, parent in enumerate(draft.parents):
        if parent in place:
            place[each] = len(place) - 1
    kept = list(place)[1:]
    reached = draft.scores[node] if draft.scores else 0.0
    scores = tuple(min(1.0, draft.scores[each] / reached) for each in kept) if reached > 0 else ()
    parents = tuple(place[draft.parents[each]] for each in kept)
    return Draft(draft.seq_id, tuple(draft.tokens[each] for each in kept), parents, scores, draft.drafter)


class OutcomeRates:
    """How often guesses were right if those before them were, by depth; older rounds count less."""

    def __init__(self) -> None:
        self._right: defaultdict[int, float] = defaultdict(float)
        self._tried: defaultdict[int, float] = defaultdict(float)

    def learn(self, draft: Draft, unread: Sequence[int]) -> None:
        """The tokens `unread` became known behind a draft that was handed over."""
        tested, path = _native.compare(draft, unread)
        for depth in range(max((draft.depths[node] for node in tested), default=0)):
            self._tried[depth] = _DECAY * self._tried[depth] + 1
            self._right[depth] = _DECAY * self._right[depth] + (depth < len(path))

    def guess_rate(self, depth: int) -> float:
        """That a guess at `depth` (from 0) is right if all before it are."""
        return (self._right[depth] + _PRIOR * _GUESS_RATE) / (self._tried[depth] + _PRIOR)

    def likely(self, draft: Draft, alternatives: Sequence[Sequence[int]]) -> list[tuple[float, tuple[int, ...], bool]]:
        """The outcomes of a round that verifies a draft, likeliest first: probability, the tokens that are accepted or
        come instead, and whether the drafter is to draw the next one itself.

        Of a chain either all guesses are accepted, and the drafter's own next token comes as often as its last guess is
        right, or one is the first wrong, and the drafter's next choices come as often as ALTERNATIVE_RATES say. A tree
        holds these itself: a round that ends within it says none of them."""
        tokens, outcomes = draft.tokens, list[tuple[float, tuple[int, ...], bool]]()
        if draft.is_chain:
            reached = 1.0
            for depth in range(len(draft)):
                right = reached * self.guess_rate(depth)
                others = alternatives[depth] if depth < len(alternatives) else ()
                for share, other in zip(ALTERNATIVE_RATES, others, strict=False):
                    outcomes.append(((reached - right) * share, (*tokens[:depth], other), False))
                reached = right
            outcomes.append((reached * self.guess_rate(len(draft) - 1) if draft else 0.0, tokens, True))
        else:
            for leaf in sorted(set(range(len(draft))) - set(draft.parents)):
                path = tuple(tokens[node] for node in draft.path(leaf))
                outcomes.append((draft.scores[leaf] if draft.scores else 0.0, path, True))
        return sorted(outcomes, key=itemgetter(0), reverse=True)


# ---- what it did -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class HitRate:
    """The share of drafts that were ready, learned; older ones count less."""

    share: float = _HIT_RATE
    drafts: int = 0

    def learn(self, *, ready: bool) -> None:
        self.drafts += 1
        self.share += (ready - self.share) / min(_MEMORY, _PRIOR + self.drafts)


@dataclass(slots=True)
class AheadFigures:
    """What a drafter that drafts ahead, for `rows` sequences at a time at least, did so far. `hits` and `misses` count
    drafts that were ready and those that were not; `waited_s` is what requests for drafts took, as the step saw it,
    `drafted_s` what the drafter's thread spent on drafting; `branches` counts outcomes for which drafts were made.
    `whose`: the tenant whose sequences run, None: those of several. How often drafts are ready tells how well its texts
    are guessed, so each has a rate of its own."""

    rows: int = 1
    hits: int = 0
    misses: int = 0
    waited_s: float = 0.0
    drafted_s: float = 0.0
    branches: int = 0
    whose: str | None = NO_TENANT
    rates: PerTenant[HitRate] = field(default_factory=lambda: PerTenant(HitRate))
    mixed: HitRate = field(default_factory=HitRate)
    """While sequences of several tenants run."""
    calls: deque[tuple[int, int, float]] = field(default_factory=lambda: deque(maxlen=64))
    """The latest calls of the drafter that nobody has learned from: sequences, the depth of the deepest, seconds."""

    def requested(self, *, ready: bool) -> None:
        """A draft that was ready, or was not."""
        self.hits, self.misses = self.hits + ready, self.misses + (not ready)
        self.rate.learn(ready=ready)

    @property
    def rate(self) -> HitRate:
        """The hit rate of the tenant whose sequences run, or of several."""
        return self.mixed if self.whose is None else self.rates.get(self.whose)

    def forget(self) -> None:
        """Hit rates are unknown again."""
        self.rates.clear()
        self.mixed = HitRate()

    @property
    def hit_rate(self) -> float | None:
        """Hits among all requests but the first of a sequence; None before any."""
        requests = self.hits + self.misses
        return self.hits / requests if requests else None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        names = ("hits", "misses", "waited_s", "drafted_s", "branches", "hit_rate")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        rate = "" if self.hit_rate is None else f" ({self.hit_rate:.0%})"
        return (
            f"{self.hits} drafts ready{rate}, {self.misses} not; "
            f"waited {self.waited_s:.2f} s for {self.drafted_s:.2f} s of drafting"
        )


class DraftsAheadLatency(LatencyModel):
    """`latency` for an engine where drafters draft ahead, with these figures: their seconds are what a step waits for
    them."""

    learns = True  # hit rates are, whatever else is

    def __init__(self, latency: LatencyModel, figures: Mapping[str, AheadFigures]) -> None:
        self._latency, self._figures = latency, figures
        self._context = 0.0  # cached positions of a sequence

    def seconds(self, rows: int, requests: int, context_sum: int) -> float:
        return self._latency.seconds(rows, requests, context_sum)

    def seconds_by_rows(self, rows: Sequence[int], requests: int, context_sum: int) -> list[float]:
        return self._latency.seconds_by_rows(rows, requests, context_sum)

    def difference_deviations(
        self, rows: int, others: Sequence[int], *, requests: int, context_sum: int
    ) -> list[float]:
        return self._latency.difference_deviations(rows, others, requests=requests, context_sum=context_sum)

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        """See LatencyModel. For a drafter that drafts ahead, what the step waits for it: if a draft was ready, for what
        preparing took longer than the step beside it; if one was not, for drafting those again that are expected then.
        The step waits for the hits together, and for the misses together."""
        drafting, figures = self._latency.draft_seconds, self._figures.get(drafter)
        if figures is None or requests <= 0 or depth <= 0:
            return drafting(drafter, requests, depth)
        hit = figures.rate.share
        any_hit, any_miss = 1 - (1 - hit) ** requests, 1 - hit**requests
        prepared = drafting(drafter, max(requests, figures.rows), depth + 1)
        step = self._latency.seconds(requests * (depth + 1), requests, round(requests * self._context))
        misses = max(1, round(requests * (1 - hit) / any_miss)) if any_miss > 0 else 1
        return any_hit * max(0.0, prepared - step) + any_miss * drafting(drafter, misses, depth)

    def observe(self, record: StepRecord) -> None:
        """See LatencyModel."""
        if record.context_lens:
            context = sum(record.context_lens) / len(record.context_lens)
            self._context += (SMOOTHING if self._context else 1.0) * (context - self._context)
        self._latency.observe(record)

    def observe_draft(self, drafter: str, requests: int, depth: int, *, seconds: float) -> None:
        """See LatencyModel. For a drafter that drafts ahead, its own calls are learned from, not what the step saw."""
        figures = self._figures.get(drafter)
        if figures is None:
            self._latency.observe_draft(drafter, requests, depth, seconds=seconds)
        while figures is not None and figures.calls:
            sequences, deepest, took = figures.calls.popleft()
            self._latency.observe_draft(drafter, sequences, deepest, seconds=took)


# ---- the drafter's thread --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class FollowedSequence:
    """One sequence. The drafter calls it `main`. `branches` are the continuations that drafts are made for, and
    `proposed` is the last draft that was handed over."""

    params: SamplingParams
    tenant: str
    main: str
    branches: list[Branch] = field(default_factory=list)
    proposed: Branch | None = None


class DraftThread(threading.Thread):
    """The only one that calls `inner`, in the order in which it was given calls. If one raises, it ends: `answers` has
    the error. It refers to none of those who wait, so that they can be collected."""

    def __init__(self, inner: ForkingDrafter, figures: AheadFigures) -> None:
        super().__init__(name=f"wager-draft-{inner.name}", daemon=True)
        self.answers: SimpleQueue[list[Draft] | BaseException] = SimpleQueue()
        self.awaited: Mapping[str, Sequence[int]] | None = None
        """Sequences for which drafts were requested, and the tokens that became known; None: they are at work."""
        self.closed = False
        self.last_sign = time.monotonic()
        self._inner, self._figures = inner, figures
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._sequences: dict[str, FollowedSequence] = {}
        self._names: set[str] = set()  # what the drafter calls them and their continuations
        self._fresh = map(str, count())
        self._rates = PerTenant(OutcomeRates)
        inner.num_alternatives, inner.on_pass = len(ALTERNATIVE_RATES), self._goes_on
        self.start()

    def run(self) -> None:
        try:
            while (call := self._calls.get()) is not None:
                self.last_sign = time.monotonic()
                call()
                del call
        except BaseException as error:  # raised where drafts are waited for
            self.answers.put(error)
        for name in self._names:
            with suppress(Exception):
                self._inner.end(name)

    def give(self, call: Callable[..., object], *arguments: Any) -> None:
        """Make this call after all others; never waits. Left out once the thread has ended: nobody would take it."""
        if self.is_alive() and not self.closed:
            self._calls.put(partial(call, *arguments))

    def close(self) -> None:
        """End after the calls that were given; wait for them a little. May be repeated."""
        self.closed = True
        self._calls.put(None)
        if self is not threading.current_thread():
            self.join(_JOIN_S)

    def _goes_on(self) -> bool:
        """Whether drafting goes on after a pass: not if drafts are waited for, and none being made can be one."""
        self.last_sign, awaited = time.monotonic(), self.awaited
        if self.closed or awaited is None:
            return not self.closed
        asked = [(self._sequences.get(seq_id), unread) for seq_id, unread in awaited.items()]
        return any(branch.begins(unread) for each, unread in asked if each for branch in each.branches)

    # calls

    def forget(self) -> None:
        self._rates.clear()
        self._inner.forget()

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, tenant: str) -> None:
        self._sequences[seq_id] = sequence = FollowedSequence(params, tenant, self._new_name())
        self._inner.begin(sequence.main, tokens, params, tenant=tenant)

    def end(self, seq_id: str) -> None:
        sequence = self._sequences.pop(seq_id)
        for name in (sequence.main, *(branch.name for branch in sequence.branches)):
            self._end(name)

    def _new_name(self) -> str:
        name = next(self._fresh)
        self._names.add(name)
        return name

    def _end(self, name: str) -> None:
        self._names.discard(name)
        self._inner.end(name)

    def draft(self, requests: Sequence[DraftRequest], unread: Mapping[str, Sequence[int]]) -> None:
        """Answer with drafts that are ready, and for what was missed new ones; then prepare the next. `unread`: the
        tokens of each sequence that became known since its last draft."""
        self.awaited = None
        ready, missed = dict[str, Branch](), list[DraftRequest]()
        for request in requests:
            sequence, tokens = self._sequences[request.seq_id], unread[request.seq_id]
            known = [*sequence.branches, *([sequence.proposed] if sequence.proposed else ())]
            rests = [rest for each in known if (rest := each.after(tokens))]
            found = max(rests, key=lambda each: len(each.draft), default=None)
            is_ready = found is not None and len(found.draft) > 0
            if sequence.proposed is not None:
                self._rates.get(sequence.tenant).learn(sequence.proposed.draft, tokens)
                self._figures.requested(ready=is_ready)
            if found is not None:
                ready[request.seq_id] = found
            if not is_ready:
                missed.append(request)
        if not missed:
            self._answer(requests, ready)
        self._settle(ready, unread)
        if missed:
            asked = [(Branch(self._sequences[request.seq_id].main, ()), request) for request in missed]
            self._propose(asked, deepest=max(request.depth for request in missed))
            ready |= {request.seq_id: branch for branch, request in asked}
            self._answer(requests, ready)
        for seq_id, branch in ready.items():
            self._sequences[seq_id].proposed = replace(branch, tokens=())
        self._prepare(requests, ready)

    def _answer(self, requests: Sequence[DraftRequest], ready: Mapping[str, Branch]) -> None:
        self.answers.put([_cut(request, ready[request.seq_id].draft) for request in requests])

    def _settle(self, found: Mapping[str, Branch], unread: Mapping[str, Sequence[int]]) -> None:
        """Sequences go on as the continuations that were found; all others are ended."""
        for seq_id, tokens in unread.items():
            sequence, branch = self._sequences[seq_id], found.get(seq_id)
            if branch is not None and branch.name != sequence.main:
                tokens = tokens[len(branch.tokens) :]
                sequence.branches.append(Branch(sequence.main, ()))
                sequence.main = branch.name
            if tokens:
                self._inner.accept(sequence.main, tokens)
        for sequence in self._sequences.values():
            for branch in sequence.branches:
                if branch.name != sequence.main:
                    self._end(branch.name)
            sequence.branches = []

    def _prepare(self, requests: Sequence[DraftRequest], proposed: Mapping[str, Branch]) -> None:
        """Draft for the likeliest outcomes of what was proposed for these requests, which is being verified: one of
        each, and of all others the likeliest as far as the rows go."""
        likeliest, further = [], []
        for request in requests:
            sequence, draft = self._sequences[request.seq_id], proposed[request.seq_id]
            rates = self._rates.get(sequence.tenant)
            outcomes = rates.likely(draft.draft, draft.alternatives)
            listed = [(*outcome, rates.guess_rate(0), sequence, request) for outcome in outcomes]
            likeliest += listed[:1]
            further += [each for each in listed[1:] if each[0] >= _LEAST_CHANCE]
        chosen = [*likeliest, *sorted(further, key=itemgetter(0), reverse=True)]
        asked: list[tuple[Branch, DraftRequest]] = []
        for _, tokens, is_open, rate, sequence, request in chosen[: max(self._figures.rows, len(requests))]:
            branch = Branch(self._new_name(), tokens)
            sequence.branches.append(branch)
            self._inner.fork(sequence.main, branch.name, tokens, sequence.params)
            depth, survival = request.depth, request.min_survival
            if is_open:  # the drafter draws the first token itself: one guess more
                depth += 1 + _MORE_NODES if self._inner.makes_trees else 1
                survival *= rate
            position = request.position + len(tokens)
            asked.append((branch, request._replace(position=position, depth=depth, min_survival=survival)))
        self._propose(asked, deepest=max(request.depth for request in requests) + 1)
        self._figures.branches += len(asked)

    def _propose(self, asked: Sequence[tuple[Branch, DraftRequest]], *, deepest: int) -> None:
        """Give the branches their drafts."""
        begin = time.perf_counter()
        drafts = self._inner.propose([request._replace(seq_id=branch.name) for branch, request in asked])
        for (branch, _), draft in zip(asked, drafts, strict=True):
            branch.draft, branch.alternatives = draft, self._inner.alternatives(branch.name)
        seconds = time.perf_counter() - begin
        self._figures.drafted_s += seconds
        if self._goes_on():  # nothing is learned from a call that was ended early
            self._figures.calls.append((len(asked), deepest, seconds))


def _cut(request: DraftRequest, draft: Draft) -> Draft:
    """A draft of a continuation as one of the request: not larger, nor going on after an unlikely guess."""
    size = min(request.depth, len(draft.tokens))
    if draft.is_chain:
        unlikely = (at + 1 for at, score in enumerate(draft.scores[:size]) if score < request.min_survival)
        size = next(unlikely, size)
    return replace(draft.truncate(size), seq_id=request.seq_id)


# ---- the engine's thread ---------------------------------------------------------------------------------------------


class AheadDrafter(Drafter):
    """`inner` drafts on a thread of its own, ahead of its requests; nothing else may call it. It must not read the
    target's states. `rows`: outcomes that are drafted for at a time.

    After an error, and when all sequences were ended, the next one gets a new thread; none after a stall."""

    def __init__(self, inner: ForkingDrafter, *, rows: int = _ROWS, patience_s: float = _PATIENCE_S) -> None:
        self.name = inner.name
        self.default_depth, self.max_depth = inner.default_depth, inner.max_depth
        self.samples, self.makes_trees = inner.samples, inner.makes_trees
        self.remembers_requests = inner.remembers_requests
        self.figures = AheadFigures(rows)
        self._inner, self._patience_s = inner, patience_s
        self._tenants: dict[str, str] = {}  # of the sequences
        self._unread: dict[str, list[int]] = {}  # their tokens that the thread was not told
        self._open()

    def _open(self) -> None:
        self._thread, self._failed = DraftThread(self._inner, self.figures), False
        self._close_thread = weakref.finalize(self, self._thread.close)

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        self.end(seq_id)
        if self._failed and not self._tenants:
            self._open()
        self._tenants[seq_id], self._unread[seq_id] = tenant, []
        self._note_tenants()
        self._thread.give(self._thread.begin, seq_id, list(tokens), params, tenant)

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        """Remembered until the next draft is requested."""
        self._unread[seq_id] += tokens

    def end(self, seq_id: str) -> None:
        if self._tenants.pop(seq_id, None) is not None:
            del self._unread[seq_id]
            self._thread.give(self._thread.end, seq_id)
            self._note_tenants()

    def _note_tenants(self) -> None:
        tenants = set(self._tenants.values())
        if tenants:
            self.figures.whose = tenants.pop() if len(tenants) == 1 else None

    def forget(self) -> None:
        self.figures.forget()  # here: the policy reads them on this thread
        if self._thread.is_alive():
            self._thread.give(self._thread.forget)
        else:
            self._inner.forget()

    def close(self) -> None:
        """End the thread. May be repeated; no draft can be requested any more."""
        self._failed = False
        self._close_thread()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Drafts that are ready, and for what was missed new ones; then the drafter goes on with the next. Raises
        DrafterStoppedError where a call failed, whichever it was, or the thread has ended."""
        begin, thread = time.perf_counter(), self._thread
        if thread.closed:
            raise DrafterStoppedError("its thread has ended")
        unread = {request.seq_id: self._unread[request.seq_id] for request in requests}
        self._unread |= {seq_id: [] for seq_id in unread}
        thread.last_sign, thread.awaited = time.monotonic(), unread
        thread.give(thread.draft, list(requests), unread)
        try:
            drafts = self._wait()
        except BaseException as error:
            self.close()
            self._failed = not isinstance(error, TimeoutError)  # one that hangs may still be at work
            if not isinstance(error, Exception):
                raise
            raise DrafterStoppedError(f"{type(error).__name__}: {error}") from error
        self.figures.waited_s += time.perf_counter() - begin
        return [replace(draft, drafter=self.name) for draft in drafts]

    def _wait(self) -> list[Draft]:
        """The thread's answer. Raises what it raised; TimeoutError without a pass for too long."""
        while (left := self._thread.last_sign + self._patience_s - time.monotonic()) > 0:
            with suppress(Empty):
                answer = self._thread.answers.get(timeout=left)
                if isinstance(answer, BaseException):
                    raise answer
                return answer
        raise TimeoutError(f"it has not answered for {self._patience_s:g} s")
