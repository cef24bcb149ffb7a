"""Bodies for the API from the schemas of its own models, valid and damaged, and what every answer must be like."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import httpx2
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from serve.answers import ANSWERS, ErrorAnswer

POSTS = {path: each.body.model_json_schema() for path, each in sorted(ANSWERS.items()) if each.body}
"""The schema of a body by its path."""

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400),
    *(0.5, -0.0, 5e-324, 1e308, float("nan"), float("inf")),
    *("", "\x00", "\ud800", "<|im_end|>", "{{ 7 * 7 }}", "\u202e", "x" * 5000, "off", "text", "none"),
    *([], {}, [[]], [None], [0] * 300, [-1], [2**70], {"": {}}, {"a": 1}, {"type": "text"}, {"$ref": "#"}),
    *([{"type": "text"}], {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/x"}}}),
)
"""Values to put in place of others."""

_KEYS = st.sampled_from(
    ["", "a", "model", "__proto__", "\ud800", "x" * 300, "stream", "n", "content", "type", "schema"]
)
_DEEP = st.integers(1, 2000).map(lambda depth: json.loads("[" * min(depth, 300) + "]" * min(depth, 300)))
_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def values_of(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a schema allows; `schemas` are those that it may name."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return st.deferred(lambda: values_of(schemas[name], schemas))
    if "allOf" in schema:
        parts = [values_of(each, schemas) for each in schema["allOf"]]
        own = {key: value for key, value in schema.items() if key != "allOf"}
        return st.tuples(*parts, *([_objects(own, schemas)] if "properties" in own else [])).map(_merged)
    if "anyOf" in schema or "oneOf" in schema:
        return st.one_of([values_of(each, schemas) for each in schema.get("anyOf") or schema["oneOf"]])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind, low, high = schema.get("type"), schema.get("minimum"), schema.get("maximum")
    if isinstance(kind, list):
        return st.one_of([values_of({**schema, "type": each}, schemas) for each in kind])
    if kind == "object" or "properties" in schema:
        return _objects(schema, schemas)
    if kind == "array":
        least = schema.get("minItems", 0)
        most = max(least, min(4, schema.get("maxItems", 4)))
        return st.lists(values_of(schema.get("items", {}), schemas), min_size=least, max_size=most)
    plain = {
        "null": st.none(),
        "boolean": st.booleans(),
        "string": st.text(max_size=30),
        "integer": st.integers(low if low is not None else -(2**40), high if high is not None else 2**40),
        "number": st.floats(low, high, allow_nan=False, allow_infinity=False),
    }
    return plain.get(str(kind), _ANY)


def _merged(parts: tuple[Any, ...]) -> Any:
    """The parts of an `allOf`, where they are objects; else the last."""
    if not all(isinstance(part, dict) for part in parts):
        return parts[-1]
    return {name: value for part in parts for name, value in part.items()}


def _objects(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    known = {name: values_of(each, schemas) for name, each in schema.get("properties", {}).items()}
    if not known:
        more = schema.get("additionalProperties")
        values = values_of(more, schemas) if isinstance(more, dict) else _ANY
        return st.dictionaries(st.text(max_size=8), values, max_size=3)
    required = {name: known.pop(name) for name in schema.get("required", ()) if name in known}
    return st.fixed_dictionaries(required, optional=known)


@dataclass(frozen=True)
class Call:
    """A POST: its path, its bytes, and what it says that they are."""

    path: str
    body: bytes
    kind: str = "application/json"


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """A call with a body that is valid by the schema, and in most cases damaged after that."""
    path = draw(st.sampled_from([*POSTS]))
    value = draw(values_of(POSTS[path], POSTS[path].get("$defs", {})))
    value.pop("model", None)
    for _ in range(draw(st.integers(0, 3))):
        damage(value, draw)
    text = json.dumps(value, ensure_ascii=draw(st.booleans()))
    if draw(st.integers(0, 9)) == 0:
        at, end = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
        text = draw(st.sampled_from([text[:at], text[:at] + text[end:], text[:at] + text[at:end] * 2 + text[end:]]))
    body = text.encode(draw(st.sampled_from(["utf-8"] * 8 + ["utf-16", "utf-8-sig"])), "surrogatepass")
    kinds = ["application/json"] * 12 + ["application/json; charset=utf-8", "text/plain", "", "a/b+json", "é"]
    return Call(path, body, draw(st.sampled_from(kinds)))


def hostile_calls(count: int, number: int = 0) -> list[Call]:
    """That many calls; those of another `number` are others."""
    found: list[Call] = []

    unchecked: Any = dict(deadline=None, database=None, suppress_health_check=list(HealthCheck))

    @seed(number)
    @settings(max_examples=count, phases=[Phase.generate], **unchecked)
    @given(call=calls())
    def collect(call: Call) -> None:
        found.append(call)

    collect()
    return found


def damage(value: Any, draw: st.DrawFn) -> None:
    """Replace, remove or add something somewhere in an object."""
    while isinstance(value, dict | list) and value:
        key = draw(st.sampled_from(sorted(value))) if isinstance(value, dict) else draw(st.integers(0, len(value) - 1))
        if not isinstance(value[key], dict | list) or not value[key] or draw(st.booleans()):
            break
        value = value[key]
    else:
        return
    kind = draw(st.sampled_from(["hostile", "hostile", "any", "deep", "remove", "add"]))
    if kind == "remove":
        del value[key]
    elif kind == "add" and isinstance(value, dict):
        value[draw(_KEYS)] = deepcopy(draw(st.sampled_from(HOSTILE)))
    else:
        source = {"any": _ANY, "deep": _DEEP}.get(kind, st.sampled_from(HOSTILE))
        value[key] = deepcopy(draw(source))


def send(client: httpx2.Client, call: Call) -> httpx2.Response:
    return client.post(call.path, content=call.body, headers={"content-type": call.kind.encode("latin-1")})


def check(path: str, response: httpx2.Response) -> None:
    """The answer has a status that the path may have, below 500, and the shape of its model."""
    expected, status = ANSWERS[path], response.status_code
    assert status in expected.statuses(path), response.text[:2000]
    kind = response.headers["content-type"].partition(";")[0]
    assert kind in expected.kinds if status == 200 else kind == "application/json"
    if status != 200:
        error: Any = expected.error.model_validate(response.json())
        assert error.error.message
    elif kind == "text/event-stream":
        assert expected.events is not None
        if expected.named_events:
            *named, rest = [each for each in response.text.split("\n\n") if not each.startswith(":")]
            assert named and not rest
            for event in named:
                kind, data = event.split("\n")
                value = json.loads(data.removeprefix("data: "))
                expected.events.model_validate(value)
                assert kind == f"event: {value['type']}"
            return
        *events, last, rest = [each for each in response.text.split("\n\n") if not each.startswith(":")]
        assert (last, rest) == ("data: [DONE]", "") and events
        for event in events:
            value = json.loads(event.removeprefix("data: "))
            (ErrorAnswer if "error" in value else expected.events).model_validate(value)
    elif expected.answer is not None:
        expected.answer.model_validate(response.json())
