"""The figures of a load test: rates, percentiles, goodput, failures, and what the client itself took.

A percentile is a value that occurred (nearest rank), not one interpolated between two. A request that timed out is in
the percentiles with the time that it had waited, as the least it can be: without it they would look the better the
more requests never ended. Other failures are counted, not timed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from wager.bench.load_answer import TimedAnswer
from wager.bench.load_client import LoadRun
from wager.bench.slo import ServiceLevel

PERCENTILES = (50, 90, 99)
GRID = (*range(101), 99.5, 99.9)
"""Percentiles that the distributions of a result hold, so that results can be plotted together."""

BINS = 200
"""The most points of a timeline."""

BUSY_CLIENT, LATE_CLIENT_S = 0.5, 0.02
"""From this share of a processor, or this 99th percentile of lateness, the client is part of what it measured."""


def percentiles(
    values: Sequence[float], points: Sequence[float], weights: Sequence[float] | None = None
) -> list[float]:
    """The smallest value that at least that share of all values (by weight) do not exceed; of at least one value."""
    order = np.argsort(np.asarray(values, np.float64), kind="stable")
    sorted_values = np.asarray(values, np.float64)[order]
    reached = np.cumsum(np.ones(len(order)) if weights is None else np.asarray(weights, np.float64)[order])
    places = np.searchsorted(reached, np.asarray(points) / 100 * reached[-1] * (1 - 1e-12))
    return [float(sorted_values[min(place, len(order) - 1)]) for place in places]


def spread_of(values: Sequence[float], weights: Sequence[float] | None = None) -> dict[str, Any]:
    """Mean, percentiles, maximum and count; None for each of no values."""
    if not len(values) or (weights is not None and not sum(weights)):
        return {"mean": None, **{f"p{point}": None for point in PERCENTILES}, "max": None, "count": 0}
    found = percentiles(values, PERCENTILES, weights)
    named = {f"p{point}": value for point, value in zip(PERCENTILES, found, strict=True)}
    mean = float(np.average(values, weights=weights))
    return {"mean": mean, **named, "max": float(max(values)), "count": len(values)}


class LoadFigures:
    """Computes them from a run, of a closed loop of `users` or, with None, of an open one."""

    def __init__(self, run: LoadRun, *, users: int | None, slo: ServiceLevel | None = None) -> None:
        self._run, self._users, self._slo = run, users, slo
        self._ok = [answer for answer in run.answers if answer.ok]
        timed_out = [answer for answer in run.answers if answer.outcome == "timeout"]
        waited = [answer.e2e for answer in timed_out]
        first = [answer.ttft if answer.ttft is not None else answer.e2e for answer in timed_out]
        gaps, chunk_tokens = _gaps([*self._ok, *timed_out])
        by_token = [gap / tokens for gap, tokens in zip(gaps, chunk_tokens, strict=True) if tokens > 0]
        weights = [tokens for tokens in chunk_tokens if tokens > 0]
        self._times: dict[str, tuple[list[float], list[float] | None]] = {
            "ttft_s": ([*_known(answer.ttft for answer in self._ok), *first], None),
            "itl_s": (gaps, None),
            "itl_token_s": (by_token, weights),
            "tpot_s": (_known(answer.tpot for answer in [*self._ok, *timed_out]), None),
            "e2e_s": ([*(answer.e2e for answer in self._ok), *waited], None),
        }

    def summary(self) -> dict[str, Any]:
        """Every figure by name; docs/bench-load.md says what each means."""
        run, ok = self._run, self._ok
        seconds = max(run.end - run.start, 1e-9)
        tokens, prompt_tokens = sum(answer.tokens for answer in ok), _total(answer.prompt_tokens for answer in ok)
        chunks = sum(len(answer.arrivals) for answer in ok)
        return {
            "requests": len(run.answers),
            "ok": len(ok),
            "failed": dict(Counter(answer.outcome for answer in run.answers if not answer.ok)),
            "failures": _failures(run.answers),
            "duration_s": seconds,
            "request_s": len(ok) / seconds,
            "output_tok_s": tokens / seconds,
            "steady_tok_s": self._steady_rate(),
            "total_tok_s": None if prompt_tokens is None else (tokens + prompt_tokens) / seconds,
            "tokens": tokens,
            "prompt_tokens": prompt_tokens,
            "cached_prompt_tokens": _total(answer.cached_tokens for answer in ok),
            "chunks": chunks,
            "tokens_per_chunk": tokens / chunks if chunks else None,
            "tokens_from": _source("usage", "chunks", [answer.completion_tokens is not None for answer in ok]),
            "chunk_tokens_from": _source("usage", "estimate", [answer.reported for answer in ok if answer.arrivals]),
            "finish_reasons": dict(Counter(answer.finish_reason or "none" for answer in ok)),
            **{name: spread_of(*values) for name, values in self._times.items()},
            "goodput": self._goodput(seconds),
            "client": self._client(),
        }

    def distributions(self) -> dict[str, list[float]]:
        """Each time at the percentiles of GRID; without those that nothing was measured of."""
        return {name: percentiles(values[0], GRID, values[1]) for name, values in self._times.items() if values[0]}

    def timeline(self) -> dict[str, Any]:
        """Tokens that arrived, and requests that were due and not over, in equal parts of the run."""
        run = self._run
        width = max(run.end - run.start, 1e-9) / BINS
        tokens, waiting = np.zeros(BINS), np.zeros(BINS)
        middles = run.start + (np.arange(BINS) + 0.5) * width
        for answer in run.answers:
            places = ((np.asarray(answer.arrivals) - run.start) / width).astype(int).clip(0, BINS - 1)
            np.add.at(tokens, places, np.asarray(answer.chunk_tokens))
            waiting += (answer.scheduled <= middles) & (middles < answer.ended)
        return {"bin_s": width, "tokens": tokens.round(3).tolist(), "requests": waiting.astype(int).tolist()}

    def _steady_rate(self) -> float | None:
        """Tokens that arrived a second while all users of a closed loop had a request in progress: until the last
        request was sent. None in the open loop, whose rate is that of the arrivals, and where users sent one request
        each."""
        run = self._run
        seconds = run.busy_until - run.start
        if self._users is None or len(run.answers) <= self._users or seconds <= 0:
            return None
        arrived = (
            tokens
            for answer in run.answers
            for time, tokens in zip(answer.arrivals, answer.chunk_tokens, strict=True)
            if time <= run.busy_until
        )
        return sum(arrived) / seconds

    def _goodput(self, seconds: float) -> dict[str, Any] | None:
        """Requests that kept every objective, and what the others missed; of all requests, failed ones too."""
        if self._slo is None:
            return None
        missed = {id(answer): self._slo.missed(answer) for answer in self._run.answers}
        good = [answer for answer in self._run.answers if not missed[id(answer)]]
        return {
            "slo": self._slo.as_dict(),
            "requests": len(good),
            "share": len(good) / len(missed) if missed else None,
            "request_s": len(good) / seconds,
            "tok_s": sum(answer.tokens for answer in good) / seconds,
            "missed": dict(Counter(name for names in missed.values() for name in names)),
        }

    def _client(self) -> dict[str, Any]:
        """What the client itself took. `send_delay_s` is by how much requests were sent later than they were due."""
        run = self._run
        chunks = sum(len(answer.arrivals) for answer in run.answers)
        lag = spread_of(run.lags)
        share = run.cpu_s / max(run.end - run.start, 1e-9)
        return {
            "cpu_s": run.cpu_s,
            "cpu_share": share,
            "cpu_us_per_chunk": 1e6 * run.cpu_s / chunks if chunks else None,
            "lag_s": lag,
            "send_delay_s": spread_of([a.sent - a.scheduled for a in run.answers if a.sent is not None]),
            "connections": run.connections,
            "late": bool(share > BUSY_CLIENT or (lag["p99"] or 0) > LATE_CLIENT_S),
        }


def rows(answers: Iterable[TimedAnswer], slo: ServiceLevel | None) -> list[dict[str, Any]]:
    """One row for each request, failed ones too."""
    return [
        {
            "number": answer.number,
            "id": answer.prompt_id,
            "category": answer.family,
            "outcome": answer.outcome,
            "message": answer.message,
            "prompt_tokens": answer.prompt_tokens,
            "tokens": answer.tokens,
            "chunks": len(answer.arrivals),
            "ttft_s": answer.ttft,
            "itl_max_s": max(answer.gaps, default=None),
            "tpot_s": answer.tpot,
            "e2e_s": answer.e2e,
            "send_delay_s": None if answer.sent is None else answer.sent - answer.scheduled,
            "missed": slo.missed(answer) if slo else [],
            "finish_reason": answer.finish_reason,
            "text": answer.text,
        }
        for answer in answers
    ]


def _gaps(answers: Iterable[TimedAnswer]) -> tuple[list[float], list[float]]:
    """Seconds between chunks, and the tokens of the later chunk of each."""
    gaps: list[float] = []
    tokens: list[float] = []
    for answer in answers:
        gaps += answer.gaps
        tokens += answer.chunk_tokens[1:]
    return gaps, tokens


def _failures(answers: Iterable[TimedAnswer]) -> list[dict[str, Any]]:
    """Each kind and message of failure, how often it came, the most frequent first."""
    counted = Counter((answer.outcome, answer.message) for answer in answers if not answer.ok)
    return [{"kind": kind, "message": text, "count": n} for (kind, text), n in counted.most_common(20)]


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _total(values: Iterable[int | None]) -> int | None:
    """The sum of what is known; None if nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _source(name: str, otherwise: str, flags: Sequence[bool]) -> str:
    return name if all(flags) else "mixed" if any(flags) else otherwise
