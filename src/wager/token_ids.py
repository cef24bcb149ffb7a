"""Token ids as users give them: any sequence of integers, arrays and tensors included, as a tuple of Python's ints."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence


def listed(values: object) -> object:
    """Arrays and tensors as (nested) lists, their single numbers as Python's; anything else as it is."""
    is_array = hasattr(values, "tolist") and not isinstance(values, memoryview)
    return values.tolist() if is_array else values  # type: ignore[attr-defined]


def as_integer(value: object) -> int:
    """A Python int from one of any integer type. TypeError, which names the value, for bools and all others."""
    number = listed(value)
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(_named(value))
    return int(number)


def as_token_ids(values: object) -> tuple[int, ...]:
    """A tuple of Python ints. TypeError, which names what is no integer and where, for anything else.

    Whether a vocabulary has the ids is not asked here.
    """
    items = listed(values)
    if isinstance(items, str | bytes | bytearray | memoryview) or not isinstance(items, Sequence):
        raise TypeError(f"{_named(values)} is not a sequence of integers")
    if all(type(item) is int for item in items):
        return tuple(items)
    ids = []
    for index, item in enumerate(items):
        try:
            ids.append(as_integer(item))
        except TypeError as error:
            raise TypeError(f"token {error} at index {index} is not an integer") from None
    return tuple(ids)


def _named(value: object) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"
