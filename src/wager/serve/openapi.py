"""The API described for machines: models of what the server answers, which tests check every answer against, and the
OpenAPI 3.1 document that is made of them and of the models of bodies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

from wager import __version__
from wager.serve.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from wager.serve.messages import MessagesBody, TokenCountBody
from wager.serve.responses import ResponsesBody

FinishReasons = Literal["stop", "length", "tool_calls", "function_call", "abort", "error"]


class AnswerFields(BaseModel):
    """Has these fields and no others; those with a default may be left out."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorFields(AnswerFields):
    """`param` is the field at fault, `code` a word for the cause."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class ErrorAnswer(AnswerFields):
    """Every answer that is no success."""

    error: ErrorFields


# ---- answers of the model --------------------------------------------------------------------------------------------


class PromptTokens(AnswerFields):
    cached_tokens: int


class PredictionTokens(AnswerFields):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class TokenUsage(AnswerFields):
    """Without details in chunks before the last."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens | None = None
    completion_tokens_details: PredictionTokens | None = None


class TextLogprobs(AnswerFields):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class AlternativeToken(AnswerFields):
    token: str
    logprob: float | None
    bytes: list[int]


class ChosenToken(AlternativeToken):
    top_logprobs: list[AlternativeToken]


class ChatLogprobs(AnswerFields):
    content: list[ChosenToken]
    refusal: None


class DraftedPart(AnswerFields):
    text: str
    drafter: str


class ChunkSpeculation(AnswerFields):
    """Who guessed a chunk's text, how many guesses were rejected, and which, where they may be shown."""

    token_ids: list[int]
    drafted_by: list[str]
    parts: list[DraftedPart]
    rejected: list[str]
    rejected_tokens: int
    drafter: str


class SpeculationStats(AnswerFields):
    rounds: int
    drafted: int
    accepted: int
    mean_acceptance_length: float
    drafter: str
    prefill_s: float
    decode_s: float
    preemptions: int
    seed: int


class SpeculationReport(AnswerFields):
    """A row for each choice, and seconds by stage of the steps that emitted for the answer."""

    choices: list[SpeculationStats]
    stage_seconds: dict[str, float]


class PromptLogprob(AnswerFields):
    """`rank` is known of the likeliest."""

    logprob: float | None
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt but the first, by ids, itself and the likeliest ones."""


class TextChoice(AnswerFields):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReasons | None
    prompt_logprobs: PromptLogprobs | None = None
    speculation: ChunkSpeculation | None = None


class ModelAnswer(AnswerFields):
    """What every answer of the model has, whole or an event of a stream."""

    id: str
    created: int
    model: str
    usage: TokenUsage | None = None
    speculation: SpeculationReport | None = None
    warnings: list[str] | None = None
    receipts: list[dict[str, Any]] | None = None


class TextAnswer(ModelAnswer):
    """An answer of /v1/completions: whole, and each event of a stream."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class CalledFunction(AnswerFields):
    """In chunks the first piece of a call has its name."""

    name: str | None = None
    arguments: str


class ToolCallPart(AnswerFields):
    """A call, or in chunks a piece of one."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class AnswerMessage(AnswerFields):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallPart] | None = None
    function_call: CalledFunction | None = None


class ChatChoice(AnswerFields):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasons


class ChatAnswer(ModelAnswer):
    """An answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_logprobs: PromptLogprobs | None = None


class MessageDelta(AnswerFields):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallPart] | None = None
    function_call: CalledFunction | None = None


class ChunkChoice(AnswerFields):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasons | None
    speculation: ChunkSpeculation | None = None


class ChatChunk(ModelAnswer):
    """Each event of a streamed chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]


class ResponseText(AnswerFields):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChosenToken]


class ResponseItem(AnswerFields):
    """A message, with `content`, or a call of a function, with the rest."""

    id: str
    type: Literal["message", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | None = None
    content: list[ResponseText] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class ResponseUsage(AnswerFields):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseAnswer(BaseModel):
    """An answer of /v1/responses: what it has beside these repeats the request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    output: list[ResponseItem]
    usage: ResponseUsage | None = None
    warnings: list[str] | None = None
    receipts: list[dict[str, Any]] | None = None


class ResponseEvent(BaseModel):
    """An event of a streamed response; its `type` says what else it has."""

    type: str
    sequence_number: int
    response: ResponseAnswer | None = None
    item: ResponseItem | None = None


class DeletedResponse(AnswerFields):
    id: str
    object: Literal["response.deleted"]
    deleted: bool


class MessageBlock(AnswerFields):
    """A text, or a call with the rest."""

    type: Literal["text", "tool_use"]
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    caller: dict[str, str] | None = None


class MessageUsage(AnswerFields):
    """The last three are a whole message's; what is null is told by Anthropic's server alone."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int | None
    cache_read_input_tokens: int | None
    output_tokens_details: None
    server_tool_use: None
    cache_creation: None = None
    inference_geo: None = None
    service_tier: None = None


class MessageAnswer(AnswerFields):
    """An answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    stop_details: None
    container: None
    usage: MessageUsage
    warnings: list[str] | None = None
    receipts: list[dict[str, Any]] | None = None


class MessageEvent(AnswerFields):
    """An event of a streamed message; its `type` says what else it has."""

    type: str
    index: int | None = None
    message: MessageAnswer | None = None
    content_block: MessageBlock | None = None
    delta: dict[str, str | None] | None = None
    usage: MessageUsage | None = None
    warnings: list[str] | None = None
    receipts: list[dict[str, Any]] | None = None
    error: dict[str, str] | None = None
    request_id: str | None = None


class MessageErrorFields(AnswerFields):
    type: str
    message: str


class MessageError(AnswerFields):
    """Every answer below /v1/messages that is no success."""

    type: Literal["error"]
    error: MessageErrorFields
    request_id: str | None


class CountedTokens(AnswerFields):
    input_tokens: int


# ---- answers about the server ----------------------------------------------------------------------------------------


class ServedModel(AnswerFields):
    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["wager"]
    max_model_len: int
    type: Literal["model"]
    display_name: str
    created_at: str
    max_input_tokens: int
    lifecycle: str


class ServedModels(AnswerFields):
    object: Literal["list"]
    data: list[ServedModel]
    first_id: str
    last_id: str
    has_more: bool


class TokenList(AnswerFields):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DecodedText(AnswerFields):
    prompt: str


class TokenizerInfo(AnswerFields):
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None


class ServerHealth(AnswerFields):
    status: Literal["ok"]


class ServerVersion(AnswerFields):
    version: str


class LiveNumbers(BaseModel):
    """What the dashboard shows; it may grow."""

    model: str
    version: str
    drafts: dict[str, Any]


# ---- the document ----------------------------------------------------------------------------------------------------


_EVENTS = "Events `data: OBJECT`, each {chunk} or an ErrorAnswer, and `data: [DONE]` at the end."
_NAMED_EVENTS = "Events `event: TYPE` with `data: OBJECT`, each {chunk}."


@dataclass(frozen=True, slots=True)
class Operation:
    """One path: what it does, the model of its body (None: GET), what it answers (a model, or a media type), the
    model of its events, if it may stream, and that of what DELETE answers, if it may be deleted."""

    text: str
    answer: type[BaseModel] | str
    body: type[BaseModel] | None = None
    events: type[BaseModel] | None = None
    deleted: type[BaseModel] | None = None
    error: type[BaseModel] = ErrorAnswer

    @property
    def named_events(self) -> bool:
        """Whether its events have names, and nothing stands at their end."""
        return self.events in (ResponseEvent, MessageEvent)


OPERATIONS: Mapping[str, Operation] = {
    "/v1/completions": Operation("Continue prompts", TextAnswer, CompletionBody, TextAnswer),
    "/v1/chat/completions": Operation("Answer a conversation", ChatAnswer, ChatBody, ChatChunk),
    "/v1/responses": Operation("Answer an input", ResponseAnswer, ResponsesBody, ResponseEvent),
    "/v1/responses/{name}": Operation("A response that was stored", ResponseAnswer, deleted=DeletedResponse),
    "/v1/messages": Operation("Answer messages", MessageAnswer, MessagesBody, MessageEvent, error=MessageError),
    "/v1/messages/count_tokens": Operation("Count tokens", CountedTokens, TokenCountBody, error=MessageError),
    "/tokenize": Operation("Token ids of a text or of a conversation", TokenList, TokenizeBody),
    "/detokenize": Operation("The text of token ids", DecodedText, DetokenizeBody),
    "/tokenizer_info": Operation("The tokens around a text, and the chat template", TokenizerInfo),
    "/v1/models": Operation("The model that is served", ServedModels),
    "/v1/models/{name}": Operation("The model, if it is served", ServedModel),
    "/health": Operation("Whether requests are taken", ServerHealth),
    "/version": Operation("The version of wager", ServerVersion),
    "/metrics": Operation("Metrics for Prometheus", "text/plain"),
    "/live": Operation("What the dashboard shows", LiveNumbers),
    "/openapi.json": Operation("This document", "application/json"),
    "/": Operation("The dashboard", "text/html"),
}

_REFUSALS: Mapping[int, str] = {
    400: "A field that is unknown or not possible, which the error names; or no HTTP",
    401: "The API key is missing or unknown",
    404: "The model is not served, or there is no such response",
    408: "Head or body did not arrive in time",
    413: "The body is too long",
    415: "The body is not said to be JSON",
    429: "Too many requests wait; Retry-After says when to come again",
    431: "The head is too long",
    500: "The server failed; its log says why",
    503: "Too many bytes of bodies are being read, the server is shutting down, or its engine has failed",
    504: "There was no answer in time",
}

_OF_ANY = (400, 401, 408, 431, 500, 503)
_RETRY = {"schema": {"type": "integer", "minimum": 1}, "description": "Seconds"}


def document() -> dict[str, Any]:
    """The OpenAPI document."""
    bodies = [(each.body, "validation") for each in OPERATIONS.values() if each.body]
    operations = OPERATIONS.values()
    said = {kind for each in operations for kind in (each.answer, each.events, each.deleted, each.error) if kind}
    given = [(kind, "serialization") for kind in said if not isinstance(kind, str)]
    models: Any = [*bodies, *given]
    _, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")
    paths = {path: {"post" if each.body else "get": _operation(path, each)} for path, each in OPERATIONS.items()}
    for path, each in OPERATIONS.items():
        if each.deleted is not None:
            gone = replace(each, answer=each.deleted)
            paths[path]["delete"] = {**_operation(path, gone), "operationId": f"delete_{_words(path)}"}
    text = "There are no embeddings: always 501"
    paths["/v1/embeddings"] = {
        "post": {
            "summary": text,
            "operationId": "post_v1_embeddings",
            "responses": {"501": _refusal(501, text, ErrorAnswer)},
        }
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "wager", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": dict(sorted(definitions["$defs"].items())),
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"key": []}, {"header": []}],
    }


def _operation(path: str, each: Operation) -> dict[str, Any]:
    statuses = _REFUSALS if each.body else (*_OF_ANY, *((404,) if "{" in path else ()))
    found: dict[str, Any] = {
        "summary": each.text,
        "operationId": f"{'post' if each.body else 'get'}_{_words(path)}",
        "responses": {
            "200": {"description": each.text, "content": _content(each)},
            **{str(status): _refusal(status, _REFUSALS[status], each.error) for status in sorted(statuses)},
        },
    }
    if each.body:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(each.body)}}}
    if "{" in path:
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return found


def _words(path: str) -> str:
    return "_".join(path.strip("/{}").replace(".", "/").replace("{", "").split("/"))


def _content(each: Operation) -> dict[str, Any]:
    if isinstance(each.answer, str):
        return {each.answer: {"schema": {"type": "object" if "json" in each.answer else "string"}}}
    content: dict[str, Any] = {"application/json": {"schema": _ref(each.answer)}}
    if each.events is not None:
        text = (_NAMED_EVENTS if each.named_events else _EVENTS).format(chunk=f"a {each.events.__name__}")
        value: dict[str, Any] = {"anyOf": [_ref(each.events), _ref(ErrorAnswer)]}
        if each.named_events:
            value = _ref(each.events)
        encoded = {"type": "string", "contentMediaType": "application/json", "contentSchema": value}
        data = encoded if each.named_events else {"anyOf": [{"const": "[DONE]"}, encoded]}
        event = {"type": "object", "description": text, "properties": {"data": data}, "required": ["data"]}
        content["text/event-stream"] = {"schema": event}
    return content


def _refusal(status: int, text: str, error: type[BaseModel]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "description": text,
        "content": {"application/json": {"schema": _ref(error)}},
    }
    if status in (429, 503):
        found["headers"] = {"Retry-After": _RETRY}
    return found


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
