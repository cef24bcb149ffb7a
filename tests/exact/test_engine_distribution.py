"""The distribution of texts of the production engine, under the distribution-exact rules.

Enumeration proves the formulas; this tests how the engine applies them: noise, indices, blocks, processors, successive
rounds (verification rules, section 6). G-tests at level 1e-4; a failure is tried once more with other seeds. Noise that
is used twice must be noticed with the same counts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from counting import (
    BIASED,
    COOL,
    CUT,
    GUESSER,
    LENGTH,
    ROOMY,
    TIGHT,
    TOKENS,
    WARM,
    BackedModelDrafter,
    FixedDrafter,
    MergedModelDrafter,
    ModelDrafter,
    SamplingDrafter,
    V,
    joints,
    outcomes,
    rounds_apart,
    sample,
    tree_model,
    windows,
)

from wager.engine import runner
from wager.kernels.noise import DRAFT, gumbel
from wager.types import SamplingParams
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


def worst(rule, kind, widths, params, rooms=ROOMY, *, base: int = 1, tokens: int = TOKENS) -> float:
    """The smallest p-value of all tests of one cell, for as many tests as there are (Bonferroni)."""
    got = sample(kind(widths), params, rule=rule, base=base, rooms=rooms, tokens=tokens)
    assert got.accepted > 0.2 * tokens
    assert (got.preemptions > 10) == (rooms is TIGHT)
    p_values = [windows(got, params)]
    if rooms is ROOMY and tokens == TOKENS:  # a tight cache cuts drafts short at varying depths
        p_values.append(rounds_apart(got))
    if rooms is ROOMY and (rule == "rejection" or len(widths) == 1):  # block reads more than one depth
        p_values += [outcomes(got, depth, joints(kind, params, width)) for depth, width in enumerate(widths)]
    return min(1.0, min(p_values) * len(p_values))


@pytest.mark.parametrize(("case", "tokens"), [(CASES[0], TOKENS // 6), *((case, TOKENS) for case in CASES)])
def test_texts_follow_the_targets_distribution(case, tokens):
    assert any(worst(*case, base=base, tokens=tokens) > LEVEL for base in (1, 2))


def padded(rows, trees):
    """How to make a draft model of `rows` logits for the target's V."""
    return lambda widths: ModelDrafter(widths, law=replace(GUESSER, vocab=rows), trees=trees)


RARE = SamplingParams(max_tokens=LENGTH, temperature=1.0, logit_bias={V - 1: -3.0, 2: 1.0})
"""Texts in which the last id is rare, so that those without it are long enough to be drafted for."""
TREES = (tree_model, MergedModelDrafter, BackedModelDrafter)
WHERE = (("rejection", CUT, ROOMY), ("rejection", WARM, TIGHT), ("traversal", WARM, ROOMY))
IN_PRODUCTION = [
    *((kind, (2, 2), *where) for kind in TREES for where in WHERE),
    *((padded(n, False), (1, 1, 1), rule, RARE, ROOMY) for n in (V - 1, V + 5) for rule in ("rejection", "block")),
    *((padded(n, True), (2, 2), rule, RARE, ROOMY) for n in (V - 1, V + 5) for rule in ("rejection", "traversal")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "widths", "rule", "params", "rooms"), IN_PRODUCTION)
def test_texts_of_drafters_of_production_follow_the_targets_distribution(kind, widths, rule, params, rooms):
    """Trees whose shape is the drafter's own, and draft models without all of the target's ids: windows of tokens are
    all that is compared."""

    def p_value(base):
        got = sample(kind(widths), params, rule=rule, base=base, rooms=rooms)
        assert got.accepted > (0.1 if params is RARE else 0.2) * TOKENS
        assert (got.preemptions > 10) == (rooms is TIGHT)
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
