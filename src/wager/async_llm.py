"""The public interface for asyncio: a language model that answers many requests from one event loop.

    async with wager.AsyncLLM(drafter="auto") as llm:
        async for delta in llm.stream([{"role": "user", "content": "Why is the sky blue?"}]):
            print(delta.text, end="")

The engine steps in a thread of its own; what a step gave reaches the event loop in one call.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from wager.async_stream import AsyncOutputStream, DeltaRound
from wager.build.load import LoadedEngine, load
from wager.config import EngineConfig
from wager.engine.rounds import Round, RoundRecorder
from wager.engine.thread import EngineThread
from wager.errors import ClosedError, RequestError, UsageError, WagerError
from wager.models.tokenizer import Tokenizer
from wager.prompts import Message, Prompt, check_conversation, encode_chat, encode_prompt, is_conversation
from wager.types import Completion, OutputDelta, Request, RequestSpeculation, SamplingParams, StepRecord

R = TypeVar("R")

StepListener = Callable[[Sequence[OutputDelta], StepRecord | None], object]
"""Is told, in the event loop, what every step emitted and took."""


class AsyncLLM:
    """A loaded model, used from one event loop: the one that runs when the first request comes.

    Options and errors are those of `LLM`. Cancelling a task that waits for an answer, or dropping a stream, ends the
    request and frees its blocks before the next step.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        report: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        if model is not None:
            options["model"] = model
        self.config = (config or EngineConfig()).with_options(**options)
        self.engine: LoadedEngine = load(self.config, report=report)
        self.on_step: StepListener | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # whoever iterates over a stream keeps it; one that is dropped aborts its request
        self._streams: WeakValueDictionary[str, AsyncOutputStream] = WeakValueDictionary()
        self._numbers = itertools.count()
        self._recorder: RoundRecorder | None = None  # once a stream wants rounds
        self._thread = EngineThread(self.engine, self._deliver, self._fail)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @property
    def failure(self) -> WagerError | None:
        """Why no more requests are taken, if a step of the engine failed."""
        return self._thread.failure

    # ---- answers ---------------------------------------------------------------------------------------------------

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> list[Completion]:
        """Continue a prompt, a text as it is or token ids: its choices by `index` (see `LLM.generate`)."""
        return await self._answer(self.request(encode_prompt(self.tokenizer, prompt), params))

    async def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> list[Completion]:
        """Answer a conversation: its choices by `index` (see `LLM.chat`)."""
        check_conversation(messages)
        return await self._answer(self.request(encode_chat(self.tokenizer, messages), params))

    def stream(self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None) -> AsyncOutputStream:
        """The output deltas of the answer to a prompt or a conversation, as they come."""
        encode = encode_chat if is_conversation(prompt) else encode_prompt
        return self.open_stream(self.request(encode(self.tokenizer, prompt), params))  # type: ignore[arg-type]

    def request(
        self,
        tokens: tuple[int, ...],
        params: SamplingParams | None = None,
        *,
        weight: float = 1.0,
        speculation: RequestSpeculation | None = None,
    ) -> Request:
        """A request with an id of its own; `params` are by default those of the configuration."""
        name = f"async-{next(self._numbers)}"
        return Request(name, tokens, params or self.config.sampling, weight=weight, speculation=speculation)

    def open_stream(self, request: Request) -> AsyncOutputStream:
        """The stream of a request, whose id must not be in use; it is added when the stream is started or iterated."""
        return AsyncOutputStream(self, request)

    async def _answer(self, request: Request) -> list[Completion]:
        async with self.open_stream(request) as stream:
            async for _ in stream:
                pass
            return stream.completions()

    # ---- the engine's thread ---------------------------------------------------------------------------------------

    async def add(self, stream: AsyncOutputStream) -> None:
        """Give the engine the request of a stream; raises what `Engine.add` raises."""
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise UsageError("An AsyncLLM is used from two event loops.", "Give each loop its own, or share an LLM.")
        self._loop = loop
        request_id = stream.request.id
        if request_id in self._streams:
            raise RequestError(f"Request id {request_id!r} is in use.", "Give every request its own id.")
        self._streams[request_id] = stream
        if stream.with_rounds:
            await self.between_steps(lambda: self._record_rounds(request_id))
        added = self._thread.add(stream.request)
        try:
            await asyncio.wrap_future(added)
        except BaseException:
            self._streams.pop(request_id, None)
            if not added.cancelled():  # it may have been added meanwhile
                self.abort(request_id)
            raise

    async def between_steps(self, function: Callable[[], R]) -> R:
        """Call a function of the engine in its thread, between two steps, and return its result."""
        return await asyncio.wrap_future(self._thread.call(function))

    def abort(self, request_id: str) -> None:
        """End a request before the next step, which brings its last deltas. Unknown ones are ignored."""
        with suppress(ClosedError):
            self._thread.abort(request_id)

    def abort_all(self) -> None:
        """End every request; each stream gets its last deltas."""
        for request_id in list(self._streams):
            self.abort(request_id)

    def drop(self, stream: AsyncOutputStream) -> None:
        """End a request whose deltas nobody waits for."""
        if self._streams.pop(stream.request.id, None) is not None:
            self.abort(stream.request.id)
            self._forget_rounds(stream)

    def _record_rounds(self, request_id: str) -> None:
        """Before the request is added, in the engine's thread."""
        if self._recorder is None:
            self._recorder = RoundRecorder.attach(self.engine, set())
        if self._recorder.requests is not None:
            self._recorder.requests.add(request_id)

    def _deliver(self, deltas: Sequence[OutputDelta], record: StepRecord | None) -> None:
        recorder, rounds = self._recorder, {}
        if recorder is not None and recorder.requests:
            recorded = [delta for delta in deltas if delta.request_id in recorder.requests]
            rounds = {(delta.request_id, delta.index): recorder.take(delta) for delta in recorded}
        self._in_loop(lambda: self._route(deltas, record, rounds))

    def _route(
        self,
        deltas: Sequence[OutputDelta],
        record: StepRecord | None,
        rounds: Mapping[tuple[str, int], Round | None],
    ) -> None:
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None:
                item = DeltaRound(delta, rounds.get((delta.request_id, delta.index)) if rounds else None)
                if stream.take(item, record):
                    del self._streams[delta.request_id]
                    self._forget_rounds(stream)
        if self.on_step is not None:
            self.on_step(deltas, record)

    def _forget_rounds(self, stream: AsyncOutputStream) -> None:
        recorder, request = self._recorder, stream.request
        if stream.with_rounds and recorder is not None:
            with suppress(ClosedError):
                self._thread.call(lambda: recorder.forget(request))

    def _fail(self, error: WagerError) -> None:
        def end_streams() -> None:
            for stream in list(self._streams.values()):
                stream.fail(error)
            self._streams.clear()

        self._in_loop(end_streams)

    def _in_loop(self, function: Callable[[], None]) -> None:
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(function)
            except RuntimeError:  # the loop was closed while requests ran: nobody waits for them
                self._streams.clear()

    # ---- the end ---------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End every request with finish_reason "abort" and release the engine. May be repeated."""
        await asyncio.get_running_loop().run_in_executor(None, self._thread.close)
        self.engine.close()
        await asyncio.sleep(0)  # the last deltas were posted before the thread ended

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
