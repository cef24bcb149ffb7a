"""The flags of `wager replay`, and how requests arrive by them: users, a rate, a day, recorded arrivals."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wager.economics.options import parse_seconds
from wager.errors import UsageError
from wager.inputs import expand_path
from wager.simulation.synthetic import SyntheticTraces
from wager.simulation.traces import RecordedTraces, TraceSource, read_arrivals
from wager.simulation.workload import DailyLoad, Workload

DEFAULT_CONCURRENCY = "1,4,16,64,256"
DEFAULT_PROMPT, DEFAULT_OUTPUT = 1, 1024

_MAX_BYTES = 8e9  # of synthetic requests that run at once
_MAX_REQUESTS = 20_000  # of a day


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The flags of the command, unparsed."""

    trace: Path | None
    concurrency: str | None
    rate: str | None
    load: tuple[str, ...]
    curves: tuple[str, ...]
    model: str | None
    hardware: str | None
    shape: tuple[str, ...]
    max_depth: int | None
    tp: int
    ep: int
    locality: float | None
    popularity: Path | None
    precision: str | None
    cache: str | None
    overhead: str
    objective: str
    policy_time: str
    prompt: int | None
    output: int | None
    rounds: int
    seed: int
    draft_async: bool = False
    hit_rate: float | None = None
    drafter_hardware: str | None = None
    drafter_link: str | None = None


def workloads(traces: TraceSource, options: ReplayOptions) -> list[Workload]:
    """Synthetic requests run for a number of rounds; of a trace every answer is served to its end."""
    kinds = {"concurrency": options.concurrency, "rate": options.rate, "load": options.load or None}
    given = [flag for flag, value in kinds.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]} are two kinds of workload.", "Give one of them.")
    answers = len(traces) if isinstance(traces, RecordedTraces) else 0
    arrivals = traces.arrivals if isinstance(traces, RecordedTraces) else None
    rounds, seed = options.rounds, options.seed
    requests = answers or max(100, 3 * rounds // (options.output or DEFAULT_OUTPUT))
    if options.rate is not None:
        return [Workload(rate=rate, requests=requests, seed=seed) for rate in _numbers("rate", options.rate)]
    loads = options.load or (("recorded",) if arrivals and options.concurrency is None else ())
    if loads:
        return [_load(word, arrivals, requests=requests, seed=seed) for word in loads]
    words = DEFAULT_CONCURRENCY if options.concurrency is None else options.concurrency
    users = [int(number) for number in _numbers("concurrency", words)]
    closed = [
        Workload(
            concurrency=count,
            requests=max(answers, 4 * count) if answers else None,
            rounds=max(rounds, 60 * count),
            seed=seed,
        )
        for count in users
    ]
    if isinstance(traces, SyntheticTraces) and max(users) * traces.request_bytes > _MAX_BYTES:
        cause = f"{max(users)} requests of that length take {max(users) * traces.request_bytes / 1e9:.0f} GB to draw."
        raise UsageError(cause, "Give a smaller --concurrency or --output.")
    return closed


def _load(word: str, arrivals: tuple[float, ...] | None, *, requests: int, seed: int) -> Workload:
    """day:PEAK[:LOW[:LENGTH]], `recorded` (the trace's own arrivals), or a file of arrivals."""
    if word == "recorded":
        if arrivals is None:
            raise UsageError("There are no recorded arrivals.", 'Give a trace whose rows have an "arrival" in seconds.')
        return Workload(arrivals=arrivals, seed=seed)
    if word != "day" and not word.startswith("day:"):
        return Workload(arrivals=read_arrivals(expand_path(word)), seed=seed)
    _, *parts = word.split(":")
    if not 1 <= len(parts) <= 3:
        raise UsageError(f"load = {word!r} is not known.", "Write day:PEAK[:LOW[:LENGTH]], as day:40:5:600s.")
    peak = _day_rate(word, parts[0], zero=False)
    low = peak / 10 if len(parts) < 2 else _day_rate(word, parts[1], zero=True)
    mean = (peak + low) / 2
    if len(parts) < 3:
        return Workload(day=DailyLoad(peak, low, requests / mean), requests=requests, seed=seed)
    length = parse_seconds("load", parts[2])
    if mean * length > _MAX_REQUESTS:
        cause = f"load = {word!r} is {mean * length:.3g} requests a day, more than {_MAX_REQUESTS}."
        raise UsageError(cause, "Give a shorter day; without a length it is as long as the requests last.")
    return Workload(day=DailyLoad(peak, low, length), requests=max(1, round(mean * length)), seed=seed)


def _day_rate(load: str, text: str, *, zero: bool) -> float:
    """One rate of day:PEAK[:LOW[:LENGTH]], in requests a second; `zero`: whether it may be 0."""
    rate = float(text) if is_number(text) else -1.0
    if not 0 <= rate < float("inf") or (rate == 0 and not zero):
        cause = f"load = {load!r}: {text!r} is not a rate in requests a second."
        raise UsageError(cause, "Write day:PEAK[:LOW[:LENGTH]], as day:40:5:600s.")
    return rate


def _numbers(name: str, text: str) -> list[float]:
    numbers = []
    for word in text.split(","):
        number = float(word) if is_number(word) else -1.0
        if not 0 < number < float("inf") or (name == "concurrency" and number != int(number)):
            kind = "whole numbers" if name == "concurrency" else "numbers"
            raise UsageError(
                f"{name} = {word.strip()!r} is out of range.", f"Write --{name} 1,4,16 with {kind} above 0."
            )
        numbers.append(number)
    return list(dict.fromkeys(numbers))


def is_number(word: str) -> bool:
    """Whether it can be read as one (nan and inf too)."""
    try:
        float(word)
    except ValueError:
        return False
    return True
