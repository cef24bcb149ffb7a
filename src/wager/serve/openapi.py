"""The API described for machines: models of what the server answers, which tests check every answer against, and the
OpenAPI 3.1 document that is made of them and of the models of bodies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

from wager import __version__
from wager.serve.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

FinishReasons = Literal["stop", "length", "tool_calls", "abort", "error"]


class AnswerFields(BaseModel):
    """Has these fields and no others; those with a default may be left out."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorFields(AnswerFields):
    """`param` is the field at fault, `code` a word for the cause."""

    message: str
    type: Literal[
        "invalid_request_error", "authentication_error", "not_found_error", "rate_limit_error", "server_error"
    ]
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
    top_logprobs: list[dict[str, float | None]]
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


class TextChoice(AnswerFields):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReasons | None
    speculation: ChunkSpeculation | None = None


class ModelAnswer(AnswerFields):
    """What every answer of the model has, whole or an event of a stream."""

    id: str
    created: int
    model: str
    usage: TokenUsage | None = None
    speculation: SpeculationReport | None = None


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


class MessageDelta(AnswerFields):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallPart] | None = None


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


# ---- answers about the server ----------------------------------------------------------------------------------------


class ServedModel(AnswerFields):
    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["wager"]
    max_model_len: int


class ServedModels(AnswerFields):
    object: Literal["list"]
    data: list[ServedModel]


class TokenList(AnswerFields):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DecodedText(AnswerFields):
    prompt: str


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


@dataclass(frozen=True, slots=True)
class Operation:
    """One path: what it does, the model of its body (None: GET), what it answers (a model, or a media type), and the
    model of its events, if it may stream."""

    text: str
    answer: type[BaseModel] | str
    body: type[BaseModel] | None = None
    events: type[BaseModel] | None = None


OPERATIONS: Mapping[str, Operation] = {
    "/v1/completions": Operation("Continue prompts", TextAnswer, CompletionBody, TextAnswer),
    "/v1/chat/completions": Operation("Answer a conversation", ChatAnswer, ChatBody, ChatChunk),
    "/tokenize": Operation("Token ids of a text or of a conversation", TokenList, TokenizeBody),
    "/detokenize": Operation("The text of token ids", DecodedText, DetokenizeBody),
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
    404: "The model is not served",
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
    said = {kind for each in OPERATIONS.values() for kind in (each.answer, each.events) if kind}
    given = [(kind, "serialization") for kind in said if not isinstance(kind, str)]
    models: Any = [*bodies, *given, (ErrorAnswer, "serialization")]
    _, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")
    paths = {path: {"post" if each.body else "get": _operation(path, each)} for path, each in OPERATIONS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "wager", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": dict(sorted(definitions["$defs"].items())),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(path: str, each: Operation) -> dict[str, Any]:
    statuses = _REFUSALS if each.body else (*_OF_ANY, *((404,) if "{" in path else ()))
    found: dict[str, Any] = {
        "summary": each.text,
        "operationId": "_".join(["post" if each.body else "get", *path.strip("/{}").replace(".", "/").split("/")]),
        "responses": {
            "200": {"description": each.text, "content": _content(each)},
            **{str(status): _refusal(status) for status in sorted(statuses)},
        },
    }
    if each.body:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(each.body)}}}
    if "{" in path:
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return found


def _content(each: Operation) -> dict[str, Any]:
    if isinstance(each.answer, str):
        return {each.answer: {"schema": {"type": "object" if "json" in each.answer else "string"}}}
    content: dict[str, Any] = {"application/json": {"schema": _ref(each.answer)}}
    if each.events is not None:
        text = _EVENTS.format(chunk=f"a {each.events.__name__}")
        value = {"anyOf": [_ref(each.events), _ref(ErrorAnswer)]}
        encoded = {"type": "string", "contentMediaType": "application/json", "contentSchema": value}
        data = {"anyOf": [{"const": "[DONE]"}, encoded]}
        event = {"type": "object", "description": text, "properties": {"data": data}, "required": ["data"]}
        content["text/event-stream"] = {"schema": event}
    return content


def _refusal(status: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "description": _REFUSALS[status],
        "content": {"application/json": {"schema": _ref(ErrorAnswer)}},
    }
    if status in (429, 503):
        found["headers"] = {"Retry-After": _RETRY}
    return found


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
