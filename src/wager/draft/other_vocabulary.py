"""Guesses of a model with another vocabulary (Timor et al. 2025, arXiv 2502.05202).

**Token-level intersection** (`tli`): q is restricted to the tokens of the same bytes, and its ids are the target's,
so the noise is that of the target's ids and every acceptance rule takes it as any q. Known tokens that the other
vocabulary lacks are spelled in it.

**String-level exact match** (`slem`): what the model writes is encoded by the target's tokenizer. The guesses are
deterministic: the model drafts greedily, since noise of the target's ids means nothing to its own. Both ways the last
tokens before the boundary are encoded again, as what follows may merge with them. The draft model keeps what its own
tokens still begin with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from wager.draft.base import Drafter
from wager.draft.guessing import GuessSampler
from wager.draft.model import DraftModel, draft_model
from wager.draft.registry import DrafterParts
from wager.drafter_spec import DrafterSpec
from wager.errors import TokenizerError, UsageError
from wager.kernels.base import TargetOutput
from wager.models.tokenizer import Tokenizer
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams

_ABSENT = -1e4
"""The logit of a token that the model does not have: finite, and its exponential is 0."""

_LEAST_SHARE = 0.05
"""Share of the target's tokens that a draft model must have."""


class SharedIds:
    """The tokens that two vocabularies have in common: `verified` and `draft` ids, [n] each, ascending by the first.

    Ordinary tokens are the same if their bytes are, special ones if they are written alike, and those that end a text
    by that. Raises TokenizerError if hardly any token is shared.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        self._target, self._draft = target, draft
        known = {_key(draft, token): token for token in reversed(range(draft.vocab_size))}  # the lowest of equal ones
        pairs = {
            token: known[key]
            for token in range(target.vocab_size)
            if (key := _key(target, token)) in known and (isinstance(key, str) or key)
        }
        if draft.eos_ids:
            for token in target.eos_ids:
                pairs.setdefault(token, min(draft.eos_ids))
        if len(pairs) < _LEAST_SHARE * target.vocab_size:
            raise TokenizerError(
                f"The draft model's vocabulary has {len(pairs)} of the target's {target.vocab_size} tokens.",
                "Draft by text (--drafter slem:PATH), which needs no token in common.",
            )
        self.verified = np.array(sorted(pairs), np.int64)
        self.draft = np.array([pairs[token] for token in sorted(pairs)], np.int64)
        self._own = pairs
        self._verified = {own: token for token, own in reversed(pairs.items())}
        self._spelled: dict[int, list[int]] = {}

    def own_id(self, token: int) -> int:
        """The draft model's id of a target's token; -1 if it has none."""
        return self._own.get(token, -1)

    def verified_id(self, own: int) -> int:
        """The target's id of a draft model's token that is shared."""
        return self._verified[own]

    def own(self, token: int) -> list[int]:
        """A known token of the target in the draft model's ids: itself, or its text encoded, or its bytes."""
        own = self._own.get(token)
        if own is not None:
            return [own]
        if token not in self._spelled:
            self._spelled[token] = spell(self._draft, self._target.token_bytes(token))
        return self._spelled[token]


def spell(vocabulary: Tokenizer, text: bytes) -> list[int]:
    """Text encoded, and bytes that are no whole characters one by one, as far as there are such tokens."""
    ids: list[int] = []
    while text:
        try:
            return ids + vocabulary.encode(text.decode(), special=False)
        except UnicodeDecodeError as error:
            if error.start:
                ids += vocabulary.encode(text[: error.start].decode(), special=False)
            single = {vocabulary.token_bytes(token): token for token in reversed(range(vocabulary.vocab_size))}
            broken = text[error.start : error.end]
            ids += [single[byte] for byte in (broken[i : i + 1] for i in range(len(broken))) if byte in single]
            text = text[error.end :]
    return ids


def _key(vocabulary: Tokenizer, token: int) -> str | bytes:
    return vocabulary.token(token) if vocabulary.is_special(token) else vocabulary.token_bytes(token)


class IntersectionSampler(GuessSampler):
    """Guesses by the logits of a model that shares some tokens with the verified one."""

    def __init__(self, width: int, *, vocab: int, shared: SharedIds) -> None:
        super().__init__(width, vocab=vocab)
        self._whole = False  # the model's own greedy token may be one that is not shared
        self._shared = shared
        inside = (shared.verified < vocab) & (shared.draft < width)
        self._targets, self._sources = shared.verified[inside], shared.draft[inside]

    def row(self, output: TargetOutput, index: int) -> NDArray[np.float32]:
        logits = output.logits[index]
        row = np.full(self.vocab, _ABSENT, np.float32)
        # one logit that is not finite spoils the row, shared or not
        row[self._targets] = logits[self._sources] if np.isfinite(logits).all() else np.nan
        return row

    def known_ids(self, tokens: Sequence[int]) -> list[int]:
        return [own for token in tokens for own in self._shared.own(token)]

    def verified_ids(self, tokens: Sequence[int]) -> Sequence[int]:
        return [self._shared.verified_id(token) for token in tokens]

    def own_id(self, token: int) -> int:
        return self._shared.own_id(token)


_LOOKBACK = 10
"""Known tokens before the boundary that are encoded again."""

_GREEDY = SamplingParams(ignore_eos=True)


@dataclass(slots=True)
class _RoutedSequence:
    """A sequence in the target's ids, and in the draft model's as far as it was `told`. `seams` are places, as (tokens
    of the target, tokens of the draft model), up to which both have the same text."""

    known: list[int]
    tenant: str
    told: list[int] = field(default_factory=list)
    seams: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])


class TextRouteDrafter(Drafter):
    """Drafts with `model`, which has the vocabulary `other`, for a target with the vocabulary `target`."""

    name = "slem"
    default_depth = 4
    max_depth = 8

    def __init__(self, model: DraftModel, target: Tokenizer, other: Tokenizer) -> None:
        self.num_alternatives, self.on_pass = 0, lambda: True
        self._model, self._target, self._other = model, target, other
        self._sequences: dict[str, _RoutedSequence] = {}

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        self.end(seq_id)
        self._sequences[seq_id] = _RoutedSequence(list(tokens), tenant)

    def fork(self, seq_id: str, new_id: str, tokens: Sequence[int], params: SamplingParams) -> None:
        """See DraftModel."""
        source = self._sequences[seq_id]
        self.begin(new_id, [*source.known, *tokens], params, tenant=source.tenant)

    def alternatives(self, seq_id: str) -> Sequence[Sequence[int]]:
        """None."""
        return ()

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        self._sequences[seq_id].known += tokens

    def end(self, seq_id: str) -> None:
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None and sequence.told:
            self._model.end(seq_id)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One chain per request."""
        asked = []
        for request in requests:
            told = self._tell(request.seq_id)
            if told and request.depth > 0:  # one more than is wanted: the last one may not be whole
                depth = request.depth + 1
                ask = DraftRequest(request.seq_id, told, depth, _GREEDY, 0, min_survival=request.min_survival)
                asked.append(ask)
        drafts = {draft.seq_id: draft for draft in self._model.propose(asked)}
        return [self._translate(request, drafts.get(request.seq_id)) for request in requests]

    # ---- known text, into the draft model's ids ---------------------------------------------------------------------

    def _tell(self, seq_id: str) -> int:
        """Bring the draft model to the known text; its number of tokens."""
        sequence = self._sequences[seq_id]
        known, told = sequence.known, sequence.told
        while len(sequence.seams) > 1 and not self._is_seam(known, sequence.seams[-1][0]):
            sequence.seams.pop()
        first, kept = sequence.seams[-1]
        now = told[:kept] + self._encode(known[first:])
        sequence.seams.append((len(known), len(now)))
        same = next(
            (i for i, (old, new) in enumerate(zip(told, now, strict=False)) if old != new), min(len(told), len(now))
        )
        if not told or not same:
            if told:
                self._model.end(seq_id)
            if now:
                self._model.begin(seq_id, now, _GREEDY, tenant=sequence.tenant)
        else:
            if same < len(told):
                self._model.rewind(seq_id, same)
            if same < len(now):
                self._model.accept(seq_id, now[same:])
        sequence.told = now
        return len(now)

    def _is_seam(self, known: Sequence[int], place: int) -> bool:
        """Whether the text up to there is encoded as it would be in the whole: a word begins, far enough back."""
        if place > len(known) - _LOOKBACK:
            return False
        return self._target.is_special(known[place]) or self._target.token_bytes(known[place])[:1].isspace()

    def _encode(self, tokens: Sequence[int]) -> list[int]:
        """Tokens of the target in the draft model's ids: text between special tokens is encoded, and those are taken by
        what they are, an end by an end, others by their spelling if it has such."""
        ids: list[int] = []
        text = b""
        for token in tokens:
            if not self._target.is_special(token):
                text += self._target.token_bytes(token)
                continue
            ids, text = ids + (spell(self._other, text) if text else []), b""
            ids += self._special(token)
        return ids + (spell(self._other, text) if text else [])

    def _special(self, token: int) -> list[int]:
        spelling = self._target.token(token)
        found = self._other.encode(spelling, special=False)
        if len(found) == 1 and self._other.is_special(found[0]):
            return found
        return [min(self._other.eos_ids)] if token in self._target.eos_ids and self._other.eos_ids else []

    # ---- guesses, into the target's ids -----------------------------------------------------------------------------

    def _translate(self, request: DraftRequest, draft: Draft | None) -> Draft:
        """The target's tokens of the text that was drafted, each with the score of the token in which it ends."""
        own: list[int] = list(draft.tokens) if draft is not None else []
        ends = next((i for i, token in enumerate(own) if token in self._other.eos_ids), None)
        own = own[:ends] if ends is not None else own
        pieces = [b"" if self._other.is_special(token) else self._other.token_bytes(token) for token in own]
        text = b"".join(pieces)
        guesses = self._guesses(self._sequences[request.seq_id].known, text) if text else []
        scores = draft.scores if draft is not None else ()
        reached = list(accumulate(map(len, pieces)))
        survival: list[float] = []
        done = 0
        for token in guesses:
            done += len(self._target.token_bytes(token))
            survival.append(next((s for s, end in zip(scores, reached, strict=False) if end >= done), 0.0))
        if ends is None:
            guesses = guesses[:-1] if len(guesses) > 1 else guesses  # the text may go on within the last one
        elif self._target.eos_ids:
            guesses, survival = [*guesses, min(self._target.eos_ids)], [*survival[: len(guesses)], scores[ends]]
        size = min(request.depth, len(guesses))
        return Draft.chain(request.seq_id, guesses[:size], drafter=self.name, scores=survival[:size])

    def _guesses(self, known: Sequence[int], text: bytes) -> list[int]:
        """The text as tokens that follow the known ones: those of both together, where a token begins between them."""
        first = max(0, len(known) - _LOOKBACK)
        special = [place for place in range(first, len(known)) if self._target.is_special(known[place])]
        first = special[-1] + 1 if special else first
        pieces = [self._target.token_bytes(token) for token in known[first:]]
        while pieces and b"\x80" <= pieces[0][:1] < b"\xc0":  # within a character
            pieces.pop(0)
        before = b"".join(pieces)
        both = _whole_characters(before + text)
        size = len(both) - len(before)
        if size <= 0:
            return []
        whole = self._target.encode(both.decode(), special=False)
        behind = list(accumulate(len(self._target.token_bytes(token)) for token in reversed(whole)))
        if size in behind:
            return whole[len(whole) - behind.index(size) - 1 :]
        return spell(self._target, _whole_characters(text))


def _whole_characters(text: bytes) -> bytes:
    """Without an incomplete last character, or anything from the first byte on that is not UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start]
    return text


def build(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    model, vocabularies = parts.model, parts.vocabularies
    if spec.name == "slem":
        drafter = draft_model(spec, replace(parts, vocab=model.vocab if model else 0))
        if vocabularies is None:
            raise UsageError(f"Drafter {str(spec)!r} was given no tokenizers.", "Pass both as parts.")
        return TextRouteDrafter(drafter, *vocabularies)
    if vocabularies is None or model is None:
        return draft_model(spec, parts)
    sampler = IntersectionSampler(model.vocab, vocab=parts.vocab, shared=SharedIds(*vocabularies))
    return draft_model(spec, parts, sampler=sampler)
