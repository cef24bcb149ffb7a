"""The public interface for asyncio: a language model that answers many requests from one event loop.

    async with wager.AsyncLLM(drafter="auto") as llm:
        async for delta in llm.stream([{"role": "user", "content": "Why is the sky blue?"}]):
            print(delta.text, end="")

The engine steps in a thread of its own; what a step gave reaches the event loop in one call.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar, overload
from weakref import WeakValueDictionary

from wager.config import EngineConfig
from wager.engine.outputs import OutputCollector, one_or_all
from wager.engine.rounds import Round, RoundRecorder
from wager.engine.threads import EngineThread
from wager.errors import ClosedError, RequestError, UsageError, WagerError
from wager.loading.load import LoadedEngine, load
from wager.models.tokenizer import Tokenizer
from wager.prompts import Message, PromptType, encode_chat, encode_chats, encode_prompt, encode_prompts, is_conversation
from wager.types import (
    NO_TENANT,
    Completion,
    OutputDelta,
    Request,
    RequestSpeculation,
    SamplingParams,
    StepRecord,
    chosen_params,
)

R = TypeVar("R")

StepListener = Callable[[Sequence[OutputDelta], StepRecord | None], object]
"""Gets, in the event loop, what every step emitted and took."""


_MAX_STEPS_PER_CHUNK = 4

_COLLECT_EVERY = 32
"""Deltas that are kept apart until they are added to the answer: one after the other takes longer, with cold caches."""


class AsyncLLM:
    """A loaded model, used from one event loop: the one that runs when a request comes, until that loop is closed.

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
        self.streams_per_step: int | None = None
        """Streams whose readers are woken after every step. If there are more, they are woken together after every
        second to fourth step, with the deltas of these. First and last deltas do not wait. None: after every step."""
        self._loop: asyncio.AbstractEventLoop | None = None
        # whoever iterates over a stream keeps it; one that is dropped aborts its request
        self._streams: WeakValueDictionary[str, AsyncOutputStream] = WeakValueDictionary()
        self._unread: set[AsyncOutputStream] = set()  # whose readers have not been woken
        self._steps_since_wake = 0
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

    @overload  # a str is a Sequence[str] to a type checker, which is why the overloads overlap
    async def generate(  # type: ignore[overload-overlap]
        self, prompts: PromptType, params: SamplingParams | None = None
    ) -> Completion: ...

    @overload
    async def generate(
        self, prompts: Sequence[PromptType], params: SamplingParams | None = None
    ) -> list[Completion]: ...

    async def generate(
        self, prompts: PromptType | Sequence[PromptType], params: SamplingParams | None = None
    ) -> Completion | list[Completion]:
        """Continue one prompt, or several together, as `LLM.generate` does."""
        given, one = encode_prompts(self.tokenizer, prompts)
        return one_or_all(await self._answers(given, params), one=one)

    @overload
    async def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion: ...

    @overload
    async def chat(
        self, messages: Sequence[Sequence[Message]], params: SamplingParams | None = None
    ) -> list[Completion]: ...

    async def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], params: SamplingParams | None = None
    ) -> Completion | list[Completion]:
        """Answer a conversation, or a list of them, as `LLM.chat` does."""
        given, one = encode_chats(self.tokenizer, messages)
        return one_or_all(await self._answers(given, params), one=one)

    def stream(self, prompt: PromptType | Sequence[Message], params: SamplingParams | None = None) -> AsyncOutputStream:
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
        tenant: str = NO_TENANT,
    ) -> Request:
        """A request with an id of its own; `params` are by default those of the configuration."""
        name = f"async-{next(self._numbers)}"
        chosen = chosen_params(params, self.config.sampling)
        return Request(name, tokens, chosen, weight=weight, speculation=speculation, tenant=tenant, streamed=True)

    def open_stream(self, *requests: Request) -> AsyncOutputStream:
        """The stream of requests whose ids must not be in use; they are added when it is started or iterated."""
        return AsyncOutputStream(self, requests)

    async def _answers(self, prompts: Sequence[tuple[int, ...]], params: SamplingParams | None) -> list[Completion]:
        async with self.open_stream(*(self.request(tokens, params) for tokens in prompts)) as stream:
            return await stream.complete()

    # ---- the engine's thread ---------------------------------------------------------------------------------------

    async def add(self, stream: AsyncOutputStream) -> None:
        """Give the engine the requests of a stream, mostly between the same two steps. Raises what `Engine.add` raises
        for one of them; then none runs."""
        self._use(asyncio.get_running_loop())
        try:
            await asyncio.gather(*(self._add(stream, request) for request in stream.requests))
        except BaseException:
            self.drop(stream)  # they may have been added meanwhile
            raise

    async def _add(self, stream: AsyncOutputStream, request: Request) -> None:
        grammar = request.params.grammar
        grammars = self.engine.grammars
        if request.id in self._streams:
            raise RequestError(f"Request id {request.id!r} is in use.", "Give every request its own id.")
        self._streams[request.id] = stream
        if grammar is not None and grammars is not None and not grammars.has_compiled(grammar):
            await asyncio.to_thread(grammars.compile, grammar, tenant=request.tenant)  # no step waits for it
        if stream.with_rounds:
            await self.between_steps(lambda: self._record_rounds(request.id))
        if self._streams.get(request.id) is stream:  # not closed meanwhile
            await asyncio.wrap_future(self._thread.add(request))

    def _use(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deltas go to this loop. UsageError while another one is open; what ran in one that was closed is ended."""
        if self._loop is loop:
            return
        if self._loop is not None:
            if not self._loop.is_closed():
                raise UsageError("An AsyncLLM is used from two event loops.", "Give each its own, or share an LLM.")
            self._leave_loop()
        self._loop = loop

    def _leave_loop(self) -> None:
        self.abort_all()
        self._streams.clear()
        self._unread.clear()

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
        """End the requests of a stream whose deltas nobody waits for, if they run."""
        self._unread.discard(stream)
        running = [request for request in stream.requests if self._streams.get(request.id) is stream]
        for request in running:
            del self._streams[request.id]
        self.end(stream, running)

    def end(self, stream: AsyncOutputStream, requests: Sequence[Request]) -> None:
        """As `drop`, for requests of a stream that may be forgotten already."""
        for request in requests:
            self.abort(request.id)
            self._forget_rounds(stream, request)

    def _record_rounds(self, request_id: str) -> None:
        """Before the request is added, in the engine's thread."""
        if self._recorder is None:
            self._recorder = RoundRecorder.attach(self.engine, set())
        if self._recorder.requests is not None:
            self._recorder.requests.add(request_id)

    def _deliver(self, deltas: Sequence[OutputDelta], record: StepRecord | None) -> None:
        recorder = self._recorder
        rounds = {}
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
                made = rounds.get((delta.request_id, delta.index)) if rounds else None
                if ended := stream.take(delta, made, record):
                    del self._streams[ended.id]
                    self._forget_rounds(stream, ended)
                    self._unread.discard(stream)
                    stream.wake()
                elif stream.waits_for_first:
                    stream.wake()
                elif stream.unread:
                    self._unread.add(stream)
        self._steps_since_wake += 1
        if self._steps_since_wake >= self._steps_per_chunk():
            self._wake_all()
        if self.on_step is not None:
            self.on_step(deltas, record)

    def _steps_per_chunk(self) -> int:
        most = self.streams_per_step
        streams = len(self._streams)
        return 1 if most is None or streams <= most else min(_MAX_STEPS_PER_CHUNK, -(-2 * streams // most))

    def _wake_all(self) -> None:
        self._steps_since_wake = 0
        unread = self._unread
        self._unread = set()
        for stream in unread:
            stream.wake()

    def _forget_rounds(self, stream: AsyncOutputStream, request: Request) -> None:
        recorder = self._recorder
        if stream.with_rounds and recorder is not None:
            with suppress(ClosedError):
                self._thread.call(lambda: recorder.forget(request))

    def _fail(self, error: WagerError) -> None:
        def end_streams() -> None:
            for stream in list(self._streams.values()):
                stream.fail(error)
            self._streams.clear()
            self._unread.clear()

        self._in_loop(end_streams)

    def _in_loop(self, function: Callable[[], None]) -> None:
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(function)
            except RuntimeError:  # the loop was closed while requests ran: nobody waits for them
                self._leave_loop()

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


class ChoiceDelta(NamedTuple):
    """A delta, the number of its choice in the stream, and the round that it came from, if rounds are recorded. Choices
    of the first request are numbered first, then those of the next."""

    choice: int
    delta: OutputDelta
    round: Round | None = None


class AsyncOutputStream(AsyncIterator[OutputDelta]):
    """The answer to `requests`, mostly to one, as it grows. The last delta of each choice has its finish_reason and
    stats."""

    def __init__(self, llm: AsyncLLM, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.with_rounds = False
        """Whether to record what was guessed in every round; set it before the stream starts."""
        self._llm = llm
        self._collector = OutputCollector()
        self._uncollected: list[OutputDelta] = []
        self._deltas: deque[ChoiceDelta] = deque()
        self._readers: list[asyncio.Future[None]] = []  # who waits for deltas; an asyncio.Event takes twice the time
        self._open = {request.id: request.params.n for request in requests}  # choices that have not ended
        ends = itertools.accumulate((request.params.n for request in requests), initial=0)
        self._first = dict(zip(self._open, ends, strict=False))  # the number of each request's first choice
        self._started = self._closed = False
        self._failure: WagerError | None = None
        self.stage_seconds: dict[str, float] | None = None
        """Seconds by stage of the steps that emitted tokens of it, if it is set to a dict before it starts."""
        self._counted: StepRecord | None = None
        self._whole = self._woken = False
        for request in requests:
            self._collector.expect(request)

    @property
    def request(self) -> Request:
        """The first request."""
        return self.requests[0]

    @property
    def num_tokens(self) -> int:
        """Tokens that came so far, read or not."""
        return self._collected().num_tokens

    @property
    def finish_reasons(self) -> list[str]:
        """The finish reasons of the choices that have ended, in that order, read or not."""
        return self._collected().finish_reasons

    @property
    def ended(self) -> bool:
        """Whether every delta came and was read."""
        return not (self._open or self._deltas)

    async def start(self) -> None:
        """Give the engine the requests, unless that was done: RequestError if one cannot be served; then none runs."""
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
        return sorted(deltas, key=lambda each: each.choice) if len(self.requests) > 1 else deltas

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
        while not (self._deltas or self._closed or self._failure or not self._open):
            reader = asyncio.get_running_loop().create_future()
            self._readers.append(reader)
            await reader
        if self._failure and not self._deltas:
            raise self._failure

    def completions(self) -> list[Completion]:
        """Every completed choice, in order of `index`, once all have ended. RequestError before that."""
        if self._open:
            raise RequestError("The stream has not ended yet.", "Iterate over it until it stops.")
        return self._collected().completions()

    def abort(self) -> None:
        """End the requests; the stream still yields its last deltas, with finish_reason "abort"."""
        for request in self.requests:
            self._llm.abort(request.id)

    def close(self) -> None:
        """End the requests that still run, and the stream. May be repeated."""
        self._closed = True
        self._deltas.clear()
        self.wake()
        self._llm.drop(self)

    async def __aenter__(self) -> AsyncOutputStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._started and self._open and not (self._closed or self._failure):
            self._llm.end(self, self.requests)

    # ---- called by the owner, in the event loop --------------------------------------------------------------------

    def take(self, delta: OutputDelta, made: Round | None, record: StepRecord | None) -> Request | None:
        """Add a delta of a step; its request, if it is the last one of that."""
        name = delta.request_id
        if self.stage_seconds is not None and record is not None and record is not self._counted:
            self._counted = record  # which other choices may share
            for stage, seconds in record.seconds.items():
                self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + seconds
        self._uncollected.append(delta)
        if len(self._uncollected) >= _COLLECT_EVERY:
            self._collected()
        if not self._whole:
            self._deltas.append(ChoiceDelta(self._first[name] + delta.index, delta, made))
        if delta.finish_reason is None:
            return None
        self._open[name] -= 1
        if self._open[name]:
            return None
        del self._open[name]
        return next(request for request in self.requests if request.id == name)

    def _collected(self) -> OutputCollector:
        for delta in self._uncollected:
            self._collector.add(delta)
        self._uncollected.clear()
        return self._collector

    @property
    def waits_for_first(self) -> bool:
        """Whether its reader has never been woken."""
        return not (self._woken or self._whole)

    @property
    def unread(self) -> bool:
        """Whether there are deltas that its reader has not taken."""
        return bool(self._deltas)

    def fail(self, error: WagerError) -> None:
        """The engine failed: no further delta will come."""
        self._failure = error
        self.wake()

    def wake(self) -> None:
        """Wake the reader: deltas have come, or none will."""
        self._woken = True
        readers = self._readers
        self._readers = []
        for reader in readers:
            if not reader.done():  # its task may have been cancelled
                reader.set_result(None)
