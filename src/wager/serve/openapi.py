"""The API described for machines: an OpenAPI 3.1 document, of the models that bodies and answers are checked by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from wager import __version__
from wager.serve import answer_models as answers
from wager.serve.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

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
    "/v1/completions": Operation("Continue prompts", answers.TextAnswer, CompletionBody, answers.TextAnswer),
    "/v1/chat/completions": Operation("Answer a conversation", answers.ChatAnswer, ChatBody, answers.ChatChunk),
    "/tokenize": Operation("Token ids of a text or of a conversation", answers.TokenList, TokenizeBody),
    "/detokenize": Operation("The text of token ids", answers.DecodedText, DetokenizeBody),
    "/v1/models": Operation("The model that is served", answers.ServedModels),
    "/v1/models/{name}": Operation("The model, if it is served", answers.ServedModel),
    "/health": Operation("Whether requests are taken", answers.ServerHealth),
    "/version": Operation("The version of wager", answers.ServerVersion),
    "/metrics": Operation("Metrics for Prometheus", "text/plain"),
    "/live": Operation("What the dashboard shows", answers.LiveNumbers),
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
    models: Any = [*bodies, *given, (answers.ErrorAnswer, "serialization")]
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
        value = {"anyOf": [_ref(each.events), _ref(answers.ErrorAnswer)]}
        encoded = {"type": "string", "contentMediaType": "application/json", "contentSchema": value}
        data = {"anyOf": [{"const": "[DONE]"}, encoded]}
        event = {"type": "object", "description": text, "properties": {"data": data}, "required": ["data"]}
        content["text/event-stream"] = {"schema": event}
    return content


def _refusal(status: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "description": _REFUSALS[status],
        "content": {"application/json": {"schema": _ref(answers.ErrorAnswer)}},
    }
    if status in (429, 503):
        found["headers"] = {"Retry-After": _RETRY}
    return found


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
