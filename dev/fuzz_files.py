"""Opens damaged model files for as long as wanted: GGUF, safetensors, config.json, tokenizers, chat templates.

    python dev/fuzz_files.py --minutes 60 --seed 7 --keep faults/
    python dev/fuzz_files.py --only gguf:123456

A mutant is determined by its kind and number; numbers begin at the seed times 10^9. Faults are printed with kind and
number, and their files are kept in the folder; a mutant that does not end ends the search with its stack, and its file
is the latest one there. Exits with 1 if there was one.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fuzz"))

import fuzz_models
from examine import FAULT, MUTANTS, examine_mutant

MEMORY = 6 << 30
"""Bytes of address space that it may have."""

LIMIT = 60.0
"""Seconds that one mutant may take; undamaged models take a hundredth of one."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(MUTANTS), help="separated by commas")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-faults"), help="folder for the files of faults")
    parser.add_argument("--only", help="KIND:NUMBER, one mutant again")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    options.keep.mkdir(parents=True, exist_ok=True)
    end, counts = time.monotonic() + 60 * options.minutes, Counter[tuple[str, str]]()
    with tempfile.TemporaryDirectory() as folder:
        models = fuzz_models.build(Path(folder) / "bases")
        for kind, number in _mutants(options, end):
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            found, done = examine_mutant(kind, number, models, options.keep)
            faulthandler.cancel_dump_traceback_later()
            counts[kind, found.outcome] += 1
            if found.outcome == FAULT or options.only:
                print(f"{found.outcome}: {kind} {number} ({done}): {found.detail}", flush=True)
    for (kind, outcome), count in sorted(counts.items()):
        print(f"{kind:12} {outcome:12} {count}")
    return int(any(outcome == FAULT for _, outcome in counts))


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
