"""Texts of the production engine, counted and compared with the distribution they must have.

The toy target's distribution depends on the last token alone, so every window of three tokens is a draw from a known
distribution, and so are the tokens at each depth of a round, separated by whether they were guessed.
WAGER_EXACT_TOKENS sets how many tokens a sample holds (the default takes a second; about 2,400,000 show a
total variation of .01).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from significance import chi_squared, contingency
from wager.draft.combined import BackedDrafter, MergedDrafter
from wager.draft.model import DraftModel
from wager.draft.ngram import NgramDrafter
from wager.testing import ToyDistribution, ToyTarget
from wager.testing.drafters import HistoryDrafter
from wager.testing.toy import toy_engine
from wager.types import Draft, DraftRequest, OutputDelta, Request, SamplingParams
from wager.verify.distribution import ProcessedDistribution, process, without_replacement

V = 8
LENGTH = 61  # one token that depends on the prompt, then twenty windows of three
TOKENS = int(os.environ.get("WAGER_EXACT_TOKENS", "6000"))

TARGET = ToyDistribution(vocab=V, order=1, sharpness=4.0, memory=0.0)
GUESSER = ToyDistribution(vocab=V, order=1, sharpness=4.0, memory=0.0, drift=0.7, salt=5)

WARM = SamplingParams(max_tokens=LENGTH, temperature=1.0)
CUT = SamplingParams(max_tokens=LENGTH, temperature=1.3, top_p=0.85)
COOL = SamplingParams(max_tokens=LENGTH, temperature=0.6, min_p=0.02)
BIASED = SamplingParams(max_tokens=LENGTH, temperature=1.0, top_k=6, top_p=0.97, logit_bias={2: 1.5, 5: -1.0})


def transition(distribution: ToyDistribution, params: SamplingParams) -> np.ndarray:
    """[V, V]: the distribution after each last token, processed by the definition rather than by production."""
    rows = []
    for last in range(V):
        z = distribution([last]).astype(np.float64)
        for token, bias in params.logit_bias.items():
            z[token] += bias
        p = np.exp((z - z.max()) / params.temperature)
        p[np.argsort(-p, kind="stable")[params.top_k or V :]] = 0
        p /= p.sum()
        order = np.argsort(-p, kind="stable")
        p[order[int((p[order].cumsum() < params.top_p).sum()) + 1 :]] = 0
        p[p < params.min_p * p.max()] = 0
        rows.append(p / p.sum())
    return np.array(rows)


# --- drafters -----------------------------------------------------------------------------------------------


class SamplingDrafter(HistoryDrafter):
    """Draws guesses from GUESSER with private noise and reports the distribution each was drawn from."""

    name = "sampling"
    samples = True

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.widths = widths

    def _draft(self, request: DraftRequest) -> Draft:
        assert request.needs_draft_probs
        tokens, parents, draft_probs = [], [], []
        level = [(-1, self.known[request.seq_id][-1])]
        for depth, width in enumerate(self.widths[: request.depth], start=1):
            grown = []
            for parent, last in level:
                row = process(GUESSER([last]), request.params)
                children = self.draw(row, width, request, depth)
                grown += [(len(tokens) + i, token) for i, token in enumerate(children)]
                tokens += children
                parents += [parent] * len(children)
                draft_probs += list(without_replacement(row.probabilities(V), children))
            level = grown
        return Draft(
            request.seq_id, tuple(tokens), tuple(parents), drafter=self.name, draft_probs=np.array(draft_probs)
        )

    def draw(self, row: ProcessedDistribution, width: int, request: DraftRequest, depth: int) -> list[int]:
        at = (request.seed, request.position + depth - 1, request.choice)
        if width == 1:
            return [row.choose(*at, private=depth)]
        return row.top(width, *at, private=depth)


class FixedDrafter(SamplingDrafter):
    """The likeliest tokens of GUESSER: deterministic guesses, without draft_probs."""

    name = "fixed"
    samples = False

    def _draft(self, request: DraftRequest) -> Draft:
        draft = super()._draft(request)
        return Draft(request.seq_id, draft.tokens, draft.parents, drafter=self.name)

    def draw(self, row: ProcessedDistribution, width: int, request: DraftRequest, depth: int) -> list[int]:
        return np.argsort(-row.probabilities(V), kind="stable")[: min(width, len(row.scores))].tolist()


class ModelDrafter(DraftModel):
    """The production draft model around GUESSER or another law; `widths` give the number of nodes of its trees."""

    def __init__(self, widths: tuple[int, ...], *, law: ToyDistribution = GUESSER, trees: bool = False) -> None:
        super().__init__(ToyTarget(law, num_blocks=600, max_rows=400, max_sequences=48), vocab=V, trees=trees)
        self.widths = widths


def tree_model(widths: tuple[int, ...]) -> ModelDrafter:
    return ModelDrafter(widths, trees=True)


class MergedModelDrafter(MergedDrafter):
    """Lookup, a draft model and one of trees, as one tree."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__([ModelDrafter(widths), NgramDrafter(), tree_model(widths)], vocab=V)
        self.widths = widths


class BackedModelDrafter(BackedDrafter):
    """Lookup, and behind it a draft model."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__(NgramDrafter(), ModelDrafter(widths), vocab=V)
        self.widths = widths


# --- running and counting -----------------------------------------------------------------------------------


@dataclass
class Sample:
    """Texts, each led by its prompt's last token, and their rounds.

    A round lists, for each depth that was reached and had guesses, (token before, emitted token, was it a guess).
    Rounds so near the end that the draft was cut short are left out, by where they begin, not by what came of them.
    """

    texts: list[list[int]] = field(default_factory=list)
    rounds: list[list[list[tuple[int, int, bool]]]] = field(default_factory=list)
    accepted: int = 0
    preemptions: int = 0


ROOMY = dict(num_blocks=400, max_rows=800, max_sequences=48)
TIGHT = dict(num_blocks=16, max_rows=40, max_sequences=6)


def sample(drafter, params: SamplingParams, *, rule: str, base: int, rooms=ROOMY, tokens: int = TOKENS) -> Sample:
    """Texts of requests that run side by side; TIGHT makes sequences preempt each other and find cached prefixes."""
    engine = toy_engine(TARGET, drafter=drafter, depth=_nodes(drafter.widths), rule=rule, **rooms)
    events: dict[str, list[OutputDelta]] = {}
    prefix = (0,) * 20 if rooms is TIGHT else ()
    requests = [
        Request(f"r{i}", (*prefix, i % V), replace(params, seed=base * 1_000_003 + i))
        for i in range(max(1, tokens // LENGTH))
    ]
    done = engine.generate(requests, on_output=lambda event: events.setdefault(event.request_id, []).append(event))
    got = Sample()
    for request, completion in zip(requests, done, strict=True):
        got.texts.append([request.prompt[-1], *completion.token_ids])
        got.rounds.append(_rounds(events[request.id], request.prompt[-1], drafter.widths))
        got.accepted += completion.stats.accepted
        got.preemptions += completion.stats.preemptions
    return got


def _nodes(widths: tuple[int, ...]) -> int:
    return int(np.cumprod(widths).sum())


def _rounds(events: Sequence[OutputDelta], last: int, widths: tuple[int, ...]) -> list[list[tuple[int, int, bool]]]:
    rounds, counted, depth = [], 0, len(widths)
    for event in events:
        before = [last, *event.token_ids]
        guessed = [origin != "" for origin in event.drafted_by]
        if event.token_ids and counted + _nodes(widths) < LENGTH:
            rounds.append([*zip(before[:depth], event.token_ids, guessed, strict=False)])
        counted += len(event.token_ids)
        last = before[-1]
    return rounds


def g_test(seen: np.ndarray, probs: np.ndarray) -> float:
    """p-value of counts [contexts, cells] against probs [contexts, cells]; cells expected below 5 are pooled."""
    if seen[probs == 0].sum() > 0:
        return 0.0  # an outcome of probability 0
    expected = probs * seen.sum(axis=1, keepdims=True)
    statistic, freedom = 0.0, 0
    for counts, wanted in zip(seen, expected, strict=True):
        order = np.argsort(-wanted)
        first = max(1, int((wanted >= 5).sum()))
        cuts = [*range(first), *([first] if wanted[order[first:]].sum() >= 5 else [])]
        n, w = (np.add.reduceat(x[order], cuts) for x in (counts, wanted))
        if w.sum() > 0:
            statistic += 2 * float(np.sum(n * np.log(np.where(n > 0, n, 1) / np.where(n > 0, w, 1))))
            freedom += len(w) - 1
    return chi_squared(statistic, freedom)


def windows(got: Sample, params: SamplingParams) -> float:
    """Three tokens in a row, given the one before: 8 x 512 cells."""
    p = transition(TARGET, params)
    probs = (p[:, :, None, None] * p[None, :, :, None] * p[None, None, :, :]).reshape(V, V**3)
    seen = np.zeros((V, V, V, V))
    for text in got.texts:
        for at in range(1, len(text) - 3, 3):
            seen[tuple(text[at : at + 4])] += 1
    return g_test(seen.reshape(V, V**3), probs)


def outcomes(got: Sample, depth: int, joint: np.ndarray) -> float:
    """Tokens emitted at `depth` of a round, separated by whether they were guessed: [V, 2 V] against `joint`."""
    seen = np.zeros((V, 2 * V))
    for rounds in got.rounds:
        for reached in rounds:
            if len(reached) > depth:
                last, token, guessed = reached[depth]
                seen[last, token + V * guessed] += 1
    return g_test(seen, joint)


def joint_of_draws(p: np.ndarray, q: np.ndarray, width: int) -> np.ndarray:
    """[2 V]: probabilities of (emitted token, not guessed | guessed) at a node whose children are drawn without
    replacement."""
    if width == 0 or q.sum() == 0:
        return np.concatenate((p, 0 * p))
    q = q / q.sum()
    joint = np.concatenate((0 * p, np.minimum(p, q)))
    over = np.maximum(p - q, 0)
    for x in np.flatnonzero(q > p):
        joint += (q[x] - p[x]) * joint_of_draws(over / over.sum(), np.where(np.arange(V) == x, 0, q), width - 1)
    return joint


def joint_of_fixed(p: np.ndarray, q: np.ndarray, width: int) -> np.ndarray:
    """As above, for the likeliest tokens of q as guesses: taken with p(x)."""
    guessed = np.zeros(V, bool)
    guessed[np.argsort(-q, kind="stable")[: min(width, int((q > 0).sum()))]] = True
    return np.concatenate((np.where(guessed, 0, p), np.where(guessed, p, 0)))


def joints(kind: type, params: SamplingParams, width: int) -> np.ndarray:
    """[V, 2 V]: the joint distribution at a node of `width` children, after each last token."""
    joint = joint_of_fixed if kind is FixedDrafter else joint_of_draws
    pairs = zip(transition(TARGET, params), transition(GUESSER, params), strict=True)
    return np.array([joint(p, q, width) for p, q in pairs])


def rounds_apart(got: Sample) -> float:
    """Whether the round before began with a rejection says nothing about how this one begins, given the last token."""
    table = np.zeros((V, 2, 2 * V))
    for rounds in got.rounds:
        for before, now in zip(rounds, rounds[1:], strict=False):
            last, token, guessed = now[0]
            table[last, int(before[0][2]), token + V * guessed] += 1
    statistic, freedom = 0.0, 0
    for pair in table:
        pair = pair[:, pair.sum(axis=0) >= 10]
        if pair.shape[1] > 1 and (pair.sum(axis=1) >= 20).all():
            of_pair, cells = contingency(pair)
            statistic, freedom = statistic + of_pair, freedom + cells
    assert freedom > 10
    return chi_squared(statistic, freedom)
