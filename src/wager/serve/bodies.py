"""Request bodies of OpenAI's completions and chats: models whose fields are honoured, or refused or left out by name,
and the sampling parameters that they ask for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from wager.constrain.schemas import relaxed
from wager.errors import UsageError
from wager.inputs import strict_json
from wager.serve.errors import ApiError, field_error
from wager.types import Grammar, RequestSpeculation, SamplingParams

# ---- models ----------------------------------------------------------------------------------------------------------


_WITHOUT_EFFECT = frozenset(
    {
        *("user", "safety_identifier", "metadata", "client_metadata", "store", "request_id", "moderation", "priority"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_prompt", "keep_alive"),
        *("id_slot", "slot_id", "return_tokens", "return_token_ids", "timings_per_token", "detokenize"),
        *("include_reasoning", "separate_reasoning", "spaces_between_special_tokens"),
        *("guided_decoding_backend", "guided_whitespace_pattern"),
    }
)
"""Fields of this and other engines that change no text, whatever their value."""

_ADVICE: Mapping[str, tuple[Any, ...]] = {"verbosity": ("medium",), "service_tier": ("auto", "default")}
"""Fields that ask how to answer or serve. With other values than these they are named among those left out."""

_ONLY: Mapping[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "length_penalty": (1,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (-1,),
    "background": (False,),
    **dict.fromkeys(("audio", "web_search_options", "chat_template", "documents", "conversation", "images"), ()),
}
"""Fields that change an answer and are not possible here, with the values that ask for nothing; null is one always."""

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


def _off_or_object(value: Any) -> Any:
    """One error that says what is allowed, not one for each alternative."""
    if value is None or value == "off" or isinstance(value, dict | SpeculationChoice):
        return value
    raise PydanticCustomError("speculation", 'it is "off", or an object of drafter, depth and weight')


class Strict(BaseModel):
    """Unknown fields and converted types are errors. `RENAMED` has fields under another engine's or an older name,
    `PARAMS` the fields by the names that their parameters have elsewhere."""

    RENAMED: ClassVar[Mapping[str, str]] = {}
    PARAMS: ClassVar[Mapping[str, str]] = {}

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
    include_obfuscation: bool | None = None


class SpeculationChoice(Strict):
    """How one request is drafted: `drafter` is one that the server has, `depth` the guesses of a round (0: off)."""

    drafter: str | None = None
    depth: int | None = Field(None, ge=0, le=64)
    weight: Finite | None = Field(None, gt=0, le=1e6)


class StructuredOutputs(Strict):
    """What an answer must be, in vLLM's words."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


@dataclass(frozen=True, slots=True)
class Constraint:
    """The grammar of an answer, and the schema that it is checked against at the end, since the grammar lacks what
    `unenforced` names of it."""

    grammar: Grammar
    schema: Mapping[str, Any] | None = None
    unenforced: tuple[str, ...] = ()

    @classmethod
    def of_schema(cls, schema: Mapping[str, Any] | str, field: str) -> Constraint:
        """A constraint to a JSON schema, given as an object or as text. ApiError names the field."""
        if isinstance(schema, str):
            try:
                schema = strict_json(schema)
            except ValueError as error:
                raise field_error(field, f"The schema of {field} is not JSON: {error}.", "Send an object.") from None
            if not isinstance(schema, dict):
                raise field_error(field, f"The schema of {field} is no object.", "Send a JSON schema.")
        found = relaxed(schema)
        return cls(Grammar.json_schema(found.schema), schema if found.unenforced else None, found.unenforced)


class RequestFields(Strict):
    """What requests of every API have."""

    model: str | None = None
    stream: bool | None = None
    temperature: Finite | None = Field(None, ge=0, le=2)
    top_p: Finite | None = Field(None, ge=0, le=1)
    speculation: Any = None
    receipts: bool | None = None


class SamplingFields(RequestFields):
    """What chats and completions have. Ranges are those of SamplingParams, which refuses what is outside them."""

    RENAMED = {"n_predict": "max_tokens"}

    n: int | None = Field(None, ge=1, le=64)
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
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    min_tokens: int | None = Field(None, ge=0)
    prompt_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def constraining(self) -> str:
        """The field that says what the answer must be. ApiError names the second of two."""
        asked = [
            name
            for name in _GRAMMARS
            if getattr(self, name) is not None and getattr(getattr(self, name), "type", "") != "text"
        ]
        if len(asked) > 1:
            raise field_error(asked[1], f"{asked[0]} and {asked[1]} exclude each other.", "Send one.")
        return (*asked, "response_format")[0]

    @property
    def constraint(self) -> Constraint | None:
        """What the answer must be. ApiError names a field that is wrong."""
        name = self.constraining
        try:
            if name == "response_format":
                return self.response_format.constraint if self.response_format else None
            kind, value = name.removeprefix("guided_"), getattr(self, name)
            if isinstance(value, StructuredOutputs):
                given = [item for item in value.model_dump(by_alias=True).items() if item[1] not in (None, False)]
                if len(given) != 1:
                    hint = "Send one of json, regex, choice, grammar."
                    raise field_error(name, f"{name} has {len(given)} constraints.", hint)
                [(kind, value)] = given
            return _constraint(kind, value, name)
        except UsageError as error:
            raise field_error(name, error.message, error.hint) from None


_GRAMMARS = ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")


def _constraint(kind: str, value: Any, field: str) -> Constraint:
    if kind == "json":
        return Constraint.of_schema(value, field)
    if kind == "json_object":
        return Constraint(Grammar.json_object())
    if kind == "grammar":
        return Constraint(Grammar.lark(value))
    return Constraint(Grammar.regex(value) if kind == "regex" else Grammar.choice(value))


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
    schema_: dict[str, Any] | None = Field(None, alias="schema")  # of a json_object, as llama.cpp's server has it

    @property
    def constraint(self) -> Constraint | None:
        """ApiError if the schema is missing or not wanted."""
        wrong = self.schema_ is not None and self.type != "json_object"
        if wrong or (self.type == "json_schema") != (self.json_schema is not None):
            message = f"response_format of type {self.type!r} does not go with what it has."
            hint = "A json_schema is given with type json_schema, and only there."
            raise field_error("response_format", message, hint)
        schema = self.json_schema.schema_ if self.json_schema is not None else self.schema_ or None
        if schema is not None:
            return Constraint.of_schema(schema, "response_format")
        return Constraint(Grammar.json_object()) if self.type == "json_object" else None


class CompletionBody(SamplingFields):
    """POST /v1/completions."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = None


def _named_kind(kind: Any) -> Any:
    if isinstance(kind, str) and kind != "text":
        raise PydanticCustomError(
            "part", "{kind} is no text, and this model reads nothing else", {"kind": repr(kind[:40])}
        )
    return kind


class TextContent(Strict):
    type: Annotated[Literal["text"], BeforeValidator(_named_kind)]
    text: str
    cache_control: dict[str, Any] | None = None


def _text(content: str | Sequence[TextContent] | None) -> str:
    return content or "" if content is None or isinstance(content, str) else "".join(part.text for part in content)


def read_parts(content: Any, place: str, param: str, *, kinds: Sequence[str] = ("text",), joint: str = "\n") -> str:
    """The text of a content that is one, or has parts of these kinds. ApiError names the part that is none."""
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content if isinstance(content, list) else [content]):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("refusal" if kind == "refusal" else "text") if kind in kinds else None
        if not isinstance(text, str):
            message = f"The part {place}.{number} of type {str(kind)[:40]!r} is not possible."
            raise field_error(param, message, "Send text: this model reads nothing else.")
        texts.append(text)
    return joint.join(texts)


def read_functions(
    given: Sequence[Mapping[str, Any]], function: Callable[[Any], Any], left_out: list[str] | None
) -> list[dict[str, Any]]:
    """Tools as chats have them; `function` gives what is called, or None for a tool that only another server has. That
    is named in `left_out`, since a model that is not offered it can do without; without that list ApiError."""
    found = []
    for number, tool in enumerate(given):
        if (called := function(tool)) is not None:
            found.append({"type": "function", "function": called})
            continue
        what = f"tools.{number} of type {str(tool.get('type'))[:40]!r}"
        if left_out is None:
            raise field_error("tools", f"{what} is not possible.", "Leave it out: only functions are called here.")
        left_out.append(what)
    return found


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Items[TextContent] | None = None
    name: str | None = None
    tool_calls: Items[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None  # from here on what dumps of answers have
    audio: None = None
    function_call: dict[str, Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    cache_control: dict[str, Any] | None = None

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
    functions: Items[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Field(max_length=64)] = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


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


def parse(kind: type[B], body: bytes, left_out: list[str] | None = None) -> B:
    """A body of that kind. ApiError 400 names the first field at fault. Fields that are not known are named in
    `left_out`; without that list they are at fault too."""
    try:
        values = strict_json(body.decode("utf-8-sig"))
    except ValueError as error:
        raise ApiError(400, f"The body is not JSON: {error}.", "Send a JSON object in UTF-8.") from None
    if not isinstance(values, dict):
        raise ApiError(400, f"The body is {_described(values)}.", "Send a JSON object.")
    return read_fields(kind, values, left_out)


def read_fields(kind: type[B], values: dict[str, Any], left_out: list[str] | None = None) -> B:
    """As `parse`, of the values of a body."""
    for name in [name for name in values if name not in _names(kind)]:
        if name in kind.RENAMED:
            _rename(values, name, kind.RENAMED[name])
        elif _is_without_effect(name, values[name]):
            del values[name]
        elif name in _ONLY:
            message = f"The field {name!r} is not supported."
            raise field_error(name, message, "Leave it out.", code="unsupported_parameter")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        refusal = _refusal(error, kind, values)
        unknown = [str(each["loc"][-1]) for each in error.errors() if each["type"] == "extra_forbidden"]
        if left_out is None or not unknown or any(each["type"] == _UNKNOWN for each in error.errors()):
            raise refusal from None
    names = [name for name in values if name not in _names(kind)]
    left_out += [_named(name, kind) for name in names[:_MOST_NAMED]] + [name[:80] for name in names[_MOST_NAMED:]]
    left_out += sorted({name for name in unknown if name not in values})
    try:
        return kind.model_validate(values, extra="ignore")
    except ValidationError as error:
        raise _refusal(error, kind, values) from None


_MOST_NAMED = 5
"""Fields that are not known, of which the nearest known one is looked for, which takes a millisecond each."""


def _rename(values: dict[str, Any], name: str, field: str) -> None:
    given = [each for each in (values.pop(name), values.get(field)) if each is not None]
    values[field] = given[0] if given else None
    if given[1:] not in ([], given[:1]):
        raise field_error(name, f"{name} and {field} are one field, and differ.", "Send one of the two.")


def _is_without_effect(name: str, value: Any) -> bool:
    """Whether a field that is not known asks for nothing."""
    asks_nothing = value is None and (name in _ONLY or name in _ADVICE)
    return name in _WITHOUT_EFFECT or asks_nothing or value in (*_ONLY.get(name, ()), *_ADVICE.get(name, ()))


def _named(name: str, kind: type[BaseModel]) -> str:
    """A field that is not known, with the known one that is written most like it."""
    near = get_close_matches(name[:80], _names(kind), 1, 0.75)
    return f"{name[:80]} ({near[0]}?)" if near else name[:80]


def _distance(error: Any) -> tuple[int, bool]:
    """How far validation got: of several alternatives the furthest is meant, or that which is not of another type."""
    return len(error["loc"]) + (error["type"] == _UNKNOWN), not error["type"].endswith("_type")


_TYPES: Mapping[str, str] = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "none_required": "null",
}
"""What a field must be, by pydantic's word for the error."""

_BOUNDS: Mapping[str, str] = {
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "above {gt:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "{expected}",
}
"""What a value must be, by pydantic's words for error and bound."""

_CODES: Mapping[str, str] = {
    **dict.fromkeys(_TYPES, "invalid_type"),
    **dict.fromkeys(("greater_than_equal", "greater_than"), "{number}_below_min_value"),
    "less_than_equal": "{number}_above_max_value",
    "literal_error": "invalid_value",
    "missing": "missing_required_parameter",
    "too_short": "empty_array",
    "too_long": "array_above_max_length",
}
"""OpenAI's codes, by pydantic's word for the error."""


_ELSEWHERE: Mapping[tuple[str, ...], str] = {
    ("messages", "prompt"): "A prompt belongs to /v1/completions.",
    ("prompt", "messages"): "Messages belong to /v1/chat/completions.",
}
"""What is said of a field that is missing, by it and what is there in its place."""


def _refusal(error: ValidationError, kind: type[BaseModel], values: Mapping[str, Any]) -> ApiError:
    errors = error.errors(include_url=False)
    of_field = [each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]]
    first = max(of_field, key=_distance)
    place = _place(first)
    if first["type"] == _UNKNOWN:
        place.append(str(first["ctx"]["name"]))
    field = ".".join(place)[:200] or "body"
    param = place[0][:200] if place else None
    if first["type"] in (_UNKNOWN, "extra_forbidden"):
        near = get_close_matches(field[:80], _names(kind), 1, 0.6) if len(place) == 1 else []
        hint = f"Is it {near[0]!r}?" if near else "Leave it out."
        message = f"The field {field!r} is not supported."
        return field_error(param, message, hint, code="unknown_parameter")
    bound = next(iter(first.get("ctx", {}).values()), None)
    number = "decimal" if isinstance(bound, float) else "integer"
    code = _CODES.get(first["type"], "").format(number=number) or None
    if first["type"] == "too_long" and isinstance(first["input"], dict):
        code = "object_above_max_properties"
    if first["type"] == "missing":
        hint = _ELSEWHERE.get((field, *(name for name in ("prompt", "messages") if name in values)), "")
        return field_error(param, f"The field {field!r} is missing.", hint, code=code)
    types = [_TYPES[each["type"]] for each in of_field if each["type"] in _TYPES and _place(each) == place]
    why = _why(first, types)
    return field_error(param, f"The field {field!r} is not possible: {why}.", code=code)


def _place(error: Any) -> list[str]:
    """The path of the field at fault, without pydantic's names of alternatives."""
    first, *others = [str(part) for part in error["loc"]] or [""]
    return [first, *(part for part in others if not _UNION.fullmatch(part))] if first else []


def _why(error: Any, types: Sequence[str]) -> str:
    """What is wrong with a value; `types`: what it could be, if its type is wrong."""
    kind, value = error["type"], error["input"]
    if kind in _TYPES:
        return f"it is {_described(value)}, and must be {' or '.join(dict.fromkeys(types))}"
    if kind in _BOUNDS:
        bound = _BOUNDS[kind].format(**error["ctx"]).replace("False", "false")  # of JSON
        return f"it is {_described(value)}, and must be {bound}"
    if kind == "too_short":
        return "it is empty"
    if kind == "too_long":
        return f"it has {len(value)} items, and at most {error['ctx']['max_length']} are possible"
    return str(error["msg"])


_LONGEST_SHOWN = 40
"""Characters of a value that a refusal repeats."""


def _described(value: Any) -> str:
    """A short value as JSON, any other by its type."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value, ensure_ascii=False)
    kind = "string" if isinstance(value, str) else "number"
    return text if len(text) <= _LONGEST_SHOWN else f"a {kind} of {len(text)} characters"


# ---- parameters ------------------------------------------------------------------------------------------------------


_LONGEST_ID = 10
"""Digits of a token id."""

_COMPLETION_TOKENS = 16
"""OpenAI's default for completions; chats go on until the context is full."""


def completion_params(body: CompletionBody, *, temperature: float) -> SamplingParams:
    """The parameters of a completion; `temperature` where it names none. A completion of no tokens has those of one."""
    most = _COMPLETION_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
    constraint = body.constraint
    return _params(
        body, most, body.logprobs, temperature=temperature, grammar=constraint.grammar if constraint else None
    )


def chat_params(
    body: ChatBody, *, room: int, temperature: float, prediction: Sequence[int], grammar: Grammar | None = None
) -> SamplingParams:
    """The parameters of a chat; `room` is what the context leaves for its answer, `prediction` its prediction in
    tokens, `grammar` what its tools and its format demand."""
    most = body.max_completion_tokens or body.max_tokens or max(1, room)
    if body.max_tokens not in (None, most):
        message = f"max_tokens = {body.max_tokens} and max_completion_tokens = {most} differ."
        raise field_error("max_tokens", message, "Send one of the two.")
    if body.top_logprobs and not body.logprobs:
        raise field_error("top_logprobs", "top_logprobs needs logprobs.", "Send logprobs: true too.")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _params(body, most, logprobs, temperature=temperature, prediction=prediction, grammar=grammar)


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
    grammar: Grammar | None = None,
) -> SamplingParams:
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
            grammar=grammar,
            min_tokens=body.min_tokens or 0,
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
