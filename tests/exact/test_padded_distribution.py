"""Draft models with more or fewer rows than the target: texts follow the target's p under every rule.

q is what the production draft model states of its guesses, over the target's ids: every outcome of a round is
enumerated with it, and texts of the engine are counted against p.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from counting import GUESSER, LENGTH, TOKENS, ModelDrafter, V, sample, windows
from worlds import EXACT, Context, World, chains, deviation, distinct, emitted, trees

from wager.draft.model import DraftModel
from wager.testing import ToyDistribution, ToyTarget
from wager.types import DraftRequest, SamplingParams
from wager.verify.accept import block, rejection, traversal

LEVEL = 1e-4
SIZE = 4
"""The target's ids."""

WARM = SamplingParams(temperature=1.0)
CUT = SamplingParams(temperature=1.3, top_k=3, top_p=0.8)


@dataclass
class Padded(World):
    """q of a draft model of `rows` logits, for a target of `vocab`; none behind an id that it has no row for."""

    rows_of_draft: int = SIZE
    params: SamplingParams = WARM

    def __post_init__(self) -> None:
        law = ToyDistribution(vocab=self.rows_of_draft, sharpness=4.0, salt=self.seed)
        self._drafter = DraftModel(ToyTarget(law), vocab=self.vocab)

    def q(self, context: Context) -> np.ndarray:
        if ("q", context) not in self.cache:
            known = [0, *context]
            self._drafter.begin("s", known, self.params)
            (draft,) = self._drafter.propose([DraftRequest("s", len(known), 1, self.params, 7, needs_draft_probs=True)])
            stated = np.zeros(self.vocab) if draft.draft_probs is None else draft.draft_probs[0]
            self.cache["q", context] = stated
        return self.cache["q", context]


@pytest.mark.parametrize("rows", [SIZE - 2, SIZE - 1, SIZE + 1, SIZE + 9])
@pytest.mark.parametrize("params", [WARM, CUT])
def test_every_outcome_of_a_round(rows: int, params: SamplingParams) -> None:
    for seed in range(3):
        world = Padded(SIZE, seed, rows_of_draft=rows, params=params)
        stated = world.q(())
        assert stated.sum() == pytest.approx(1, abs=EXACT) and not stated[rows:].any()
        for drafts, rules in (
            (list(chains(world, 2)), (rejection, block, traversal)),
            (list(trees(world, (2, 2), distinct)), (rejection, traversal)),
        ):
            for rule in rules:
                out, accepted = emitted(world, rule, drafts)
                assert accepted > 0.1 and deviation(world, out, 3) < EXACT


def test_behind_an_id_without_a_row_nothing_is_guessed() -> None:
    world = Padded(SIZE, 0, rows_of_draft=SIZE - 1)
    assert world.q((1, 2)).any() and not world.q((SIZE - 1,)).any() and not world.q((1, SIZE - 1, 0)).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "in_trees"), [("rejection", False), ("block", False), ("traversal", True), ("rejection", True)]
)
@pytest.mark.parametrize("rows", [V - 1, V + 5])
def test_texts_of_the_engine_follow_the_targets_distribution(rule: str, in_trees: bool, rows: int) -> None:
    """The last id is biased against, so that sequences without it are long enough to be drafted for."""
    params = SamplingParams(max_tokens=LENGTH, temperature=1.0, logit_bias={V - 1: -3.0, 2: 1.0})

    def p_value(base: int) -> float:
        drafter = ModelDrafter((2, 2) if in_trees else (1, 1, 1), law=replace(GUESSER, vocab=rows), trees=in_trees)
        got = sample(drafter, params, rule=rule, base=base)
        assert got.accepted > 0.1 * TOKENS
        return windows(got, params)

    assert any(p_value(base) > LEVEL for base in (1, 2))
