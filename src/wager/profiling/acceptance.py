"""How often a drafter's tokens are accepted: survival by depth, alpha and tau with intervals, from recorded drafts.

Definitions, for rounds of one fixed depth K, each of which begins where the last one ended:

- survival S_k: the probability that the draft token at depth k is reached and accepted, over all rounds; a round
  without a draft token there counts as not accepted. Where the answer ends, or its length limit leaves no room, depth k
  is unobserved; S_k is the product of the observed conditional rates (Kaplan and Meier 1958), so it never rises with k.
- alpha: accepted / (accepted + first rejections), the maximum-likelihood rate if every draft token that is reached is
  accepted with one probability.
- tau: mean tokens per round, the bonus token included: tokens / rounds. But for the ends of answers it is
  1 + S_1 + ... + S_K.
- coverage: the share of rounds with room for a draft that got one.

Survival depends on the depth that is drafted: deep drafts leap over predictable stretches, so that their rounds begin
more often where little can be predicted. Hence tau is given for every depth, from the rounds of that depth.

Intervals hold 95 % of the values over resampled prompts (bootstrap): prompts are independent, rounds of one are not.

The drafts are those that a drafter makes at every position of an answer. The engine decodes plainly; at every step the
drafter drafts and nothing of the draft is verified. So the drafter is called as in production, with the noise of the
request, and the draft of every position is known. Since under `match` the text does not depend on drafts, the rounds of
any fixed depth follow without another run (`rounds_at`), and so does a trace for `wager replay`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wager.bench.scrape import SpeculationCounts
from wager.draft.base import Drafter
from wager.economics.options import DEEPEST
from wager.economics.policy.heuristics import FixedDepth
from wager.engine.core import Engine
from wager.errors import RequestError, UsageError, WagerError
from wager.types import Draft, DraftDecision, DraftRequest, OutputDelta, Plan, Request, SamplingParams, Span


@dataclass(frozen=True, slots=True)
class PositionDraft:
    """The draft at one position of an answer: its tokens with their survival estimates (none where the drafter gives
    none), at most `room` of them. Fewer mean that the drafter made no more. `parents`: of a tree, as in types.Draft; ()
    of a chain."""

    room: int
    tokens: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    parents: tuple[int, ...] = ()


class DraftRecorder(FixedDepth):
    """A policy that drafts to `depth` at every step and verifies nothing. `drafts` holds, by sequence, a PositionDraft
    for each token of its answer."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.drafts: dict[str, list[PositionDraft]] = {}
        self._rooms: dict[str, int] = {}

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        """See Policy. What is not verified takes no rows, so the budget does not bound it."""
        self._rooms = {span.seq_id: min(self.depth, span.max_draft_tokens) for span in spans if span.needs_logits}
        return {seq_id: DraftDecision(room) for seq_id, room in self._rooms.items() if room}

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        """See Policy."""
        for seq_id, room in self._rooms.items():
            draft = drafts.get(seq_id) or Draft(seq_id)
            parents = () if draft.is_chain else draft.parents
            self.drafts.setdefault(seq_id, []).append(PositionDraft(room, draft.tokens, draft.scores, parents))
        return {}

    def explain(self) -> str:
        return f"Drafts of depth {self.depth} are recorded and not verified."


@dataclass(frozen=True, slots=True)
class FixedDepthRound:
    """One round of a fixed depth: the position of the answer that it begins at, the draft tokens made and accepted, the
    depths at which the answer and its limits allow a verdict, and whether a draft token was rejected, rather than none
    made, where the accepted ones end."""

    position: int
    drafted: int
    accepted: int
    observable: int
    rejected: bool


_NEVER = 1 << 30


@dataclass(frozen=True, slots=True)
class AnswerPath:
    """Where the answer goes in a draft of which the likeliest guesses are verified, so that one more guess adds a node.

    `needed[d]`: guesses that must be made until the node at depth d + 1 of the answer's path is among them, ascending.
    `guessed[d]`: until any child of the path's node at depth d (0: the root) is; _NEVER if it has none."""

    needed: tuple[int, ...]
    guessed: tuple[int, ...]

    @classmethod
    def of(cls, draft: PositionDraft, ahead: Sequence[int]) -> AnswerPath:
        """The path of `ahead`, the answer's next tokens."""
        if not draft.parents:
            matching = takewhile(lambda pair: pair[0] == pair[1], zip(draft.tokens, ahead, strict=False))
            return cls.chain(sum(1 for _ in matching), drafted=len(draft.tokens))
        order = _likeliest_first(draft)
        place = {node: rank for rank, node in enumerate(order, 1)}
        children: dict[int, list[int]] = {}
        for node in order:
            children.setdefault(draft.parents[node], []).append(node)
        at, needed, guessed = -1, list[int](), list[int]()
        for token in (*ahead, None):
            below = children.get(at, [])
            guessed.append(place[below[0]] if below else _NEVER)
            found = next((node for node in below if draft.tokens[node] == token), None)
            if found is None:
                break
            needed.append(place[found])
            at = found
        return cls(tuple(needed), tuple(guessed))

    @classmethod
    def chain(cls, matching: int, *, drafted: int) -> AnswerPath:
        """The path in a chain of `drafted` tokens whose first `matching` agree with the answer."""
        return cls(tuple(range(1, matching + 1)), (*range(1, drafted + 1), _NEVER))

    def accepted(self, guesses: int) -> int:
        """Draft tokens that are accepted if that many guesses are made."""
        return bisect_right(self.needed, guesses)


def _likeliest_first(draft: PositionDraft) -> list[int]:
    """Nodes of a tree in the order of their estimates, none before its parent; in their own order without estimates."""
    if not draft.scores:
        return list(range(len(draft.tokens)))
    bounded: list[float] = []
    for parent, score in zip(draft.parents, draft.scores, strict=True):
        bounded.append(score if parent < 0 else min(score, bounded[parent]))
    return sorted(range(len(bounded)), key=lambda node: -bounded[node])  # stable, and parents have lower indices


@dataclass(frozen=True, slots=True)
class DraftedAnswer:
    """An answer of `len(drafts)` tokens, what was drafted at each, and the path of the answer from there on through the
    draft."""

    prompt_tokens: int
    drafts: tuple[PositionDraft, ...]
    paths: tuple[AnswerPath, ...]

    @classmethod
    def of(cls, token_ids: Sequence[int], drafts: Sequence[PositionDraft], *, prompt_tokens: int) -> DraftedAnswer:
        """From an answer's tokens and the drafts at its positions."""
        paths = [AnswerPath.of(draft, token_ids[at:]) for at, draft in enumerate(drafts)]
        return cls(prompt_tokens, tuple(drafts), tuple(paths))

    @property
    def matching(self) -> tuple[int, ...]:
        """The number of draft tokens at each position that agree with the answer."""
        return tuple(len(path.needed) for path in self.paths)

    def rounds_at(self, depth: int) -> list[FixedDepthRound]:
        """The rounds of an engine that drafts to `depth` in every step, of a tree the likeliest `depth` nodes: each
        begins where the last one ended."""
        rounds, at, length = [], 0, len(self.drafts)
        while at < length:
            draft, path = self.drafts[at], self.paths[at]
            accepted = path.accepted(depth)
            observable = min(depth, draft.room, length - at)
            rejected = accepted < observable and path.guessed[accepted] <= depth
            rounds.append(FixedDepthRound(at, min(depth, len(draft.tokens)), accepted, observable, rejected))
            at += accepted + 1
        return rounds

    def trace_values(self, survival: Sequence[float]) -> dict[str, Any]:
        """`right` and `scores` as simulation/traces.py reads them; `survival` replaces missing estimates."""
        scores = [draft.scores or tuple(survival[: len(draft.tokens)]) for draft in self.drafts]
        return {"right": list(self.matching), "scores": [[round(score, 4) for score in row] for row in scores]}


@dataclass(frozen=True, slots=True)
class DraftRecording:
    """Answers in the order of the requests, drafted along to `depth`, which of `trees` is the number of nodes."""

    depth: int
    answers: tuple[DraftedAnswer, ...]
    trees: bool = False


def record_drafts(
    engine: Engine,
    requests: Sequence[Request],
    *,
    depth: int | None = None,
    concurrency: int | None = None,
    on_output: Callable[[OutputDelta], None] | None = None,
) -> DraftRecording:
    """Answer `requests` (of one choice each) on an engine with one drafter under the `match` rule, and record its
    drafts to `depth` (None: as deep as it can). The engine's policy is replaced.

    UsageError for a drafter that does not draft that deep; RequestError if a request fails; WagerError if the drafter
    fails.
    """
    [drafter] = engine.proposer.drafters.values()
    recorder = DraftRecorder(_deepest(drafter, depth))
    engine.policy = recorder
    engine.scheduler.max_draft_tokens = recorder.depth
    answers = engine.generate(requests, concurrency=concurrency, on_output=on_output)
    for answer in answers:
        if answer.finish_reason == "error":
            raise RequestError(f"Prompt {answer.request_id!r} failed: {answer.error}", "Leave the prompt out.")
    if engine.proposer.failures[drafter.name]:
        raise WagerError(f"Drafter {drafter.name!r} failed.", "Without its drafts nothing can be measured.")
    recorded = [
        DraftedAnswer.of(answer.token_ids, recorder.drafts[request.id], prompt_tokens=len(request.prompt))
        for request, answer in zip(requests, answers, strict=True)
    ]
    return DraftRecording(recorder.depth, tuple(recorded), trees=drafter.makes_trees)


def replay_drafts(
    drafter: Drafter,
    answers: Iterable[tuple[Sequence[int], Sequence[int]]],
    *,
    depth: int | None = None,
    on_answer: Callable[[], None] = lambda: None,
) -> DraftRecording:
    """What a drafter that reads texts alone drafts along recorded answers, without a model: `answers` are the token ids
    of prompts and answers, in their order in time, so that a drafter which remembers requests has those before. The
    drafts are those that `record_drafts` records of an engine that gives these answers one after the other, none cut by
    a limit of its length.

    UsageError for a drafter that does not draft to `depth` (None: as deep as it can).
    """
    deepest, params = _deepest(drafter, depth), SamplingParams()
    recorded: list[DraftedAnswer] = []
    for number, (prompt, answer) in enumerate(answers):
        seq_id, drafts = str(number), list[PositionDraft]()
        drafter.begin(seq_id, prompt, params)
        for at in range(len(answer)):
            if at:  # so the last token is not shown: the request has ended with it
                drafter.accept(seq_id, answer[at - 1 : at])
            [draft] = drafter.propose([DraftRequest(seq_id, len(prompt) + at, deepest, params, 0)])
            drafts.append(PositionDraft(deepest, draft.tokens, draft.scores, () if draft.is_chain else draft.parents))
        drafter.end(seq_id)
        recorded.append(DraftedAnswer.of(answer, drafts, prompt_tokens=len(prompt)))
        on_answer()
    return DraftRecording(deepest, tuple(recorded), trees=drafter.makes_trees)


def _deepest(drafter: Drafter, depth: int | None) -> int:
    """`depth`, or as deep as the drafter can; UsageError for more than that."""
    if depth is not None and depth > drafter.max_depth:
        raise UsageError(
            f"Depth {depth} is out of range: {drafter.name} drafts at most {drafter.max_depth} tokens.",
            f"Give --depth {drafter.max_depth} or less.",
        )
    return drafter.max_depth if depth is None else depth


RESAMPLES = 2000
_QUANTILES = (0.025, 0.975)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value (None: nothing was observed) and its 95 % interval (None: fewer than two prompts)."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class DepthRounds:
    """The rounds of one fixed depth: tau, and the shares of rounds in which 0, 1, ... depth draft tokens were made."""

    depth: int
    rounds: int
    tau: Estimate
    lengths: tuple[float, ...]

    @property
    def drafted(self) -> float:
        """Draft tokens made per round."""
        return sum(length * share for length, share in enumerate(self.lengths))

    def as_dict(self) -> dict[str, Any]:
        return {
            "depth": self.depth,
            "rounds": self.rounds,
            **_named("tau", self.tau),
            "drafted": self.drafted,
            "lengths": list(self.lengths),
        }


@dataclass(frozen=True, slots=True)
class DrafterAcceptance:
    """The acceptance of one drafter on some prompts, in rounds of the deepest depth; see the definitions above.

    `given_draft` is the survival in rounds that got a draft; `depths` holds every depth from 1 to the deepest;
    `context` are the positions before a token of an answer, on average. None where a server does not count it.
    """

    prompts: int | None
    tokens: int
    rounds: int
    coverage: float | None
    context: float | None
    alpha: Estimate
    tau: Estimate
    survival: tuple[Estimate, ...]
    given_draft: tuple[float, ...]
    depths: tuple[DepthRounds, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; docs/acceptance.md lists the keys."""
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "rounds": self.rounds,
            "coverage": self.coverage,
            "context": self.context,
            **_named("alpha", self.alpha),
            **_named("tau", self.tau),
            "survival": [estimate.value for estimate in self.survival],
            "survival_low": [estimate.low for estimate in self.survival],
            "survival_high": [estimate.high for estimate in self.survival],
            "survival_given_draft": list(self.given_draft),
            "depths": [depth.as_dict() for depth in self.depths],
        }


def _named(name: str, estimate: Estimate) -> dict[str, float | None]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


class AcceptanceCounts:
    """What `answers`, recorded to `depth` or deeper, count in rounds of each depth: once for all answers, and for any
    of them."""

    def __init__(self, answers: Sequence[DraftedAnswer], depth: int) -> None:
        self._depths = [_DepthCounts(answers, each) for each in range(1, depth + 1)]
        self._before = [answer.prompt_tokens + (len(answer.drafts) - 1) / 2 for answer in answers]

    def estimate(self, chosen: Sequence[int] | None = None) -> DrafterAcceptance:
        """The acceptance in the answers of these indices, without them in all."""
        chosen = range(len(self._before)) if chosen is None else chosen
        weights, counts = _resampled(len(chosen)), [each.select(chosen) for each in self._depths]
        deepest = counts[-1]
        return DrafterAcceptance(
            prompts=len(chosen),
            tokens=int(deepest.tokens.sum()),
            rounds=int(deepest.rounds.sum()),
            coverage=_ratio(deepest.with_draft.sum(), deepest.with_room.sum()),
            context=float(np.average(np.array(self._before)[list(chosen)], weights=deepest.tokens)),
            alpha=_estimates(deepest.alpha, weights)[0],
            tau=_estimates(deepest.tau, weights)[0],
            survival=tuple(_estimates(deepest.survival, weights)),
            given_draft=tuple(_survival(deepest.reached_with_draft.sum(0), deepest.accepted.sum(0)).tolist()),
            depths=tuple(
                DepthRounds(
                    each.depth,
                    int(each.rounds.sum()),
                    _estimates(each.tau, weights)[0],
                    tuple((each.lengths.sum(0) / each.rounds.sum()).tolist()),
                )
                for each in counts
            ),
        )


class _DepthCounts:
    """Counts of each answer in rounds of one depth, float64 [answers], by depth [answers, depth]. `reached` are rounds
    in which all draft tokens above were accepted and a verdict at this depth was possible; `lengths` are rounds by the
    number of draft tokens made [answers, 1 + depth]."""

    def __init__(self, answers: Sequence[DraftedAnswer], depth: int) -> None:
        rounds = [(index, each) for index, answer in enumerate(answers) for each in answer.rounds_at(depth)]
        ends = np.cumsum(np.bincount([index for index, _ in rounds], minlength=len(answers)))
        drafted, accepted, observable, rejected = (
            np.array([getattr(each, name) for _, each in rounds], np.intp)
            for name in ("drafted", "accepted", "observable", "rejected")
        )

        def by_answer(counted: NDArray[Any]) -> Floats:
            until = np.cumsum(counted, axis=0, dtype=np.float64)[ends - 1]
            return np.diff(until, axis=0, prepend=np.zeros_like(until[:1]))

        depths = np.arange(1, depth + 1)
        reached = depths <= np.minimum(accepted + 1, observable)[:, None]
        self.depth = depth
        self.tokens = np.array([len(answer.drafts) for answer in answers], np.float64)
        self.rounds, self.rejected = by_answer(np.ones(len(rounds))), by_answer(rejected)
        self.with_room, self.with_draft = by_answer(observable > 0), by_answer(drafted > 0)
        self.reached, self.reached_with_draft = by_answer(reached), by_answer(reached & (drafted > 0)[:, None])
        self.accepted = by_answer(depths <= accepted[:, None])
        self.lengths = by_answer(drafted[:, None] == np.arange(depth + 1))

    def select(self, chosen: Sequence[int]) -> _DepthCounts:
        """The counts of the answers of these indices."""
        found, rows = copy(self), list(chosen)
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                setattr(found, name, value[rows])
        return found

    def alpha(self, weights: Floats) -> Floats:
        """[resamples, 1]"""
        accepted, rejected = weights @ self.accepted.sum(1), weights @ self.rejected
        return _divide(accepted, accepted + rejected)[:, None]

    def tau(self, weights: Floats) -> Floats:
        """[resamples, 1]"""
        return _divide(weights @ self.tokens, weights @ self.rounds)[:, None]

    def survival(self, weights: Floats) -> Floats:
        """[resamples, depth]"""
        return _survival(weights @ self.reached, weights @ self.accepted)


def _survival(reached: Floats, accepted: Floats) -> Floats:
    """Products of conditional rates over the last axis; a depth that was never reached survives with probability 0."""
    rates = np.nan_to_num(_divide(accepted, reached))
    return np.cumprod(rates, axis=-1, dtype=np.float64)


def _divide(over: Floats, under: Floats) -> Floats:
    """NaN where nothing was counted."""
    quotient: Floats = np.full(np.broadcast(over, under).shape, np.nan)
    np.divide(over, under, out=quotient, where=under > 0)
    return quotient


def _resampled(count: int) -> Floats:
    """How often each of `count` prompts is drawn, [1 + RESAMPLES, count]; the first row has each once."""
    return np.vstack([np.ones(count), *_draws(count)])


def _draws(count: int) -> Iterator[NDArray[np.int64]]:
    """How often each of `count` prompts is drawn, [count], one resample after the other."""
    rng = np.random.default_rng(0)
    for _ in range(RESAMPLES):
        yield rng.multinomial(count, np.full(count, 1 / count))


def _estimates(statistic: Callable[[Floats], Floats], weights: Floats) -> list[Estimate]:
    """Value and interval of each column of a statistic."""
    columns = statistic(weights).T
    return [_estimate(column, intervals=weights.shape[1] > 1) for column in columns]


def _estimate(column: Floats, *, intervals: bool) -> Estimate:
    value, resampled = column[0], column[1:]
    if np.isnan(value):
        return Estimate(None, None, None)
    if not intervals:
        return Estimate(float(value), None, None)
    low, high = np.nanquantile(resampled, _QUANTILES)
    return Estimate(float(value), float(low), float(high))


def _ratio(over: float, under: float) -> float:
    return float(over / under) if under else 0.0


# ---- from a server's counters ----------------------------------------------------------------------------------------

_NORMAL_95 = 1.959964


def served_acceptance(counts: SpeculationCounts) -> DrafterAcceptance:
    """The acceptance that a server counted, with the definitions above, if it drafted to one depth. UsageError if it
    does not count by position.

    Rounds are those with a draft if it does not count the others. The intervals take rounds as independent (Wilson's),
    which is the least that they can be. Rounds of smaller depths follow from S_k of the deepest, which is the least
    that they accept; drafts that vary in length are taken to be about as long as their mean.
    """
    if not counts.accepted:
        raise UsageError("The server counts accepted tokens, but not by position.", "Newer releases do.")
    rounds, mean = counts.rounds or counts.drafts, counts.drafted / counts.drafts
    depth, coverage = max(len(counts.accepted), len(counts.reaching), math.ceil(mean)), counts.drafts / rounds
    if depth > DEEPEST:
        raise UsageError(f"The server counts drafts of {depth} tokens.", f"Drafts have at most {DEEPEST}.")
    reached = [*counts.accepted, *[0] * (depth - len(counts.accepted))]
    accepted, requests = sum(reached), counts.first_tokens
    depths = [
        DepthRounds(each, rounds, _mean_tokens(reached[:each], rounds), _lengths(each, coverage, mean))
        for each in range(1, depth + 1)
    ]
    return DrafterAcceptance(
        prompts=requests or None,
        tokens=rounds + accepted,
        rounds=rounds,
        coverage=coverage if counts.rounds else None,
        context=(counts.prompt_tokens + counts.generated / 2) / requests if requests and counts.prompt_tokens else None,
        alpha=_proportion(accepted, accepted + counts.drafts - reached[-1]),
        tau=depths[-1].tau,
        survival=tuple(_proportion(each, rounds) for each in reached),
        given_draft=tuple(
            each / (drafts or counts.drafts) for each, drafts in zip_longest(reached, counts.reaching, fillvalue=0)
        ),
        depths=tuple(depths),
    )


def _mean_tokens(reached: Sequence[int], rounds: int) -> Estimate:
    """Tokens of a round, the bonus token included, where `reached` rounds accepted 1, 2, ... draft tokens or more."""
    mean = sum(reached) / rounds
    square = sum((2 * depth - 1) * each for depth, each in enumerate(reached, 1)) / rounds
    error = _NORMAL_95 * math.sqrt(max(0.0, square - mean**2) / rounds)
    return Estimate(1 + mean, 1 + max(0.0, mean - error), 1 + min(len(reached), mean + error))


def _lengths(depth: int, coverage: float, mean: float) -> tuple[float, ...]:
    """Shares of rounds by draft tokens, where a share `coverage` has drafts of about `mean` tokens, cut at `depth`."""
    shares, whole = [0.0] * (depth + 1), min(int(mean), depth)
    longer = coverage * (mean - whole) if whole < depth else 0.0
    shares[whole] = coverage - longer
    if longer:
        shares[whole + 1] = longer
    shares[0] += 1 - coverage
    return tuple(shares)


def _proportion(hits: int, tries: int) -> Estimate:
    """A share with Wilson's interval."""
    if not tries:
        return Estimate(None, None, None)
    share, spread = hits / tries, _NORMAL_95**2 / tries
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(spread * share * (1 - share) + spread**2 / 4) / (1 + spread)
    return Estimate(share, max(0.0, middle - half), min(1.0, middle + half))
