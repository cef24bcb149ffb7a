"""Drafters made of others: one that guesses for a draft model (A+B), one tree of the guesses of several (A//B), and one
that is asked only at places where another one's guesses are worth little (A..B).

**A+B**, staged drafting (Spector and Re 2023, arXiv 2308.04623): every stage is a drafter and its verification, and
equality with the token that a stage draws itself accepts a guess, so the draft is the same with an inner drafter and
without; one pass of the draft model gives several tokens. The inner drafter is told what the draft model guessed as
if it were known, and begins again where the text went on differently.

**A//B**: under `match` equal paths share their nodes, and of all nodes those are kept that are likeliest to be
accepted: by the score that its drafter gives a node, times how much oftener, lately, that drafter was right than it
thought. Under a rule that keeps the distribution nothing may depend on what was drawn: every drafter gets a fixed
share of the guesses, and its tree hangs from the root beside the others, with the q that each node was drawn from.

**A..B**: A guesses at every place. B, which takes time, guesses too where that brought more lately than it costs
(DraftRequest.prices), at places where A was as sure as here. Then the draft is the one tree of both; what B guesses, A
continues if it can. Under a rule that keeps the distribution the draft is B's alone where B is asked, and A's where
not; what A draws itself has no say in it.
"""

from __future__ import annotations

import logging
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from wager.draft.base import (
    WARM_UP,
    ComputedRows,
    Drafter,
    LogitsRows,
    RemembersRequests,
    RowReader,
    StateReader,
    remembers_requests,
    valid_part,
)
from wager.draft.guessing import draws
from wager.drafter_spec import BACKED_SIGN, MERGED_SIGN
from wager.economics.acceptance import BIN_BORDERS
from wager.economics.policy.exploration import EXPLORATION_SHARE
from wager.kernels import _native
from wager.kernels.base import TargetOutput
from wager.tenants import PerTenant
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams

log = logging.getLogger("wager")

_LONGEST_PAUSE = 256


class GuardedDrafter:
    """`drafter`, whose drafts are cut where they are no trees of ids below `vocab`. No call raises."""

    def __init__(self, drafter: Drafter, *, vocab: int) -> None:
        self.drafter = drafter
        reader: object = drafter
        self._states = reader if isinstance(reader, StateReader) else None
        self._rows = reader if isinstance(reader, RowReader) else None
        self._observes = type(drafter).observe is not Drafter.observe
        self._vocab = vocab
        self._begun: set[str] = set()
        self._failures = self._pause = self._left = 0  # the last pause, and what is left of it, in sequences

    # ---- the interface of a drafter ----------------------------------------------------------------------------------

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        if self._left:
            self._left -= 1
            return
        self._begun.add(seq_id)
        self._call(partial(self.drafter.begin, seq_id, tokens, params, tenant=tenant))

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        if seq_id in self._begun:
            try:
                self.drafter.accept(seq_id, tokens)
            except Exception as error:
                self._fail(error)

    def end(self, seq_id: str) -> None:
        if seq_id in self._begun:
            self._begun.discard(seq_id)
            if self._call(self.drafter.end, seq_id):
                self._pause = 0

    def observe(self, output: TargetOutput) -> None:
        if self._observes and not self._left:
            self._call(self.drafter.observe, output)

    @property
    def remembers_requests(self) -> bool:
        """See RemembersRequests."""
        return remembers_requests(self.drafter)

    def forget(self) -> None:
        """See RemembersRequests."""
        drafter: object = self.drafter
        if isinstance(drafter, RemembersRequests):
            self._call(drafter.forget)

    @property
    def continues(self) -> bool:
        """See Drafter."""
        return self.drafter.continues

    @property
    def observes(self) -> bool:
        """Whether it looks at passes."""
        return self._observes

    @property
    def reads_states(self) -> bool:
        """Whether it may read states; see StateReader."""
        return self._states is not None

    @property
    def taps(self) -> Sequence[int] | None:
        """See StateReader."""
        return None if self._states is None else self._states.taps

    def read(self, output: TargetOutput, computed: Sequence[ComputedRows]) -> None:
        """See StateReader."""
        if self._states is not None and not self._left:
            try:
                self._states.read(output, computed)
            except Exception as error:
                self._fail(error)

    @property
    def reads_rows(self) -> bool:
        """See RowReader."""
        return self._rows is not None and self._rows.reads_rows

    def read_rows(self, output: TargetOutput, rows: Sequence[LogitsRows]) -> None:
        """See RowReader."""
        if self._rows is not None and self._rows.reads_rows and not self._left:
            self._call(self._rows.read_rows, output, rows)

    def propose(self, requests: Sequence[DraftRequest]) -> dict[str, Draft]:
        """The valid part of each draft, by sequence, none larger than was requested."""
        asked = [request for request in requests if request.seq_id in self._begun]
        if not asked:
            return {}
        try:
            limits, found = {request.seq_id: request.depth for request in asked}, dict[str, Draft]()
            for draft in self.drafter.propose(asked):
                if (limit := limits.get(draft.seq_id)) is not None:
                    found[draft.seq_id] = valid_part(draft, limit=limit, vocab=self._vocab)
            return found
        except Exception as error:
            self._fail(error)
            return {}

    def _call(self, call: Callable[..., None], *args: object) -> bool:
        """Whether it succeeded; else the drafter has failed."""
        try:
            call(*args)
        except Exception as error:
            self._fail(error)
            return False
        return True

    def _fail(self, error: Exception) -> None:
        self._failures += 1
        self._pause = min(_LONGEST_PAUSE, max(1, 2 * self._pause))
        self._left = self._pause
        for seq_id in self._begun:
            with suppress(Exception):
                self.drafter.end(seq_id)
        self._begun.clear()
        if self._failures.bit_count() == 1:
            name, kind = self.drafter.name, type(error).__name__
            log.warning("Drafter %r, which works for another one, failed: %s: %s", name, kind, error)


@dataclass(slots=True)
class _ToldSequence:
    """What the inner drafter was told of a sequence: the prompt, and all tokens until now."""

    params: SamplingParams
    tenant: str
    prompt_tokens: int
    tokens: list[int]


class InnerDrafter(GuardedDrafter):
    """A drafter that guesses for a draft model of `vocab` logits."""

    def __init__(self, drafter: Drafter, *, vocab: int) -> None:
        super().__init__(drafter, vocab=vocab)
        self._told: dict[str, _ToldSequence] = {}

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        """A sequence starts; the inner drafter learns of it when it is to guess."""
        self._told[seq_id] = _ToldSequence(params, tenant, len(tokens), [])

    def end(self, seq_id: str) -> None:
        self._told.pop(seq_id, None)
        super().end(seq_id)

    def guess(self, wanted: Sequence[tuple[DraftRequest, list[int], int]]) -> dict[str, Draft]:
        """Its guesses of what follows the tokens of each request, at most the given number: valid trees of known
        tokens; none where it has none. What the draft model draws with noise of its own is guessed greedily."""
        requests: list[DraftRequest] = []
        for request, tokens, depth in wanted:
            if depth > 0:
                self._tell(request.seq_id, tokens)
                params = replace(request.params, temperature=0.0) if draws(request) else request.params
                inner = DraftRequest(request.seq_id, len(tokens), depth, params, request.seed, request.choice)
                requests.append(inner)
        return self.propose(requests)

    def _tell(self, seq_id: str, tokens: list[int]) -> None:
        """Bring the drafter's sequence to `tokens`; it begins again where it was told others."""
        told = self._told[seq_id]
        known = len(told.tokens) if seq_id in self._begun else 0
        if not known or told.tokens != tokens[:known]:
            super().end(seq_id)
            super().begin(seq_id, tokens[: told.prompt_tokens], told.params, tenant=told.tenant)
            known = told.prompt_tokens
        if len(tokens) > known:
            self.accept(seq_id, tokens[known:])
        told.tokens = tokens


_PRIOR = 10.0
"""Guesses for which the assumption counts that a drafter is right as often as it thinks."""


@dataclass(slots=True)
class _Reliability:
    """How often a drafter was right where it guessed, and how often it should have been by its scores."""

    right: float = _PRIOR
    expected: float = _PRIOR

    @property
    def factor(self) -> float:
        return self.right / self.expected

    def learn(self, draft: Draft, tokens: Sequence[int]) -> None:
        """Compare a drafter's guesses with the tokens that became known, as far as its path was right."""
        expected, right = _native.bear_out(draft, tokens)
        self.expected += expected
        self.right += right


class MergedDrafter(Drafter):
    """The trees of `drafters` as one. One that raises: see GuardedDrafter; `vocab` as in DraftParts."""

    sign = MERGED_SIGN
    makes_trees = True

    def __init__(self, drafters: Sequence[Drafter], *, vocab: int) -> None:
        self.name = self.sign.join(drafter.name for drafter in drafters)
        self.default_depth = max(drafter.default_depth for drafter in drafters)
        self.max_depth = max(drafter.max_depth for drafter in drafters)
        self.samples = any(drafter.samples for drafter in drafters)
        self._vocab = vocab
        self._members = [GuardedDrafter(drafter, vocab=vocab) for drafter in drafters]
        self._merger = _native.DraftMerger(Draft, self.name)
        self._readers = [member for member in self._members if member.reads_states]
        self._observers = [member for member in self._members if member.observes]
        self._reliability = PerTenant(lambda: [_Reliability() for _ in drafters])
        self._last: dict[str, list[tuple[int, Draft]]] = {}  # of each sequence the drafts that are not refuted yet

    @property
    def taps(self) -> Sequence[int] | None:
        """The layers that any of its drafters reads; see StateReader."""
        if len(self._readers) < 2:
            return self._readers[0].taps if self._readers else None
        found = [taps for member in self._readers if (taps := member.taps) is not None]
        return sorted({tap for taps in found for tap in taps}) if found else None

    def read(self, output: TargetOutput, computed: Sequence[ComputedRows]) -> None:
        for member in self._readers:
            member.read(output, computed)

    @property
    def reads_rows(self) -> bool:
        """Whether one of its drafters does; see RowReader."""
        return any(member.reads_rows for member in self._members)

    def read_rows(self, output: TargetOutput, rows: Sequence[LogitsRows]) -> None:
        for member in self._members:
            member.read_rows(output, rows)

    @property
    def remembers_requests(self) -> bool:
        """Whether one of its drafters does."""
        return any(member.remembers_requests for member in self._members)

    def forget(self) -> None:
        """See RemembersRequests."""
        for member in self._members:
            member.forget()

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        self._reliability.enter(seq_id, tenant)
        for member in self._members:
            member.begin(seq_id, tokens, params, tenant=tenant)

    def observe(self, output: TargetOutput) -> None:
        for member in self._observers:
            member.observe(output)

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        for index, draft in self._last.pop(seq_id, ()):
            self._reliability.of(seq_id)[index].learn(draft, tokens)
        for member in self._members:
            member.accept(seq_id, tokens)

    def end(self, seq_id: str) -> None:
        self._last.pop(seq_id, None)
        self._reliability.leave(seq_id)
        for member in self._members:
            member.end(seq_id)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One tree per request, of at most `depth` nodes."""
        drafts: dict[str, list[tuple[int, Draft]]] = {request.seq_id: [] for request in requests}
        for index, member in enumerate(self._members):
            asked = [self._share(request, index) for request in requests]
            for seq_id, draft in member.propose([request for request in asked if request.depth > 0]).items():
                if len(draft):
                    drafts[seq_id].append((index, draft))
        self._last |= drafts
        return [self._merge(request, drafts[request.seq_id]) for request in requests]

    def _share(self, request: DraftRequest, index: int) -> DraftRequest:
        """What one drafter is asked for: everything, or its share, the first ones' the larger."""
        if not draws(request):
            return request
        count = len(self._members)
        share = request.depth // count + (index < request.depth % count)
        return request._replace(depth=share)

    def _merge(self, request: DraftRequest, drafts: Sequence[tuple[int, Draft]]) -> Draft:
        if draws(request):
            return self._beside(request, [draft for index, draft in drafts if self._has_needed_probs(index, draft)])
        reliability = self._reliability.of(request.seq_id)
        judged = [(draft, reliability[index].factor) for index, draft in drafts]
        return self._merger.merge(request.seq_id, judged, request.depth)[0]

    def _has_needed_probs(self, index: int, draft: Draft) -> bool:
        return draft.draft_probs is not None or not self._members[index].drafter.samples

    def _beside(self, request: DraftRequest, drafts: Sequence[Draft]) -> Draft:
        """The drafts one after the other, each from the root, deterministic ones with point masses."""
        tokens: list[int] = []
        parents: list[int] = []
        probs: list[np.ndarray] = []
        for draft in drafts:
            first = len(tokens)
            tokens += draft.tokens
            parents += [parent + first if parent >= 0 else -1 for parent in draft.parents]
            masses = np.zeros((len(draft), self._vocab))
            masses[range(len(draft)), draft.tokens] = 1.0
            probs.append(masses if draft.draft_probs is None else draft.draft_probs)
        q = np.concatenate(probs) if self.samples and probs else None
        return Draft(request.seq_id, tuple(tokens), tuple(parents), (), self.name, q)


_FIRST_GAIN, _FIRST_WEIGHT = 0.5, 20.0
"""Tokens that asking the second drafter is taken to bring before it was asked where the first knows nothing (less, the
surer that is), and the places that this counts for: what it brings at one place is 0 to 7 tokens."""

_MEMORY = 400.0
"""Places that count of those where it was asked."""

_LEARNED_TOGETHER = 8
"""Places of a sequence that are learned from together."""

_RETRIED = 64
"""Of so many places at which asking does not seem to pay, it is asked at one."""

_CREDIT, _MOST_CREDIT = 10.0, 60.0
"""Tokens by which keeping and asking the second drafter may cost more than it brings, until it rests: at first, and
once it has brought as many more. What it brings scatters, so that one that brings a little needs many."""


@dataclass(slots=True)
class _PlaceGain:
    """What the second drafter brought at places where the first is about equally sure: tokens that would not have been
    guessed without it, less the price of its guesses and rows, but not of the call."""

    mean: float
    places: float = _FIRST_WEIGHT
    left_out: int = 0

    def pays(self, call: float) -> bool:
        """Whether to ask at this place, for the price of a call."""
        if self.mean <= call and self.left_out < _RETRIED:
            self.left_out += 1
            return False
        self.left_out = 0
        return True

    def learn(self, gain: float) -> None:
        self.places = min(_MEMORY, self.places + 1.0)
        self.mean += (gain - self.mean) / self.places


class _SecondDrafter:
    """What is known of the second drafter for a tenant: its gain by place, and whether it is worth its keeping. It is
    asked from call number `until` on; before that it rests, but for the last calls, in which it is shown states."""

    def __init__(self) -> None:
        self.until = 0
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.gains = [_PlaceGain(_FIRST_GAIN * (1 - least)) for least in (0.0, *BIN_BORDERS)]
        self._credit = _CREDIT

    def learn(self, tokens: float) -> None:
        """What it brought where it was asked, less what that cost."""
        self._credit = min(_MOST_CREDIT, self._credit + tokens)

    def keep(self, tokens: float, *, now: int, sequences: int) -> bool:
        """Pay for the states of a place. Where it has cost too much it rests from call `now` on, until a trial that
        costs as much is a small share of what is generated meanwhile; there it begins anew. Whether that is so."""
        self._credit -= tokens
        rests = self._credit < 0
        if rests:
            self.until = now + round(_CREDIT / (EXPLORATION_SHARE * sequences))
            self._begin_anew()
        return rests


class _AskedPlace(NamedTuple):
    """A place where the second drafter was asked: the draft that was made, that of each drafter, what the second's part
    costs beside the call, and what the call costs."""

    gain: _PlaceGain
    made: Draft
    first: Draft
    second: Draft
    cost: float
    call: float


class BackedDrafter(MergedDrafter):
    """The guesses of `first`, and where they are worth little those of `second` too. The rest as of MergedDrafter.
    A second drafter that reads the target's states, which takes time in every step, rests while it is not worth that.

    Nothing is done at other places but to ask the first, and what was learned at some is counted together: after a pass
    of the target every function must be read from memory again."""

    sign = BACKED_SIGN
    weighs_prices = True

    def __init__(self, first: Drafter, second: Drafter, *, vocab: int) -> None:
        super().__init__([first, second], vocab=vocab)
        self._second = PerTenant(_SecondDrafter)
        self._calls = 0
        self._keeps = self._members[1].taps is not None
        self._first_reads = self._members[0].reads_states
        self._reads = True  # whether the second drafter is shown states, if it reads any
        self._asked: dict[str, _AskedPlace] = {}  # of each sequence the last place, if the second was asked there
        self._seen: dict[str, list[tuple[_AskedPlace, Sequence[int]]]] = {}
        """Those before it that nothing was learned from, with the tokens that became known."""

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        self._second.enter(seq_id, tenant)
        self._reads = self._is_awake()
        super().begin(seq_id, tokens, params, tenant=tenant)

    def _is_awake(self) -> bool:
        """Whether a tenant's second drafter is asked, or will be soon."""
        return any(self._calls + WARM_UP >= each.until for each in self._second.values())

    @property
    def taps(self) -> Sequence[int] | None:
        """Without the second drafter's layers while it rests."""
        return super().taps if self._reads else self._members[0].taps

    def read(self, output: TargetOutput, computed: Sequence[ComputedRows]) -> None:
        """The second drafter's layers come with the pass after the one in which it woke."""
        first, second = self._members
        if self._first_reads:
            first.read(output, computed)
        if self._reads and self._keeps and output.taps.keys() >= set(second.taps or ()):
            second.read(output, computed)

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        if (asked := self._asked.pop(seq_id, None)) is not None:
            seen = self._seen.setdefault(seq_id, [])
            seen.append((asked, tokens))
            if len(seen) == _LEARNED_TOGETHER:
                self._learn_places(seq_id)
        for member in self._members:
            member.accept(seq_id, tokens)

    def end(self, seq_id: str) -> None:
        self._learn_places(seq_id)
        self._asked.pop(seq_id, None)
        self._second.leave(seq_id)
        super().end(seq_id)

    def _learn_places(self, seq_id: str) -> None:
        if not (seen := self._seen.pop(seq_id, None)):
            return
        known, (of_first, of_second) = self._second.of(seq_id), self._reliability.of(seq_id)
        for (gain, made, first, second, cost, call), tokens in seen:
            brought = len(_native.compare(made, tokens)[1]) - len(_native.compare(first, tokens)[1]) - cost
            gain.learn(brought)
            known.learn(brought - call)
            of_first.learn(first, tokens)
            of_second.learn(second, tokens)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, of at most `depth` nodes."""
        first, second = self._members
        own = first.propose(requests)
        places = self._asked_places(requests, own)
        found = second.propose([self._worth_a_pass(r) for r in requests if r.seq_id in places]) if places else {}
        drafts: list[Draft] = []
        for request in requests:
            seq_id = request.seq_id
            mine, other = own.get(seq_id) or Draft(seq_id), found.get(seq_id)
            if not other:
                drafts.append(self._merger.rename(self._beside(request, [mine]) if draws(request) else mine))
                continue
            row, call, guess, _ = request.prices
            if draws(request):
                draft = replace(self._beside(request, [other]), computed=len(other))
                rows = self._merger.worth(draft, row) - self._merger.worth(mine, row)
            else:
                of_first, of_second = self._reliability.of(seq_id)
                judged = [(mine, of_first.factor), (other, of_second.factor)]
                behind = self._behind(request, other)
                more = (behind, of_first.factor) if behind else None
                draft, rows = self._merger.merge(seq_id, judged, request.depth, more, len(other), row)
            cost = row * rows + guess * len(other)
            self._asked[seq_id] = _AskedPlace(places[seq_id], draft, mine, other, cost, call)
            drafts.append(draft)
        return drafts

    def _asked_places(self, requests: Sequence[DraftRequest], own: Mapping[str, Draft]) -> dict[str, _PlaceGain]:
        """The places where the second drafter is asked, by sequence."""
        self._calls = now = self._calls + 1
        asked: dict[str, _PlaceGain] = {}
        for request in requests:
            seq_id, prices = request.seq_id, request.prices
            known = self._second.of(seq_id)
            if now < known.until:
                continue
            place = self._place(request, own.get(seq_id), known.gains)
            if place.pays(prices.call):
                asked[seq_id] = place
            if prices.keeping and self._keeps and known.keep(prices.keeping, now=now, sequences=len(requests)):
                self._reliability.of(seq_id)[1] = _Reliability()
        self._reads = self._is_awake()
        return asked

    def _place(self, request: DraftRequest, own: Draft | None, gains: Sequence[_PlaceGain]) -> _PlaceGain:
        """By the score of the first drafter's best first guess; all places are one where it gives none or draws."""
        if own is None or not own.scores or (self._members[0].drafter.samples and draws(request)):
            return gains[0]
        best = own.scores[0]  # of a chain
        if own.parents.count(-1) > 1:
            best = max(score for score, parent in zip(own.scores, own.parents, strict=True) if parent < 0)
        return gains[bisect(BIN_BORDERS, best)]

    def _worth_a_pass(self, request: DraftRequest) -> DraftRequest:
        """The second drafter ends where its next guess would not be worth its pass and its row."""
        prices, factor = request.prices, self._reliability.of(request.seq_id)[1].factor
        least = min(_MOST_SURE, (prices.row + prices.guess) / _NEXT_RATE / factor)
        return request._replace(min_survival=max(request.min_survival, least))

    def _behind(self, request: DraftRequest, draft: Draft) -> Draft | None:
        """What the first drafter guesses behind a chain of the second's, if a guess that is at most as likely as its
        last one may be worth a row."""
        first, count = self._members[0], len(draft)
        if not first.continues or not draft.is_chain or count >= request.depth:
            return None
        if draft.scores and draft.scores[-1] <= request.prices.row:
            return None
        behind = request._replace(position=request.position + count, depth=request.depth - count, after=draft.tokens)
        return first.propose([behind]).get(request.seq_id)


_NEXT_RATE = 0.6
"""How often a further guess of a chain is right, about, if those before it are."""

_MOST_SURE = 0.95
