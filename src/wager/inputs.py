"""Values as users write them: whole numbers, paths, names, threads, JSON. What is wrong is refused by a sentence. And
files that are written completely or not at all."""

from __future__ import annotations

import csv
import difflib
import io
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from wager.errors import UsageError

THREADS_PER_PROCESSOR = 8
"""The most threads that may be given, as a multiple of the machine's processors."""

LARGEST_TEXT = 1 << 28
"""Bytes of a text file; more is a device that never ends, or a slip."""

MOST_LEVELS = 100
"""Objects and lists within each other. What they are given to (templates, grammars) works recursively."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_PART = 1 << 20
_UNFINISHED = ".unfinished"
"""Without it results.json.2026-11 of a user's own would be taken for what a killed process left."""
_MOST_DIGITS = 20
"""A longer number is a slip of the keyboard, and need not be converted to say so."""


def shown(text: str, *, length: int = 40) -> str:
    """The text in quotes for a message, cut where it is long."""
    return repr(text if len(text) <= length else f"{text[:length]}...")


def whole_number(text: str) -> int | None:
    """The number that ASCII digits write; None for anything else (signs, blanks, other digits, absurd length)."""
    return int(text) if re.fullmatch(rf"[0-9]{{1,{_MOST_DIGITS}}}", text) else None


def did_you_mean(
    text: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6, otherwise: str = "Known: {}."
) -> str:
    """A hint for a name that is not known: up to `most` of the nearest, ignoring case; else `otherwise`, with all."""
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(text.lower()[:100], names, n=most, cutoff=cutoff)
    if not near:
        return otherwise.format(", ".join(names.values()))
    return f"Did you mean {' or '.join(repr(names[name]) for name in near)}?"


def expand_path(text: str) -> Path:
    """A path as users write it, with `~` or `~user` expanded; there need be nothing at it. UsageError for a user that
    does not exist and for what the system takes for no path (too long, a zero byte) or does not let one look at."""
    try:
        path = Path(text).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except RuntimeError as error:
        raise UsageError(f"The path {shown(text)} names no user's home folder.", "Write the path out.") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"The path {shown(text)} cannot be used: {reason}.", "Check the path.") from error
    return path


def read_text(path: Path, what: str, hint: str) -> str:
    """The text of a file, or of what a pipe or a device gives, without a byte order mark and with the ends of lines of
    Unix. UsageError that names `what` and the path: it cannot be read, is not UTF-8, or does not end within
    LARGEST_TEXT bytes."""
    cause = ""
    try:
        with path.open("rb") as file:
            data = bytearray()  # in parts: a single call takes memory for all that it may read
            while len(data) <= LARGEST_TEXT and (part := file.read(_PART)):
                data += part
        if len(data) <= LARGEST_TEXT:
            return data.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
        cause = f"it is longer than {LARGEST_TEXT >> 20} MiB"
    except UnicodeDecodeError as error:
        cause = f"it is not UTF-8 (byte {error.object[error.start]:#04x} at {error.start})"
    except OSError as error:
        cause = error.strerror or str(error)
    except ValueError as error:  # a zero byte in the path
        cause = str(error)
    raise UsageError(f"The {what} {path} cannot be read: {cause}.", hint)


def csv_rows(text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """The lines of a CSV text that are not empty, each with its number and its values by the names in the first line
    (small letters, with _ for blanks); columns without a name are left out. Between values stand commas, semicolons or
    tabs, as in the first line. ValueError, in words, for a line with another number of values, and for a name that
    stands twice."""
    first = text.partition("\n")[0]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=first.count))
    try:
        names = [name.strip().lower().replace(" ", "_") for name in next(reader, [])]
        if twice := [name for name in names if name and names.count(name) > 1]:
            raise ValueError(f"line 1 has {twice[0]!r} twice")
        for cells in filter(any, reader):
            if len(cells) != len(names):
                raise ValueError(f"line {reader.line_num} has {len(cells)} values for {len(names)} columns")
            yield reader.line_num, {name: cell for name, cell in zip(names, cells, strict=True) if name}
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from error


def strict_json(text: str) -> Any:
    """The value of a JSON text. ValueError that says what is wrong: also names that stand twice in one object, NaN and
    infinities, halves of surrogate pairs, and more than MOST_LEVELS levels."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
        too_deep = text.count("[") + text.count("{") > MOST_LEVELS and _is_deep(value)
    except RecursionError:
        too_deep = True
    if too_deep:
        raise ValueError(f"objects and lists are more than {MOST_LEVELS} levels deep")
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it has half of a surrogate pair, which is no character") from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names: set[str] = set()
        twice = next(name for name, _ in pairs if name in names or names.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"an object has {twice[:80]!r} twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _is_deep(value: Any) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MOST_LEVELS):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _is_open(path: Path) -> bool:
    """Whether it is the name of an open file of a process, or leads to one, as Linux has them."""
    places = [path.parent.resolve(), *([path.readlink()] if path.is_symlink() else [])]
    return any(place.is_relative_to("/proc") for place in places)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the system within the block name the file: where a disk is full, the system names none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def replacing(path: Path, *, buffered: int = -1, durable: bool = False, mode: int | None = None) -> Iterator[BinaryIO]:
    """A new file to write, which takes the place of `path` when the block ends and is removed when it raises: nobody
    ever reads half of it, and of two that write together the later one wins. Where `path` is a link, what it leads to
    is replaced. A device, a pipe and what is open already (/dev/stdout) are written to instead.
    `buffered`: bytes that are written at once, at the least; `durable`: it is on the disk before it takes that place;
    `mode`: who may read it, if not everybody."""
    if path.exists() and (_is_open(path) or not path.is_file()):
        with naming(path), path.open("ab", buffered) as file:
            yield file
        return
    path = Path(os.path.realpath(path))  # no error where links lead in a circle
    remove_unfinished(path.parent, escape(path.name))
    unfinished = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}{_UNFINISHED}")
    try:
        with naming(path), unfinished.open("xb", buffered) as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        with suppress(OSError):
            unfinished.unlink()


def remove_unfinished(folder: Path, names: str) -> None:
    """Remove what killed processes left half written of the files of these `names`, a pattern."""
    for path in folder.glob(f"{names}.*{_UNFINISHED}"):
        process = re.search(rf"\.(\d+)-\d+\{_UNFINISHED}$", path.name)
        if process and not _process_exists(int(process[1])):
            with suppress(OSError):
                path.unlink()


def _process_exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def check_threads(threads: int, *, name: str = "threads") -> None:
    """UsageError for a number of threads that the machine cannot use; `name` is the option's."""
    most = THREADS_PER_PROCESSOR * (os.cpu_count() or 1)
    if not 1 <= threads <= most:
        raise UsageError(
            f"{name} = {shown(str(threads))[1:-1]} is out of range.",
            f"{name} must be from 1 to {most} on this machine ({THREADS_PER_PROCESSOR} for each processor).",
        )
