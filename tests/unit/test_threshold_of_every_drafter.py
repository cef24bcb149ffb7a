"""Threshold decoding stops at its threshold with every drafter of the registry: nothing behind an unlikely guess is
verified, and what takes a pass for each guess makes no further one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from every_drafter import EVERY, every_drafter

import wager
from wager.draft.heads.autoregressive import HeadChainDrafter
from wager.drafter_spec import DRAFTERS
from wager.economics.policy.heuristics import Threshold
from wager.kernels._native import HeadDrafts
from wager.loading.load import LoadedEngine, load
from wager.types import Draft, Request, SamplingParams

MODEL = "random:llama:tiny"
DEPTH = 6
PER_GUESS = ("model", "layers", "slem", "tli", "eagle3", "mtp", "model:tree", "layers:tree", "eagle3:tree", "mtp:tree")
"""Drafters that make a pass for each guess, or level of a tree."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAGER_CACHE", str(tmp_path / "cache"))


def engine_with(option: str, policy: str) -> LoadedEngine:
    chosen: dict[str, Any] = {"model": MODEL, "drafter": option, "policy": policy, "depth": DEPTH}
    return load(wager.EngineConfig.from_options(**chosen, threads=1, memory=96 << 20, prefix_cache=False))


def passes_of(engine: LoadedEngine, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts passes of what the drafter runs, a model or a head."""
    counts: Counter[str] = Counter()

    def count(runner: Any) -> None:
        forward = runner.forward

        def counted(*args: Any, **options: Any) -> Any:
            counts["passes"] += 1
            return forward(*args, **options)

        monkeypatch.setattr(runner, "forward", counted)

    (drafter,) = engine.proposer.drafters.values()
    inner = getattr(drafter, "_model", drafter)
    count(getattr(inner, "_head", None) or inner._target)
    if isinstance(inner, HeadChainDrafter) and inner._rounds is not None:
        monkeypatch.setattr(inner, "_rounds", _CountedRounds(inner._rounds, counts))
    return counts


class _CountedRounds:
    """Each guess of a chain took a pass in C++."""

    def __init__(self, rounds: HeadDrafts, counts: Counter[str]) -> None:
        self._made, self._counts = rounds, counts

    def propose(self, *given: Any) -> list[Draft] | None:
        drafts = self._made.propose(*given)
        self._counts["passes"] += max((len(draft) for draft in drafts or ()), default=0)
        return drafts


def serve(engine: LoadedEngine) -> list[tuple[int, ...]]:
    texts = ("The cat sat on the mat. The cat sat on the", "one two three one two three one two")
    tokens = [engine.tokenizer.encode(text) for text in texts]
    params = [SamplingParams(max_tokens=24, ignore_eos=True, temperature=t, seed=4) for t in (0.0, 0.8)]
    asked = [Request(f"r{i}{j}", tuple(ids), each) for i, ids in enumerate(tokens) for j, each in enumerate(params)]
    return [each.token_ids for each in engine.generate(asked, concurrency=1)]


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each == "ngram" else pytest.mark.slow) for each in EVERY]
)
def test_nothing_behind_an_unlikely_guess_is_verified(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, Mapping[str, Draft], Mapping[str, Draft]]] = []
    admit = Threshold.admit

    def watched(self: Threshold, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        admitted = admit(self, drafts, budget)
        seen.append((self.threshold, drafts, admitted))
        return admitted

    monkeypatch.setattr(Threshold, "admit", watched)
    engine = engine_with(every_drafter(MODEL, tmp_path)[name], "threshold:0.5")
    assert serve(engine) == serve(load(wager.EngineConfig.from_options(model=MODEL, drafter="none", threads=1)))
    for threshold, drafts, admitted in seen:
        for seq_id, draft in drafts.items():
            if draft.scores:
                likely = next((i for i, score in enumerate(draft.scores) if score < threshold), len(draft))
                assert len(admitted.get(seq_id, ())) == likely
            if name in PER_GUESS and name != "slem":  # whose tokens are others than those that were drawn
                assert all(draft.scores[parent] >= threshold for parent in draft.parents if parent >= 0)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each == "eagle3" else pytest.mark.slow) for each in PER_GUESS]
)
def test_no_pass_is_made_behind_an_unlikely_guess(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafters are made unlikely by a threshold that none of their guesses reaches."""
    passes = {}
    for policy in ("fixed", "threshold:0.98"):
        engine = engine_with(every_drafter(MODEL, tmp_path)[name], policy)
        counts, steps = passes_of(engine, monkeypatch), [0]
        engine.on_step = lambda record, steps=steps: steps.__setitem__(0, steps[0] + (record.emitted > 0))
        serve(engine)
        passes[policy] = counts["passes"] / steps[0]
    assert passes["threshold:0.98"] < 0.6 * passes["fixed"]


def test_all_that_make_passes_are_tested() -> None:
    runs = {
        name for name in EVERY if DRAFTERS[name.partition(":")[0]].argument in ("path", "head", "modules", "layers")
    }
    one_pass = {"medusa", "medusa:tree", "dflash", "dflash:tree"}
    assert runs == {*PER_GUESS} | one_pass
