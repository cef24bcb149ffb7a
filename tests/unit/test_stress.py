"""Ten thousand random requests through a cache too small for them: each completes or ends in a typed error."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter

from wager.engine.core import Engine
from wager.errors import WagerError
from wager.testing import RandomTreeDrafter, ToyLaw
from wager.testing.engines import toy_engine
from wager.types import Event, Request, SamplingParams

REQUESTS = 10_000
LAW = ToyLaw(vocab=64, order=2, sharpness=5.0, eos=0, eos_bias=0.5)


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
        repetition_penalty=rng.choice((1.0, 1.0, 1.0, 1.2)),
        seed=rng.choice((None, number)),
        ignore_eos=rng.random() < 0.3,
        logprobs=rng.choice((None, None, None, 2)),
        n=rng.choice((1, 1, 1, 1, 2)),
    )
    return Request(f"r{number}", tuple(prompt), params)


def serve(engine: Engine, rng: random.Random, numbers: range) -> Counter[str]:
    """Open-loop service of the numbered requests with random aborts and preemptions; how they ended."""
    ends: Counter[str] = Counter()
    todo = iter(numbers)
    expected = 0
    alive: list[str] = []

    def take(events: list[Event]) -> None:
        for event in events:
            if event.finish:
                ends[event.finish] += 1
                assert event.stats is not None
                if event.request in alive:
                    alive.remove(event.request)

    more = True
    while more or engine.busy:
        for _ in range(rng.randint(0, 3)):
            number = next(todo, None)
            if number is None:
                more = False
                break
            request = random_request(rng, number)
            try:
                engine.add(request)
            except WagerError as error:
                ends[type(error).__name__] += 1
                expected += 1
                continue
            expected += request.params.n
            alive.append(request.id)
        if alive and rng.random() < 0.02:
            engine.abort(rng.choice(alive))
        if rng.random() < 0.01:
            engine.preempt_all()
        take(engine.step())
        if len(alive) > 60:
            take(engine.step())
    assert sum(ends.values()) == expected
    return ends


def test_ten_thousand_random_requests() -> None:
    rng = random.Random(20)
    engine = toy_engine(LAW, drafter=RandomTreeDrafter(64), depth=5, pages=30, max_rows=96, max_sequences=12)
    serve(engine, rng, range(1000))
    tracemalloc.start()
    serve(engine, rng, range(1000, 1200))
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    ends = serve(engine, rng, range(1200, REQUESTS - 200))
    tracemalloc.start()
    serve(engine, rng, range(REQUESTS - 200, REQUESTS))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    engine.check()
    assert not engine.busy
    assert engine.scheduler.table.free == engine.scheduler.table.total
    assert set(ends) == {"stop", "length", "abort", "RequestError"}
    assert ends["stop"] > 1000 and ends["length"] > 1000 and ends["abort"] > 30
    assert abs(after - before) < 500_000, (before, after)
