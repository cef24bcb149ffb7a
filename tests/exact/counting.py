"""Texts of the production engine, counted and compared with the distribution they must have.

The toy target's distribution depends on the last token alone, so every window of three tokens is a draw from a known
distribution.
WAGER_EXACT_TOKENS sets how many tokens a sample holds (the default takes a second; about 2,400,000 show a
total variation of .01).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

import numpy as np
from scipy import stats

from wager.draft.combined import MergedDrafter
from wager.draft.model import DraftModel
from wager.draft.ngram import NgramDrafter
from wager.testing import ToyDistribution, ToyTarget
from wager.testing.drafters import HistoryDrafter
from wager.testing.toy import toy_engine
from wager.types import Draft, DraftRequest, Request, SamplingParams
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
        return [token for token, _ in row.top(width, *at, private=depth)]


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


# --- running and counting -----------------------------------------------------------------------------------


@dataclass
class Sample:
    """Texts, each led by its prompt's last token, and what became of guesses and sequences."""

    texts: list[list[int]] = field(default_factory=list)
    accepted: int = 0
    preemptions: int = 0


ROOMY = dict(num_blocks=400, max_rows=800, max_sequences=48)
TIGHT = dict(num_blocks=16, max_rows=40, max_sequences=6)


def sample(drafter, params: SamplingParams, *, rule: str, base: int, rooms=ROOMY) -> Sample:
    """Texts of requests that run side by side; TIGHT makes sequences preempt each other and find cached prefixes."""
    engine = toy_engine(TARGET, drafter=drafter, depth=int(np.cumprod(drafter.widths).sum()), rule=rule, **rooms)
    prefix = (0,) * 20 if rooms is TIGHT else ()
    requests = [
        Request(f"r{i}", (*prefix, i % V), replace(params, seed=base * 1_000_003 + i))
        for i in range(max(1, TOKENS // LENGTH))
    ]
    got = Sample()
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        got.texts.append([request.prompt[-1], *completion.token_ids])
        got.accepted += completion.stats.accepted
        got.preemptions += completion.stats.preemptions
    return got


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
    return float(stats.chi2.sf(statistic, freedom))


def p_value(got: Sample, params: SamplingParams) -> float:
    """Of every token, and of windows of three tokens, given the one before: 8 x 8 and 8 x 512 cells."""
    p = transition(TARGET, params)
    threes = p[:, :, None, None] * p[None, :, :, None] * p[None, None, :, :]
    steps, windows = np.zeros((V, V)), np.zeros((V, V, V, V))
    for text in got.texts:
        np.add.at(steps, (text[1:-1], text[2:]), 1)
        for at in range(1, len(text) - 3, 3):
            windows[tuple(text[at : at + 4])] += 1
    return min(1.0, 2 * min(g_test(steps, p), g_test(windows.reshape(V, -1), threes.reshape(V, -1))))
