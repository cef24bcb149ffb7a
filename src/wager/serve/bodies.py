"""Request bodies of OpenAI's API: JSON read strictly, models whose every field is honoured or refused by name, and the
sampling parameters that they ask for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from wager.errors import UsageError
from wager.serve.errors import ApiError, field_error
from wager.types import Grammar, RequestSpeculation, SamplingParams

# ---- JSON ------------------------------------------------------------------------------------------------------------


MOST_LEVELS = 100
"""Objects and lists within each other. What they are given to (templates, grammars) works recursively."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(text: str) -> Any:
    """The value of a JSON text. ValueError that says what is wrong: also names that stand twice in one object, NaN and
    infinities, halves of surrogate pairs, and more than MOST_LEVELS levels."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
        too_deep = text.count("[") + text.count("{") > MOST_LEVELS and _is_deep(value)
    except RecursionError:
        too_deep = True
    if too_deep:
        raise ValueError(f"objects and lists are more than {MOST_LEVELS} levels deep")
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it has half of a surrogate pair, which is no character") from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names: set[str] = set()
        twice = next(name for name, _ in pairs if name in names or names.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"an object has {twice[:80]!r} twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _is_deep(value: Any) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MOST_LEVELS):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


# ---- models ----------------------------------------------------------------------------------------------------------


_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "user": (),
    "safety_identifier": (),
    "prompt_cache_key": (),
    "store": (),
    "metadata": (),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    **dict.fromkeys(("audio", "functions", "function_call", "reasoning_effort", "verbosity"), (None,)),
    **dict.fromkeys(("web_search_options", "prompt_cache_retention"), (None,)),
}
"""Fields of OpenAI's API that ask for nothing here with these values, or null (none: with any)."""

_UNION = re.compile(r"str|int|float|bool|(list|dict|literal)\[.*|SpeculationChoice")
"""How pydantic names the alternatives of a field, within the path of an error."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
_UNKNOWN = "unknown_field"
T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list of which the first error is reported, not one for each of a million items."""


def _first_bias(value: Any) -> Any:
    """As for lists: the first error of a mapping."""
    for key, bias in value.items() if isinstance(value, dict) else ():
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= 100:
            raise PydanticCustomError("bias", "token {key} has no number from -100 to 100", {"key": repr(key[:20])})
    return value


def _no_number(value: Any) -> Any:
    """A literal False would take 0 too."""
    return value if value is None or isinstance(value, bool) else repr(value)[:20]


def _off_or_object(value: Any) -> Any:
    """One error that says what is allowed, not one for each alternative."""
    if value is None or value == "off" or isinstance(value, dict | SpeculationChoice):
        return value
    raise PydanticCustomError("speculation", 'it is "off", or an object of drafter, depth and weight')


class Strict(BaseModel):
    """Unknown fields and converted types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _know_all(cls, values: Any) -> Any:
        """Report the first of thousands of unknown fields alone."""
        if isinstance(values, dict) and len(values) > 2 * len(_names(cls)) + 10:
            unknown = next(name for name in values if name not in _names(cls))
            raise PydanticCustomError(_UNKNOWN, "unknown field", {"name": unknown})
        return values


@cache
def _names(kind: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[Literal[False] | None, BeforeValidator(_no_number)] = None


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
    stop: str | Annotated[Items[str], Field(max_length=16)] | None = None
    presence_penalty: Finite | None = Field(None, ge=-2, le=2)
    frequency_penalty: Finite | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, Finite] | None, BeforeValidator(_first_bias)] = None
    seed: int | None = None
    top_k: int | None = Field(None, ge=-1)
    min_p: Finite | None = Field(None, ge=0, le=1)
    repetition_penalty: Finite | None = Field(None, gt=0, le=1000)
    stop_token_ids: Annotated[Items[int] | None, Field(max_length=1024)] = None
    ignore_eos: bool | None = None
    speculation: Annotated[SpeculationChoice | Literal["off"] | None, BeforeValidator(_off_or_object)] = None
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
            message = f"response_format of type {self.type!r} does not go with what it has."
            hint = "A json_schema is given with type json_schema, and only there."
            raise field_error("response_format", message, hint)
        if self.json_schema is not None:
            return Grammar.json_schema(self.json_schema.schema_)
        return Grammar.json_object() if self.type == "json_object" else None


class CompletionBody(SamplingFields):
    """POST /v1/completions."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    max_tokens: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)


class TextContent(Strict):
    type: Literal["text"]
    text: str


def _text(content: str | Sequence[TextContent] | None) -> str:
    return content or "" if content is None or isinstance(content, str) else "".join(part.text for part in content)


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextContent] | None = None
    name: str | None = None
    tool_calls: Items[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None  # from here on what dumps of answers have
    audio: None = None
    function_call: None = None

    @property
    def text(self) -> str:
        return _text(self.content)


class PredictedContent(Strict):
    """OpenAI's Predicted Outputs: what the answer is expected to be like."""

    type: Literal["content"]
    content: str | Items[TextContent]

    @property
    def text(self) -> str:
        return _text(self.content)


class ChatBody(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Items[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    prediction: PredictedContent | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class TokenizeBody(Strict):
    """POST /tokenize: a text, or the messages of a conversation in the model's template."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[ChatMessage] | None = Field(None, min_length=1)
    tools: Items[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: Items[int]


B = TypeVar("B", bound=Strict)


def parse(kind: type[B], body: bytes) -> B:
    """A body of that kind. ApiError 400 names the first field at fault."""
    try:
        values = read_json(body.decode("utf-8-sig"))
    except ValueError as error:
        raise ApiError(400, f"The body is not JSON: {error}.", "Send a JSON object in UTF-8.") from None
    if not isinstance(values, dict):
        raise ApiError(400, f"The body is a JSON {type(values).__name__}.", "Send a JSON object.")
    for name, allowed in _HARMLESS.items():
        if name in values and name not in kind.model_fields:
            value = values.pop(name)
            if value is not None and allowed and value not in allowed:
                raise field_error(
                    name, f"The field {name!r} is not supported.", "Leave it out.", code="unsupported_parameter"
                )
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _refusal(error, kind) from None


def _distance(error: Any) -> tuple[int, bool]:
    """How far validation got: of several alternatives the furthest is meant, or that which is not of another type."""
    return len(error["loc"]) + (error["type"] == _UNKNOWN), not error["type"].endswith("_type")


def _refusal(error: ValidationError, kind: type[BaseModel]) -> ApiError:
    errors = error.errors(include_url=False, include_input=False)
    of_field = [each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]]
    first = max(of_field, key=_distance)
    place = [str(part) for part in first["loc"]]
    place[1:] = [part for part in place[1:] if not _UNION.fullmatch(part)]
    if first["type"] == _UNKNOWN:
        place.append(str(first["ctx"]["name"]))
    field = ".".join(place)[:200] or "body"
    param = place[0][:200] if place else None
    if first["type"] in (_UNKNOWN, "extra_forbidden"):
        hint = f"Fields are {', '.join(kind.model_fields)}." if len(place) == 1 else "Leave it out."
        message = f"The field {field!r} is not supported."
        return field_error(param, message, hint, code="unknown_parameter")
    return field_error(param, f"The field {field!r} is not possible: {first['msg']}.")


# ---- parameters ------------------------------------------------------------------------------------------------------


_LONGEST_ID = 10
"""Digits of a token id."""

_COMPLETION_TOKENS = 16
"""OpenAI's default for completions; chats go on until the context is full."""


def completion_params(body: CompletionBody, *, temperature: float) -> SamplingParams:
    """The parameters of a completion; `temperature` where it names none."""
    return _params(body, body.max_tokens or _COMPLETION_TOKENS, body.logprobs, temperature=temperature)


def chat_params(
    body: ChatBody, *, room: int, temperature: float, prediction: Sequence[int], tool_grammar: Grammar | None = None
) -> SamplingParams:
    """The parameters of a chat; `room` is what the context leaves for its answer, `prediction` its prediction in
    tokens, `tool_grammar` what its tools demand."""
    most = body.max_completion_tokens or body.max_tokens or max(1, room)
    if body.max_tokens not in (None, most):
        message = f"max_tokens = {body.max_tokens} and max_completion_tokens = {most} differ."
        raise field_error("max_tokens", message, "Send one of the two.")
    if body.top_logprobs is not None and not body.logprobs:
        raise field_error("top_logprobs", "top_logprobs needs logprobs.", "Send logprobs: true too.")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _params(body, most, logprobs, temperature=temperature, prediction=prediction, tool_grammar=tool_grammar)


def speculation(body: SamplingFields) -> RequestSpeculation | None:
    """What the request says about how it is drafted, if anything."""
    choice = body.speculation
    if choice == "off":
        return RequestSpeculation(depth=0)
    if choice is None or (choice.drafter is None and choice.depth is None):
        return None
    return RequestSpeculation(choice.drafter or "", choice.depth)


def _params(
    body: SamplingFields,
    max_tokens: int,
    logprobs: int | None,
    *,
    temperature: float,
    prediction: Sequence[int] = (),
    tool_grammar: Grammar | None = None,
) -> SamplingParams:
    if body.stream_options is not None and not body.stream:
        raise field_error("stream_options", "stream_options needs stream.", "Send stream: true too.")
    wanted = body.response_format.grammar if body.response_format else None
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature if body.temperature is None else float(body.temperature),
            top_k=max(0, body.top_k or 0),  # -1 is vLLM's way to say that there is none
            top_p=1.0 if body.top_p is None else float(body.top_p),
            min_p=float(body.min_p or 0.0),
            repetition_penalty=float(body.repetition_penalty or 1.0),
            presence_penalty=float(body.presence_penalty or 0.0),
            frequency_penalty=float(body.frequency_penalty or 0.0),
            logit_bias=_logit_bias(body),
            seed=_seed(body.seed),
            stop=tuple(body.stop) if isinstance(body.stop, list) else body.stop or (),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            logprobs=logprobs,
            n=body.n or 1,
            prediction=prediction,
            grammar=tool_grammar or wanted,
        )
    except UsageError as error:
        name = error.message.split(" ", 1)[0].split("[", 1)[0]
        raise field_error(name if name in type(body).model_fields else None, error.message, error.hint) from None


def _seed(seed: int | None) -> int | None:
    """Any 64-bit integer, as OpenAI's API takes them; negative ones are taken modulo 2^64."""
    if seed is None:
        return None
    if not -(2**63) <= seed < 2**64:
        raise field_error("seed", f"seed = {str(seed)[:40]} has more than 64 bits.", "Give a 64-bit integer.")
    return seed % 2**64


def _logit_bias(body: SamplingFields) -> dict[int, float]:
    biases = {}
    for key, bias in (body.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= _LONGEST_ID):
            raise field_error("logit_bias", f"logit_bias has the key {key[:80]!r}.", "Keys are token ids.")
        biases[int(key)] = float(bias)
    return biases
