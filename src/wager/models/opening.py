"""A model by the name people give it: where it is from, its weights and its tokenizer.

Knows no engine; what lies at a path, weights.py and tokenizer.py find out.
"""

from __future__ import annotations

from pathlib import Path

from wager.models import hub, random_models
from wager.models.tokenizer import Tokenizer
from wager.models.weights import Weights, open_weights


def open_model(model: str) -> tuple[Path, Weights, Tokenizer]:
    """A model by path or name, its tensors checked and not yet read; a random one is made up. WagerError says what is
    not known, missing or damaged."""
    if random_models.named(model):
        return Path(model), *random_models.make(model)
    path = hub.resolve(model)
    return path, open_weights(path), Tokenizer.load(path)
