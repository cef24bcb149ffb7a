"""Synthetic requests whose drafts survive by a given curve.

Requests differ in how predictable they are: from request to request, from round to round and from token to token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wager.economics.acceptance import tokens_per_round
from wager.errors import UsageError
from wager.simulation.traces import MAX_DRAFTED, DraftTrace, RequestTrace

_Floats = NDArray[np.float64]

_GOLDEN = (5**0.5 - 1) / 2
_REQUEST_NODES, _ROUND_NODES, _TOKEN_NODES = 48, 96, 64  # of the quadratures over difficulties
_MAX_LOG_ODDS, _TABLE_STEP = 60.0, 0.02  # of the table of acceptance rates by log-odds
_CACHED_BYTES = 256e6  # of requests that are kept, since every policy is given the same ones


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

    def __post_init__(self) -> None:
        if not 0 < len(self.survival) <= MAX_DRAFTED:
            raise UsageError(
                f"A survival curve of {len(self.survival)} depths is out of range.", f"Give 1 to {MAX_DRAFTED} depths."
            )


class SyntheticTraces:
    """A TraceSource of synthetic requests. Every fixed depth yields the tokens per round of a drafter's curve, 1 + S_1
    + ... + S_depth, averaged over rounds (the last round of an answer may draft less). The difficulty of requests,
    rounds and tokens is the same for all drafters; that of requests is spread evenly, so that few represent all."""

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
        self._first = float(np.random.default_rng(seed).random())
        self._requests = lru_cache(maxsize=int(_CACHED_BYTES // self.request_bytes))(self._draw_request)

    @property
    def request_bytes(self) -> int:
        """Memory that a request takes here."""
        return self._output * sum([4 + 4 * len(drafter.survival) for drafter in self._drafters.values()])

    def max_depths(self) -> Mapping[str, int]:
        return {name: len(drafter.survival) for name, drafter in self._drafters.items()}

    def mean_context(self) -> float:
        return self._prompt + self._output / 2

    def longest_context(self) -> int:
        return self._prompt + self._output

    def request(self, number: int) -> RequestTrace:
        return self._requests(number)

    def _draw_request(self, number: int) -> RequestTrace:
        rng = np.random.default_rng((self._seed, number))
        quantile = (self._first + number * _GOLDEN) % 1.0
        request = NormalDist().inv_cdf(min(1 - 1e-9, max(1e-9, quantile)))
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


class _Quadrature(NamedTuple):
    """Values of a normal variable and their weights, which sum to 1."""

    values: _Floats
    weights: _Floats

    @classmethod
    def of(cls, sd: float, nodes: int) -> _Quadrature:
        """With that standard deviation, by Gauss and Hermite."""
        values, weights = np.polynomial.hermite_e.hermegauss(nodes)
        return cls(sd * values, weights / weights.sum())


@lru_cache(maxsize=32)
def _mean_log_odds(drafter: SyntheticDrafter) -> _Floats:
    """Mean log-odds by depth with which every fixed depth d yields 1 + S_1 + ... + S_d tokens per round.

    A request whose drafts survive with s_1, s_2, ... takes 1 / t rounds a token, t = 1 + s_1 + ... + s_d; so over
    rounds, in which hard requests weigh more, the mean is 1 / E[1 / t]. Its mean log-odds are solved depth by depth.
    (A curve whose rates stay at 1 after the first depth cannot be had from unequal requests; it comes out lower.)
    """
    requests, rounds = (
        _Quadrature.of(sd, nodes)
        for sd, nodes in ((drafter.request_sd, _REQUEST_NODES), (drafter.round_sd, _ROUND_NODES))
    )
    tokens = _Quadrature.of(drafter.token_sd, _TOKEN_NODES)
    at = np.arange(-2 * _MAX_LOG_ODDS, 2 * _MAX_LOG_ODDS, _TABLE_STEP)
    rates = _sigmoid(at[:, None] + tokens.values).clip(0, 1) @ tokens.weights  # over tokens, by log-odds before them
    common = requests.values[:, None] + rounds.values  # [requests, rounds]
    reached = np.broadcast_to(rounds.weights, common.shape)
    expected, means = np.ones(_REQUEST_NODES), []  # tokens per round of each request
    for depth in range(1, len(drafter.survival) + 1):
        target = tokens_per_round(drafter.survival, depth)
        low, high = -_MAX_LOG_ODDS, _MAX_LOG_ODDS
        for _ in range(40):
            middle = (low + high) / 2
            survival = (reached * np.interp(middle + common, at, rates)).sum(axis=1)
            mean = 1 / float(requests.weights @ (1 / (expected + survival)))
            low, high = (middle, high) if mean < target else (low, middle)
        means.append((low + high) / 2)
        reached = reached * np.interp(means[-1] + common, at, rates)
        expected = expected + reached.sum(axis=1)
    return np.array(means)
