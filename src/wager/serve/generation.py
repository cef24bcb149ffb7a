"""The endpoints that answer: a body becomes requests of the engine, their deltas JSON, whole or as a stream."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from wager.async_llm import AsyncLLM, AsyncOutputStream
from wager.errors import RequestError, UsageError, WagerError
from wager.receipts import Receipt, check_rule
from wager.serve.bodies import ChatBody
from wager.serve.body_process import BodyKind, BodyReader
from wager.serve.errors import ApiError, failed_answer, field_error
from wager.serve.formats import EchoedPrompt, encoded, encoded_in_parts, prompt_logprobs, read_calls
from wager.serve.limits import Admission, BodyLimits, ServeOptions, Turns
from wager.serve.metrics import Metrics
from wager.serve.parsing import ParsedRequest
from wager.serve.responses import ResponseStore
from wager.serve.streaming import (
    AnswerWriter,
    ChunkWriter,
    EventStream,
    GuessReport,
    draft_report,
    log_report,
    until_gone,
)
from wager.tenants import tenant_of_user
from wager.types import GRAMMAR_DRAFTER, Completion, Grammar, Request, SamplingParams, Stats, TokenLogprob

log = logging.getLogger("wager.serve")

_QUICK_TOKENS = 1_000
"""Tokens, and alternatives to them, of an answer that is written in the event loop; of a larger one in a thread."""

W = TypeVar("W")

_LONGEST_WARNING = 2000
"""Characters of the header of warnings."""

_PREVIOUS = re.compile(rb'"previous_response_id"\s*:\s*"(resp_[0-9a-f]{1,64})"')
_MOST_NAMES = 4


@dataclass(eq=False)
class Generation:
    """The handler of /v1/completions, /v1/chat/completions, /v1/responses and /v1/messages. `kept` has the answers that
    may be read again."""

    llm: AsyncLLM
    options: ServeOptions
    limits: BodyLimits
    bodies: BodyReader
    admission: Admission
    metrics: Metrics
    kept: ResponseStore = field(default_factory=ResponseStore)
    _compiling: Turns = field(default_factory=Turns)

    async def respond(self, http: HttpRequest, kind: BodyKind) -> Response:
        """The answer to a body of that kind: `completion`, `chat`, `response` or `message`."""
        tenant, until = http.state.tenant, asyncio.get_running_loop().time() + self.options.request_timeout
        async with self.limits.body(http) as raw:
            earlier = (self._earlier(raw, tenant),) if kind == "response" else ()
            parsed: ParsedRequest = await self.bodies.read(kind, raw, http.state.request_id, *earlier, tenant=tenant)
        log_warnings(http, parsed.warnings)
        self._check_receipts(parsed)
        own = tenant_of_user(tenant, parsed.user)
        async with AsyncExitStack() as stack:
            stack.enter_context(self.admission.place(parsed.sequences))
            parsed = await self._ready(parsed, own, key=tenant, until=until)
            scores = await self._scores(http, parsed, own, until=until) if parsed.scored is not None else ()
            if scores is None:
                return Response(status_code=499)  # nobody reads it
            if not parsed.answers:
                none = [_no_answer(prompt) for prompt in parsed.prompts for _ in range(parsed.params.n)]
                return await self._written(parsed, None, none, scores, tenant)
            requests = await self._requests(parsed, own)
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
                completions = await self._complete(http, answer, until=until)
                if completions is None:
                    return Response(status_code=499)
                return await self._written(parsed, answer, completions, scores, tenant)
            writer, last = self._writer(parsed, answer, tenant)
            headers = warning_headers(parsed.warnings)
            events = EventStream(answer, writer, last=last, until=until, late=self._late(), headers=headers)
            stack.callback(lambda: log_fields.update(log_report(answer, records, events.error)))
            events.resources = stack.pop_all()
            return events

    def _check_receipts(self, parsed: ParsedRequest) -> None:
        """ApiError 400 if there are no receipts of such answers."""
        if parsed.receipts:
            try:
                check_rule(self.llm.engine.runner.rule)
            except UsageError as error:
                raise field_error("receipts", error.message, "The server's --verify says so.") from None

    async def _receipts(
        self, parsed: ParsedRequest, answer: AsyncOutputStream | None, completions: Sequence[Completion]
    ) -> list[dict[str, Any]]:
        """The receipts of the choices that ended well, if they are wanted. They tell of the request, its answer and the
        model; the first one may hash the weights."""
        if answer is None or not parsed.receipts:
            return []
        requests = [request for request in answer.requests for _ in request.choices]
        name, key = str(parsed.head["model"]), self.options.receipt_key

        def make() -> list[dict[str, Any]]:
            return [
                Receipt.of(self.llm.engine, request, completion, key=key, model=name).as_dict()
                for request, completion in zip(requests, completions, strict=True)
                if completion.finish_reason in ("stop", "length")
            ]

        return await asyncio.to_thread(make)

    async def _ready(self, parsed: ParsedRequest, tenant: str, *, key: str, until: float) -> ParsedRequest:
        """The request with its grammar compiled, one at a time and in a thread, so that no step waits for it. Keys take
        turns, however many tenants each names. ApiError if its turn does not come `until` a time of the event loop."""
        params = parsed.params
        grammars = self.llm.engine.grammars
        if params.grammar is None or grammars is None:
            return parsed
        try:
            async with asyncio.timeout_at(until) as waiting, self._compiling.turn(key):
                waiting.reschedule(None)  # a thread cannot be stopped
                grammar = await asyncio.to_thread(grammars.compile, params.grammar, tenant=tenant)
        except RequestError as error:
            raise parsed.refusal(error, max_context=self.llm.engine.scheduler.max_context) from None
        except TimeoutError:
            raise self._late() from None
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

    def _earlier(self, raw: bytes, tenant: str) -> dict[str, bytes]:
        """The conversations that a body may go on: of the responses that it seems to name, those that are kept."""
        names = {name.decode() for name in islice(_PREVIOUS.findall(raw), _MOST_NAMES)}
        found = {name: self.kept.get(tenant, name) for name in names}
        return {name: each.conversation for name, each in found.items() if each is not None}

    async def _scores(
        self, http: HttpRequest, parsed: ParsedRequest, tenant: str, *, until: float
    ) -> list[tuple[TokenLogprob, ...]] | None:
        """Log-probabilities of the tokens of each prompt but the first: those of an answer that can be no other. None
        if the client has gone."""
        requests, places = [], []
        for place, prompt in enumerate(parsed.prompts):
            if len(prompt) > 1:
                known = Grammar.tokens(prompt[1:])
                params = SamplingParams(
                    max_tokens=len(prompt) - 1, ignore_eos=True, logprobs=parsed.scored, grammar=known
                )
                requests.append(self.llm.request(tuple(prompt[:1]), params, tenant=tenant))
                places.append(place)
                await asyncio.sleep(0)
        scores: list[tuple[TokenLogprob, ...]] = [()] * len(parsed.prompts)
        if requests:
            async with self.llm.open_stream(*requests) as stream:
                completions = await self._complete(http, stream, until=until)
            if completions is None:
                return None
            for place, completion in zip(places, completions, strict=True):
                _check_ended(completion)
                scores[place] = completion.logprobs
        return scores

    def _writer(
        self, parsed: ParsedRequest, answer: AsyncOutputStream, tenant: str
    ) -> tuple[AnswerWriter, Callable[[Sequence[Completion]], Awaitable[bytes]]]:
        """What writes the events of an answer, and those behind its last delta."""
        options, stats = parsed.stream_options, parsed.speculation_stats
        token_bytes = self.llm.tokenizer.token_bytes
        if parsed.blocks is not None:
            blocks = parsed.blocks.writer(self.llm.tokenizer, parsed.prompts[0])

            async def last_of_blocks(completions: Sequence[Completion]) -> bytes:
                [completion] = completions
                if error := failed_answer(completion):
                    return blocks.failed(error)
                further = await self._further(parsed, answer, completions, tenant)
                size, usage = _size(parsed, completions), parsed.usage(completions)
                data, response = await _beside(size, lambda: blocks.last(completion, usage, further))
                if response is not None:
                    kept = await _beside(size, lambda: encoded(response))
                    self._keep(parsed, blocks, kept, tenant)
                return data

            return blocks, last_of_blocks
        continuous = options.include_usage and options.continuous_usage_stats
        writer = ChunkWriter(
            parsed.format(token_bytes),
            usage=parsed.usage if options.include_usage else None,
            prompt_tokens=parsed.prompt_tokens if continuous else None,
            details=(lambda done: draft_report(answer, done)) if stats else None,
            guesses=self._guess_report(answer.requests) if stats else None,
            padded=bool(options.include_obfuscation),
        )

        async def last(completions: Sequence[Completion]) -> bytes:
            further = await self._further(parsed, answer, completions, tenant)
            return await _beside(_size(parsed, completions), lambda: writer.last(completions, further))

        return writer, last

    async def _further(
        self, parsed: ParsedRequest, answer: AsyncOutputStream | None, completions: Sequence[Completion], tenant: str
    ) -> dict[str, Any]:
        """What an answer of any API has besides, where there is some."""
        warnings = await self._checked(parsed, completions, tenant)
        found = {"warnings": warnings, "receipts": await self._receipts(parsed, answer, completions)}
        return {name: each for name, each in found.items() if each}

    async def _checked(self, parsed: ParsedRequest, completions: Sequence[Completion], tenant: str) -> list[str]:
        """What complete answers break of schemas that their grammar lacks a part of."""
        found: list[str] = []
        for completion in completions if parsed.checks else ():
            if completion.finish_reason == "stop":
                for name, text in _parts(parsed, completion):
                    if schema := parsed.checks.get(name):
                        found += await self.bodies.check(schema, text, tenant=tenant)
        if found:
            log.warning("an answer breaks its schema, or could not be checked")
        return found

    def _keep(self, parsed: ParsedRequest, writer: Any, response: bytes, tenant: str) -> None:
        form = parsed.blocks
        if form is not None and form.kept is not None:
            self.kept.put(tenant, form.id, response, encoded([*form.kept, writer.message]))

    def _guess_report(self, requests: Sequence[Request]) -> GuessReport:
        """Rejected guesses are shown of drafters that guess from nothing but the request."""
        drafters = self.llm.engine.proposer.drafters.items()
        own = {name for name, drafter in drafters if not drafter.remembers_requests}
        shown = None if self.options.show_rejected else own | {GRAMMAR_DRAFTER}
        return GuessReport(self.llm.tokenizer, requests, shown=shown)

    def _late(self) -> ApiError:
        return ApiError(504, f"The answer was not complete in {self.options.request_timeout:g} s.", "Ask for less.")

    async def _complete(self, http: HttpRequest, answer: AsyncOutputStream, *, until: float) -> list[Completion] | None:
        """The choices of an answer that was started, or of one to start; None if the client has gone. ApiError if it
        is not complete `until` a time of the event loop."""
        gone = asyncio.create_task(until_gone(http.receive))
        finished = asyncio.create_task(answer.complete())
        left = max(0.0, until - asyncio.get_running_loop().time())
        try:
            done, _ = await asyncio.wait((gone, finished), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise self._late()
            return finished.result() if finished in done else None
        finally:
            for task in (gone, finished):
                task.cancel()
                with suppress(asyncio.CancelledError, WagerError):
                    await task

    async def _written(
        self,
        parsed: ParsedRequest,
        answer: AsyncOutputStream | None,
        completions: Sequence[Completion],
        scores: Sequence[Sequence[TokenLogprob]],
        tenant: str,
    ) -> Response:
        """A whole answer; `answer` is None where the prompts alone were wanted."""
        for completion in completions:
            _check_ended(completion)
        further = await self._further(parsed, answer, completions, tenant)
        size = _size(parsed, completions, scores)
        encode = encoded if size <= _QUICK_TOKENS else encoded_in_parts
        if parsed.blocks is not None:
            writer = parsed.blocks.writer(self.llm.tokenizer, parsed.prompts[0])
            usage = parsed.usage(completions)
            content = await _beside(size, lambda: encode(writer.whole(completions[0], usage, further)))
            self._keep(parsed, writer, content, tenant)
        else:
            content = await _beside(size, lambda: encode(self._object(parsed, answer, completions, scores, further)))
        headers = warning_headers((*parsed.warnings, *further.get("warnings", ())))
        return Response(content, headers=headers, media_type="application/json")

    def _object(
        self,
        parsed: ParsedRequest,
        answer: AsyncOutputStream | None,
        completions: Sequence[Completion],
        scores: Sequence[Sequence[TokenLogprob]],
        further: Mapping[str, Any],
    ) -> dict[str, Any]:
        token_bytes = self.llm.tokenizer.token_bytes
        form = parsed.format(token_bytes, scores)
        choices = [form.choice(index, completion) for index, completion in enumerate(completions)]
        found = {**form.head, "choices": choices, "usage": parsed.usage(completions), **further}
        if parsed.kind is ChatBody and parsed.prompt_logprobs:
            found["prompt_logprobs"] = prompt_logprobs(EchoedPrompt(None, parsed.prompts[0], scores[0]), token_bytes)
        if parsed.speculation_stats and answer is not None:
            found["speculation"] = draft_report(answer, completions)
        return found


def _size(
    parsed: ParsedRequest, completions: Sequence[Completion], scores: Sequence[Sequence[TokenLogprob]] = ()
) -> int:
    """Tokens of an answer, and the alternatives to them that it tells; with receipts it is never small."""
    tokens = sum(len(each.token_ids) for each in completions) + sum(map(len, scores))
    return parsed.receipts * (_QUICK_TOKENS + 1) + tokens * (1 + max(parsed.params.logprobs or 0, parsed.scored or 0))


async def _beside(size: int, write: Callable[[], W]) -> W:
    """What `write` returns; for an answer that is not small in a thread."""
    return write() if size <= _QUICK_TOKENS else await asyncio.to_thread(write)


def _check_ended(completion: Completion) -> None:
    """ApiError for a choice that did not come to its end."""
    if error := failed_answer(completion):
        raise error


def _no_answer(prompt: Sequence[int]) -> Completion:
    """The choice of a request that wants none."""
    return Completion("", 0, (), "", "length", Stats(prompt_tokens=len(prompt), completion_tokens=0, seed=0))


def _parts(parsed: ParsedRequest, completion: Completion) -> list[tuple[str, str]]:
    """The calls of a choice, by name, or its text under ""."""
    calls = read_calls(parsed.calls, completion.text)[1] if parsed.calls else []
    named = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return named or [("", completion.text)]


def log_warnings(http: HttpRequest, warnings: Sequence[str]) -> None:
    for told in warnings:
        log.warning("%s", told, extra={"fields": {"request_id": http.state.request_id}})


def warning_headers(warnings: Sequence[str]) -> dict[str, str]:
    """What was left out or is not enforced, as printable ASCII."""
    text = " ".join(warnings)[:_LONGEST_WARNING]
    return {"x-wager-warning": "".join(c if " " <= c <= "~" else "?" for c in text)} if text else {}
