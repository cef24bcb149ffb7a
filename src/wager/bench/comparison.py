"""Compares the token ids of answers with those of plain decoding.

The plain answers come from an engine that serves one request at a time with nothing cached; the others from engines
under conditions that must not change a text: drafters, other requests in the batch, preemption, cached prefixes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

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
    preemptions (None: none are forced)."""

    name: str
    concurrency: int
    preempt_every: int | None = None


ALONE = Condition("alone", concurrency=1)
"""For an engine without a prefix cache."""


def cached_conditions(concurrency: int) -> tuple[Condition, ...]:
    """Conditions for one engine with a prefix cache, in this order: from the second on, every prefix is cached."""
    return (
        Condition("together, preempted", concurrency, preempt_every=16),
        Condition("alone, warm prefix", 1),
        Condition("together, warm prefix", concurrency),
    )


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a text differs from the plain one; a token is None where one text has already ended."""

    prompt: str
    position: int
    plain: int | None
    speculative: int | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class TokenComparison:
    """One sampling mode, drafter and condition: how many token ids were compared and how many differ.

    Preemptions, cached tokens and guesses show that the condition really occurred.
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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def answers(
    engine: SteppingEngine, requests: Sequence[Request], condition: Condition, *, on_delta: OnDelta | None = None
) -> dict[str, Completion]:
    """Serve the requests under a condition; answers by request id. A failed request's answer carries its error."""
    waiting, running, since_preemption = deque(requests), 0, 0
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    done: dict[str, Completion] = {}
    while waiting or engine.busy:
        while waiting and running < condition.concurrency:
            engine.add(waiting.popleft())
            running += 1
        for delta in engine.step():
            tokens[delta.request_id] += delta.token_ids
            since_preemption += len(delta.token_ids)
            if delta.finish_reason:
                running -= 1
                done[delta.request_id] = _completion(delta, tokens[delta.request_id])
            if on_delta:
                on_delta(delta)
        if condition.preempt_every and since_preemption >= condition.preempt_every:
            engine.preempt_all()
            since_preemption = 0
    return done


def _completion(delta: OutputDelta, tokens: Sequence[int]) -> Completion:
    stats = delta.stats or Stats(prompt_tokens=0, completion_tokens=len(tokens), seed=0)
    return Completion(
        delta.request_id, delta.index, tuple(tokens), "", delta.finish_reason or "error", stats, error=delta.error
    )


def compare_answers(
    plain: Mapping[str, Completion], tried: Mapping[str, Completion], *, mode: str, drafter: str, condition: Condition
) -> TokenComparison:
    """Compare answers by request id; `tried` has an answer to every plain one."""
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
    )


def _difference(prompt: str, plain: Completion, tried: Completion) -> tuple[int, Difference | None]:
    """How many token ids differ, and the first of them; a failed request differs even if its tokens agree so far."""
    length = max(len(plain.token_ids), len(tried.token_ids))
    a, b = (tuple(c.token_ids) + (None,) * (length - len(c.token_ids)) for c in (plain, tried))
    positions = [i for i in range(length) if a[i] != b[i]]
    error = tried.error if tried.finish_reason == "error" else ""
    if positions:
        return len(positions), Difference(prompt, positions[0], a[positions[0]], b[positions[0]], error)
    return (1, Difference(prompt, length, None, None, error)) if error else (0, None)
