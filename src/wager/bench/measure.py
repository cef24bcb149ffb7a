"""Runs the same requests through one or several engines, in turns, and records the time of each answer.

Engines that are compared take turns prompt by prompt (or pass by pass when requests run together), and the one that
begins alternates, so that changes of the machine's speed affect all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Protocol

from wager.errors import RequestError
from wager.trace import Trace
from wager.types import Completion, OutputDelta, Request, StepRecord

OnDelta = Callable[[OutputDelta], None]


class GeneratingEngine(Protocol):
    """The methods of an engine that `measure` calls."""

    def generate(
        self, requests: Sequence[Request], *, concurrency: int | None = None, on_output: OnDelta | None = None
    ) -> list[Completion]: ...

    def forget_requests(self) -> None: ...


@dataclass(slots=True)
class DecodeSteps:
    """Sums over the steps in which `sequences` requests decode and no prompt is computed, as `wager plan` assumes."""

    sequences: int
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, record: StepRecord) -> None:
        """Count a step if it is such a one."""
        if record.sequences == self.sequences and record.decodes_only:
            self.steps += 1
            self.tokens += record.emitted
            self.seconds += sum(record.seconds.values())

    @property
    def rate(self) -> float | None:
        """Tokens a second of all requests together; None without such a step."""
        return self.tokens / self.seconds if self.seconds else None

    def as_dict(self) -> dict[str, float | None]:
        return {
            "sequences": self.sequences,
            "steps": self.steps,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tok_s": self.rate,
        }


@dataclass(slots=True)
class Measurement:
    """One engine's answers to each request, one per pass, and the wall seconds of each pass."""

    answers: list[list[Completion]]
    walls: list[float] = field(default_factory=list)

    def answer(self, index: int) -> Completion:
        """The first pass's answer to request `index`, with the median times of all passes."""
        answers = self.answers[index]
        stats = replace(
            answers[0].stats,
            prefill_s=median(a.stats.prefill_s for a in answers),
            decode_s=median(a.stats.decode_s for a in answers),
        )
        return replace(answers[0], stats=stats)

    @property
    def wall_s(self) -> float:
        return median(self.walls)


def measure(
    engines: Mapping[str, GeneratingEngine],
    requests: Sequence[Request],
    *,
    concurrency: int = 1,
    repeats: int = 1,
    on_output: OnDelta | None = None,
    clock: Callable[[], float] | None = None,
) -> dict[str, Measurement]:
    """Answer all requests with every engine, `repeats` times, in turns; one measurement per engine.

    One untimed short answer per engine comes first. Raises RequestError as soon as a request fails: no row is left out.
    """
    clock = clock or Trace().clock
    turns = [[index] for index in range(len(requests))] if concurrency == 1 else [list(range(len(requests)))]
    records = {name: Measurement([[] for _ in requests]) for name in engines}
    for engine in engines.values():
        _answer(engine, [short_request(requests[0])], concurrency=1, on_output=None)
    for repeat in range(repeats):
        for record in records.values():
            record.walls.append(0.0)
        for engine in engines.values():
            engine.forget_requests()  # or this pass would be guessed from the last one's answers
        for number, turn in enumerate(turns):
            order = list(engines)[:: 1 if (repeat + number) % 2 == 0 else -1]
            for name in order:
                begin = clock()
                batch = [requests[index] for index in turn]
                answers = _answer(engines[name], batch, concurrency=concurrency, on_output=on_output)
                records[name].walls[-1] += clock() - begin
                for index, answer in zip(turn, answers, strict=True):
                    records[name].answers[index].append(answer)
    return records


def short_request(request: Request) -> Request:
    return replace(request, params=replace(request.params, max_tokens=min(8, request.params.max_tokens)))


def _answer(
    engine: GeneratingEngine, requests: Sequence[Request], *, concurrency: int, on_output: OnDelta | None
) -> list[Completion]:
    answers = engine.generate(requests, concurrency=concurrency, on_output=on_output)
    for answer in answers:
        if answer.finish_reason in ("error", "abort"):
            cause = answer.error or answer.finish_reason
            raise RequestError(
                f"Prompt {answer.request_id!r} failed: {cause}",
                "Leave the prompt out.",
            )
    return answers
