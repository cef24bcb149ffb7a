"""What the adaptive policy itself takes, from 1 to 1,024 users: microseconds and share of a step.

    python dev/bench_policy.py [--curve mtp|dflash] [--users N,...] [--steps N] [--no-scores] [--warm]
                                [--charge US]
    python dev/bench_policy.py --engine [MODEL] [--users N,...]

The first form is a replay on the published prices of a B200; the policy's seconds are those that its thread computes,
by stage, and are part of the simulated step. Where the pass of the target would be, 64 MB are read, so that the policy
finds the caches as a pass leaves them; with --warm they are not, which shows what it computes: a third. To compare
with an older version, run this file with that version's src on PYTHONPATH, in turns, with --charge: the step is charged
with so many microseconds in place of those taken, so that both decide alike.
By kind of step: "planned" those in which every sequence is planned anew, "judged" those whose draft tokens are compared
with what a row costs. The second runs MODEL with its default drafters on this machine and reads the seconds of the
policy from the records of its steps.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wager.economics.acceptance import CURVES
from wager.economics.policy.base import Policy
from wager.simulation.comparison import ReplaySetting, build_policy
from wager.simulation.server import SimulatedServer, Workload
from wager.simulation.traces import SyntheticDrafter, SyntheticTraces
from wager.types import POLICY_STAGE, StepRecord

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from economics.published import PublishedLatency

STAGES = ("plan", "admit", "learn", "observe")
USERS = "1,2,4,8,16,32,64,128,256,512,1024"
PROMPT = "Explain in a few sentences how a refrigerator works, and why its back side is warm."


WEIGHTS = 64 << 20
"""Bytes that a pass reads, at least: more than a core has of caches."""


class Charged:
    """A policy whose calls are timed; the server's step is charged with them. `taken` is by stage and step; what
    `observe` takes counts for the next step. `weights` are read after drafts are admitted; `charge`: seconds
    in place of those taken."""

    def __init__(self, policy: Policy, weights: np.ndarray, charge: float | None) -> None:
        self.policy, self.end, self.begin, self.weights = policy, policy.end, policy.begin, weights
        self.charge = charge
        self.server: SimulatedServer | None = None
        self.taken: list[dict[str, float]] = [dict.fromkeys(STAGES, 0.0)]
        self.kinds: list[str] = []
        for stage in STAGES[:3]:
            setattr(self, stage, self._timed(stage, getattr(policy, stage)))

    def _timed(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            time.thread_time()  # its own code is read from memory, too
            begin = time.thread_time()
            result = call(*arguments)
            self.taken[-1][stage] += time.thread_time() - begin
            if stage == "admit":
                self.weights.sum()
            return result

        return timed

    def observe(self, record: StepRecord) -> None:
        seconds = sum(self.taken[-1].values()) if self.charge is None else self.charge
        if self.server is not None:
            self.server.result.seconds += seconds
        record = record._replace(seconds={**record.seconds, POLICY_STAGE: seconds})
        self.kinds.append(getattr(getattr(self.policy, "step", None), "kind", ""))
        self.taken.append(dict.fromkeys(STAGES, 0.0))
        self._timed("observe", self.policy.observe)(record)


def replayed(curve: str, users: int, *, steps: int, scores: bool, warm: bool, charge: float | None) -> str:
    drafter = SyntheticDrafter(CURVES[curve]) if scores else SyntheticDrafter(CURVES[curve], score_sd=None)
    setting = ReplaySetting(SyntheticTraces({curve: drafter}, output_tokens=1024), PublishedLatency())
    policy = Charged(build_policy("adaptive", setting), np.ones(0 if warm else WEIGHTS // 8), charge)
    load = Workload(concurrency=users, rounds=users * steps)
    server = SimulatedServer(setting.traces, setting.latency, policy=policy, workload=load)  # type: ignore[arg-type]
    policy.server = server
    result = server.run()
    taken = 1e6 * np.array([[each[stage] for stage in STAGES] for each in policy.taken[:-1]])
    return row(users, taken, 1e6 * result.seconds / result.steps, policy.kinds, f"{result.throughput:9.0f}")


def row(users: int, taken: np.ndarray, step: float, kinds: Sequence[str], throughput: str) -> str:
    """`taken` in microseconds by step and stage, `step` the mean of whole steps."""
    whole = taken.sum(axis=1)
    stages = "".join(f"{mean:9.1f}" for mean in taken.mean(axis=0))
    later = whole[len(whole) // 2 :].mean()
    by_kind = []
    for kind in sorted(set(kinds) - {""}):
        mine = whole[np.array(kinds) == kind]
        by_kind.append(f"{kind} {len(mine)} of {np.median(mine):.0f}")
    shares = f"{whole.mean() / step:7.2%}{later / step:10.2%}"
    return f"{users:5}{stages}{whole.mean():9.1f}{step:10.0f}{shares}{throughput}   {', '.join(by_kind)}"


def in_engine(model: str, users: int) -> str:
    """The engine's own records: its steps are as long as this machine makes them."""
    import wager

    llm = wager.LLM(model=model)
    records: list[StepRecord] = []
    llm.engine.on_step = records.append
    params = wager.SamplingParams(max_tokens=200, temperature=0.0)
    llm.generate([PROMPT] * users, params)
    decoding = [record for record in records if record.emitted]
    seconds = 1e6 * np.array([[record.seconds.get(POLICY_STAGE, 0.0)] for record in decoding])
    step = 1e6 * float(np.mean([sum(record.seconds.values()) for record in decoding]))
    tokens = sum(record.emitted for record in decoding)
    llm.close()
    return row(users, seconds, step, [], f"{1e6 * tokens / step / len(decoding):9.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--curve", choices=sorted(CURVES), default="mtp")
    parser.add_argument("--users", default="")
    parser.add_argument("--steps", type=int, default=0, help="0: 4,000 at one user, fewer at more, at least 300")
    parser.add_argument("--no-scores", action="store_true")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--charge", type=float, help="microseconds a step")
    parser.add_argument("--engine", nargs="?", const="SmolLM2-135M-Instruct")
    args = parser.parse_args()
    stages = ("policy",) if args.engine else STAGES
    print("users" + "".join(f"{stage:>9}" for stage in stages) + "  all, us   step, us  share  2nd half    tok/s")
    for users in map(int, (args.users or ("1,2,4,8" if args.engine else USERS)).split(",")):
        steps = args.steps or max(300, 4000 // users)
        if args.engine:
            print(in_engine(args.engine, users), flush=True)
        else:
            charge = None if args.charge is None else 1e-6 * args.charge
            given = {"scores": not args.no_scores, "warm": args.warm, "charge": charge}
            print(replayed(args.curve, users, steps=steps, **given), flush=True)


if __name__ == "__main__":
    main()
