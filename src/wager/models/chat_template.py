"""Renders a model's chat template: Jinja in a sandbox, with the extensions that templates on the hub use.

The rendered text remembers which of its characters the template wrote and which are content: every string constant of
the template is Traced when its code is generated, and what a caller passes in is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser

from wager.arch.config_keys import brief
from wager.errors import TokenizerError
from wager.models.template_limits import LimitedEnvironment, limited_work
from wager.models.traced_text import Traced, own

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


def render(source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> Traced:
    """The text that a template renders for messages. TokenizerError if the template is damaged or rejects them.

    Content are the messages, but for a role of ROLES, and the variables, unless they are Traced.
    """
    try:
        with limited_work():
            return Traced.of(_compiled(source).render(messages=list(map(_message, messages)), **variables))
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(
            f"The chat template is damaged: {brief(error.message)} (line {error.lineno}).",
            "Fetch the model again.",
        ) from error
    except Exception as error:  # a template can raise whatever Python can
        raise TokenizerError(
            f"The chat template refuses these messages: {brief(error)}.",
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
