"""The model that is trained for: where it is, its weights, and what a drafter of it is bound to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wager.models.opening import target_fingerprint, tokenizer_fingerprint
from wager.models.tokenizer import Tokenizer
from wager.models.weights import Weights


@dataclass(frozen=True)
class TrainingTarget:
    """A target by the name it was given by, with its tokenizer, its fingerprints and the ids that end its
    texts."""

    name: str
    path: Path
    weights: Weights
    tokenizer: Tokenizer
    fingerprint: str
    tokenizer_fingerprint: str
    eos_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, name: str, path: Path, weights: Weights, tokenizer: Tokenizer) -> TrainingTarget:
        prints = target_fingerprint(weights), tokenizer_fingerprint(tokenizer)
        return cls(name, path, weights, tokenizer, *prints, tuple(tokenizer.eos_ids))
