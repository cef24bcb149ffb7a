"""Runs a program to its end; when the caller is interrupted, the program and all its children are ended first."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

_POLL_S = 0.1


def run(
    command: Sequence[str],
    *,
    output: Path,
    errors: bool,
    environment: Mapping[str, str],
    report: Callable[[], None],
) -> int:
    """The exit status of `command`; what it prints goes to the file `output`, with `errors` also what it prints on
    stderr. `report` is called several times a second. However this function ends, the program has ended.

    It is started and ended in a thread because signals interrupt only the main one: there is no instant at which it
    runs and nobody would end it.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        try:
            running = threads.submit(
                _supervise, command, output, subprocess.STDOUT if errors else None, environment, stop
            )
            while not running.done():
                report()
                wait([running], timeout=_POLL_S)
            report()
            return running.result()
        finally:
            stop.set()


def _supervise(
    command: Sequence[str], output: Path, stderr: int | None, environment: Mapping[str, str], stop: threading.Event
) -> int:
    """Run a program in a process group of its own, to its end or until `stop` is set."""
    with output.open("wb") as stdout:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            start_new_session=True,
        )
    while process.poll() is None and not stop.wait(_POLL_S / 2):
        pass
    if process.poll() is None:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)  # downloads have nothing to put in order: the caller removes files
        else:
            process.kill()
        process.wait()
    return process.returncode
