"""Tokens sampled natively: of several rows of logits, of one row with everything that a request may ask for, and along
the drafts of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wager.kernels import _native
from wager.kernels.arrays import Array
from wager.kernels.cpu import Kernels
from wager.types import GREEDY_TEMPERATURE, SamplingParams

_NO_IDS, _NO_LOGITS = np.zeros(0, np.int64), np.zeros(0, np.float64)


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


class RowSampler:
    """Samples as `verify.distribution.process` and `choose` define it, in a twentieth of the time. For one thread."""

    def __init__(self, kernels: Kernels) -> None:
        self._native, self._isa = _native.RowSampler(), kernels.isa

    def sample(
        self,
        logits: NDArray[np.float32],
        params: SamplingParams,
        *,
        edits: tuple[NDArray[np.int64], NDArray[np.float64]] | None,
        allowed: NDArray[np.int64] | None,
        seed: int,
        position: int,
        choice: int,
    ) -> int | None:
        """The token at `position` from a row of logits [V]. `edits` are the ids [m], none twice, whose logits the
        request changes, with their new values [m]; `allowed` the ids that its grammar allows, ascending (None: all).

        None where it is left to the definition: a logit is not finite, or a sum is so near to the limit of a filter
        that its rounding would decide.
        """
        row, (ids, values) = np.ascontiguousarray(logits, np.float32), edits or (_NO_IDS, _NO_LOGITS)
        token: int = self._native.sample(
            self._isa,
            row,
            params.temperature,
            seed,
            position,
            choice,
            *params.filters,
            ids,
            values,
            allowed,
            GREEDY_TEMPERATURE,
        )
        return token if token >= 0 else None


def token_matcher(kernels: Kernels) -> _native.TokenMatcher:
    """The rule `match` for a batch of sequences whose tokens are greedy or sampled with temperature and filters."""
    return _native.TokenMatcher(kernels.pool, kernels.isa, GREEDY_TEMPERATURE)
