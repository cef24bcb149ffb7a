"""Renders a model's chat template: Jinja in a sandbox, with the extensions that templates on the hub use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from wager.arch.config_keys import brief
from wager.errors import TokenizerError
from wager.models.template_limits import LimitedEnvironment, limited_work


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own spelling)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The text that a template renders for messages. TokenizerError if the template is damaged or rejects them."""
    try:
        with limited_work():
            return _compiled(source).render(messages=[dict(message) for message in messages], **variables)
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
    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment.from_string(source)


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
