"""From bodies to plain values: prompts in tokens, parameters, how the answer is written; /tokenize and /detokenize."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from wager.constrain.tools import ToolFormat, tool_grammar, tools_message
from wager.engine.limits import check_length, check_request
from wager.errors import RequestError, UsageError, WagerError
from wager.models.tokenizer import Tokenizer
from wager.prompts import TextPart, encode_prompt
from wager.serve.bodies import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    DetokenizeBody,
    SamplingFields,
    StreamOptions,
    TokenizeBody,
    chat_params,
    completion_params,
    parse,
    read_json,
    speculation,
)
from wager.serve.errors import ApiError, field_error
from wager.serve.formats import (
    AnswerFormat,
    ChatFormat,
    CompletionFormat,
    TokenBytes,
    answer_head,
    encoded,
    usage,
)
from wager.types import Completion, Grammar, Request, RequestSpeculation, SamplingParams

_TOO_LONG = "context_length_exceeded"

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
class ParsedRequest:
    """What one HTTP request asks for. `prompts` are token ids, as arrays, which a process reads fastest; `calls` is
    how tool calls are written, where they may be; `predicted`: the request has a prediction."""

    kind: type[SamplingFields]
    head: Mapping[str, Any]
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
        return ChatFormat(self.head, token_bytes, logprobs=logprobs, calls=self.calls)

    def usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        prediction: Any = self.params.prediction if self.predicted else None
        return usage(completions, prompts=len(self.prompts), prediction=prediction)

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
        code = _TOO_LONG if error.field == "prompt" and longest >= max_context else None
        param = name if name in self.kind.model_fields else None
        return ApiError(error.status, error.message, hint, param=param, code=code)


def check_model(name: str | None, served: str) -> None:
    """ApiError 404 for a model that is not served."""
    if name is not None and name != served:
        message = f"The model {name[:100]!r} is not served here."
        raise ApiError(404, message, f"It serves {served!r}.", param="model", code="model_not_found")


class BodyParser:
    """Reads bodies for one model. Every method raises ApiError 400 that names the field at fault."""

    def __init__(self, model: ParsingContext) -> None:
        self.model = model

    def completion(self, raw: bytes, request_id: str) -> ParsedRequest:
        """A body of /v1/completions."""
        body = parse(CompletionBody, raw)
        check_model(body.model, self.model.name)
        params = completion_params(body, temperature=self.model.temperature)
        given = body.prompt
        several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
        prompts: Sequence[Any] = given if several else [given]
        if len(prompts) > _MOST_PROMPTS:
            raise field_error("prompt", f"There are {len(prompts)} prompts.", f"Send at most {_MOST_PROMPTS}.")
        head = answer_head("text_completion", request_id, self.model.name)
        return self._parsed(body, head, [self._encode(prompt) for prompt in prompts], params)

    def chat(self, raw: bytes, request_id: str) -> ParsedRequest:
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
        head = answer_head("chat.completion", request_id, self.model.name)
        return self._parsed(
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
                variables={"tools": tools.tools} if knows_tools and tools else None,
            )
        except WagerError as error:
            raise field_error("messages", error.message, error.hint) from None
        self.check_characters(sum(len(part.text) for part in parts), "messages")
        return tokenizer.encode_parts(parts)

    def check_characters(self, count: int, name: str) -> None:
        """ApiError for a text that is too long to be worth encoding."""
        context = self.model.max_context
        most = _LONGEST_TOKENS * context
        if count > most:
            limit = f"for a context of {context} tokens at most {most} are encoded"
            message = f"The text of {name!r} has {count} characters; {limit}."
            raise field_error(name, message, "Shorten the text.", code=_TOO_LONG)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text; control tokens written out in it stay text: callers may be strangers."""
        self.check_characters(len(text), "prompt")
        return self.model.tokenizer.encode_untrusted(text)

    def _check_conversation(self, messages: Sequence[ChatMessage]) -> None:
        """What cannot fit need not be rendered: a template writes a token or more for each message."""
        if len(messages) > self.model.max_context:
            message = f"There are {len(messages)} messages; the context holds {self.model.max_context} tokens."
            raise field_error("messages", message, "Send fewer messages.", code=_TOO_LONG)
        self.check_characters(sum(len(each.text) for each in messages), "messages")

    def _predicted(self, body: ChatBody) -> list[int] | None:
        if body.prediction is None:
            return None
        text = body.prediction.text
        most = self.model.max_context
        self.check_characters(len(text), "prediction")
        tokens = self.model.tokenizer.encode_text(text)
        if len(tokens) > most:
            message = f"The prediction has {len(tokens)} tokens; the context holds {most}."
            raise field_error("prediction", message, "Predict what the answer can be.")
        return tokens

    def _encode(self, prompt: Any) -> Sequence[int]:
        """Token ids of a prompt."""
        tokens = self.encode_text(prompt) if isinstance(prompt, str) else encode_prompt(self.model.tokenizer, prompt)
        if not tokens:
            raise field_error("prompt", "The prompt is empty.", "Send some text.")
        return tokens

    def _parsed(
        self,
        body: SamplingFields,
        head: Mapping[str, Any],
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        **more: Any,
    ) -> ParsedRequest:
        """ApiError for prompts and parameters that the engine would refuse, which need not reach its thread."""
        choice = body.speculation
        model = self.model
        parsed = ParsedRequest(
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
                request = Request(
                    head["id"],
                    tuple(prompt),
                    params,
                    weight=parsed.weight,
                    speculation=parsed.speculation,
                    streamed=True,
                )
                check_length(request, max_context=model.max_context, num_blocks=model.num_blocks)
                check_request(request, vocab=model.vocab, has_tokenizer=True)
        except RequestError as error:
            raise parsed.refusal(error, max_context=model.max_context) from None
        return replace(parsed, prompts=[array("I", prompt) for prompt in prompts])

    # ---- /tokenize and /detokenize: answers are JSON in UTF-8 --------------------------------------------------------

    def tokenize(self, raw: bytes, _request_id: str) -> bytes:
        """The answer to a body of /tokenize."""
        body = parse(TokenizeBody, raw)
        check_model(body.model, self.model.name)
        if (body.prompt is None) == (body.messages is None):
            raise field_error("prompt", "There must be a prompt or messages.", "Send one of the two.")
        tokens = self._tokenize_text(body) if body.prompt is not None else self._tokenize_messages(body)
        found: dict[str, Any] = {"count": len(tokens), "max_model_len": self.model.max_context, "tokens": tokens}
        if body.return_token_strs:
            found["token_strs"] = [self.model.tokenizer.token(token) for token in tokens]
        return encoded(found)

    def detokenize(self, raw: bytes, _request_id: str) -> bytes:
        """The answer to a body of /detokenize."""
        body = parse(DetokenizeBody, raw)
        check_model(body.model, self.model.name)
        vocab = self.model.vocab
        wrong = next((token for token in body.tokens if not 0 <= token < vocab), None)
        if wrong is not None:
            raise field_error("tokens", f"Token {wrong} is not in the vocabulary of {vocab}.")
        return encoded({"prompt": self.model.tokenizer.decode(body.tokens, special=True)})

    def _tokenize_text(self, body: TokenizeBody) -> list[int]:
        for name in ("tools", "add_generation_prompt"):
            if getattr(body, name) is not None:
                raise field_error(name, f"{name} goes with messages.", "Leave it out.")
        text = body.prompt or ""
        if body.add_special_tokens is not False:
            return self.encode_text(text)
        self.check_characters(len(text), "prompt")
        return self.model.tokenizer.encode_parts([TextPart(text)])

    def _tokenize_messages(self, body: TokenizeBody) -> list[int]:
        if body.add_special_tokens:
            message = "The chat template writes the special tokens of a conversation."
            raise field_error("add_special_tokens", message, "Leave add_special_tokens out.")
        chat = ChatBody.model_validate({"messages": body.messages, "tools": body.tools})
        tools = ChatTools.of(chat, self.model.tokenizer)
        whole = body.add_generation_prompt is not False
        return self.encode_messages(chat.messages, tools, add_generation_prompt=whole)


# ---- tools


@dataclass(frozen=True, slots=True)
class ChatTools:
    """The tools of one request, and how its model writes calls. `grammar` is None where nothing is demanded;
    `callable`: whether they may be called (tool_choice is not "none")."""

    tools: Sequence[Mapping[str, Any]]
    form: ToolFormat
    grammar: Grammar | None
    callable: bool = True

    @classmethod
    def of(cls, body: ChatBody, tokenizer: Tokenizer) -> ChatTools | None:
        """None for a request without tools. ApiError 400 names what is wrong with them."""
        if not body.tools:
            if body.tool_choice not in (None, "none"):
                raise field_error("tool_choice", "tool_choice needs tools.", "Send tools too.")
            return None
        choice = body.tool_choice or "auto"
        if choice != "none" and body.response_format is not None and body.response_format.type != "text":
            raise field_error("response_format", "tools and response_format exclude each other.", "Send one.")

        def is_hidden(text: str) -> bool:
            control = tokenizer.control_id(text)
            return control is not None and tokenizer.is_special(control)

        form = ToolFormat.of(tokenizer.chat_template, tokenizer.control_id, is_hidden)
        try:
            grammar = tool_grammar(body.tools, choice, form=form, parallel=body.parallel_tool_calls is not False)
        except UsageError as error:
            name = "tool_choice" if error.message.startswith("tool_choice") else "tools"
            raise field_error(name, error.message, error.hint) from None
        return cls(body.tools, form, grammar, choice != "none")

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The conversation, with a system message of the tools where the template does not know them."""
        if self.form.in_template:
            return list(messages)
        description = tools_message(self.tools)
        first = messages[0]
        if first["role"] == "system":
            return [{**first, "content": f"{first['content']}\n\n{description}"}, *messages[1:]]
        return [{"role": "system", "content": description}, *messages]


def template_message(message: ChatMessage, *, knows_tools: bool) -> dict[str, Any]:
    """A message as chat templates take them; calls in it as objects, or as text for a template without tools."""
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": message.text}
    if message.name:
        found["name"] = message.name
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        calls = [_call(call) for call in message.tool_calls]
        if knows_tools:
            found["tool_calls"] = calls
        else:
            written = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
            found["content"] = "\n".join([*([message.text] if message.text else []), *written])
    return found


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call of an earlier answer, with its arguments as an object, which templates expect; as the text that they are
    where that was cut off."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise field_error("messages", "A tool call has no function with a name.", "Send calls as they came.")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = read_json(arguments)
    return {"type": "function", "id": call.get("id"), "function": {"name": function["name"], "arguments": arguments}}
