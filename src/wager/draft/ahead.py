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
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from wager.draft.base import Drafter, DrafterStoppedError, RemembersRequests, remembers_requests
from wager.kernels.base import TargetOutput
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
    `waited_s` is what requests for drafts took, as the step saw it, `drafted_s`
    what the drafter's thread spent on drafting; `branches` counts outcomes for which drafts were made."""

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
        self._tried: list[float] = []
        self._right: list[float] = []
        self._wrong, self._others = 0.0, [0.0] * NUM_OTHERS

    def learn(self, draft: Draft, others: Sequence[Sequence[int]], tokens: Sequence[int]) -> None:
        """`tokens` became known behind the sequence that the draft was made for."""
        self._tried, self._right = [_DECAY * n for n in self._tried], [_DECAY * n for n in self._right]
        self._wrong, self._others = _DECAY * self._wrong, [_DECAY * n for n in self._others]
        node = -1
        for depth, token in enumerate(tokens):
            child = child_of(draft, node, token)
            if child is None and node not in draft.parents:
                return  # nothing was guessed there
            if depth == len(self._tried):
                self._tried.append(0.0)
                self._right.append(0.0)
            self._tried[depth] += 1
            if child is None:
                if depth < len(others):
                    self._wrong += 1
                    for rank, other in enumerate(others[depth][:NUM_OTHERS]):
                        self._others[rank] += other == token
                return
            self._right[depth] += 1
            node = child

    def guess_rate(self, depth: int) -> float:
        """That a guess at `depth` (from 0) is right if all before it are."""
        tried, right = (n[depth] if depth < len(n) else 0.0 for n in (self._tried, self._right))
        return (right + _PRIOR * _GUESS_RATE) / (tried + _PRIOR)

    def other_rate(self, rank: int) -> float:
        """That a wrong guess should have been its alternative of that rank."""
        return (self._others[rank] + _PRIOR * _OTHER_RATES[rank]) / (self._wrong + _PRIOR)

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


class _Progress:
    """What the thread and those who wait for it share."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.last_sign = time.monotonic()

    def sign(self) -> None:
        """The thread is at work: for long calls to call now and then."""
        self.last_sign = time.monotonic()


_Queue = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class OrderedCalls:
    """A thread called `name` that makes calls in the order in which they were given; what it calls needs no locks.

    If a call raises, none is made after it and every wait raises the same; after `patience_s` seconds without a sign of
    life waiting ends with StalledError. The thread is a daemon and holds its own state alone, so whoever gave it calls
    can be collected, which ends it.
    """

    def __init__(self, name: str, *, patience_s: float) -> None:
        self._patience_s = patience_s
        self._calls: _Queue = SimpleQueue()
        self._progress = _Progress()
        self.sign = self._progress.sign
        self.thread = threading.Thread(target=_serve, args=(self._calls, self._progress), name=name, daemon=True)
        self._finalizer = weakref.finalize(self, _end, self._calls, self.thread)
        self.thread.start()

    def give(self, call: Callable[[], T]) -> Future[T]:
        """Make this call after all others; never waits."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def wait(self, future: Future[T]) -> T:
        """What the call returns. Raises what it, or one before it, raised; StalledError if the thread is stalled."""
        left = self._patience_s
        while not wait([future], left).done:
            left = self._progress.last_sign + self._patience_s - time.monotonic()
            if left <= 0:
                raise StalledError(f"it has not answered for {self._patience_s:g} s")
        return future.result()

    def close(self) -> None:
        """End the thread after the calls that it was given; waits for them a little. May be repeated."""
        self._finalizer()


def _serve(calls: _Queue, progress: _Progress) -> None:
    while (given := calls.get()) is not None:
        future, call = given
        progress.sign()
        try:
            if progress.error is not None:
                raise progress.error
            future.set_result(call())
        except BaseException as error:  # raised where its result is waited for
            progress.error = error
            future.set_exception(error)
        del given, future, call  # what they refer to may go while the next call is awaited


def _end(calls: _Queue, thread: threading.Thread) -> None:
    calls.put(None)
    if thread is not threading.current_thread():
        thread.join(_JOIN_S)


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
            child = child_of(self.draft, node, token)
            if child is None:
                return None
            node = child
        others = self.others[node + 1 :] if self.draft.is_chain else ()
        return replace(self, draft=below(self.draft, node), others=others)


def _begins(tokens: Sequence[int], fresh: Sequence[int]) -> bool:
    return len(tokens) <= len(fresh) and all(a == b for a, b in zip(tokens, fresh, strict=False))


@dataclass(eq=False, slots=True)
class FollowedSequence:
    """One sequence. The thread's: `known` are its tokens as far as the drafter was told, `main` is what the drafter
    calls it, and `branches` are its continuations, the first the sequence itself with the draft that is being
    verified; `outcomes` are those that drafts are made for (None: not chosen yet). The engine's: `fresh` tokens that
    the drafter was not told, and the last draft `handed` over. Each reads the other's only while the thread has
    nothing to do."""

    params: SamplingParams
    tenant: str
    prompt_tokens: int
    known: list[int]
    main: str
    branches: list[Branch] = field(default_factory=list)
    outcomes: list[tuple[int, ...]] | None = None
    fresh: list[int] = field(default_factory=list)
    handed: Branch | None = None

    def find(self) -> Branch | None:
        """The continuation with most guesses behind the fresh tokens; None if no draft was made for them."""
        found = [branch for each in self.branches if (branch := each.behind(self.fresh)) is not None]
        return max(found, key=lambda branch: len(branch.draft), default=None)

    def may_find(self) -> bool:
        """Whether the fresh tokens may be among the outcomes that drafts are made for."""
        return self.outcomes is None or any(_begins(outcome, self.fresh) for outcome in self.outcomes)


@dataclass(frozen=True, slots=True)
class RequestedDraft:
    """A draft request, its sequence, the tokens that became known since the drafter was told, and the continuation that
    they are, if one is."""

    sequence: FollowedSequence
    request: DraftRequest
    fresh: tuple[int, ...]
    found: Branch | None = None


class BranchingDrafter:
    """`inner` drafts for sequences and their continuations, as many as `rows` together. One thread at a time."""

    def __init__(self, inner: Drafter, *, rows: int = _ROWS) -> None:
        self.inner = inner
        self.rates = PerTenant(OutcomeRates)
        self.num_branches = 0
        """Continuations that drafts were made for."""
        self.rows = rows
        self.abandoned = False
        """What is being prepared is not needed any more."""
        self._forks = inner if isinstance(inner, ForksSequences) else None
        if self._forks is not None:
            self._forks.num_others = NUM_OTHERS
        self._branched: dict[FollowedSequence, None] = {}
        self._names: set[str] = set()  # what the drafter calls its sequences
        self._made = 0

    def sign_to(self, sign: Callable[[], None]) -> None:
        """Call `sign` after each pass."""

        def on_pass() -> bool:
            sign()
            return not self.abandoned

        if self._forks is not None:
            self._forks.on_pass = on_pass

    def begin(self, sequence: FollowedSequence) -> None:
        self._names.add(sequence.main)
        self.inner.begin(sequence.main, sequence.known, sequence.params, tenant=sequence.tenant)

    def end(self, sequence: FollowedSequence) -> None:
        self._drop(sequence)
        self._end(sequence.main)

    def end_all(self) -> None:
        """End all sequences and continuations, after a failure; what fails again is left."""
        for name in list(self._names):
            with suppress(Exception):
                self._end(name)
        self._names.clear()
        self._branched.clear()

    def _end(self, name: str) -> None:
        self.inner.end(name)
        self._names.discard(name)

    def forget(self) -> None:
        if isinstance(self.inner, RemembersRequests):
            self.inner.forget()

    def draft(
        self, requests: Sequence[RequestedDraft], missed: Sequence[RequestedDraft]
    ) -> dict[FollowedSequence, Branch]:
        """Settle all `requests`, and draft for those that were `missed`."""
        self._settle(requests)
        asked = [each.request._replace(seq_id=each.sequence.main) for each in missed]
        drafts = {draft.seq_id: draft for draft in self.inner.propose(asked)}
        return {each.sequence: self._branch(each.sequence.main, (), drafts) for each in missed}

    def prepare(self, requests: Sequence[RequestedDraft], handed: Sequence[Branch]) -> DraftedBatch:
        """Settle `requests`, and draft for the likeliest outcomes of the drafts `handed` over, which are being
        verified."""
        begin = time.perf_counter()
        self._settle(requests)
        likely = []
        for each, branch in zip(requests, handed, strict=True):
            sequence = each.sequence
            sequence.branches = [Branch(sequence.main, (), branch.draft, branch.others)]
            likely.append(self.rates.get(sequence.tenant).likely(branch.draft, branch.others))
        asked: list[tuple[FollowedSequence, LikelyOutcome, DraftRequest]] = []
        for each, outcomes in zip(requests, self._likeliest(likely), strict=True):
            each.sequence.outcomes = [outcome.tokens for outcome in outcomes]
            for outcome in outcomes:
                asked.append((each.sequence, outcome, self._fork(each, outcome)))
        drafts = {each.seq_id: each for each in self.inner.propose([request for _, _, request in asked])}
        self.num_branches += len(asked)
        for sequence, outcome, request in asked:
            sequence.branches.append(self._branch(request.seq_id, outcome.tokens, drafts))
        depth = max(each.request.depth for each in requests) + 1
        return DraftedBatch(len(asked), depth, time.perf_counter() - begin)

    def _settle(self, requests: Sequence[RequestedDraft]) -> None:
        """What was requested goes on as the continuation that was found; all other continuations are dropped."""
        for each in requests:
            sequence, fresh = each.sequence, each.fresh
            if each.found is not None and each.found.inner_id != sequence.main:
                sequence.main, fresh = each.found.inner_id, fresh[len(each.found.tokens) :]
            self._drop(sequence)
            if fresh:
                self.inner.accept(sequence.main, fresh)
            sequence.known += each.fresh
        for sequence in list(self._branched):
            self._drop(sequence)

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

    def _fork(self, each: RequestedDraft, outcome: LikelyOutcome) -> DraftRequest:
        """A continuation, and the request for its draft: if the drafter draws its first token itself, one more."""
        sequence, request = each.sequence, each.request
        self._made += 1
        name = f"{sequence.main.partition('/')[0]}/{self._made}"
        self._branched[sequence] = None
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

    def _branch(self, name: str, tokens: tuple[int, ...], drafts: dict[str, Draft]) -> Branch:
        others = () if self._forks is None else self._forks.others(name)
        return Branch(name, tokens, drafts.get(name, Draft(name)), others)

    def _drop(self, sequence: FollowedSequence) -> None:
        """End its continuations."""
        for branch in sequence.branches:
            if branch.inner_id != sequence.main:
                self._end(branch.inner_id)
        sequence.branches, sequence.outcomes = [], None
        self._branched.pop(sequence, None)


# ---- on the engine's thread ------------------------------------------------------------------------------------------


class AheadDrafter:
    """`inner` drafts on a thread of its own, ahead of its requests; nothing else may call it. It must not read the
    target's states. `rows`: outcomes that are drafted for at a time."""

    def __init__(self, inner: Drafter, *, rows: int = _ROWS, patience_s: float = PATIENCE_S) -> None:
        self.name = inner.name
        self.default_depth, self.max_depth = inner.default_depth, inner.max_depth
        self.samples, self.makes_trees = inner.samples, inner.makes_trees
        self._drafter = BranchingDrafter(inner, rows=rows)
        self._patience_s = patience_s
        self._sequences: dict[str, FollowedSequence] = {}
        self._preparing: Future[DraftedBatch] | None = None
        self._numbers = 0
        self._figures = AheadFigures()
        self._drafted: deque[DraftedBatch] = deque(maxlen=_CALLS_KEPT)
        self._open()

    def _open(self) -> None:
        """A thread, for a drafter without sequences."""
        self._calls = OrderedCalls(f"wager-draft-{self._drafter.inner.name}", patience_s=self._patience_s)
        self._drafter.sign_to(self._calls.sign)
        self._drafter.abandoned = False
        self._ended = self._failed = False

    @property
    def figures(self) -> AheadFigures:
        return replace(self._figures, branches=self._drafter.num_branches)

    # what the policy learns from (see economics/drafts_ahead.py)

    @property
    def hits(self) -> int:
        return self._figures.hits

    @property
    def misses(self) -> int:
        return self._figures.misses

    @property
    def least_drafted(self) -> int:
        """Sequences, continuations among them, that it drafts for at a time at least."""
        return self._drafter.rows

    def take_drafted(self) -> Sequence[DraftedBatch]:
        """The latest calls of the drafter since this was asked last."""
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

    def observe(self, output: TargetOutput) -> None:
        """Ignored: the target's output is not used."""

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
        self._count(waited_s=time.perf_counter() - begin)
        return [self._cut(request, each.draft) for request, each in zip(requests, drafts, strict=True)]

    def close(self) -> None:
        """End the thread. May be repeated; no draft can be requested any more."""
        self._ended, self._failed = True, False
        self._drafter.abandoned = True
        self._preparing = None
        self._calls.close()

    def _give(self, call: Callable[[], None]) -> None:
        if not self._ended:
            self._calls.give(call)

    def _count(self, **more: float) -> None:
        now = {name: getattr(self._figures, name) + number for name, number in more.items()}
        self._figures = replace(self._figures, **now)

    def _propose(self, requests: Sequence[DraftRequest]) -> list[Branch]:
        sequences = [self._sequences[request.seq_id] for request in requests]
        self._await_preparation(sequences)
        asked = [self._look(request, each) for request, each in zip(requests, sequences, strict=True)]
        drafts = {each.sequence: each.found for each in asked if each.found is not None and len(each.found.draft)}
        missed = [each for each in asked if each.sequence not in drafts]
        if missed:
            drafts |= self._draft_missed(asked, missed)
            asked = [replace(each, fresh=(), found=None) for each in asked]  # the drafter was told
        handed = [drafts.get(each) or Branch(each.main, (), Draft(each.main)) for each in sequences]
        for each, branch in zip(sequences, handed, strict=True):
            each.handed, each.fresh, each.outcomes = branch, [], None
        self._preparing = self._calls.give(partial(self._drafter.prepare, asked, handed))
        return handed

    def _await_preparation(self, sequences: Sequence[FollowedSequence]) -> None:
        """Wait for the drafts that are being made, or end them if none of them can be what is requested."""
        if self._preparing is None:
            return
        self._drafter.abandoned = not any(each.may_find() for each in sequences)
        pending, self._preparing = self._preparing, None
        batch = self._calls.wait(pending)
        self._count(drafted_s=batch.seconds)
        if not self._drafter.abandoned:
            self._drafted.append(batch)
        self._drafter.abandoned = False

    def _look(self, request: DraftRequest, sequence: FollowedSequence) -> RequestedDraft:
        """Learn from what became known, and look whether it was drafted for."""
        handed, found = sequence.handed, sequence.find()
        if handed is not None:
            self._drafter.rates.get(sequence.tenant).learn(handed.draft, handed.others, sequence.fresh)
            hit = found is not None and len(found.draft) > 0
            self._count(hits=hit, misses=not hit)
        return RequestedDraft(sequence, request, tuple(sequence.fresh), found)

    def _draft_missed(
        self, asked: Sequence[RequestedDraft], missed: Sequence[RequestedDraft]
    ) -> dict[FollowedSequence, Branch]:
        begin = time.perf_counter()
        drafts = self._calls.wait(self._calls.give(partial(self._drafter.draft, asked, missed)))
        seconds = time.perf_counter() - begin
        self._drafted.append(DraftedBatch(len(missed), max(each.request.depth for each in missed), seconds))
        self._count(drafted_s=seconds)
        return drafts

    def _cut(self, request: DraftRequest, draft: Draft) -> Draft:
        """A draft of a continuation as one of the request: not larger, nor going on after an unlikely guess."""
        size = min(request.depth, len(draft.tokens))
        if draft.is_chain:
            unlikely = (at + 1 for at, score in enumerate(draft.scores[:size]) if score < request.min_survival)
            size = next(unlikely, size)
        return replace(draft.truncate(size), seq_id=request.seq_id, drafter=self.name)


def child_of(draft: Draft, node: int, token: int) -> int | None:
    """The child of a node (-1: the root) with that token."""
    for child in range(node + 1, len(draft.tokens)):
        if draft.parents[child] == node and draft.tokens[child] == token:
            return child
    return None


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
