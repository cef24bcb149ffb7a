"""Progress and messages on stderr, results on stdout or in a file.

rich is imported where something is drawn, so that help stays fast.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wager.errors import UsageError
from wager.inputs import replacing

if TYPE_CHECKING:
    from rich.table import Table

Update = Callable[[str, int, int], None]
"""(activity, amount done, total amount): progress of an activity; cheap enough to call for every token."""

STDOUT = Path("-")
"""As the path of results."""

_EVERY_S = 10.0

_UNBOUNDED = 1000
"""Columns of a table that goes to a file or a pipe: it stays one table."""

_WIDEST = 100
"""Columns that prose takes at the most."""

_verbosity = 0


def set_verbosity(level: int) -> None:
    """-1: results, warnings and errors alone; 0: notes and progress too; 1: details too."""
    global _verbosity
    _verbosity = level


def say(text: str = "") -> None:
    """A line on stderr, unless --quiet is given."""
    if _verbosity >= 0:
        click.echo(legible(text), err=True)


def warn(text: str) -> None:
    """A warning on stderr."""
    click.echo(f"warning: {legible(text)}", err=True)


def detail(text: str) -> None:
    """A line on stderr, with --verbose."""
    if _verbosity > 0:
        click.echo(legible(text), err=True)


def width() -> int:
    """Columns of prose: the terminal's, if there are fewer than prose takes."""
    return min(_WIDEST, shutil.get_terminal_size((_WIDEST, 24)).columns) if sys.stdout.isatty() else _WIDEST


def wrapped(text: str) -> str:
    """Prose in lines that fit; those after the first are set in."""
    return click.wrap_text(legible(text), width=width(), subsequent_indent="  ")


def legible(text: str) -> str:
    """The text with its control characters written out: what a user, a file or a caller gives must not reach the
    terminal as a command."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: f"\\x{ord(match[0]):02x}", text)


def confirmed(question: str, *, yes: bool) -> bool:
    """Whether the user agrees: with `yes`, or asked on a terminal; nobody else is asked, and none agrees."""
    if yes:
        return True
    if _verbosity < 0 or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    return click.confirm(question, default=True, err=True)


def write_json(value: Mapping[str, Any], path: Path | None) -> None:
    """To a file, to stdout where the path is `-`, or nowhere."""
    if path is None:
        return
    to_stdout = path == STDOUT
    escaped = to_stdout and (sys.stdout.encoding or "").lower().replace("_", "-") not in ("utf-8", "utf8")
    text = json.dumps(value, ensure_ascii=escaped, indent=1) + "\n"
    if to_stdout:
        sys.stdout.write(text)
    else:
        write_text(text, path)


def write_text(text: str, path: Path) -> None:
    """To a file; UsageError if it cannot be written. A file that is there keeps what it has until all is written, where
    another one can take its place and nobody sees more of that than its text."""
    data = text.encode(errors="backslashreplace")  # half a surrogate pair of a model's text
    try:
        found = path.stat() if path.is_file() else None
        if found is not None and not _replaceable(path, found):
            path.write_bytes(data)
            return
        try:
            with replacing(path, mode=found and stat.S_IMODE(found.st_mode)) as file:
                file.write(data)
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENAMETOOLONG):  # mounted; no name for another one beside it
                raise
            path.write_bytes(data)
    except OSError as error:
        raise unwritable(path, error.strerror or "unknown error") from error


def _replaceable(path: Path, found: os.stat_result) -> bool:
    """Whether a file may be replaced by a new one with its mode: it has no other name, which would keep the old text,
    and is of this user and group; and both may be written."""
    own = found.st_nlink == 1 and (found.st_uid, found.st_gid) == (os.geteuid(), os.getegid())
    return own and all(os.access(each, os.W_OK) for each in (path, path.resolve().parent))


def obstacle(path: Path) -> str:
    """Why a file cannot be written there, as far as that shows before the work rather than after it; "" if it can."""
    if path.exists():
        return "" if os.access(path, os.W_OK) else "it may not be written to"
    if not path.parent.is_dir():
        return "there is no such folder"
    return "" if os.access(path.parent, os.W_OK) else "its folder may not be written to"


def unwritable(path: Path, cause: str) -> UsageError:
    """The error for results that cannot be stored."""
    return UsageError(
        f"The results cannot be written to {path}: {cause}.",
        "Give a path in a folder that exists and can be written to.",
    )


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    to_stdout: bool,
    caption: str = "",
    texts: Sequence[int] = (0,),
) -> None:
    """A table of figures; the columns with the numbers `texts` are text, `caption` are lines below it. On a terminal
    that is too narrow its columns are divided among several tables, whose first ones tell the rows apart."""
    from rich.console import Console

    stream = sys.stdout if to_stdout else sys.stderr
    if stream is sys.stderr and _verbosity < 0:
        return
    columns_of_stream = None if stream.isatty() else _UNBOUNDED
    out = Console(file=stream, width=columns_of_stream, markup=False, emoji=False)  # random:llama:1b is no emoji
    for number, chosen in enumerate(_divided(columns, rows, width=out.width)):
        out.print(_drawn("" if number else title, columns, rows, chosen, texts=texts))
    if caption:
        out.print(caption, highlight=False)


def _drawn(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], chosen: Sequence[int], *, texts: Sequence[int]
) -> Table:
    from rich import box
    from rich.table import Table

    drawn = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index in chosen:
        drawn.add_column(columns[index], justify="left" if index in texts else "right", no_wrap=index > 0)
    for row in rows:
        drawn.add_row(*(legible(row[index]) for index in chosen))
    return drawn


def _divided(columns: Sequence[str], rows: Sequence[Sequence[str]], *, width: int) -> Iterator[list[int]]:
    """The numbers of the columns of each table; `width` is what there is room for. Those that tell the rows apart, the
    first ones that do, are in all, if they take no more than half of it."""
    from rich.cells import cell_len

    sizes = [max(cell_len(row[index]) for row in (columns, *rows)) + 2 for index in range(len(columns))]
    sizes[0] = min(sizes[0], width // 2)  # a longer first column is broken into lines
    first = next((n for n in range(1, len(columns)) if len({tuple(row[:n]) for row in rows}) == len(rows)), 1)
    keys = [index for index in range(first) if len({row[index] for row in rows}) > 1]
    keys = keys if keys and sum(sizes[key] for key in keys) <= width // 2 else [0]
    chosen: list[int] = []
    for index in range(len(columns)):
        if {*chosen} - {*keys} and sum(sizes[each] for each in (*chosen, index)) >= width:
            yield chosen
            chosen = [*keys]
        chosen += [index] if index not in chosen else []
    yield chosen


@contextmanager
def meter(unit: str) -> Iterator[Update]:
    """Progress: bars on a terminal, a few lines elsewhere. `unit` is what is counted, such as `bytes`."""
    if _verbosity < 0:
        yield lambda _activity, _done, _total: None
        return
    if not sys.stderr.isatty():
        yield _progress_lines(unit)
        return
    from rich import progress
    from rich.console import Console

    amount = progress.DownloadColumn() if unit == "bytes" else progress.MofNCompleteColumn()
    name = progress.TextColumn("{task.description}", markup=False)
    columns = (name, progress.BarColumn(), amount, progress.TimeElapsedColumn())
    with progress.Progress(*columns, console=Console(stderr=True), transient=unit != "bytes") as bars:
        tasks: dict[str, progress.TaskID] = {}

        def update(activity: str, done: int, total: int) -> None:
            if activity not in tasks:
                tasks[activity] = bars.add_task(activity, total=total)
            bars.update(tasks[activity], completed=done, total=total)

        yield update


def _progress_lines(unit: str) -> Update:
    """Progress for logs: a line where each activity begins and ends, and one every _EVERY_S seconds between."""
    shown: dict[str, float] = {}
    ended: set[str] = set()

    def update(activity: str, done: int, total: int) -> None:
        now = time.monotonic()
        if activity in ended or (done < total and now - shown.get(activity, -_EVERY_S) < _EVERY_S):
            return
        shown[activity] = now
        if done >= total:
            ended.add(activity)
        amounts = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB" if unit == "bytes" else f"{done} of {total} {unit}"
        say(f"{activity}: {amounts}")

    return update


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """A spinner with a changing text on a terminal, lines with --verbose, nothing elsewhere."""
    if _verbosity or not sys.stderr.isatty():
        yield detail
        return
    from rich.console import Console
    from rich.text import Text  # of which a status takes nothing for markup

    with Console(stderr=True).status(Text(text)) as status:
        yield lambda text: status.update(Text(text))
