"""Statistics of the noise field: uniform, and independent across ids, positions, seeds, choices and domains.

All numbers are fixed by the field, so a test at p < 1e-6 passes always or never.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from significance import binomial, chi_squared, contingency, uniformity
from wager.kernels import noise
from wager.verify.accept import NoiseCoins

FAR = 1e-6


def field(*, seed: int = 3, position: int = 0, choice: int = 0, domain: int = 0, depth: int = 0) -> np.ndarray:
    return noise.gumbel(seed, position, vocab=20000, choice=choice, domain=domain, depth=depth)


def independent(one: np.ndarray, other: np.ndarray, cells: int = 16) -> bool:
    """Whether pairs of numbers, uniform in (0, 1), fall into the cells of a square as independent ones do."""
    table = np.histogram2d(one, other, bins=cells, range=((0, 1), (0, 1)))[0]
    return chi_squared(*contingency(table)) > FAR


def uniform(gumbels: np.ndarray) -> np.ndarray:
    return np.exp(-np.exp(-gumbels))


@pytest.mark.parametrize("at", [{}, {"seed": 2**63 + 1}, {"position": 1}, {"position": 10**6}, {"choice": 5}])
def test_numbers_of_a_row_are_gumbel_and_those_of_its_ids_independent(at):
    g = field(**at)
    assert uniformity(uniform(g)) > FAR
    for lag in (1, 2, 3, 64):
        assert independent(uniform(g[:-lag]), uniform(g[lag:]))


@pytest.mark.slow
def test_numbers_of_one_id_over_positions_are_gumbel():
    """The direction a text runs in: one id, many positions and seeds."""
    g = np.array([noise.gumbel(i % 5, i // 5, np.array([4321]))[0] for i in range(1500)])
    assert uniformity(uniform(g)) > FAR


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"position": 1}),
        ({"position": 7}, {"position": 8}),
        ({}, {"seed": 4}),
        ({}, {"seed": 3 + 2**32}),
        ({}, {"choice": 1}),
        ({}, {"domain": 1}),
        ({}, {"domain": 2}),
        ({}, {"domain": 3, "depth": 1}),
        ({"domain": 3, "depth": 1}, {"domain": 3, "depth": 2}),
        ({"domain": 3, "depth": 2, "position": 9}, {"domain": 3, "depth": 1, "position": 9}),
        ({"position": 1}, {"choice": 1}),
    ],
)
def test_rows_that_differ_anywhere_are_independent(one, other):
    assert independent(uniform(field(**one)), uniform(field(**other)))


def test_coins_are_uniform_and_independent_of_each_other():
    """Acceptance coins over positions, and coin i against coin i + 1 and against the residual draw of the round."""
    coins = np.array(
        [
            [*(noise.uniform(9, position, index=i) for i in (0, 1)), noise.uniform(9, position, domain=noise.RESIDUAL)]
            for position in range(6000)
        ]
    )
    assert all(uniformity(column) > FAR for column in coins.T)
    assert all(independent(a, b, 8) for a, b in itertools.combinations(coins.T, 2))
    assert independent(coins[:-1, 0], coins[1:, 0], 8)


@pytest.mark.parametrize("scale", [1.0, 1e-300, 1e300])
def test_noise_coins_flip_and_draw_with_the_given_probabilities(scale):
    weights, drawn, flips, count = np.array([0, 3.0, 0, 1.0, 0]) * scale, [], 0, 4000
    for position in range(count):
        coins = NoiseCoins(17, position, 2)
        flips += coins.flip(0.3)
        drawn.append(coins.draw(weights))
        assert coins.flip(1.0) and not coins.flip(0.0)
    assert set(drawn) == {1, 3}
    assert binomial(flips, count, 0.3) > FAR
    assert binomial(drawn.count(1), count, 0.75) > FAR


def test_two_coins_of_a_round_differ_and_rounds_can_be_replayed():
    one, again, later = (
        [coins.draw(np.ones(10**6)) for _ in range(3)] for coins in map(NoiseCoins, (1, 1, 1), (5, 5, 6))
    )
    assert one == again and len(set(one)) == 3 and later[0] != one[0]
