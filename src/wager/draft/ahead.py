"""Drafts while the target verifies: speculative speculative decoding (arXiv 2603.03251).

After a draft was handed over, a thread drafts for its likeliest outcomes: each is a sequence of its own on the
drafter, which shares the keys and values of the text before it, and all get their drafts in the same passes. If
verification says one of them, its draft is there at once (a hit) and it goes on as the sequence; else (a miss) the
draft is made after all, while the target waits.

Which outcomes are likely is learned from the rounds. A round that accepts a whole draft ends in a token that the
drafter would draw next; one that ends before it most often ends in the token that came second for the drafter. Under
`match` both draw with the same noise, which makes that far likelier than chance.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from operator import mul
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from wager.draft.base import Drafter, DrafterStoppedError, RemembersRequests, remembers_requests
from wager.draft.guessing import child_of
from wager.economics.drafts_ahead import OTHER_RATES, AheadFigures, outcome_chances
from wager.tenants import PerTenant
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams

T = TypeVar("T")

_ROWS = 4
"""Outcomes for which drafts are prepared at a time: rows of a pass, which cost little more than one up to there. A
larger batch has one for each sequence."""

_LEAST_CHANCE = 0.05
"""A further outcome that is less likely is not drafted for: it would delay the others for nothing."""

_MORE_NODES = 2
"""Nodes that a tree is given beyond those requested: some are spent on the token that comes first."""

_DECAY = 0.98  # of what is known of guesses, with every round: about the last 50 count
_GUESS_RATE, _PRIOR = 0.7, 4.0  # of right guesses until rounds have shown it, and how many rounds that counts for

_PATIENCE_S = 60.0  # without a pass of the drafter, after which it counts as stalled
_JOIN_S = 2.0  # that closing waits for the calls that were given


class ForkingDrafter(Drafter, Protocol):
    """A drafter that can begin a sequence from another one. `num_others`: how many alternatives of each guess it is to
    remember. `on_pass` is called after each of its passes; False ends the drafts as they are."""

    num_others: int
    on_pass: Callable[[], bool] | None

    def fork(self, seq_id: str, new_id: str, tokens: Sequence[int], params: SamplingParams) -> None:
        """A new sequence that knows what another one knows, with `tokens` behind it. The other one stays."""

    def others(self, seq_id: str) -> Sequence[Sequence[int]]:
        """For each guess of the last draft of a sequence, if it was a chain, the tokens that came next after it."""


# ---- continuations, and which are likely -----------------------------------------------------------------------------


@dataclass(slots=True)
class Branch:
    """A continuation of a sequence, which the drafter calls `name`: known tokens, then `tokens`. The draft may be
    empty: known tokens were computed, no more. `others`: see ForkingDrafter."""

    name: str
    tokens: tuple[int, ...]
    draft: Draft
    others: Sequence[Sequence[int]] = ()

    def begins(self, fresh: Sequence[int]) -> bool:
        """Whether `fresh`, the tokens that became known, begin with its own."""
        return self.tokens == tuple(fresh[: len(self.tokens)])

    def behind(self, fresh: Sequence[int]) -> Branch | None:
        """With the guesses behind `fresh` alone; None if these are no path of it."""
        node: int | None = -1 if self.begins(fresh) else None
        for token in fresh[len(self.tokens) :]:
            node = None if node is None else child_of(self.draft.parents, self.draft.tokens, node, token)
        if node is None:
            return None
        others = self.others[node + 1 :] if self.draft.is_chain else ()
        return replace(self, draft=below(self.draft, node), others=others)


def below(draft: Draft, node: int) -> Draft:
    """What a draft guesses behind one of its nodes, as a draft of its own; scores are given that the node is right."""
    if node < 0:
        return draft
    place = {node: -1}
    for each in range(node + 1, len(draft)):
        if draft.parents[each] in place:
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

    def learn(self, handed: Branch, fresh: Sequence[int]) -> None:
        """The tokens `fresh` became known behind a draft that was handed over."""
        draft, node = handed.draft, -1
        for depth, token in enumerate(fresh):
            if node not in draft.parents:
                return  # nothing was guessed there
            child = child_of(draft.parents, draft.tokens, node, token)
            self._tried[depth] = _DECAY * self._tried[depth] + 1
            self._right[depth] = _DECAY * self._right[depth] + (child is not None)
            if child is None:
                return
            node = child

    def guess_rate(self, depth: int) -> float:
        """That a guess at `depth` (from 0) is right if all before it are."""
        return (self._right[depth] + _PRIOR * _GUESS_RATE) / (self._tried[depth] + _PRIOR)

    def likely(self, handed: Branch) -> list[tuple[float, tuple[int, ...], bool]]:
        """What may come of a draft, likeliest first: an estimate of its probability, a path of the draft, and the token
        behind it unless the drafter is to draw that one itself (True). A tree holds the second choices itself: a round
        that ends within it says none of them."""
        draft, others = handed.draft, handed.others
        outcomes: list[tuple[float, tuple[int, ...], bool]] = []
        if draft.is_chain:
            survival = list(accumulate(map(self.guess_rate, range(len(draft))), mul))
            for chance, accepted, rank in outcome_chances(survival):
                if not rank:
                    outcomes.append((chance, draft.tokens, True))
                elif accepted < len(others) and rank <= len(others[accepted]):
                    outcomes.append((chance, (*draft.tokens[:accepted], others[accepted][rank - 1]), False))
        else:
            for leaf in sorted(set(range(len(draft))) - set(draft.parents)):
                path = tuple(draft.tokens[node] for node in draft.path(leaf))
                outcomes.append((draft.scores[leaf] if draft.scores else 0.0, path, True))
        return sorted(outcomes, key=lambda outcome: -outcome[0])


@dataclass(eq=False, slots=True)
class FollowedSequence:
    """One sequence. The drafter calls it `main`. `branches` are the continuations that drafts are made for (None: not
    chosen yet), `fresh` tokens that the drafter was not told, and `handed` the last draft that was handed over."""

    params: SamplingParams
    tenant: str
    main: str = ""
    branches: list[Branch] | None = None
    fresh: list[int] = field(default_factory=list)
    handed: Branch | None = None

    def find(self) -> Branch | None:
        """The continuation with most guesses behind the fresh tokens; None if no draft was made for them."""
        branches = [*(self.branches or ()), *([self.handed] if self.handed else ())]
        found = [rest for branch in branches if (rest := branch.behind(self.fresh))]
        return max(found, key=lambda branch: len(branch.draft), default=None)


# ---- the drafter's thread --------------------------------------------------------------------------------------------


class DraftThread(threading.Thread):
    """`inner` drafts for sequences and their continuations, in the order in which calls are given. If one raises, all
    sequences are ended, no other call is made, and every wait raises the same. It refers to none of those who wait, so
    that they can be collected."""

    def __init__(self, inner: ForkingDrafter, figures: AheadFigures, *, patience_s: float) -> None:
        super().__init__(name=f"wager-draft-{inner.name}", daemon=True)
        self.inner = inner
        self.rates = PerTenant(OutcomeRates)
        self.closed = False
        self.abandoned = False
        """What is being prepared is not needed any more."""
        self._figures, self._patience_s = figures, patience_s
        self._last_sign = time.monotonic()
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._sequences: dict[str, FollowedSequence] = {}  # by what the drafter calls them and their continuations
        self._made = 0
        inner.num_others, inner.on_pass = len(OTHER_RATES), self._on_pass
        self.start()

    def run(self) -> None:
        failed: BaseException | None = None
        while (given := self._calls.get()) is not None:
            future, call = given
            self._on_pass()
            try:
                if failed is not None:
                    raise failed
                future.set_result(call())
            except BaseException as error:  # raised where its result is waited for
                failed = error
                for name in list(self._sequences):
                    with suppress(Exception):
                        self._end(name)
                future.set_exception(error)
            del given, future, call

    def _on_pass(self) -> bool:
        self._last_sign = time.monotonic()
        return not self.abandoned

    def give(self, call: Callable[[], T]) -> Future[T]:
        """Make this call after all others; never waits."""
        future: Future[T] = Future()
        if not self.closed:
            self._calls.put((future, call))
        return future

    def wait(self, future: Future[T]) -> T:
        """What the call returns. Raises what it, or one before it, raised; TimeoutError without a pass for too long."""
        left = self._patience_s
        while not wait([future], left).done:
            left = self._last_sign + self._patience_s - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"it has not answered for {self._patience_s:g} s")
        return future.result()

    def close(self) -> None:
        """End after the calls that were given; wait for them a little. May be repeated."""
        self.closed = self.abandoned = True
        self._calls.put(None)
        if self is not threading.current_thread():
            self.join(_JOIN_S)

    # calls

    def begin(self, sequence: FollowedSequence, tokens: Sequence[int]) -> None:
        sequence.main = self._new_name(sequence)
        self.inner.begin(sequence.main, tokens, sequence.params, tenant=sequence.tenant)

    def end(self, sequence: FollowedSequence) -> None:
        for name in [name for name, owner in self._sequences.items() if owner is sequence]:
            self._end(name)

    def _new_name(self, sequence: FollowedSequence) -> str:
        self._made += 1
        self._sequences[str(self._made)] = sequence
        return str(self._made)

    def _end(self, name: str) -> None:
        del self._sequences[name]
        self.inner.end(name)

    def forget(self) -> None:
        if isinstance(self.inner, RemembersRequests):
            self.inner.forget()

    def settle(self, settled: Sequence[tuple[FollowedSequence, Sequence[int], Branch | None]]) -> None:
        """Each sequence comes with the tokens that became known, and the continuation that they are, if one is: the
        sequence goes on as that one. All other continuations are ended."""
        for sequence, fresh, found in settled:
            if found is not None:
                sequence.main, fresh = found.name, fresh[len(found.tokens) :]
            if fresh:
                self.inner.accept(sequence.main, fresh)
        for name in [name for name, owner in self._sequences.items() if name != owner.main]:
            self._end(name)

    def draft(self, missed: Sequence[tuple[FollowedSequence, DraftRequest]]) -> list[Branch]:
        """Drafts of the sequences themselves."""
        asked = [(Branch(sequence.main, (), Draft(sequence.main)), request) for sequence, request in missed]
        self._propose(asked)
        return [branch for branch, _ in asked]

    def prepare(self, handed: Sequence[tuple[FollowedSequence, DraftRequest, Branch]]) -> tuple[int, int, float]:
        """Draft for the likeliest outcomes of the drafts handed over for these requests, which are being verified: one
        of each, and of all others the likeliest as far as the rows go. Sequences, the greatest depth, and seconds."""
        begin = time.perf_counter()
        outcomes = [
            (rank > 0, outcome, sequence, request)
            for sequence, request, branch in handed
            for rank, outcome in enumerate(self.rates.get(sequence.tenant).likely(branch))
            if not rank or outcome[0] >= _LEAST_CHANCE
        ]
        outcomes.sort(key=lambda each: (each[0], -each[1][0]))
        branches: defaultdict[FollowedSequence, list[Branch]] = defaultdict(list)
        asked: list[tuple[Branch, DraftRequest]] = []
        for _, (_, tokens, is_open), sequence, request in outcomes[: max(self._figures.rows, len(handed))]:
            name, position = self._new_name(sequence), request.position + len(tokens)
            depth, survival = request.depth, request.min_survival
            if is_open:  # the drafter draws the first token itself: one guess more
                depth += 1 + _MORE_NODES if self.inner.makes_trees else 1
                survival *= self.rates.get(sequence.tenant).guess_rate(0)
            branches[sequence].append(Branch(name, tokens, Draft(name)))
            request = request._replace(position=position, depth=depth, min_survival=survival)
            asked.append((branches[sequence][-1], request))
        for sequence in branches:
            sequence.branches = branches[sequence]
            for branch in sequence.branches:
                self.inner.fork(sequence.main, branch.name, branch.tokens, sequence.params)
        self._propose(asked)
        self._figures.branches += len(asked)
        return len(asked), max(request.depth for _, request, _ in handed) + 1, time.perf_counter() - begin

    def _propose(self, asked: Sequence[tuple[Branch, DraftRequest]]) -> None:
        requests = [request._replace(seq_id=branch.name) for branch, request in asked]
        drafts = {draft.seq_id: draft for draft in self.inner.propose(requests)}
        for branch, _ in asked:
            branch.draft = drafts.get(branch.name, branch.draft)
            branch.others = self.inner.others(branch.name)


# ---- the engine's thread ---------------------------------------------------------------------------------------------


class AheadDrafter(Drafter):
    """`inner` drafts on a thread of its own, ahead of its requests; nothing else may call it. It must not read the
    target's states. `rows`: outcomes that are drafted for at a time.

    After an error, and when all sequences were ended, the next one gets a new thread; none after a stall."""

    def __init__(self, inner: ForkingDrafter, *, rows: int = _ROWS, patience_s: float = _PATIENCE_S) -> None:
        self.name = inner.name
        self.default_depth, self.max_depth = inner.default_depth, inner.max_depth
        self.samples, self.makes_trees = inner.samples, inner.makes_trees
        self.figures = AheadFigures(rows)
        self._sequences: dict[str, FollowedSequence] = {}
        self._preparing: Future[tuple[int, int, float]] | None = None
        self._failed = False
        self._start = partial(DraftThread, inner, self.figures, patience_s=patience_s)
        self._open()

    def _open(self) -> None:
        self._thread, self._failed = self._start(), False
        weakref.finalize(self, self._thread.close)

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        self.end(seq_id)
        if self._failed and not self._sequences:
            self._open()
        self._sequences[seq_id] = sequence = FollowedSequence(params, tenant)
        self._note_tenants()
        self._thread.give(partial(self._thread.begin, sequence, list(tokens)))

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        """Remembered until the next draft is requested."""
        self._sequences[seq_id].fresh += tokens

    def end(self, seq_id: str) -> None:
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            self._thread.give(partial(self._thread.end, sequence))
            self._note_tenants()

    def _note_tenants(self) -> None:
        tenants = {each.tenant for each in self._sequences.values()}
        if tenants:
            self.figures.whose = tenants.pop() if len(tenants) == 1 else None

    @property
    def remembers_requests(self) -> bool:
        """See RemembersRequests."""
        return remembers_requests(self._thread.inner)

    def forget(self) -> None:
        self._thread.give(self._thread.forget)

    def close(self) -> None:
        """End the thread. May be repeated; no draft can be requested any more."""
        self._failed, self._preparing = False, None
        self._thread.close()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Drafts that are ready, and for what was missed new ones; then the drafter goes on with the next. Raises
        DrafterStoppedError where a call failed, whichever it was, or the thread has ended."""
        begin = time.perf_counter()
        if self._thread.closed:
            raise DrafterStoppedError("its thread has ended")
        try:
            drafts = self._propose([(self._sequences[request.seq_id], request) for request in requests])
        except BaseException as error:
            self.close()
            self._failed = not isinstance(error, TimeoutError)  # one that hangs may still be at work
            if not isinstance(error, Exception):
                raise
            raise DrafterStoppedError(f"{type(error).__name__}: {error}") from error
        self.figures.waited_s += time.perf_counter() - begin
        return [self._cut(request, draft) for request, draft in zip(requests, drafts, strict=True)]

    def _propose(self, asked: Sequence[tuple[FollowedSequence, DraftRequest]]) -> list[Draft]:
        self._await_preparation([sequence for sequence, _ in asked])
        found = {sequence: self._look(sequence) for sequence, _ in asked}
        settled = [(sequence, sequence.fresh, branch) for sequence, branch in found.items()]
        for sequence in self._sequences.values():
            sequence.branches = None
        self._thread.give(partial(self._thread.settle, settled))
        ready = {sequence: branch for sequence, branch in found.items() if branch is not None and len(branch.draft)}
        missed = [(sequence, request) for sequence, request in asked if sequence not in ready]
        if missed:
            begin = time.perf_counter()
            drafted = self._thread.wait(self._thread.give(partial(self._thread.draft, missed)))
            ready |= zip((sequence for sequence, _ in missed), drafted, strict=True)
            depth = max(request.depth for _, request in missed)
            self.figures.drafted(len(missed), depth, time.perf_counter() - begin)
        for sequence, _ in asked:
            sequence.handed, sequence.fresh = replace(ready[sequence], tokens=()), []
        handed = [(sequence, request, ready[sequence]) for sequence, request in asked]
        self._preparing = self._thread.give(partial(self._thread.prepare, handed))
        return [branch.draft for _, _, branch in handed]

    def _await_preparation(self, sequences: Sequence[FollowedSequence]) -> None:
        """Wait for the drafts that are being made, or end them if none of them can be what is requested."""
        if self._preparing is None:
            return
        self._thread.abandoned = not any(
            sequence.branches is None or any(branch.begins(sequence.fresh) for branch in sequence.branches)
            for sequence in sequences
        )
        pending, self._preparing = self._preparing, None
        self.figures.drafted(*self._thread.wait(pending), whole=not self._thread.abandoned)
        self._thread.abandoned = False

    def _look(self, sequence: FollowedSequence) -> Branch | None:
        """Learn from what became known, and look whether it was drafted for."""
        found = sequence.find()
        if sequence.handed is not None:
            self._thread.rates.get(sequence.tenant).learn(sequence.handed, sequence.fresh)
            self.figures.requested(ready=found is not None and len(found.draft) > 0)
        return found

    def _cut(self, request: DraftRequest, draft: Draft) -> Draft:
        """A draft of a continuation as one of the request: not larger, nor going on after an unlikely guess."""
        size = min(request.depth, len(draft.tokens))
        if draft.is_chain:
            unlikely = (at + 1 for at, score in enumerate(draft.scores[:size]) if score < request.min_survival)
            size = next(unlikely, size)
        return replace(draft.truncate(size), seq_id=request.seq_id, drafter=self.name)
