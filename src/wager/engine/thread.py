"""Steps an engine in a thread of its own, for callers that must not wait for a step, such as an event loop.

Requests are added and aborted between two steps. The deltas of a step are handed over in one call, in that thread.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from wager.engine.core import Engine
from wager.errors import ClosedError, WagerError
from wager.types import OutputDelta, Request, StepRecord

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
                    self._check_when_idle()
            self._make_calls()
            self._end_requests()
        except BaseException as error:  # also what ends a thread: those who wait must be told
            self._stop(error)

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

    def _check_when_idle(self) -> None:
        if not self._engine.busy:
            self._engine.check()

    def _end_requests(self) -> None:
        for request_id in self._engine.open_requests:
            self._engine.abort(request_id)
        while self._engine.busy:
            self._step()

    def _keep_record(self, record: StepRecord) -> None:
        self._record = record

    def _stop(self, error: BaseException) -> None:
        log.exception("A step of the engine failed.")
        known = error if isinstance(error, WagerError) else WagerError(f"{type(error).__name__}: {error}")
        with self._work:
            self.failure = known
        self._make_calls()  # the engine may refuse them; whoever waits for one gets an answer
        self._fail(known)
