"""The answer to one request of an AsyncLLM as it grows: an async iterator over output deltas."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from wager.engine.outputs import OutputCollector
from wager.engine.rounds import Round
from wager.errors import RequestError, WagerError
from wager.types import Completion, OutputDelta, Request, StepRecord


class StreamOwner(Protocol):
    """What gives requests to an engine, and the deltas of a stream to the stream."""

    async def add(self, stream: AsyncOutputStream) -> None:
        """Give the engine the stream's request; raises what `Engine.add` raises."""

    def abort(self, request_id: str) -> None:
        """End a request; its last deltas still come."""

    def drop(self, stream: AsyncOutputStream) -> None:
        """End a request whose deltas nobody waits for."""


@dataclass(frozen=True, slots=True)
class DeltaRound:
    """A delta, and the round that it came from, if rounds are recorded."""

    delta: OutputDelta
    round: Round | None = None


class AsyncOutputStream(AsyncIterator[OutputDelta]):
    """The answer to one `request` as it grows. The last delta of each choice has its finish_reason and stats."""

    def __init__(self, llm: StreamOwner, request: Request) -> None:
        self.request = request
        self.with_rounds = False
        """Whether to record what was guessed in every round; set it before the stream starts."""
        self._llm, self._collector = llm, OutputCollector()
        self._deltas: deque[DeltaRound] = deque()
        self._arrived = asyncio.Event()
        self._open_choices = request.params.n
        self._started = self._closed = False
        self._failure: WagerError | None = None
        self.stage_seconds: dict[str, float] | None = None
        """Seconds by stage of the steps that emitted tokens of it, if it is set to a dict before it starts."""
        self._collector.expect(request)

    async def start(self) -> None:
        """Give the engine the request, unless that was done: RequestError if it cannot be served."""
        if not self._started:
            self._started = True
            await self._llm.add(self)

    async def __anext__(self) -> OutputDelta:
        """The next delta. Raises WagerError if the engine failed, StopAsyncIteration after the last one."""
        await self._wait()
        if not self._deltas:
            raise StopAsyncIteration
        return self._deltas.popleft().delta

    async def next_deltas(self) -> list[DeltaRound]:
        """All deltas that have come since the last call, at least one; none after the last one."""
        await self._wait()
        deltas = list(self._deltas)
        self._deltas.clear()
        return deltas

    async def _wait(self) -> None:
        """Until there are deltas, or none will come."""
        await self.start()
        while not (self._deltas or self._closed or self._failure or not self._open_choices):
            self._arrived.clear()
            await self._arrived.wait()
        if self._failure and not self._deltas:
            raise self._failure

    def completions(self) -> list[Completion]:
        """Every completed choice, in order of `index`, once all have ended. RequestError before that."""
        if self._open_choices:
            raise RequestError("The stream has not ended yet.", "Iterate over it until it stops.")
        return self._collector.completions()

    def abort(self) -> None:
        """End the request; the stream still yields its last deltas, with finish_reason "abort"."""
        self._llm.abort(self.request.id)

    def close(self) -> None:
        """End the request, if it still runs, and the stream. May be repeated."""
        self._closed = True
        self._deltas.clear()
        self._arrived.set()
        self._llm.drop(self)

    async def __aenter__(self) -> AsyncOutputStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._started and self._open_choices and not self._closed:
            self._llm.abort(self.request.id)

    # ---- called by the owner, in the event loop --------------------------------------------------------------------

    def take(self, item: DeltaRound, record: StepRecord | None) -> bool:
        """Add a delta of a step; whether it is the last of the request."""
        if self.stage_seconds is not None and record is not None:
            for stage, seconds in record.seconds.items():
                self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + seconds
        self._collector.add(item.delta)
        self._deltas.append(item)
        self._open_choices -= item.delta.finish_reason is not None
        self._arrived.set()
        return not self._open_choices

    def fail(self, error: WagerError) -> None:
        """The engine failed: no further delta will come."""
        self._failure = error
        self._arrived.set()
