"""The command line: one file a verb, imported when it is called. Importing this module imports no torch.

Data goes to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 misused, 130 interrupted,
143 terminated (SIGTERM), 129 hung up (SIGHUP).
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

import click

from wager import __version__
from wager.cli import signals
from wager.errors import UsageError, WagerError

VERBS = {
    "pull": "Fetch a model and verify its bytes.",
    "run": "Answer one prompt.",
    "chat": "Talk with a model.",
    "bench": "Measure speed on a set of prompts.",
    "prove": "Count the tokens that speculation changes: there should be none.",
    "plan": "Compute from published figures which draft depth pays, where, and why.",
    "acceptance": "Measure how often a drafter's tokens are accepted on your prompts.",
    "popularity": "Count which experts a model chooses for your prompts, for plan.",
    "calibrate": "Measure what steps take on this machine, and store it.",
    "replay": "Compare policies on a simulated server; no model.",
    "doctor": "Show the machine's kernels, models and calibrations, and what is missing.",
}
"""Every verb and what it does; `wager.cli.NAME` holds its `command`."""


class Verbs(click.Group):
    """The verbs by name; each is imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"wager.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], VERBS, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Verbs: {', '.join(VERBS)}."
            raise click.UsageError(f"There is no verb {args[0]!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


@click.command(
    "wager",
    cls=Verbs,
    subcommand_metavar="VERB ...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="wager %(version)s")
def cli() -> None:
    """Run language models with speculative decoding: fewer passes per answer, the same text byte for byte.

    For the options of a verb: wager VERB --help.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; `arguments` defaults to the process's own."""
    return signals.ends_in_order(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure:
            reconfigure(errors="backslashreplace")
    try:
        code = cli.main(arguments, prog_name="wager", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except WagerError as error:
        _explain(error)
        return 2 if isinstance(error, UsageError) else 1
    except (click.Abort, KeyboardInterrupt):
        click.echo("\ninterrupted", err=True)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains while it exits
        return 1


def _explain(error: WagerError) -> None:
    click.secho("error: ", fg="red", bold=True, nl=False, err=True)
    click.echo(error.message, err=True)
    if error.hint:
        click.echo(f"hint: {error.hint}", err=True)
