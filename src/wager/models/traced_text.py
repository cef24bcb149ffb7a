"""Text that knows which of its characters the chat template wrote.

A template's own strings are `Traced`; the strings of messages are plain. What an operation makes of both remembers the
origin of every character. An operation that does not know the origin returns plain text, which counts as content: a
template may lose control tokens in this way, content cannot gain any.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex, cast

from wager.prompts import TextPart

_RUN = re.compile(rb"\x01+|\x00+")
_UNASSIGNED = range(0x40000, 0xE0000)  # code points without characters


class Traced(str):
    """A text with a mask of one byte for each character: 1 if the template wrote it, 0 if it is content (default)."""

    __slots__ = ("_mask",)
    _mask: bytes

    def __new__(cls, text: str, mask: bytes | None = None) -> Traced:
        self = super().__new__(cls, text)
        self._mask = bytes(len(text)) if mask is None else mask
        return self

    @classmethod
    def of(cls, value: object) -> Traced:
        """Any value as a template prints it; it is content unless it is Traced."""
        text = str(value)
        return text if isinstance(text, Traced) else cls(text)

    @classmethod
    def concat(cls, values: Iterable[object]) -> Traced:
        """The values one after another."""
        parts = [cls.of(value) for value in values]
        return cls("".join(parts), b"".join(part._mask for part in parts))

    def parts(self) -> list[TextPart]:
        """The text in pieces that the template wrote, and pieces of content."""
        text = _plain(self)
        runs = _RUN.finditer(self._mask)
        return [TextPart(text[slice(*run.span())], parse_special=bool(self._mask[run.start()])) for run in runs]

    def __str__(self) -> str:
        return self

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: SupportsIndex | slice) -> Traced:
        mask = self._mask[key]
        return Traced(super().__getitem__(key), bytes([mask]) if isinstance(mask, int) else mask)

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, str):
            return NotImplemented
        joined, markup = Traced.concat((self, other)), cast("Any", other)
        if not hasattr(markup, "__html__"):
            return joined
        escaped = markup.__radd__(self)  # Markup escapes what it is added to
        return joined if escaped == joined else escaped

    def __radd__(self, other: Any) -> Any:
        return Traced.concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> Traced:
        return Traced(super().__mul__(times), self._mask * times)

    __rmul__ = __mul__

    def __mod__(self, value: Any) -> Traced:
        return self.formatted(lambda values: _plain(self) % values, value)

    def join(self, texts: Iterable[str], /) -> Traced:
        texts = list(texts)
        super().join(texts)  # raises the TypeError of str if one of them is no text
        return Traced.concat([item for text in texts for item in (self, text)][1:])

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> Traced:
        if not old:
            return Traced(super().replace(old, new, count))
        return Traced.of(new).join(self.split(old, count))

    def removeprefix(self, prefix: str, /) -> Traced:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def formatted(self, form: Callable[..., str], *args: Any, **kwargs: Any) -> Traced:
        """form(*args, **kwargs), which fills values into this text.

        To see where they go, they are filled in again with every character replaced by a mark; if that changes the
        result in any other way, all of it counts as content.
        """
        text = form(*args, **kwargs)
        marks = _Marks(text)
        try:
            marked = form(*marks.put(args), **marks.put(kwargs))
        except (_UnknownValue, ValueError, LookupError, TypeError):
            return Traced(text)
        back = {mark: character for character, mark in marks.of.items()}
        if not all(self._mask) or "".join(back.get(character, character) for character in marked) != text:
            return Traced(text)
        return Traced(text, bytes(character not in back for character in marked))


class _UnknownValue(Exception):
    """A value whose text cannot be marked."""


def own(value: Any) -> Any:
    """A constant of the template, its strings Traced (but for Jinja's Markup, which escapes what is added to it)."""
    if type(value) is str:
        return Traced(value, b"\x01" * len(value))
    if type(value) in (list, tuple):
        return type(value)(map(own, value))
    if isinstance(value, dict):
        return {own(key): own(item) for key, item in value.items()}
    return value


def _plain(text: str) -> str:
    return str.__str__(text)


class _Marks:
    """`put` replaces every character of content in a value by a mark that the text does not have; `of` has the marks by
    character."""

    def __init__(self, text: str) -> None:
        known = set(text)
        self._free = (chr(code) for code in _UNASSIGNED if chr(code) not in known)
        self.of: dict[str, str] = {}

    def put(self, value: Any) -> Any:
        if isinstance(value, str):
            mask = Traced.of(value)._mask
            return "".join([c if mine else self._mark(c) for c, mine in zip(_plain(value), mask, strict=True)])
        if isinstance(value, list | tuple):
            return type(value)(map(self.put, value))
        if isinstance(value, dict):
            return {key: self.put(item) for key, item in value.items()}
        if value is None or type(value) in (bool, int, float):
            return value
        raise _UnknownValue

    def _mark(self, character: str) -> str:
        mark = self.of.get(character) or next(self._free, None)
        if mark is None:
            raise _UnknownValue
        self.of[character] = mark
        return mark


def _piecewise(name: str) -> Callable[..., Any]:
    """The method of str of this name, whose result is one piece of the text or several in their order."""
    method = getattr(str, name)

    def traced(self: Traced, /, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        separator = kwargs.get("sep", args[0] if args else None) if name in ("split", "rsplit") else None
        at, pieces = 0, []
        for piece in [result] if isinstance(result, str) else result:
            start = at if separator else _plain(self).index(piece, at)
            pieces.append(self[start : start + len(piece)])
            at = start + len(piece) + len(separator or "")
        return pieces[0] if isinstance(result, str) else type(result)(pieces)

    return traced


def _in_place(name: str) -> Callable[..., Any]:
    """The method of str of this name, which changes characters where they are (or else all of it is content)."""
    method = getattr(str, name)

    def traced(self: Traced, /) -> Traced:
        text = method(self)
        return Traced(text, self._mask if len(text) == len(self) else None)

    return traced


for _name in (
    *("strip", "lstrip", "rstrip", "removesuffix"),
    *("split", "rsplit", "splitlines", "partition", "rpartition"),
):
    setattr(Traced, _name, _piecewise(_name))
for _name in ("lower", "upper", "casefold", "capitalize", "swapcase", "title"):
    setattr(Traced, _name, _in_place(_name))
