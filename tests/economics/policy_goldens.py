"""What the adaptive policy decided, frozen: its speed beside the best fixed setting in hindsight, in simulations of
many loads, machines, drafters, objectives, wrong prices and drafters that change.

    python tests/economics/policy_goldens.py [--write] [--only TEXT]

prints each cell beside what is frozen in policy_goldens.json; `--write` freezes it anew, which needs a reason in the
commit. A policy may be replaced by any that loses nowhere more than SLACK beyond what is frozen. A cell is one run, and
runs with other seeds scatter by 1 to 3 %: whether a change that moves a cell is worse, the mean over seeds tells.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parent)]

from test_wrong_prices import CHANGES, CURVES, DRAFT_SECONDS, PER_CONTEXT, PER_REQUEST, ROWS, WRONG, Cell, losses  # noqa: E402

from wager.economics.options import THROUGHPUT, Objective, parse_objective  # noqa: E402
from wager.economics.surface import DraftCurve, LatencySurface  # noqa: E402
from wager.simulation.comparison import ReplayPoint, ReplaySetting, compare  # noqa: E402
from wager.simulation.server import Workload  # noqa: E402
from wager.simulation.traces import RequestTrace, SyntheticDrafter, SyntheticTraces, TraceSource  # noqa: E402  # noqa: E402

FROZEN = Path(__file__).with_suffix(".json")
SLACK = 0.005
"""Share of the best fixed setting's speed by which a cell may be slower than it was when it was frozen."""

MACHINES = ("processor", "accelerator")
LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SURVIVAL = {
    "lookup": (0.45, 0.30, 0.22, 0.17, 0.14, 0.12, 0.10),
    "mtp": (0.78, 0.58, 0.44, 0.35, 0.28, 0.23, 0.19),
    "wrong": (0.001, 1e-6, 1e-9, 1e-12),
}
DRAFTERS = {"lookup": ("lookup",), "mtp": ("mtp",), "wrong": ("wrong",), "several": ("lookup", "mtp", "wrong")}
FIXED = ("none", *(f"fixed:{{name}}:{depth}" for depth in (1, 2, 3, 4, 7)))
EARLY_REQUESTS = 24
"""Requests after which a drafter that changes has changed, and in which one that drifts is good, then bad, in turns."""


def machine(name: str, drafters: Sequence[str]) -> LatencySurface:
    """Prices of a machine, those of drafting for each of `drafters` among them."""
    requests = [1, 2, 4, 8, 16, 32, 64]
    curves = {}
    for drafter in drafters:
        call, token = DRAFT_SECONDS.get(drafter, DRAFT_SECONDS["lookup"])
        curves[drafter] = DraftCurve(
            requests, [call * (1 + (n - 1) / 50) for n in requests], [token * (1 + (n - 1) / 50) for n in requests]
        )
    return LatencySurface(ROWS, CURVES[name], per_request=PER_REQUEST, per_context=PER_CONTEXT, drafters=curves)


class ChangingTraces(TraceSource):
    """Requests of `before`, and of `after` from EARLY_REQUESTS on; with `again` in turns."""

    def __init__(self, before: TraceSource, after: TraceSource, *, again: bool) -> None:
        self._before, self._after, self._again = before, after, again

    def max_depths(self) -> Mapping[str, int]:
        return self._before.max_depths()

    def mean_context(self) -> float:
        return self._before.mean_context()

    def longest_context(self) -> int:
        return self._before.longest_context()

    def request(self, number: int) -> RequestTrace:
        turn = number // EARLY_REQUESTS
        changed = turn % 2 == 1 if self._again else turn > 0
        return (self._after if changed else self._before).request(number)

    @property
    def request_bytes(self) -> int:
        return self._before.request_bytes  # type: ignore[attr-defined, no-any-return]


def traces(drafters: Sequence[str], *, worth: float = 1.0, output: int = 256) -> SyntheticTraces:
    """Requests of drafters whose survival is `worth` of the usual one."""
    made = {name: SyntheticDrafter(tuple(worth * each for each in SURVIVAL[name])) for name in drafters}
    return SyntheticTraces(made, output_tokens=output)


@dataclass(frozen=True)
class Frozen:
    """Of one cell: the share of the best fixed setting's speed that the policy loses (below 0: gains), and guesses
    drafted and verified a round, where they were counted."""

    regret: float
    drafted: float = 0.0
    admitted: float = 0.0


def simulated(
    kind: str, drafters: str, users: int, *, objective: Objective = THROUGHPUT, change: str = "", rounds: int = 0
) -> Frozen:
    names = DRAFTERS[drafters]
    source: TraceSource = traces(names)
    if change:
        source = ChangingTraces(source, traces(names, worth=0.01), again=change == "drifts")
    setting = ReplaySetting(source, machine(kind, names), objective=objective)
    fixed = dict.fromkeys(form.format(name=name) for name in names for form in FIXED)
    deepest = source.max_depths()
    fitting = [each for each in fixed if each == "none" or int(each.split(":")[2]) <= deepest[each.split(":")[1]]]
    workload = Workload(concurrency=users, rounds=rounds or max(4_000, 48 * users))
    points: list[ReplayPoint] = compare(setting, [*fitting, "adaptive"], [workload])
    [point] = [each for each in points if each.policy == "adaptive"]
    return Frozen(point.regret, point.drafted, point.admitted)


def wrong(cell: Cell, belief: str) -> Frozen:
    """Of more runs where the machine changes: one in five was stuck with a wrong belief."""
    return Frozen(fmean(losses(cell, belief, seeds=8 if belief in CHANGES and cell.users > 1 else 2)))


def cells() -> dict[str, Callable[[], Frozen]]:
    """What is simulated, by name."""
    found: dict[str, Callable[[], Frozen]] = {}
    for kind in MACHINES:
        for drafters in DRAFTERS:
            for users in LOADS if drafters != "several" else LOADS[::2]:
                found[f"load {kind} {drafters} {users}"] = partial(simulated, kind, drafters, users)
        for goal in ("latency", "slo:20ms", "slo:8ms"):
            for users in (1, 16, 64, 256):
                given = parse_objective(goal)
                found[f"objective {kind} {goal} {users}"] = partial(simulated, kind, "mtp", users, objective=given)
        for change in ("collapses", "drifts"):
            for users in (1, 8, 64):
                for drafters in ("mtp", "several"):
                    rounds = max(12_000, 200 * users)
                    name = f"{change} {kind} {drafters} {users}"
                    found[name] = partial(simulated, kind, drafters, users, change=change, rounds=rounds)
    for belief in (*WRONG, *CHANGES):
        for kind, drafter, users in (("processor", "lookup", 4), ("processor", "mtp", 1), ("accelerator", "mtp", 64)):
            found[f"prices {kind} {drafter} {users} {belief}"] = partial(wrong, Cell(kind, drafter, users), belief)
    return found


def frozen() -> dict[str, Frozen]:
    return {name: Frozen(**values) for name, values in json.loads(FROZEN.read_text()).items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    chosen = {name: cell for name, cell in cells().items() if options.only in name}
    before = frozen() if FROZEN.exists() else {}
    begun, found, worse = time.monotonic(), dict(before) if options.only else {}, 0
    with ProcessPoolExecutor(2) as pool:
        pending = {name: pool.submit(cell) for name, cell in chosen.items()}
        for name, each in pending.items():
            now, was = each.result(), before.get(name)
            found[name] = now
            worse += was is not None and now.regret > was.regret + SLACK
            told = "" if was is None else f"  frozen {100 * was.regret:6.2f} %"
            print(f"{name:48} {100 * now.regret:6.2f} %{told}", flush=True)
    print(
        f"{len(chosen)} cells in {time.monotonic() - begun:.0f} s, {worse} worse than frozen by more than {SLACK:.1%}"
    )
    if options.write:
        rounded = {name: {k: round(v, 6) for k, v in vars(each).items()} for name, each in found.items()}
        FROZEN.write_text(json.dumps(rounded, indent=0) + "\n")
    return int(worse > 0 and not options.write)


if __name__ == "__main__":
    sys.exit(main())
