"""Bodies of the endpoints that answer, as plain values: prompts in tokens, parameters, how the answer is written."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from wager.constrain.tools import ToolFormat
from wager.engine.limits import check_length, check_request
from wager.errors import RequestError, WagerError
from wager.models.tokenizer import Tokenizer
from wager.prompts import encode_prompt
from wager.serve.bodies import ChatBody, ChatMessage, CompletionBody, SamplingFields, StreamOptions, parse
from wager.serve.errors import ApiError
from wager.serve.formats import AnswerFormat, AnswerHead, ChatFormat, CompletionFormat, TokenBytes, usage
from wager.serve.parameters import chat_params, completion_params, speculation
from wager.serve.predictions import prediction_use
from wager.serve.tools import CallWriter, ChatTools, template_message
from wager.types import Completion, Request, RequestSpeculation, SamplingParams

_MOST_PROMPTS = 64
"""Prompts of one request."""

_LONGEST_TOKENS = 64
"""Characters of a token, taken together: a text of more than these for each token of the context is not encoded."""


@dataclass(frozen=True, slots=True)
class ParsingContext:
    """What bodies are read by. `max_context`, `num_blocks` and `vocab` are the engine's, `temperature` is that of
    requests that name none."""

    name: str
    tokenizer: Tokenizer
    max_context: int
    num_blocks: int
    vocab: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Work:
    """What one HTTP request asks for. `prompts` are token ids, as arrays, which a process reads fastest; `calls` is
    how tool calls are written, where they may be; `predicted`: the request has a prediction."""

    kind: type[SamplingFields]
    head: AnswerHead
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    weight: float
    speculation: RequestSpeculation | None
    stream: bool
    stream_options: StreamOptions
    speculation_stats: bool
    has_tools: bool = False
    calls: ToolFormat | None = None
    predicted: bool = False

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def format(self, token_bytes: TokenBytes) -> AnswerFormat:
        """How the answer is written; it belongs to one answer."""
        logprobs = self.params.logprobs is not None
        if self.kind is CompletionBody:
            return CompletionFormat(self.head, token_bytes, logprobs=logprobs)
        calls = None if self.calls is None else partial(CallWriter, self.calls)
        return ChatFormat(self.head, token_bytes, logprobs=logprobs, calls=calls)

    def usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        used = prediction_use(self.params.prediction, completions) if self.predicted else None  # type: ignore[arg-type]
        return usage(completions, prompts=len(self.prompts), predicted=used)

    def refusal(self, error: RequestError, *, max_context: int) -> ApiError:
        """What the engine refused, by the name of the field that it came from."""
        name = error.field
        if self.kind is ChatBody:
            name = {"prompt": "messages", "grammar": "tools" if self.has_tools else "response_format"}.get(name, name)
        elif name == "grammar":
            name = "response_format"
        hint = error.hint
        if error.field == "speculation":
            hint = 'Name one of these, or send "speculation": "off". --drafter says what the server starts with.'
        longest = max(map(len, self.prompts))
        code = "context_length_exceeded" if error.field == "prompt" and longest >= max_context else None
        param = name if name in self.kind.model_fields else None
        return ApiError(error.status, error.message, hint, param=param, code=code)


def check_model(name: str | None, served: str) -> None:
    """ApiError 404 for a model that is not served."""
    if name is not None and name != served:
        raise ApiError(
            404,
            f"The model {name[:100]!r} is not served here.",
            f"It serves {served!r}.",
            param="model",
            code="model_not_found",
        )


class BodyParser:
    """Reads bodies for one model. Every method raises ApiError 400 that names the field at fault."""

    def __init__(self, model: ParsingContext) -> None:
        self.model = model

    def completion(self, raw: bytes, request_id: str) -> Work:
        """A body of /v1/completions."""
        body = parse(CompletionBody, raw)
        check_model(body.model, self.model.name)
        params = completion_params(body, temperature=self.model.temperature)
        given = body.prompt
        several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
        prompts: Sequence[Any] = given if several else [given]
        if len(prompts) > _MOST_PROMPTS:
            raise ApiError(400, f"There are {len(prompts)} prompts.", f"Send at most {_MOST_PROMPTS}.", param="prompt")
        head = AnswerHead.of(f"cmpl-{request_id}", self.model.name)
        return self._work(body, head, [self._encode(prompt) for prompt in prompts], params)

    def chat(self, raw: bytes, request_id: str) -> Work:
        """A body of /v1/chat/completions."""
        body = parse(ChatBody, raw)
        check_model(body.model, self.model.name)
        tools = ChatTools.of(body, self.model.tokenizer)
        tokens = self.encode_messages(body.messages, tools)
        predicted = self._predicted(body)
        params = chat_params(
            body,
            room=self.model.max_context - len(tokens),
            temperature=self.model.temperature,
            prediction=predicted or (),
            tool_grammar=tools.grammar if tools else None,
        )
        head = AnswerHead.of(f"chatcmpl-{request_id}", self.model.name)
        return self._work(
            body,
            head,
            [tokens],
            params,
            has_tools=bool(body.tools),
            calls=tools.form if tools and tools.callable else None,
            predicted=predicted is not None,
        )

    def encode_messages(
        self, messages: Sequence[ChatMessage], tools: ChatTools | None = None, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation. What the template refuses is the caller's mistake."""
        self._check_conversation(messages)
        knows_tools = tools is not None and tools.form.in_template
        turns: Sequence[Any] = [template_message(message, knows_tools=knows_tools) for message in messages]
        tokenizer = self.model.tokenizer
        try:
            parts = tokenizer.chat_parts(
                turns if tools is None else tools.messages(turns),
                add_generation_prompt=add_generation_prompt,
                variables=tools.variables if tools else None,
            )
        except WagerError as error:
            raise ApiError(400, error.message, error.hint, param="messages") from None
        self.check_characters(sum(len(part.text) for part in parts), "messages")
        return tokenizer.encode_parts(parts)

    def check_characters(self, count: int, name: str) -> None:
        """ApiError for a text that is too long to be worth encoding."""
        context, most = self.model.max_context, _LONGEST_TOKENS * self.model.max_context
        if count > most:
            raise ApiError(
                400,
                f"The text of {name!r} has {count} characters; for a context of {context} tokens at most {most} "
                "are encoded.",
                "Shorten the text.",
                param=name,
                code="context_length_exceeded",
            )

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text; control tokens written out in it stay text: callers may be strangers."""
        self.check_characters(len(text), "prompt")
        return self.model.tokenizer.encode_untrusted(text)

    def _check_conversation(self, messages: Sequence[ChatMessage]) -> None:
        """What cannot fit need not be rendered: a template writes a token or more for each message."""
        if len(messages) > self.model.max_context:
            raise ApiError(
                400,
                f"There are {len(messages)} messages; the context holds {self.model.max_context} tokens.",
                "Send fewer messages.",
                param="messages",
                code="context_length_exceeded",
            )
        self.check_characters(sum(len(message.text) for message in messages), "messages")

    def _predicted(self, body: ChatBody) -> list[int] | None:
        if body.prediction is None:
            return None
        text, most = body.prediction.text, self.model.max_context
        self.check_characters(len(text), "prediction")
        tokens = self.model.tokenizer.encode_text(text)
        if len(tokens) > most:
            raise ApiError(
                400,
                f"The prediction has {len(tokens)} tokens; the context holds {most}.",
                "Predict what the answer can be.",
                param="prediction",
            )
        return tokens

    def _encode(self, prompt: Any) -> Sequence[int]:
        """Token ids of a prompt."""
        tokens = self.encode_text(prompt) if isinstance(prompt, str) else encode_prompt(self.model.tokenizer, prompt)
        if not tokens:
            raise ApiError(400, "The prompt is empty.", "Send some text.", param="prompt")
        return tokens

    def _work(
        self,
        body: SamplingFields,
        head: AnswerHead,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        **more: Any,
    ) -> Work:
        """ApiError for prompts and parameters that the engine would refuse, which need not reach its thread."""
        choice, model = body.speculation, self.model
        work = Work(
            kind=type(body),
            head=head,
            prompts=prompts,
            params=params,
            weight=1.0 if choice is None or choice == "off" else choice.weight or 1.0,
            speculation=speculation(body),
            stream=bool(body.stream),
            stream_options=body.stream_options or StreamOptions(),
            speculation_stats=bool(body.speculation_stats),
            **more,
        )
        try:
            for prompt in prompts:
                request = Request(head.id, tuple(prompt), params, weight=work.weight, speculation=work.speculation)
                check_length(request, max_context=model.max_context, num_blocks=model.num_blocks)
                check_request(request, vocab=model.vocab, has_tokenizer=True)
        except RequestError as error:
            raise work.refusal(error, max_context=model.max_context) from None
        return replace(work, prompts=[array("I", prompt) for prompt in prompts])
