"""JSON as strangers send it: what is ambiguous, or made to exhaust whoever reads it, is refused."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

MOST_LEVELS = 100
"""Objects and lists within each other. What they are given to (templates, grammars) works recursively."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(text: str) -> Any:
    """The value of a JSON text. ValueError that says what is wrong: also names that stand twice in one object, NaN and
    infinities, halves of surrogate pairs, and more than MOST_LEVELS levels."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except RecursionError:
        raise _too_deep() from None
    if text.count("[") + text.count("{") > MOST_LEVELS and _is_deep(value):
        raise _too_deep()
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


def _too_deep() -> ValueError:
    return ValueError(f"objects and lists are more than {MOST_LEVELS} levels deep")
