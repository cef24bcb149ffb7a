"""Which call an engine is in, so that one which would corrupt its state is refused by name.

A second thread is refused while the first is in a call. In one thread, calls meet where the engine calls back. A
drafter or policy, within a step, may call nothing; `on_step` and `on_output` find the engine between two steps, where
requests may be added and aborted, but no step can be taken.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from wager.errors import UsageError

_ALLOWED_WITHIN = {"step": ("generate",), "generate": (), "on_output": ("generate",), "on_step": ("step",)}
_BETWEEN_STEPS = ("generate", "on_output", "on_step")


class CallGuard:
    """The calls that an engine is in, outermost first."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # held by the thread whose calls they are
        self._calls: list[str] = []
        self._thread = 0

    def call(self, name: str) -> AbstractContextManager[None]:
        """For the duration of one call of the engine, or of a callback. UsageError if it is not possible now."""
        return _Call(self, name)

    def begin(self, name: str) -> None:
        if not self._lock.acquire(blocking=False):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            raise UsageError(
                f"Thread {threading.current_thread().name!r} called Engine.{name} while thread "
                f"{names.get(self._thread, self._thread)!r} was using the engine.",
                "One thread at a time may use an engine; a wager.LLM serves several.",
            )
        if not self._calls:
            self._thread = threading.get_ident()
        elif self._calls[-1] not in _ALLOWED_WITHIN.get(name, _BETWEEN_STEPS):
            self._lock.release()
            raise UsageError(
                f"Engine.{name} was called within {self._calls[-1]} of the same engine.",
                "Callbacks on_step and on_output may add and abort requests; steps must wait for their return.",
            )
        self._calls.append(name)

    def end(self) -> None:
        self._calls.pop()
        self._lock.release()


class _Call(AbstractContextManager[None]):
    """A `with` block of its own class: contextlib's take three times as long, and every step has two."""

    __slots__ = ("_guard", "_name")

    def __init__(self, guard: CallGuard, name: str) -> None:
        self._guard, self._name = guard, name

    def __enter__(self) -> None:
        self._guard.begin(self._name)

    def __exit__(self, *_: object) -> None:
        self._guard.end()
