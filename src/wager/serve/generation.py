"""The two endpoints that answer: a body becomes requests of the engine, their deltas JSON, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from wager.async_llm import AsyncLLM
from wager.errors import WagerError
from wager.prompts import encode_prompt
from wager.serve.admission import Admission
from wager.serve.answers import Answer
from wager.serve.bodies import ChatBody, ChatMessage, CompletionBody, SamplingFields, StreamOptions, parse
from wager.serve.chunks import StreamPlan
from wager.serve.errors import ApiError
from wager.serve.formats import AnswerFormat, AnswerHead, ChatFormat, CompletionFormat, encoded, usage
from wager.serve.guesses import GuessReport
from wager.serve.limits import read_body
from wager.serve.metrics import Metrics
from wager.serve.options import ServeOptions
from wager.serve.parameters import chat_params, completion_params, speculation
from wager.serve.predictions import prediction_use
from wager.serve.sse import EventStream, until_gone
from wager.serve.tools import CallWriter, ChatTools, template_message
from wager.types import Completion, Request, Stats

_MOST_PROMPTS = 64
"""Prompts of one request."""

_QUICK = 20_000
"""Characters that are encoded in the event loop; longer texts in a thread, since they would delay every stream."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one HTTP request asks for: requests of the engine, and how their answer is written."""

    body: SamplingFields
    requests: Sequence[Request]
    format: AnswerFormat
    prediction: Sequence[int] | None = None

    @property
    def sequences(self) -> int:
        return sum(request.params.n for request in self.requests)

    def usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        used = None if self.prediction is None else prediction_use(self.prediction, completions)
        return usage(completions, prompts=len(self.requests), predicted=used)


class Generation:
    """Handlers of /v1/completions and /v1/chat/completions."""

    def __init__(self, llm: AsyncLLM, options: ServeOptions, admission: Admission, metrics: Metrics) -> None:
        self._llm, self._options, self._admission, self._metrics = llm, options, admission, metrics

    async def completions(self, http: HttpRequest) -> Response:
        return await self._respond(http, self._completion_work)

    async def chat(self, http: HttpRequest) -> Response:
        return await self._respond(http, self._chat_work)

    # ---- bodies to requests ------------------------------------------------------------------------------------------

    def _completion_work(self, raw: bytes, request_id: str) -> Work:
        body = parse(CompletionBody, raw)
        self.check_model(body.model)
        params = completion_params(body, temperature=self._options.default_temperature)
        given = body.prompt
        several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
        prompts: Sequence[Any] = given if several else [given]
        if len(prompts) > _MOST_PROMPTS:
            raise ApiError(400, f"There are {len(prompts)} prompts.", f"Send at most {_MOST_PROMPTS}.", param="prompt")
        tokens = [self._encode(prompt) for prompt in prompts]
        head = AnswerHead.of(f"cmpl-{request_id}", self._options.model_name)
        form = CompletionFormat(head, self._llm.tokenizer.token_bytes, logprobs=params.logprobs is not None)
        return Work(body, [self._request(body, each, params) for each in tokens], form)

    def _chat_work(self, raw: bytes, request_id: str) -> Work:
        body = parse(ChatBody, raw)
        self.check_model(body.model)
        tokenizer = self._llm.tokenizer
        tools = ChatTools.of(body, tokenizer)
        tokens = self.encode_messages(body.messages, tools)
        params = chat_params(
            body,
            room=self._llm.engine.scheduler.max_context - len(tokens),
            temperature=self._options.default_temperature,
            tool_grammar=tools.grammar if tools else None,
        )
        form = ChatFormat(
            AnswerHead.of(f"chatcmpl-{request_id}", self._options.model_name),
            tokenizer.token_bytes,
            logprobs=params.logprobs is not None,
            calls=partial(CallWriter, tools.form) if tools else None,
        )
        predicted = tokenizer.encode_text(body.prediction.text) if body.prediction else None
        return Work(body, [self._request(body, tokens, params)], form, predicted)

    def check_model(self, name: str | None) -> None:
        """ApiError 404 for a model that is not served."""
        if name is not None and name != self._options.model_name:
            raise ApiError(
                404, f"The model {name[:100]!r} is not served here.", f"It serves {self._options.model_name!r}.",
                param="model",
            )  # fmt: skip

    def encode_messages(self, messages: Sequence[ChatMessage], tools: ChatTools | None = None) -> tuple[int, ...]:
        """Token ids of a conversation. What the template refuses is the caller's mistake."""
        knows_tools = tools is not None and tools.form.in_template
        turns: Sequence[Any] = [template_message(message, knows_tools=knows_tools) for message in messages]
        tokenizer = self._llm.tokenizer
        try:
            if tools is None:
                parts = tokenizer.chat_parts(turns)
            else:
                parts = tokenizer.chat_parts(tools.messages(turns), variables=tools.variables)
        except WagerError as error:
            raise ApiError(400, error.message, error.hint, param="messages") from None
        return tuple(tokenizer.encode_parts(parts))

    def _encode(self, prompt: Any) -> tuple[int, ...]:
        """Token ids of a prompt; control tokens written out in a text stay text: callers may be strangers."""
        if isinstance(prompt, str):
            tokens = tuple(self._llm.tokenizer.encode_untrusted(prompt))
        else:
            tokens = encode_prompt(self._llm.tokenizer, prompt)
        if not tokens:
            raise ApiError(400, "The prompt is empty.", "Send some text.", param="prompt")
        return tokens

    def _request(self, body: SamplingFields, tokens: tuple[int, ...], params: Any) -> Request:
        choice = body.speculation
        weight = 1.0 if choice is None or choice == "off" else choice.weight or 1.0
        return self._llm.request(tokens, params, weight=weight, speculation=speculation(body))

    # ---- answers -----------------------------------------------------------------------------------------------------

    async def _respond(self, http: HttpRequest, make: Callable[[bytes, str], Work]) -> Response:
        raw = await read_body(http, self._options)
        request_id = http.state.request_id
        work = await asyncio.to_thread(make, raw, request_id) if len(raw) > _QUICK else make(raw, request_id)
        grammars, grammar = self._llm.engine.grammars, work.requests[0].params.grammar
        if grammar is not None and grammars is not None:  # no step waits for it
            await asyncio.to_thread(grammars.compile, grammar)
        async with AsyncExitStack() as stack:
            stack.enter_context(self._admission.place(work.sequences))
            answer = await stack.enter_async_context(Answer(self._llm, work.requests))
            if work.body.speculation_stats:
                answer.measure()
            for request in work.requests:
                stack.callback(self._metrics.request_dropped, request.id)
                self._metrics.request_opened(request)
            await self._start(answer)
            if not work.body.stream:
                return await self._whole(http, work, answer)
            return EventStream(answer, self._plan(work, answer), stack.pop_all())

    async def _start(self, answer: Answer) -> None:
        try:
            await answer.start()
        except WagerError:
            for stream in answer.streams:
                self._metrics.request_refused(stream.request.id)
            raise

    def _plan(self, work: Work, answer: Answer) -> StreamPlan:
        options, told = work.body.stream_options, bool(work.body.speculation_stats)
        return StreamPlan(
            work.format,
            include_usage=bool(options and options.include_usage),
            prompt_tokens=sum(len(request.prompt) for request in work.requests) if _continuous(options) else None,
            usage=work.usage,
            timeout=self._options.request_timeout,
            details=(lambda done: draft_report(answer, done)) if told else None,
            guesses=GuessReport(self._llm.tokenizer, work.requests) if told else None,
        )

    async def _whole(self, http: HttpRequest, work: Work, answer: Answer) -> Response:
        gone = asyncio.create_task(until_gone(http.receive))
        finished = asyncio.create_task(_finish(answer))
        try:
            done, _ = await asyncio.wait(
                (gone, finished), timeout=self._options.request_timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise ApiError(504, f"There was no answer in {self._options.request_timeout:g} s.", "Ask for less.")
            if finished not in done:
                return Response(status_code=499)  # nobody reads it
            finished.result()
        finally:
            for task in (gone, finished):
                task.cancel()
                with suppress(asyncio.CancelledError, WagerError):
                    await task
        return Response(encoded(self._object(work, answer)), media_type="application/json")

    def _object(self, work: Work, answer: Answer) -> dict[str, Any]:
        completions = answer.completions()
        for completion in completions:
            if completion.finish_reason == "error":
                raise ApiError(500, completion.error)
            if completion.finish_reason == "abort":
                raise ApiError(503, "The server ended the request.", "Send it again.", retry_after=30)
        found = work.format.envelope(stream=False)
        found["choices"] = [work.format.choice(index, completion) for index, completion in enumerate(completions)]
        found["usage"] = work.usage(completions)
        if work.body.speculation_stats:
            found["speculation"] = draft_report(answer, completions)
        return found


def draft_report(answer: Answer, completions: Sequence[Completion]) -> dict[str, Any]:
    """What drafting brought to an answer: a row for each choice, and the seconds by stage of its steps."""
    return {
        "choices": [_choice_stats(completion.stats) for completion in completions],
        "stage_seconds": dict(answer.stage_seconds()),
    }


def _choice_stats(stats: Stats) -> dict[str, Any]:
    return {
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "drafter": stats.drafter,
        "prefill_s": stats.prefill_s,
        "decode_s": stats.decode_s,
        "preemptions": stats.preemptions,
        "seed": stats.seed,
    }


def _continuous(options: StreamOptions | None) -> bool:
    return bool(options and options.include_usage and options.continuous_usage_stats)


async def _finish(answer: Answer) -> None:
    while await answer.next_deltas():
        pass
