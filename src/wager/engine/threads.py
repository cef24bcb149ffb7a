"""One engine for several threads, and an engine with a thread of its own.

SharedEngine: threads take turns, and a step that any of them takes serves the requests of all. EngineThread: for
callers that must not wait for a step, such as an event loop; requests are added and aborted between two steps, and the
deltas of a step are handed over in one call, in that thread.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from wager.engine.core import Engine
from wager.errors import ClosedError, WagerError
from wager.types import OutputDelta, Request, StepRecord

DeltaSink = Callable[[OutputDelta], None]
"""Receives the deltas of one request, in whichever thread takes the step."""


@dataclass(slots=True, eq=False)
class _Sink:
    """Where the deltas of a request go, and how many of its choices have not ended."""

    take: DeltaSink
    choices: int


class SharedEngine:
    """Passes every delta to the sink of its request. Once closed, everything raises ClosedError but close, drop and
    abort.

    A `with` block of it is the thread's turn to use the engine. Requests that were dropped meanwhile are aborted at its
    end: a stream's finalizer may run anywhere, even within a step.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._sinks: dict[str, _Sink] = {}  # by request id
        self._lock = threading.RLock()  # one thread at a time adds, steps or aborts
        self._turns = 0  # that the thread is in, one within the other
        self._dropped: deque[str] = deque()  # ids of requests that nobody waits for, to be aborted

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise ClosedError("This LLM is closed.", "Create a new one.")
        return self._engine

    def __enter__(self) -> None:
        self._lock.acquire()
        self._turns += 1

    def __exit__(self, *_: object) -> None:
        try:
            while self._turns == 1 and self._dropped and self._engine is not None:
                self._engine.abort(self._dropped.popleft())
        finally:
            self._turns -= 1
            self._lock.release()

    def add(self, request: Request, sink: DeltaSink) -> None:
        """Give a request to the engine; `sink` is called with its deltas until all its choices have ended."""
        with self:
            self.engine.add(request)
            self._sinks[request.id] = _Sink(sink, request.params.n)

    def runs(self, request_id: str) -> bool:
        """Whether a request was added and has neither ended nor been dropped."""
        return request_id in self._sinks

    def advance(self, request_ids: Collection[str]) -> bool:
        """One step, unless all of these requests have ended; whether it was taken."""
        with self:  # another thread's step, or `close`, may have ended them
            for request_id in request_ids:
                if request_id in self._sinks:
                    self._step()
                    return True
            return False

    def abort(self, request_id: str) -> None:
        """End a request; its last deltas come with the next step."""
        with self:
            if self.runs(request_id):
                self.engine.abort(request_id)

    def drop(self, request_id: str) -> None:
        """End a request and discard its deltas; if this thread has its turn already, at the end of that."""
        with self:
            if self._sinks.pop(request_id, None):
                self._dropped.append(request_id)

    def close(self) -> None:
        """End every request with finish_reason "abort" and release the engine. May be repeated."""
        with self:
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
            if sink is not None:
                sink.take(delta)
                if delta.finish_reason is not None:
                    sink.choices -= 1
                    if not sink.choices:
                        self._sinks.pop(delta.request_id, None)
        if not self._sinks:
            self.engine.check()


# ---- a thread of the engine's own ------------------------------------------------------------------------


log = logging.getLogger("wager")

R = TypeVar("R")

Deliver = Callable[[Sequence[OutputDelta], StepRecord | None], object]
"""Receives what a step emitted and its record (None: it had no rows), in the engine's thread."""


class EngineThread:
    """The only user of an engine until `close`.

    `deliver` is called after every step; `fail` once, should a step raise: requests that were running then get no
    further delta, and the engine takes none any more.
    """

    def __init__(self, engine: Engine, deliver: Deliver, fail: Callable[[WagerError], object]) -> None:
        self._engine = engine
        self._deliver, self._fail = deliver, fail
        self._calls: deque[Callable[[], None]] = deque()
        self._work = threading.Condition()
        self._closing = False
        self._record: StepRecord | None = None
        self.failure: WagerError | None = None
        """Why the engine takes no more requests, if a step of it raised."""
        engine.on_step = self._keep_record
        self._thread = threading.Thread(target=self._run, name="wager-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # an interpreter that ends within a pass would abort the process

    def add(self, request: Request) -> Future[None]:
        """Give the engine a request before its next step; the future raises what `Engine.add` raises."""
        return self.call(lambda: self._engine.add(request))

    def abort(self, request_id: str) -> Future[bool]:
        """End a request before the next step, which returns its last deltas."""
        return self.call(lambda: self._engine.abort(request_id))

    def call(self, function: Callable[[], R]) -> Future[R]:
        """Call a function of the engine between two steps. ClosedError once closed or failed."""
        future: Future[R] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        with self._work:
            if self.failure is not None:
                raise ClosedError(f"The engine stopped: {self.failure.message}", "Restart it.")
            if self._closing:
                raise ClosedError("The engine is closed.", "Create a new one.")
            self._calls.append(run)
            self._work.notify()
        return future

    def close(self) -> None:
        """Abort what runs, deliver the last deltas, and end the thread. May be repeated, from any other thread."""
        with self._work:
            self._closing = True
            self._work.notify()
        self._thread.join()
        self._engine.on_step = None
        atexit.unregister(self.close)

    # ---- in the engine's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait():
                self._make_calls()
                if self._engine.busy:
                    self._step()
            self._make_calls()
            for request_id in self._engine.open_requests:
                self._engine.abort(request_id)
            while self._engine.busy:
                self._step()
        except BaseException as error:  # also what ends a thread: those who wait must be told
            log.exception("A step of the engine failed.")
            known = error if isinstance(error, WagerError) else WagerError(f"{type(error).__name__}: {error}")
            with self._work:
                self.failure = known
            self._make_calls()  # the engine may refuse them; whoever waits for one gets an answer
            self._fail(known)

    def _wait(self) -> bool:
        """Until there is something to do; whether the thread goes on after it."""
        with self._work:
            while not (self._calls or self._closing or self._engine.busy):
                self._work.wait()
            return not self._closing

    def _make_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _step(self) -> None:
        deltas = self._engine.step()
        record, self._record = self._record, None
        if deltas or record is not None:
            self._deliver(deltas, record)
        if not self._engine.busy:
            self._engine.check()

    def _keep_record(self, record: StepRecord) -> None:
        self._record = record
