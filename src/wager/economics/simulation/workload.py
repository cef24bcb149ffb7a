"""Worlds without a model: what a drafter would guess at every position of a text, how sure it would be, and how many
of the guesses would be right.

A synthetic world has a published survival curve and texts that differ in how easy they are: from request to request,
from round to round and from token to token. A recorded world replays traces of real answers. Both know the whole truth
in advance, so that every policy meets the same texts. Knows no prices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wager.economics.policy.acceptance import Floats
from wager.economics.survival import conditional
from wager.errors import UsageError

_SAMPLES = 40_000


@dataclass(frozen=True, slots=True)
class Guesses:
    """One drafter on one text. At output position i it would make `made[i]` guesses, the first `right[i]` of them
    right, with survival estimates `scores[i]` (None: it has no confidence). Arrays [positions], [positions, depth]."""

    made: NDArray[np.int16]
    right: NDArray[np.int16]
    scores: NDArray[np.float32] | None


@dataclass(frozen=True, slots=True)
class Text:
    """One request: prompt tokens, answer tokens, and what each drafter would guess along the answer."""

    prompt: int
    output: int
    guesses: Mapping[str, Guesses]


class World(Protocol):
    """Gives texts by number, always the same."""

    def text(self, number: int) -> Text:
        """The text of request `number`."""

    def deepest(self) -> Mapping[str, int]:
        """The drafters and the deepest each guesses."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A synthetic drafter: survival by depth, and standard deviations of log-odds.

    `request`, `round` and `token` say how much texts differ; `blur` is the error of the drafter's confidence (None: it
    has none) and `bias` what it overrates itself by.
    """

    survival: tuple[float, ...]
    request: float = 0.8
    round: float = 2.2
    token: float = 2.2
    blur: float | None = 0.5
    bias: float = 0.0


class Synthetic:
    """Texts drawn from curves. Averaged over texts every drafter's survival is its curve's, at every depth."""

    def __init__(
        self, curves: Mapping[str, Curve], *, prompt: int = 1, output: int = 1024, seed: int = 0, vary: float = 0.0
    ) -> None:
        self._curves = dict(curves)
        self._prompt, self._output, self._seed, self._vary = prompt, output, seed, vary

    def deepest(self) -> Mapping[str, int]:
        return {name: len(curve.survival) for name, curve in self._curves.items()}

    def text(self, number: int) -> Text:
        """Drafters meet the same difficulties; lengths scatter by `vary` (a log-normal's deviation)."""
        draw = np.random.default_rng((self._seed, number))
        prompt, output = (
            max(1, round(length * float(np.exp(self._vary * draw.standard_normal()))))
            for length in (self._prompt, self._output)
        )
        request = draw.standard_normal()
        rounds = draw.standard_normal(output)
        deepest = max(len(curve.survival) for curve in self._curves.values())
        tokens = draw.standard_normal(output + deepest)
        return Text(
            prompt, output, {name: _guess(curve, request, rounds, tokens, draw) for name, curve in self._curves.items()}
        )


def _guess(curve: Curve, request: float, rounds: Floats, tokens: Floats, draw: np.random.Generator) -> Guesses:
    depth, output = len(curve.survival), len(rounds)
    along = np.lib.stride_tricks.sliding_window_view(tokens, depth)[:output]
    odds = _difficulty(curve) + curve.request * request + curve.round * rounds[:, None] + curve.token * along
    wrong = draw.random((output, depth)) >= sigmoid(odds)
    right = np.where(wrong.any(axis=1), wrong.argmax(axis=1), depth)
    scores = None
    if curve.blur is not None:
        felt = odds + curve.bias + curve.blur * draw.standard_normal((output, depth))
        scores = np.cumprod(sigmoid(felt), axis=1).astype(np.float32)
    return Guesses(np.full(output, depth, np.int16), right.astype(np.int16), scores)


def sigmoid(odds: Floats) -> Floats:
    """Chance from log-odds."""
    chance: Floats = 1.0 / (1.0 + np.exp(-odds))
    return chance


@lru_cache(maxsize=32)
def _difficulty(curve: Curve) -> Floats:
    """Log-odds by depth of an average guess, such that survival over all texts is the curve: solved depth by depth,
    over samples weighted by how likely they are to have come that far."""
    draw = np.random.default_rng(1)
    common = curve.request * draw.standard_normal(_SAMPLES) + curve.round * draw.standard_normal(_SAMPLES)
    weight = np.full(_SAMPLES, 1 / _SAMPLES)
    odds = []
    for wanted in conditional(curve.survival):
        here = common + curve.token * draw.standard_normal(_SAMPLES)
        low, high = -12.0, 12.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if float(weight @ sigmoid(middle + here)) < wanted else (low, middle)
        odds.append((low + high) / 2)
        weight = weight * sigmoid(odds[-1] + here)
        weight /= weight.sum()
    return np.array(odds)


# ---- recorded -------------------------------------------------------------------------------------------------------


class Recorded:
    """Texts of a trace, over and over.

    A trace has a JSON row per answer: {"id", "prompt_tokens", "tokens", "drafters": {NAME: {"right": [...], "scores":
    [[...], ...]}}}. For every answer position, `right` counts the guesses that agree with the answer from there on, and
    `scores` (survival of each guess made there) says how many were made; both as deep as the drafter was asked.
    """

    def __init__(self, texts: Sequence[Text]) -> None:
        if not texts:
            raise UsageError("The trace has no answers.", "Record at least one.")
        self._texts = list(texts)

    @classmethod
    def read(cls, path: Path) -> Recorded:
        """Raises UsageError that names the file and the first bad line."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            hint = "Give a JSON-lines file in UTF-8."
            raise UsageError(f"The trace {path} cannot be read: {error}.", hint) from error
        texts = []
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    texts.append(_parse(json.loads(line)))
                except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
                    raise UsageError(f"Line {number} of the trace {path} is not an answer: {error!r}.") from error
        names = {frozenset(text.guesses) for text in texts}
        if len(names) > 1 or frozenset() in names:
            raise UsageError(
                f"The answers of the trace {path} have different drafters, or none.",
                "Record every answer with the same ones.",
            )
        return cls(texts)

    def deepest(self) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for text in self._texts:
            for name, guesses in text.guesses.items():
                found[name] = max(found.get(name, 0), int(guesses.made.max(initial=0)))
        return found

    def text(self, number: int) -> Text:
        return self._texts[number % len(self._texts)]

    def __len__(self) -> int:
        return len(self._texts)


def _parse(row: Mapping[str, Any]) -> Text:
    output = int(row["tokens"])
    if output < 1:
        raise ValueError(f"it has {output} tokens")
    guesses = {}
    for name, trace in row["drafters"].items():
        right = np.array(trace["right"], dtype=np.int16)
        made = np.array([len(scores) for scores in trace["scores"]], dtype=np.int16)
        if len(right) != output or len(made) != output:
            raise ValueError(f"{name} has {len(right)} positions of {output}")
        if (right < 0).any() or (right > made).any():
            raise ValueError(f"{name} is right more often than it guesses")
        scores = np.zeros((output, int(made.max(initial=0))), np.float32)
        for position, values in enumerate(trace["scores"]):
            scores[position, : len(values)] = values
        if not ((scores >= 0) & (scores <= 1)).all():
            raise ValueError(f"{name} has scores outside 0 to 1")
        guesses[str(name)] = Guesses(made, right, scores)
    return Text(max(1, int(row["prompt_tokens"])), output, guesses)
