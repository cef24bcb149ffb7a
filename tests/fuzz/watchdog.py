"""Runs mutants in a process of their own with a time limit for each, so that a hang or a crash is a fault too.

A fault is one of: an exception that is no WagerError, numbers that are not finite, no end within LIMIT seconds, a
process that died.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

KINDS = ("gguf", "safetensors", "config", "shape", "tokenizer", "template")
LIMIT = 60.0
"""Seconds that opening and answering may take for one mutant, on a machine that is busy with other things; undamaged
models take a hundredth of one."""
_START = 120.0
_HERE = Path(__file__).parent
WORKER = _HERE / "worker.py"


@dataclass(frozen=True)
class Finding:
    """What became of one mutant; `outcome` is "typed error", "answer" or "fault"."""

    kind: str
    number: int
    outcome: str
    detail: str
    done: str

    def __str__(self) -> str:
        return f"{self.kind} {self.number} ({self.done}): {self.detail}"


class _Worker:
    """One process of worker.py with its own folder below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lost, self.slow = Path(tempfile.mkdtemp(dir=folder)), False, False
        source = _HERE.parents[1] / "src"
        environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{_HERE}", "OMP_NUM_THREADS": "1"}
        with (self.folder / "stderr.txt").open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(WORKER), str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                bufsize=0,
            )
        ready = self.answer(_START)
        undamaged = json.loads(ready)["ready"] if ready else []
        wrong = [entry for entry in undamaged if entry[1] != "answer"]
        if not undamaged or wrong:
            raise RuntimeError(f"undamaged models do not answer: {wrong} {self._stderr()}")

    def ask(self, kind: str, number: int) -> Finding:
        pipe(self.process.stdin).write(f"{kind} {number}\n".encode())
        pipe(self.process.stdin).flush()
        made, line = self.answer(LIMIT), self.answer(LIMIT)
        done = json.loads(made)["done"] if made else "?"
        if line:
            found = json.loads(line)
            return Finding(kind, number, found["outcome"], found["detail"], done)
        self.lost = True
        if self.slow:
            return Finding(kind, number, "fault", f"no end within {LIMIT} s", done)
        return Finding(kind, number, "fault", f"the process died with {self.process.wait()}: {self._stderr()}", done)

    def answer(self, limit: float) -> bytes:
        """A line from the worker; nothing if it takes longer than `limit` or ended."""
        readable, _, _ = select.select([self.process.stdout], [], [], limit)
        self.slow = not readable
        return pipe(self.process.stdout).readline() if readable else b""

    def end(self, *, keep: bool) -> None:
        self.process.kill()
        self.process.wait()
        for end in (self.process.stdin, self.process.stdout):
            pipe(end).close()
        shutil.rmtree(self.folder / "bases", ignore_errors=True)
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _stderr(self) -> str:
        return (self.folder / "stderr.txt").read_text(errors="replace")[-2000:]


def pipe(end: IO[bytes] | None) -> IO[bytes]:
    if end is None:
        raise RuntimeError("the worker has no pipe")
    return end


def run(mutants: Iterable[tuple[str, int]], folder: Path) -> Iterator[Finding]:
    """Every mutant's finding, in order. Faulty mutants stay in folders below `folder`."""
    worker, faulty = _Worker(folder), False
    try:
        for kind, number in mutants:
            finding = worker.ask(kind, number)
            faulty = faulty or finding.outcome == "fault"
            yield finding
            if worker.lost:
                worker.end(keep=True)
                worker, faulty = _Worker(folder), False
    finally:
        worker.end(keep=faulty)


def summary(findings: Iterable[Finding]) -> str:
    """Counts by kind and outcome."""
    counts = Counter((finding.kind, finding.outcome) for finding in findings)
    return ", ".join(f"{kind}: {count} {outcome}s" for (kind, outcome), count in sorted(counts.items()))
