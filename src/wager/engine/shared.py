"""One engine for several threads: they take turns, and a step that any of them takes serves the requests of all."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager

from wager.engine.core import Engine
from wager.errors import ClosedError
from wager.types import OutputDelta, Request

DeltaSink = Callable[[OutputDelta], None]
"""Receives the deltas of one request, in whichever thread takes the step."""


class SharedEngine:
    """Passes every delta to the sink of its request. Once closed, everything raises ClosedError but close, drop and
    abort."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._sinks: dict[str, DeltaSink] = {}  # by request id
        self._lock = threading.RLock()  # one thread at a time adds, steps or aborts
        self._turns = 0  # that the thread is in, one within the other
        self._turn = _Turn(self)
        self._dropped: deque[str] = deque()  # ids of requests that nobody waits for, to be aborted

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise ClosedError("This LLM is closed.", "Create a new one.")
        return self._engine

    def turn(self) -> AbstractContextManager[None]:
        """This thread's turn to use the engine. Requests that were dropped meanwhile are aborted at its end: a stream's
        finalizer may run anywhere, even within a step."""
        return self._turn

    def begin_turn(self) -> None:
        self._lock.acquire()
        self._turns += 1

    def end_turn(self) -> None:
        try:
            while self._turns == 1 and self._dropped and self._engine is not None:
                self._engine.abort(self._dropped.popleft())
        finally:
            self._turns -= 1
            self._lock.release()

    def add(self, request: Request, sink: DeltaSink) -> None:
        """Give a request to the engine; `sink` is called with its deltas until all its choices have ended."""
        with self.turn():
            self.engine.add(request)
            choices = request.params.n

            def take(delta: OutputDelta) -> None:
                nonlocal choices
                sink(delta)
                choices -= delta.finish_reason is not None
                if not choices:
                    self._sinks.pop(request.id, None)

            self._sinks[request.id] = take

    def runs(self, request_id: str) -> bool:
        """Whether a request was added and has neither ended nor been dropped."""
        return request_id in self._sinks

    def advance(self, request_ids: Collection[str]) -> bool:
        """One step, unless all of these requests have ended; whether it was taken."""
        self.begin_turn()  # another thread's step, or `close`, may have ended them
        try:
            for request_id in request_ids:
                if request_id in self._sinks:
                    self._step()
                    return True
            return False
        finally:
            self.end_turn()

    def abort(self, request_id: str) -> None:
        """End a request; its last deltas come with the next step."""
        with self.turn():
            if self.runs(request_id):
                self.engine.abort(request_id)

    def drop(self, request_id: str) -> None:
        """End a request and discard its deltas; if this thread has its turn already, at the end of that."""
        with self.turn():
            if self._sinks.pop(request_id, None):
                self._dropped.append(request_id)

    def close(self) -> None:
        """End every request with finish_reason "abort" and release the engine. May be repeated."""
        with self.turn():
            if self._engine is None:
                return
            try:
                for request_id in list(self._sinks):
                    self._engine.abort(request_id)
                while self._sinks:
                    self._step()
            finally:
                self._engine = None
                self._sinks.clear()

    def _step(self) -> None:
        engine = self._engine or self.engine  # which says that it is closed
        for delta in engine.step():
            sink = self._sinks.get(delta.request_id)
            if sink:
                sink(delta)
        if not self._sinks:
            self.engine.check()


class _Turn(AbstractContextManager[None]):
    """A `with` block of its own class: contextlib's take three times as long, and every step has one."""

    __slots__ = ("_shared",)

    def __init__(self, shared: SharedEngine) -> None:
        self._shared = shared

    def __enter__(self) -> None:
        self._shared.begin_turn()

    def __exit__(self, *_: object) -> None:
        self._shared.end_turn()
