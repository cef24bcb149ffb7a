"""A thread that makes calls one after the other, in the order in which they were given to it.

What it calls needs no locks. If a call raises, none is made after it and every wait raises the same; if the thread
shows no sign of life for too long, waiting ends with StalledError. It is a daemon and holds its own state alone, so
whoever gave it calls can be collected, which ends it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar, cast

T = TypeVar("T")

_JOIN_S = 2.0  # seconds that closing waits for the calls that were given


class StalledError(RuntimeError):
    """A call takes so long that it is given up."""


class PendingCall(Generic[T]):
    """A call that was given to the thread."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.done = threading.Event()
        self._call: Callable[[], T] | None = call
        self._result: T | None = None

    def make(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            self._result = call()

    @property
    def result(self) -> T:
        """What it returned, once it is done."""
        return cast(T, self._result)


class _Progress:
    """What the thread and those who wait for it share."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.last_sign = time.monotonic()


class OrderedCalls:
    """One thread, called `name`; it counts as stalled after `patience_s` seconds without a sign of life."""

    def __init__(self, name: str, *, patience_s: float) -> None:
        self._patience_s = patience_s
        self._calls: SimpleQueue[PendingCall[object] | None] = SimpleQueue()
        self._progress = _Progress()
        thread = threading.Thread(target=_serve, args=(self._calls, self._progress), name=name, daemon=True)
        self.thread = thread
        self._finalizer = weakref.finalize(self, _end, self._calls, thread)
        thread.start()

    def sign(self) -> Callable[[], None]:
        """A function for long calls to call now and then: the thread is at work."""
        return _signer(self._progress)

    def give(self, call: Callable[[], T]) -> PendingCall[T]:
        """Make this call after all others; never waits."""
        pending = PendingCall(call)
        self._calls.put(cast("PendingCall[object]", pending))
        return pending

    def wait(self, pending: PendingCall[T]) -> T:
        """What the call returns. Raises what it, or one before it, raised; StalledError if the thread is stalled."""
        left = self._patience_s
        while not pending.done.wait(left):
            left = self._progress.last_sign + self._patience_s - time.monotonic()
            if left <= 0:
                raise StalledError(f"it has not answered for {self._patience_s:g} s")
        if self._progress.error is not None:
            raise self._progress.error
        return pending.result

    def close(self) -> None:
        """End the thread after the calls that it was given; waits for them a little. May be repeated."""
        self._finalizer()


def _serve(calls: SimpleQueue[PendingCall[object] | None], progress: _Progress) -> None:
    while (pending := calls.get()) is not None:
        progress.last_sign = time.monotonic()
        if progress.error is None:
            try:
                pending.make()
            except BaseException as error:  # raised where its result is waited for
                progress.error = error
        pending.done.set()
        del pending  # what it refers to may go while the next call is awaited


def _end(calls: SimpleQueue[PendingCall[object] | None], thread: threading.Thread) -> None:
    calls.put(None)
    if thread is not threading.current_thread():
        thread.join(_JOIN_S)


def _signer(progress: _Progress) -> Callable[[], None]:
    def sign() -> None:
        progress.last_sign = time.monotonic()

    return sign
