"""SIGTERM and SIGHUP end a command as Ctrl-C does: by an exception, so that its temporary files and children go too."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
_PATIENCE_S = 5.0
"""How long the removal of files and children may take before a second signal ends the process at once."""


class _Ended(BaseException):
    """A signal came. Not an Exception nor a SystemExit: nothing on the way takes it for something else."""


def ends_in_order(command: Callable[[], int]) -> int:
    """Run `command` and return its exit code, or 128 + the number of the signal that ended it.

    A signal that the process was started to ignore, as under nohup, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():  # Python leaves signals to the main thread
        return command()
    received: list[int] = []
    patience = float("inf")

    def end(number: int, _frame: Any) -> None:
        nonlocal patience
        if not received:
            received.append(number)
            patience = time.monotonic() + _PATIENCE_S
            raise _Ended
        if time.monotonic() > patience:  # not before: `timeout` sends its signal twice, and the files are being removed
            os._exit(128 + number)

    taken = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, end)
    try:
        code = command()
    except (_Ended, OSError):  # OSError: of a progress bar on a terminal that hung up
        if not received:
            raise
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
    if received:
        _report(received[0])
        return 128 + received[0]
    return code


def _report(number: int) -> None:
    """One line on stderr. A terminal that hung up takes no more output: it is replaced, or Python complains at exit."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            if stream is sys.stderr:
                stream.write("\n" + ("terminated" if number == signal.SIGTERM else "hung up") + "\n")
            try:
                stream.flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
