"""The event loop of the load client: uvloop, which takes half of asyncio's time, where it is installed.

Ctrl-C, SIGTERM and SIGHUP cancel what runs in it, and are then raised again: uvloop drops the exceptions of Python's
own handlers.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

_ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


def run(work: Coroutine[Any, Any, T]) -> tuple[T, str]:
    """The result of `work`, and the name of the loop that it ran in."""
    loop_factory = None
    with suppress(ImportError):  # there is none for Windows
        import uvloop

        loop_factory = uvloop.new_event_loop
    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in _ENDING} if in_main else {}
    received: list[int] = []
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            watched = [number for number, taken in before.items() if taken is not signal.SIG_IGN]
            result = runner.run(_cancelled_by(watched, received, work))
    except BaseException:  # what was cancelled may end with another error
        if not received:
            raise
    finally:
        for number, taken in before.items():
            signal.signal(number, taken)
    if received:
        signal.raise_signal(received[0])  # which ends the command in order
    return result, "uvloop" if loop_factory else "asyncio"


async def _cancelled_by(numbers: list[int], received: list[int], work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; a signal of these numbers is noted and cancels it."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)

    def end(number: int) -> None:
        received.append(number)
        task.cancel()

    with suppress(NotImplementedError):  # on Windows
        for number in numbers:
            loop.add_signal_handler(number, end, number)
    return await task
