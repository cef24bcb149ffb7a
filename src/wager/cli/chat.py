"""`wager chat`: a conversation. Each turn sends all its messages; the prefix cache reuses those of earlier turns."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from wager.cli.run import cut, footer
from wager.config import EngineConfig
from wager.errors import WagerError
from wager.terminal import console, flags
from wager.types import SamplingParams

if TYPE_CHECKING:
    from wager.llm import OutputStream

Message = dict[str, str]


_ENDS = ("/bye", "/exit", "/quit")
_QUOTES = '"""'
_COMMANDS = '/bye ends, /reset starts over, """ begins and ends several lines, Ctrl-C stops an answer.'


@click.command("chat", cls=flags.Verb, main="system model drafter depth temperature top_p seed max_tokens max_context")
@click.option("--system", metavar="TEXT", help="System message. Without it the template's own, if it has one.")
@flags.engine_flags(learning=True)
@flags.sampling_flags(max_tokens=512)
def command(*, system: str | None, config: EngineConfig, params: SamplingParams) -> None:
    """Talk with a model, one line a turn; /reset starts over, /bye (or end of input) ends.

    Three double quotes begin a message of several lines, and end it. Ctrl-C stops an answer. Lines piped in are
    answered one after another.
    """
    from wager.cli.loading import open_llm

    llm, terminal = open_llm(config), sys.stdin.isatty()
    beginning: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages: list[Message] = []
    for line, quoted in _lines(terminal=terminal):
        verb = "" if quoted else line
        if verb in _ENDS:
            return
        if verb == "/reset":
            messages.clear()
        elif verb.startswith("/"):
            console.say(f"{line.split()[0]} is not known: {_COMMANDS}")
        else:
            messages.append({"role": "user", "content": line})
            try:
                text = _answer(llm.stream([*beginning, *messages], params))
            except WagerError as error:
                if not terminal:
                    raise
                console.say(f"error: {error}\nhint: /reset starts a new conversation.")
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": text})


def _lines(*, terminal: bool) -> Iterator[tuple[str, bool]]:
    """Lines of input, without blank ones; lines between triple quotes together, and whether they were: these are no
    commands."""
    if terminal:
        import readline  # noqa: F401  (its import gives input() line editing)

        console.say(_COMMANDS)

    def read(sign: str) -> str | None:
        try:
            return input(sign) if terminal else next(sys.stdin).rstrip("\n")
        except (EOFError, StopIteration):
            return None

    while (line := read("> ")) is not None:
        line = line.strip()
        quoted = line.startswith(_QUOTES)
        if quoted:
            parts, part = [], line.removeprefix(_QUOTES)
            while not part.rstrip().endswith(_QUOTES) and (further := read("... ")) is not None:
                parts.append(part)
                part = further
            line = "\n".join([*parts, part.rstrip().removesuffix(_QUOTES)]).strip()
        if line:
            yield line, quoted


def _answer(stream: OutputStream) -> str:
    """Print one answer as it is generated; Ctrl-C aborts it."""
    with _deferred_interrupts() as pressed:
        for delta in stream:
            click.echo(delta.text, nl=False)
            if pressed:
                stream.abort()
                pressed.clear()
    click.echo()
    [answer] = stream.completions()
    if answer.finish_reason == "error":
        raise WagerError(f"The answer ended with an error: {answer.error}")
    if answer.finish_reason == "length":
        console.say(cut(answer.stats, stream.request.params))
    console.say(footer(answer.stats, sampled=stream.request.params.temperature > 0))
    return answer.text


@contextmanager
def _deferred_interrupts() -> Iterator[list[bool]]:
    """Within the block Ctrl-C is noted rather than raised, so that it does not end a step halfway."""
    pressed: list[bool] = []

    def note(_signal: int, _frame: Any) -> None:
        pressed.append(True)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
