"""Does speculation leave the text alone? Answers compared token id by token id with plain decoding.

The plain answers come from an engine that serves one request at a time with nothing cached; the others from engines
under everything that must not matter: drafters, company in the batch, preemption, warm prefixes. Knows engines only
by what they do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from wager.types import Completion, OutputDelta, Request, Stats

Watch = Callable[[OutputDelta], None]


class Steps(Protocol):
    """What an engine has to be able to do to be tried."""

    def add(self, request: Request) -> None: ...

    def step(self) -> list[OutputDelta]: ...

    @property
    def busy(self) -> bool: ...

    def preempt_all(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Condition:
    """What happens around the requests. `preempt_every`: tokens emitted between forced preemptions (None: none)."""

    name: str
    concurrency: int
    preempt_every: int | None = None


COLD = Condition("alone", concurrency=1)
"""For an engine that has cached nothing and keeps nothing."""


def hardships(concurrency: int) -> tuple[Condition, ...]:
    """Conditions for one engine with a prefix cache, in this order: from the second on, its prefixes are warm."""
    return (
        Condition("together, preempted", concurrency, preempt_every=16),
        Condition("alone, warm prefix", 1),
        Condition("together, warm prefix", concurrency),
    )


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a text leaves the plain one; a token is None where one text has already ended."""

    prompt: str
    position: int
    plain: int | None
    speculative: int | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One sampling mode, drafter and condition: how much was compared, what differed, and what the trial went through.

    `differing` counts token ids. Preemptions, cached tokens and guesses show that the condition really occurred.
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
    engine: Steps, requests: Sequence[Request], condition: Condition, *, watch: Watch | None = None
) -> dict[str, Completion]:
    """Serve the requests under a condition; answers by request id. A failed request's answer carries its error."""
    waiting, live, since = deque(requests), 0, 0
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    done: dict[str, Completion] = {}
    while waiting or engine.busy:
        while waiting and live < condition.concurrency:
            engine.add(waiting.popleft())
            live += 1
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
            since += len(event.token_ids)
            if event.finish_reason:
                live -= 1
                done[event.request_id] = _completion(event, tokens[event.request_id])
            if watch:
                watch(event)
        if condition.preempt_every and since >= condition.preempt_every:
            engine.preempt_all()
            since = 0
    return done


def _completion(event: OutputDelta, tokens: Sequence[int]) -> Completion:
    stats = event.stats or Stats(prompt_tokens=0, completion_tokens=len(tokens), seed=0)
    return Completion(
        event.request_id, event.index, tuple(tokens), "", event.finish_reason or "error", stats, error=event.error
    )


def judge(
    plain: Mapping[str, Completion], tried: Mapping[str, Completion], *, mode: str, drafter: str, condition: Condition
) -> Comparison:
    """Compare answers by request id."""
    differences = [_difference(prompt, answer, tried[prompt]) for prompt, answer in plain.items()]
    stats = [answer.stats for answer in tried.values()]
    return Comparison(
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
    places = [i for i in range(length) if a[i] != b[i]]
    error = tried.error if tried.finish_reason == "error" else ""
    if places:
        return len(places), Difference(prompt, places[0], a[places[0]], b[places[0]], error)
    return (1, Difference(prompt, length, None, None, error)) if error else (0, None)
