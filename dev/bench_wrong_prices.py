"""What the adaptive policy loses against the best fixed depth on machines whose prices it believes wrongly: the whole
table of tests/economics/test_wrong_prices.py, by machine, drafter and users, and the cells above GOAL with standard
errors. `python dev/bench_wrong_prices.py [RUNS of each cell]`; takes minutes, in two processes."""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean, stdev

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "economics"))

from test_wrong_prices import CHANGES, CURVES, DRAFTERS, SEEDS, WRONG, Cell, losses

GOAL = 0.02
SCATTER = {"scatter 10 %": 0.1, "scatter 15 %": 0.15}


def cell_losses(cell: Cell, row: str, runs: int) -> list[float]:
    if row in SCATTER:
        return losses(cell, "right", noise=SCATTER[row], seeds=runs)
    return losses(cell, row, seeds=runs)


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else SEEDS
    cells = [Cell(machine, drafter, users) for machine in CURVES for drafter in DRAFTERS for users in (1, 4, 16, 64)]
    names = [f"{cell.machine[:4]}/{cell.drafter[:3]}/{cell.users}" for cell in cells]
    print("mean loss, %".ljust(20), *(name.rjust(11) for name in names))
    above, count = [], 0
    with ProcessPoolExecutor(2) as pool:
        rows = {
            row: [pool.submit(cell_losses, cell, row, runs) for cell in cells] for row in (*WRONG, *SCATTER, *CHANGES)
        }
        for row, pending in rows.items():
            lost = [each.result() for each in pending]
            print(row.ljust(20), *(f"{100 * mean(shares):11.1f}" for shares in lost), flush=True)
            above += [(name, row, shares) for name, shares in zip(names, lost, strict=True) if mean(shares) > GOAL]
            count += len(lost)
    print(f"{len(above)} of {count} cells above {GOAL:.0%}, {runs} runs of each" + (":" if above else ""))
    for name, row, shares in above:
        error = stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else float("nan")
        print(f"  {name} {row}: {100 * mean(shares):.1f} +- {100 * error:.1f}")


if __name__ == "__main__":
    main()
