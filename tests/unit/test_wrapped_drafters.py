"""A drafter that works for another one, or beside others in one tree, is told everything: what became known, what
ended, what to forget, the states and rows that it reads. Over all the ways in which the registry puts drafters
together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from wager.draft.ahead import AheadDrafter
from wager.draft.base import ComputedRows, Drafter, LogitsRows
from wager.draft.combined import BackedDrafter, MergedDrafter
from wager.draft.ngram import NgramDrafter
from wager.draft.registry import DrafterParts, build_drafter
from wager.drafter_spec import DRAFTERS, DrafterSpec, parse_drafters
from wager.kernels.base import TargetOutput
from wager.testing import ToyDistribution, ToyTarget
from wager.testing.drafters import HistoryDrafter
from wager.testing.toy import toy_engine
from wager.types import NO_TENANT, Draft, DraftRequest, Request, SamplingParams, StepRecord

LAW = ToyDistribution(vocab=32, order=2, sharpness=9.0)
NEAR = ToyDistribution(vocab=32, order=2, sharpness=9.0, drift=0.3, salt=4)
ARGUMENTS = {"path": "toy", "head": "toy", "modules": "toy", "store": "toy", "layers": "0"}


class Watched(HistoryDrafter):
    """Has every capability that a drafter may have, and notes what it is told."""

    name = "watched"
    reads_rows = True
    remembers_requests = True
    samples = False

    def __init__(self) -> None:
        super().__init__()
        self.taps: tuple[int, ...] = ()
        self.calls: list[tuple[str, str]] = []
        self.asked: list[DraftRequest] = []

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        self.calls.append(("begin", seq_id))
        assert params.prediction == (1, 2) and tenant == "owner"
        super().begin(seq_id, tokens, params)

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        self.calls.append(("accept", seq_id))
        super().accept(seq_id, tokens)

    def end(self, seq_id: str) -> None:
        self.calls.append(("end", seq_id))
        super().end(seq_id)

    def read(self, output: TargetOutput, computed: Sequence[ComputedRows]) -> None:
        self.calls.append(("read", ""))

    def read_rows(self, output: TargetOutput, rows: Sequence[LogitsRows]) -> None:
        assert len(output.logits) == sum(len(each.tokens) for each in rows)
        self.calls.append(("read_rows", ""))

    def forget(self) -> None:
        self.calls.append(("forget", ""))

    def _draft(self, request: DraftRequest) -> Draft:
        self.asked.append(request)
        return Draft.chain(request.seq_id, self.known[request.seq_id][-request.depth :], drafter=self.name)

    def count(self, call: str, seq_id: str = "") -> int:
        return self.calls.count((call, seq_id))


def _model(name: str, inner: Drafter | None) -> Drafter:
    parts = DrafterParts(LAW.vocab, model=ToyTarget(NEAR, num_blocks=80), inner=inner)
    return build_drafter(DrafterSpec(name, ARGUMENTS[DRAFTERS[name].argument]), parts)


def _wrappers() -> dict[str, Callable[[Watched], Drafter]]:
    """All ways to put a drafter into another one."""
    found: dict[str, Callable[[Watched], Drafter]] = {}
    for name in (name for name, kind in DRAFTERS.items() if kind.takes_inner):
        found[f"{name}+"] = lambda inner, name=name: _model(name, inner)
        for other in (name for name, kind in DRAFTERS.items() if kind.takes_inner):
            found[f"{name}+{other}+"] = lambda inner, name=name, other=other: _model(name, _model(other, inner))
        found[f"ngram//{name}+"] = lambda inner, name=name: MergedDrafter(
            [NgramDrafter(), _model(name, inner)], vocab=LAW.vocab
        )
    found["ngram//"] = lambda inner: MergedDrafter([NgramDrafter(), inner], vocab=LAW.vocab)
    found["//ngram"] = lambda inner: MergedDrafter([inner, NgramDrafter()], vocab=LAW.vocab)
    found["ngram.."] = lambda inner: BackedDrafter(NgramDrafter(), inner, vocab=LAW.vocab)
    found["..ngram"] = lambda inner: BackedDrafter(inner, NgramDrafter(), vocab=LAW.vocab)
    return found


def _requests(count: int = 6) -> list[Request]:
    params = SamplingParams(max_tokens=24, ignore_eos=True, prediction=(1, 2))
    return [Request(f"r{i}", (1, 2, 3, 1, 2, 3, i), params, tenant="owner") for i in range(count)]


@pytest.mark.parametrize("name", sorted(_wrappers()))
def test_a_drafter_in_another_one_is_told_everything(name: str) -> None:
    watched = Watched()
    wrapper = _wrappers()[name](watched)
    below = "+" in name  # it works for a model: what it reads of the target's states, no model has
    assert wrapper.remembers_requests and wrapper.reads_rows
    assert not wrapper.taps and (wrapper.taps is None) == below
    engine = toy_engine(LAW, drafter=wrapper, depth=5, num_blocks=200)
    steps: list[StepRecord] = []
    engine.on_step = steps.append
    engine.add(Request("gone", (1, 2, 3), _requests()[0].params, tenant="owner"))
    for _ in range(4):
        engine.step()
    engine.abort("gone")
    plain = toy_engine(LAW, depth=0).generate(_requests())
    assert [each.token_ids for each in engine.generate(_requests())] == [each.token_ids for each in plain]
    ids = ["gone", *(request.id for request in _requests())]
    assert {request.seq_id for request in watched.asked} == {*ids}
    for seq_id in ids:
        assert watched.count("accept", seq_id) > 0
        # one that works for a model begins again where the text went on otherwise, and ends as often
        assert watched.count("begin", seq_id) == watched.count("end", seq_id) >= 1
    assert not watched.known and watched.calls[-1][0] == "end"
    assert watched.count("read_rows") == len(steps) and watched.count("read") == (0 if below else len(steps))
    assert watched.count("forget") == 0
    engine.forget_requests()
    assert watched.count("forget") == 1
    assert engine.proposer.drafters  # nothing failed


def test_no_drafter_that_reads_rows_is_on_another_thread() -> None:
    """There nothing of the target is read."""
    assert [spec.can_draft_ahead for spec in parse_drafters("model:a,model:a+suffix,model:a+layers:0+suffix")] == [
        True
    ] * 3
    for text in ("model:a+recycle", "model:a+model:b+recycle", "recycle", "ngram//model:a"):
        assert not parse_drafters(text)[0].can_draft_ahead


def test_a_drafter_on_another_thread_is_told_to_forget() -> None:
    """With the drafter of its model, in the order of the other calls."""
    watched = Watched()
    ahead = AheadDrafter(_model("model", watched))
    engine = toy_engine(LAW, drafter=ahead, depth=5, num_blocks=200)
    plain = toy_engine(LAW, depth=0).generate(_requests())
    assert [each.token_ids for each in engine.generate(_requests())] == [each.token_ids for each in plain]
    engine.forget_requests()
    engine.generate(_requests(1))
    ahead.close()
    assert ahead.remembers_requests and watched.count("forget") == 1
    assert watched.asked and not watched.known


@pytest.mark.parametrize("call", ["begin", "accept", "end", "read_rows", "forget", "propose"])
@pytest.mark.parametrize("name", ["ngram//", "model+"])
def test_one_that_raises_is_left_out(name: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any call, which is made ever more rarely; the others go on, and the text stays."""
    watched = Watched()
    engine = toy_engine(LAW, drafter=_wrappers()[name](watched), depth=5, num_blocks=200)
    engine.generate(_requests(2))

    raised: list[str] = []

    def fails(*_: object) -> None:
        raised.append(call)
        raise RuntimeError("no")

    monkeypatch.setattr(watched, call, fails)
    engine.forget_requests()
    plain = toy_engine(LAW, depth=0).generate(_requests())
    found = engine.generate(_requests())
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    assert sum(each.stats.drafted for each in found) > 0
    assert not engine.proposer.failures[engine.proposer.name]
    few = len(raised)
    assert few < 60  # where it fails at ends, those of all others raise with one
    for _ in range(4):
        engine.generate(_requests())
    assert len(raised) <= 2 * few + 6
