"""`wager list` and `wager rm`: the models that were fetched by name, and their removal."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import click

from wager.terminal import console, flags


@click.command("list", cls=flags.Verb)
@click.option("--known", is_flag=True, help="List the short names that can be fetched instead.")
@flags.json_flag
def list_command(*, known: bool, json_path: Path | None) -> None:
    """List the models on this machine that were fetched by name.

    They lie in wager's cache, and in that of the Hugging Face hub, where other programs may have put them. -v
    adds their paths.
    """
    from wager.models import hub
    from wager.models.names import named_models

    if known:
        rows = list(named_models().values())
        console.write_json({"names": [asdict(row) for row in rows]}, json_path)
        table = [[row.name, f"{row.gb:.1f}", ", ".join(map(_short, row.drafters))] for row in rows]
        columns = ["name", "GB", "drafters that fit"]
    else:
        models = hub.stored_models()
        found = [{**asdict(model), "path": str(model.path), "fetched": _date(model.fetched)} for model in models]
        console.write_json({"models": found}, json_path)
        columns = ["name", "GB", "fetched"]
        table = [[each.name, f"{each.bytes / 1e9:.2f}", _date(each.fetched)] for each in models]
        for row, model in zip(table, models, strict=True):
            row[0] += "" if model.complete else " (in part: `wager pull` goes on)"
    if json_path == console.STDOUT:
        return
    if table:
        console.table("", columns, table, to_stdout=True, texts=(0, 2))
    else:
        console.say("No model is on this machine. `wager list --known` has names to fetch.")
    if not known:
        for model in models:
            console.detail(f"{model.name}: {model.path}")


def _short(drafter: str) -> str:
    """A drafter without the repository that its head comes from."""
    return drafter.partition(":")[0] if "/" in drafter else drafter


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()


@click.command("rm", cls=flags.Verb)
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
def rm_command(*, models: tuple[str, ...]) -> None:
    """Delete models that were fetched by name, and what wager made of their weights.

    `wager list` has the names. A repository of the hub is deleted with the last of its files.
    """
    from wager.models import hub, packed_cache

    for name in models:
        weights = {str(path) for path in hub.remove(name)}
        for file in packed_cache.stored():
            if file.model in weights:
                packed_cache.remove(file.path)
        console.say(f"{name} is deleted.")
