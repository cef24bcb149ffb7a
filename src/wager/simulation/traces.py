"""What the simulation serves: for every position of a request's answer, what each drafter would draft there and how
much of it would match. Recorded along real answers here, synthetic in synthetic.py; in both cases known in advance, so
that every policy is given the same requests. Files are checked line by line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wager.errors import UsageError
from wager.inputs import read_text

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
    depth. Rows may have an "arrival" in seconds, all or none; they are served in its order.
    """

    def __init__(self, requests: Sequence[RequestTrace]) -> None:
        if not requests:
            raise UsageError("The trace has no answers.", "Record at least one.")
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
        """When the answers' requests arrived, if that was recorded."""
        times = [request.arrival for request in self._requests if request.arrival is not None]
        return tuple(times) or None

    def __len__(self) -> int:
        return len(self._requests)


def read_arrivals(path: Path) -> tuple[float, ...]:
    """Arrival times from a file: seconds, one a line, or a JSON list of them. UsageError names a wrong line."""
    hint = "Give a text file with an arrival in seconds on every line, or a JSON list of seconds."
    text = read_text(path, "file of arrivals", hint).strip()
    times = []
    try:
        words = _json(text) if text.startswith("[") else [_json(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise UsageError(f"{path} holds no arrivals: {error}.", hint) from error
    for number, word in enumerate(words, 1):
        try:
            times.append(_seconds(word))
        except ValueError as error:
            raise UsageError(f"Arrival {number} of {path} is wrong: {error}.", hint) from error
    if not times:
        raise UsageError(f"{path} holds no arrivals.", hint)
    return tuple(sorted(times))


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
    return RequestTrace(prompt, output, drafts, None if row.get("arrival") is None else _seconds(row["arrival"]))


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


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf or value > 1e12:
        raise ValueError(f"{_short(value)} is not a time in seconds from 0 on")
    return float(value)


def _short(value: Any) -> str:
    """In a message, of any length."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
