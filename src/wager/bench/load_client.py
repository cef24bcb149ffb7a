"""Sends requests to a server by a plan and records every answer.

Open loop: requests are due at random times (a Poisson process), whatever the server does. Closed loop: each of some
users sends a request as soon as its last one is answered. Every latency counts from the time a request was due, not
from when it could be sent: a server that stalls, or a client that is late, is not spared what waited meanwhile
(coordinated omission).
"""

from __future__ import annotations

import asyncio
import gc
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

import numpy as np

from wager.bench.load_answer import AnswerReader, TimedAnswer
from wager.bench.load_http import Connections, ExchangeError
from wager.bench.workload import Prompt
from wager.simulation.workload import Workload

Clock = Callable[[], float]

PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
"""A user whose request failed waits so long, or as Retry-After says up to the second, before the next one."""

_PROBE_S = 0.02
"""How often the client looks whether it is late itself."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """`rate` requests a second with at most `concurrency` at once (later ones wait, and their latency counts), or with
    None `concurrency` users. It ends after `requests` requests or `duration` seconds, whichever comes first. Requests
    are numbered from `first` on, which chooses their prompts and seeds."""

    concurrency: int
    rate: float | None = None
    requests: int | None = None
    duration: float | None = None
    timeout: float = 600.0
    seed: int = 0
    first: int = 0

    def arrivals(self) -> Iterator[float]:
        """Seconds after the start at which requests are due, in the open loop."""
        if self.rate is None:
            return iter(())
        return Workload(rate=self.rate).arrival_times(np.random.default_rng(self.seed))

    def numbers(self) -> Iterator[int]:
        numbers = count(self.first)
        return numbers if self.requests is None else islice(numbers, self.requests)


def distinct(prompts: Sequence[Prompt], number: int) -> Prompt:
    """The prompt of request `number`: in the order of the file. From the second pass on a number stands before it, so
    that no text is asked twice and neither cached prefixes nor remembered answers help."""
    prompt = prompts[number % len(prompts)]
    if number < len(prompts):
        return prompt
    return Prompt(prompt.id, prompt.family, f"({number + 1}) {prompt.text}", prompt.category)


@dataclass(slots=True)
class LoadRun:
    """Every request of a run, in the order in which they were due. Times are by the client's clock; `busy_until` is
    when the last request was sent, from which on a closed loop no longer has all its users.

    `cpu_s` is processor time of the client's process; `lags` are seconds by which its event loop was late."""

    answers: list[TimedAnswer] = field(default_factory=list)
    start: float = 0.0
    end: float = 0.0
    busy_until: float = 0.0
    cpu_s: float = 0.0
    lags: array[float] = field(default_factory=lambda: array("d"))
    connections: int = 0


Ask = Callable[[int], tuple[Prompt, bytes]]
"""The prompt of a request's number and the bytes that are sent for it."""


class LoadClient:
    """Runs a plan. `on_answer` is called with every request that has ended."""

    def __init__(
        self,
        plan: LoadPlan,
        connections: Connections,
        ask: Ask,
        *,
        clock: Clock = time.perf_counter,
        on_answer: Callable[[TimedAnswer], None] | None = None,
    ) -> None:
        self._plan, self._connections, self._ask = plan, connections, ask
        self._clock, self._on_answer = clock, on_answer
        self._run = LoadRun()

    async def run(self) -> LoadRun:
        """Send all requests and wait for their answers."""
        run, opened = self._run, self._connections.opened
        gc.collect()
        gc.freeze()  # what is there already need not be looked at while answers are timed
        probe = asyncio.create_task(self._watch())
        cpu = time.process_time()
        run.start = self._clock()
        try:
            await (self._closed_loop() if self._plan.rate is None else self._open_loop())
        finally:
            probe.cancel()
            gc.unfreeze()
        run.cpu_s = time.process_time() - cpu
        run.end = max((answer.ended for answer in run.answers), default=run.start)
        run.answers.sort(key=lambda answer: answer.number)
        run.connections = self._connections.opened - opened
        return run

    async def _closed_loop(self) -> None:
        numbers = self._plan.numbers()
        async with asyncio.TaskGroup() as users:
            for _ in range(self._plan.concurrency):
                users.create_task(self._user(numbers))

    async def _user(self, numbers: Iterator[int]) -> None:
        """One user: its next request is due when its last one has ended."""
        due, last = self._run.start, self._plan.duration
        for number in numbers:
            if last is not None and due - self._run.start >= last:
                return
            answer, due = await self.serve(number, due)
            if not answer.ok:
                await asyncio.sleep(min(answer.retry_after or PAUSE_S, LONGEST_PAUSE_S))
                due = self._clock()

    async def _open_loop(self) -> None:
        places = asyncio.Semaphore(self._plan.concurrency)
        last = self._plan.duration

        async def serve(number: int, due: float) -> None:
            async with places:
                await self.serve(number, due)

        async with asyncio.TaskGroup() as requests:
            for number, arrival in zip(self._plan.numbers(), self._plan.arrivals(), strict=False):
                if last is not None and arrival >= last:
                    break
                due = self._run.start + arrival
                await asyncio.sleep(max(0.0, due - self._clock()))
                requests.create_task(serve(number, due))

    async def serve(self, number: int, due: float) -> tuple[TimedAnswer, float]:
        """Send one request and record its answer, failed or not; and when it was over."""
        prompt, request = self._ask(number)
        answer = TimedAnswer(number, prompt.id, prompt.family, due)
        self._run.answers.append(answer)
        reader = AnswerReader(answer)
        left = self._plan.timeout - (self._clock() - due)
        try:
            async with asyncio.timeout(left):
                over = await self._exchange(request, answer, reader)
        except TimeoutError:
            over = answer.ended = self._clock()
            answer.fail("timeout", f"no whole answer within {self._plan.timeout:g} s")
        except ExchangeError as error:
            over = answer.ended = self._clock()
            answer.fail(error.kind, error.message)
        if self._on_answer:
            self._on_answer(answer)
        return answer, over

    async def _exchange(self, request: bytes, answer: TimedAnswer, reader: AnswerReader) -> float:
        def sent(now: float) -> None:
            answer.sent = self._run.busy_until = now

        over = await self._connections.exchange(request, reader, on_sent=sent)
        reader.finish(over)
        return over

    async def _watch(self) -> None:
        """Record by how much the event loop is late: what the client's times are off at worst."""
        while True:
            due = self._clock() + _PROBE_S
            await asyncio.sleep(_PROBE_S)
            self._run.lags.append(max(0.0, self._clock() - due))
