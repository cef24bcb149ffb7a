"""The two endpoints that answer: a body becomes requests of the engine, their deltas JSON, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from wager.async_llm import AsyncLLM
from wager.draft.base import remembers_requests
from wager.engine.grammar_drafts import NAME as GRAMMAR_DRAFTER
from wager.errors import RequestError, WagerError
from wager.serve.admission import Admission
from wager.serve.answers import Answer
from wager.serve.body_process import BodyKind, RequestReader
from wager.serve.chunks import StreamPlan
from wager.serve.errors import ApiError, failed_answer
from wager.serve.formats import encoded, encoded_in_parts
from wager.serve.guesses import GuessReport, draft_report
from wager.serve.limits import BodyLimits
from wager.serve.metrics import Metrics
from wager.serve.options import ServeOptions
from wager.serve.sse import EventStream, until_gone
from wager.serve.work import Work
from wager.types import Completion, Request

_QUICK_TOKENS = 1_000
"""Tokens, and alternatives to them, of an answer that is written in the event loop; of a larger one in a thread."""


class Generation:
    """Handlers of /v1/completions and /v1/chat/completions."""

    def __init__(
        self,
        llm: AsyncLLM,
        options: ServeOptions,
        limits: BodyLimits,
        bodies: RequestReader,
        admission: Admission,
        metrics: Metrics,
    ) -> None:
        self._llm, self._options, self._admission, self._metrics = llm, options, admission, metrics
        self._limits, self._bodies = limits, bodies
        self._compiling = asyncio.Semaphore()

    async def completions(self, http: HttpRequest) -> Response:
        return await self._respond(http, "completion")

    async def chat(self, http: HttpRequest) -> Response:
        return await self._respond(http, "chat")

    async def _respond(self, http: HttpRequest, kind: BodyKind) -> Response:
        work = await self._ready(await self._read(http, kind))
        async with AsyncExitStack() as stack:
            stack.enter_context(self._admission.place(work.sequences))
            requests = await self._requests(work, http.state.tenant)
            answer = await stack.enter_async_context(Answer(self._llm, requests))
            told = http.state.log_fields = {"prompt_tokens": work.prompt_tokens}
            if work.speculation_stats:
                answer.measure()
            for request in requests:
                stack.callback(self._metrics.request_dropped, request.id)
                self._metrics.request_opened(request)
            await self._start(work, answer)
            stack.callback(lambda: told.update(_end(answer)))
            if not work.stream:
                return await self._whole(http, work, answer)
            return EventStream(answer, self._plan(work, answer, requests), stack.pop_all())

    async def _read(self, http: HttpRequest, kind: BodyKind) -> Work:
        async with self._limits.body(http) as raw:
            work: Work = await self._bodies.read(kind, raw, http.state.request_id)
        return work

    async def _ready(self, work: Work) -> Work:
        """The work with its grammar compiled, one at a time and in a thread, so that no step waits for it."""
        params, grammars = work.params, self._llm.engine.grammars
        if params.grammar is None or grammars is None:
            return work
        try:
            async with self._compiling:
                grammar = await asyncio.to_thread(grammars.compile, params.grammar)
        except RequestError as error:
            raise work.refusal(error, max_context=self._llm.engine.scheduler.max_context) from None
        return replace(work, params=replace(params, grammar=grammar))

    async def _requests(self, work: Work, tenant: str) -> list[Request]:
        """The engine's requests; others have their turn between two long prompts."""
        made = []
        for prompt in work.prompts:
            request = self._llm.request(
                tuple(prompt), work.params, weight=work.weight, speculation=work.speculation, tenant=tenant
            )
            made.append(request)
            await asyncio.sleep(0)
        return made

    async def _start(self, work: Work, answer: Answer) -> None:
        try:
            await answer.start()
        except WagerError as error:
            for stream in answer.streams:
                self._metrics.request_refused(stream.request.id)
            if isinstance(error, RequestError):
                raise work.refusal(error, max_context=self._llm.engine.scheduler.max_context) from None
            raise

    def _plan(self, work: Work, answer: Answer, requests: Sequence[Request]) -> StreamPlan:
        options, told = work.stream_options, work.speculation_stats
        continuous = options.include_usage and options.continuous_usage_stats
        return StreamPlan(
            work.format(self._llm.tokenizer.token_bytes),
            include_usage=bool(options.include_usage),
            prompt_tokens=work.prompt_tokens if continuous else None,
            usage=work.usage,
            timeout=self._options.request_timeout,
            details=(lambda done: draft_report(answer, done)) if told else None,
            guesses=self._guess_report(requests) if told else None,
        )

    def _guess_report(self, requests: Sequence[Request]) -> GuessReport:
        """Rejected guesses are shown of drafters that guess from nothing but the request."""
        drafters = self._llm.engine.proposer.drafters.items()
        own = {name for name, drafter in drafters if not remembers_requests(drafter)}
        shown = None if self._options.show_rejected else own | {GRAMMAR_DRAFTER}
        return GuessReport(self._llm.tokenizer, requests, shown=shown)

    async def _whole(self, http: HttpRequest, work: Work, answer: Answer) -> Response:
        gone = asyncio.create_task(until_gone(http.receive))
        finished = asyncio.create_task(answer.complete())
        try:
            done, _ = await asyncio.wait(
                (gone, finished), timeout=self._options.request_timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise ApiError(504, f"There was no answer in {self._options.request_timeout:g} s.", "Ask for less.")
            if finished not in done:
                return Response(status_code=499)  # nobody reads it
            completions = finished.result()
        finally:
            for task in (gone, finished):
                task.cancel()
                with suppress(asyncio.CancelledError, WagerError):
                    await task
        size = answer.num_tokens * (1 + (work.params.logprobs or 0))
        write = partial(self._object, work, answer, completions)
        if size <= _QUICK_TOKENS:
            content = encoded(write())
        else:
            content = await asyncio.to_thread(lambda: encoded_in_parts(write()))
        return Response(content, media_type="application/json")

    def _object(self, work: Work, answer: Answer, completions: Sequence[Completion]) -> dict[str, Any]:
        for completion in completions:
            if completion.finish_reason == "error":
                raise failed_answer(completion)
            if completion.finish_reason == "abort":
                raise ApiError(503, "The server ended the request.", "Send it again.", retry_after=30)
        form = work.format(self._llm.tokenizer.token_bytes)
        found = form.envelope(stream=False)
        found["choices"] = [form.choice(index, completion) for index, completion in enumerate(completions)]
        found["usage"] = work.usage(completions)
        if work.speculation_stats:
            found["speculation"] = draft_report(answer, completions)
        return found


def _end(answer: Answer) -> dict[str, Any]:
    """How an answer ended, for the log: the status of a stream was sent before."""
    failed = {"error": answer.error.status} if answer.error else {"finish_reason": answer.finish_reason}
    return {"completion_tokens": answer.num_tokens, **failed}
