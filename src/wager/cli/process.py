"""The process of a command: how signals end it, and its standard streams.

SIGTERM and SIGHUP end it as Ctrl-C does: by an exception, so that its temporary files and children go too. Its streams
may be closed, full or broken: what is wrong with standard input is an error that names it; standard output that cannot
be written ends the command, quietly if its reader went away; messages that cannot be written are lost, as there is
nowhere to say so.
"""

from __future__ import annotations

import codecs
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from wager.errors import UsageError, WagerError

_ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
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

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal patience
        if not received and _is_importing(frame):
            _report(number)
            os._exit(128 + number)
        if number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        if not received:
            received.append(number)
            patience = time.monotonic() + _PATIENCE_S
            raise _Ended
        if time.monotonic() > patience:  # not before: `timeout` sends its signal twice, and the files are being removed
            os._exit(128 + number)

    usual = (signal.SIG_DFL, signal.default_int_handler)
    before = {number: signal.getsignal(number) for number in _ENDING if signal.getsignal(number) in usual}
    for number in before:
        signal.signal(number, end)
    try:
        code = command()
    except KeyboardInterrupt:  # before or after the command could say so itself
        received.append(signal.SIGINT)
    except (_Ended, OSError):  # OSError: of a progress bar on a terminal that hung up
        if not received:
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        _report(received[0])
        return 128 + received[0]
    return code


def _is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported there, so that what a handler raises may come out as another error: numpy's
    native part does so, and whatever calls __set_name__. What the command wrote so far is left as it is."""
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


_SAID: dict[int, str] = {signal.SIGTERM: "terminated", signal.SIGINT: "interrupted"}


def _report(number: int) -> None:
    """One line on stderr. A terminal that hung up takes no more output: it is replaced, or Python complains at exit."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            if stream is sys.stderr:
                stream.write(f"\n{_SAID.get(number, 'hung up')}\n")
            try:
                stream.flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Input(io.TextIOWrapper):
    """Standard input; UsageError for what is not text, and where it is closed."""

    def read(self, size: int | None = -1, /) -> str:
        with _named_errors():
            return super().read(size)

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        with _named_errors():
            return super().readline(size)


class OutputError(WagerError):
    """Standard output cannot be written. Without a message: because its reader went away."""


class _Output(io.TextIOWrapper):
    """Standard output; OutputError where it cannot be written."""

    def write(self, text: str, /) -> int:
        with _output_errors():
            return super().write(text)

    def flush(self) -> None:
        with _output_errors():
            super().flush()


@contextmanager
def _output_errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise OutputError("") from error
    except OSError as error:
        cause = f"Standard output cannot be written: {error.strerror}."
        raise OutputError(cause, "Is it closed, or its disk full?") from error


class _Messages(io.TextIOWrapper):
    """Standard error; what cannot be written is lost."""

    def write(self, text: str, /) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        cause = f"Standard input is not {error.encoding.upper()}: byte {byte:#04x}, {error.reason}."
        raise UsageError(cause, "Pipe in text in that encoding.") from error
    except OSError as error:
        raise UsageError(f"Standard input cannot be read: {error.strerror}.", "Is it closed?") from error


@contextmanager
def standard_streams() -> Iterator[None]:
    """Within the block the three streams exist and behave as above; afterwards they are what they were."""
    before = sys.stdin, sys.stdout, sys.stderr
    opened = [_open_closed(number) if stream is None else stream for number, stream in enumerate(before)]
    sys.stdin, sys.stdout, sys.stderr = wrapped = [
        _wrap(stream, kind) if type(stream) is io.TextIOWrapper else stream  # those that a test put there stay
        for stream, kind in zip(opened, (_Input, _Output, _Messages), strict=True)
    ]
    try:
        yield
    finally:
        for stream, original in zip(wrapped, opened, strict=True):
            if stream is not original and isinstance(stream, io.TextIOWrapper):
                with suppress(OutputError):
                    stream.detach()
        sys.stdin, sys.stdout, sys.stderr = before


def _wrap(stream: io.TextIOWrapper, kind: type[io.TextIOWrapper]) -> io.TextIOWrapper:
    """The stream as one of the kinds above: output escapes what its encoding lacks, input refuses it."""
    if kind is _Input:
        ascii_only = codecs.lookup(stream.encoding).name == "ascii"  # as in the C locale, which says nothing
        return _Input(stream.buffer, encoding="utf-8" if ascii_only else stream.encoding)
    return kind(
        stream.buffer,
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,  # of PYTHONUNBUFFERED and -u
    )


def _open_closed(number: int) -> io.TextIOWrapper:
    """A stream whose descriptor is closed: reading it or writing to it fails, but for the messages of standard error.
    The descriptor is taken, or a file that is opened later would become that stream."""
    try:
        os.fstat(number)
    except OSError:
        opened = os.open(os.devnull, os.O_RDONLY if number == 1 else os.O_WRONLY)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)
    return open(number, "w" if number else "r", encoding="utf-8", closefd=False)


def drop_output() -> None:
    """Let what standard output still holds go nowhere."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        sys.stdout.flush()
