"""Request bodies of OpenAI's API as values: every field is known and honoured, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wager.grammar import Grammar
from wager.serve.errors import ApiError

_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "user": (),
    "safety_identifier": (),
    "prompt_cache_key": (),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
"""Fields of OpenAI's API that ask for nothing here with these values (none: with any)."""

Finite = Annotated[float, Field(allow_inf_nan=False)]


class Strict(BaseModel):
    """Unknown fields and converted types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class SpeculationChoice(Strict):
    """How one request is drafted: `drafter` is one that the server has, `depth` the guesses of a round (0: off)."""

    drafter: str | None = None
    depth: int | None = Field(None, ge=0, le=64)
    weight: Finite | None = Field(None, gt=0, le=1e6)


class SamplingFields(Strict):
    """What both kinds of requests have. Ranges are those of SamplingParams, which refuses what is outside them."""

    model: str | None = None
    temperature: Finite | None = Field(None, ge=0, le=2)
    top_p: Finite | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=64)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    presence_penalty: Finite | None = Field(None, ge=-2, le=2)
    frequency_penalty: Finite | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Finite] | None = None
    seed: int | None = None
    top_k: int | None = Field(None, ge=-1)
    min_p: Finite | None = Field(None, ge=0, le=1)
    repetition_penalty: Finite | None = Field(None, gt=0, le=1000)
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    speculation: SpeculationChoice | Literal["off"] | None = None
    speculation_stats: bool | None = None
    response_format: ResponseFormat | None = None


class SchemaFormat(Strict):
    """A JSON schema as OpenAI's API gives it. It is always enforced, whatever `strict` says."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What the answer must be: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    @property
    def grammar(self) -> Grammar | None:
        """ApiError if the schema is missing or not wanted."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ApiError(
                400, f"response_format of type {self.type!r} does not go with what it has.",
                "A json_schema is given with type json_schema, and only there.", param="response_format",
            )  # fmt: skip
        if self.json_schema is not None:
            return Grammar.json_schema(self.json_schema.schema_)
        return Grammar.json_object() if self.type == "json_object" else None


class CompletionBody(SamplingFields):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)


class TextContent(Strict):
    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextContent] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class PredictedContent(Strict):
    """OpenAI's Predicted Outputs: what the answer is expected to be like."""

    type: Literal["content"]
    content: str | list[TextContent]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(SamplingFields):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    prediction: PredictedContent | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class TokenizeBody(Strict):
    """POST /tokenize: a text, or the messages of a conversation in the model's template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None


class DetokenizeBody(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


B = TypeVar("B", bound=Strict)


def parse(kind: type[B], body: bytes) -> B:
    """A body of that kind. ApiError 400 names the first field at fault."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is not JSON: {error}.", "Send a JSON object.") from None
    if not isinstance(values, dict):
        raise ApiError(400, f"The body is a JSON {type(values).__name__}.", "Send a JSON object.")
    for name, allowed in _HARMLESS.items():
        if name in values and name not in kind.model_fields:
            value = values.pop(name)
            if value is not None and allowed and value not in allowed:
                raise ApiError(400, f"The field {name!r} is not supported.", "Leave it out.", param=name)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _refusal(error, kind) from None


def _refusal(error: ValidationError, kind: type[BaseModel]) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = [str(part) for part in first["loc"]]
    field = ".".join(place) or "body"
    if first["type"] == "extra_forbidden":
        hint = f"Fields are {', '.join(kind.model_fields)}." if len(place) == 1 else "Leave it out."
        return ApiError(400, f"The field {field[:200]!r} is not supported.", hint, param=place[0][:200])
    return ApiError(400, f"The field {field[:200]!r} is not possible: {first['msg']}.", param=place[0][:200])
