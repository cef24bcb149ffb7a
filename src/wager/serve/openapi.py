"""The API described for machines: an OpenAPI 3.1 document, of the models that bodies are checked by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from wager import __version__
from wager.serve.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

_POSTS: Mapping[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (CompletionBody, "Continue prompts"),
    "/v1/chat/completions": (ChatBody, "Answer a conversation"),
    "/tokenize": (TokenizeBody, "Token ids of a text or of a conversation"),
    "/detokenize": (DetokenizeBody, "The text of token ids"),
}

_GETS: Mapping[str, str] = {
    "/v1/models": "The model that is served",
    "/health": "Whether requests are taken",
    "/version": "The version of wager",
    "/metrics": "Metrics for Prometheus",
    "/live": "What the dashboard shows",
}

_REFUSALS: Mapping[str, str] = {
    "400": "A field that is unknown or not possible; the error names it",
    "401": "The API key is missing or unknown",
    "404": "The model is not served",
    "408": "The body did not arrive in time",
    "413": "The body is too long",
    "415": "The body is not JSON",
    "429": "Too many requests wait; Retry-After says when to come again",
    "503": "The server is shutting down, or its engine has failed",
    "504": "There was no answer in time",
}


def document() -> dict[str, Any]:
    """The OpenAPI document."""
    models = [(model, "validation") for model, _ in _POSTS.values()]
    _, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    paths: dict[str, Any] = {path: {"get": _get(text)} for path, text in _GETS.items()}
    paths |= {path: {"post": _post(model, text)} for path, (model, text) in _POSTS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "wager", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _get(text: str) -> dict[str, Any]:
    return {"summary": text, "responses": {"200": {"description": text}, **_refusals("401", "503")}}


def _post(model: type[BaseModel], text: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {
        "summary": text,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": text}, **_refusals(*_REFUSALS)},
    }


def _refusals(*statuses: str) -> dict[str, Any]:
    return {status: {"description": _REFUSALS[status]} for status in statuses}
