"""What a run trains on, as plain values: the target, texts as token ids, batches of them, and the draft vocabulary.

Batches are a pure function of the texts, the seed and the pass, so that a run can be resumed at any step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wager.errors import UsageError
from wager.inputs import shown
from wager.models.opening import target_fingerprint, tokenizer_fingerprint
from wager.models.tokenizer import Tokenizer
from wager.models.weights import Weights

_HELD_OUT = 40
"""One text in this many is held out, by its digest."""

_WINDOW = 32
"""Batches of texts that are sorted by length together, so that little is padding."""


@dataclass(frozen=True, slots=True)
class TrainingText:
    """Token ids of a text: a prompt of `prompt_length` tokens, and an answer, which may be empty."""

    ids: tuple[int, ...]
    prompt_length: int

    @property
    def answered(self) -> bool:
        return len(self.ids) > self.prompt_length

    @property
    def digest(self) -> str:
        """SHA-256 of the ids, in hex."""
        return hashlib.sha256(np.asarray([self.prompt_length, *self.ids], "<u4").tobytes()).hexdigest()

    @property
    def held_out(self) -> bool:
        """Whether it is kept for evaluation: as its prompt's digest says, whatever the answer."""
        prompt = np.asarray(self.ids[: self.prompt_length], "<u4").tobytes()
        return int.from_bytes(hashlib.sha256(prompt).digest()[:4], "little") % _HELD_OUT == 0


@dataclass(frozen=True)
class TextWeights:
    """The weight of the distribution after each token: 1 in answers, `prompt` in prompts, 0 in the beginning that all
    texts share and where the next token is not in the draft vocabulary (`known` bool [V])."""

    known: NDArray[np.bool_]
    prompt: float
    shared: int

    def of(self, text: TrainingText, length: int) -> NDArray[np.float32]:
        """float32 [length] of the first `length` tokens."""
        found = np.zeros(length, np.float32)
        following = np.asarray(text.ids[1 : length + 1], np.int64)
        counted = np.where(np.arange(1, len(following) + 1) < text.prompt_length, self.prompt, 1.0)
        found[: len(following)] = counted * self.known[following]
        found[: max(self.shared - 1, 0)] = 0
        return found


@dataclass(frozen=True)
class TrainingData:
    """Texts to train on and those held out, in the order they were read, without repetitions. `longest` crops them."""

    texts: tuple[TrainingText, ...]
    longest: int
    train: tuple[TrainingText, ...] = field(init=False)
    held_out: tuple[TrainingText, ...] = field(init=False)
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        unique = list(dict.fromkeys(text for text in self.texts if len(text.ids) > 2))
        parts: tuple[list[TrainingText], list[TrainingText]] = ([], [])
        for text in unique:
            parts[text.held_out].append(text)
        train, held_out = map(tuple, parts)
        if not train:
            raise UsageError("There are no texts to train on.", "Give more prompts or answers.")
        object.__setattr__(self, "train", train)
        object.__setattr__(self, "held_out", held_out)
        digests = "".join(text.digest for text in unique)
        object.__setattr__(self, "digest", hashlib.sha256(digests.encode()).hexdigest())

    @property
    def shared_beginning(self) -> int:
        """Tokens with which every text begins: the template's."""
        first = self.train[0].ids
        if len(self.train) == 1:
            return 0
        length = min(len(text.ids) for text in self.train)
        return next((at for at in range(length) if any(text.ids[at] != first[at] for text in self.train)), length)

    @property
    def tokens(self) -> int:
        """Tokens of one pass, as cropped."""
        return sum(min(len(text.ids), self.longest) for text in self.train)

    def batches(self, *, tokens: int, seed: int, number: int) -> list[list[TrainingText]]:
        """The batches of pass `number`: at most `tokens` each with padding (a longer text is alone), texts of like
        length, in random order."""
        generator = np.random.default_rng([seed, number])
        order = [self.train[place] for place in generator.permutation(len(self.train))]
        average = max(1, self.tokens // len(order))
        window = max(1, _WINDOW * tokens // average)
        found: list[list[TrainingText]] = []
        for first in range(0, len(order), window):
            group: list[TrainingText] = []
            for text in sorted(order[first : first + window], key=lambda text: len(text.ids)):
                if group and (len(group) + 1) * min(len(text.ids), self.longest) > tokens:
                    found.append(group)
                    group = []
                group.append(text)
            found.append(group)
        return [found[place] for place in generator.permutation(len(found))]

    def padded(
        self, texts: Sequence[TrainingText], weights: TextWeights
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens int64 and weights float32 [B, T], padded on the right with token 0 and weight 0."""
        longest = min(self.longest, max(len(text.ids) for text in texts))
        tokens = np.zeros((len(texts), longest), np.int64)
        counted = np.zeros((len(texts), longest), np.float32)
        for row, text in enumerate(texts):
            length = min(len(text.ids), longest)
            tokens[row, :length] = text.ids[:length]
            counted[row, :length] = weights.of(text, length)
        return tokens, counted


@dataclass(frozen=True)
class HeldOutAcceptance:
    """Rounds over held-out texts: `survival[j]` is the share of them whose first j + 1 guesses are accepted; empty
    where there is no round."""

    survival: tuple[float, ...]
    rounds: int
    texts: int

    @classmethod
    def of(cls, accepted: Sequence[int], *, depth: int, texts: int) -> HeldOutAcceptance:
        """From the number of guesses accepted in each round."""
        counts = np.asarray(accepted)
        survival = tuple(float((counts > step).mean()) for step in range(depth if accepted else 0))
        return cls(survival, len(counts), texts)

    @property
    def tau(self) -> float | None:
        """Tokens per round, the bonus token included; None where there is no round."""
        return 1 + sum(self.survival) if self.rounds else None

    def as_dict(self) -> dict[str, float | int | list[float] | None]:
        return {"survival": list(self.survival), "tau": self.tau, "rounds": self.rounds, "texts": self.texts}


def check_disjoint(texts: Iterable[str], measured: Iterable[str], *, where: str) -> None:
    """UsageError if a prompt to train on is one of the prompts that are measured, letter case and blanks aside."""
    known = {" ".join(text.lower().split()) for text in measured}
    for text in texts:
        if " ".join(text.lower().split()) in known:
            raise UsageError(
                f"The prompt {shown(text)} is in {where} too.", "Train on other prompts than those that are measured."
            )


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """`ids` int64 [Vd], ascending: draft token j is the target's token ids[j], of `size` in all."""

    ids: NDArray[np.int64]
    size: int

    @classmethod
    def of(
        cls, texts: Iterable[Sequence[int]], *, size: int, most: int | None, always: Iterable[int] = ()
    ) -> DraftVocabulary:
        """The `most` most frequent ids of the texts (None: all of the target's `size`), equals by id; `always` among
        them whatever their frequency."""
        if most is None or most >= size:
            return cls(np.arange(size, dtype=np.int64), size)
        counts = np.zeros(size, np.int64)
        for text in texts:
            np.add.at(counts, np.asarray(text, np.int64), 1)
        kept = set(always)
        if most < max(1, len(kept)):
            raise UsageError(f"A draft vocabulary of {most} tokens is too small.", f"Take {max(1, len(kept))} or more.")
        for token in np.argsort(-counts, kind="stable").tolist():
            if len(kept) >= most:
                break
            kept.add(token)
        return cls(np.array(sorted(kept), np.int64), size)

    @property
    def whole(self) -> bool:
        """Whether every token of the target can be guessed."""
        return len(self.ids) == self.size

    def offsets(self) -> NDArray[np.int64]:
        """d2t as the format has it: target id minus draft id."""
        return np.asarray(self.ids - np.arange(len(self.ids)))

    def known(self) -> NDArray[np.bool_]:
        """t2d: bool [size], whether the target's token can be guessed."""
        found = np.zeros(self.size, bool)
        found[self.ids] = True
        return found


@dataclass(frozen=True)
class TrainingTarget:
    """A target by the name it was given by, with its tokenizer."""

    name: str
    path: Path
    weights: Weights
    tokenizer: Tokenizer

    @cached_property
    def fingerprint(self) -> str:
        return target_fingerprint(self.weights)

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        return tokenizer_fingerprint(self.tokenizer)


@dataclass(frozen=True)
class Provenance:
    """Where the weights come from: the target's name and fingerprint, its tokenizer's, the data's digest and size, the
    command, `figures` of the run: tokens, seconds, held-out acceptance, and whether they were `rounded` meanwhile."""

    target: str
    target_fingerprint: str
    tokenizer_fingerprint: str
    data_digest: str
    texts: int
    command: str
    figures: dict[str, Any] = field(default_factory=dict)
    rounded: bool = False
