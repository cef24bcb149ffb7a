"""How options are written: numbers in ASCII digits, texts that are not blank, files that can be written.

What is refused here names its option.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from wager.cli import console
from wager.errors import UsageError
from wager.inputs import expand_path, shown

T = TypeVar("T")

_DIGITS = "[0-9]{1,400}"
_NUMBERS = {
    click.types.IntParamType: ("a whole number", re.compile(r"[+-]?[0-9]{1,40}")),
    click.types.FloatParamType: (
        "a number",
        re.compile(rf"[+-]?({_DIGITS}\.?({_DIGITS})?|\.{_DIGITS})(e[+-]?{_DIGITS})?", re.I),
    ),
}
"""How numbers are written, by click's type: in ASCII digits, without nan, infinity and Python's underscores."""


def as_bad_parameter(parse: Callable[[], T]) -> T:
    """The value of `parse`; a UsageError becomes click's BadParameter, which names the flag."""
    try:
        return parse()
    except UsageError as error:
        raise click.BadParameter(f"{error.message} {error.hint}") from error


class OutputPath(click.Path):
    """A file to write; refused at once, by the option's name, where that is known to fail. `allow_dash`: or stdout."""

    def __init__(self, *, allow_dash: bool = False) -> None:
        super().__init__(dir_okay=False, allow_dash=allow_dash, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if self.allow_dash and str(value) == "-":
            return Path("-")
        path = as_bad_parameter(lambda: expand_path(str(value)))
        cause = console.obstacle(path)
        if cause:
            self.fail(f"{str(path)!r} cannot be written: {cause}.", param, ctx)
        return super().convert(str(path), param, ctx)


class Verb(click.Command):
    """A command that refuses what click would read as a number though nobody writes it so, and texts that are blank."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        written, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        for param in self.params:
            values = written.get(param.name or "")
            for value in values if isinstance(values, list | tuple) else (values,):
                if isinstance(value, str):
                    _check_written(ctx, param, value)
        return super().parse_args(ctx, args)


def _check_written(ctx: click.Context, param: click.Parameter, value: str) -> None:
    for kind, (noun, pattern) in _NUMBERS.items():
        if isinstance(param.type, kind) and not pattern.fullmatch(value.strip()):
            raise click.BadParameter(f"{shown(value)} is not {noun}.", ctx, param)
    free = param.name in ("prompt", "stop", "system")  # the text may be any
    if not free and not value.strip():
        raise click.BadParameter(f"{value!r} is empty.", ctx, param)
