"""Every drafter of the registry for one target, as an option says it: what each needs is written into a folder."""

from __future__ import annotations

from pathlib import Path

from unit.blank_heads import HEADS
from wager.draft.registry import KINDS
from wager.draft.store_file import build_store
from wager.draft.vocabulary import vocabulary_digest
from wager.models.opening import open_model


def every_drafter(model: str, folder: Path, *, layers: str = "0") -> dict[str, str]:
    """The options by the drafter's name; `model` drafts for itself."""
    _, weights, tokenizer = open_model(model)
    store = folder / "answers.store"
    pairs = [([1], [5, 6, 7, 8] * 8)]
    build_store(pairs, store, vocab=tokenizer.vocab_size, tokenizer=vocabulary_digest(tokenizer))
    arguments = {"path": model, "store": str(store), "layers": layers}
    found = {}
    for name, kind in KINDS.items():
        argument = arguments.get(kind.argument, "")
        if kind.argument in ("head", "modules"):
            argument = str(HEADS[_kind_of_head(name)](folder / name, weights.spec))
        found[name] = f"{name}:{argument}" if argument else name
    return found


def _kind_of_head(name: str) -> str:
    return name.removesuffix("-tree")
