"""Opens damaged model files for as long as wanted: GGUF, safetensors, config.json, tokenizers, chat templates.

    python dev/fuzz_files.py --minutes 60 --seed 7 --keep faults/
    python dev/fuzz_files.py --only gguf:123456

A mutant is determined by its kind and number; numbers begin at the seed times 10^9. Faults are printed with kind and
number, and their files are kept in the folder. Exits with 1 if there was one.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fuzz"))

import watchdog
from watchdog import KINDS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS), help="separated by commas")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-faults"), help="folder for the files of faults")
    parser.add_argument("--only", help="KIND:NUMBER, one mutant again")
    options = parser.parse_args()
    options.keep.mkdir(parents=True, exist_ok=True)
    end, counts = time.monotonic() + 60 * options.minutes, Counter[tuple[str, str]]()
    for finding in watchdog.run(_mutants(options, end), options.keep):
        counts[finding.kind, finding.outcome] += 1
        if finding.outcome == "fault" or options.only:
            print(f"{finding.outcome}: {finding}", flush=True)
    for (kind, outcome), count in sorted(counts.items()):
        print(f"{kind:12} {outcome:12} {count}")
    return int(any(outcome == "fault" for _, outcome in counts))


def _mutants(options: argparse.Namespace, end: float) -> Iterator[tuple[str, int]]:
    if options.only:
        kind, _, number = options.only.partition(":")
        yield kind, int(number)
        return
    for number in itertools.count(options.seed * 10**9):
        for kind in options.kinds.split(","):
            if time.monotonic() > end:
                return
            yield kind, number


if __name__ == "__main__":
    sys.exit(main())
