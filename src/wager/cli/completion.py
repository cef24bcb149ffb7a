"""`wager completion`: the script by which a shell completes verbs, options, models and drafters."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from wager.terminal import flags


@click.command("completion", cls=flags.Verb)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(*, shell: str) -> None:
    """Print a script that completes wager's commands in SHELL.

    bash: eval "$(wager completion bash)" in ~/.bashrc. zsh: the same in ~/.zshrc, after compinit. fish: wager
    completion fish > ~/.config/fish/completions/wager.fish.
    """
    from wager.cli.verbs import cli

    kind = get_completion_class(shell)
    if kind is not None:
        click.echo(kind(cli, {}, "wager", "_WAGER_COMPLETE").source())
