"""What the native kernels commit, and follow of greedy guesses, is what Python does: whole runs of an engine, with and
without them."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from wager.draft.base import Drafter
from wager.engine.core import Engine
from wager.testing import FakeClock, OracleDrafter, ToyDistribution, ToyOracle
from wager.testing.drafters import RandomTreeDrafter
from wager.testing.toy import toy_engine
from wager.trace import Trace
from wager.types import OutputDelta, Request, SamplingParams, StepRecord

LAW = ToyDistribution(vocab=40, eos=3)


class HoldingDecoder:
    """Keeps the text of every token that 5 divides until the next one comes, so that texts depend on the state."""

    def __init__(self) -> None:
        self._held = ""

    @property
    def known_texts(self) -> Mapping[int, str]:
        return {} if self._held else {token: f"<{token}>" for token in range(1, 40) if token % 5}

    def push(self, token: int) -> str:
        text = f"{self._held}<{token}>"
        self._held = "" if token % 5 else text
        return "" if self._held else text

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


def requests(rng: random.Random) -> list[Request]:
    made = []
    for index in range(12):
        params = SamplingParams(
            max_tokens=rng.choice([1, 2, 3, 17, 40]),
            temperature=rng.choice([0.0, 0.0, 0.9]),
            seed=index,
            stop=rng.choice([(), (), ("<7>",)]),
            stop_token_ids=rng.choice([(), (11,)]),
            logprobs=rng.choice([None, None, 2]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            n=rng.choice([1, 1, 2]),
        )
        made.append(Request(f"r{index}", tuple(rng.randrange(40) for _ in range(rng.randint(1, 40))), params))
    return made


def run(engine: Engine, clock: FakeClock, made: list[Request]) -> list[OutputDelta]:
    engine._decoder = lambda prompt: HoldingDecoder()
    waiting, deltas = list(made), []
    while waiting or engine.busy:
        for request in waiting[:2]:
            engine.add(request)
        waiting = waiting[2:]
        clock.advance(1.0)
        deltas += engine.step()
        engine.check()
    return deltas


def engines(drafter: str, num_blocks: int, clock: FakeClock) -> Engine:
    oracle = ToyOracle(LAW)
    made: dict[str, Drafter | None] = {
        "none": None,
        "oracle": OracleDrafter(oracle),
        "tree": RandomTreeDrafter(40, oracle=oracle),
    }
    return toy_engine(LAW, drafter=made[drafter], num_blocks=num_blocks, trace=Trace(clock))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_blocks", [7, 64])
@pytest.mark.parametrize("drafter", ["none", "oracle", "tree"])
def test_runs_are_equal_with_and_without_the_native_step(drafter: str, num_blocks: int, seed: int) -> None:
    made = requests(random.Random(seed))
    outputs: list[list[OutputDelta]] = []
    records: dict[bool, list[StepRecord]] = {True: [], False: []}
    for native in (True, False):
        clock = FakeClock()
        engine = engines(drafter, num_blocks, clock)
        assert engine.scheduler._committer is not None and engine.runner._matcher is not None
        assert engine.scheduler._plain is not None
        if not native:
            engine.scheduler._plain = engine.scheduler._committer = engine.runner._matcher = None
        engine.on_step = records[native].append
        outputs.append(run(engine, clock, made))
    assert outputs[0] == outputs[1]
    assert records[True] == records[False]
    assert [delta.stats for delta in outputs[0]] == [delta.stats for delta in outputs[1]]


def test_most_sequences_go_on_natively() -> None:
    clock = FakeClock()
    engine = engines("oracle", 64, clock)
    committed = engine.scheduler._committer.commit
    left = []

    class Watched:
        def commit(self, *values: object) -> object:
            result = committed(*values)
            left.append(len(result[1]) / len(result[0]))
            return result

    engine.scheduler._committer = Watched()
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine.generate([Request(f"r{i}", (1, 2, i), params) for i in range(4)])
    assert sum(share == 0 for share in left) > len(left) / 2


def test_a_delta_made_natively_is_a_value_like_any_other() -> None:
    engine = engines("none", 64, FakeClock())
    engine.add(Request("r", (1, 2, 4), SamplingParams(max_tokens=40, ignore_eos=True)))
    engine.step()
    [delta] = engine.step()
    made = OutputDelta("r", 0, delta.token_ids, "", ("",))
    assert (delta, hash(delta), repr(delta)) == (made, hash(made), repr(made))
