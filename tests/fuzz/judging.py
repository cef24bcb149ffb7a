"""Runs a command line in this process, with a time limit, and says what is wrong with how it ended."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from command_lines import FAILS, HUGE, NOT_NUMBERS, NOT_WHOLE, CommandLine, kind, parameters

from wager.cli import main

LONGEST_MESSAGE = 2500
"""Characters of a message that a reader may be given."""

_TABLES = ("plan", "replay", "calibrate", "acceptance")
_NO_NUMBER = re.compile(r"(?<![\w/.'-])(nan|inf)(?![\w/.'-])")


class TooLong(BaseException):
    """The time limit of a command line has passed."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a call ended: its exit code (None: it did not end), what it wrote, and the traceback of what escaped it."""

    code: int | None
    out: str
    err: str
    escaped: str = ""


def run(line: CommandLine, *, limit: float) -> Ending:
    """Call the command line in this process."""
    before = sys.stdin, sys.stdout, sys.stderr
    streams = [io.TextIOWrapper(io.BytesIO(data), encoding="utf-8") for data in (line.stdin, b"", b"")]
    sys.stdin, sys.stdout, sys.stderr = streams
    code, escaped = None, ""
    try:
        with _time_limit(limit):
            code = main(line.arguments)
    except BaseException:  # TooLong among others
        escaped = traceback.format_exc(limit=-4)
    finally:
        sys.stdin, sys.stdout, sys.stderr = before
    written = []
    for stream in streams[1:]:
        stream.flush()
        written.append(stream.buffer.getvalue().decode("utf-8", errors="replace"))
    return Ending(code, *written, escaped)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def end(_signal: int, _frame: Any) -> None:
        raise TooLong

    previous = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def complaints(line: CommandLine, ending: Ending) -> list[str]:
    """What is wrong; nothing for a good ending."""
    if ending.escaped:
        return [f"escaped: {ending.escaped}"]
    found = [] if ending.code in (0, 1, 2) else [f"exit code {ending.code}"]
    if "Traceback" in ending.err or "Exception ignored" in ending.err:
        found.append("a traceback on stderr")
    return found + list(_of_a_refusal(line, ending) if ending.code else _of_a_success(line, ending))


def _of_a_refusal(line: CommandLine, ending: Ending) -> Iterator[str]:
    at = re.search(r"^(error|Error|.* error): ", ending.err, re.MULTILINE)
    if not at:
        yield "failed without a message"
        return
    message = ending.err[at.start() :]
    if not re.search(r"[.?!:)\"']$", message.strip()):
        yield "the message is no sentence"
    if len(message) > LONGEST_MESSAGE:
        yield f"a message of {len(message)} characters"
    if "Standard input" in message:
        return
    if not line.drawn and line.verb not in FAILS:
        yield "a valid call failed"
    if line.verb in FAILS:  # it may fail as its base does, if what was drawn is valid
        as_base = any("/" in word and word in message for word in line.arguments)
        if as_base or all(value is None for _, value in line.drawn):
            return
    if any(value is None for _, value in line.drawn) and any(word in message for word in line.arguments if ":" in word):
        return  # a flag may want another model than the base's
    if line.drawn and not any(_named(flag, value, message) for flag, value in line.drawn):
        yield "the message names none of the options or values"


def _named(flag: str, value: str | None, message: str) -> bool:
    name = flag.lstrip("-")
    words = [flag, name, name.replace("-", "_"), name.replace("-", " "), flag.replace("--no-", "--")]
    words.append(name.removesuffix("s"))  # models is MODEL... in messages
    words += [word for word in name.split("-") if len(word) > 3]
    if value is not None:
        words.append(repr(value))
    if value and value.strip():
        words += [value[:20], os.path.expanduser(value), repr(value[:20])[1:-1]]
        words += [word.strip()[:20] for word in re.split("[,:=]", value)]
    return bool(re.search(r" --[a-z]", message)) or any(word and word.lower() in message.lower() for word in words)


def _of_a_success(line: CommandLine, ending: Ending) -> Iterator[str]:
    kinds = {flag: kind(param) for param in parameters(line.verb) for flag in (*param.opts, *param.secondary_opts)}
    refused = {"whole": (*NOT_NUMBERS, *NOT_WHOLE, *HUGE), "number": NOT_NUMBERS}
    for flag, value in line.drawn:
        if value in refused.get(kinds.get(flag, ""), ()):
            yield f"{flag} {str(value)[:40]!r} was accepted"
    if ("--json", "-") in line.drawn:
        try:
            json.loads(ending.out, parse_constant=_refuse)
        except ValueError as error:
            yield f"stdout is not JSON: {error}"
    elif line.verb in _TABLES and (no_number := _NO_NUMBER.search(ending.out)):
        yield f"{no_number[0]} on stdout"


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
