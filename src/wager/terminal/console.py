"""Progress and messages on stderr, results on stdout or in a file.

rich is imported where something is drawn, so that help stays fast.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from wager.errors import UsageError

Update = Callable[[str, int, int], None]
"""(activity, amount done, total amount): progress of an activity; cheap enough to call for every token."""

STDOUT = Path("-")
"""As the path of results."""

_EVERY_S = 10.0

_UNBOUNDED = 1000
"""Columns of a table that goes to a file or a pipe: no figure is cut off."""


def say(text: str = "") -> None:
    """A line on stderr."""
    click.echo(text, err=True)


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
    """To a file; UsageError if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")  # half a surrogate pair of a model's text
    except OSError as error:
        raise unwritable(path, error.strerror or "unknown error") from error


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
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, to_stdout: bool, caption: str = ""
) -> None:
    """A table whose first column is text and whose others are figures; `caption` are lines below it."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    drawn = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        drawn.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    stream = sys.stdout if to_stdout else sys.stderr
    width = None if stream.isatty() else _UNBOUNDED
    out = Console(file=stream, width=width, markup=False, emoji=False)  # random:llama:1b is no emoji
    out.print(drawn)
    if caption:
        out.print(caption, highlight=False, soft_wrap=True)


@contextmanager
def meter(unit: str) -> Iterator[Update]:
    """Progress: bars on a terminal, a few lines elsewhere. `unit` is what is counted, such as `bytes`."""
    if not sys.stderr.isatty():
        yield _progress_lines(unit)
        return
    from rich import progress
    from rich.console import Console

    amount = progress.DownloadColumn() if unit == "bytes" else progress.MofNCompleteColumn()
    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), amount, progress.TimeElapsedColumn())
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
    """A spinner with a changing text on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _text: None
        return
    from rich.console import Console

    with Console(stderr=True).status(text) as status:
        yield status.update
