"""A store made of learned texts, and whether a drafter guesses better with it.

The latest texts are held out. Lookups with the new store and as they were before draft along them, one text after the
other; both have the texts before as --learn would give them, so that the difference is the store's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from wager.draft.base import Drafter
from wager.draft.corpus.files import Ids, LearnedText
from wager.draft.corpus.learning import CONTEXT, LearnedTexts
from wager.draft.registry import DrafterParts, build_drafter
from wager.draft.store_file import StoreFile, StoreHeader, build_store
from wager.draft.vocabulary import vocabulary_digest, vocabulary_sample
from wager.drafter_spec import DrafterSpec
from wager.errors import UsageError
from wager.models.opening import tokenizer_fingerprint
from wager.models.tokenizer import Tokenizer, num_tokens
from wager.profiling.acceptance import Estimate, estimate_tau, replay_drafts

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
    used = [text.tokens for text in texts if len(text.tokens) > CONTEXT + 1]
    if len(used) < _HELD_OUT:
        raise UsageError(
            f"{len(used)} texts are too few: the latest of {_HELD_OUT} are held out.", "Learn more of them first."
        )
    kept = len(used) - len(used) // _HELD_OUT
    vocab, digest = num_tokens(tokenizer), vocabulary_digest(tokenizer)
    header = build_store(
        _answers(used[:kept]),
        path,
        vocab=vocab,
        tokenizer=digest,
        sample=vocabulary_sample(tokenizer),
        provenance={"learned_texts": kept},
        max_bytes=max_bytes,
    )
    total, done = 2 * (len(used) - kept), count(1)
    found: list[Estimate] = []
    with TemporaryDirectory() as folder:
        learned = LearnedTexts(Path(folder), tokenizer_fingerprint(tokenizer))
        try:
            learned.learn_all(_answers(used[:kept]))
            for store in (present, StoreFile(path, vocab=vocab, tokenizer=digest)):
                spec = DrafterSpec("suffix") if store is None else DrafterSpec("store", str(store.path))
                drafter = build_drafter(spec, DrafterParts(vocab, store=store, learned=learned))
                found.append(_tau(drafter, _answers(used[kept:]), lambda: on_answer(next(done), total)))
        finally:
            learned.close()
    return Distillation(header, kept, len(used) - kept, *found)


def _tau(drafter: Drafter, answers: Iterable[Pair], on_answer: Callable[[], None]) -> Estimate:
    """The mean acceptance length along answers, of which no draft is kept."""
    tokens, rounds = list[int](), list[int]()
    for answer in answers:
        [drafted] = replay_drafts(drafter, [answer], depth=_DEPTH, on_answer=on_answer).answers
        tokens.append(len(drafted.drafts))
        rounds.append(len(drafted.rounds_at(_DEPTH)))
    return estimate_tau(tokens, rounds)


def _answers(texts: Sequence[Ids]) -> Iterator[Pair]:
    """Of each text the tokens before the answer, and the answer; as lists they take ten times the memory."""
    for text in texts:
        ids = text.tolist()
        yield ids[:CONTEXT], ids[CONTEXT:]
