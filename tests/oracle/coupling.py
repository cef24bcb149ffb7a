"""How likely candidates are under a request's noise: draft/coupling.py in numpy, the reference of csrc/coupling.h."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from wager.draft.coupling import NOISE, SETTLED, SHARPNESS, UNSEEN
from wager.kernels.noise import gumbel
from wager.types import DraftRequest


def coupled_guesses(masses: Mapping[int, float], request: DraftRequest, ahead: int) -> dict[int, float]:
    """The probability of each token that is given a mass to be the target's, `ahead` guesses after the first."""
    if not masses:
        return {}
    temperature, ids = request.params.temperature, np.array(list(masses))
    g = gumbel(request.seed, request.position + ahead, ids, choice=request.choice)
    odds = (np.array(list(masses.values())) + UNSEEN) ** SHARPNESS * np.exp(NOISE * temperature * g)
    shares = odds / (odds.sum() + math.exp(SHARPNESS * (temperature**2 - SETTLED)))
    return dict(zip(ids.tolist(), shares.tolist(), strict=True))
