"""A store made of learned texts, and whether a drafter guesses better with it.

The latest texts are held out. Lookups with the new store and as they were before draft along them, one text after the
other; both have the texts before as --learn would give them, so that the difference is the store's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from wager.draft.corpus.files import LearnedText
from wager.draft.corpus.learning import CONTEXT, LearnedTexts
from wager.draft.registry import DrafterParts, build_drafter
from wager.draft.store_file import StoreFile, StoreHeader, build_store
from wager.draft.vocabulary import vocabulary_digest, vocabulary_sample
from wager.drafter_spec import DrafterSpec
from wager.errors import UsageError
from wager.models.opening import tokenizer_fingerprint
from wager.models.tokenizer import Tokenizer, num_tokens
from wager.profiling.acceptance import Estimate, estimate_acceptance, replay_drafts

_HELD_OUT = 10  # one text in so many, the latest
_DEPTH = 8

Pair = tuple[Sequence[int], Sequence[int]]


class Distillation(NamedTuple):
    """The store, how many texts it was made of and how many were held out, and on these the mean acceptance lengths
    without and with it."""

    store: StoreHeader
    texts: int
    held_out: int
    before: Estimate
    after: Estimate

    @property
    def pays(self) -> bool:
        return (self.after.value or 1.0) > (self.before.value or 1.0)


def distill(
    texts: Sequence[LearnedText],
    path: Path,
    *,
    tokenizer: Tokenizer,
    present: StoreFile | None,
    max_bytes: int | None,
    on_answer: Callable[[int, int], None],
) -> Distillation:
    """Write a store of `texts`, the oldest first, to `path`, and compare it with the store that is `present`, or with
    none. `on_answer` is told how many held-out texts are done, and of how many. UsageError for too few texts."""
    pairs: list[Pair] = [
        (ids[:CONTEXT], ids[CONTEXT:]) for ids in (text.tokens.tolist() for text in texts) if len(ids) > CONTEXT + 1
    ]
    if len(pairs) < _HELD_OUT:
        raise UsageError(
            f"{len(pairs)} texts are too few: the latest of {_HELD_OUT} are held out.", "Learn more of them first."
        )
    kept = len(pairs) - len(pairs) // _HELD_OUT
    vocab, digest = num_tokens(tokenizer), vocabulary_digest(tokenizer)
    header = build_store(
        pairs[:kept],
        path,
        vocab=vocab,
        tokenizer=digest,
        sample=vocabulary_sample(tokenizer),
        provenance={"learned_texts": kept},
        max_bytes=max_bytes,
    )
    total, done = 2 * (len(pairs) - kept), count(1)
    found: list[Estimate] = []
    with TemporaryDirectory() as folder:
        learned = LearnedTexts(Path(folder), tokenizer_fingerprint(tokenizer))
        try:
            learned.learn_all(pairs[:kept])
            for store in (present, StoreFile(path, vocab=vocab, tokenizer=digest)):
                spec = DrafterSpec("suffix") if store is None else DrafterSpec("store", str(store.path))
                drafter = build_drafter(spec, DrafterParts(vocab, store=store, learned=learned))
                recording = replay_drafts(
                    drafter, pairs[kept:], depth=_DEPTH, on_answer=lambda: on_answer(next(done), total)
                )
                found.append(estimate_acceptance(recording.answers, _DEPTH).tau)
        finally:
            learned.close()
    return Distillation(header, kept, len(pairs) - kept, *found)
