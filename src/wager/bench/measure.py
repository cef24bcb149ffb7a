"""Runs the same requests through one or several engines, in turns, and records the time of each answer.

Engines that are compared take turns prompt by prompt (or pass by pass when requests run together), and the one that
begins alternates, so that changes of the machine's speed affect all of them alike.

Rates: `decode_tok_s` is tokens after each answer's first over the seconds from that one to the last, `e2e_tok_s`
tokens over wall seconds, prefill included. Requests that run at once overlap: then the first is the speed of one answer
and the second that of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Protocol

from wager.errors import RequestError
from wager.prompts import Prompt
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
        return {**asdict(self), "tok_s": self.rate}


@dataclass(slots=True)
class Measurement:
    """One engine's answers to each request, one per pass, and the wall seconds of each pass."""

    answers: list[list[Completion]]
    walls: list[float] = field(default_factory=list)

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
            raise RequestError(f"Prompt {answer.request_id!r} failed: {cause}", "Leave the prompt out.")
    return answers


Row = dict[str, Any]

SLOWER = 0.95
"""A prompt counts as slower if its decoding speed is below this share of the plain one."""


def rows(prompts: Sequence[Prompt], record: Measurement) -> list[Row]:
    """One row per prompt; times are medians over the passes, the other values are those of the first pass."""
    return [
        {
            "id": prompt.id,
            "category": prompt.category,
            "prompt_tokens": answers[0].stats.prompt_tokens,
            "tokens": answers[0].stats.completion_tokens,
            "token_ids": list(answers[0].token_ids),
            "text": answers[0].text,
            "prefill_s": median(answer.stats.prefill_s for answer in answers),
            "decode_s": median(answer.stats.decode_s for answer in answers),
            **{name: getattr(answers[0].stats, name) for name in ("rounds", "drafted", "accepted", "drafter")},
        }
        for prompt, answers in zip(prompts, record.answers, strict=True)
    ]


def summary(rows: Sequence[Row], *, wall_s: float) -> dict[str, Any]:
    """Rates of all rows and of each family; in the families, end to end is per request (prefill + decoding)."""
    families = {family: [row for row in rows if row["category"] == family] for family in _families(rows)}
    per_category = {family: {"prompts": len(group), **_rates(group)} for family, group in families.items()}
    return {**_rates(rows, wall_s=wall_s), "wall_s": wall_s, "per_category": per_category}


def compare(plain: Sequence[Row], fast: Sequence[Row], *, plain_wall_s: float, wall_s: float) -> dict[str, Any]:
    """Speculation against plain decoding on the same prompts; every speed-up is plain seconds over speculative ones.

    `decode_speedup` and `e2e_speedup` are ratios of total seconds (over all prompts, end to end is wall time), the
    `median_*` ones medians of the prompts' own ratios, `slower` counts prompts whose decoding falls below SLOWER,
    `differing` those whose token ids differ.
    """
    pairs = list(zip(plain, fast, strict=True))
    per_category = {
        family: _ratios([pair for pair in pairs if pair[0]["category"] == family]) for family in _families(plain)
    }
    prompts = [
        {
            "id": a["id"],
            "category": a["category"],
            "decode_speedup": _ratio(a["decode_s"], b["decode_s"]),
            "e2e_speedup": _ratio(_seconds(a), _seconds(b)),
            "same": a["token_ids"] == b["token_ids"],
        }
        for a, b in pairs
    ]
    overall = {**_ratios(pairs), "e2e_speedup": _ratio(plain_wall_s, wall_s)}
    return {**overall, "per_category": per_category, "rows": prompts}


def _families(rows: Sequence[Row]) -> list[str]:
    return sorted({row["category"] for row in rows})


def _rates(rows: Sequence[Row], *, wall_s: float | None = None) -> dict[str, Any]:
    tokens, rounds = sum(row["tokens"] for row in rows), sum(row["rounds"] for row in rows)
    seconds = sum(map(_seconds, rows)) if wall_s is None else wall_s
    return {
        "decode_tok_s": _ratio(tokens - len(rows), sum(row["decode_s"] for row in rows)),
        "e2e_tok_s": _ratio(tokens, seconds),
        "mean_acceptance_length": _ratio(tokens, rounds),
        "tokens": tokens,
    }


def _ratios(pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    decode = [r for a, b in pairs if (r := _ratio(a["decode_s"], b["decode_s"])) is not None]
    end_to_end = [r for a, b in pairs if (r := _ratio(_seconds(a), _seconds(b))) is not None]
    return {
        "prompts": len(pairs),
        "decode_speedup": _ratio(sum(a["decode_s"] for a, _ in pairs), sum(b["decode_s"] for _, b in pairs)),
        "e2e_speedup": _ratio(sum(_seconds(a) for a, _ in pairs), sum(_seconds(b) for _, b in pairs)),
        "median_decode_speedup": median(decode) if decode else None,
        "median_e2e_speedup": median(end_to_end) if end_to_end else None,
        "slower": sum(ratio < SLOWER for ratio in decode),
        "differing": sum(a["token_ids"] != b["token_ids"] for a, b in pairs),
    }


def _seconds(row: Row) -> float:
    return float(row["prefill_s"] + row["decode_s"])


def _ratio(numerator: float, denominator: float) -> float | None:
    """None if the denominator is 0: an answer of one token has no decoding time."""
    return numerator / denominator if denominator > 0 else None
