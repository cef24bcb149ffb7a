"""The token at a position, natively where that is possible; `process(...).choose(...)` is its definition."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from wager.errors import GrammarError
from wager.kernels.row_sampler import RowSampler
from wager.types import SamplingParams
from wager.verify.distribution import allowed_ids, changed_logits, process
from wager.verify.history import History


def choose(
    sampler: RowSampler | None,
    logits: NDArray[np.float32],
    params: SamplingParams,
    history: History | None,
    *,
    seed: int,
    position: int,
    choice: int,
) -> int:
    """The token at `position` from one row of logits, float32 [V]. Arguments and errors as for `process`."""
    token = None
    if sampler is not None:
        with suppress(GrammarError):  # the definition says whether that is the first error
            token = sampler.sample(
                logits,
                params,
                edits=changed_logits(logits, params, history),
                allowed=allowed_ids(len(logits), params, history),
                seed=seed,
                position=position,
                choice=choice,
            )
    return process(logits, params, history).choose(seed, position, choice) if token is None else token
