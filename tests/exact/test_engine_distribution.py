"""The distribution of texts of the production engine, under the distribution-exact rules.

Enumeration proves the formulas; this tests how the engine applies them: noise, indices, blocks, processors, successive
rounds (verification rules, section 6). G-tests at level 1e-4; a failure is tried once more with other seeds. Noise that
is used twice must be noticed with the same counts.
"""

from __future__ import annotations

import numpy as np
import pytest
from counting import (
    BIASED,
    COOL,
    CUT,
    ROOMY,
    TIGHT,
    TOKENS,
    WARM,
    BackedModelDrafter,
    FixedDrafter,
    MergedModelDrafter,
    ModelDrafter,
    SamplingDrafter,
    joints,
    outcomes,
    rounds_apart,
    sample,
    tree_model,
    windows,
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
]


def worst(rule, kind, widths, params, rooms=ROOMY, *, base: int = 1) -> float:
    """The smallest p-value of all tests of one cell, for as many tests as there are (Bonferroni)."""
    got = sample(kind(widths), params, rule=rule, base=base, rooms=rooms)
    assert got.accepted > 0.2 * TOKENS
    assert (got.preemptions > 10) == (rooms is TIGHT)
    p_values = [windows(got, params)]
    if rooms is ROOMY:  # a tight cache cuts drafts short at varying depths
        p_values.append(rounds_apart(got))
    if rooms is ROOMY and (rule == "rejection" or len(widths) == 1):  # block reads more than one depth
        p_values += [outcomes(got, depth, joints(kind, params, width)) for depth, width in enumerate(widths)]
    return min(1.0, min(p_values) * len(p_values))


@pytest.mark.parametrize("case", CASES)
def test_texts_follow_the_targets_distribution(case):
    assert any(worst(*case, base=base) > LEVEL for base in (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [tree_model, MergedModelDrafter, BackedModelDrafter])
@pytest.mark.parametrize(
    ("rule", "params", "rooms"),
    [
        ("rejection", CUT, ROOMY),
        ("rejection", WARM, TIGHT),
        ("traversal", WARM, ROOMY),
    ],
)
def test_texts_of_trees_in_production_follow_the_targets_distribution(kind, rule, params, rooms):
    """Their shape is the drafter's own, so windows of tokens are all that is compared."""

    def p_value(base):
        got = sample(kind((2, 2)), params, rule=rule, base=base, rooms=rooms)
        assert got.accepted > 0.2 * TOKENS and (got.preemptions > 10) == (rooms is TIGHT)
        return windows(got, params)

    assert any(p_value(base) > LEVEL for base in (1, 2))


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
    assert worst("rejection", SamplingDrafter, (1, 1, 1), WARM) < LEVEL
