"""`wager chat`: a conversation. Each turn sends the whole of it; the prefix cache keeps that cheap."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from wager.cli import console, flags
from wager.cli.run import footer
from wager.config import EngineConfig
from wager.errors import WagerError
from wager.types import OutputDelta, Request, SamplingParams

if TYPE_CHECKING:
    from wager.build.load import LoadedEngine

Message = dict[str, str]


@click.command("chat")
@click.option("--system", metavar="TEXT", help="System message. Without it the template's own, if it has one.")
@flags.engine_flags()
@flags.sampling_flags(max_tokens=512)
def command(*, system: str | None, config: EngineConfig, params: SamplingParams) -> None:
    """Talk with a model, a line a turn; /reset starts over, /exit (or end of input) ends.

    Ctrl-C stops an answer. Lines piped in are answered one after another.
    """
    from wager.cli.loading import open_engine

    engine = open_engine(config)
    framing, terminal = flags.Framing(system=system), sys.stdin.isatty()
    messages: list[Message] = []
    for turn, line in enumerate(_lines(terminal)):
        if line == "/exit":
            return
        if line == "/reset":
            messages.clear()
        elif line.startswith("/"):
            console.say(f"{line.split()[0]} is not known. There are /reset and /exit.")
        else:
            messages.append({"role": "user", "content": line})
            try:
                text = _answer(engine, Request(f"turn {turn}", framing.encode_chat(engine.tokenizer, messages), params))
            except WagerError as error:
                if not terminal:
                    raise
                console.say(f"error: {error}\nhint: /reset forgets the conversation so far.")
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": text})


def _lines(terminal: bool) -> Iterator[str]:
    """What the user says, without blank lines."""
    if terminal:
        import readline  # noqa: F401  (its import gives input() line editing)

        console.say("/reset starts over, /exit ends, Ctrl-C stops an answer.")
    while True:
        try:
            line = input("> ") if terminal else next(sys.stdin)
        except (EOFError, StopIteration):
            return
        if line.strip():
            yield line.strip()


def _answer(engine: LoadedEngine, request: Request) -> str:
    """Stream one answer; Ctrl-C ends it where it is."""
    parts: list[str] = []
    last: OutputDelta | None = None
    with _interrupts() as pressed:
        engine.add(request)
        while engine.busy:
            for last in engine.step():
                parts.append(last.text)
                click.echo(last.text, nl=False)
            if pressed:
                engine.abort(request.id)
                pressed.clear()
    click.echo()
    if last and last.finish_reason == "error":
        raise WagerError(f"The answer broke off: {last.error}")
    if last and last.stats:
        console.say(footer(last.stats))
    return "".join(parts)


@contextmanager
def _interrupts() -> Iterator[list[bool]]:
    """While this lasts Ctrl-C is noted rather than raised: a step is never torn apart."""
    pressed: list[bool] = []

    def note(_signal: int, _frame: Any) -> None:
        pressed.append(True)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
