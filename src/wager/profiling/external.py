"""Step times of engines other than this program's own: read from a table, or measured at a server from outside.

A server's step is not seen, only when its chunks arrive. So many requests are asked for at once, and the time that
counts is that in which all of them decode: none computes a prompt, and each chunk is a step. How many tokens the step
verified follows from what the server counts of its speculation.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from wager.bench.load import LoadRun, OpenAIServer, run_load
from wager.economics.surface import StepPoint
from wager.errors import UsageError, WagerError
from wager.inputs import shown
from wager.profiling.calibrate import ProgressReport, typical_steps
from wager.prompts import Prompt, read_rows
from wager.trace import Clock

# ---- a table --------------------------------------------------------------------------------------------------------

_MOST_STEPS = 10_000
_COLUMNS: Mapping[str, tuple[str, float, float]] = {
    "rows": ("a whole number", 1, 1e6),
    "context": ("a number", 0, 1e8),
    "batch": ("a whole number", 1, 1e6),
    "seconds": ("a number", 1e-7, 3600),
}
"""What a column holds, and the least and the most that it may be."""

_TABLE_HINT = (
    "A CSV file has a line of names, rows,context,batch,seconds, and one line for each step; a JSON file has "
    "objects with these keys, a list or one a line (docs/calibrate.md)."
)


def read_table(path: Path) -> tuple[list[StepPoint], list[str]]:
    """The steps of a table, of each shape (contexts within some 10 %) their median, and the names of columns that are
    not used. UsageError names the line and the column of the first value that is missing or out of range."""
    found = [(where, row) for where, _, row in read_rows(path, "table", _TABLE_HINT)]
    if not 0 < len(found) <= _MOST_STEPS:
        raise UsageError(f"{path} has {len(found)} steps.", f"Give 1 to {_MOST_STEPS}, such as one of every shape.")
    shapes: dict[tuple[int, int, int], list[StepPoint]] = {}
    for where, row in found:
        step = _table_point(row, where)
        near = round(10 * math.log1p(step.context_sum / step.requests))
        shapes.setdefault((step.rows, step.requests, near), []).append(step)
    # A step that was the first of its shape, or timed wrongly, is off by many times what others scatter.
    points = [
        StepPoint(rows, requests, round(median(s.context_sum for s in steps)), median(s.seconds for s in steps))
        for (rows, requests, _), steps in shapes.items()
    ]
    return points, sorted({*found[0][1]} - {*_COLUMNS})


def _table_point(row: Any, where: str) -> StepPoint:
    if not isinstance(row, dict):
        raise UsageError(f"{where} is not an object.", _TABLE_HINT)
    if missing := [name for name in _COLUMNS if name not in row]:
        columns = shown(", ".join(row), length=200)
        raise UsageError(f"{where} has no {missing[0]}; its columns are {columns}.", _TABLE_HINT)
    numbers = {name: _number(row.get(name), name, where) for name in _COLUMNS}
    rows, batch = round(numbers["rows"]), round(numbers["batch"])
    if rows < batch:
        raise UsageError(
            f"{where}, column rows: {rows} is less than the batch of {batch}.",
            "Rows are the tokens of all sequences together: one of each at least.",
        )
    return StepPoint(rows, batch, round(batch * numbers["context"]), numbers["seconds"])


def _number(value: Any, name: str, where: str) -> float:
    kind, least, most = _COLUMNS[name]
    try:
        number = float("nan" if isinstance(value, bool | None) else value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not least <= number <= most or (kind == "a whole number" and number != int(number)):
        said = "nothing" if value is None else shown(str(value))
        raise UsageError(f"{where}, column {name}: {said} is not {kind} from {least:g} to {most:g}.", _TABLE_HINT)
    return number


# ---- a server -------------------------------------------------------------------------------------------------------

_NOUNS = ("house", "river", "garden", "train", "city", "book")
_WORDS = [f"{size} {noun}" for size in ("big", "red", "old") for noun in _NOUNS]
_PERIOD = 6
"""Pairs of words after which a prompt repeats, so that drafters which look up texts find continuations."""

_FEWEST_STEPS = 12
"""Steps in which all requests decode that make a measurement; with fewer, longer answers are asked for."""
_TOKENS, _MOST_TOKENS = 32, 1024
"""Tokens of an answer at first and at most."""
_MERGED = 1.1
"""More tokens a chunk than this are guesses or several steps in a chunk; fewer are a text's odd ends."""


@dataclass(frozen=True, slots=True)
class ServedShape:
    """Requests at once, tokens of each prompt (about), and how deep drafts are asked for; None where the server is as
    it was started."""

    users: int
    prompt: int
    depth: int | None

    def prompts(self) -> list[Prompt]:
        """Periodic texts, no two of which begin alike, the same in every run: from the second on they are cached."""
        texts = []
        for user in range(self.users):
            words = " ".join(random.Random(f"{user} {self.prompt}").sample(_WORDS, _PERIOD)).split()
            texts.append(" ".join(words[at % len(words)] for at in range(max(1, self.prompt))))
        return [Prompt(user, "", text) for user, text in enumerate(texts)]


@dataclass(slots=True)
class ServedSteps:
    """What a server's chunks showed: typical steps, and `chunks` and `tokens` of all answers; `missed` says of shapes
    that could not be measured why."""

    points: list[StepPoint] = field(default_factory=list)
    missed: dict[ServedShape, str] = field(default_factory=dict)
    chunks: int = 0
    tokens: int = 0


def measure_server(
    server: OpenAIServer,
    shapes: Sequence[ServedShape],
    *,
    seconds: float,
    timeout: float,
    clock: Clock,
    counted: bool = False,
    fields: Callable[[ServedShape], Mapping[str, Any]] = lambda _shape: {},
    report: ProgressReport = lambda _passed: None,
) -> ServedSteps:
    """Ask for answers of every shape at least once, then again in shuffled order until `seconds` have passed. `fields`
    are added to the requests of a shape; `counted`: the server counts draft tokens in /metrics, if only none.
    WagerError if the rows of a step cannot be told."""
    found, begun, rng = ServedSteps(), clock(), random.Random(0)
    samples: list[tuple[int, StepPoint]] = []
    tokens = dict.fromkeys(shapes, _TOKENS)
    left, again = rng.sample(shapes, len(shapes)), False
    while left and not (again and clock() - begun >= seconds):
        shape = left.pop()
        asked = server.with_fields(max_tokens=tokens[shape], **fields(shape))
        numbers = range(shape.users)
        run = run_load(asked, shape.prompts(), numbers=numbers, users=shape.users, timeout=timeout)
        found.chunks += sum(len(answer.arrivals) for answer in run.answers)
        found.tokens += sum(answer.tokens for answer in run.answers)
        point = _point_of(run, shape, counted=counted)
        if isinstance(point, StepPoint):
            samples.append((shapes.index(shape), point))
        elif tokens[shape] < _MOST_TOKENS and all(answer.ok for answer in run.answers):
            tokens[shape] *= 2
            left.append(shape)
        else:
            found.missed[shape] = point
        if not left:
            left, again = rng.sample(shapes, len(shapes)), True
            left = [shape for shape in left if shape not in found.missed]
        report(min(clock() - begun, seconds))
    if samples:
        typical = typical_steps(samples, fitted=range(len(shapes)))
        found.points = [typical[at] for at in sorted(typical)]
    return found


def _point_of(run: LoadRun, shape: ServedShape, *, counted: bool) -> StepPoint | str:
    """The mean step while all requests of a run decoded; in words why there is none."""
    answers = [answer for answer in run.answers if answer.ok]
    if len(answers) < shape.users:
        return next(answer.message for answer in run.answers if not answer.ok)
    begin = max((answer.arrivals[0] for answer in answers if answer.arrivals), default=0.0)
    end = min((answer.arrivals[-1] for answer in answers if answer.arrivals), default=0.0)
    inside = [[at for at in answer.arrivals if begin <= at <= end] for answer in answers]
    if min(len(times) for times in inside) <= _FEWEST_STEPS:
        return "its requests did not run at once for long enough"
    chunks = sum(len(answer.arrivals) - 1 for answer in answers)  # the first is the prompt's
    tokens = sum(answer.tokens - 1 for answer in answers)
    steps, drafted = _steps_of(run.counters, 0 if counted else shape.depth, chunks=chunks, tokens=tokens)
    spans = sum(times[-1] - times[0] for times in inside)
    seconds = spans / sum(len(times) - 1 for times in inside) * chunks / steps
    cached = 0.0
    for answer, times in zip(answers, inside, strict=True):
        middle = answer.arrivals.index(times[0]) + len(times) / 2
        cached += (answer.prompt_tokens or shape.prompt) + answer.tokens * middle / len(answer.arrivals)
    return StepPoint(round(shape.users * (1 + drafted / steps)), shape.users, round(cached), seconds)


def _steps_of(counters: Counter[str], depth: int | None, *, chunks: int, tokens: int) -> tuple[float, float]:
    """Steps of all requests and draft tokens in them. A step emits the tokens that it accepts and one more, whatever
    the chunks; but servers count tokens as accepted that an answer's end cuts off, and a chunk is a step at
    least. Where nothing is counted, each chunk is a step of `depth` draft tokens."""
    if counters["drafted"] or depth == 0 or (depth is None and tokens <= _MERGED * chunks):
        return max(chunks, tokens - counters["accepted"]), counters["drafted"]
    if depth:
        return chunks, chunks * depth
    raise WagerError(
        f"The server sends {tokens / chunks:.2f} tokens a chunk, and its /metrics count no draft tokens.",
        "Say how deep it speculates with --depth N; --depth 0 if it does not and merges chunks.",
    )
