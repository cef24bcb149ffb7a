"""Threshold decoding: drafting ends at the threshold, for every drafter that scores its guesses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from wager.draft.base import Drafter
from wager.draft.combined import InnerDrafter, MergedDrafter
from wager.draft.model import DraftModel
from wager.draft.ngram import NgramDrafter
from wager.economics.policy.heuristics import Threshold
from wager.kernels.base import TargetOutput
from wager.testing import (
    AdversaryDrafter,
    OracleDrafter,
    RandomTreeDrafter,
    SetAcceptanceDrafter,
    ToyDistribution,
    ToyOracle,
    ToyTarget,
)
from wager.testing.toy import toy_engine
from wager.types import Draft, DraftRequest, PackedBatch, Request, SamplingParams

LAW = ToyDistribution(vocab=32, order=2, sharpness=9.0)
NEAR = replace(LAW, drift=0.3, salt=4)


class _Passes(ToyTarget):
    """Counts what a draft model computes."""

    widths: list[int]

    def forward(self, batch: PackedBatch) -> TargetOutput:
        self.widths = [*getattr(self, "widths", []), batch.rows]
        return super().forward(batch)


def _model(**options: object) -> DraftModel:
    return DraftModel(_Passes(NEAR, num_blocks=80), **options)  # type: ignore[arg-type]


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": NgramDrafter,
    "set": lambda: SetAcceptanceDrafter(LAW.vocab, [0.8, 0.6, 0.4], oracle=ToyOracle(LAW)),
    "oracle": lambda: OracleDrafter(ToyOracle(LAW)),
    "adversary": lambda: AdversaryDrafter(LAW.vocab),
    "random-tree": lambda: RandomTreeDrafter(LAW.vocab, oracle=ToyOracle(LAW)),
    "model": _model,
    "model:tree": lambda: _model(trees=True),
    "staged": lambda: _model(inner=InnerDrafter(NgramDrafter(), vocab=LAW.vocab)),
    "merged": lambda: MergedDrafter([NgramDrafter(), _model(trees=True)], vocab=LAW.vocab),
}


class _Watched(Threshold):
    """Keeps what was drafted and what is verified of it, and the threshold of the step."""

    def __init__(self, depth: int, threshold: float) -> None:
        super().__init__(depth, threshold=threshold)
        self.steps: list[tuple[float, Mapping[str, Draft], Mapping[str, Draft]]] = []

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        admitted = super().admit(drafts, budget)
        self.steps.append((self.threshold, drafts, admitted))
        return admitted


def _run(drafter: Drafter, *, threshold: float, temperature: float) -> _Watched:
    policy = _Watched(8, threshold)
    engine = toy_engine(LAW, drafter=drafter, policy=policy, depth=8, num_blocks=200)
    params = SamplingParams(max_tokens=40, temperature=temperature, ignore_eos=True)
    engine.generate([Request(f"r{i}", (1, 2, 3, 1, 2, 3, i), replace(params, seed=i)) for i in range(6)])
    return policy


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", DRAFTERS)
def test_no_guess_below_the_threshold_is_verified_and_all_before_it_are(name: str, temperature: float) -> None:
    policy = _run(DRAFTERS[name](), threshold=0.4, temperature=temperature)
    ends = 0
    for threshold, drafts, admitted in policy.steps:
        for seq_id, draft in drafts.items():
            assert len(draft.scores) == len(draft)
            unlikely = [node for node, score in enumerate(draft.scores) if score < threshold]
            kept = len(admitted.get(seq_id, ()))
            assert kept == (unlikely[0] if unlikely else len(draft))
            ends += bool(unlikely)
    if name not in ("oracle", "adversary"):  # always sure
        assert ends > 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["model", "model:tree", "staged"])
def test_no_pass_is_made_behind_an_unlikely_guess(name: str, temperature: float) -> None:
    """A chain ends with the first unlikely guess; below an unlikely node of a tree there is none."""
    policy = _run(DRAFTERS[name](), threshold=0.4, temperature=temperature)
    for threshold, drafts, _ in policy.steps:
        for draft in drafts.values():
            above = [draft.scores[parent] for parent in draft.parents if parent >= 0]
            assert all(score >= threshold for score in above)
    assert any(0 < len(draft) < 8 for _, drafts, _ in policy.steps for draft in drafts.values())


@pytest.mark.parametrize("name", ["model", "model:tree"])
def test_a_higher_threshold_makes_fewer_passes(name: str) -> None:
    passes = {}
    for threshold in (0.02, 0.3, 0.9):
        drafter = DRAFTERS[name]()
        text = SamplingParams()
        drafter.begin("s", [1, 2, 3], text)
        drafter.propose([DraftRequest("s", 3, 8, text, 0, min_survival=threshold)])
        target = drafter._target  # type: ignore[attr-defined]
        passes[threshold] = len(target.widths)
    assert passes[0.02] > passes[0.9] >= 1 and passes[0.02] >= passes[0.3] >= passes[0.9]
