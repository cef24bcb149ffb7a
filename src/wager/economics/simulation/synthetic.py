"""Synthetic requests whose drafts survive by a given curve.

Requests differ in how predictable they are: from request to request, from round to round and from token to token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from wager.economics.simulation.traces import DraftTrace, RequestTrace
from wager.economics.survival import conditional

_Floats = NDArray[np.float64]

_SAMPLES = 40_000


@dataclass(frozen=True, slots=True)
class SyntheticDrafter:
    """A drafter by its survival curve. Whether a draft token matches is drawn from its log-odds, which scatter with
    standard deviations `request_sd`, `round_sd` and `token_sd`; `score_sd` is the error of the drafter's own estimate
    of the log-odds (None: it gives no scores) and `score_bias` what it overestimates them by."""

    survival: tuple[float, ...]
    request_sd: float = 0.8
    round_sd: float = 2.2
    token_sd: float = 2.2
    score_sd: float | None = 0.5
    score_bias: float = 0.0


class SyntheticTraces:
    """A TraceSource of synthetic requests. Averaged over requests every drafter's survival is its curve's, at every
    depth; the difficulty of requests, rounds and tokens is the same for all drafters."""

    def __init__(
        self,
        drafters: Mapping[str, SyntheticDrafter],
        *,
        prompt_tokens: int = 1,
        output_tokens: int = 1024,
        seed: int = 0,
    ) -> None:
        self._drafters = dict(drafters)
        self._prompt, self._output, self._seed = prompt_tokens, output_tokens, seed

    def max_depths(self) -> Mapping[str, int]:
        return {name: len(drafter.survival) for name, drafter in self._drafters.items()}

    def request(self, number: int) -> RequestTrace:
        rng = np.random.default_rng((self._seed, number))
        rng.standard_normal(
            2
        )  # unused draws: without them the requests behind the figures in docs and tests would change
        request = rng.standard_normal()
        rounds = rng.standard_normal(self._output)
        depth = max(len(drafter.survival) for drafter in self._drafters.values())
        tokens = rng.standard_normal(self._output + depth)
        drafts = {name: _draft(drafter, request, rounds, tokens, rng) for name, drafter in self._drafters.items()}
        return RequestTrace(self._prompt, self._output, drafts)


def _draft(
    drafter: SyntheticDrafter, request: float, rounds: _Floats, tokens: _Floats, rng: np.random.Generator
) -> DraftTrace:
    """What the drafter drafts along an answer of given difficulties (standard normal)."""
    depth, output = len(drafter.survival), len(rounds)
    ahead = np.lib.stride_tricks.sliding_window_view(tokens, depth)[:output]
    log_odds = _mean_log_odds(drafter) + drafter.request_sd * request + drafter.round_sd * rounds[:, None]
    log_odds = log_odds + drafter.token_sd * ahead
    wrong = rng.random((output, depth)) >= _sigmoid(log_odds)
    matching = np.where(wrong.any(axis=1), wrong.argmax(axis=1), depth)
    scores = None
    if drafter.score_sd is not None:
        estimate = log_odds + drafter.score_bias + drafter.score_sd * rng.standard_normal((output, depth))
        scores = np.cumprod(_sigmoid(estimate), axis=1).astype(np.float32)
    return DraftTrace(np.full(output, depth, np.int16), matching.astype(np.int16), scores)


def _sigmoid(log_odds: _Floats) -> _Floats:
    probability: _Floats = 1.0 / (1.0 + np.exp(-log_odds))
    return probability


@lru_cache(maxsize=32)
def _mean_log_odds(drafter: SyntheticDrafter) -> _Floats:
    """Mean log-odds by depth such that survival over all requests is the drafter's curve: solved depth by depth, over
    samples weighted by how likely they are to have reached it."""
    rng = np.random.default_rng(1)
    common = drafter.request_sd * rng.standard_normal(_SAMPLES) + drafter.round_sd * rng.standard_normal(_SAMPLES)
    weight = np.full(_SAMPLES, 1 / _SAMPLES)
    means: list[float] = []
    for rate in conditional(drafter.survival):
        scatter = common + drafter.token_sd * rng.standard_normal(_SAMPLES)
        low, high = -12.0, 12.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if float(weight @ _sigmoid(middle + scatter)) < rate else (low, middle)
        means.append((low + high) / 2)
        weight = weight * _sigmoid(means[-1] + scatter)
        weight /= weight.sum()
    return np.array(means)
