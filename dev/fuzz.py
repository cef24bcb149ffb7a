"""Searches for bytes that a reader of wager's answers otherwise than by an answer or a WagerError, guided by coverage.

    python dev/fuzz.py gguf --minutes 10 --seed 7
    python dev/fuzz.py gguf fuzz-faults/gguf/crash-...       # one input again, with its traceback
    python dev/fuzz.py --list

Needs atheris (pip install atheris). A run begins with the corpus in tests/fuzz/corpus/TARGET, which it does not change,
and with models that it builds. Bytes that raise something else, take longer than 10 s or more than 2 GiB are kept in
--keep, and the run exits with a status other than 0. tests/fuzz/test_corpus.py reads the corpus in every run of the
tests: put what was found there, as short as it can be made.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests" / "fuzz"
sys.path.insert(0, str(TESTS))
SECONDS, MEBIBYTES = 10, 2048
"""The most that one input may take."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?")
    parser.add_argument("input", nargs="?", type=Path, help="read this file only")
    parser.add_argument("--list", action="store_true", help="print the targets")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, help="begin from these files (default: tests/fuzz/corpus/TARGET)")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-faults"), help="folder for what is found")
    options = parser.parse_args()
    try:
        import atheris
    except ImportError:
        raise SystemExit("Fuzzing needs atheris: pip install atheris") from None
    with atheris.instrument_imports(include=["wager", "tomllib"]):
        import targets
    if options.list or options.target not in targets.TARGETS:
        print("\n".join(targets.TARGETS))
        raise SystemExit(0 if options.list else f"There is no target {options.target}.")
    folder = targets.scratch()
    try:
        if options.input:
            targets.call(options.target, options.input.read_bytes(), folder)
        else:
            sys.exit(apart(lambda: search(options, folder)))
    finally:
        shutil.rmtree(folder)


def apart(work: Callable[[], None]) -> int:
    """The exit status of a process that does it: libFuzzer ends its process at once, and nothing is removed then."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return abs(status)


def search(options: argparse.Namespace, folder: Path) -> None:
    import atheris
    import targets

    logging.disable(logging.CRITICAL)  # warnings about what is read
    target, work = targets.TARGETS[options.target], folder / "corpus"
    read, seeds = folder / "read", folder / "seeds"
    for path in (work, read, seeds):
        path.mkdir()
    for number, data in enumerate(target.seeds(targets.models(read))):
        (seeds / str(number)).write_bytes(data)
    found = options.keep / options.target
    found.mkdir(parents=True, exist_ok=True)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if target.mutate is not None and rng.random() < 0.5:
            try:
                changed = target.mutate(data, rng)
            except Exception:  # it is not a good file any more
                changed = b""
            if 0 < len(changed) <= most:
                return changed
        return bytes(atheris.Mutate(data, most))

    given = options.corpus or TESTS / "corpus" / options.target
    arguments = [
        sys.argv[0],
        str(work),
        str(seeds),
        *([str(given)] if given.is_dir() else []),
        f"-seed={options.seed}",
        f"-max_total_time={round(60 * options.minutes)}",
        f"-max_len={target.longest}",
        f"-timeout={SECONDS}",
        f"-rss_limit_mb={MEBIBYTES}",
        f"-artifact_prefix={found}/",
        "-print_final_stats=1",
        "-use_value_profile=0",
    ]
    atheris.Setup(arguments, lambda data: targets.call(options.target, data, read), custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
