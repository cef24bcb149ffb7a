"""Text that knows its origin: after any operation a character of the template is one, and content stays content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wager.models.chat_template import Traced, own, render
from wager.prompts import TextPart

TEMPLATES_OWN = frozenset("ab,- \n")
CONTENT = frozenset("AB;_\t\r")
LETTERS = sorted(TEMPLATES_OWN | CONTENT)


def traced(text: str) -> Traced:
    """A text whose characters tell where they are from."""
    return Traced(text, bytes(character in TEMPLATES_OWN for character in text))


def assert_origins(result: Any) -> None:
    """Every character has the origin that its letter says."""
    if isinstance(result, str):
        assert isinstance(result, Traced)
        for part in result.parts():
            assert set(part.text) <= (TEMPLATES_OWN if part.parse_special else CONTENT)
    else:
        for item in result:
            assert_origins(item)


OPERATIONS: dict[str, Callable[[Any, Any, int, int], Any]] = {
    "strip": lambda s, t, i, j: s.strip(),
    "strip of": lambda s, t, i, j: s.strip(str(t)),
    "lstrip": lambda s, t, i, j: s.lstrip(),
    "lstrip of": lambda s, t, i, j: s.lstrip(t),
    "rstrip": lambda s, t, i, j: s.rstrip(),
    "rstrip of": lambda s, t, i, j: s.rstrip(t),
    "removeprefix": lambda s, t, i, j: s.removeprefix(s[:i]),
    "removesuffix": lambda s, t, i, j: s.removesuffix(s[i:]),
    "split": lambda s, t, i, j: s.split(),
    "split limit": lambda s, t, i, j: s.split(None, j % 3),
    "split at": lambda s, t, i, j: s.split(s[i : i + 2] or "x"),
    "split at, limit": lambda s, t, i, j: s.split(s[i : i + 1] or "x", j % 3),
    "rsplit": lambda s, t, i, j: s.rsplit(),
    "rsplit limit": lambda s, t, i, j: s.rsplit(None, j % 3),
    "rsplit at, limit": lambda s, t, i, j: s.rsplit(s[i : i + 1] or "x", j % 3),
    "rsplit by name": lambda s, t, i, j: s.rsplit(sep=s[i : i + 1] or "x", maxsplit=1),
    "splitlines": lambda s, t, i, j: s.splitlines(),
    "splitlines with ends": lambda s, t, i, j: s.splitlines(True),
    "partition": lambda s, t, i, j: s.partition(s[i : i + 2] or "x"),
    "rpartition": lambda s, t, i, j: s.rpartition(s[i : i + 2] or "x"),
    "character": lambda s, t, i, j: s[i % len(s)] if s else s,
    "last character": lambda s, t, i, j: s[-1] if s else s,
    "slice": lambda s, t, i, j: s[i:j],
    "step": lambda s, t, i, j: s[i:j:2],
    "reverse": lambda s, t, i, j: s[::-1],
    "characters": lambda s, t, i, j: list(s),
    "add": lambda s, t, i, j: s + t,
    "add in place": lambda s, t, i, j: (s + t) * (j % 3) + s,
    "repeat": lambda s, t, i, j: 2 * s,
    "join": lambda s, t, i, j: s.join([t, s, t]),
    "join none": lambda s, t, i, j: s.join([]),
    "replace": lambda s, t, i, j: s.replace(s[i : i + 1] or "x", t),
    "replace some": lambda s, t, i, j: s.replace(s[i : i + 1] or "x", t, j % 3),
    "percent": lambda s, t, i, j: own("a%s,%s-") % (s, t),
    "format": lambda s, t, i, j: own("b{0}-{1}").formatted("b{0}-{1}".format, s, t),
}


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(OPERATIONS)),
    text=st.text(LETTERS, max_size=12),
    other=st.text(LETTERS, max_size=4),
    i=st.integers(0, 12),
    j=st.integers(0, 12),
)
def test_an_operation_gives_the_text_of_str_and_keeps_every_origin(
    name: str, text: str, other: str, i: int, j: int
) -> None:
    operation = OPERATIONS[name]
    result = operation(traced(text), traced(other), i, j)
    if name not in ("percent", "format"):
        assert result == operation(text, other, i, j)
    assert_origins(result)


def test_origins_are_kept_where_characters_stay_in_place_and_others_count_as_content() -> None:
    for name in ("lower", "upper", "casefold", "capitalize", "swapcase", "title"):
        change = getattr(own("<s>") + "bC" + own("d"), name)()
        assert change == getattr("<s>bCd", name)()
        assert [part.parse_special for part in change.parts()] == [True, False, True]
    assert not any(part.parse_special for part in (own("<s>ß") + "x").upper().parts())
    for name in ("zfill", "center", "ljust", "rjust", "expandtabs", "translate"):
        argument: Any = {} if name == "translate" else 9
        result = getattr(own("<s>\t"), name)(argument)
        assert not any(part.parse_special for part in Traced.of(result).parts())


def test_formatting_attributes_only_what_it_can() -> None:
    assert (own("<s>%s%%") % "x<s>").parts() == [TextPart("<s>", True), TextPart("x<s>"), TextPart("%", True)]
    assert (own("<s>%r") % "'x").parts() == [TextPart('<s>"\'x"')]  # quotes depend on the text
    assert (own("<s>%s") % object).parts()[0].parse_special is False
    assert (own("<s>") + "%s" + own("!")).__mod__("x").parts() == [TextPart("<s>x!")]
    assert (own("<s>%s") % "\U00040000a").parts() == [TextPart("<s>", True), TextPart("\U00040000a")]


HOSTILE = "x<s>y"


@pytest.mark.parametrize(
    ("template", "written"),
    [
        ("<s>{{ c }}</s>", ["<s>", "</s>"]),
        ("{{ '<s>' + c + '</s>' }}", ["<s>", "</s>"]),
        ("{{ '<s>' ~ c ~ 1 ~ '</s>' }}", ["<s>", "</s>"]),
        ("{{ bos_token + c }}", ["<s>"]),
        ("{{ ('<s> ' + c + ' ') | trim }}", ["<s> "]),
        ("{{ (' <s>' + c).strip() }}", ["<s>"]),
        ("{{ c | trim }}{{ c.strip() }}{{ c | upper }}{{ c[1:4] }}{{ c | list | join }}{{ c | e }}{{ c | safe }}", []),
        ("{{ c | tojson }}{{ messages | tojson }}{{ messages }}{{ c | indent }}{{ c | wordwrap(3) }}", []),
        ("{{ '%s' % c }}{{ '%s' | format(c) }}{{ '{}'.format(c) }}{{ '{x}'.format_map({'x': c}) }}", []),
        ("{{ '%s%s' % (c, c) }}{{ c % () }}{{ c * 2 }}{{ 'Q'.replace('Q', c) }}{{ 'Q' | replace('Q', c) }}", []),
        (
            "{{ ['a', c] | join(c) }}{{ c.join(['a', 'b']) }}{{ messages | map(attribute='content') | join('a') }}",
            ["a"],
        ),
        ("{{ '<s>%s</s>' | format(c) }}", ["<s>", "</s>"]),
        ("{{ '<s>{}</s>'.format(c) }}", ["<s>", "</s>"]),
        ("{{ '{x}</s>'.format(x=c) }}", ["</s>"]),
        ("{{ ('{}' | safe).format(c) }}{{ c['format']() }}{{ c['strip']() }}", []),
        ("{{ c.parts }}{{ 'x'.parts }}{{ 'x'.formatted is defined }}{{ '<s>' if c.strip is defined }}", ["False<s>"]),
        ("{{ c.replace('y', '</s>') }}", ["</s>"]),
        ("{{ c | replace('y', '</s>') }}", ["</s>"]),
        ("{{ [c, c] | join('</s>') }}", ["</s>"]),
        ("{{ '</s>'.join([c, c]) }}", ["</s>"]),
        ("{% macro m(x) %}<s>{{ x }}{% endmacro %}{{ m(c) }}", ["<s>"]),
        ("{% macro m(x) %}<s>{{ caller() }}{% endmacro %}{% call m(c) %}{{ c }}{% endcall %}", ["<s>"]),
        ("{% set t %}<s>{{ c }}{% endset %}{{ t.split('x')[0] }}", ["<s>"]),
        ("{% set ns = namespace(t='<s>') %}{% set ns.t = ns.t + c %}{{ ns.t }}", ["<s>"]),
        ("{% filter trim %} <s>{{ c }} {% endfilter %}", ["<s>"]),
        ("{{ {'user': '<s>'}[messages[0].role] }}{{ ['<s>', c] | last }}{{ c | default('<s>') }}", ["<s>"]),
        ("{% if '<s>' in c and c.startswith('x') and c == 'x<s>y' %}</s>{% endif %}", ["</s>"]),
        ("{{ c.split('<s>')[0] + '</s>' + c.split('<s>')[1] }}", ["</s>"]),
        ("{% for x in c %}{{ x }}{% endfor %}{% for x in '<s>' %}{{ x }}{% endfor %}", ["<s>"]),
        ("{{ '<|' + messages[0].role + '|>' }}{{ '<|' + messages[0].name + '|>' }}", ["<|user|><|", "|>"]),
        ("{{ c if c else '<s>' }}{{ '<s>' if c else c }}", ["<s>"]),
        ("{{ '[ARGS]' + (c | tojson | safe) }}{{ '</s>' + (c | safe) }}{{ (c | safe) + '[X]' }}", ["[ARGS]"]),
    ],
)
def test_templates_keep_the_origin_of_every_character(template: str, written: list[str]) -> None:
    messages = [{"role": "user", "content": HOSTILE, "name": "user"}]
    source = "{% set c = messages[0].content %}" + template
    result = render(source, messages, own({"bos_token": "<s>"}))
    assert [part.text for part in result.parts() if part.parse_special and len(part.text) > 2] == [
        text for text in written if len(text) > 2
    ], result.parts()
