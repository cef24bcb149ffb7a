"""The two endpoints that answer: a body becomes requests of the engine, their deltas JSON, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from wager.async_llm import AsyncLLM, AsyncOutputStream
from wager.draft.base import remembers_requests
from wager.engine.policies import GRAMMAR_DRAFTER
from wager.errors import RequestError, WagerError
from wager.serve.body_process import BodyKind, BodyReader
from wager.serve.errors import ApiError, failed_answer
from wager.serve.formats import encoded, encoded_in_parts
from wager.serve.limits import Admission, BodyLimits, ServeOptions, Turns
from wager.serve.metrics import Metrics
from wager.serve.parsing import ParsedRequest
from wager.serve.streaming import ChunkWriter, EventStream, GuessReport, draft_report, log_report, until_gone
from wager.types import Completion, Request

_QUICK_TOKENS = 1_000
"""Tokens, and alternatives to them, of an answer that is written in the event loop; of a larger one in a thread."""


@dataclass(eq=False)
class Generation:
    """The handler of /v1/completions and /v1/chat/completions."""

    llm: AsyncLLM
    options: ServeOptions
    limits: BodyLimits
    bodies: BodyReader
    admission: Admission
    metrics: Metrics
    _compiling: Turns = field(default_factory=Turns)

    async def respond(self, http: HttpRequest, kind: BodyKind) -> Response:
        """The answer to a body of that kind, `completion` or `chat`."""
        async with self.limits.body(http) as raw:
            parsed: ParsedRequest = await self.bodies.read(kind, raw, http.state.request_id, tenant=http.state.tenant)
        parsed = await self._ready(parsed, http.state.tenant)
        async with AsyncExitStack() as stack:
            stack.enter_context(self.admission.place(parsed.sequences))
            requests = await self._requests(parsed, http.state.tenant)
            answer = await stack.enter_async_context(self.llm.open_stream(*requests))
            log_fields = http.state.log_fields = {"prompt_tokens": parsed.prompt_tokens}
            answer.with_rounds = parsed.speculation_stats
            answer.stage_seconds = {}
            for request in requests:
                stack.callback(self.metrics.request_dropped, request.id)
            records = [self.metrics.request_opened(request) for request in requests]
            await self._start(parsed, answer)
            if not parsed.stream:
                stack.callback(lambda: log_fields.update(log_report(answer, records)))
                return await self._whole(http, parsed, answer)
            events = EventStream(answer, self._writer(parsed, answer), timeout=self.options.request_timeout)
            stack.callback(lambda: log_fields.update(log_report(answer, records, events.error)))
            events.resources = stack.pop_all()
            return events

    async def _ready(self, parsed: ParsedRequest, tenant: str) -> ParsedRequest:
        """The request with its grammar compiled, one at a time and in a thread, so that no step waits for it."""
        params = parsed.params
        grammars = self.llm.engine.grammars
        if params.grammar is None or grammars is None:
            return parsed
        try:
            async with self._compiling.turn(tenant):
                grammar = await asyncio.to_thread(grammars.compile, params.grammar, tenant=tenant)
        except RequestError as error:
            raise parsed.refusal(error, max_context=self.llm.engine.scheduler.max_context) from None
        return replace(parsed, params=replace(params, grammar=grammar))

    async def _requests(self, parsed: ParsedRequest, tenant: str) -> list[Request]:
        """The engine's requests; others have their turn between two long prompts."""
        made = []
        for prompt in parsed.prompts:
            request = self.llm.request(
                tuple(prompt), parsed.params, weight=parsed.weight, speculation=parsed.speculation, tenant=tenant
            )
            made.append(request)
            await asyncio.sleep(0)
        return made

    async def _start(self, parsed: ParsedRequest, answer: AsyncOutputStream) -> None:
        try:
            await answer.start()
        except WagerError as error:
            for request in answer.requests:
                self.metrics.request_refused(request.id)
            if isinstance(error, RequestError):
                raise parsed.refusal(error, max_context=self.llm.engine.scheduler.max_context) from None
            raise

    def _writer(self, parsed: ParsedRequest, answer: AsyncOutputStream) -> ChunkWriter:
        options, stats = parsed.stream_options, parsed.speculation_stats
        continuous = options.include_usage and options.continuous_usage_stats
        return ChunkWriter(
            parsed.format(self.llm.tokenizer.token_bytes),
            usage=parsed.usage if options.include_usage else None,
            prompt_tokens=parsed.prompt_tokens if continuous else None,
            details=(lambda done: draft_report(answer, done)) if stats else None,
            guesses=self._guess_report(answer.requests) if stats else None,
        )

    def _guess_report(self, requests: Sequence[Request]) -> GuessReport:
        """Rejected guesses are shown of drafters that guess from nothing but the request."""
        drafters = self.llm.engine.proposer.drafters.items()
        own = {name for name, drafter in drafters if not remembers_requests(drafter)}
        shown = None if self.options.show_rejected else own | {GRAMMAR_DRAFTER}
        return GuessReport(self.llm.tokenizer, requests, shown=shown)

    async def _whole(self, http: HttpRequest, parsed: ParsedRequest, answer: AsyncOutputStream) -> Response:
        gone = asyncio.create_task(until_gone(http.receive))
        finished = asyncio.create_task(answer.complete())
        try:
            done, _ = await asyncio.wait(
                (gone, finished), timeout=self.options.request_timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise ApiError(504, f"There was no answer in {self.options.request_timeout:g} s.", "Ask for less.")
            if finished not in done:
                return Response(status_code=499)  # nobody reads it
            completions = finished.result()
        finally:
            for task in (gone, finished):
                task.cancel()
                with suppress(asyncio.CancelledError, WagerError):
                    await task
        size = answer.num_tokens * (1 + (parsed.params.logprobs or 0))
        write = partial(self._object, parsed, answer, completions)
        if size <= _QUICK_TOKENS:
            content = encoded(write())
        else:
            content = await asyncio.to_thread(lambda: encoded_in_parts(write()))
        return Response(content, media_type="application/json")

    def _object(
        self, parsed: ParsedRequest, answer: AsyncOutputStream, completions: Sequence[Completion]
    ) -> dict[str, Any]:
        for completion in completions:
            if completion.finish_reason == "error":
                raise failed_answer(completion)
            if completion.finish_reason == "abort":
                raise ApiError(503, "The server ended the request.", "Send it again.", retry_after=30)
        form = parsed.format(self.llm.tokenizer.token_bytes)
        choices = [form.choice(index, completion) for index, completion in enumerate(completions)]
        found = {**form.head, "choices": choices, "usage": parsed.usage(completions)}
        if parsed.speculation_stats:
            found["speculation"] = draft_report(answer, completions)
        return found
