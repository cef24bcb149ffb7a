"""From bodies to plain values: prompts in tokens, parameters, how the answer is written; /tokenize and /detokenize."""

from __future__ import annotations

import json
import re
import uuid
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

from wager.constrain.schemas import relaxed
from wager.constrain.tools import ToolFormat, known_tools, tool_grammar, tools_message
from wager.engine.limits import check_length, check_request
from wager.errors import RequestError, UsageError, WagerError
from wager.inputs import strict_json
from wager.models.tokenizer import Tokenizer
from wager.prompts import TextPart, encode_prompt
from wager.serve import messages, responses
from wager.serve.bodies import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    Constraint,
    DetokenizeBody,
    SamplingFields,
    StreamOptions,
    Strict,
    TokenizeBody,
    chat_params,
    completion_params,
    parse,
    speculation,
)
from wager.serve.errors import ApiError, field_error
from wager.serve.formats import (
    AnswerFormat,
    ChatFormat,
    CompletionFormat,
    EchoedPrompt,
    TokenBytes,
    answer_head,
    encoded,
    usage,
)
from wager.serve.messages import MessageForm, MessagesBody, TokenCountBody
from wager.serve.responses import ResponseForm, ResponsesBody, not_kept
from wager.types import Completion, Grammar, Request, RequestSpeculation, SamplingParams, TokenLogprob

_TOO_LONG = "context_length_exceeded"

_MOST_PROMPTS = 64
"""Prompts of one request."""

_GAP_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
"""Control tokens before the text, before what follows the gap, and before the answer, by the tokenizers that have
them (Qwen, StarCoder, SantaCoder, DeepSeek, Code Llama)."""

_LONGEST_TOKENS = 64
"""Characters of a token, taken together: a text of more than these for each token of the context is not encoded."""


@dataclass(frozen=True, slots=True)
class ParsingContext:
    """What bodies are read by. `max_context`, `num_blocks` and `vocab` are the engine's, `names` those by which
    its model is called, `temperature` is that of requests that name none. `strict`: fields that are not known are
    refused. `tenant_by`: the field that tells the users of one key apart."""

    names: Sequence[str]
    tokenizer: Tokenizer
    max_context: int
    num_blocks: int
    vocab: int
    temperature: float
    strict: bool = False
    tenant_by: str = ""


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """What one HTTP request asks for. `prompts` are token ids, as arrays, which a process reads fastest; `calls` is
    how tool calls are written, where they may be; `predicted`: the request has a prediction. `warnings`: what was left
    out or cannot be enforced. `checks`: schemas that the grammar lacks a part of, by the tool, or "" for the answer.
    `echoes`: the texts that the answer repeats, `scored`: how many alternatives are wanted to each token of a prompt
    (None: no log-probabilities of prompts). `answers`: False if the prompts alone are wanted. `blocks`: how an answer
    of Responses or Messages is written. `user`: which of a key's users asks, if they are told apart. `receipts`: the
    answer has a receipt of each choice."""

    kind: type[Strict]
    head: Mapping[str, Any]
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    weight: float
    speculation: RequestSpeculation | None
    stream: bool
    stream_options: StreamOptions
    speculation_stats: bool
    receipts: bool = False
    calls: ToolFormat | None = None
    predicted: bool = False
    calls_functions: bool = False
    warnings: tuple[str, ...] = ()
    checks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    echoes: Sequence[str] = ()
    scored: int | None = None
    answers: bool = True
    prompt_logprobs: bool = False
    grammar_field: str = "response_format"
    blocks: ResponseForm | MessageForm | None = None
    user: str = ""

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def format(self, token_bytes: TokenBytes, scores: Sequence[Sequence[TokenLogprob]] = ()) -> AnswerFormat:
        """How the answer is written; it belongs to one answer. `scores`: log-probabilities of the prompts."""
        logprobs = self.params.logprobs is not None
        if self.kind is CompletionBody:
            prompts = [
                EchoedPrompt(self.echoes[at] if self.echoes else None, prompt, scores[at] if scores else ())
                for at, prompt in enumerate(self.prompts if self.echoes or scores else ())
            ]
            return CompletionFormat(
                self.head,
                token_bytes,
                logprobs=logprobs,
                prompts=prompts,
                choices=self.params.n,
                prompt_logprobs=self.prompt_logprobs,
            )
        return ChatFormat(
            self.head, token_bytes, logprobs=logprobs, calls=self.calls, calls_functions=self.calls_functions
        )

    def usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        prediction: Any = self.params.prediction if self.predicted else None
        return usage(completions, prompts=len(self.prompts), prediction=prediction)

    def refusal(self, error: RequestError, *, max_context: int) -> ApiError:
        """What the engine refused, by the name of the field that it came from."""
        name = error.field
        if self.kind is not CompletionBody:
            name = {"prompt": "messages", "grammar": "tools" if self.calls else self.grammar_field}.get(name, name)
        elif name == "grammar":
            name = self.grammar_field
        name = self.kind.PARAMS.get(name, name)
        hint = error.hint
        if error.field == "speculation":
            hint = 'Name one of these, or send "speculation": "off". --drafter says what the server starts with.'
        longest = max(map(len, self.prompts))
        code = _TOO_LONG if error.field == "prompt" and longest >= max_context else None
        param = name if name.partition(".")[0] in self.kind.model_fields else None
        message = error.message.replace(f"Request {self.head['id']!r}", "The request")
        return ApiError(error.status, message, hint, param=param, code=code)


class Converted(NamedTuple):
    """The answer to a body about tokens, and what was left out of that."""

    content: bytes
    warnings: Sequence[str]


def check_model(name: str | None, served: Sequence[str]) -> str:
    """The name by which the answer calls the model. ApiError 404 for one that is not served."""
    if name is not None and name not in served:
        message = f"The model {name[:100]!r} is not served here."
        hint = f"It serves {', '.join(map(repr, served))}."
        raise ApiError(404, message, hint, param="model", code="model_not_found")
    return served[0] if name is None else name


class BodyParser:
    """Reads bodies for one model. Every method raises ApiError 400 that names the field at fault."""

    def __init__(self, model: ParsingContext) -> None:
        self.model = model

    def read(self, kind: str, raw: bytes, request_id: str, *earlier: Mapping[str, bytes]) -> Any:
        """What the method of that name makes of a body."""
        read = getattr(self, kind)(raw, request_id, *earlier)
        if not self.model.tenant_by or not isinstance(read, ParsedRequest):
            return read
        value = json.loads(raw.decode("utf-8-sig"))
        for name in self.model.tenant_by.split(".", 1):
            value = value.get(name) if isinstance(value, dict) else None
        user = value if isinstance(value, str) else "" if value is None else json.dumps(value)
        return replace(read, user=user)

    def completion(self, raw: bytes, request_id: str) -> ParsedRequest:
        """A body of /v1/completions."""
        left_out: list[str] = []
        body = parse(CompletionBody, raw, None if self.model.strict else left_out)
        name = check_model(body.model, self.model.names)
        constraint = body.constraint
        params = completion_params(body, temperature=self.model.temperature)
        given = body.prompt
        several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
        prompts: Sequence[Any] = given if several else [given]
        if len(prompts) > _MOST_PROMPTS:
            raise field_error("prompt", f"There are {len(prompts)} prompts.", f"Send at most {_MOST_PROMPTS}.")
        encoded_prompts = [self._encode(prompt, body.suffix or "") for prompt in prompts]
        scored = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            scored = max(scored or 0, body.logprobs)
        if body.max_tokens == 0 and not (body.echo or scored is not None):
            raise field_error("max_tokens", "max_tokens = 0 asks for no answer.", "Send echo or prompt_logprobs too.")
        if body.max_tokens == 0 and body.receipts:
            raise field_error("receipts", "There is no receipt of an answer without tokens.", "Leave receipts out.")
        if body.max_tokens == 0 and body.stream:
            raise field_error("stream", "An answer without tokens is not streamed.", "Leave stream out.")
        if scored is not None and body.stream:
            name_ = "prompt_logprobs" if body.prompt_logprobs is not None else "echo"
            raise field_error(name_, "Log-probabilities of a prompt are not streamed.", "Leave stream out.")
        parsed = self._parsed(
            body,
            answer_head("text_completion", request_id, name),
            encoded_prompts,
            params,
            warnings=_warnings(left_out, constraint),
            checks=_checks(constraint),
            scored=scored,
            answers=body.max_tokens != 0,
        )
        # Only now are all ids known to be in the vocabulary.
        return replace(parsed, echoes=[self._text_of(prompt) for prompt in prompts]) if body.echo else parsed

    def chat(self, raw: bytes, request_id: str) -> ParsedRequest:
        """A body of /v1/chat/completions."""
        left_out: list[str] = []
        body = parse(ChatBody, raw, None if self.model.strict else left_out)
        check_turns(body.messages)
        head = answer_head("chat.completion", request_id, check_model(body.model, self.model.names))
        return self.conversation(body, head, left_out)

    def conversation(self, body: ChatBody, head: Mapping[str, Any], left_out: list[str], **more: Any) -> ParsedRequest:
        """A conversation that is to be answered; `left_out` are fields that were, `more` fields of ParsedRequest."""
        constraint, left_out = body.constraint, [*left_out]
        tools = ChatTools.of(body, self.model.tokenizer, constraint, left_out if not self.model.strict else None)
        said: list[str] = []
        tokens = self.encode_messages(body, tools, said)
        if body.prompt_logprobs is not None and body.stream:
            raise field_error("prompt_logprobs", "Log-probabilities of a prompt are not streamed.", "Leave stream out.")
        predicted = self._predicted(body)
        grammar = constraint.grammar if constraint else None
        if tools is not None and tools.callable:
            grammar = tools.grammar
        params = chat_params(
            body,
            room=self.model.max_context - len(tokens),
            temperature=self.model.temperature,
            prediction=predicted or (),
            grammar=grammar,
        )
        return self._parsed(
            body,
            head,
            [tokens],
            params,
            calls=tools.form if tools and tools.callable else None,
            calls_functions=body.functions is not None,
            predicted=predicted is not None,
            scored=body.prompt_logprobs,
            warnings=(*_warnings(left_out, constraint, tools), *said),
            checks=_checks(constraint, tools),
            **more,
        )

    def response(self, raw: bytes, request_id: str, earlier: Mapping[str, bytes]) -> ParsedRequest:
        """A body of /v1/responses; `earlier` has the conversations that it may go on."""
        del request_id
        left_out: list[str] | None = None if self.model.strict else []
        body = parse(ResponsesBody, raw, left_out)
        name = check_model(body.model, self.model.names)
        before = body.previous_response_id
        if before is not None and before not in earlier:
            raise not_kept(before)
        with _named_as(ResponsesBody):
            chat, turns = responses.as_chat(body, json.loads(earlier[before]) if before else (), left_out)
            check_turns(chat.messages, id_name="call_id")
            parsed = self._fitting(chat, body, {"id": name, "model": name}, left_out)
        form = ResponseForm(
            id=responses.new_response_id(),
            fields=responses.response_fields(body, name, self.model.temperature),
            calls=parsed.calls,
            logprobs=body.wants_logprobs,
            kept=None if body.store is False else turns,
            padded=bool(body.stream_options and body.stream_options.include_obfuscation),
        )
        return replace(parsed, kind=ResponsesBody, blocks=form)

    def _fitting(
        self, chat: ChatBody, body: ResponsesBody, head: Mapping[str, Any], left_out: list[str] | None
    ) -> ParsedRequest:
        """The conversation, without its oldest messages if it does not fit and the request wants them cut off."""
        try:
            return self.conversation(chat, head, left_out or [])
        except ApiError as error:
            if body.truncation != "auto" or error.code != _TOO_LONG:
                raise
            whole = error
        system = [each for each in chat.messages[:1] if each.role == "system"]
        turns = chat.messages[len(system) :]
        cuts, results = list[int](), set[str]()
        for at in range(len(turns) - 1, 0, -1):  # no result stays whose call goes
            results.update(filter(None, [turns[at].tool_call_id]))
            results.difference_update(str(call.get("id")) for call in turns[at].tool_calls or ())
            if not results:
                cuts.append(at)
        cuts.reverse()
        low, high, found = 0, len(cuts) - 1, None
        while low <= high:  # how many of the oldest must go
            middle = (low + high) // 2
            kept = chat.model_copy(update={"messages": [*system, *turns[cuts[middle] :]]})
            try:
                found = self.conversation(kept, head, left_out or [])
                high = middle - 1
            except ApiError:
                low = middle + 1
        if found is None:
            raise whole
        told = f"The conversation is too long: its oldest {cuts[low]} messages were left out."
        return replace(found, warnings=(*found.warnings, told))

    def message(self, raw: bytes, request_id: str) -> ParsedRequest:
        """A body of /v1/messages."""
        left_out: list[str] | None = None if self.model.strict else []
        body = parse(MessagesBody, raw, left_out)
        name = check_model(body.model, self.model.names)
        with _named_as(MessagesBody):
            chat = messages.as_chat(body, left_out)
            check_turns(chat.messages, id_name="tool_use_id")
            parsed = self.conversation(chat, {"id": f"msg_{request_id}", "model": name}, left_out or [])
        form = MessageForm(id=f"msg_{uuid.uuid4().hex[:24]}", model=name, calls=parsed.calls)
        return replace(parsed, kind=MessagesBody, blocks=form)

    def count_tokens(self, raw: bytes, _request_id: str) -> Converted:
        """The answer to a body of /v1/messages/count_tokens."""
        left_out: list[str] | None = None if self.model.strict else []
        body = parse(TokenCountBody, raw, left_out)
        check_model(body.model, self.model.names)
        with _named_as(TokenCountBody):
            chat = messages.as_chat(body, left_out)
            tools, said = ChatTools.of(chat, self.model.tokenizer, None, left_out), list[str]()
            count = len(self.encode_messages(chat, tools, said))
        return Converted(encoded({"input_tokens": count}), [*_warnings(left_out or (), None), *said])

    def encode_messages(self, body: ChatBody, tools: ChatTools | None, warnings: list[str]) -> list[int]:
        """Token ids of a conversation. What the template refuses is the caller's mistake; what it does not know of what
        fills it in goes to `warnings`."""
        self._check_conversation(body.messages)
        tokenizer, continued = self.model.tokenizer, bool(body.continue_final_message)
        form = tools.form if tools else call_format(tokenizer)
        turns: Sequence[Any] = [template_message(message, form) for message in body.messages]
        variables: dict[str, Any] = {"tools": tools.tools} if tools and form.in_template else {}
        variables |= _template_variables(body, tokenizer.chat_template or "", warnings)
        turns = turns if tools is None else tools.messages(turns)
        answered = not continued and body.add_generation_prompt is not False
        render = partial(tokenizer.chat_parts, add_generation_prompt=answered, variables=variables or None)
        try:
            parts = render(turns)
        except WagerError as error:
            refusal = field_error("messages", error.message, error.hint)
            joined = _joined(turns)
            if self.model.strict or joined == turns:
                raise refusal from None
            try:
                parts = render(joined)
            except WagerError:
                raise refusal from None
            warnings.append(_JOINED)
        if continued:
            parts = _cut_behind(parts, str(turns[-1]["content"]))
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

    def _text_of(self, prompt: Any) -> str:
        """The text of a prompt."""
        return prompt if isinstance(prompt, str) else self.model.tokenizer.decode(prompt, special=True)

    def _around_gap(self, prefix: Any, suffix: str) -> list[int]:
        """Token ids of a text with a gap that the answer fills. ApiError where the tokenizer has no tokens for it."""
        tokenizer = self.model.tokenizer
        marks = next((each for each in _GAP_MARKS if all(map(tokenizer.control_id, each))), None)
        if marks is None:
            message = "The model's tokenizer has no tokens for a text with a gap."
            raise field_error("suffix", message, "Leave suffix out.", code="unsupported_parameter")
        if not isinstance(prefix, str):
            raise field_error("suffix", "suffix goes with a prompt that is text.", "Send the prompt as text.")
        self.check_characters(len(prefix) + len(suffix), "suffix")
        begin, hole, end = (TextPart(mark, parse_special=True) for mark in marks)
        return tokenizer.encode_parts([begin, TextPart(prefix), hole, TextPart(suffix), end])

    def _encode(self, prompt: Any, suffix: str = "") -> Sequence[int]:
        """Token ids of a prompt."""
        if suffix:
            return self._around_gap(prompt, suffix)
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
            receipts=bool(body.receipts),
            prompt_logprobs=body.prompt_logprobs is not None,
            grammar_field=body.constraining,
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
                check_length(
                    request, max_context=model.max_context, num_blocks=model.num_blocks, answered=parsed.answers
                )
                check_request(request, vocab=model.vocab, has_tokenizer=True)
        except RequestError as error:
            raise parsed.refusal(error, max_context=model.max_context) from None
        return replace(parsed, prompts=[array("I", prompt) for prompt in prompts])

    # ---- /tokenize and /detokenize: answers are JSON in UTF-8 --------------------------------------------------------

    def tokenize(self, raw: bytes, _request_id: str) -> Converted:
        """The answer to a body of /tokenize."""
        left_out: list[str] = []
        body = parse(TokenizeBody, raw, None if self.model.strict else left_out)
        check_model(body.model, self.model.names)
        if (body.prompt is None) == (body.messages is None):
            raise field_error("prompt", "There must be a prompt or messages.", "Send one of the two.")
        said: list[str] = []
        tokens = self._tokenize_text(body) if body.prompt is not None else self._tokenize_messages(body, said)
        found: dict[str, Any] = {"count": len(tokens), "max_model_len": self.model.max_context, "tokens": tokens}
        if body.return_token_strs:
            found["token_strs"] = [self.model.tokenizer.token(token) for token in tokens]
        return Converted(encoded(found), [*_warnings(left_out, None), *said])

    def detokenize(self, raw: bytes, _request_id: str) -> Converted:
        """The answer to a body of /detokenize."""
        left_out: list[str] = []
        body = parse(DetokenizeBody, raw, None if self.model.strict else left_out)
        check_model(body.model, self.model.names)
        vocab = self.model.vocab
        wrong = next((token for token in body.tokens if not 0 <= token < vocab), None)
        if wrong is not None:
            raise field_error("tokens", f"Token {wrong} is not in the vocabulary of {vocab}.")
        text = self.model.tokenizer.decode(body.tokens, special=True)
        return Converted(encoded({"prompt": text}), _warnings(left_out, None))

    def _tokenize_text(self, body: TokenizeBody) -> list[int]:
        for name in ("tools", "add_generation_prompt"):
            if getattr(body, name) is not None:
                raise field_error(name, f"{name} goes with messages.", "Leave it out.")
        text = body.prompt or ""
        if body.add_special_tokens is not False:
            return self.encode_text(text)
        control = self.model.tokenizer.control_id(text)
        if control is not None:  # how lm-eval asks for the token that ends a text
            return [control]
        self.check_characters(len(text), "prompt")
        return self.model.tokenizer.encode_parts([TextPart(text)])

    def _tokenize_messages(self, body: TokenizeBody, warnings: list[str]) -> list[int]:
        if body.add_special_tokens:
            message = "The chat template writes the special tokens of a conversation."
            raise field_error("add_special_tokens", message, "Leave add_special_tokens out.")
        names = ("messages", "tools", "add_generation_prompt")
        chat = ChatBody.model_validate({name: getattr(body, name) for name in names})
        return self.encode_messages(chat, ChatTools.of(chat, self.model.tokenizer), warnings)


@contextmanager
def _named_as(kind: type[Strict]) -> Iterator[None]:
    """Refusals name the fields of that API."""
    try:
        yield
    except ApiError as error:
        if name := kind.PARAMS.get(error.param or ""):
            error.message, error.hint = (
                re.sub(rf"\b{error.param}\b", name, text) for text in (error.message, error.hint)
            )
            error.param = name
        raise


# ---- tools


@dataclass(frozen=True, slots=True)
class ChatTools:
    """The tools of one request, and how its model writes calls. `grammar` is None where nothing is demanded;
    `callable`: whether they may be called (tool_choice is not "none"). `unenforced`, `checks`: what of their schemas
    the grammar lacks, and these schemas by tool."""

    tools: Sequence[Mapping[str, Any]]
    form: ToolFormat
    grammar: Grammar | None
    callable: bool = True
    unenforced: tuple[str, ...] = ()
    checks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        body: ChatBody,
        tokenizer: Tokenizer,
        constraint: Constraint | None = None,
        left_out: list[str] | None = None,
    ) -> ChatTools | None:
        """None for a request without tools. `constraint`: what an answer without calls must be. ApiError 400 names what
        is wrong with them; keys that are not known are named in `left_out`, and are wrong too without that list."""
        given, choice = _given_tools(body)
        if not given:
            if choice not in (None, "none", "auto"):
                raise field_error("tool_choice", "tool_choice needs tools.", "Send tools too.")
            return None
        choice = choice or "auto"
        schema = None
        if choice == "auto" and constraint is not None:
            if constraint.grammar.kind != "json_schema":
                message = f"tools that may be called and {body.constraining} of this kind exclude each other."
                raise field_error(body.constraining, message, "Send one, or a JSON schema.")
            schema = constraint.grammar.text

        form = call_format(tokenizer)
        parallel = body.parallel_tool_calls is not False and body.functions is None
        tools = given if left_out is None else known_tools(given, left_out)
        unenforced: dict[str, None] = {}
        checks: dict[str, Mapping[str, Any]] = {}
        try:
            grammar = tool_grammar(
                [_relaxed_tool(tool, unenforced, checks) for tool in tools],
                choice,
                form=form,
                parallel=parallel,
                schema=schema,
            )
        except UsageError as error:
            name = "tool_choice" if error.message.startswith("tool_choice") else "tools"
            raise field_error(name, error.message, error.hint) from None
        return cls(tools, form, grammar, choice != "none", tuple(unenforced), checks)

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The conversation, with a system message of the tools where the template does not know them."""
        if self.form.in_template:
            return list(messages)
        description = tools_message(self.tools)
        first = messages[0]
        if first["role"] == "system":
            return [{**first, "content": f"{first['content']}\n\n{description}"}, *messages[1:]]
        return [{"role": "system", "content": description}, *messages]


def call_format(tokenizer: Tokenizer) -> ToolFormat:
    """How the model writes calls."""
    return ToolFormat.of(tokenizer.chat_template, tokenizer.control_id, tokenizer.is_special)


def _given_tools(body: ChatBody) -> tuple[Sequence[Any], str | Mapping[str, Any] | None]:
    """Tools and the choice among them, also under the names that they had first."""
    choice: Any = body.tool_choice
    if body.functions is None:
        if body.function_call is not None:
            raise field_error("function_call", "function_call needs functions.", "Send functions too.")
        return body.tools or (), choice
    if body.tools is not None or choice is not None:
        raise field_error("functions", "functions and tools exclude each other.", "Send tools.")
    choice = body.function_call
    named = {"type": "function", "function": choice} if isinstance(choice, Mapping) else choice
    return [{"type": "function", "function": function} for function in body.functions], named


def _relaxed_tool(tool: Any, unenforced: dict[str, None], checks: dict[str, Mapping[str, Any]]) -> Any:
    """The tool with parameters that a grammar can enforce, where it is one."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        return tool
    parameters = function.get("parameters")
    if parameters in (None, {}):
        parameters = {"properties": {}}
    if not isinstance(parameters, Mapping):
        return tool
    found = relaxed(parameters)
    schema = {key: value for key, value in found.schema.items() if (key, value) != ("required", [])}
    if schema.keys() - {"type", "$schema"} == {"properties"} and not schema["properties"]:  # it takes no arguments
        schema["additionalProperties"] = False
    if found.unenforced:
        unenforced |= dict.fromkeys(found.unenforced)
        checks[str(function.get("name"))] = parameters
    return {**tool, "function": {**function, "parameters": schema}}


# ---- what is said about a request


def printable(text: str) -> str:
    """A caller's text for the log: what is no letter could end the line and forge another."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _warnings(left_out: Sequence[str], constraint: Constraint | None, tools: ChatTools | None = None) -> list[str]:
    found = []
    if left_out:
        found.append(f"Fields that are not known were left out: {printable(', '.join(left_out[:20]))}.")
    names = [*(constraint.unenforced if constraint else ()), *(tools.unenforced if tools else ())]
    if names:
        told = ", ".join(dict.fromkeys(names))
        found.append(f"Not enforced while the answer is written, but checked at its end: {told}.")
    return found


def _checks(constraint: Constraint | None, tools: ChatTools | None = None) -> Mapping[str, Mapping[str, Any]]:
    answer = {"": constraint.schema} if constraint is not None and constraint.schema is not None else {}
    return {**(tools.checks if tools else {}), **answer}


# ---- conversations


_LONGEST_END = 1000
"""Characters that a template may write behind a message."""

_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt")


def _template_variables(body: ChatBody, template: str, warnings: list[str]) -> dict[str, Any]:
    """What the request gives to the chat template. Templates that know no effort may know whether to think at all."""
    found = dict(body.chat_template_kwargs or {})
    for name in _OWN_VARIABLES:
        if name in found:
            message = f"chat_template_kwargs has {name!r}, which the request gives otherwise."
            raise field_error("chat_template_kwargs", message, "Leave it out.")
    effort = body.reasoning_effort
    if effort is not None:
        if "reasoning_effort" in template or "enable_thinking" not in template:
            found.setdefault("reasoning_effort", effort)
        else:
            found.setdefault("enable_thinking", effort != "none")
    unknown = [printable(name[:80]) for name in found if not re.search(rf"\b{re.escape(name)}\b", template)]
    if unknown:
        warnings.append(f"The chat template does not know {', '.join(unknown[:20])}, which has no effect.")
    if body.continue_final_message:
        if body.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt exclude each other."
            raise field_error("continue_final_message", message, "Send one.")
        if body.messages[-1].role != "assistant":
            message = "continue_final_message needs a last message of the assistant."
            raise field_error("continue_final_message", message, "Append what it begins with.")
    return found


_JOINED = "The chat template refuses these messages: those of the system were put first, and those of one role joined."


def _joined(turns: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation with one system message, which comes first, and neighbours of one role as one message, where
    they are text: what templates take that refuse the messages of agents."""
    texts = [str(turn["content"]) for turn in turns if turn["role"] == "system"]
    found: list[Mapping[str, Any]] = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    for turn in turns:
        last = found[-1] if found else None
        if last is not None and last["role"] == turn["role"] and last.keys() == turn.keys() == {"role", "content"}:
            found[-1] = {"role": turn["role"], "content": f"{last['content']}\n\n{turn['content']}"}
        elif turn["role"] != "system":
            found.append(turn)
    return found


def _cut_behind(parts: Sequence[TextPart], content: str) -> list[TextPart]:
    """The parts up to the end of the last message's content, which the answer continues."""
    text = "".join(part.text for part in parts)
    for wanted in (content, content.strip()):
        at = text.rfind(wanted, max(0, len(text) - len(wanted) - _LONGEST_END)) if wanted else -1
        if at >= 0:
            break
    else:
        message = "The last message is not found where the chat template should write it."
        raise field_error("continue_final_message", message, "Give it a text, or leave the field out.")
    end, found = at + len(wanted), []
    for part in parts:
        found.append(replace(part, text=part.text[: max(0, end)]))
        end -= len(part.text)
        if end <= 0:
            break
    return found


def check_turns(messages: Sequence[ChatMessage], *, id_name: str = "tool_call_id") -> None:
    """ApiError for a message without content, and for the result of a tool that nobody called, which OpenAI's and
    Anthropic's servers refuse too. `id_name`: how the API calls what names the call."""
    called: set[str] = set()
    for message in messages:
        called.update(str(call.get("id")) for call in message.tool_calls or ())
        if message.content is None and message.role not in ("assistant", "function"):
            raise field_error("messages", f"A message of role {message.role!r} has no content.", "Send a text.")
        if message.role != "tool":
            continue
        given = message.tool_call_id
        if given is None:
            raise field_error("messages", f"The result of a tool has no {id_name}.", "Send the id of its call.")
        if given not in called:
            what = f"The result of a tool is for the call {given[:80]!r}, which no message before it has."
            raise field_error("messages", what, "Send what the assistant said with that call too.")


def template_message(message: ChatMessage, form: ToolFormat) -> dict[str, Any]:
    """A message as chat templates take them; calls in it as objects, or as text for a template without tools."""
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    found: dict[str, Any] = {"role": role, "content": message.text}
    if message.name:
        found["name"] = message.name
    if message.tool_call_id:
        found["tool_call_id"] = _id(message.tool_call_id, form)
    thought = message.reasoning_content or message.reasoning
    if thought:
        found["reasoning_content"] = thought
    calls = [_call(call, form) for call in message.tool_calls or ()]
    if message.function_call is not None:
        calls.append(_call({"function": message.function_call}, form))
    if calls and form.in_template:
        found["tool_calls"] = calls
    elif calls:
        written = [form.begin + json.dumps(call["function"], ensure_ascii=False) + form.end for call in calls]
        found["content"] = "\n".join([*([message.text] if message.text else []), *written])
    return found


def _id(given: Any, form: ToolFormat) -> Any:
    """The id of a call: templates of Mistral's models refuse those that have not 9 characters."""
    wrong = form.name == "mistral" and len(str(given)) != 9
    return sha256(str(given).encode()).hexdigest()[:9] if wrong else given


def _call(call: Mapping[str, Any], form: ToolFormat) -> dict[str, Any]:
    """A call of an earlier answer, with its arguments as an object, which templates expect; as the text that they are
    where that was cut off."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise field_error("messages", "A tool call has no function with a name.", "Send calls as they came.")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = strict_json(arguments)
    function = {"name": function["name"], "arguments": arguments}
    return {"type": "function", "id": _id(call.get("id"), form), "function": function}
