"""The distribution of texts of the production engine, under the distribution-exact rules.

Enumeration proves the formulas; this tests how the engine applies them: noise, indices, blocks, processors, successive
rounds (verification rules, section 6). G-tests at level 1e-4; a failure is tried once more with other seeds. Noise that
is used twice must be noticed with the same counts.
"""

from __future__ import annotations

from dataclasses import replace

import counting
import numpy as np
import pytest
from counting import (
    BIASED,
    COOL,
    CUT,
    GUESSER,
    ROOMY,
    TIGHT,
    TOKENS,
    WARM,
    FixedDrafter,
    MergedModelDrafter,
    ModelDrafter,
    SamplingDrafter,
    V,
    p_value,
    sample,
    tree_model,
)

from wager.engine import runner
from wager.kernels.noise import DRAFT, gumbel
from wager.verify.accept import NoiseCoins

LEVEL = 1e-4

CASES = [  # rule, drafter, its widths, parameters, and rooms
    ("rejection", ModelDrafter, (1, 1, 1), WARM, ROOMY),
    ("rejection", ModelDrafter, (1, 1), BIASED, ROOMY),
    ("rejection", SamplingDrafter, (2, 2), CUT, ROOMY),
    ("rejection", SamplingDrafter, (3, 1), COOL, ROOMY),
    ("rejection", FixedDrafter, (1, 1, 1), CUT, ROOMY),
    ("rejection", FixedDrafter, (3, 1), WARM, ROOMY),
    ("block", ModelDrafter, (1, 1, 1), WARM, ROOMY),
    ("block", SamplingDrafter, (1, 1, 1, 1), CUT, ROOMY),
    ("block", SamplingDrafter, (1,), COOL, ROOMY),
    ("block", FixedDrafter, (1, 1, 1), WARM, ROOMY),
    ("traversal", ModelDrafter, (1, 1, 1), WARM, ROOMY),
    ("traversal", SamplingDrafter, (2, 2), CUT, ROOMY),
    ("traversal", FixedDrafter, (3, 1), COOL, ROOMY),
    ("rejection", ModelDrafter, (1, 1, 1), WARM, TIGHT),
    ("block", ModelDrafter, (1, 1, 1), WARM, TIGHT),
    *(
        (rule, kind, (2, 2), params, rooms)
        for kind in (tree_model, MergedModelDrafter)
        for rule, params, rooms in (("rejection", CUT, ROOMY), ("rejection", WARM, TIGHT), ("traversal", WARM, ROOMY))
    ),
]


def follows(drafter, rule, params, rooms=ROOMY) -> bool:
    """Whether texts follow the target's distribution, for one of two seeds."""

    def p(base: int) -> float:
        got = sample(drafter, params, rule=rule, base=base, rooms=rooms)
        assert got.accepted > 0.1 * TOKENS
        assert (got.preemptions > 10) == (rooms is TIGHT)
        return p_value(got, params)

    return any(p(base) > LEVEL for base in (1, 2))


@pytest.mark.parametrize(("rule", "kind", "widths", "params", "rooms"), CASES)
def test_texts_follow_the_targets_distribution(rule, kind, widths, params, rooms):
    assert follows(kind(widths), rule, params, rooms)


@pytest.mark.parametrize("rows", [V - 1, V + 5])
@pytest.mark.parametrize("rule", ["traversal", "rejection"])
def test_texts_do_so_with_draft_models_of_fewer_or_more_rows(rule, rows):
    """The last id is biased against, so that sequences without it are long enough to be drafted for."""
    params = replace(WARM, logit_bias={V - 1: -3.0, 2: 1.0})
    drafter = ModelDrafter((2, 2), law=replace(GUESSER, vocab=rows), trees=True)
    assert follows(drafter, rule, params)


class OneStream(NoiseCoins):
    """The residual drawn with the noise that the guess was drawn with: the two are then correlated."""

    def draw(self, weights):
        seed, position, choice = self._key
        ids = np.flatnonzero(weights)
        noise = gumbel(seed, position, ids, choice=choice, domain=DRAFT, depth=1)
        return int(ids[(np.log(weights[ids]) + noise).argmax()])


class OneCoin(NoiseCoins):
    def flip(self, probability):
        self._flips = 0
        return super().flip(probability)


@pytest.mark.slow
@pytest.mark.parametrize("coins", [OneStream, OneCoin])
def test_noise_that_is_used_twice_is_noticed(monkeypatch, coins):
    monkeypatch.setattr(runner.accept, "NoiseCoins", coins)
    monkeypatch.setattr(counting, "TOKENS", max(TOKENS, 24_000))
    assert not follows(SamplingDrafter((1, 1, 1)), "rejection", WARM)
