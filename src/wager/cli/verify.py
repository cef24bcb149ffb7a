"""`wager verify`: check receipts, each in one pass over its prompt and answer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wager.config import EngineConfig
from wager.errors import WagerError
from wager.inputs import shown
from wager.terminal import console, flags

if TYPE_CHECKING:
    from wager.receipts import Receipt, Verification


@click.command("verify", cls=flags.Verb)
@click.argument("files", nargs=-1, required=True, metavar="RECEIPT...", type=flags.InputPath())
@click.option(
    "--signed-by",
    "key_path",
    type=flags.InputPath(),
    help="The public key, a PEM file, with which every receipt must be signed.",
)
@flags.engine_flags(only=("model", "chat_template", "threads", "memory"))
@flags.json_flag
def command(*, files: tuple[Path, ...], key_path: Path | None, config: EngineConfig, json_path: Path | None) -> None:
    """Check that a model gives the answer of each RECEIPT to its prompt: every token, its end and its text.

    A receipt is what `wager run --receipt` wrote, or an answer of `wager serve` with receipts. The answer is computed
    again in passes over all of its tokens, so that checking takes what a prompt of that length takes. Number formats
    and context are those of the receipt. Exits with 1 if one is not verified, and says why.
    """
    from wager.cli.loading import open_engine
    from wager.receipts import read_public_key, read_receipts, verifications

    signed_by = read_public_key(key_path) if key_path else None
    receipts = [(path, receipt) for path in files for receipt in read_receipts(path)]
    every = verifications((each for _, each in receipts), config, signed_by=signed_by, open_engine=open_engine)
    found: list[tuple[Path, Receipt, Verification]] = []
    for (path, receipt), checked in zip(receipts, every, strict=True):
        found.append((path, receipt, checked))
        if json_path != console.STDOUT:
            click.echo(_line(path, receipt, checked))
    results = [_as_dict(*each) for each in found]
    console.write_json({"model": config.model.model, "receipts": results}, json_path)
    wrong = sum(not checked.verified for *_, checked in found)
    if wrong:
        count = "The receipt is" if len(found) == 1 else f"{wrong} of {len(found)} receipts are"
        raise WagerError(f"{count} not verified.", "Was --model the model of the receipt? It names " + _names(found))


def _line(path: Path, receipt: Receipt, checked: Verification) -> str:
    """What is said of a receipt."""
    signer = f", signed with {receipt.signature.public_key}" if receipt.signature else ", not signed"
    if checked.verified:
        said = f"verified{signer}; {checked.computed} tokens in {checked.seconds:.2f} s."
    else:
        said = " ".join(("not verified.", *checked.problems))
    return " ".join((f"{path}:", said, *checked.notes))


def _names(found: list[tuple[Path, Receipt, Verification]]) -> str:
    models = dict.fromkeys(receipt.model for _, receipt, checked in found if not checked.verified)
    return ", ".join(map(shown, models)) + "."


def _as_dict(path: Path, receipt: Receipt, checked: Verification) -> dict[str, Any]:
    signer = receipt.signature.public_key if receipt.signature else None
    return {"file": str(path), "model": receipt.model, "signed_with": signer, **checked.as_dict()}
