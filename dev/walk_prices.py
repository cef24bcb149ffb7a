"""The engine and its policy on a clock of fixed prices: speed-up and tau by drafter, the same on any machine and load.

    python dev/walk_prices.py PROMPTS DRAFTER [DRAFTER ...] [--limit 24] [--tokens 128] [--temperature 0]
        [--rows 1,1.04,1.08,1.13,1.2,1.23,1.34,1.39,1.47] [--concurrency 1] [--sequence 0] [--call 0.053] [--guess 0.03]
        [--state 0.004] [--keeping 0.04] [--ask 0.01]

Answers are computed, so many --concurrency at a time; their seconds are not those of this machine. A step of the target
takes the price of its rows (--rows, in plain steps; the last rise goes on), and --sequence more for each sequence
beyond the first; a pass of a head --guess, and where it reads new states --call more, and --state more for each of
them; a step in which layers are tapped takes --keeping more, and asking a drafter --ask. Nothing else takes time. The
adaptive policy knows the prices of rows from the start and learns those of drafting.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import wager
from wager.cli.measuring import to_requests
from wager.draft.combined import JoinedDrafter
from wager.economics.surface import LatencySurface
from wager.engine.wrapped_policies import TenantPolicies
from wager.loading.load import LoadedEngine, build_policies, load
from wager.prompts import read_prompts, spread
from wager.terminal.flags import Framing
from wager.testing import FakeClock
from wager.trace import Trace
from wager.types import Draft, SamplingParams, StepRecord

STEP_S = 2e-3


def on_clock(engine: LoadedEngine, clock: FakeClock, rows: Sequence[float], options: argparse.Namespace) -> None:
    """Let an engine's steps take these prices, in plain steps."""
    call, guess, state = options.call, options.guess, options.state
    decoder, trace = engine.target.decoder, Trace(clock)
    seconds = [STEP_S * price for price in rows]

    def step(batch: Any) -> float:
        more = max(0, len(batch.tokens) - len(rows)) * (seconds[-1] - seconds[-2])
        more += options.keeping * STEP_S * bool(engine.proposer.taps)
        more += options.sequence * STEP_S * (len(batch.query_start_loc) - 2)
        return seconds[min(len(batch.tokens), len(rows)) - 1] + more

    engine.runner.target = Timed(decoder, clock, step)
    for drafter in engine.proposer.drafters.values():
        drafter.propose = partial(asked, drafter.propose, clock, STEP_S * options.ask)  # type: ignore[method-assign]
        for each in parts(drafter):
            if hasattr(each, "_head"):
                each._rounds = None  # each pass is one of Python's
                each._head = Timed(
                    each._head,
                    clock,
                    lambda batch, states, *_: STEP_S * (guess + call * (len(states) > 0) + state * len(states)),
                )
    surface = LatencySurface(list(range(1, len(rows) + 1)), seconds)
    make_policy, _ = build_policies(
        engine.target.config.with_options(drafter=engine.spec_text).speculation,
        list(engine.proposer.drafters.values()),
        lambda: LatencySurface.from_dict(surface.as_dict()),
    )
    engine._trace = trace
    engine.policy = TenantPolicies(make_policy, engine.scheduler.sequences)


def asked(propose: Callable[..., list[Draft]], clock: FakeClock, seconds: float, requests: Any) -> list[Draft]:
    clock.advance(seconds)
    return propose(requests)


class Timed:
    """`inner`, whose passes advance the clock."""

    def __init__(self, inner: Any, clock: FakeClock, seconds: Callable[..., float]) -> None:
        self._inner, self._clock, self._seconds = inner, clock, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, *args: Any) -> Any:
        self._clock.advance(self._seconds(*args))
        return self._inner.forward(*args)


def parts(drafter: Any) -> Iterator[Any]:
    if isinstance(drafter, JoinedDrafter):
        for member in drafter._members:
            yield from parts(member.drafter)
    else:
        yield drafter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("drafters", nargs="+")
    parser.add_argument("--model", default=wager.EngineConfig().model.model)
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, action="append")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--rows", default="1,1.04,1.08,1.13,1.2,1.23,1.34,1.39,1.47")
    parser.add_argument("--sequence", type=float, default=0.0)
    parser.add_argument("--call", type=float, default=0.053)
    parser.add_argument("--guess", type=float, default=0.03)
    parser.add_argument("--state", type=float, default=0.004)
    parser.add_argument("--keeping", type=float, default=0.04)
    parser.add_argument("--ask", type=float, default=0.01)
    options = parser.parse_args()
    plain = load(
        wager.EngineConfig.from_options(
            model=options.model, drafter="none", prefix_cache=False, max_context=4096, cache_tokens=16_384
        )
    )
    prompts = spread(read_prompts(options.prompts), options.limit)
    rows = [float(price) for price in options.rows.split(",")]
    for temperature in options.temperature or [0.0]:
        params = SamplingParams(max_tokens=options.tokens, temperature=temperature, seed=1)
        requests = to_requests(prompts, plain.tokenizer, framing=Framing(), params=params)
        plain_s = dict[str, float]()
        for drafter in ["none", *options.drafters]:
            engine = load(plain.target.config.with_options(drafter=drafter), target=plain.target)
            engine.spec_text = drafter
            on_clock(engine, FakeClock(), rows, options)
            steps = walk(engine, prompts, requests, options.concurrency)
            took = {family: sum(sum(step.seconds.values()) for step in each) for family, each in steps.items()}
            plain_s = plain_s or took
            every = [step for each in steps.values() for step in each]
            if not every:
                parser.error("no answer has a second token, and so none a step that only decodes: raise --tokens")
            worst, where = min((plain_s[family] / seconds, family) for family, seconds in took.items())
            print(
                f"T {temperature:g}  {drafter:60} speed-up {sum(plain_s.values()) / sum(took.values()):.3f}  tau "
                f"{sum(step.emitted for step in every) / sum(step.sequences for step in every):.3f}  drafting a step "
                f"{sum(step.seconds.get('draft', 0.0) for step in every) / len(every) / STEP_S:.3f}  "
                f"least {worst:.2f} ({where})",
                flush=True,
            )


def walk(engine: Any, prompts: Sequence[Any], requests: Sequence[Any], concurrency: int) -> dict[str, list[StepRecord]]:
    """The decoding steps of so many requests at a time, by the category of their first prompt."""
    steps: list[StepRecord] = []
    engine.on_step = steps.append
    by_family: dict[str, list[StepRecord]] = defaultdict(list)
    for first in range(0, len(requests), concurrency):
        steps.clear()
        engine.generate(requests[first : first + concurrency])
        if decoding := [step for step in steps if step.decodes_only]:
            by_family[prompts[first].category] += decoding
    return by_family


if __name__ == "__main__":
    main()
