"""What the adaptive policy loses against the best fixed depth on machines whose prices it believes wrongly: the whole
table of tests/economics/test_wrong_prices.py, by machine, drafter and users, and the cells above GOAL with standard
errors. Takes minutes, in two processes.

    python dev/bench_wrong_prices.py [--runs 3] [--users 1,4,16,64] [--cells TEXT] [--beliefs NAME,...] [--drifting]

`--cells` and `--beliefs` choose; `--drifting` replays requests whose drafts are good and bad in turns, against the best
fixed depth over all of them, in place of the table."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from statistics import mean, stdev

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "economics"))

from policy_goldens import ChangingTraces
from test_wrong_prices import CHANGES, CURVES, DEPTH, DRAFTERS, EVEN, SEEDS, WRONG, Cell, losses, steps_for, surface

from wager.simulation.comparison import ReplaySetting, compare
from wager.simulation.server import Workload
from wager.simulation.traces import SyntheticDrafter, SyntheticTraces

GOAL = 0.02
SCATTER = {"scatter 10 %": 0.1, "scatter 15 %": 0.15}
WORTH = 0.4
"""Survival of a drafter's bad times, as a share of that of its good ones."""


def cell_losses(cell: Cell, row: str, runs: int) -> list[float]:
    if row in SCATTER:
        return losses(cell, "right", noise=SCATTER[row], seeds=runs)
    return losses(cell, row, seeds=runs)


def drifting_losses(cell: Cell, row: str, runs: int) -> list[float]:
    """Of whole runs, the steps in which prices and drifts are learned among them."""
    good = DRAFTERS[cell.drafter]
    bad = SyntheticDrafter(tuple(WORTH * each for each in good.survival), **EVEN)
    truth, believed = surface(cell.machine, cell.drafter), surface(cell.machine, cell.drafter, **WRONG[row])
    names, found = ["none", *(f"fixed:{cell.drafter}:{depth}" for depth in range(1, DEPTH + 1)), "adaptive"], []
    for seed in range(runs):
        turns = [SyntheticTraces({cell.drafter: each}, output_tokens=256, seed=seed) for each in (good, bad)]
        setting = ReplaySetting(ChangingTraces(*turns, again=True), truth, believed=believed)
        workload = Workload(concurrency=cell.users, rounds=2 * cell.users * steps_for(cell.users), seed=seed)
        found += [each.regret for each in compare(setting, names, [workload]) if each.policy == "adaptive"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=SEEDS)
    parser.add_argument("--users", default="1,4,16,64")
    parser.add_argument("--cells", default="", help="those whose MACHINE/DRAFTER/USERS has this text")
    parser.add_argument("--beliefs")
    parser.add_argument("--drifting", action="store_true")
    args = parser.parse_args()
    every = [Cell(*each) for each in product(CURVES, DRAFTERS, map(int, args.users.split(",")))]
    cells = {f"{each.machine}/{each.drafter}/{each.users}": each for each in every}
    cells = {name: each for name, each in cells.items() if args.cells in name}
    rows = args.beliefs.split(",") if args.beliefs else [*WRONG, *([] if args.drifting else [*SCATTER, *CHANGES])]
    measure = drifting_losses if args.drifting else cell_losses
    print("mean loss, %".ljust(20), *(name.rjust(14) for name in cells))
    above, count = [], 0
    with ProcessPoolExecutor(2) as pool:
        pending = {row: [pool.submit(measure, cell, row, args.runs) for cell in cells.values()] for row in rows}
        for row, each in pending.items():
            lost = [future.result() for future in each]
            shown = (
                f"{100 * mean(shares):.1f}".rjust(max(14, len(name))) for name, shares in zip(cells, lost, strict=True)
            )
            print(row.ljust(20), *shown, flush=True)
            above += [(name, row, shares) for name, shares in zip(cells, lost, strict=True) if mean(shares) > GOAL]
            count += len(lost)
    print(f"{len(above)} of {count} cells above {GOAL:.0%}, {args.runs} runs of each" + (":" if above else ""))
    for name, row, shares in above:
        error = stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else float("nan")
        print(f"  {name} {row}: {100 * mean(shares):.1f} +- {100 * error:.1f}")


if __name__ == "__main__":
    main()
