"""A drafter that works in a process of its own, which is killed while it answers: for proofs."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence

from wager.draft.history import HistoryDrafter, TargetOracle
from wager.types import Draft, DraftRequest

_LATEST = 6
"""Calls after which the process has been killed."""

_PROGRAM = """
import json, os, signal, sys
for line in sys.stdin:
    request = json.loads(line)
    answer = json.dumps(request["tokens"]) + "\\n"
    if request["killed"]:
        sys.stdout.write(answer[: len(answer) // 2])
        sys.stdout.flush()
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
    sys.stdout.write(answer)
    sys.stdout.flush()
"""
"""Answers with the guesses that it is given; at the end with half of them, and then it is no more."""


class KilledDrafter(HistoryDrafter):
    """Asks a process for its guesses, with an oracle the target's tokens and without one the last known token; the
    process is killed in the middle of an answer, which the drafter notices by its end."""

    name = "killed"

    def __init__(self, *, oracle: TargetOracle | None = None) -> None:
        super().__init__(oracle=oracle)
        self._process: subprocess.Popen[str] | None = None
        self._left: int | None = None

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        if self._left is None:
            self._left = random.Random(requests[0].seq_id).randrange(1, _LATEST)
        self._left -= 1
        return super().propose(requests)

    def _draft(self, request: DraftRequest) -> Draft:
        guesses = (self._next_tokens(request) or self.known[request.seq_id][-1:])[: request.depth]
        tokens = self._ask(guesses, killed=self._left == 0)
        return Draft.chain(request.seq_id, tokens, drafter=self.name, scores=[0.9] * len(tokens))

    def _ask(self, tokens: Sequence[int], *, killed: bool) -> list[int]:
        if self._process is None:
            command = [sys.executable, "-I", "-S", "-c", _PROGRAM]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        to, answers = self._process.stdin, self._process.stdout
        if to is None or answers is None:
            raise RuntimeError("its process has no pipes")
        to.write(json.dumps({"tokens": list(tokens), "killed": killed}) + "\n")
        to.flush()
        line = answers.readline()
        if not line.endswith("\n"):
            raise RuntimeError(f"its process ended with {self._stop()} within an answer")
        found: list[int] = json.loads(line)
        return found

    def _stop(self) -> int | None:
        """End the process, if there is one; its exit status."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        process.communicate()
        return process.returncode

    def __del__(self) -> None:
        self._stop()
