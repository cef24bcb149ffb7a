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
from operator import attrgetter, mul
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeVar

from wager.draft.base import Drafter, DrafterStoppedError
from wager.economics.drafts_ahead import ALTERNATIVE_RATES, AheadFigures, outcome_chances
from wager.kernels import _native
from wager.tenants import PerTenant
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams

T = TypeVar("T")

_ROWS = 4  # outcomes drafted for at a time, unless there are more sequences: up to there a row of a pass costs little
_LEAST_CHANCE = 0.05  # of a sequence's second outcome and further ones: less likely ones would delay the others
_MORE_NODES = 2  # of a tree beyond those requested: some are spent on the token that comes first
_DECAY = 0.98  # of what is known of guesses, with every round: about the last 50 count
_GUESS_RATE, _PRIOR = 0.7, 4.0  # of right guesses until rounds have shown it, and how many rounds that counts for
_PATIENCE_S = 60.0  # without a pass of the drafter, after which it counts as stalled
_JOIN_S = 2.0  # that closing waits for the calls that were given


class ForkingDrafter(Drafter, Protocol):
    """A drafter that can begin a sequence from another one. It remembers `num_alternatives` alternatives of each guess.
    `on_pass` is called after each of its passes; False ends the drafts as they are."""

    num_alternatives: int
    on_pass: Callable[[], bool] | None

    def fork(self, seq_id: str, new_id: str, tokens: Sequence[int], params: SamplingParams) -> None:
        """A new sequence that knows what another one knows, with `tokens` behind it. The other one stays."""

    def alternatives(self, seq_id: str) -> Sequence[Sequence[int]]:
        """For each guess of the last draft of a sequence, if it was a chain, the tokens that came next after it."""


# ---- outcomes of a round ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Branch:
    """A continuation of a sequence, which the drafter calls `name`: known tokens, then `tokens`, then a draft, whose
    guesses have these `alternatives`."""

    name: str
    tokens: tuple[int, ...]
    draft: Draft
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


class RoundOutcome(NamedTuple):
    """What may come of a round, with an estimate of its probability: `tokens`, and one more behind them that the
    drafter is to draw itself if it is `open`."""

    chance: float
    tokens: tuple[int, ...]
    open: bool


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

    def likely(self, draft: Draft, alternatives: Sequence[Sequence[int]]) -> list[RoundOutcome]:
        """The outcomes of a draft, likeliest first. A tree holds the second choices itself: a round that ends within it
        says none of them."""
        outcomes: list[RoundOutcome] = []
        if draft.is_chain:
            survival = list(accumulate(map(self.guess_rate, range(len(draft))), mul))
            for chance, accepted, rank in outcome_chances(survival):
                right = draft.tokens[:accepted]
                if not rank:
                    outcomes.append(RoundOutcome(chance, right, open=True))
                elif accepted < len(alternatives) and rank <= len(alternatives[accepted]):
                    outcomes.append(RoundOutcome(chance, (*right, alternatives[accepted][rank - 1]), open=False))
        else:
            for leaf in sorted(set(range(len(draft))) - set(draft.parents)):
                path = tuple(draft.tokens[node] for node in draft.path(leaf))
                outcomes.append(RoundOutcome(draft.scores[leaf] if draft.scores else 0.0, path, open=True))
        return sorted(outcomes, key=attrgetter("chance"), reverse=True)


@dataclass(eq=False, slots=True)
class FollowedSequence:
    """One sequence. The drafter calls it `main`. `branches` are the continuations that drafts are made for (None: not
    chosen yet), `unread` tokens that the drafter was not told, and `proposed` the last draft that was handed over."""

    params: SamplingParams
    tenant: str
    main: str = ""
    branches: list[Branch] | None = None
    unread: list[int] = field(default_factory=list)
    proposed: Branch | None = None

    def find(self) -> Branch | None:
        """The continuation with most guesses behind the unread tokens; None if no draft was made for them."""
        branches = [*(self.branches or ()), *([self.proposed] if self.proposed else ())]
        found = [rest for branch in branches if (rest := branch.after(self.unread))]
        return max(found, key=lambda branch: len(branch.draft), default=None)

    def may_hit(self) -> bool:
        """Whether drafts that are still being made may be for the unread tokens."""
        return self.branches is None or any(branch.begins(self.unread) for branch in self.branches)


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
        self.abandoned = False  # what is being prepared is not needed any more
        self._figures, self._patience_s = figures, patience_s
        self._last_sign = time.monotonic()
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._sequences: dict[str, FollowedSequence] = {}  # by what the drafter calls them and their continuations
        self._made = 0
        inner.num_alternatives, inner.on_pass = len(ALTERNATIVE_RATES), self._on_pass
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

    def give(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Make this call after all others; never waits."""
        future: Future[T] = Future()
        if not self.closed:
            self._calls.put((future, partial(call, *arguments)))
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

    def settle(self, settled: Sequence[tuple[FollowedSequence, Sequence[int], Branch | None]]) -> None:
        """Each sequence comes with the tokens that became known, and the continuation that they are, if one is: the
        sequence goes on as that one. All other continuations are ended."""
        for sequence, unread, found in settled:
            if found is not None:
                sequence.main, unread = found.name, unread[len(found.tokens) :]
            if unread:
                self.inner.accept(sequence.main, unread)
        for name in [name for name, owner in self._sequences.items() if name != owner.main]:
            self._end(name)

    def draft(self, asked: Sequence[tuple[FollowedSequence, DraftRequest]]) -> list[Branch]:
        """Drafts of the sequences themselves."""
        return self._propose([(Branch(sequence.main, (), Draft("")), request) for sequence, request in asked])

    def prepare(self, proposed: Sequence[tuple[FollowedSequence, DraftRequest, Branch]]) -> tuple[int, int, float]:
        """Draft for the likeliest outcomes of the drafts handed over for these requests, which are being verified: one
        of each, and of all others the likeliest as far as the rows go. Sequences, the greatest depth, and seconds."""
        begin = time.perf_counter()
        likeliest, further = [], []
        for sequence, request, branch in proposed:
            outcomes = self.rates.get(sequence.tenant).likely(branch.draft, branch.alternatives)
            likeliest += [(outcome, sequence, request) for outcome in outcomes[:1]]
            further += [(each, sequence, request) for each in outcomes[1:] if each.chance >= _LEAST_CHANCE]
        further.sort(key=lambda each: -each[0].chance)
        branches: defaultdict[FollowedSequence, list[Branch]] = defaultdict(list)
        asked: list[tuple[Branch, DraftRequest]] = []
        for outcome, sequence, request in (likeliest + further)[: max(self._figures.rows, len(proposed))]:
            branch = Branch(self._new_name(sequence), outcome.tokens, Draft(""))
            branches[sequence].append(branch)
            depth, survival = request.depth, request.min_survival
            if outcome.open:  # the drafter draws the first token itself: one guess more
                depth += 1 + _MORE_NODES if self.inner.makes_trees else 1
                survival *= self.rates.get(sequence.tenant).guess_rate(0)
            position = request.position + len(outcome.tokens)
            asked.append((branch, request._replace(position=position, depth=depth, min_survival=survival)))
        for sequence, each in branches.items():
            sequence.branches = each
            for branch in each:
                self.inner.fork(sequence.main, branch.name, branch.tokens, sequence.params)
        self._propose(asked)
        self._figures.branches += len(asked)
        return len(asked), max(request.depth for _, request, _ in proposed) + 1, time.perf_counter() - begin

    def _propose(self, asked: Sequence[tuple[Branch, DraftRequest]]) -> list[Branch]:
        """Give the branches their drafts."""
        requests = [request._replace(seq_id=branch.name) for branch, request in asked]
        drafts = {draft.seq_id: draft for draft in self.inner.propose(requests)}
        for branch, _ in asked:
            branch.draft = drafts.get(branch.name, branch.draft)
            branch.alternatives = self.inner.alternatives(branch.name)
        return [branch for branch, _ in asked]


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
        self._sequences: dict[str, FollowedSequence] = {}
        self._preparing: Future[tuple[int, int, float]] | None = None
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
        self._thread.give(self._thread.begin, sequence, list(tokens))

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        """Remembered until the next draft is requested."""
        self._sequences[seq_id].unread += tokens

    def end(self, seq_id: str) -> None:
        if (sequence := self._sequences.pop(seq_id, None)) is not None:
            self._thread.give(self._thread.end, sequence)
            self._note_tenants()

    def _note_tenants(self) -> None:
        tenants = {each.tenant for each in self._sequences.values()}
        if tenants:
            self.figures.whose = tenants.pop() if len(tenants) == 1 else None

    def forget(self) -> None:
        self._thread.give(self._thread.inner.forget)

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
        thread, figures = self._thread, self.figures
        if self._preparing is not None:  # drafts that are being made end if none of them can be what is requested
            thread.abandoned = not any(sequence.may_hit() for sequence, _ in asked)
            figures.drafted(*thread.wait(self._preparing), whole=not thread.abandoned)
            thread.abandoned = False
        found = {sequence: sequence.find() for sequence, _ in asked}
        ready = {sequence: branch for sequence, branch in found.items() if branch is not None and len(branch.draft)}
        for sequence in found:
            if sequence.proposed is not None:
                thread.rates.get(sequence.tenant).learn(sequence.proposed.draft, sequence.unread)
                figures.requested(ready=sequence in ready)
        for sequence in self._sequences.values():
            sequence.branches = None
        thread.give(thread.settle, [(sequence, sequence.unread, branch) for sequence, branch in found.items()])
        if missed := [(sequence, request) for sequence, request in asked if sequence not in ready]:
            begin = time.perf_counter()
            drafted = thread.wait(thread.give(thread.draft, missed))
            ready |= zip((sequence for sequence, _ in missed), drafted, strict=True)
            figures.drafted(len(missed), max(request.depth for _, request in missed), time.perf_counter() - begin)
        for sequence, branch in ready.items():
            sequence.proposed, sequence.unread = replace(branch, tokens=()), []
        self._preparing = thread.give(thread.prepare, [(each, request, ready[each]) for each, request in asked])
        return [ready[sequence].draft for sequence, _ in asked]

    def _cut(self, request: DraftRequest, draft: Draft) -> Draft:
        """A draft of a continuation as one of the request: not larger, nor going on after an unlikely guess."""
        size = min(request.depth, len(draft.tokens))
        if draft.is_chain:
            unlikely = (at + 1 for at, score in enumerate(draft.scores[:size]) if score < request.min_survival)
            size = next(unlikely, size)
        return replace(draft.truncate(size), seq_id=request.seq_id, drafter=self.name)
