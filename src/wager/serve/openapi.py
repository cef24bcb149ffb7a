"""The API described for machines: an OpenAPI 3.1 document of its paths, and of what they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from wager import __version__
from wager.serve.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from wager.serve.messages import MessagesBody, TokenCountBody
from wager.serve.responses import ResponsesBody

_JSON, _EVENTS = "application/json", "text/event-stream"


@dataclass(frozen=True, slots=True)
class Operation:
    """One path: what it does, the model of its body (None: GET), the media types of its answers, and whether what it
    names may be deleted."""

    text: str
    body: type[BaseModel] | None = None
    answers: tuple[str, ...] = (_JSON,)
    deletable: bool = False


OPERATIONS: Mapping[str, Operation] = {
    "/v1/completions": Operation("Continue prompts", CompletionBody, (_JSON, _EVENTS)),
    "/v1/chat/completions": Operation("Answer a conversation", ChatBody, (_JSON, _EVENTS)),
    "/v1/responses": Operation("Answer an input", ResponsesBody, (_JSON, _EVENTS)),
    "/v1/responses/{name}": Operation("A response that was stored", deletable=True),
    "/v1/messages": Operation("Answer messages", MessagesBody, (_JSON, _EVENTS)),
    "/v1/messages/count_tokens": Operation("Count tokens", TokenCountBody),
    "/tokenize": Operation("Token ids of a text or of a conversation", TokenizeBody),
    "/detokenize": Operation("The text of token ids", DetokenizeBody),
    "/tokenizer_info": Operation("The tokens around a text, and the chat template"),
    "/v1/models": Operation("The model that is served"),
    "/v1/models/{name}": Operation("The model, if it is served"),
    "/health": Operation("Whether requests are taken"),
    "/version": Operation("The version of wager"),
    "/metrics": Operation("Metrics for Prometheus", answers=("text/plain",)),
    "/live": Operation("What the dashboard shows"),
    "/openapi.json": Operation("This document"),
    "/": Operation("The dashboard", answers=("text/html",)),
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
    bodies: Any = [(each.body, "validation") for each in OPERATIONS.values() if each.body]
    _, definitions = models_json_schema(bodies, ref_template="#/components/schemas/{model}")
    paths = {path: {"post" if each.body else "get": _operation(path, each)} for path, each in OPERATIONS.items()}
    for path, each in OPERATIONS.items():
        if each.deletable:
            paths[path]["delete"] = {**paths[path]["get"], "operationId": f"delete_{_words(path)}"}
    text = "There are no embeddings: always 501"
    paths["/v1/embeddings"] = {
        "post": {"summary": text, "operationId": "post_v1_embeddings", "responses": {"501": _refusal(501, text)}}
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
            "200": {"description": each.text, "content": {kind: {} for kind in each.answers}},
            **{str(status): _refusal(status, _REFUSALS[status]) for status in sorted(statuses)},
        },
    }
    if each.body:
        schema = {"$ref": f"#/components/schemas/{each.body.__name__}"}
        found["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    if "{" in path:
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return found


def _words(path: str) -> str:
    return "_".join(path.strip("/{}").replace(".", "/").replace("{", "").split("/"))


def _refusal(status: int, text: str) -> dict[str, Any]:
    found: dict[str, Any] = {"description": text, "content": {_JSON: {}}}
    if status in (429, 503):
        found["headers"] = {"Retry-After": _RETRY}
    return found
