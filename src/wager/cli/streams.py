"""Standard input, output and error of the command line, whatever the caller has closed, filled or broken.

What is wrong with standard input is an error that names it; standard output that cannot be written ends the command,
quietly if its reader went away; messages that cannot be written are lost, as there is nowhere to say so.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from wager.errors import UsageError, WagerError


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
