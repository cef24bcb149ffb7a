"""A sandbox for chat templates that do not end: what a template may compute is limited, whatever it is made of.

Work is counted, not time: items of loops, calls, and characters of the texts that it makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

from jinja2 import TemplateError, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_WORK = 5_000_000
"""Items, calls and units of text in one rendering: seconds. Templates of published models take thousands."""
_CALL, _CHARACTERS, _COPIED = 20, 64, 512
"""Items that a call counts as; characters of a text it makes that count as one item; characters, or entries of a list,
that count as one where they are only copied."""
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
        _spend(len(value) // (_CHARACTERS if isinstance(value, str) else 1))
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

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "joined")

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "joined")

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
