"""Opens a model by path or name: its path, its weights and its tokenizer."""

from __future__ import annotations

from pathlib import Path

from wager.models import hub
from wager.models.tokenizer import Tokenizer
from wager.models.weights import Weights, open_weights


def open_model(model: str) -> tuple[Path, Weights, Tokenizer]:
    """A model by path or name (fetched if necessary), its tensors checked and not yet read; `random:` models are
    generated. WagerError names what is not known, missing or damaged."""
    if hub.is_random(model):
        from wager.models import random_models

        return Path(model), *random_models.make(model)
    path = hub.resolve(model)
    return path, open_weights(path), Tokenizer.load(path)
