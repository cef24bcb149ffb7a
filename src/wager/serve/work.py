"""Bodies of the endpoints that answer, as requests of the engine and what writes their answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from wager.async_llm import AsyncLLM
from wager.errors import RequestError, WagerError
from wager.prompts import encode_prompt
from wager.serve.bodies import ChatBody, ChatMessage, CompletionBody, SamplingFields, parse
from wager.serve.errors import ApiError
from wager.serve.formats import AnswerFormat, AnswerHead, ChatFormat, CompletionFormat, usage
from wager.serve.limits import check_characters
from wager.serve.options import ServeOptions
from wager.serve.parameters import chat_params, completion_params, speculation
from wager.serve.predictions import prediction_use
from wager.serve.tools import CallWriter, ChatTools, template_message
from wager.types import Completion, Request

_MOST_PROMPTS = 64
"""Prompts of one request."""


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

    def refusal(self, error: RequestError, *, max_context: int) -> ApiError:
        """What the engine refused, by the name of the field that it came from."""
        body, name = self.body, error.field
        if isinstance(body, ChatBody):
            name = {"prompt": "messages", "grammar": "tools" if body.tools else "response_format"}.get(name, name)
        elif name == "grammar":
            name = "response_format"
        hint = error.hint
        if error.field == "speculation":
            hint = 'Name one of these, or send "speculation": "off". --drafter says what the server starts with.'
        longest = max(len(request.prompt) for request in self.requests)
        code = "context_length_exceeded" if error.field == "prompt" and longest >= max_context else None
        param = name if name in type(body).model_fields else None
        return ApiError(error.status, error.message, hint, param=param, code=code)


class BodyParser:
    """Reads bodies for one model. Every method raises ApiError 400 that names the field at fault."""

    def __init__(self, llm: AsyncLLM, options: ServeOptions) -> None:
        self._llm, self._options = llm, options
        self._context = llm.engine.scheduler.max_context

    def completion(self, raw: bytes, request_id: str, tenant: str) -> Work:
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
        return Work(body, [self._request(body, each, params, tenant) for each in tokens], form)

    def chat(self, raw: bytes, request_id: str, tenant: str) -> Work:
        body = parse(ChatBody, raw)
        self.check_model(body.model)
        tokenizer = self._llm.tokenizer
        tools = ChatTools.of(body, tokenizer)
        tokens = self.encode_messages(body.messages, tools)
        predicted = self._predicted(body)
        params = chat_params(
            body,
            room=self._context - len(tokens),
            temperature=self._options.default_temperature,
            prediction=predicted or (),
            tool_grammar=tools.grammar if tools else None,
        )
        form = ChatFormat(
            AnswerHead.of(f"chatcmpl-{request_id}", self._options.model_name),
            tokenizer.token_bytes,
            logprobs=params.logprobs is not None,
            calls=partial(CallWriter, tools.form) if tools and tools.callable else None,
        )
        return Work(body, [self._request(body, tokens, params, tenant)], form, predicted)

    def check_model(self, name: str | None) -> None:
        """ApiError 404 for a model that is not served."""
        if name is not None and name != self._options.model_name:
            raise ApiError(
                404, f"The model {name[:100]!r} is not served here.", f"It serves {self._options.model_name!r}.",
                param="model", code="model_not_found",
            )  # fmt: skip

    def encode_messages(
        self, messages: Sequence[ChatMessage], tools: ChatTools | None = None, *, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """Token ids of a conversation. What the template refuses is the caller's mistake."""
        knows_tools = tools is not None and tools.form.in_template
        turns: Sequence[Any] = [template_message(message, knows_tools=knows_tools) for message in messages]
        tokenizer = self._llm.tokenizer
        try:
            parts = tokenizer.chat_parts(
                turns if tools is None else tools.messages(turns),
                add_generation_prompt=add_generation_prompt,
                variables=tools.variables if tools else None,
            )
        except WagerError as error:
            raise ApiError(400, error.message, error.hint, param="messages") from None
        check_characters(sum(len(part.text) for part in parts), self._context, "messages")
        return tuple(tokenizer.encode_parts(parts))

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text; control tokens written out in it stay text: callers may be strangers."""
        check_characters(len(text), self._context, "prompt")
        return self._llm.tokenizer.encode_untrusted(text)

    def _predicted(self, body: ChatBody) -> list[int] | None:
        if body.prediction is None:
            return None
        text, most = body.prediction.text, self._context
        check_characters(len(text), self._context, "prediction")
        tokens = self._llm.tokenizer.encode_text(text)
        if len(tokens) > most:
            raise ApiError(400, f"The prediction has {len(tokens)} tokens; the context holds {most}.",
                           "Predict what the answer can be.", param="prediction")  # fmt: skip
        return tokens

    def _encode(self, prompt: Any) -> tuple[int, ...]:
        """Token ids of a prompt."""
        if isinstance(prompt, str):
            tokens = tuple(self.encode_text(prompt))
        else:
            tokens = encode_prompt(self._llm.tokenizer, prompt)
        if not tokens:
            raise ApiError(400, "The prompt is empty.", "Send some text.", param="prompt")
        return tokens

    def _request(self, body: SamplingFields, tokens: tuple[int, ...], params: Any, tenant: str) -> Request:
        choice = body.speculation
        weight = 1.0 if choice is None or choice == "off" else choice.weight or 1.0
        return self._llm.request(tokens, params, weight=weight, speculation=speculation(body), tenant=tenant)
