"""Tokens sampled natively: of a row of logits with everything that a request may ask for, and along the drafts of a
batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wager.kernels import _native
from wager.kernels.cpu import Kernels
from wager.types import GREEDY_TEMPERATURE, Draft, Outcome, SamplingParams, Verdict

_NO_IDS, _NO_LOGITS = np.zeros(0, np.int64), np.zeros(0, np.float64)


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


def token_matcher(kernels: Kernels, *, follows: bool = True) -> _native.TokenMatcher:
    """The rule `match` (csrc/match_bindings.cpp) for a batch of sequences whose tokens are greedy or sampled with
    temperature and filters; without `follows` it leaves all of them to another rule."""
    return _native.TokenMatcher(
        kernels.pool,
        kernels.isa,
        greedy=GREEDY_TEMPERATURE,
        outcome=Outcome,
        verdict=Verdict,
        draft=Draft,
        follows=follows,
    )
