"""The verbs of the command line, and how one ends. Importing this module imports no engine."""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
from collections.abc import Sequence

import click

from wager import __version__
from wager.cli import process
from wager.errors import UsageError, WagerError
from wager.inputs import did_you_mean, shown
from wager.terminal import console

VERBS = {
    "pull": "Fetch a model and verify its bytes.",
    "list": "List the models on this machine, or the names that can be fetched.",
    "rm": "Delete a model that was fetched.",
    "run": "Answer one prompt.",
    "chat": "Talk with a model.",
    "serve": "Serve a model over HTTP, with OpenAI's API.",
    "drafters": "Explain the drafters, and what fits which model.",
    "bench": "Measure speed on a set of prompts.",
    "prove": "Count the tokens that speculation changes: there should be none.",
    "verify": "Check a receipt: that a model gives this answer to this prompt.",
    "plan": "Compute from published figures which draft depth pays, and why.",
    "acceptance": "Measure how often a drafter's tokens are accepted.",
    "corpus": "List, export and forget what was learned from answers.",
    "train": "Train a drafter for a model, on answers of the model itself.",
    "export": "Write a drafter in the form that another engine loads.",
    "calibrate": "Measure what steps take on this machine, and store it.",
    "replay": "Compare policies on a simulated server; no model.",
    "lesson": "A lesson on speculative decoding, from nothing to the policy.",
    "doctor": "Show kernels, models and calibrations, and what is missing.",
    "completion": "Print a script that completes commands in your shell.",
}
"""Every verb and what it does; `wager.cli.NAME` holds its `command`, unless COMMANDS says where: a module of several
verbs has a `NAME_command` of each."""

COMMANDS = {
    "plan": "wager.planner.command",
    "replay": "wager.simulation.command",
    **dict.fromkeys(("list", "rm"), "wager.cli.stored"),
}


class Verbs(click.Group):
    """The verbs by name; each is imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(COMMANDS.get(cmd_name, f"wager.cli.{cmd_name}"))
        command: click.Command = getattr(module, f"{cmd_name}_command", None) or module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            hint = did_you_mean(args[0], VERBS, otherwise="Verbs: {}.")
            raise click.UsageError(f"There is no verb {shown(args[0])}. {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


@click.command(
    "wager",
    cls=Verbs,
    subcommand_metavar="VERB ...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
)
@click.version_option(__version__, "-V", "--version", message="wager %(version)s")
def cli() -> None:
    """Run language models with speculative decoding: fewer passes per answer, the same text byte for byte.

    For the options of a verb: wager VERB --help, and --help-all for every one.
    """


def run(arguments: Sequence[str] | None) -> int:
    """Run a verb and return the exit code; see wager.cli.main."""
    console.set_verbosity(0)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # starting numpy's threads takes time, and none is used
    with process.standard_streams():
        try:
            code = cli.main(
                _as_text(sys.argv[1:] if arguments is None else arguments), prog_name="wager", standalone_mode=False
            )
            sys.stdout.flush()
            return code if isinstance(code, int) else 0
        except click.ClickException as error:
            shown_error = io.StringIO()
            error.show(shown_error)
            click.echo(_legible(_choices_in_line(shown_error.getvalue())), nl=False, err=True)
            return error.exit_code
        except process.OutputError as error:
            process.drop_output()
            return _explain(error) if error.message else 1
        except WagerError as error:
            return _explain(error)
        except MemoryError:
            return _explain(WagerError("The system gives no more memory.", "Lower --memory or --max-context."))
        except (click.Abort, KeyboardInterrupt):
            click.echo("\ninterrupted", err=True)
            return 130
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            return _explain(WagerError(f"The system refuses: {where}{error.strerror or error}."))


def _as_text(arguments: Sequence[str]) -> list[str]:
    """The arguments. UsageError for one that is not UTF-8: it would be in messages, results and prompts."""
    for number, word in enumerate(arguments, 1):
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"Argument {number} is not UTF-8: {shown(word)}.", "Give text in UTF-8.") from error
    return list(arguments)


def _explain(error: WagerError) -> int:
    """Print it; the exit code."""
    click.secho("error: ", fg="red", bold=True, nl=False, err=True, color=False if os.environ.get("NO_COLOR") else None)
    click.echo(_legible(error.message), err=True)
    if error.hint:
        click.echo(f"hint: {_legible(error.hint)}", err=True)
    return 2 if isinstance(error, UsageError) else 1


def _choices_in_line(message: str) -> str:
    """The message with the choices of what is missing, which click writes a line each, as a sentence."""
    return re.sub(
        r"Choose from:\s+((?:\S+,\s+)*\S+)", lambda found: f"Choose from {' '.join(found[1].split())}.", message
    )


def _legible(message: str) -> str:
    """The message with absurdly long words cut, such as an argument of thousands of letters, and what is legible of
    it."""
    return console.legible(re.sub(r"(\S{100})\S{400,}", r"\1...", message))
