"""What an engine that was never calibrated starts from, and what that costs: short measurements of a model's steps
beside a long one of the same minutes, and what the adaptive policy loses against the best fixed depth in its first
steps, on a simulated machine with the long one's prices.

    python dev/bench_first_prices.py MODEL [--times 5] [--threads N] [--wall]

Seconds are what the engine's thread computes; `--wall` times short ones by the wall clock, too. Columns: what the rows
of drafts add to a step, the short measurement by the long one, for requests x depth; then losses, by drafter and
requests.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "economics"))

from test_wrong_prices import DEPTH, DRAFT_SECONDS, DRAFTERS, Metered, TrueMachine

import wager
from wager.economics.policy.adaptive import Adaptive
from wager.economics.policy.base import DrafterCapabilities, Policy
from wager.economics.policy.heuristics import FixedDepth
from wager.economics.surface import DraftCurve, LatencySurface, fit_surface
from wager.engine.runner import Runner
from wager.loading.load import FIRST_START_S, load
from wager.profiling.calibrate import StepTimer, grid_shapes, quick_surface, time_steps, typical_steps
from wager.simulation.server import SimulatedServer, Workload
from wager.simulation.traces import SyntheticTraces
from wager.trace import Trace
from wager.types import StepRecord

CONTEXT, STEPS, SEEDS, SECONDS = 256, {1: 1200, 4: 600, 16: 300}, 2, 3.0
SHAPES = ((1, 1), (1, 3), (4, 1), (4, 3), (16, 1), (16, 3))
CELLS = (("lookup", 1), ("lookup", 4), ("lookup", 16), ("sure", 16))


class Decoding(Metered):
    """Steps that compute prompts do not count."""

    def observe(self, record: StepRecord) -> None:
        if record.decodes_only:
            super().observe(record)
        else:
            self.policy.observe(record)


def measured(runner: Runner, *, times: int, wall: bool) -> tuple[LatencySurface, dict[str, LatencySurface]]:
    """The long measurement, and short ones by name, in turns."""
    clocks = {"thread": time.thread_time, **({"wall": time.perf_counter} if wall else {})}
    short, samples = dict[str, LatencySurface](), []
    for turn in range(times):
        for name, clock in clocks.items():
            short[f"{name} {turn + 1}"] = quick_surface(
                runner, max_context=2048, seconds=FIRST_START_S, trace=Trace(clock)
            )
        timer = StepTimer(runner, max_context=2048, trace=Trace(time.thread_time))
        shapes = grid_shapes(timer.limits)
        taken = time_steps(timer, shapes, seconds=SECONDS, seed=turn)
        samples += [(step.shape, step.point) for step in taken]
    return fit_surface(list(typical_steps(samples, fitted=range(len(shapes))).values())), short


def added(surface: LatencySurface, requests: int, depth: int) -> float:
    """What drafts of a depth add to a step, as a share of it."""
    cached = requests * CONTEXT
    return surface.seconds(requests * (depth + 1), requests, cached) / surface.seconds(requests, requests, cached) - 1


def rate(policy: Policy, truth: LatencySurface, drafter: str, users: int, *, seed: int, noise: float = 0.05) -> float:
    """Tokens a second of the first steps."""
    survival, machine = DRAFTERS[drafter].survival, TrueMachine(truth, noise=noise, seed=seed)
    traces = SyntheticTraces({drafter: DRAFTERS[drafter]}, prompt_tokens=CONTEXT, output_tokens=CONTEXT, seed=seed)
    meter = Decoding(policy, machine, survival=survival, skipped=0)
    workload = Workload(concurrency=users, rounds=users * STEPS[users], seed=seed)
    SimulatedServer(traces, machine, policy=meter, workload=workload).run()
    return meter.tokens / meter.seconds


def priced(surface: dict[str, Any], drafter: str) -> LatencySurface:
    """With the seconds of a drafter."""
    new, (call, token) = LatencySurface.from_dict(surface), DRAFT_SECONDS[drafter]
    new.drafters = {drafter: DraftCurve([1], [call], [token])}
    return new


def loss(believed: dict[str, Any], truth: dict[str, Any], drafter: str, users: int) -> float:
    """Against the best fixed depth of the same steps; surfaces as plain values, which travel to another process."""
    true, rates = priced(truth, drafter), []
    for seed in range(SEEDS):
        policy = Adaptive(priced(believed, drafter), drafters={drafter: DrafterCapabilities(DEPTH)})
        best = max(rate(FixedDepth(depth), true, drafter, users, seed=seed) for depth in (0, 1, 2, 3, 5, DEPTH))
        rates.append(1 - rate(policy, true, drafter, users, seed=seed) / best)
    return mean(rates)


def lines(truth: LatencySurface, short: dict[str, LatencySurface]) -> Iterator[str]:
    heads = [f"{requests}x{depth}" for requests, depth in SHAPES] + [f"{name} {users}" for name, users in CELLS]
    yield "".ljust(10) + " ".join(head.rjust(10) for head in heads)
    with ProcessPoolExecutor(2) as pool:
        every = {"long": truth, **short}
        lost = {
            name: [pool.submit(loss, each.as_dict(), truth.as_dict(), *cell) for cell in CELLS]
            for name, each in every.items()
        }
        for name, surface in every.items():
            ratios = [f"{added(surface, *shape) / added(truth, *shape):.2f}" for shape in SHAPES]
            cells = [f"{100 * each.result():.1f} %" for each in lost[name]]
            yield name.ljust(10) + " ".join(text.rjust(10) for text in [*ratios, *cells])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--wall", action="store_true")
    args = parser.parse_args()
    options = {"drafter": "none", "prefix_cache": False, "max_context": 2048, "cache_tokens": 49_152}
    engine = load(wager.EngineConfig.from_options(model=args.model, threads=args.threads, **options))
    for line in lines(*measured(engine.runner, times=args.times, wall=args.wall)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
