"""Compares the token ids and finish reasons of answers with those of plain decoding.

The plain answers come from an engine that serves one request at a time with nothing cached; the others from engines
under conditions that must not change a text: drafters, other requests in the batch, preemption, cached prefixes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from wager.types import Completion, OutputDelta, Request, Stats

OnDelta = Callable[[OutputDelta], None]


class SteppingEngine(Protocol):
    """The methods of an engine that `answers` calls."""

    def add(self, request: Request) -> None: ...

    def step(self) -> list[OutputDelta]: ...

    @property
    def busy(self) -> bool: ...

    def preempt_all(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Condition:
    """How requests are served. `concurrency`: how many run at once; `preempt_every`: tokens emitted between forced
    preemptions, of which the first comes with the first token (None: none are forced); `warm`: every prefix was cached
    before."""

    name: str
    concurrency: int
    preempt_every: int | None = None
    warm: bool = False


ALONE = Condition("alone", concurrency=1)
"""For an engine without a prefix cache."""


def conditions(concurrency: int) -> dict[str, Condition]:
    """All conditions by name. The ones after `alone` are for one engine with a prefix cache, in this order: from the
    second on, every prefix is cached."""
    return {
        "alone": ALONE,
        "preempted": Condition("together, preempted", concurrency, preempt_every=16),
        "warm-alone": Condition("alone, warm prefix", 1, warm=True),
        "warm-together": Condition("together, warm prefix", concurrency, warm=True),
    }


CONDITIONS = tuple(conditions(1))
"""Names of all conditions, as they are chosen."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a text differs from the plain one; a token is None where one text has already ended, and
    both are where only the finish reasons differ."""

    prompt: str
    position: int
    plain: int | None
    speculative: int | None
    error: str = ""
    plain_finish_reason: str = ""
    finish_reason: str = ""


@dataclass(frozen=True, slots=True)
class TokenComparison:
    """One sampling mode, drafter and condition: how many token ids and finish reasons (one per answer) were compared
    and how many differ.

    Preemptions, cached tokens, guesses and failures of drafters show that the condition really occurred; `notes` say
    what did not, and why.
    """

    mode: str
    drafter: str
    condition: str
    tokens: int
    differing: int
    first: Difference | None
    preemptions: int
    prefix_hit_tokens: int
    drafted: int
    accepted: int
    rounds: int
    answers: int
    finish_reasons_differing: int
    failures: int
    notes: tuple[str, ...]


def answers(
    engine: SteppingEngine, requests: Sequence[Request], condition: Condition, *, on_delta: OnDelta | None = None
) -> dict[str, Completion]:
    """Serve the requests under a condition; answers by request id. A failed request's answer carries its error."""
    waiting, running = deque(requests), 0
    due = 1  # tokens until the next forced preemption: also a text of few tokens is preempted
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    done: dict[str, Completion] = {}
    while waiting or engine.busy:
        while waiting and running < condition.concurrency:
            engine.add(waiting.popleft())
            running += 1
        for delta in engine.step():
            tokens[delta.request_id] += delta.token_ids
            due -= len(delta.token_ids)
            if delta.finish_reason:
                running -= 1
                ids = tuple(tokens[delta.request_id])
                done[delta.request_id] = Completion(
                    delta.request_id,
                    delta.index,
                    ids,
                    "",
                    delta.finish_reason,
                    delta.stats or Stats(prompt_tokens=0, completion_tokens=len(ids), seed=0),
                    error=delta.error,
                    error_status=delta.error_status,
                )
            if on_delta:
                on_delta(delta)
        if condition.preempt_every and running and due <= 0:
            engine.preempt_all()
            due = condition.preempt_every
    return done


def compare_answers(
    plain: Mapping[str, Completion],
    tried: Mapping[str, Completion],
    *,
    mode: str,
    drafter: str,
    condition: Condition,
    failures: int = 0,
) -> TokenComparison:
    """Compare answers by request id; `tried` has an answer to every plain one. `failures`: drafters that were switched
    off meanwhile."""
    differences = [_difference(prompt, answer, tried[prompt]) for prompt, answer in plain.items()]
    stats = [answer.stats for answer in tried.values()]
    return TokenComparison(
        mode=mode,
        drafter=drafter,
        condition=condition.name,
        tokens=sum(len(answer.token_ids) for answer in plain.values()),
        differing=sum(count for count, _ in differences),
        first=next((first for _, first in differences if first), None),
        preemptions=sum(s.preemptions for s in stats),
        prefix_hit_tokens=sum(s.cached_tokens for s in stats),
        drafted=sum(s.drafted for s in stats),
        accepted=sum(s.accepted for s in stats),
        rounds=sum(s.rounds for s in stats),
        answers=len(plain),
        finish_reasons_differing=sum(plain[prompt].finish_reason != tried[prompt].finish_reason for prompt in plain),
        failures=failures,
        notes=tuple(_notes(drafter, condition, stats)),
    )


def _notes(drafter: str, condition: Condition, stats: Sequence[Stats]) -> Iterator[str]:
    """What the trial was to show and cannot, since it did not happen: a guess, a neighbour, a preemption."""
    if drafter != "none" and not any(s.drafted for s in stats):
        yield "no guess was made, so this trial shows nothing of its drafter"
    if condition.concurrency > 1 and len(stats) == 1:
        yield "one prompt, so nothing ran beside it"
    if condition.preempt_every and not any(s.preemptions for s in stats):
        if all(s.rounds <= 1 for s in stats):
            yield "no preemption: every text ended in the step of its first token"
        else:
            yield "no preemption: no request was running when one was due"
    if condition.warm and not any(s.cached_tokens for s in stats):
        yield "no prefix cached: prompts are shorter than a block, or the cache is too small to keep them"


def _difference(prompt: str, plain: Completion, tried: Completion) -> tuple[int, Difference | None]:
    """How many token ids differ, and the first difference, of ids or of finish reasons; a failed request differs even
    if its tokens agree so far."""
    length = max(len(plain.token_ids), len(tried.token_ids))
    a, b = (tuple(c.token_ids) + (None,) * (length - len(c.token_ids)) for c in (plain, tried))
    positions = [i for i in range(length) if a[i] != b[i]]
    failed = tried.finish_reason == "error"
    if not positions and plain.finish_reason == tried.finish_reason and not failed:
        return 0, None
    at, first = (positions[0], (a[positions[0]], b[positions[0]])) if positions else (length, (None, None))
    error = tried.error if failed else ""
    return len(positions) or int(failed), Difference(
        prompt, at, *first, error, plain.finish_reason, tried.finish_reason
    )
