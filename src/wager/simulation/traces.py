"""What the simulation serves: for every position of a request's answer, what each drafter would draft there and how
much of it would match. Recorded along real answers, or synthetic by a survival curve; in both cases known in advance,
so that every policy is given the same requests. Files are checked line by line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wager.economics.acceptance import tokens_per_round
from wager.errors import UsageError
from wager.inputs import read_text
from wager.prompts import arrival_seconds

MAX_DRAFTED = 256
"""Deepest draft of a trace."""

_MAX_PROMPT, _MAX_OUTPUT = 10_000_000, 1_000_000
_ROW = '{"prompt_tokens": 12, "tokens": 3, "drafters": {NAME: {"right": [1, 0, 0], "scores": [[0.9], [], []]}}}'


@dataclass(frozen=True, slots=True)
class DraftTrace:
    """One drafter along one answer. At output position i it would draft `num_drafted[i]` tokens, of which the first
    `num_matching[i]` are those of the answer, with survival estimates `scores[i]` (None: it gives none)."""

    num_drafted: NDArray[np.int16]  # [positions]
    num_matching: NDArray[np.int16]  # [positions]
    scores: NDArray[np.float32] | None  # [positions, depth]

    def truncate(self, depth: int) -> DraftTrace:
        """The same drafter, drafting at most that deep."""
        drafted, matching = (np.minimum(each, depth).astype(np.int16) for each in (self.num_drafted, self.num_matching))
        return DraftTrace(drafted, matching, None if self.scores is None else self.scores[:, :depth])

    def tokens_per_round(self, depth: int) -> float:
        """Mean over the answer's positions, of rounds of that depth, bonus token included."""
        return 1.0 + float(np.minimum(self.num_matching, depth).mean())


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """One request: the lengths of its prompt and answer, what each drafter would draft along the answer, and when it
    arrived, in seconds (None: not recorded)."""

    prompt_tokens: int
    output_tokens: int
    drafts: Mapping[str, DraftTrace]
    arrival: float | None = None


class TraceSource(Protocol):
    """Requests by number; the same number always gives the same request."""

    def request(self, number: int) -> RequestTrace:
        """Request `number`, from 0."""

    def max_depths(self) -> Mapping[str, int]:
        """The drafters by name, and how deep each drafts."""

    def mean_context(self) -> float:
        """Positions that a request has cached, averaged over its answer and over requests."""

    def longest_context(self) -> int:
        """Positions of the longest request with its answer."""


class RecordedTraces:
    """The requests of a trace file, over and over.

    A trace has a JSON row per answer: {"id", "prompt_tokens", "tokens", "drafters": {NAME: {"right": [...], "scores":
    [[...], ...]}}}. For every answer position, `right` counts the draft tokens that match the answer from there on, and
    `scores` holds the survival estimate of each token drafted there, as many as were drafted; both of the requested
    depth. Rows may have an "arrival", all or none, as in a log (docs/bench.md); they are served in its order.
    """

    def __init__(self, requests: Sequence[RequestTrace]) -> None:
        self._requests = list(requests)

    @classmethod
    def read(cls, path: Path) -> RecordedTraces:
        """From a file. UsageError names the file and the first line that is not valid."""
        lines = read_text(path, "trace", "Give a JSON-lines file in UTF-8.").split("\n")
        requests = []
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    requests.append(_parse(_json(line)))
                except ValueError as error:
                    cause = f"Line {number} of the trace {path} is not an answer: {error}."
                    raise UsageError(cause, f"A row is {_ROW}.") from error
        if not requests:
            raise UsageError(f"The trace {path} has no answers.", f"It has a row for each, as {_ROW}.")
        _check_alike(path, requests)
        return cls(sorted(requests, key=lambda request: request.arrival or 0.0))

    def max_depths(self) -> Mapping[str, int]:
        depths: dict[str, int] = {}
        for request in self._requests:
            for name, draft in request.drafts.items():
                depths[name] = max(depths.get(name, 0), int(draft.num_drafted.max(initial=0)))
        return depths

    def request(self, number: int) -> RequestTrace:
        return self._requests[number % len(self._requests)]

    def truncate(self, depths: Mapping[str, int]) -> RecordedTraces:
        """The same answers, each drafter at most as deep as given."""
        return RecordedTraces(
            [
                replace(request, drafts={name: draft.truncate(depths[name]) for name, draft in request.drafts.items()})
                for request in self._requests
            ]
        )

    def mean_context(self) -> float:
        tokens = sum([request.output_tokens for request in self._requests])
        cached = sum(
            [(request.prompt_tokens + request.output_tokens / 2) * request.output_tokens for request in self._requests]
        )
        return cached / tokens

    def longest_context(self) -> int:
        return max([request.prompt_tokens + request.output_tokens for request in self._requests])

    @property
    def arrivals(self) -> tuple[float, ...] | None:
        """When the answers' requests arrived, if that was recorded, in seconds from the first on."""
        times = [request.arrival for request in self._requests if request.arrival is not None]
        return tuple(time - times[0] for time in times) or None

    def __len__(self) -> int:
        return len(self._requests)


def _check_alike(path: Path, requests: Sequence[RequestTrace]) -> None:
    names = {frozenset(request.drafts) for request in requests}
    if len(names) > 1 or frozenset() in names:
        raise UsageError(
            f"The answers of the trace {path} have different drafters, or none.",
            "Record every answer with the same ones.",
        )
    if len({request.arrival is None for request in requests}) > 1:
        raise UsageError(
            f"Only some answers of the trace {path} have an arrival.", "Give every row its arrival in seconds, or none."
        )


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error.msg} at column {error.colno})") from error
    except (RecursionError, ValueError) as error:
        raise ValueError("it is not JSON that can be read") from error


def _parse(row: Any) -> RequestTrace:
    """ValueError, in words, if it is not an answer."""
    if not isinstance(row, dict):
        raise ValueError("it is not an object")
    missing = [key for key in ("prompt_tokens", "tokens", "drafters") if key not in row]
    if missing:
        raise ValueError(f"it has no {missing[0]!r}")
    prompt = _whole("prompt_tokens", row["prompt_tokens"], high=_MAX_PROMPT)
    output = _whole("tokens", row["tokens"], high=_MAX_OUTPUT)
    if not isinstance(row["drafters"], dict):
        raise ValueError("its drafters are not an object by name")
    drafts = {name: _parse_draft(name, values, output) for name, values in row["drafters"].items()}
    return RequestTrace(prompt, output, drafts, None if row.get("arrival") is None else arrival_seconds(row["arrival"]))


def _parse_draft(name: str, values: Any, output: int) -> DraftTrace:
    right, estimates = (values.get(key) if isinstance(values, dict) else None for key in ("right", "scores"))
    if not isinstance(right, list) or not isinstance(estimates, list):
        raise ValueError(f'drafter {name!r} has no lists "right" and "scores"')
    for key, positions in (("right", right), ("scores", estimates)):
        if len(positions) != output:
            raise ValueError(f"{key} of {name} has {len(positions)} positions, the answer has {output} tokens")
    for position, (count, scores) in enumerate(zip(right, estimates, strict=True)):
        where = f"at position {position} of {name}"
        _check_scores(scores, where)
        if type(count) is not int or not 0 <= count <= output - position:
            raise ValueError(f"{_short(count)} is no number of matching tokens {where}")
        if count > len(scores):
            raise ValueError(f"there are more matching tokens than drafted ones {where}: {count} of {len(scores)}")
    drafted = np.array([len(scores) for scores in estimates], dtype=np.int16)
    padded = np.zeros((output, int(drafted.max(initial=0))), np.float32)
    for position, scores in enumerate(estimates):
        padded[position, : len(scores)] = scores
    return DraftTrace(drafted, np.array(right, dtype=np.int16), padded)


def _check_scores(scores: Any, where: str) -> None:
    if not isinstance(scores, list) or len(scores) > MAX_DRAFTED:
        raise ValueError(f"there is no list of at most {MAX_DRAFTED} scores {where}")
    for score in scores:
        if type(score) not in (int, float) or not 0 <= score <= 1:
            raise ValueError(f"the score {_short(score)} is outside 0 to 1 {where}")
    if any(later > earlier for earlier, later in pairwise(scores)):
        raise ValueError(f"the scores rise with depth {where}; survival cannot")


def _whole(name: str, value: Any, *, high: int) -> int:
    if type(value) is not int or not 1 <= value <= high:
        raise ValueError(f"{name} = {_short(value)} is not a whole number from 1 to {high}")
    return value


def _short(value: Any) -> str:
    """In a message, of any length."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


# ---- synthetic requests ----------------------------------------------------------------------------------------------

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


def _normal(sd: float, nodes: int) -> tuple[_Floats, _Floats]:
    """Values of a normal variable and their weights, which sum to 1, by Gauss and Hermite."""
    values, weights = np.polynomial.hermite_e.hermegauss(nodes)
    return sd * values, weights / weights.sum()


@lru_cache(maxsize=32)
def _mean_log_odds(drafter: SyntheticDrafter) -> _Floats:
    """Mean log-odds by depth with which every fixed depth d yields 1 + S_1 + ... + S_d tokens per round.

    A request whose drafts survive with s_1, s_2, ... takes 1 / t rounds a token, t = 1 + s_1 + ... + s_d; so over
    rounds, in which hard requests weigh more, the mean is 1 / E[1 / t]. Its mean log-odds are solved depth by depth.
    (A curve whose rates stay at 1 after the first depth cannot be had from unequal requests; it comes out lower.)
    """
    requests, request_weights = _normal(drafter.request_sd, _REQUEST_NODES)
    rounds, round_weights = _normal(drafter.round_sd, _ROUND_NODES)
    tokens, token_weights = _normal(drafter.token_sd, _TOKEN_NODES)
    at = np.arange(-2 * _MAX_LOG_ODDS, 2 * _MAX_LOG_ODDS, _TABLE_STEP)
    rates = _sigmoid(at[:, None] + tokens).clip(0, 1) @ token_weights  # over tokens, by log-odds before them
    common = requests[:, None] + rounds  # [requests, rounds]
    reached = np.broadcast_to(round_weights, common.shape)
    expected, means = np.ones(_REQUEST_NODES), []  # tokens per round of each request
    for depth in range(1, len(drafter.survival) + 1):
        target = tokens_per_round(drafter.survival, depth)
        low, high = -_MAX_LOG_ODDS, _MAX_LOG_ODDS
        for _ in range(40):
            middle = (low + high) / 2
            survival = (reached * np.interp(middle + common, at, rates)).sum(axis=1)
            mean = 1 / float(request_weights @ (1 / (expected + survival)))
            low, high = (middle, high) if mean < target else (low, middle)
        means.append((low + high) / 2)
        reached = reached * np.interp(means[-1] + common, at, rates)
        expected = expected + reached.sum(axis=1)
    return np.array(means)
