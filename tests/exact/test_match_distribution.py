"""The distribution of `match`: exact by enumeration of the coupled field, and by counting draws of the real field.

Verification rules, sections 1.2 to 1.4. Enumeration uses the closed form of the joint distribution of the target's
token and the drafter's guess; counting uses the numbers that production draws from.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from worlds import EXACT, KINDS, World, deviation, fixed, trees

from wager.draft.coupling import NOISE, SHARPNESS, UNSEEN
from wager.draft.lookup import SAMPLED_WEIGHTS, LookupDrafter, LookupSources
from wager.types import Draft, DraftRequest, SamplingParams
from wager.verify.accept import match
from wager.verify.distribution import process

PARAMS = SamplingParams(temperature=1.0)


# ---- closed forms (Gumbel coupling of p and q) ----------------------------------------------------------------------


def agreement(p: np.ndarray, q: np.ndarray) -> float:
    """P(argmax log p + g == argmax log q + g) = sum_x 1 / sum_y max(p_y / p_x, q_y / q_x)."""
    both = [x for x in range(len(p)) if p[x] > 0 and q[x] > 0]
    return float(sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in both))


def joint(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """[V, V]: P(target's token = x, drafter's guess = y) when both use the same noise field."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(q > 0, p / q, np.where(p > 0, np.inf, 0.0))
    probs = np.zeros((len(p), len(p)))
    for x, y in itertools.product(range(len(p)), repeat=2):
        if x == y and p[x] > 0 and q[x] > 0:
            probs[x, x] = 1 / np.maximum(p / p[x], q / q[x]).sum()
        elif p[x] > 0 and q[y] > 0 and ratio[y] < ratio[x]:
            probs[x, y] = p[x] * q[y] * _integral(p, q, ratio, ratio[y], ratio[x])
    return probs


def _integral(p: np.ndarray, q: np.ndarray, ratio: np.ndarray, low: float, high: float) -> float:
    """Integral of dl / D(l)^2 with D(l) = sum_z max(p_z, l q_z), piecewise linear between the ratios."""

    def d(at: float) -> float:
        return float(np.maximum(p, at * q).sum())

    ends = [low, *sorted({r for r in ratio.tolist() if low < r < high}), high]
    total = 0.0
    for u, v in itertools.pairwise(ends):
        total += 1 / d(u) if np.isinf(v) else (v - u) / (d(u) * d(v))  # D grows like l where q sums to one
    return total


# ---- every outcome --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "depth"), [(3, 3), (4, 2)])
def test_chains_keep_the_distribution_and_accept_as_the_closed_form(kind, vocab, depth):
    """Once a guess has missed, nothing behind it is read: targets and guesses there are filled with zeros."""
    for seed in range(6):
        world, out, expected, accepted = World(vocab, seed, kind), {}, 0.0, 0.0

        def judge(mass, guesses, targets, out=out):
            verdict = match(Draft.chain("s", guesses, drafter=""), targets)
            out[verdict.tokens] = out.get(verdict.tokens, 0.0) + mass
            return mass * len(verdict.accepted)

        right = [(1.0, ())]  # paths whose guesses were all right
        for step in range(depth):
            longer, rest = [], [0] * (depth - step - 1)
            for mass, path in right:
                probs = mass * joint(world.p(path), world.q(path))
                longer += [(probs[x, x], (*path, x)) for x in range(vocab)]
                for target, guess in itertools.permutations(range(vocab), 2):
                    accepted += judge(probs[target, guess], (*path, guess, *rest), [*path, target, 0, *rest])
            right = longer
            expected += sum(mass for mass, _ in right)
        for mass, path in right:
            for bonus, weight in enumerate(world.p(path)):
                accepted += judge(mass * weight, path, [*path, bonus])
        assert sum(out.values()) == pytest.approx(1, abs=EXACT)
        assert deviation(world, out, depth + 1) < EXACT
        assert accepted == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("widths", [(2, 2), (3, 2), (2, 2, 1)])
def test_deterministic_trees_keep_the_distribution_and_accept_the_sum_of_p(kind, widths):
    """Targets at the nodes are independent draws of p; guesses without noise are a fixed tree."""
    world = World(3, 3, kind)
    [(_, draft)] = trees(world, widths, fixed)
    p, out, first = world.rows(draft), {}, 0.0
    todo = [(1.0, {}, -1)]  # mass, the targets of the rows that were read, the node reached
    while todo:
        mass, known, node = todo.pop()
        for token in range(world.vocab):
            weight, targets = mass * p[1 + node, token], {**known, 1 + node: token}
            verdict = match(draft, [targets.get(row, -1) for row in range(1 + len(draft))])
            if len(verdict.tokens) > len(targets):  # the guess is right: its row is read next
                todo.append((weight, targets, verdict.accepted[-1]))
            else:
                out[verdict.tokens] = out.get(verdict.tokens, 0.0) + weight
                first += weight * bool(verdict.accepted)
    assert deviation(world, out, len(widths) + 1) < EXACT
    roots = [x for x, parent in zip(draft.tokens, draft.parents, strict=True) if parent < 0]
    assert first == pytest.approx(world.p(())[roots].sum(), abs=EXACT)


# ---- the field of production ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "zeros", "point_q"])
def test_the_production_field_has_the_joint_distribution(kind):
    """Target and guess as production draws them, over many positions, seeds and choices: chi-square on the pairs."""
    world = World(4, 1, kind)
    with np.errstate(divide="ignore"):
        logits = [np.maximum(np.log(probs), -1e4).astype(np.float32) for probs in (world.p(()), world.q(()))]
    p, q = (process(each, PARAMS) for each in logits)
    count, probs = 6000, joint(world.p(()), world.q(()))
    seen = np.zeros((4, 4))
    for i in range(count):
        at = i % 7, i // 7, i % 3
        seen[p.choose(*at), q.choose(*at)] += 1
    assert seen[probs < 1e-12].sum() == 0
    cells = probs * count >= 5
    statistic = ((seen - probs * count)[cells] ** 2 / (probs * count)[cells]).sum()
    assert statistic < cells.sum() + 6 * np.sqrt(2 * cells.sum())
    assert abs(np.trace(seen) / count - agreement(world.p(()), world.q(()))) < 4 * np.sqrt(0.25 / count)


@pytest.mark.parametrize(("temperature", "count"), [(0.5, 300), (0.5, 800), (1.0, 3000)])
def test_a_lookup_follows_the_noise_and_is_right_as_often_as_its_counts_agree_with_the_target(temperature, count):
    """Acceptance has the closed form of p and q ~ m^(a / (b T)); counts that are wrong only lower it."""
    p = process(
        np.log(np.array([0.02, 0.5, 0.25, 0.13, 0.1])).astype(np.float32), SamplingParams(temperature=temperature)
    )
    rates = []
    for often in ((8, 4, 2), (2, 4, 8)):  # that 1, 2 and 3 followed 0; 4 never did
        drafter = LookupDrafter("suffix", LookupSources(1))
        text = [each for token, times in enumerate(often, 1) for each in [0, token] * times]
        drafter.begin("s", [*text, 0], SamplingParams())
        masses = np.array([0, *(SAMPLED_WEIGHTS[0] * times / len(often) + UNSEEN for times in often), 0])
        q = masses ** (SHARPNESS / (NOISE * temperature))
        right = 0
        for seed in range(count):
            params = SamplingParams(temperature=temperature)
            [draft] = drafter.propose([DraftRequest("s", len(text) + 1, 1, params, seed, choice=2)])
            target = p.choose(seed, len(text) + 1, 2)
            verdict = match(draft, [target, 0])
            assert verdict.tokens[0] == target
            right += len(verdict.accepted)
        rates.append(right / count)
        assert rates[-1] == pytest.approx(agreement(p.probabilities(5), q / q.sum()), abs=4 * np.sqrt(0.25 / count))
    assert rates[0] > rates[1] + 0.2


@pytest.mark.slow
def test_tree_children_are_gumbel_top_b_and_are_accepted_more_often():
    """Top-b of log q + g with the shared field contains the target's token more often than one guess does."""
    rng, count, caught = np.random.default_rng(3), 1000, np.zeros(3)
    z = rng.normal(0, 2, 60)
    p, q = (process(row.astype(np.float32), PARAMS) for row in (z, z + rng.normal(0, 1, 60)))
    for position in range(count):
        target, ranked = p.choose(5, position), q.top(3, 5, position)
        assert ranked[0] == q.choose(5, position)
        caught += [target in ranked[:b] for b in (1, 2, 3)]
    one = agreement(p.probabilities(60), q.probabilities(60))
    assert caught[0] / count == pytest.approx(one, abs=4 * np.sqrt(0.25 / count))
    assert caught[1] / count > one + 0.05 and caught[2] > caught[1]
