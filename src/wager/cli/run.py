"""`wager run`: answer one prompt, streamed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wager.cli import console, flags
from wager.config import EngineConfig
from wager.types import Completion, OutputDelta, Request, SamplingParams, Stats

if TYPE_CHECKING:
    from wager.cli.paint import Painter
    from wager.models.tokenizer import Tokenizer


@click.command("run")
@click.argument("prompt", required=False)
@click.option("--show", is_flag=True, help="Colour each token by who guessed it.")
@click.option("--explain", is_flag=True, help="Say at the end why the last step guessed as it did.")
@flags.framing_flags
@flags.engine_flags()
@flags.sampling_flags()
@flags.json_flag
def command(
    prompt: str | None,
    *,
    show: bool,
    explain: bool,
    framing: flags.Framing,
    config: EngineConfig,
    params: SamplingParams,
    json_path: Path | None,
) -> None:
    """Answer PROMPT and stream the text; the last line says tokens, speed and τ, the mean acceptance length.

    Without PROMPT, or with -, it is read from standard input.
    """
    from wager.cli.loading import open_engine

    text = _prompt(prompt)
    console.check_writable(json_path)
    engine = open_engine(config)
    request = Request("run", framing.encode(engine.tokenizer, text), params)
    painter = _painter(engine.tokenizer) if show else None
    written = 0

    def stream(event: OutputDelta) -> None:
        nonlocal written
        text = painter.paint(event.text, event.token_ids, event.drafted_by) if painter else event.text
        click.echo(text, nl=False, color=True if painter else None)
        written += len(text)

    try:
        [answer] = engine.generate([request], on_event=None if str(json_path) == "-" else stream)
    finally:
        if written:
            click.echo()
    if json_path:
        console.write_json(_result(answer, config, engine.kernels.name), json_path)
    if painter:
        click.echo(f"guessed by: {painter.legend()}", err=True, color=True)
    if explain:
        console.say(engine.policy.explain())
    console.say(footer(answer.stats))
    if answer.finish_reason == "error":
        raise click.ClickException(answer.error)


def footer(stats: Stats) -> str:
    """Tokens, tokens per second of decoding, mean acceptance length, and where they come from."""
    speed = f"{stats.completion_tokens / stats.decode_s:.1f}" if stats.decode_s > 0 else "–"
    return (
        f"{stats.completion_tokens} tokens, {speed} tok/s, τ {stats.mean_acceptance_length:.2f} "
        f"({stats.drafter}: {stats.accepted} of {stats.drafted} guesses accepted; "
        f"prompt {stats.prompt_tokens} tokens, {stats.cached_tokens} cached, {stats.prefill_s:.2f} s; "
        f"seed {stats.seed})"
    )


def _prompt(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError('Give a prompt: wager run "PROMPT", or pipe one in.')
    if prompt in (None, "-"):
        prompt = sys.stdin.read()
    if not prompt or not prompt.strip():
        raise click.UsageError("The prompt is empty.")
    return prompt


def _painter(tokenizer: Tokenizer) -> Painter:
    from wager.cli.paint import Painter
    from wager.models.tokenizer import IncrementalDecoder

    return Painter(IncrementalDecoder(tokenizer))


def _result(answer: Completion, config: EngineConfig, kernels: str) -> dict[str, object]:
    stats = answer.stats
    return {
        "model": config.model,
        "kernels": kernels,
        "prompt_tokens": stats.prompt_tokens,
        "tokens": stats.completion_tokens,
        "token_ids": list(answer.token_ids),
        "origins": list(answer.drafted_by),
        "text": answer.text,
        "finish": answer.finish_reason,
        "error": answer.error,
        "seed": stats.seed,
        "prefill_s": stats.prefill_s,
        "decode_s": stats.decode_s,
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "drafter": stats.drafter,
        "mean_acceptance_length": stats.mean_acceptance_length,
    }
