"""`python -m wager.cli.reference` prints docs/cli.md: the whole help of every verb."""

from __future__ import annotations

import os
import sys

import click

from wager.cli.verbs import VERBS, cli
from wager.terminal import flags

_WIDTH = 100


def render() -> str:
    """The text of docs/cli.md, which does not depend on the terminal."""
    parts = [
        "# Commands",
        "Every option of each verb, as `--help-all` prints them; `--help` shows the most used.\n"
        "Printed by `python -m wager.cli.reference`; a test compares the two.",
        "Data goes to standard output, everything else to standard error.\n"
        + "Exit codes: 0 done, 1 failed, 2 misused, 130 interrupted, 143 terminated, 129 hung up.",
        _block("wager --help", cli, None),
    ]
    top = click.Context(cli, info_name="wager", **cli.context_settings)
    for verb in VERBS:
        command = cli.get_command(top, verb)
        if command is not None:
            more = isinstance(command, flags.Verb) and command.has_more
            parts += [f"## {verb}", _block(f"wager {verb} --help{'-all' * more}", command, top)]
    return "\n\n".join(parts) + "\n"


def _block(call: str, command: click.Command, parent: click.Context | None) -> str:
    name = call.split()[1] if parent else "wager"
    settings = {**command.context_settings, "info_name": name, "parent": parent, "terminal_width": _WIDTH}
    with click.Context(command, **settings) as context:
        context.meta[flags.SHOW_ALL] = True
        text = command.get_help(context)
    return f"```\n$ {call}\n{text.rstrip()}\n```"


if __name__ == "__main__":
    os.environ["NO_COLOR"] = "1"
    sys.stdout.write(render())
