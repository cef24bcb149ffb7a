"""Decisions and options of the vLLM plugin, without vLLM: a scripted target on a fake clock."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from wager.economics.policy.base import DrafterCapabilities
from wager.economics.surface import LatencySurface
from wager.errors import UsageError
from wager.types import Draft, Span
from wager_vllm.decisions import NO_GUESS, NO_ROOM, NOT_WORTH, Decisions, TakenStep
from wager_vllm.options import Options, read_options

CHEAP = LatencySurface([1, 2, 8, 64], [1e-2, 1.01e-2, 1.05e-2, 1.2e-2])
DEAR = LatencySurface([1, 2, 8, 64], [1e-2, 2e-2, 8e-2, 64e-2])


class ScriptedTarget:
    """Requests that decode under `decisions`: each draft token is right with the probability of its request, and a step
    takes what `latency` says."""

    def __init__(self, decisions: Decisions, latency: LatencySurface, *, rooms: int = 8) -> None:
        self.decisions, self.latency, self.rooms = decisions, latency, rooms
        self.right: dict[str, float] = {}
        self.known: dict[str, int] = {}
        self.tokens = self.steps = 0
        self.seconds = 0.0
        self._random = random.Random(5)

    def begin(self, request: str, *, right: float, tenant: str = "") -> None:
        self.decisions.begin(request, tenant=tenant)
        self.right[request], self.known[request] = right, 100

    def end(self, request: str) -> None:
        self.decisions.end(request)
        del self.right[request], self.known[request]

    def step(self, *, cut: int | None = None) -> dict[str, int]:
        """The depth drafted for each request. `cut`: vLLM verifies no more than so many draft tokens of each."""
        spans = [Span(name, known - 1, (0,), True, self.rooms) for name, known in self.known.items()]
        plan = self.decisions.plan(spans)
        drafts = {
            name: Draft.chain(name, [7] * decision.depth, drafter=decision.drafter) for name, decision in plan.items()
        }
        admitted = self.decisions.admit(drafts, seconds=1e-5)
        verified = {name: min(len(draft), len(draft) if cut is None else cut) for name, draft in admitted.items()}
        emitted = {}
        for name in self.known:
            count = 0
            while count < verified.get(name, 0) and self._random.random() < self.right[name]:
                count += 1
            emitted[name] = [7] * count + [8]
        context = tuple([known - 1 for known in self.known.values()])
        rows = len(spans) + sum(verified.values())
        seconds = self.latency.seconds(rows, len(spans), sum(context))
        self.decisions.learn(TakenStep(rows, context, seconds, verified, emitted))
        for name, tokens in emitted.items():
            self.known[name] += len(tokens)
            self.tokens += len(tokens)
        self.steps += 1
        self.seconds += seconds
        return {name: decision.depth for name, decision in plan.items()}


def scripted(latency: LatencySurface, *, rooms: int = 8) -> ScriptedTarget:
    believed = LatencySurface.from_dict(latency.as_dict())
    decisions = Decisions(believed, {"suffix": DrafterCapabilities(8)}, max_rows=512, clock=lambda: 0.0)
    return ScriptedTarget(decisions, latency, rooms=rooms)


def test_depth_is_decided_for_each_request() -> None:
    target = scripted(CHEAP)
    target.begin("easy", right=0.95)
    target.begin("hard", right=0.02)
    depths = [target.step() for _ in range(160)][-1]
    assert depths["easy"] >= 4
    assert depths.get("hard", 0) <= 1
    counts = target.decisions.counts
    assert counts.steps == 160
    assert counts.accepted["suffix", 3] > 0.6 * counts.reaching["suffix", 3] > 0
    assert target.tokens / target.steps > 3


def test_dear_rows_turn_drafting_off_and_the_reason_is_counted() -> None:
    target = scripted(DEAR)
    target.begin("a", right=0.6)
    for _ in range(200):
        target.step()
    off = target.decisions.counts.off
    assert off[NOT_WORTH] > 150 and not off[NO_ROOM]
    assert target.tokens / target.seconds > 0.97 / 1e-2  # plain decoding's
    full = scripted(CHEAP, rooms=0)
    full.begin("a", right=0.9)
    full.step()
    assert full.decisions.counts.off == {NO_ROOM: 1}
    silent = scripted(CHEAP).decisions
    silent.begin("a")
    assert silent.plan([Span("a", 99, (0,), True, 8)])["a"].depth
    silent.admit({}, seconds=0.0)
    assert silent.counts.off == {NO_GUESS: 1}


def test_what_vllm_changes_between_plan_and_step_is_no_error() -> None:
    """Requests that end, come, or are verified less deep than was drafted."""
    target = scripted(CHEAP)
    for name in ("a", "b", "c"):
        target.begin(name, right=0.9)
    for at in range(120):
        depths = target.step(cut=2)
        if at % 10 == 5:
            target.end(next(iter(target.known)))
            target.begin(f"new {at}", right=0.9)
    assert max(depths.values()) >= 2
    assert max(position for _, position in target.decisions.counts.reaching) == 1
    decisions = target.decisions
    decisions.plan([Span("a gone", 9, (0,), False), *[Span(name, 99, (0,), True, 8) for name in target.known]])
    decisions.admit({}, seconds=0.0)
    decisions.learn(TakenStep(40, (3, 4), 0.1, {"unknown": 3}, {"unknown": [1, 2]}))  # another batch altogether
    decisions.end("unknown")
    assert target.step()


def test_one_tenant_does_not_decide_for_another() -> None:
    """A tenant whose guesses are always wrong teaches nothing about another's."""
    target = scripted(CHEAP)
    target.begin("bad", right=0.0, tenant="bad")
    for _ in range(100):
        target.step()
    target.end("bad")
    target.begin("good", right=0.95, tenant="good")
    alone = scripted(CHEAP)
    alone.begin("good", right=0.95, tenant="good")
    assert target.step() == alone.step()


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"WAGER_VLLM_DRAFTER": "suffix"}, "WAGER_VLLM_DRAFTER is no option. Did you mean 'drafters'?"),
        ({"WAGER_VLLM_DRAFTERS": "model:x"}, "runs a model"),
        ({"WAGER_VLLM_DRAFTERS": "suffix:tree"}, "makes trees"),
        ({"WAGER_VLLM_MAX_DEPTH": "0"}, "WAGER_VLLM_MAX_DEPTH = '0' is not possible"),
        ({"WAGER_VLLM_STORE": "/nowhere"}, "'/nowhere' is no file"),
        ({"WAGER_VLLM_OBJECTIVE": "slo:fast"}, "objective = 'slo:fast' is not known"),
    ],
)
def test_wrong_options_are_refused_by_name(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_options(environment)
    assert message in str(refused.value).replace("\n", " ")


def test_options_come_from_a_file_and_the_environment_wins(tmp_path: Path) -> None:
    toml, data = tmp_path / "wager.toml", tmp_path / "wager.json"
    toml.write_text('drafters = "suffix:8,recycle"\nmax_depth = 4\n')
    data.write_text(json.dumps({"measure": "steps"}))
    found = read_options({"WAGER_VLLM_CONFIG": str(toml), "WAGER_VLLM_MAX_DEPTH": "6", "WAGER_VLLM_OPTIONAL": "1"})
    assert found == Options(drafters="suffix:8,recycle", max_depth=6)
    assert [spec.name for spec in found.specs] == ["suffix", "recycle"]
    assert read_options({"WAGER_VLLM_CONFIG": str(data)}).measure == "steps"
    toml.write_text("depth = [")
    with pytest.raises(UsageError, match=r"wager\.toml cannot be read as options"):
        read_options({"WAGER_VLLM_CONFIG": str(toml)})
