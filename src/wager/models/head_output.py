"""The end of a head: its last norm, its output matrix, and its logits by the target's ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from wager.kernels.arrays import FLOAT32, INT32, Array, empty
from wager.kernels.base import Tape, TargetOutput
from wager.models.head_vocabulary import HeadVocabulary
from wager.models.head_weights import HeadWeights
from wager.models.transformer import Decoder
from wager.models.weights import Weights

if TYPE_CHECKING:
    from wager.models.head_eagle import EagleHead

TREE_ROWS = 16
"""Rows of logits that a head gives at least in one go: as many as a level of a tree may have."""

_NEVER = np.float32(-1e30)
"""The logit of an id that the head cannot guess: finite, and of probability 0 whatever is done to logits."""


class TargetLogits:
    """Rows of a head's logits by the target's ids, `rows` at most."""

    def __init__(self, vocabulary: HeadVocabulary, rows: int) -> None:
        self._ids = None if vocabulary.whole else vocabulary.ids
        self._whole = np.empty((0, 0), np.float32)
        if self._ids is not None:
            self._whole = np.full((rows, vocabulary.size), _NEVER, np.float32)

    def take(self, logits: Array, greedy: Array, fed: Array | None = None) -> TargetOutput:
        """logits f32 [n, ids] and the greedy id of each row, -1 where a logit is not finite; valid until the next."""
        if self._ids is None:
            return TargetOutput(logits, greedy, fed)
        rows = len(logits)
        self._whole[:rows, self._ids] = logits
        greedy = np.where(greedy < 0, np.int32(-1), self._ids[greedy].astype(np.int32))
        return TargetOutput(self._whole[:rows], greedy, fed)


def output_matrix(weights: HeadWeights, vocabulary: HeadVocabulary, decoder: Decoder, target: Weights) -> Any:
    """The target's output matrix, or those of its rows that a head guesses."""
    if vocabulary.whole:
        return decoder.head
    name = "embed.weight" if target.spec.tied else "head.weight"
    return weights.pack_values(target.read(name, weights.form.kernels.act)[vocabulary.ids])


class HeadOutput:
    """Records norm, output matrix and argmax over `states` f32 [max_logits_rows, hidden]."""

    def __init__(
        self, head: EagleHead, weights: HeadWeights, tape: Tape, states: Array, *, decoder: Decoder, target: Weights
    ) -> None:
        spec, rows = head.spec, len(states)
        vocabulary, act = spec.vocabulary, weights.form.kernels.act
        self._target = TargetLogits(vocabulary, rows)
        self._normed = empty(rows, states.shape[1], dtype=act)
        self._fed = self._normed if spec.norm_output else states
        self._logits, self._greedy = empty(rows, len(vocabulary.ids)), empty(rows, dtype=INT32)
        tape.rms_norm(states, weights.vector("norm.weight"), spec.decoder.details.norm_eps, self._normed, of="logits")
        if spec.own_output:
            matrix = weights.pack(["lm_head.weight"])
        else:
            matrix = output_matrix(weights, vocabulary, decoder, target)
        tape.linear(self._normed, matrix, self._logits, of="logits")
        tape.argmax(self._logits, self._greedy)

    def take(self, rows: int) -> TargetOutput:
        """What a pass of so many rows of logits gave."""
        fed = self._fed[:rows].astype(FLOAT32, copy=False)
        return self._target.take(self._logits[:rows], self._greedy[:rows], fed)
