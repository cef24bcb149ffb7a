"""Prompts leave room for others: their rows are bounded by what they take, short ones pass long ones, and prompts that
were begun keep the blocks that they still need."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wager.kernels.base import TargetOutput
from wager.testing import FakeClock, ToyDistribution
from wager.testing.toy import toy_engine
from wager.trace import Trace
from wager.types import PackedBatch, Request, SamplingParams, StepRecord

DISTRIBUTION = ToyDistribution(vocab=48, order=2, sharpness=6.0)


def request(name: str, prompt: int, tokens: int) -> Request:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(name, tuple(8 + i % 30 for i in range(prompt)), params)


class Prompts:
    """Of an engine's steps what they compute of a long prompt, of which someone waits for each token, beside a sequence
    that decodes; a step's record is all that is learned from."""

    def __init__(self) -> None:
        sizes = {"num_blocks": 1024, "max_rows": 8192, "max_sequences": 2, "max_context": 16384}
        engine = toy_engine(DISTRIBUTION, depth=0, prefix_cache=False, trace=Trace(FakeClock()), **sizes)
        for name, tokens in (("decodes", 1), ("long", 8000)):
            engine.add(replace(request(name, tokens, 100), streamed=True))
        self._scheduler = engine.scheduler
        self._scheduler.next()

    def observe(self, rows: int, sequences: int, seconds: float) -> int:
        """After a step of these rows the rows of the prompt in the next one."""
        self._scheduler.last_step = StepRecord(rows, sequences, 0, 0, 0, {"forward": seconds})
        [_, *prompt] = self._scheduler.next()
        return sum(len(span.tokens) for span in prompt)


def observed(row_s: float, *, decode_s: float = 0.002, steps: int = 12) -> tuple[Prompts, int]:
    """After steps of as many rows as it allows, each of which takes `row_s`; and the rows that it allows then."""
    prompts = Prompts()
    limit = prompts.observe(1, 1, decode_s)
    for _ in range(steps):
        rows = min(limit, 512)
        limit = prompts.observe(2 + rows, 2, decode_s + row_s * rows)
    return prompts, limit


@pytest.mark.parametrize(
    ("row_s", "decode_s", "seconds"),
    [*((row_s, 0.002, 0.02) for row_s in (1e-4, 5e-5, 5e-4, 8e-4)), (0.005, 0.5, 0.5)],
)
def test_rows_of_prompts_take_a_bounded_time_or_as_long_as_decoding(
    row_s: float, decode_s: float, seconds: float
) -> None:
    _, limit = observed(row_s, decode_s=decode_s)
    assert 0.75 * seconds < limit * row_s < 1.25 * seconds


def test_rows_of_prompts_grow_again_after_slow_steps() -> None:
    prompts, usual = observed(1e-4)
    assert prompts.observe(1, 1, 5.0) <= usual + 1, "one slow step without prompts allows no more"
    standing_still = [prompts.observe(100, 2, 5.0) for _ in range(9)]
    assert standing_still[-1] == 24, "with fewer, no prompt would end"
    again = [prompts.observe(26, 2, 0.002 + 24e-4) for _ in range(15)]
    assert again[-1] > 0.8 * usual


def test_prompts_that_add_nothing_are_not_bounded() -> None:
    prompts, _ = observed(0.0, steps=3000)
    prompts.observe(100, 2, 0.0021)
    assert [prompts.observe(100, 2, 0.001) for _ in range(1200)][-1] > 4096


def test_prompts_are_bounded_only_while_someone_waits_for_each_token() -> None:
    sizes, clock, records = {"num_blocks": 1024, "max_rows": 256, "max_context": 4096}, FakeClock(), list[StepRecord]()
    engine = toy_engine(DISTRIBUTION, depth=0, trace=Trace(clock), **sizes)
    engine.on_step = records.append
    forward = engine.runner.target.forward

    def slow_forward(batch: PackedBatch) -> TargetOutput:
        clock.advance(0.5e-3 * batch.rows)
        return forward(batch)

    engine.runner.target.forward = slow_forward  # type: ignore[method-assign]
    engine.add(request("answer", 4, 900))
    engine.step()
    engine.add(request("long", 600, 1))
    engine.step()
    engine.add(replace(request("stream", 4, 900), streamed=True))
    engine.step()
    assert records[1].rows > 200 > 45 > records[2].rows > 30
    engine.abort("stream")
    engine.step()
    assert records[3].rows > 200


def test_a_short_prompt_does_not_wait_for_long_ones() -> None:
    engine = toy_engine(
        DISTRIBUTION, num_blocks=1024, max_rows=80, max_prefill_rows=8, max_sequences=8, max_context=4096, depth=0
    )
    engine.add(request("running", 4, 900))
    for number in range(12):
        long = request(f"long{number}", 1000, 1)
        engine.add(replace(long, prompt=(number + 1, *long.prompt)))
    engine.step()
    engine.add(request("short", 5, 1))
    names = [delta.request_id for _ in range(3) for delta in engine.step()]
    assert "short" in names


def test_the_first_that_waits_is_overtaken_a_bounded_number_of_times() -> None:
    engine = toy_engine(DISTRIBUTION, num_blocks=40, max_rows=64, max_sequences=4, max_context=600, depth=0)
    engine.add(request("holds blocks", 200, 300))
    engine.step()
    engine.add(request("waits", 500, 4))
    ended = ""
    for number in range(400):
        engine.add(request(f"short{number}", 5, 8))
        ended = next((each.request_id for each in engine.step() if each.request_id == "waits"), ended)
    assert ended == "waits", "although a short one came in every step"


def test_prompts_that_are_begun_keep_the_blocks_that_they_need() -> None:
    """Else the youngest, whose answer is under way, would be preempted for a prompt that came earlier."""
    engine = toy_engine(DISTRIBUTION, num_blocks=64, max_rows=32, max_sequences=8, max_context=1000, depth=0)
    for number in range(6):
        engine.add(replace(request(f"long{number}", 600, 1), prompt=tuple(range(8, 40)) * 18 + (number,) * 20))
    engine.add(request("short", 5, 200))
    done = {}
    while engine.busy:
        for delta in engine.step():
            if delta.stats:
                done[delta.request_id] = delta.stats
    assert {each.preemptions for each in done.values()} == {0}


@pytest.mark.parametrize("together", [True, False], ids=["many requests of one tenant", "one request of many choices"])
def test_who_runs_many_sequences_takes_no_blocks_from_a_neighbour(together: bool) -> None:
    engine = toy_engine(DISTRIBUTION, num_blocks=40, max_rows=64, max_sequences=16, max_context=400, depth=0)
    many = SamplingParams(max_tokens=300, ignore_eos=True, n=1 if together else 12, temperature=1.0, seed=1)
    for number in range(12 if together else 1):
        engine.add(Request(f"many{number}", (9, 10, 11), many, tenant="anna"))
    engine.step()
    engine.add(replace(request("neighbour", 20, 300), tenant="berta"))
    steps, preempted = 0, 0
    while engine.busy:
        steps += 1
        for delta in engine.step():
            if delta.stats and delta.request_id == "neighbour":
                assert delta.stats.preemptions == 0 and steps <= 302, "a token in every step"
            elif delta.stats:
                preempted += delta.stats.preemptions
    assert preempted > 5
