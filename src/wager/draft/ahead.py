"""Drafts while the target verifies: speculative speculative decoding (arXiv 2603.03251).

After a draft was handed over, a thread drafts for its likeliest outcomes: each is a sequence of its own on the
drafter, which shares the keys and values of the text before it, and all get their drafts in the same passes. If
verification says one of them, its draft is there at once (a hit) and it goes on as the sequence; else (a miss) the
draft is made after all, while the target waits.

Which outcomes are likely is learned from the rounds: how far a draft is accepted, and what the target says there. A
round that accepts a whole draft ends in a token that the drafter would draw next; one that ends before it most often
ends in the token that came second for the drafter. Under `match` both draw with the same noise, which makes that far
likelier than chance.

All calls of the drafter are made on its thread, in order. An error of the drafter, or a stall, is raised by `propose`,
and the thread is ended; after an error, and when all sequences were ended, the next one gets a new thread.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from wager.draft.base import Drafter, DrafterStoppedError, RemembersRequests, remembers_requests
from wager.draft.guessing import child_of
from wager.tenants import PerTenant
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams

T = TypeVar("T")

PATIENCE_S = 60.0
"""Seconds without a pass of the drafter after which it counts as stalled."""

NUM_OTHERS = 2
"""Tokens that a guess may turn out to be instead."""

_ROWS = 4
"""Outcomes for which drafts are prepared at a time: rows of a pass, which cost little more than one up to there. A
larger batch has one for each sequence."""

_LEAST_CHANCE = 0.05
"""A further outcome that is less likely is not drafted for: it would delay the others for nothing."""

_MORE_NODES = 2
"""Nodes that a tree is given beyond those requested: some are spent on the token that comes first."""

_DECAY = 0.98  # of what is known of outcomes, with every round: about the last 50 count
_GUESS_RATE, _OTHER_RATES = 0.7, (0.6, 0.15)
"""Rates until rounds have shown them: of a guess, and of each of its alternatives where it is wrong."""
_PRIOR = 4.0  # rounds that these count for

_CALLS_KEPT = 64  # of the drafter, for the policy, which learns from them
_JOIN_S = 2.0  # seconds that closing waits for the calls that were given


@runtime_checkable
class ForksSequences(Protocol):
    """A drafter that can begin a sequence from another one. `num_others`: how many alternatives of each guess it is to
    remember. `on_pass` is called after each of its passes; False ends the drafts as they are."""

    num_others: int
    on_pass: Callable[[], bool] | None

    def fork(self, seq_id: str, new_id: str, tokens: Sequence[int], params: SamplingParams) -> None:
        """A new sequence that knows what another one knows, with `tokens` behind it. The other one stays."""

    def others(self, seq_id: str) -> Sequence[Sequence[int]]:
        """For each guess of the last draft of a sequence, if it was a chain, the tokens that came next after it."""


@dataclass(frozen=True, slots=True)
class AheadFigures:
    """What drafting ahead did so far. `hits` and `misses` count drafts that were ready and those that were not;
    `waited_s` is what requests for drafts took, as the step saw it, `drafted_s` what the drafter's thread spent on
    drafting; `branches` counts outcomes for which drafts were made."""

    hits: int = 0
    misses: int = 0
    waited_s: float = 0.0
    drafted_s: float = 0.0
    branches: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Hits among all requests but the first of a sequence; None before any."""
        requests = self.hits + self.misses
        return self.hits / requests if requests else None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "hit_rate": self.hit_rate}

    def __str__(self) -> str:
        rate = "" if self.hit_rate is None else f" ({self.hit_rate:.0%})"
        return (
            f"{self.hits} drafts ready{rate}, {self.misses} not; "
            f"waited {self.waited_s:.2f} s for {self.drafted_s:.2f} s of drafting"
        )


class DraftedBatch(NamedTuple):
    """One call of the drafter: sequences, the depth of the deepest, and what it took."""

    requests: int
    depth: int
    seconds: float


# ---- which outcomes are likely ---------------------------------------------------------------------------------------


class LikelyOutcome(NamedTuple):
    """Tokens that may become known: a path of the draft, and the token behind it unless the drafter is to draw that one
    itself (`is_open`). `probability` is an estimate."""

    tokens: tuple[int, ...]
    is_open: bool
    probability: float


class OutcomeRates:
    """How often guesses were right by depth, and their alternatives where they were not; older rounds count less."""

    def __init__(self) -> None:
        self._counts: defaultdict[tuple[str, int], float] = defaultdict(float)

    def learn(self, draft: Draft, others: Sequence[Sequence[int]], tokens: Sequence[int]) -> None:
        """`tokens` became known behind the sequence that the draft was made for."""
        counts = self._counts
        for key in counts:
            counts[key] *= _DECAY
        node = -1
        for depth, token in enumerate(tokens):
            child = child_of(draft.parents, draft.tokens, node, token)
            if child is None and node not in draft.parents:
                return  # nothing was guessed there
            counts["tried", depth] += 1
            if child is None:
                if depth < len(others):
                    counts["wrong", 0] += 1
                    for rank, other in enumerate(others[depth][:NUM_OTHERS]):
                        counts["other", rank] += other == token
                return
            counts["right", depth] += 1
            node = child

    def guess_rate(self, depth: int) -> float:
        """That a guess at `depth` (from 0) is right if all before it are."""
        return (self._counts["right", depth] + _PRIOR * _GUESS_RATE) / (self._counts["tried", depth] + _PRIOR)

    def other_rate(self, rank: int) -> float:
        """That a wrong guess should have been its alternative of that rank."""
        return (self._counts["other", rank] + _PRIOR * _OTHER_RATES[rank]) / (self._counts["wrong", 0] + _PRIOR)

    def likely(self, draft: Draft, others: Sequence[Sequence[int]]) -> list[LikelyOutcome]:
        """The outcomes of a draft, likeliest first; `others` are those of each guess of a chain. A tree holds the
        alternatives itself: a round that ends within it says none of them."""
        outcomes = []
        if draft.is_chain:
            reached = 1.0
            for depth in range(len(draft)):
                rate = self.guess_rate(depth)
                for rank, other in enumerate(others[depth][:NUM_OTHERS] if depth < len(others) else ()):
                    chance = reached * (1 - rate) * self.other_rate(rank)
                    outcomes.append(LikelyOutcome((*draft.tokens[:depth], other), False, chance))
                reached *= rate
            outcomes.append(LikelyOutcome(draft.tokens, True, reached * self.guess_rate(len(draft))))
        else:
            scores = draft.scores or (0.0,) * len(draft)
            for leaf in sorted(set(range(len(draft))) - set(draft.parents)):
                path = tuple(draft.tokens[node] for node in draft.path(leaf))
                outcomes.append(LikelyOutcome(path, True, scores[leaf]))
        return sorted(outcomes, key=lambda outcome: -outcome.probability)


# ---- the drafter's thread --------------------------------------------------------------------------------------------


class StalledError(RuntimeError):
    """A call takes so long that it is given up."""


class _CallQueue:
    """What the thread and those who wait for it share."""

    def __init__(self) -> None:
        self.given: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self.error: BaseException | None = None
        self.last_sign = time.monotonic()

    def sign(self) -> None:
        """The thread is at work: for long calls to call now and then."""
        self.last_sign = time.monotonic()

    def serve(self) -> None:
        """Make calls until None is given."""
        while (given := self.given.get()) is not None:
            future, call = given
            self.sign()
            try:
                if self.error is not None:
                    raise self.error
                future.set_result(call())
            except BaseException as error:  # raised where its result is waited for
                self.error = error
                future.set_exception(error)
            del given, future, call  # what they refer to may go while the next call is awaited

    def end(self, thread: threading.Thread) -> None:
        self.given.put(None)
        if thread is not threading.current_thread():
            thread.join(_JOIN_S)


class OrderedCalls:
    """A thread called `name` that makes calls in the order in which they were given; what it calls needs no locks.

    If a call raises, none is made after it and every wait raises the same; after `patience_s` seconds without a sign of
    life waiting ends with StalledError. The thread is a daemon and holds its queue alone, so whoever gave it calls can
    be collected, which ends it.
    """

    def __init__(self, name: str, *, patience_s: float) -> None:
        self._patience_s = patience_s
        self._queue = _CallQueue()
        self.sign = self._queue.sign
        self.thread = threading.Thread(target=self._queue.serve, name=name, daemon=True)
        self.close = weakref.finalize(self, self._queue.end, self.thread)
        """Ends the thread after the calls that it was given; waits for them a little. May be repeated."""
        self.thread.start()

    def give(self, call: Callable[[], T]) -> Future[T]:
        """Make this call after all others; never waits."""
        future: Future[T] = Future()
        self._queue.given.put((future, call))
        return future

    def wait(self, future: Future[T]) -> T:
        """What the call returns. Raises what it, or one before it, raised; StalledError if the thread is stalled."""
        left = self._patience_s
        while not wait([future], left).done:
            left = self._queue.last_sign + self._patience_s - time.monotonic()
            if left <= 0:
                raise StalledError(f"it has not answered for {self._patience_s:g} s")
        return future.result()


# ---- continuations of sequences, on the thread -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Branch:
    """The draft of a continuation, which is the drafter's sequence `inner_id`: known tokens, then `tokens`. The draft
    may be empty: known tokens were computed, no more. `others`: see ForksSequences."""

    inner_id: str
    tokens: tuple[int, ...]
    draft: Draft
    others: Sequence[Sequence[int]] = ()

    def behind(self, fresh: Sequence[int]) -> Branch | None:
        """This branch with the guesses behind `fresh`, the tokens that became known; None if they are no path of it."""
        if not _begins(self.tokens, fresh):
            return None
        node = -1
        for token in fresh[len(self.tokens) :]:
            child = child_of(self.draft.parents, self.draft.tokens, node, token)
            if child is None:
                return None
            node = child
        others = self.others[node + 1 :] if self.draft.is_chain else ()
        return replace(self, draft=below(self.draft, node), others=others)


def _begins(tokens: Sequence[int], fresh: Sequence[int]) -> bool:
    return tuple(tokens) == tuple(fresh[: len(tokens)])


@dataclass(eq=False, slots=True)
class FollowedSequence:
    """One sequence. The thread's: `known` are its tokens as far as the drafter was told, `main` is what the drafter
    calls it, and `outcomes` are those that drafts are made for (None: not chosen yet). The engine's: `fresh` tokens
    that the drafter was not told, and the last draft `handed` over."""

    params: SamplingParams
    tenant: str
    prompt_tokens: int
    known: list[int]
    main: str
    outcomes: list[tuple[int, ...]] | None = None
    fresh: list[int] = field(default_factory=list)
    handed: Branch | None = None

    def may_find(self) -> bool:
        """Whether the fresh tokens may be among the outcomes that drafts are made for."""
        return self.outcomes is None or any(_begins(outcome, self.fresh) for outcome in self.outcomes)


class BranchingDrafter:
    """`inner` drafts for sequences and their continuations, as many as `rows` together. One thread at a time."""

    def __init__(self, inner: Drafter, *, rows: int = _ROWS) -> None:
        self.inner, self.rows = inner, rows
        self.rates = PerTenant(OutcomeRates)
        self.branches: dict[FollowedSequence, list[Branch]] = {}
        """Of sequences their continuations, the first the sequence itself with the draft that is being verified."""
        self.num_branches = 0
        """Continuations that drafts were made for."""
        self.abandoned = False
        """What is being prepared is not needed any more."""
        self.sign: Callable[[], None] | None = None
        """Called after each pass."""
        self._forks = inner if isinstance(inner, ForksSequences) else None
        if self._forks is not None:
            self._forks.num_others = NUM_OTHERS
            self._forks.on_pass = self._on_pass
        self._names: set[str] = set()  # what the drafter calls its sequences
        self._made = 0

    def _on_pass(self) -> bool:
        if self.sign is not None:
            self.sign()
        return not self.abandoned

    def begin(self, sequence: FollowedSequence) -> None:
        self._names.add(sequence.main)
        self.inner.begin(sequence.main, sequence.known, sequence.params, tenant=sequence.tenant)

    def end(self, sequence: FollowedSequence) -> None:
        for branch in self.branches.pop(sequence, ()):
            self._end(branch.inner_id)
        self._end(sequence.main)

    def end_all(self) -> None:
        """End all sequences and continuations, after a failure; what fails again is left."""
        for name in list(self._names):
            with suppress(Exception):
                self._end(name)
        self._names.clear()
        self.branches.clear()

    def _end(self, name: str) -> None:
        if name in self._names:
            self.inner.end(name)
            self._names.discard(name)

    def forget(self) -> None:
        if isinstance(self.inner, RemembersRequests):
            self.inner.forget()

    def find(self, sequence: FollowedSequence) -> Branch | None:
        """The continuation with most guesses behind the fresh tokens; None if no draft was made for them."""
        found = [branch for each in self.branches.get(sequence, ()) if (branch := each.behind(sequence.fresh))]
        return max(found, key=lambda branch: len(branch.draft), default=None)

    def settle(self, requested: Sequence[tuple[FollowedSequence, Sequence[int], Branch | None]]) -> None:
        """Of sequences, the tokens that became known, and the continuation that they are, if one is: as that it goes
        on. All other continuations are dropped."""
        for sequence, fresh, found in requested:
            sequence.known += fresh
            if found is not None and found.inner_id != sequence.main:
                sequence.main, fresh = found.inner_id, fresh[len(found.tokens) :]
            if fresh:
                self.inner.accept(sequence.main, fresh)
        for sequence, branches in self.branches.items():
            for branch in branches:
                if branch.inner_id != sequence.main:
                    self._end(branch.inner_id)
        self.branches.clear()

    def draft(self, missed: Sequence[tuple[FollowedSequence, DraftRequest]]) -> dict[FollowedSequence, Branch]:
        drafts = self._propose([request._replace(seq_id=sequence.main) for sequence, request in missed])
        return {sequence: self._branch(sequence.main, (), drafts) for sequence, _ in missed}

    def prepare(self, handed: Sequence[tuple[FollowedSequence, DraftRequest, Branch]]) -> DraftedBatch:
        """Draft for the likeliest outcomes of the drafts handed over for these requests, which are being verified."""
        begin = time.perf_counter()
        likely = []
        for sequence, _, branch in handed:
            self.branches[sequence] = [Branch(sequence.main, (), branch.draft, branch.others)]
            likely.append(self.rates.get(sequence.tenant).likely(branch.draft, branch.others))
        asked: list[tuple[FollowedSequence, LikelyOutcome, DraftRequest]] = []
        for (sequence, request, _), outcomes in zip(handed, self._likeliest(likely), strict=True):
            sequence.outcomes = [outcome.tokens for outcome in outcomes]
            asked += [(sequence, outcome, self._fork(sequence, request, outcome)) for outcome in outcomes]
        drafts = self._propose([request for _, _, request in asked])
        self.num_branches += len(asked)
        for sequence, outcome, request in asked:
            self.branches[sequence].append(self._branch(request.seq_id, outcome.tokens, drafts))
        depth = max(request.depth for _, request, _ in handed) + 1
        return DraftedBatch(len(asked), depth, time.perf_counter() - begin)

    def _likeliest(self, outcomes: Sequence[Sequence[LikelyOutcome]]) -> list[list[LikelyOutcome]]:
        """The likeliest outcome of each draft, and of the others the likeliest as far as the rows go."""
        others = [
            (-outcome.probability, index, rank)
            for index, each in enumerate(outcomes)
            for rank, outcome in enumerate(each[1:], 1)
            if outcome.probability >= _LEAST_CHANCE
        ]
        taken = [list(each[:1]) for each in outcomes]
        for _, index, rank in sorted(others)[: max(0, self.rows - len(outcomes))]:
            taken[index].append(outcomes[index][rank])
        return taken

    def _fork(self, sequence: FollowedSequence, request: DraftRequest, outcome: LikelyOutcome) -> DraftRequest:
        """A continuation, and the request for its draft: if the drafter draws its first token itself, one more."""
        self._made += 1
        name = f"{sequence.main.partition('/')[0]}/{self._made}"
        self._names.add(name)
        if self._forks is not None:
            self._forks.fork(sequence.main, name, outcome.tokens, sequence.params)
        else:
            prompt = sequence.known[: sequence.prompt_tokens]
            self.inner.begin(name, prompt, sequence.params, tenant=sequence.tenant)
            self.inner.accept(name, [*sequence.known[sequence.prompt_tokens :], *outcome.tokens])
        depth, survival = request.depth, request.min_survival
        if outcome.is_open:
            depth += 1 + _MORE_NODES if self.inner.makes_trees else 1
            survival *= self.rates.get(sequence.tenant).guess_rate(0)
        position = request.position + len(outcome.tokens)
        return request._replace(seq_id=name, position=position, depth=depth, min_survival=survival)

    def _propose(self, requests: Sequence[DraftRequest]) -> dict[str, Draft]:
        return {draft.seq_id: draft for draft in self.inner.propose(requests)}

    def _branch(self, name: str, tokens: tuple[int, ...], drafts: dict[str, Draft]) -> Branch:
        others = () if self._forks is None else self._forks.others(name)
        return Branch(name, tokens, drafts.get(name, Draft(name)), others)


# ---- on the engine's thread ------------------------------------------------------------------------------------------


class AheadDrafter(Drafter):
    """`inner` drafts on a thread of its own, ahead of its requests; nothing else may call it. It must not read the
    target's states. `rows`: outcomes that are drafted for at a time."""

    def __init__(self, inner: Drafter, *, rows: int = _ROWS, patience_s: float = PATIENCE_S) -> None:
        self.name = inner.name
        self.default_depth, self.max_depth = inner.default_depth, inner.max_depth
        self.samples, self.makes_trees = inner.samples, inner.makes_trees
        self.hits = self.misses = 0
        self.least_drafted = rows
        self._waited_s = self._drafted_s = 0.0
        self._drafter = BranchingDrafter(inner, rows=rows)
        self._patience_s = patience_s
        self._sequences: dict[str, FollowedSequence] = {}
        self._preparing: Future[DraftedBatch] | None = None
        self._numbers = 0
        self._drafted: deque[DraftedBatch] = deque(maxlen=_CALLS_KEPT)
        self._open()

    def _open(self) -> None:
        """A thread, for a drafter without sequences."""
        self._calls = OrderedCalls(f"wager-draft-{self._drafter.inner.name}", patience_s=self._patience_s)
        self._drafter.sign = self._calls.sign
        self._drafter.abandoned = False
        self._ended = self._failed = False

    @property
    def figures(self) -> AheadFigures:
        return AheadFigures(self.hits, self.misses, self._waited_s, self._drafted_s, self._drafter.num_branches)

    def take_drafted(self) -> list[DraftedBatch]:
        """The latest calls of the drafter since this was asked last: the policy learns from them."""
        taken = list(self._drafted)
        self._drafted.clear()
        return taken

    # the interface of a drafter

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        self.end(seq_id)
        if self._failed and not self._sequences:
            self._open()
            self._give(self._drafter.end_all)
        self._numbers += 1
        sequence = FollowedSequence(params, tenant, len(tokens), list(tokens), str(self._numbers))
        self._sequences[seq_id] = sequence
        self._give(partial(self._drafter.begin, sequence))

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        """Remembered until the next draft is requested."""
        self._sequences[seq_id].fresh += tokens

    def end(self, seq_id: str) -> None:
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            self._give(partial(self._drafter.end, sequence))

    @property
    def remembers_requests(self) -> bool:
        """See RemembersRequests."""
        return remembers_requests(self._drafter.inner)

    def forget(self) -> None:
        self._give(self._drafter.forget)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Drafts that are ready, and for what was missed new ones; then the drafter goes on with the next. Raises
        DrafterStoppedError where a call failed, whichever it was, or the thread has ended."""
        begin = time.perf_counter()
        if self._ended:
            raise DrafterStoppedError("its thread has ended")
        try:
            drafts = self._propose(requests)
        except BaseException as error:
            self.close()
            self._failed = not isinstance(error, StalledError)  # one that hangs may still be at work
            if not isinstance(error, Exception):
                raise
            raise DrafterStoppedError(f"{type(error).__name__}: {error}") from error
        self._waited_s += time.perf_counter() - begin
        return [self._cut(request, draft) for request, draft in zip(requests, drafts, strict=True)]

    def close(self) -> None:
        """End the thread. May be repeated; no draft can be requested any more."""
        self._ended, self._failed = True, False
        self._drafter.abandoned = True
        self._preparing = None
        self._calls.close()

    def _give(self, call: Callable[[], None]) -> None:
        if not self._ended:
            self._calls.give(call)

    def _propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        sequences = [self._sequences[request.seq_id] for request in requests]
        self._await_preparation(sequences)
        found = {sequence: self._look(sequence) for sequence in sequences}
        settled = [(sequence, tuple(sequence.fresh), branch) for sequence, branch in found.items()]
        self._calls.give(partial(self._drafter.settle, settled))
        ready = {sequence: branch for sequence, branch in found.items() if branch is not None and len(branch.draft)}
        missed = [each for each in zip(sequences, requests, strict=True) if each[0] not in ready]
        if missed:
            ready |= self._draft(missed)
        for sequence in sequences:
            sequence.handed, sequence.fresh, sequence.outcomes = ready[sequence], [], None
        handed = [(sequence, request, ready[sequence]) for sequence, request in zip(sequences, requests, strict=True)]
        self._preparing = self._calls.give(partial(self._drafter.prepare, handed))
        return [branch.draft for _, _, branch in handed]

    def _await_preparation(self, sequences: Sequence[FollowedSequence]) -> None:
        """Wait for the drafts that are being made, or end them if none of them can be what is requested."""
        if self._preparing is None:
            return
        self._drafter.abandoned = not any(each.may_find() for each in sequences)
        pending, self._preparing = self._preparing, None
        batch = self._calls.wait(pending)
        self._drafted_s += batch.seconds
        if not self._drafter.abandoned:
            self._drafted.append(batch)
        self._drafter.abandoned = False

    def _look(self, sequence: FollowedSequence) -> Branch | None:
        """Learn from what became known, and look whether it was drafted for."""
        handed, found = sequence.handed, self._drafter.find(sequence)
        if handed is not None:
            self._drafter.rates.get(sequence.tenant).learn(handed.draft, handed.others, sequence.fresh)
            hit = found is not None and len(found.draft) > 0
            self.hits += hit
            self.misses += not hit
        return found

    def _draft(self, missed: Sequence[tuple[FollowedSequence, DraftRequest]]) -> dict[FollowedSequence, Branch]:
        begin = time.perf_counter()
        drafts = self._calls.wait(self._calls.give(partial(self._drafter.draft, missed)))
        seconds = time.perf_counter() - begin
        self._drafted.append(DraftedBatch(len(missed), max(request.depth for _, request in missed), seconds))
        self._drafted_s += seconds
        return drafts

    def _cut(self, request: DraftRequest, draft: Draft) -> Draft:
        """A draft of a continuation as one of the request: not larger, nor going on after an unlikely guess."""
        size = min(request.depth, len(draft.tokens))
        if draft.is_chain:
            unlikely = (at + 1 for at, score in enumerate(draft.scores[:size]) if score < request.min_survival)
            size = next(unlikely, size)
        return replace(draft.truncate(size), seq_id=request.seq_id, drafter=self.name)


def below(draft: Draft, node: int) -> Draft:
    """What a draft guesses behind one of its nodes, as a draft of its own; scores are given that the node is right."""
    if node < 0:
        return draft
    kept: list[int] = []
    place = {node: -1}
    for each in range(node + 1, len(draft.tokens)):
        if draft.parents[each] in place:
            place[each] = len(kept)
            kept.append(each)
    reached = draft.scores[node] if draft.scores else 0.0
    scores = tuple(min(1.0, draft.scores[each] / reached) for each in kept) if reached > 0 else ()
    parents = tuple(place[draft.parents[each]] for each in kept)
    return Draft(draft.seq_id, tuple(draft.tokens[each] for each in kept), parents, scores, draft.drafter)
