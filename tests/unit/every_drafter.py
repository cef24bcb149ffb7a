"""Every drafter of the registry for one target, as an option says it: what each needs is written into a folder."""

from __future__ import annotations

from pathlib import Path

from unit.blank_heads import HEADS
from wager.draft.store_file import build_store
from wager.draft.vocabulary import vocabulary_digest
from wager.drafter_spec import DRAFTERS
from wager.models.opening import open_model

EVERY = [
    *DRAFTERS,
    *(f"{name}:tree" for name, option in DRAFTERS.items() if option.trees == "optional"),
]
"""The labels of all drafters."""


def every_drafter(model: str, folder: Path, *, layers: str = "0") -> dict[str, str]:
    """The options by the drafter's label; `model` drafts for itself, or, where that has recurrent layers and more than
    chains are asked for, a dense one of its vocabulary, and none of its own layers."""
    _, weights, tokenizer = open_model(model)
    store = folder / "answers.store"
    pairs = [([1], [5, 6, 7, 8] * 8)]
    build_store(pairs, store, vocab=tokenizer.vocab_size, tokenizer=vocabulary_digest(tokenizer))
    arguments = {"path": model, "store": str(store), "layers": layers}
    found = {}
    for label in EVERY:
        name = label.partition(":")[0]
        option = DRAFTERS[name]
        argument = arguments.get(option.argument, "")
        if weights.spec.recurrent is not None and (":tree" in label or option.other_vocabulary):
            if option.argument == "layers":
                continue
            argument = "random:llama:tiny" if option.runs_a_model else argument
        if option.runs_a_head:
            argument = str(HEADS[name](folder / label, weights.spec))
        found[label] = f"{label}:{argument}" if argument else label
    return found
