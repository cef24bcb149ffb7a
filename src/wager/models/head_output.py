"""The end of a head: its last norm, its output matrix, and its logits by the target's ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from wager.kernels.arrays import FLOAT32, INT32, Array, empty
from wager.kernels.base import Tape, TargetOutput
from wager.models.head_weights import HeadWeights
from wager.models.transformer import Decoder
from wager.models.weights import Weights

if TYPE_CHECKING:
    from wager.models.head_eagle import EagleHead

_NEVER = np.float32(-1e30)
"""The logit of an id that the head cannot guess: finite, and of probability 0 whatever is done to logits."""


class HeadOutput:
    """Records norm, output matrix and argmax over `states` f32 [max_logits_rows, hidden]."""

    def __init__(
        self, head: EagleHead, weights: HeadWeights, tape: Tape, states: Array, *, decoder: Decoder, target: Weights
    ) -> None:
        spec, rows = head.spec, len(states)
        vocabulary, act = spec.vocabulary, weights.form.kernels.act
        self._states, self._ids = states, None if vocabulary.whole else vocabulary.ids
        self._normed = empty(rows, states.shape[1], dtype=act)
        self._fed = self._normed if spec.norm_output else states
        self._logits, self._greedy = empty(rows, len(vocabulary.ids)), empty(rows, dtype=INT32)
        self._whole = self._logits
        if self._ids is not None:
            self._whole = np.full((rows, vocabulary.size), _NEVER, np.float32)
        tape.rms_norm(states, weights.vector("norm.weight"), spec.decoder.details.norm_eps, self._normed, of="logits")
        if spec.own_output:
            matrix = weights.pack(["lm_head.weight"])
        elif self._ids is None:
            matrix = decoder.head
        else:  # those rows of the target's output matrix
            name = "embed.weight" if target.spec.tied else "head.weight"
            matrix = weights.pack_values(target.read(name, act)[self._ids])
        tape.linear(self._normed, matrix, self._logits, of="logits")
        tape.argmax(self._logits, self._greedy)

    def take(self, rows: int) -> TargetOutput:
        """What a pass of so many rows of logits gave."""
        greedy, fed = self._greedy[:rows], self._fed[:rows].astype(FLOAT32, copy=False)
        if self._ids is not None:
            self._whole[:rows, self._ids] = self._logits[:rows]
            greedy = np.where(greedy < 0, np.int32(-1), self._ids[greedy].astype(np.int32))
        return TargetOutput(self._whole[:rows], greedy, fed)
