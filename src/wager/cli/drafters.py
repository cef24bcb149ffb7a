"""`wager drafters`: what can be written for --drafter, and which drafters are known to fit a model."""

from __future__ import annotations

from pathlib import Path

import click

from wager.drafter_spec import descriptions
from wager.terminal import console, flags


@click.command("drafters", cls=flags.Verb)
@click.argument("model", required=False)
@flags.json_flag
def command(*, model: str | None, json_path: Path | None) -> None:
    """Explain what --drafter takes; with MODEL, list the drafters that its files bring along, and those that are known
    to fit it.

    None of them changes a byte of greedy text, nor of sampled text under the default rule (--verify match).
    """
    if model is not None:
        _of_model(model, json_path)
        return
    known = descriptions()
    console.write_json({"drafters": known}, json_path)
    if json_path == console.STDOUT:
        return
    formatter = click.HelpFormatter(width=console.width())
    formatter.write_dl(list(known.items()), col_max=26)
    click.echo(formatter.getvalue(), nl=False)
    click.echo()
    click.echo(console.wrapped("Several, such as ngram,recycle: the policy chooses among them at every step."))
    click.echo(console.wrapped("docs/drafters.md says how each works, docs/drafters_measured.md what each brings."))


def _of_model(model: str, json_path: Path | None) -> None:
    from wager.loading.drafters import is_here, known_drafters
    from wager.models import hub
    from wager.models.companions import drafters_of
    from wager.models.names import named_models

    path = None if hub.is_random(model) else hub.find(model)
    brought = {} if path is None else drafters_of(path)
    known = {str(spec): is_here(spec) for spec in known_drafters(model)}
    found = [{"drafter": drafter, "here": True, "where": where} for drafter, where in brought.items()]
    found += [{"drafter": name, "here": here, "where": None} for name, here in known.items() if name not in brought]
    console.write_json({"model": model, "drafters": found}, json_path)
    if json_path != console.STDOUT:
        if not found:
            names = ", ".join(name for name, row in named_models().items() if row.drafters)
            click.echo(console.wrapped(f"Of no drafter it is known that it fits {model}; of some for {names}."))
            click.echo("Lookup (auto, suffix, ngram) fits every model.")
        for each in found:
            place = each["where"] or ("on this machine" if each["here"] else "not fetched")
            click.echo(f"{each['drafter']}  ({place})")
