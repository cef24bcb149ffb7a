"""What the simulation serves: for every position of a request's answer, what each drafter would draft there and how
much of it would match. Recorded along real answers here, synthetic in synthetic.py; in both cases known in advance, so
that every policy is given the same requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wager.errors import UsageError


@dataclass(frozen=True, slots=True)
class DraftTrace:
    """One drafter along one answer. At output position i it would draft `num_drafted[i]` tokens, of which the first
    `num_matching[i]` are those of the answer, with survival estimates `scores[i]` (None: it gives none)."""

    num_drafted: NDArray[np.int16]  # [positions]
    num_matching: NDArray[np.int16]  # [positions]
    scores: NDArray[np.float32] | None  # [positions, depth]


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """One request: the lengths of its prompt and answer, and what each drafter would draft along the answer."""

    prompt_tokens: int
    output_tokens: int
    drafts: Mapping[str, DraftTrace]


class TraceSource(Protocol):
    """Requests by number; the same number always gives the same request."""

    def request(self, number: int) -> RequestTrace:
        """Request `number`, from 0."""

    def max_depths(self) -> Mapping[str, int]:
        """The drafters by name, and how deep each drafts."""


class RecordedTraces:
    """The requests of a trace file, over and over.

    A trace has a JSON row per answer: {"id", "prompt_tokens", "tokens", "drafters": {NAME: {"right": [...], "scores":
    [[...], ...]}}}. For every answer position, `right` counts the draft tokens that match the answer from there on, and
    `scores` holds the survival estimate of each token drafted there, as many as were drafted; both of the requested
    depth.
    """

    def __init__(self, requests: Sequence[RequestTrace]) -> None:
        if not requests:
            raise UsageError("The trace has no answers.", "Record at least one.")
        self._requests = list(requests)

    @classmethod
    def read(cls, path: Path) -> RecordedTraces:
        """From a file. UsageError names the file and the first line that is not valid."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            hint = "Give a JSON-lines file in UTF-8."
            raise UsageError(f"The trace {path} cannot be read: {error}.", hint) from error
        requests = []
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    requests.append(_parse(json.loads(line)))
                except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
                    raise UsageError(f"Line {number} of the trace {path} is not an answer: {error!r}.") from error
        names = {frozenset(request.drafts) for request in requests}
        if len(names) > 1 or frozenset() in names:
            raise UsageError(
                f"The answers of the trace {path} have different drafters, or none.",
                "Record every answer with the same ones.",
            )
        return cls(requests)

    def max_depths(self) -> Mapping[str, int]:
        depths: dict[str, int] = {}
        for request in self._requests:
            for name, draft in request.drafts.items():
                depths[name] = max(depths.get(name, 0), int(draft.num_drafted.max(initial=0)))
        return depths

    def request(self, number: int) -> RequestTrace:
        return self._requests[number % len(self._requests)]

    def __len__(self) -> int:
        return len(self._requests)


def _parse(row: Mapping[str, Any]) -> RequestTrace:
    output = int(row["tokens"])
    if output < 1:
        raise ValueError(f"it has {output} tokens")
    drafts = {str(name): _parse_draft(name, values, output) for name, values in row["drafters"].items()}
    return RequestTrace(max(1, int(row["prompt_tokens"])), output, drafts)


def _parse_draft(name: str, values: Mapping[str, Any], output: int) -> DraftTrace:
    matching = np.array(values["right"], dtype=np.int16)
    drafted = np.array([len(scores) for scores in values["scores"]], dtype=np.int16)
    if len(matching) != output or len(drafted) != output:
        raise ValueError(f"{name} has {len(matching)} positions of {output}")
    if (matching < 0).any() or (matching > drafted).any():
        raise ValueError(f"{name} has more matching tokens than drafted ones")
    scores = np.zeros((output, int(drafted.max(initial=0))), np.float32)
    for position, row in enumerate(values["scores"]):
        scores[position, : len(row)] = row
    if not ((scores >= 0) & (scores <= 1)).all():
        raise ValueError(f"{name} has scores outside 0 to 1")
    return DraftTrace(drafted, matching, scores)
