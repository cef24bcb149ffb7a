"""A store as the result of a run: built from the answers that are not held out, and walked over those that are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wager.draft.store_file import StoreFile, StoreHeader, build_store
from wager.draft.vocabulary import vocabulary_digest, vocabulary_sample
from wager.errors import UsageError
from wager.models.tokenizer import num_tokens
from wager.train.data import HeldOutAcceptance, TrainingData, TrainingTarget, TrainingText

STORE = "answers.store"


def run_store(
    target: TrainingTarget,
    texts: Sequence[TrainingText],
    folder: Path,
    *,
    depth: int,
    command: str,
    max_bytes: int | None,
    mode: int | None,
) -> tuple[StoreHeader, HeldOutAcceptance]:
    """Build `folder`/answers.store, which those of `mode` may read (None: everybody). UsageError if no text has an
    answer."""
    answered = [text for text in texts if text.answered]
    if not answered:
        raise UsageError("A store holds answers, and no text has one.", "Leave out --answer-tokens 0.")
    data = TrainingData(tuple(answered), max(len(text.ids) for text in answered))
    vocab, digest = num_tokens(target.tokenizer), vocabulary_digest(target.tokenizer)
    provenance = {
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "tokenizer_fingerprint": target.tokenizer_fingerprint,
        "data_digest": data.digest,
        "texts": len(data.train),
        "command": command,
    }
    path = folder / STORE
    header = build_store(
        [(text.ids[: text.prompt_length], text.ids[text.prompt_length :]) for text in data.train],
        path,
        vocab=vocab,
        tokenizer=digest,
        sample=vocabulary_sample(target.tokenizer),
        provenance=provenance,
        max_bytes=max_bytes,
        mode=mode,
    )
    store = StoreFile(path, vocab=vocab, tokenizer=digest)
    accepted = [count for text in data.held_out for count in _rounds(store, text, depth)]
    return header, HeldOutAcceptance.of(accepted, depth=depth, texts=len(data.held_out))


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
