"""What the adaptive policy itself costs, in microseconds a step.

    python dev/bench_policy.py [--steps N] [--no-scores] [--cold]

A simulated server (no model) on a machine whose rows are so cheap that nearly everything is drafted, judged and
verified: the most work that a policy can have. Drafts are 7 deep, with scores unless --no-scores. Times are of this
process alone, by stage; the share is of a 19 ms step, a plain one of 32 requests on the reference's two cores. With
--cold 160 MB are read before plan and before learn, as by a pass over the weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from wager.economics.latency.draft_curve import DraftCurve
from wager.economics.latency.surface import LatencySurface
from wager.economics.policy.adaptive import Adaptive
from wager.economics.policy.base import DrafterCapabilities
from wager.economics.simulation.server import SimulatedServer
from wager.economics.simulation.synthetic import SyntheticDrafter, SyntheticTraces
from wager.economics.simulation.workload import Workload
from wager.economics.survival import MTP_SURVIVAL

REQUESTS = (1, 2, 4, 8, 16, 32, 64)
STAGES = ("plan", "admit", "learn", "observe")
STEP = 19e-3


class Timed:
    """A policy whose calls are timed, seconds by stage and step."""

    def __init__(self, policy: Adaptive, *, cold: bool) -> None:
        self._weights = np.ones(20_000_000 if cold else 0)
        self.seconds: dict[str, list[float]] = {stage: [] for stage in STAGES}
        self.end = policy.end
        for stage in STAGES:
            setattr(self, stage, self._timed(stage, getattr(policy, stage)))

    def _timed(self, stage: str, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed(*arguments: Any) -> Any:
            if stage in ("plan", "learn"):
                self._weights.sum()
            clock = time.perf_counter()
            result = call(*arguments)
            self.seconds[stage].append(time.perf_counter() - clock)
            return result

        return timed


def measure(requests: int, *, steps: int, scores: bool, cold: bool) -> np.ndarray:
    """Microseconds by stage and step, [4, steps]."""
    rows = [1, 8, 64, 1024]
    surface = LatencySurface(rows, [5e-3 + 1e-5 * row for row in rows], drafters={"d": DraftCurve.unmeasured()})
    curve = SyntheticDrafter(MTP_SURVIVAL[:7]) if scores else SyntheticDrafter(MTP_SURVIVAL[:7], score_sd=None)
    policy = Timed(Adaptive(surface, drafters={"d": DrafterCapabilities(7)}), cold=cold)
    load = Workload(concurrency=requests, rounds=requests * (steps + 50))
    traces = SyntheticTraces({"d": curve}, output_tokens=128)
    SimulatedServer(traces, surface, policy=policy, workload=load).run()  # type: ignore[arg-type]
    return 1e6 * np.array([policy.seconds[stage][50 : 50 + steps] for stage in STAGES])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--no-scores", action="store_true")
    parser.add_argument("--cold", action="store_true")
    args = parser.parse_args()
    print(f"{'requests':>8}  " + "  ".join(f"{stage:>7}" for stage in STAGES) + "     mean   median  of 19 ms")
    for requests in REQUESTS:
        taken = measure(requests, steps=args.steps, scores=not args.no_scores, cold=args.cold)
        whole = taken.sum(0)
        stages = "  ".join(f"{mean:7.1f}" for mean in taken.mean(1))
        print(
            f"{requests:8}  {stages}  {whole.mean():7.1f}  {np.median(whole):7.1f}  {1e-6 * whole.mean() / STEP:8.2%}"
        )


if __name__ == "__main__":
    main()
