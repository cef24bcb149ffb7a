"""Reads request bodies beside the engine: a long one in a process of its own, since whatever is made of it (JSON,
objects, the conversation's text, tokens) holds the interpreter's lock for as long as it is long."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

import wager
from wager.constrain.schemas import violations
from wager.errors import WagerError
from wager.serve.errors import ApiError
from wager.serve.limits import Turns
from wager.serve.parsing import BodyParser, ParsingContext
from wager.types import NO_TENANT

QUICK_BYTES = 16_000
"""A body of no more is read in the event loop, in some 20 ms at most."""

_PROGRAM = "import sys; sys.path[0] = sys.argv[1]; from wager.serve.body_process import serve; serve()"

_NICENESS = 5
"""The niceness of the process: streams come first where there are fewer cores than threads."""

_GONE = (OSError, EOFError, pickle.UnpicklingError)
"""What reading from the other side, or writing to it, raises when it has ended."""

CHECK_S = 5.0
"""Seconds in which an answer must be checked against its schema: patterns of a schema may take for ever."""

BodyKind = Literal["completion", "chat", "response", "message", "tokenize", "detokenize", "count_tokens"]
"""The method of BodyParser that reads a body."""


class BodyReader:
    """Reads bodies: of those that are short one in each turn of the event loop, of the others one at a time, and of
    those that wait one of each tenant. The process is started with the first long body, and again if it was ended."""

    def __init__(self, model: ParsingContext) -> None:
        self._parser = BodyParser(model)
        self._tokenizer = model.tokenizer
        self._model = pickle.dumps(model)  # now: it takes some 20 ms in which nothing else runs
        self._short, self._long = Turns(), Turns()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="wager-bodies")
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    async def read(
        self,
        kind: BodyKind,
        raw: bytes,
        request_id: str,
        *earlier: Mapping[str, bytes],
        tenant: str = NO_TENANT,
    ) -> Any:
        """The ParsedRequest of a body that is to be answered, Converted of one about tokens. ApiError that names what
        is wrong with it. `earlier`: of a `response`, conversations that it may go on, by the names of their ends."""
        size = len(raw) + sum(len(each) for found in earlier for each in found.values())
        if size > QUICK_BYTES:
            loop = asyncio.get_running_loop()
            async with self._long.turn(tenant):
                return await loop.run_in_executor(self._thread, self._read_beside, kind, (raw, request_id, *earlier))
        async with self._short.turn(tenant):
            try:
                return self._parser.read(kind, raw, request_id, *earlier)
            finally:
                await asyncio.sleep(0)

    async def check(self, schema: Mapping[str, Any], text: str, *, tenant: str = NO_TENANT) -> list[str]:
        """What an answer breaks of a schema: in the process, which is ended if it takes too long."""
        loop = asyncio.get_running_loop()
        try:
            async with self._long.turn(tenant):
                return await loop.run_in_executor(self._thread, self._check_beside, schema, text)
        except ApiError:
            return [f"The answer could not be checked in {CHECK_S:g} s."]

    def prepare(self) -> None:
        """Compile the chat template, for which the first conversation would wait. In a thread."""
        with suppress(WagerError):
            self._tokenizer.chat_parts([{"role": "user", "content": ""}])

    def close(self) -> None:
        """End the process; a body in it is refused. May be repeated."""
        self._closed = True
        if self._process is not None:
            self._process.kill()
        self._thread.shutdown(cancel_futures=True)
        self._end()

    # ---- in the thread -----------------------------------------------------------------------------------------------

    def _check_beside(self, schema: Mapping[str, Any], text: str) -> Any:
        self._read_beside("begin", ())  # a start takes its time
        process: Any = self._process
        timer = threading.Timer(CHECK_S, process.kill)
        timer.start()
        try:
            return self._read_beside("check", (schema, text))
        finally:
            timer.cancel()

    def _read_beside(self, kind: str, given: tuple[Any, ...]) -> Any:
        try:
            process: Any = self._started()  # whose pipes are there
            _send(process.stdin, (kind, given))
            result = pickle.load(process.stdout)
        except _GONE:
            self._end()
            raise ApiError(503, "The process that reads long bodies ended.", "Send it again.", retry_after=1) from None
        if isinstance(result, Exception):
            raise result
        return result

    def _started(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise EOFError
        if self._process is None or self._process.poll() is not None:
            self._end()
            process: Any = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(Path(wager.__file__).parents[1])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
                start_new_session=True,  # Ctrl-C is for the server, which ends it
            )
            self._process = process
            process.stdin.write(self._model)
        return self._process

    def _end(self) -> None:
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            with suppress(OSError):
                process.communicate()


_OTHERS: Mapping[str, Callable[..., Any]] = {"begin": lambda: None, "check": violations}
"""What the process does beside reading bodies."""


def serve() -> None:
    """The process: reads bodies from its standard input, until that is closed, and writes what they are."""
    source = sys.stdin.buffer
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    with suppress(*_GONE, KeyboardInterrupt):
        parser = BodyParser(pickle.load(source))
        while True:
            kind, given = pickle.load(source)
            try:
                result = _OTHERS[kind](*given) if kind in _OTHERS else parser.read(kind, *given)
            except WagerError as error:
                result = error
            except Exception as error:
                result = RuntimeError(f"{type(error).__name__}: {error}")
            _send(target, result)


def _send(file: BinaryIO | Any, value: Any) -> None:
    pickle.dump(value, file)
    file.flush()
