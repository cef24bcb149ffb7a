"""Thousands of random requests through a cache too small for them: each completes or ends in a typed error.

Whatever the drafter, an engine that has nothing to do holds as much memory after them as before.
"""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter, deque
from collections.abc import Callable
from types import FunctionType, ModuleType

import pytest
from faulty_drafters import FailingDrafter

from wager.draft.base import Drafter
from wager.draft.lookup import LookupDrafter, LookupSources
from wager.engine.core import Engine
from wager.errors import WagerError
from wager.kernels import noise
from wager.testing import RandomTreeDrafter, ToyDistribution
from wager.testing.toy import toy_engine
from wager.types import Request, SamplingParams

WARM = 300
"""Requests until all that may grow has grown, and a dying drafter is dead."""

LAW = ToyDistribution(vocab=64, order=2, sharpness=5.0, eos=0, eos_bias=0.5)
DRAFTERS: dict[str, tuple[Callable[[], Drafter | None], int]] = {
    "random-tree": (lambda: RandomTreeDrafter(64), 2000),
    "suffix": (lambda: LookupDrafter("suffix", LookupSources(4, shared_tokens=500)), 2000),
    "dying": (lambda: FailingDrafter(calls=300), 2000),
}
"""How to make each drafter, and how many requests it serves. What is allocated once (some 400 blocks where nothing ran
before in the process) stays below the bound, a block for every third request does not."""


def random_request(rng: random.Random, number: int) -> Request:
    size = rng.choice((1, 3, 15, 16, 17, 40, 90, 300))
    prompt = [rng.randrange(70 if rng.random() < 0.01 else 64) for _ in range(size)]
    if rng.random() < 0.3:
        prompt = [1 + i % 50 for i in range(rng.choice((16, 32, 48)))] + prompt  # prefixes to share
    params = SamplingParams(
        max_tokens=rng.choice((1, 2, 5, 20, 60)),
        temperature=rng.choice((0.0, 0.5, 1.0, 2.0)),
        top_k=rng.choice((0, 0, 0, 10)),
        top_p=rng.choice((1.0, 1.0, 0.9)),
        seed=rng.choice((None, number)),
        ignore_eos=rng.random() < 0.3,
        logprobs=rng.choice((None, None, None, 2)),
        n=rng.choice((1, 1, 1, 1, 2)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.0, 1.2)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.0, -0.3)),
        logit_bias=rng.choice(({}, {}, {}, {5: 3.0, 6: -100.0})),
    )
    return Request(f"r{number}", tuple(prompt), params)


def serve(engine: Engine, rng: random.Random, numbers: range) -> Counter[str]:
    """Open-loop service of the numbered requests with random aborts and preemptions; how they ended."""
    ends: Counter[str] = Counter()
    waiting, expected = deque(numbers), 0
    while waiting or engine.busy:
        for number in [waiting.popleft() for _ in range(min(rng.randint(0, 3), len(waiting)))]:
            request = random_request(rng, number)
            try:
                engine.add(request)
                expected += request.params.n
            except WagerError as error:
                ends[type(error).__name__] += 1
                expected += 1
        alive = engine.open_requests
        if alive and rng.random() < 0.02:
            engine.abort(rng.choice(alive))
        if rng.random() < 0.01:
            engine.preempt_all()
        for _ in range(2 if len(alive) > 60 else 1):
            for delta in engine.step():
                if delta.finish_reason:
                    ends[delta.finish_reason] += 1
                    assert delta.stats is not None
    assert sum(ends.values()) == expected
    return ends


def reading(engine: Engine) -> tuple[int, int]:
    """Blocks of memory the process has given to Python objects, and bytes of all the idle engine can reach.

    The first counts every object, wherever it is held; the second weighs what grows in one piece, a list or an array.
    """
    engine.scheduler.block_pool.reset_prefix_cache()  # what is kept on purpose and bounded
    noise._round_keys.cache_clear()
    gc.collect()
    seen: dict[int, object] = {}
    todo: list[object] = [engine]
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, ModuleType | type):
            continue
        seen[id(thing)] = thing
        todo += (thing.__closure__ or ()) if isinstance(thing, FunctionType) else gc.get_referents(thing)
    # a table keeps the room its fullest moment took: its entries count
    size = sum(16 * len(x) if isinstance(x, dict | set | deque) else sys.getsizeof(x) for x in seen.values())
    del thing, todo, seen
    return sys.getallocatedblocks(), size


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_thousands_of_random_requests(name: str) -> None:
    make, requests = DRAFTERS[name]
    rng = random.Random(20)
    engine = toy_engine(LAW, drafter=make(), depth=5, num_blocks=30, max_rows=96, max_sequences=12)
    ends = serve(engine, rng, range(WARM))
    blocks, size = reading(engine)
    ends += serve(engine, rng, range(WARM, requests))
    blocks, size = (after - before for after, before in zip(reading(engine), (blocks, size), strict=True))
    engine.check()
    assert not engine.busy
    assert engine.scheduler.block_pool.num_free_blocks == engine.scheduler.block_pool.num_blocks
    assert engine.proposer.name == ("none" if name == "dying" else name)
    assert set(ends) == {"stop", "length", "abort", "RequestError"}
    assert ends["stop"] > requests / 10 and ends["length"] > requests / 10 and ends["abort"] > 5
    assert blocks < (requests - WARM) / 3, f"{blocks} more blocks of memory in use than {requests - WARM} requests ago"
    assert size < 20 * (requests - WARM), f"the engine holds {size} bytes more than {requests - WARM} requests ago"
