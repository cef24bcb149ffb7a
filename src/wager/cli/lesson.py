"""`wager lesson`: the lesson on speculative decoding, part by part, with figures drawn of letters.

`python dev/lesson.py` makes lesson.md beside this file, and docs/lesson.md, of dev/lesson.md.in.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from wager.errors import UsageError
from wager.terminal import flags

TEXT = Path(__file__).with_name("lesson.md")

_PART, _ANSWER = re.compile(r"^(?=## )", re.MULTILINE), re.compile(r"^A: (.*?\n)\n", re.DOTALL | re.MULTILINE)


@click.command("lesson", cls=flags.Verb)
@click.argument("parts", nargs=-1, type=flags.Count(min=1), metavar="[PART]...")
@click.option("--answers", is_flag=True, help="Show the answers to the questions at once.")
def command(*, parts: tuple[int, ...], answers: bool) -> None:
    """A lesson on speculative decoding, from nothing to the policy, in parts.

    On a terminal the answer to a question comes with a key, and q ends. Elsewhere everything is printed, the answers
    with --answers.
    """
    introduction, *sections = _PART.split(TEXT.read_text(encoding="utf-8"))
    glossary = sections.pop()
    for number in parts:
        if number > len(sections):
            raise UsageError(f"The lesson has no part {number}.", f"Its parts are 1 to {len(sections)}.")
    asks = sys.stdin.isatty() and sys.stdout.isatty() and not answers
    shown = [sections[number - 1] for number in parts] or [introduction, *sections, glossary]
    for section in shown:
        texts, hidden = _ANSWER.split(section)[::2], _ANSWER.split(section)[1::2]
        for before, answer in zip(texts, [*hidden, ""], strict=True):
            _print(before)
            if answer and asks and _key("any key: the answer") == "q":
                return
            if answer and (asks or answers):
                _print(answer)
        if asks and section is not shown[-1] and _key("any key: go on; q: end") == "q":
            return


def _print(text: str) -> None:
    """Markdown, drawn on a terminal."""
    if not sys.stdout.isatty():
        click.echo(text.strip("\n") + "\n")
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text, code_theme="ansi_dark", hyperlinks=False))


def _key(words: str) -> str:
    """A key that the reader presses."""
    click.echo(f"[{words}] ", nl=False, err=True)
    key = click.getchar()
    click.echo("\r\033[K", nl=False, err=True)
    return key.lower()
