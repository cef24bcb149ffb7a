"""A static store: what most often followed each context of 1 to 5 tokens in texts that the target wrote, in a file that
is memory-mapped. `build_store` writes one, `StoreFile` reads it, `StoreFile.continuations` is the lookup in Python
(csrc/lookup.h has the same).

    8 bytes  MAGIC
    8 bytes  length of the header, little-endian
    32 bytes SHA-256 of the header
    header   JSON, padded with spaces so that the data begin at a multiple of 64: see StoreHeader
    data     slots of 64 bits, little-endian

A slot holds 36 bits of the hash of a context, 20 bits of a token that followed it and 8 bits of its probability, in
255ths; 0 is a free slot. A context's slots are found from its home on, before the next free one, the likeliest first.
A context whose continuations are those of the context without its first token is left out: the lookup finds that one.

Probabilities are interpolated with those after the context without its first token (Witten and Bell), so that one that
was seen once is not certain: p(w | c) = (count(c w) + a T(c) p(w | c')) / (count(c) + a T(c)), where T(c) is the number
of different tokens that followed c.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wager.draft.vocabulary import sample_difference
from wager.errors import MALFORMED, UsageError
from wager.inputs import replacing, shown
from wager.models.tokenizer import Tokenizer

MOST_CONTINUATIONS = 4
"""Continuations that are kept of one context."""

_SMOOTHING = 4.0  # a; probabilities are then about as often right on held-out answers as they say
_LEAST = 0.04  # probability of a continuation that is kept beside the likeliest
_SIMILAR = 0.05  # difference of probabilities that is not worth a slot of its own
_SECOND = 0.1  # usefulness of a continuation beside the likeliest: only trees verify both

_RUN = 1 << 17  # positions that are counted, and slots that are filled, at a time: what that takes of memory

Ids = NDArray[np.int32]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Slots = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class ContinuationTable:
    """The hashes of `contexts` [n] (context_hash), `tokens` [n] that followed them, with their `probabilities` [n] in
    255ths. `counted` is the number of tokens in the texts."""

    contexts: Slots
    tokens: Ids
    probabilities: NDArray[np.uint8]
    counted: int


@dataclass(frozen=True, slots=True)
class _Level:
    """What followed the contexts of one length, at some positions. Each context has its hash, `last`, a position that
    it stands before, `seen`, how often, and what the lookup finds once useless contexts are left out: `best` and
    `best_p`. Each pair of a context and a follower has its context `of`, `token` and probability `p`. `context_at` and
    `pair_at` of every position, -1 where the text is shorter."""

    hashes: Slots
    last: Ints
    seen: Ints
    best: Ints
    best_p: Floats
    of: Ints
    token: Ints
    p: Floats
    context_at: Ints
    pair_at: Ints


def count_continuations(
    answers: Iterable[tuple[Sequence[int], Sequence[int]]], *, vocab: int, longest: int, most: int | None = None
) -> ContinuationTable:
    """The continuations worth keeping, at most `most` of them (None: any number), of contexts of 1 to `longest` tokens.

    `answers` are prompts and answers in token ids; see build_store for them and the errors. Contexts that end with
    different tokens have nothing in common but the empty one, so they are counted one part after another.
    """
    flat, counted = _joined(answers, vocab=vocab, longest=longest)
    often, before = np.zeros(vocab, np.int64), np.zeros(vocab, np.int64)
    for first in range(0, len(flat), _RUN):
        at = first + np.flatnonzero(counted[first : first + _RUN])
        last = flat[at - 1]
        often += np.bincount(flat[at], minlength=vocab)
        before += np.bincount(last[last >= 0], minlength=vocab)
    kept: list[list[tuple[Slots, Ids, NDArray[np.uint8], Floats]]] = [[] for _ in range(longest)]
    last = flat[:-1]
    ends = np.unique(np.searchsorted(np.cumsum(before), np.arange(_RUN, before.sum(), _RUN)) + 1)
    for low, high in pairwise([0, *ends.tolist(), vocab]):
        at = 1 + np.flatnonzero(counted[1:] & (last >= low) & (last < high))
        followers = flat[at]
        level = _no_context(often, followers)
        for size in range(1, longest + 1):
            lower, level = level, _longer(level, flat[at - size], followers, vocab=vocab)
            pairs, usefulness, changed = _useful(level, lower)
            probabilities = np.clip(np.rint(level.p[pairs] * 255), 1, 255).astype(np.uint8)
            contexts, tokens = level.hashes[level.of[pairs]], level.token[pairs].astype(np.int32)
            kept[size - 1].append((contexts, tokens, probabilities, usefulness[: None if most else 0]))
            level = changed
    columns = zip(*(part for parts in kept for part in parts), strict=True)
    contexts, tokens, probabilities, usefulness = map(np.concatenate, columns)
    if most is not None and len(tokens) > most:
        least = np.partition(usefulness, -most)[-most]
        chosen = usefulness > least
        chosen[np.flatnonzero(usefulness == least)[: most - np.count_nonzero(chosen)]] = True  # of equals the first
        contexts, tokens, probabilities = contexts[chosen], tokens[chosen], probabilities[chosen]
    return ContinuationTable(contexts, tokens, probabilities, int(often.sum()))


def _joined(
    answers: Iterable[tuple[Sequence[int], Sequence[int]]], *, vocab: int, longest: int
) -> tuple[Ids, NDArray[np.bool_]]:
    """All texts, `longest` times -1 before each, and which of the tokens are of an answer."""
    texts, counted = [np.empty(0, np.int32)], [np.empty(0, np.bool_)]
    for number, (prompt, answer) in enumerate(answers):
        text = np.concatenate([np.asarray(part, np.int64) for part in (prompt[-longest:], answer)])
        if len(text) and (text.min() < 0 or text.max() >= vocab):
            raise UsageError(
                f"Answer {number} has a token id outside 0 to {vocab - 1}.", "Give the ids of the target's tokenizer."
            )
        texts.append(np.pad(text.astype(np.int32), (longest, 0), constant_values=-1))
        counted.append(np.arange(longest + len(text)) >= longest + len(text) - len(answer))
    every = np.concatenate(counted)
    if not every.any():
        raise UsageError("There are no answers to build a store from.", "Generate some first.")
    return np.concatenate(texts), every


def _no_context(often: Ints, followers: Ids) -> _Level:
    """The level of the empty context, which every token followed so `often`, at the positions of `followers`."""
    tokens, seen = np.arange(len(often)), often.sum()
    return _Level(
        hashes=np.zeros(1, np.uint64),
        last=np.zeros(1, np.int64),
        seen=np.array([seen]),
        best=np.array([-1]),
        best_p=np.zeros(1),
        of=np.zeros_like(tokens),
        token=tokens,
        p=often / seen,
        context_at=np.zeros(len(followers), np.int64),
        pair_at=followers.astype(np.int64),
    )


def _longer(lower: _Level, first: Ids, followers: Ids, *, vocab: int) -> _Level:
    """The level of contexts with one more token, `first`, before those of `lower`."""
    there = np.flatnonzero((first >= 0) & (lower.context_at >= 0))
    _, last, at = np.unique(lower.context_at[there] * vocab + first[there], return_index=True, return_inverse=True)
    keys, example, pair, counts = np.unique(
        at * vocab + followers[there], return_index=True, return_inverse=True, return_counts=True
    )
    of, token = keys // vocab, keys % vocab
    seen, different = np.bincount(at), np.bincount(of)
    pull = _SMOOTHING * different[of]
    p = (counts + pull * lower.p[lower.pair_at[there[example]]]) / (seen[of] + pull)
    context_at, pair_at = np.full(len(first), -1), np.full(len(first), -1)
    context_at[there], pair_at[there] = at, pair
    order = np.lexsort((-p, of))
    likeliest = order[np.searchsorted(of[order], np.arange(len(seen)))]
    hashes = _mix_all(lower.hashes[lower.context_at[there[last]]] + first[there[last]].astype(np.uint64) + np.uint64(1))
    return _Level(hashes, there[last], seen, token[likeliest], p[likeliest], of, token, p, context_at, pair_at)


def _useful(level: _Level, lower: _Level) -> tuple[Ints, Floats, _Level]:
    """The pairs worth keeping, how useful each is, and the level with what the lookup then finds."""
    below = lower.context_at[level.last]
    same = level.best == lower.best[below]
    gain = np.where(same, np.abs(level.best_p - lower.best_p[below]), level.best_p)
    keep = ~same | (gain > _SIMILAR)
    order = np.lexsort((level.token, -level.p, level.of))
    starts = np.searchsorted(level.of[order], np.arange(len(level.seen)))
    rank = np.arange(len(order)) - starts[level.of[order]]
    first = rank == 0
    wanted = keep[level.of[order]] & (first | ((rank < MOST_CONTINUATIONS) & (level.p[order] >= _LEAST)))
    pairs = order[wanted]
    of = level.of[pairs]
    usefulness = level.seen[of] * np.where(first[wanted], gain[of], _SECOND * level.p[pairs])
    best = np.where(keep, level.best, lower.best[below])
    best_p = np.where(keep, level.best_p, lower.best_p[below])
    return pairs, usefulness, replace(level, best=best, best_p=best_p)


MAGIC = b"WAGERST1"
FORMAT = 1
LONGEST = 5
"""Tokens of the longest context; the lookup in C++ has the same."""
LARGEST_VOCABULARY = 1 << 20

_PREFIX, _ALIGNMENT, _LONGEST_HEADER = 48, 64, 1 << 20
_LOAD = 0.8  # of the homes that are taken
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class StoreHeader:
    """What a file says of itself. `vocab` is the number of token ids, `tokenizer` the digest of the vocabulary
    (vocabulary_digest), `homes` the size of the hash table, `tokens` how many tokens were counted. `provenance`: where
    the texts came from, as the builder was told. `sample`: the tokens that the digest was made of, so that a difference
    can be named; files of earlier versions have none."""

    vocab: int
    tokenizer: str
    homes: int
    entries: int
    tokens: int
    slots: int
    sha256: str
    provenance: Mapping[str, Any]
    format: int = FORMAT
    longest: int = LONGEST
    sample: Sequence[str] = ()


class Continuation(NamedTuple):
    """A token that followed a context, and its probability in 255ths."""

    token: int
    probability: int


def build_store(
    answers: Iterable[tuple[Sequence[int], Sequence[int]]],
    path: Path,
    *,
    vocab: int,
    tokenizer: str,
    sample: Sequence[str] = (),
    provenance: Mapping[str, Any] | None = None,
    max_bytes: int | None = None,
    mode: int | None = None,
) -> StoreHeader:
    """Count what the target wrote, and write a store.

    `answers` are pairs of a prompt's token ids and those of its answer: the answer's tokens are counted, the prompt's
    last ones are only context. `vocab` is the target's number of token ids, `tokenizer` its vocabulary_digest and
    `sample` its vocabulary_sample. At most `max_bytes` of the most useful continuations are kept (None: all). The file
    is written under another name and renamed; `mode`: who may read it, if not everybody. UsageError if there is nothing
    to count or an id is outside the vocabulary.
    """
    if not 0 < vocab <= LARGEST_VOCABULARY:
        raise UsageError(f"A store cannot hold {vocab} token ids.", f"It holds at most {LARGEST_VOCABULARY}.")
    most = None if max_bytes is None else max(1, int(max_bytes / 8 * _LOAD))
    table = count_continuations(answers, vocab=vocab, longest=LONGEST, most=most)
    slots, homes = _hash_table(table)
    data = slots.astype("<u8", copy=False).data
    header = StoreHeader(
        vocab=vocab,
        tokenizer=tokenizer,
        homes=homes,
        entries=len(table.tokens),
        tokens=table.counted,
        slots=len(slots),
        sha256=hashlib.sha256(data).hexdigest(),
        provenance=dict(provenance or {}),
        sample=list(sample),
    )
    _write(path, header, data, mode)
    return header


def context_hash(tokens: Sequence[int]) -> int:
    """The hash of a context: of its last token, then of the one before it, ..."""
    value = 0
    for token in reversed(tokens):
        value = _mix(value + token + 1 & _MASK)
    return value


def _mix(value: int) -> int:
    """splitmix64."""
    value = value + 0x9E3779B97F4A7C15 & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def _mix_all(values: Slots) -> Slots:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def _hash_table(table: ContinuationTable) -> tuple[Slots, int]:
    """The slots, and how many of them are homes: the last contexts may lie beyond, before a slot that stays free."""
    homes = max(1, int(len(table.contexts) / _LOAD))
    slots, free = np.zeros(homes + 1, np.uint64), 0
    for first in range(0, homes, _RUN):
        least, most = (-(-(home << 32) // homes) << 32 for home in (first, min(first + _RUN, homes)))
        rows = np.flatnonzero((table.contexts >= np.uint64(least)) & (table.contexts <= np.uint64(most - 1)))
        if not len(rows):
            continue
        hashes, tokens, probabilities = table.contexts[rows], table.tokens[rows], table.probabilities[rows]
        home = (hashes >> np.uint64(32)) * np.uint64(homes) >> np.uint64(32)
        check = hashes << np.uint64(28)
        order = np.lexsort((tokens, -probabilities.astype(np.int64), check, home))
        index = np.arange(len(order))
        place = np.maximum(np.maximum.accumulate(home[order].astype(np.int64) - index), free) + index
        free = int(place[-1]) + 1
        if free >= len(slots):
            slots.resize(free + 1, refcheck=False)
        values = check | tokens.astype(np.uint64) << np.uint64(8) | probabilities.astype(np.uint64)
        slots[place] = values[order]
    return slots, homes


def _write(path: Path, header: StoreHeader, data: memoryview, mode: int | None) -> None:
    text = json.dumps(asdict(header)).encode()
    text += b" " * (-(_PREFIX + len(text)) % _ALIGNMENT)
    try:
        with replacing(path, mode=mode) as file:
            file.write(MAGIC + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text)
            file.write(data)
    except OSError as error:
        raise UsageError(f"The store {path} cannot be written: {error.strerror}.", "Name another file.") from error


def read_store_header(path: Path) -> StoreHeader:
    """What a store says of itself, unchecked beyond its header. UsageError as for StoreFile."""
    data, size = _mapped(path)
    return _header(path, data, size)[0]


class StoreFile:
    """An open store, memory-mapped read-only and checked against its SHA-256. UsageError, which names the file, if it
    is none, is damaged, or was built for other token ids than those of `tokenizer` (a vocabulary_digest); it names one
    if `vocabulary` is given and the file has a sample."""

    def __init__(self, path: Path, *, vocab: int, tokenizer: str, vocabulary: Tokenizer | None = None) -> None:
        self.path = path
        data, size = _mapped(path)
        self.header, offset = _header(path, data, size)
        header = self.header
        if header.tokenizer != tokenizer:
            found = sample_difference(vocabulary, header.sample, header.vocab) if vocabulary and header.sample else ""
            digests = (
                f"a vocabulary of {header.vocab} token ids with the digest {shown(header.tokenizer[:12])}; the model's "
                f"has {vocab} and {shown(tokenizer[:12])}"
            )
            target = header.provenance.get("target")
            raise UsageError(
                f"The store {path} was built for another tokenizer{f', that of {target}' if target else ''}: "
                f"{found or digests}.",
                "Build one from this model's answers: wager train --kind store.",
            )
        self.slots: Slots = np.frombuffer(data, "<u8", header.slots, offset)
        if hashlib.sha256(self.slots.data).hexdigest() != header.sha256 or self.slots[-1] != 0:
            raise _damaged(path, "its data do not have the digest that its header states")

    def continuations(self, text: Sequence[int]) -> tuple[int, list[Continuation]]:
        """The number of tokens of the longest known context that `text` ends with, and its continuations, the likeliest
        first; (0, []) if none is known."""
        for size in range(min(LONGEST, len(text)), 0, -1):
            if found := self.of_context(text[len(text) - size :]):
                return size, found
        return 0, []

    def of_context(self, context: Sequence[int]) -> list[Continuation]:
        """The continuations of this very context, the likeliest first; none if it is not known."""
        value = context_hash(context)
        at, found = (value >> 32) * self.header.homes >> 32, []
        while slot := int(self.slots[at]):
            if slot >> 28 == value & (1 << 36) - 1:
                found.append(Continuation(slot >> 8 & 0xFFFFF, slot & 0xFF))
            at += 1
        return found


def _mapped(path: Path) -> tuple[mmap.mmap | bytes, int]:
    """A file and its size. UsageError if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return (mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""), size
    except OSError as error:
        raise UsageError(f"The store {path} cannot be read: {error.strerror}.", _HINT) from error


def _header(path: Path, data: mmap.mmap | bytes, size: int) -> tuple[StoreHeader, int]:
    """The header, checked, and where the data begin."""
    length = int.from_bytes(data[8:16], "little")
    if data[:8] != MAGIC or length > _LONGEST_HEADER:
        raise UsageError(f"{path} is no store of wager: it does not begin as one.", _HINT)
    text = bytes(data[_PREFIX : _PREFIX + length])
    if hashlib.sha256(text).digest() != bytes(data[16:_PREFIX]):
        raise _damaged(path, "its header does not have the digest stated before it")
    try:
        values = json.loads(text)
        if values.get("format") != FORMAT or values.get("longest") != LONGEST:
            raise UsageError(
                f"The store {path} has format {values.get('format')!r} with contexts of "
                f"{values.get('longest')!r} tokens; this wager reads format {FORMAT} with {LONGEST}.",
                "Build it again: wager train --kind store.",
            )
        header = _checked(StoreHeader(**values))
        end = _PREFIX + length + 8 * header.slots
    except MALFORMED as error:
        raise _damaged(path, "its header is not as this wager writes it") from error
    if size != end or not 0 < header.homes < header.slots:
        raise _damaged(path, f"it has {size} bytes instead of {end}")
    return header, _PREFIX + length


def _checked(header: StoreHeader) -> StoreHeader:
    """TypeError unless the fields have their types."""
    numbers = header.vocab, header.homes, header.entries, header.tokens, header.slots
    texts = header.tokenizer, header.sha256, *header.sample
    if not all(type(number) is int for number in numbers) or not all(isinstance(text, str) for text in texts):
        raise TypeError("a number or a text is of another type")
    if not isinstance(header.provenance, Mapping):
        raise TypeError("the provenance is no object")
    return header


def _damaged(path: Path, cause: str) -> UsageError:
    return UsageError(f"The store {path} is damaged: {cause}.", "Build it again: wager train --kind store.")


_HINT = "Give a file that wager train --kind store wrote."
