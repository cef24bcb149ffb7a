"""The answer to one HTTP request: one or several prompts, each with its choices, as they grow."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from wager.async_llm import AsyncLLM, AsyncOutputStream, ChoiceDelta, start_all
from wager.errors import WagerError
from wager.types import Completion, Request


class Answer:
    """Streams of the requests of one HTTP request. Close it, or leave its `async with`, to end those that run."""

    def __init__(self, llm: AsyncLLM, requests: Sequence[Request]) -> None:
        self.streams = [llm.open_stream(request) for request in requests]
        self._choices = requests[0].params.n
        self._waiting: dict[asyncio.Task[list[ChoiceDelta]], int] = {}
        self.error: WagerError | None = None
        """Why whoever writes it stopped before its end."""

    async def start(self) -> None:
        """Give all requests to the engine. RequestError if one cannot be served; then none runs."""
        await start_all(self.streams)

    async def next_deltas(self) -> list[ChoiceDelta]:
        """What has come since the last call, at least one delta; none after the last one. Choices of the first prompt
        are numbered first, then those of the next."""
        if len(self.streams) == 1:
            return await self.streams[0].next_deltas()
        return await self._next_of_several()

    async def _next_of_several(self) -> list[ChoiceDelta]:
        if not self._waiting:
            self._waiting = {self._task(stream): place for place, stream in enumerate(self.streams)}
        while self._waiting:
            done, _ = await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
            found: list[ChoiceDelta] = []
            for task in done:
                place = self._waiting.pop(task)
                items = task.result()
                first = place * self._choices
                found += [item._replace(choice=first + item.choice) for item in items]
                if items and not self.streams[place].ended:
                    self._waiting[self._task(self.streams[place])] = place
            if found:
                return sorted(found, key=lambda each: each.choice)
        return []

    @staticmethod
    def _task(stream: AsyncOutputStream) -> asyncio.Task[list[ChoiceDelta]]:
        return asyncio.ensure_future(stream.next_deltas())

    @property
    def ended(self) -> bool:
        """Whether every delta was given."""
        return not self._waiting and all(stream.ended for stream in self.streams)

    async def complete(self) -> list[Completion]:
        """All choices, in order, once all have ended."""
        found = await asyncio.gather(*(stream.complete() for stream in self.streams))
        return [completion for completions in found for completion in completions]

    def completions(self) -> list[Completion]:
        """All choices, in order, once all have ended."""
        return [completion for stream in self.streams for completion in stream.completions()]

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def finish_reason(self) -> str:
        """Those of the choices, each once; "abort" where one has not ended."""
        reasons = [reason for stream in self.streams for reason in stream.finish_reasons]
        missing = len(reasons) < self._choices * len(self.streams)
        return ",".join(dict.fromkeys([*reasons, *(["abort"] if missing else [])]))

    def measure(self) -> None:
        """Record its rounds, and add up the seconds by stage of the steps that emit for it. Before it starts."""
        for stream in self.streams:
            stream.stage_seconds = {}
            stream.with_rounds = True

    def stage_seconds(self) -> Mapping[str, float]:
        """Seconds by stage of the steps that emitted tokens of the prompt that took longest; others ran beside it."""
        measured = [stream.stage_seconds or {} for stream in self.streams]
        return max(measured, key=lambda seconds: sum(seconds.values()))

    def close(self) -> None:
        for task in self._waiting:
            task.cancel()
        for stream in self.streams:
            stream.close()

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
