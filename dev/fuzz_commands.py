"""Compose command lines, run them in this process, and print those that end badly: `--minutes 60 --seed 7`.

Every option of every command comes first, alone, with several values; then random combinations until the time is up.
Exit code 1 if any ended badly. No network is used, and results go to a temporary folder.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import resource
import shlex
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "fuzz")]

MEMORY = 12 << 30
"""Bytes of address space: an absurd allocation fails rather than swaps."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--values", type=int, default=3, help="values of each option alone")
    parser.add_argument("--count", type=int, default=0, help="stop after that many command lines")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds of one command line")
    parser.add_argument("--only", default="", help="one command alone")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with tempfile.TemporaryDirectory() as folder:
        isolate(Path(folder))
        return fuzz(options, Path(folder) / "work")


def isolate(folder: Path) -> None:
    """No network, no cache of the user's."""
    nowhere = "http://127.0.0.1:9"
    os.environ |= {
        "WAGER_CACHE": str(folder / "cache"),
        "HF_HOME": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
        "HF_ENDPOINT": nowhere,
        "PIP_INDEX_URL": nowhere,
        "PIP_RETRIES": "0",
        "NO_COLOR": "1",
    }
    (folder / "work").mkdir()
    os.chdir(folder / "work")


def fuzz(options: argparse.Namespace, folder: Path) -> int:
    from command_lines import Composer
    from judging import complaints, run

    composer, end, bad, counts = Composer(options.seed, folder), time.monotonic() + 60 * options.minutes, 0, {}
    waiting = composer.every_option(most=options.values)
    alone = len(waiting)
    while time.monotonic() < end and not (options.count and sum(counts.values()) >= options.count):
        line = waiting.pop() if waiting else composer.line()
        if options.only and line.verb != options.only:
            continue
        faulthandler.dump_traceback_later(4 * options.limit, exit=True)
        begin = time.monotonic()
        ending = run(line, limit=options.limit)
        faulthandler.cancel_dump_traceback_later()
        seconds = time.monotonic() - begin
        counts[ending.code] = counts.get(ending.code, 0) + 1
        found = complaints(line, ending)
        if found:
            bad += 1
            call = " ".join(shlex.quote(word if len(word) < 300 else word[:300] + "…") for word in line.arguments)
            print(f"--- wager {call}   (stdin {line.stdin!r}; {seconds:.1f} s; exit code {ending.code})")
            print("\n".join(found), ending.err[-1000:], sep="\n", flush=True)
    total = sum(counts.values())
    print(f"{total} command lines ({alone - len(waiting)} of one option), exit codes {counts}: {bad} ended badly.")
    return 1 if bad or (waiting and not options.count) else 0


if __name__ == "__main__":
    sys.exit(main())
