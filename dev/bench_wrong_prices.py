"""What the adaptive policy loses against the best fixed depth on machines whose prices it believes wrongly: the whole
table of tests/economics/test_wrong_prices.py, by machine, drafter and users. Takes minutes."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "economics"))

from test_wrong_prices import CHANGES, CURVES, DRAFTERS, WRONG, Cell, loss, loss_after_change


def main() -> None:
    cells = [Cell(machine, drafter, users) for machine in CURVES for drafter in DRAFTERS for users in (1, 4, 16, 64)]
    print("loss, %".ljust(20), *(f"{cell.machine[:4]}/{cell.drafter[:3]}/{cell.users}".rjust(11) for cell in cells))
    for belief in WRONG:
        print(belief.ljust(20), *(f"{100 * loss(cell, belief):11.1f}" for cell in cells), flush=True)
    print("scatter 10 %".ljust(20), *(f"{100 * loss(cell, 'right', noise=0.1):11.1f}" for cell in cells), flush=True)
    for change in CHANGES:
        print(change.ljust(20), *(f"{100 * loss_after_change(cell, change):11.1f}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
