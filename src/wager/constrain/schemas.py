"""JSON schemas as far as a grammar can say them: keywords that need more than the text so far are left out and named,
and an answer is checked against the whole schema when it is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""llguidance's options for JSON on one line, with a space after every comma and colon."""

_LEFT_OUT = {"not", "uniqueItems", "if", "then", "else", "propertyNames", "contains", "minContains", "maxContains"}
_LEFT_OUT |= {"dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems"}
"""Keywords that a grammar cannot enforce. A schema without them allows more."""

_SILENT = {"description", "title", "default", "examples", "example", "$comment", "deprecated", "readOnly", "writeOnly"}
"""Keywords that change nothing: descriptions are most of the text of an agent's tools."""

_ENFORCED_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
_ENFORCED_FORMATS |= {"unknown"}
_ANNOTATIONS = frozenset(["binary", "byte", "password", "float", "double", "int32", "int64"])
"""Formats of OpenAPI that every text has."""

_BEYOND_REGULAR = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?(?:[=!]|<[=!]|P=)|\\[1-9bB])")
"""Look-arounds, of which borders of words are some, and references to groups."""

_COMBINING = {"allOf", "patternProperties", "if", "dependentSchemas", "dependencies", "unevaluatedProperties"}
"""Keywords that say more about an object's properties elsewhere."""

_ONE = frozenset(["items", "additionalProperties", "additionalItems"])
_LISTS = frozenset(["allOf", "anyOf", "oneOf", "prefixItems", "items"])
_NAMED = frozenset(["properties", "patternProperties", "$defs", "definitions"])


@dataclass(frozen=True, slots=True)
class RelaxedSchema:
    """`schema` allows all that the original does; `unenforced` names what it lacks of that."""

    schema: Any
    unenforced: tuple[str, ...]


def relaxed(schema: Mapping[str, Any]) -> RelaxedSchema:
    """The schema without what a grammar cannot enforce. Objects whose properties it names get no others: few people
    mean that there may be more, and small models never stop to add some."""
    names: dict[str, None] = {}
    return RelaxedSchema(_relaxed(schema, names, closes=not _combines(schema)), tuple(names))


def _combines(schema: Any) -> bool:
    """Whether the properties of an object may stand in several places."""
    if isinstance(schema, Mapping):
        beside = "properties" in schema and schema.keys() & {"anyOf", "oneOf", "$ref"}
        return bool(schema.keys() & _COMBINING or beside) or any(map(_combines, schema.values()))
    return isinstance(schema, list) and any(map(_combines, schema))


def _relaxed(schema: Any, names: dict[str, None], *, closes: bool) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _SILENT:
            continue
        if key in _LEFT_OUT:
            if not (key == "uniqueItems" and value is False):
                names[key] = None
        elif key in _NAMED and isinstance(value, Mapping):
            found[key] = {name: _relaxed(each, names, closes=closes) for name, each in value.items()}
        elif key in _LISTS and isinstance(value, Sequence) and not isinstance(value, str):
            found[key] = [_relaxed(each, names, closes=closes) for each in value]
        elif key in _ONE:
            found[key] = _relaxed(value, names, closes=closes)
        elif key == "format" and isinstance(value, str) and value not in _ENFORCED_FORMATS:
            kinds = schema.get("type", "string")
            if "string" not in (kinds if isinstance(kinds, list) else [kinds]) or value in _ANNOTATIONS:
                continue
            names[f"format {value[:40]!r}"] = None
        elif key == "pattern" and isinstance(value, str) and _BEYOND_REGULAR.search(value):
            names["pattern with a look-around or a reference to a group"] = None
        else:
            found[key] = value
    pattern = schema.get("propertyNames")
    if isinstance(pattern, Mapping) and set(pattern) == {"pattern"} and "properties" not in schema:
        _name_properties(found, pattern["pattern"], names)
    if isinstance(found.get("oneOf"), list) and isinstance(found.get("allOf", []), list):
        _any_of_one(found, names)
    properties, required = found.get("properties"), found.get("required") or []
    if closes and properties and isinstance(properties, Mapping) and isinstance(required, list):
        named = [name for name in required if isinstance(name, str) and name in properties]
        if len(named) == len(required):
            found.setdefault("additionalProperties", False)
    return found


def _name_properties(found: dict[str, Any], pattern: Any, names: dict[str, None]) -> None:
    """All properties have names of a pattern: which a grammar can say, if they have no other rules."""
    if isinstance(pattern, str) and not _BEYOND_REGULAR.search(pattern) and "patternProperties" not in found:
        names.pop("propertyNames", None)
        found["patternProperties"] = {pattern: found.get("additionalProperties", True)}
        found["additionalProperties"] = False


def _any_of_one(found: dict[str, Any], names: dict[str, None]) -> None:
    """`anyOf` in the place of `oneOf`: the same where no value fits two of the alternatives."""
    alternatives = found.pop("oneOf")
    if "anyOf" in found:
        found["allOf"] = [*found.get("allOf", ()), {"anyOf": alternatives}]
    else:
        found["anyOf"] = alternatives
    if not _exclusive(alternatives):
        names["oneOf of alternatives that overlap"] = None


def _exclusive(alternatives: Sequence[Any]) -> bool:
    """Whether the alternatives are of different types, or name different constants of one required property."""
    if not all(isinstance(each, Mapping) for each in alternatives):
        return False
    types = [each.get("type") for each in alternatives]
    if all(isinstance(kind, str) for kind in types):
        distinct = {"number" if kind == "integer" else kind for kind in types}
        if len(distinct) == len(types):
            return True
    tags = [_constants(each) for each in alternatives]
    return any(
        all(name in each for each in tags) and len({each[name] for each in tags}) == len(tags)
        for name in (tags[0] if tags else ())
    )


def _constants(schema: Mapping[str, Any]) -> dict[str, str]:
    """The constants of required properties, in JSON; that of the value itself under ""."""
    properties, required = schema.get("properties"), schema.get("required")
    found = {"": schema} if "const" in schema else {}
    if isinstance(properties, Mapping) and isinstance(required, Sequence):
        found |= {name: each for name, each in properties.items() if name in required and isinstance(each, Mapping)}
    return {
        name: json.dumps(each["const"] if "const" in each else each["enum"][0], sort_keys=True)
        for name, each in found.items()
        if "const" in each or (isinstance(each.get("enum"), list) and len(each["enum"]) == 1)
    }


def violations(schema: Mapping[str, Any], text: str) -> list[str]:
    """What an answer breaks of a schema, at most three sentences; references to other documents are not followed.
    Time is not bounded: patterns are the caller's."""
    from jsonschema import FormatChecker
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:
        value = json.loads(text)
    except ValueError:
        return ["The answer is no JSON."]
    except RecursionError:
        return ["The answer could not be checked: it has too many levels."]
    try:
        kind: Any = validator_for(schema)
        kind.check_schema(schema)
        checking = kind(schema, registry=Registry(), format_checker=FormatChecker())
        found = [error for _, error in zip(range(3), checking.iter_errors(value), strict=False)]
    except Exception as error:  # the library raises of all kinds: for a $schema that is no text, a number without end
        return [f"The answer could not be checked: {str(error).partition(chr(10))[0][:200]}."]
    return [f"The answer breaks {error.validator!r} at {error.json_path[:200]}." for error in found]
