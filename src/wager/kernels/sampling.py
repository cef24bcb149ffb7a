"""Tokens sampled natively for several rows of logits: the arguments of `Kernels.sample`, packed from small values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wager.kernels.arrays import Array
from wager.kernels.cpu import Kernels


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One token to sample: argmax(z / temperature + g) over a row of logits, greedy at temperature <= 1e-4.

    g is the noise of (seed, position, choice), see kernels/noise.py: `seed` unsigned 64 bits, `position` the absolute
    position of the token, `choice` the index of the sequence among the n of its request.
    """

    row: int
    temperature: float
    seed: int
    position: int
    choice: int = 0


def sample_rows(kernels: Kernels, logits: Array, requests: Sequence[SampleRequest]) -> list[int]:
    """The token of each request, -1 where its row has a logit that is not finite. `logits` float32 [L, vocabulary]."""
    if not requests:
        return []
    chosen: list[int] = kernels.sample(
        logits,
        np.array([r.row for r in requests], np.int32),
        np.array([r.temperature for r in requests], np.float64),
        np.array([r.seed for r in requests], np.uint64).view(np.int64),
        np.array([r.position for r in requests], np.int32),
        np.array([r.choice for r in requests], np.int32),
    ).tolist()
    return chosen
