"""A store as the result of a run: built from the answers that are not held out, and walked over those that are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wager.draft.store_file import StoreFile, StoreHeader, build_store
from wager.draft.vocabulary import vocabulary_digest, vocabulary_sample
from wager.errors import UsageError
from wager.models.tokenizer import Tokenizer, num_tokens
from wager.train.data import TrainingData, TrainingTarget, TrainingText

STORE = "answers.store"


@dataclass(frozen=True)
class StoreResult:
    """A store that was built: its header, and the held-out rounds as `survival` by depth."""

    header: StoreHeader
    survival: tuple[float, ...]
    rounds: int
    texts: int

    @property
    def figures(self) -> dict[str, Any]:
        tau = 1 + sum(self.survival)
        held_out = {"survival": list(self.survival), "tau": tau, "rounds": self.rounds, "texts": self.texts}
        return {"entries": self.header.entries, "tokens": self.header.tokens, "held_out": held_out}


def run_store(
    target: TrainingTarget,
    tokenizer: Tokenizer,
    texts: Sequence[TrainingText],
    folder: Path,
    *,
    depth: int,
    command: str,
    max_bytes: int | None = None,
) -> StoreResult:
    """Build `folder`/answers.store. UsageError if no text has an answer."""
    answered = [text for text in texts if text.answered]
    if not answered:
        raise UsageError("A store holds answers, and no text has one.", "Leave out --answer-tokens 0.")
    data = TrainingData(tuple(answered), max(len(text.ids) for text in answered))
    digest = vocabulary_digest(tokenizer)
    provenance = {
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "tokenizer_fingerprint": target.tokenizer_fingerprint,
        "data_digest": data.digest,
        "texts": len(data.train),
        "command": command,
    }
    pairs = [(text.ids[: text.prompt_length], text.ids[text.prompt_length :]) for text in data.train]
    path = folder / STORE
    header = build_store(
        pairs,
        path,
        vocab=num_tokens(tokenizer),
        tokenizer=digest,
        sample=vocabulary_sample(tokenizer),
        provenance=provenance,
        max_bytes=max_bytes,
    )
    store = StoreFile(path, vocab=num_tokens(tokenizer), tokenizer=digest)
    accepted = [count for text in data.held_out for count in _rounds(store, text, depth)]
    survival = tuple(
        sum(count > step for count in accepted) / len(accepted) if accepted else 0.0 for step in range(depth)
    )
    return StoreResult(header, survival, len(accepted), len(data.held_out))


def _rounds(store: StoreFile, text: TrainingText, depth: int) -> list[int]:
    """Guesses accepted in each round along the answer: the likeliest continuation, again and again."""
    found, at = [], text.prompt_length + 1  # the answer's first token comes with the prompt's pass
    while at < len(text.ids):
        count = 0
        while count < depth and at + count < len(text.ids):
            _, continuations = store.continuations(text.ids[: at + count])
            if not continuations or continuations[0].token != text.ids[at + count]:
                break
            count += 1
        found.append(count)
        at += count + 1
    return found
