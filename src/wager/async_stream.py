"""The answer to one request of an AsyncLLM as it grows: an async iterator over output deltas."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol

from wager.engine.outputs import OutputCollector
from wager.engine.rounds import Round
from wager.errors import RequestError, WagerError
from wager.types import Completion, OutputDelta, Request, StepRecord

_COLLECTED_AT_ONCE = 32
"""Deltas that are kept apart until they are added to the answer: one after the other takes longer, with cold caches."""


class StreamOwner(Protocol):
    """What gives requests to an engine, and the deltas of a stream to the stream."""

    async def add(self, stream: AsyncOutputStream) -> None:
        """Give the engine the stream's request; raises what `Engine.add` raises."""

    def abort(self, request_id: str) -> None:
        """End a request; its last deltas still come."""

    def drop(self, stream: AsyncOutputStream) -> None:
        """End the request of a stream whose deltas nobody waits for, if it runs."""

    def end(self, stream: AsyncOutputStream) -> None:
        """As `drop`, for a stream that may be forgotten already."""


class ChoiceDelta(NamedTuple):
    """A delta, the number of its choice in the answer, and the round that it came from, if rounds are recorded."""

    choice: int
    delta: OutputDelta
    round: Round | None = None


class AsyncOutputStream(AsyncIterator[OutputDelta]):
    """The answer to one `request` as it grows. The last delta of each choice has its finish_reason and stats."""

    def __init__(self, llm: StreamOwner, request: Request) -> None:
        self.request = request
        self.with_rounds = False
        """Whether to record what was guessed in every round; set it before the stream starts."""
        self._llm, self._collector = llm, OutputCollector()
        self._uncollected: list[OutputDelta] = []
        self._deltas: deque[ChoiceDelta] = deque()
        self._readers: list[asyncio.Future[None]] = []  # who waits for deltas; an asyncio.Event takes twice the time
        self._open_choices = request.params.n
        self._started = self._closed = False
        self._failure: WagerError | None = None
        self.stage_seconds: dict[str, float] | None = None
        """Seconds by stage of the steps that emitted tokens of it, if it is set to a dict before it starts."""
        self._counted: StepRecord | None = None
        self._whole = self._told = False
        self._collector.expect(request)

    @property
    def num_tokens(self) -> int:
        """Tokens that came so far, read or not."""
        return self._collected().num_tokens

    @property
    def finish_reasons(self) -> list[str]:
        """Of the choices that have ended, in that order, read or not."""
        return self._collected().finish_reasons

    @property
    def ended(self) -> bool:
        """Whether every delta came and was read."""
        return not (self._open_choices or self._deltas)

    async def start(self) -> None:
        """Give the engine the request, unless that was done: RequestError if it cannot be served."""
        if self._started or self._closed:
            return
        self._started = True
        try:
            await self._llm.add(self)
        except WagerError as error:
            self.fail(error)
            raise
        except BaseException:
            self.close()
            raise

    async def __anext__(self) -> OutputDelta:
        """The next delta. Raises WagerError if the engine failed, StopAsyncIteration after the last one."""
        await self._wait()
        if not self._deltas:
            raise StopAsyncIteration
        return self._deltas.popleft().delta

    async def next_deltas(self) -> list[ChoiceDelta]:
        """All deltas that have come since the last call, at least one; none after the last one."""
        await self._wait()
        deltas = list(self._deltas)
        self._deltas.clear()
        return deltas

    async def complete(self) -> list[Completion]:
        """Every choice by `index`, once all have ended; its deltas wake nobody. Raises what iterating raises, and
        RequestError if the stream is closed before."""
        self._whole = True
        self._deltas.clear()
        await self._wait()
        return self.completions()

    async def _wait(self) -> None:
        """Until there are deltas, or none will come."""
        if not self._started:
            await self.start()
        while not (self._deltas or self._closed or self._failure or not self._open_choices):
            reader = asyncio.get_running_loop().create_future()
            self._readers.append(reader)
            await reader
        if self._failure and not self._deltas:
            raise self._failure

    def completions(self) -> list[Completion]:
        """Every completed choice, in order of `index`, once all have ended. RequestError before that."""
        if self._open_choices:
            raise RequestError("The stream has not ended yet.", "Iterate over it until it stops.")
        return self._collected().completions()

    def abort(self) -> None:
        """End the request; the stream still yields its last deltas, with finish_reason "abort"."""
        self._llm.abort(self.request.id)

    def close(self) -> None:
        """End the request, if it still runs, and the stream. May be repeated."""
        self._closed = True
        self._deltas.clear()
        self._wake()
        self._llm.drop(self)

    async def __aenter__(self) -> AsyncOutputStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._started and self._open_choices and not (self._closed or self._failure):
            self._llm.end(self)

    # ---- called by the owner, in the event loop --------------------------------------------------------------------

    def take(self, item: ChoiceDelta, record: StepRecord | None) -> bool:
        """Add a delta of a step; whether it is the last of the request."""
        if self.stage_seconds is not None and record is not None and record is not self._counted:
            self._counted = record  # which other choices may share
            for stage, seconds in record.seconds.items():
                self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + seconds
        self._uncollected.append(item.delta)
        if len(self._uncollected) >= _COLLECTED_AT_ONCE:
            self._collected()
        if not self._whole:
            self._deltas.append(item)
        self._open_choices -= item.delta.finish_reason is not None
        return not self._open_choices

    def _collected(self) -> OutputCollector:
        for delta in self._uncollected:
            self._collector.add(delta)
        self._uncollected.clear()
        return self._collector

    @property
    def waits_for_first(self) -> bool:
        """Whether its reader has not been told of any delta."""
        return not (self._told or self._whole)

    @property
    def untold(self) -> bool:
        """Whether there are deltas that its reader has not taken."""
        return bool(self._deltas)

    def tell(self) -> None:
        """Wake the reader: deltas have come, or the last one."""
        self._told = True
        self._wake()

    def fail(self, error: WagerError) -> None:
        """The engine failed: no further delta will come."""
        self._failure = error
        self._wake()

    def _wake(self) -> None:
        readers, self._readers = self._readers, []
        for reader in readers:
            if not reader.done():  # its task may have been cancelled
                reader.set_result(None)


async def start_all(streams: Sequence[AsyncOutputStream]) -> None:
    """Give the engine all their requests between the same two steps, mostly. RequestError if one cannot be served;
    whoever gets it closes the streams."""
    if len(streams) == 1:
        await streams[0].start()
    else:
        await asyncio.gather(*(stream.start() for stream in streams))
