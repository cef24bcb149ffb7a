"""Token recycling: what the table holds, the trees that it makes, and that native and Python tables agree."""

from __future__ import annotations

import numpy as np
import pytest

from oracle.successors import PythonSuccessors
from wager.draft.base import LogitsRows
from wager.draft.combined import MergedDrafter
from wager.draft.ngram import NgramDrafter
from wager.draft.recycling import PRIOR, RecyclingDrafter, successor_table
from wager.kernels.base import TargetOutput
from wager.testing import ToyDistribution
from wager.testing.toy import toy_engine
from wager.types import DraftRequest, Request, SamplingParams

VOCAB = 100
LAW = ToyDistribution(vocab=48, order=2, sharpness=6.0, eos=3, eos_bias=-1.0)


def test_rows_of_another_shape_are_refused() -> None:
    table = successor_table(VOCAB)
    for shape in ((1, VOCAB), (2, VOCAB + 1)):
        with pytest.raises(ValueError, match="one row of logits"):
            table.update([1, 2], np.zeros(shape, np.float32))


def test_both_tables_make_the_same_trees() -> None:
    native, plain, rng = successor_table(VOCAB), PythonSuccessors(VOCAB), np.random.default_rng(0)
    for _ in range(150):
        tokens = rng.integers(0, 20, size=rng.integers(1, 5)).tolist()
        logits = rng.integers(0, 40, size=(len(tokens), VOCAB)).astype(np.float32)  # with many equal ones
        logits[rng.random(logits.shape) < 0.01] = np.nan
        for table in (native, plain):
            table.update(tokens, logits)
        for last, most in ((int(rng.integers(0, 20)), 15), (int(rng.integers(0, VOCAB)), 40)):
            for request in (None, DraftRequest("s", 9, most, SamplingParams(temperature=0.8), 3)):
                *found, scores = native.draft(last, most, request)
                *expected, likely = plain.draft(last, most, request)
                assert [list(part) for part in found] == [list(part) for part in expected]
                assert list(scores) == pytest.approx(list(likely), rel=1e-9)


def test_rows_of_a_sequence_that_did_not_begin_here_teach_no_tenant() -> None:
    """As of one for which the drafter was left out, or for which a draft model has not asked it yet."""
    drafter, logits = RecyclingDrafter(VOCAB), np.arange(3 * VOCAB, dtype=np.float32).reshape(3, VOCAB)
    drafter.begin("mine", [1], SamplingParams())
    rows = [LogitsRows("mine", 0, (1,)), LogitsRows("another's", 1, (2,)), LogitsRows("mine", 2, (3,))]
    drafter.read_rows(TargetOutput(logits, np.zeros(3, np.int32)), rows)
    for last, known in ((1, True), (2, False), (3, True)):
        drafter.accept("mine", [last])
        [draft] = drafter.propose([DraftRequest("mine", 2, 8, SamplingParams(), 0)])
        assert (len(draft) > 0) == known


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_engine_shows_it_every_row_and_writes_the_same_text(temperature: float) -> None:
    """Rejected guesses are rows too, so it comes to know tokens that no text has; also when it drafts with others."""
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=5, ignore_eos=True)
    requests = [Request(f"r{at}", (1 + at, 2, 5), params) for at in range(6)]
    plain = [answer.token_ids for answer in toy_engine(LAW).generate(requests)]
    alone, other = RecyclingDrafter(LAW.vocab), RecyclingDrafter(LAW.vocab)
    alone.begin("s", [1, 2], SamplingParams())
    [draft] = alone.propose([DraftRequest("s", 2, 8, SamplingParams(), 0)])
    assert len(draft) == 0, "no rows yet"
    alone.end("s")
    for drafter in (alone, MergedDrafter([NgramDrafter(), other], vocab=LAW.vocab)):
        engine = toy_engine(LAW, drafter=drafter, depth=8, num_blocks=24, max_rows=40)
        answers = engine.generate(requests)
        assert [answer.token_ids for answer in answers] == plain
        assert sum(answer.stats.accepted for answer in answers) > 20
        engine.check()
    for drafter in (alone, other):
        drafter.begin("s", [2], SamplingParams())
        [draft] = drafter.propose([DraftRequest("s", 1, len(PRIOR), SamplingParams(), 0)])
        assert len(draft) >= 4 and not draft.is_chain
