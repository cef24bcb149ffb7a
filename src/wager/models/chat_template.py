"""Renders a model's chat template: Jinja in a sandbox that knows who wrote each character and limits the work.

A template's own strings are `Traced` when its code is generated; the strings of messages are plain. What an operation
makes of both remembers the origin of every character. An operation that does not know the origin returns plain text,
which counts as content: a template may lose control tokens in this way, content cannot gain any.

A template that does not end is stopped. Work is counted, not time: items of loops, calls, and characters of texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, SupportsIndex, cast

import jinja2
from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from wager.arch.config_keys import one_line
from wager.errors import TokenizerError
from wager.prompts import TextPart

# ---- text that knows which characters the template wrote -------------------------------------------------------------

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


# ---- limits of the work ----------------------------------------------------------------------------------------------

_WORK = 5_000_000
"""Items, calls and units of text in one rendering: seconds. Templates of published models take thousands."""
_CALL = 20
_ENTRY = 5
_CHARACTERS = 64
_COPIED = 512
"""Items that a call counts as, and each entry of a list it makes; characters of a text it makes that count as one item;
characters, or entries of a list, that count as one where they are only copied."""
_LONGEST = 1 << 26
_LARGEST_POWER = 64

_left: ContextVar[list[int]] = ContextVar("left")


class WorkLimitError(TemplateError):
    """A template that computes more than any template needs."""


@contextmanager
def limited_work() -> Iterator[None]:
    """One rendering: inside, templates of a LimitedEnvironment may do as much as is allowed."""
    token = _left.set([_WORK])
    try:
        yield
    finally:
        _left.reset(token)


def _spend(work: int) -> None:
    left = _left.get(None)
    if left is None:  # constants folded while the template is compiled
        return
    left[0] -= work
    if left[0] < 0:
        raise WorkLimitError("it computes without end, or more than any template needs")


def _counted(items: Iterable[Any]) -> Iterable[Any]:
    """What a loop runs over, its items counted."""
    if isinstance(items, Sized):
        _spend(len(items) + 1)
        return items
    return _counting(items)


def _counting(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _spend(1)
        yield item


def _measured(value: Any) -> Any:
    """The result of a call or filter, its size counted: each entry of a list is an object made."""
    if isinstance(value, str | list | tuple):
        _check_length(len(value))
        _spend(len(value) // _CHARACTERS if isinstance(value, str) else _ENTRY * len(value))
    return value


def _joined(value: Any) -> Any:
    """The result of + or ~, its size counted; a template may add to one text message by message."""
    if isinstance(value, str | list | tuple):
        _check_length(len(value))
        _spend(len(value) // _COPIED)
    return value


def _check_length(length: int) -> None:
    if length > _LONGEST:
        raise WorkLimitError(f"it makes a text or list of {length:.3g} items")


class _Limiter(NodeTransformer):
    """Puts the counting into loops, and after operations that can make texts longer."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "counted")
        return node

    def visit_Concat(self, node: nodes.Concat | nodes.Add) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "joined")

    visit_Add = visit_Concat

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        return node if node.node is None else _filtered(node, "measured")  # of {% filter %} the text is not known here


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(cast("nodes.Expr", node), name, [], [], None, None, lineno=node.lineno)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with limits. Render inside `limited_work`."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters |= {"counted": _counted, "measured": _measured, "joined": _joined}
        self.globals.pop("lipsum", None)  # makes any number of paragraphs in one call

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Limiter().visit(super()._parse(source, name, filename))
        return tree

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _spend(_CALL)
        return _measured(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) < 1 << _LARGEST_POWER and abs(right) < _LARGEST_POWER):
            raise WorkLimitError("it computes a power that is too large")
        if operator == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(items, str | list | tuple) and isinstance(times, int):
                    _check_length(len(items) * times)
        return _measured(super().call_binop(context, operator, left, right))


# ---- rendering -------------------------------------------------------------------------------------------------------

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython", "observation"})
"""Roles that count as the template's own text, since templates such as Phi's write '<|' + role + '|>'."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own spelling)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TracingGenerator(CodeGenerator):
    """Generates code whose string constants are Traced."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if type(value) in (str, list, tuple, dict):
            self.write(f"environment.own({value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for item in node.nodes:
            self.visit(item, frame)
            self.write(", ")
        self.write("))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.own({super()._output_const_repr(group)})"


class _TracingEnvironment(LimitedEnvironment):
    """The sandbox, with operations on text that keep the origin of its characters."""

    code_generator_class = _TracingGenerator
    concat = staticmethod(Traced.concat)
    own = staticmethod(own)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) in (str, Traced):  # both have the attributes of str, as methods that keep the origin
            obj = Traced.of(obj) if hasattr(str, attribute) else str.__str__(obj)
        return super().getattr(obj, attribute)

    def wrap_str_format(self, value: Any) -> Any:
        form = super().wrap_str_format(value)
        return partial(value.__self__.formatted, form) if form and isinstance(value.__self__, Traced) else form


def check(source: str) -> None:
    """TokenizerError for a text that is no template."""
    try:
        _compiled(source)
    except jinja2.TemplateSyntaxError as error:
        raise _damaged(error) from error


def _damaged(error: jinja2.TemplateSyntaxError) -> TokenizerError:
    return TokenizerError(
        f"The chat template is damaged: {one_line(error.message)} (line {error.lineno}).",
        "Fetch the model again, or give another --chat-template.",
    )


def render(source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> Traced:
    """The text that a template renders for messages. TokenizerError if the template is damaged or rejects them.

    Content are the messages, but for a role of ROLES, and the variables, unless they are Traced.
    """
    try:
        with limited_work():
            return Traced.of(_compiled(source).render(messages=list(map(_message, messages)), **variables))
    except jinja2.TemplateSyntaxError as error:
        raise _damaged(error) from error
    except Exception as error:  # a template can raise whatever Python can
        raise TokenizerError(
            f"The chat template refuses these messages: {one_line(error)}.",
            'A message is {"role": ROLE, "content": TEXT}; many templates require user and assistant to alternate.',
        ) from error


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    environment = _TracingEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters |= {"tojson": _to_json, "join": _join, "replace": _replace}
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment.from_string(source)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    entries = dict(message)
    role = entries.get("role")
    return {**entries, "role": own(str(role))} if isinstance(role, str) and role in ROLES else entries


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> Traced:
    items = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    return Traced.of(d).join(map(str, items))


def _replace(s: str, old: str, new: str, count: int | None = None) -> Traced:
    return Traced.of(s).replace(str(old), str(new), -1 if count is None else count)


def _to_json(
    value: Any,
    *,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
