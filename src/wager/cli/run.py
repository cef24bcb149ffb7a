"""`wager run`: answer one prompt, streamed."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wager.config import EngineConfig
from wager.drafter_spec import DrafterSpec
from wager.errors import UsageError
from wager.inputs import read_text
from wager.terminal import console, flags
from wager.types import Completion, OutputDelta, Request, SamplingParams, Stats

if TYPE_CHECKING:
    from wager.cli.coloring import DraftColorer
    from wager.cli.rounds import RoundReport
    from wager.llm import LLM
    from wager.loading.load import LoadedEngine
    from wager.models.tokenizer import Tokenizer


@click.command("run", cls=flags.Verb)
@click.argument("prompt", required=False)
@click.option("--show", is_flag=True, help="Colour each token by the drafter that guessed it.")
@click.option(
    "--rounds",
    is_flag=True,
    help="Instead of the text, print every round: the tokens that were guessed, "
    "accepted, corrected and discarded, and its time.",
)
@click.option("--explain", is_flag=True, help="Print the draft decision of the last step, and its reason.")
@click.option(
    "--prediction",
    "prediction_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A text that the answer is expected to be like, such as a file that it edits: guesses come from it "
    "too. It changes no token.",
)
@flags.framing_flags
@flags.engine_flags()
@flags.sampling_flags()
@flags.json_flag
def command(
    prompt: str | None,
    *,
    show: bool,
    rounds: bool,
    explain: bool,
    prediction_path: Path | None,
    framing: flags.Framing,
    config: EngineConfig,
    params: SamplingParams,
    json_path: Path | None,
) -> None:
    """Answer PROMPT and stream the text; the last line shows tokens, speed and τ, the mean acceptance length.

    Without PROMPT, or with -, it is read from standard input.
    """
    from wager.cli.loading import open_llm

    text = _prompt(prompt)
    if show and rounds:
        raise click.UsageError("--show colours the text; --rounds prints rounds in its place. Give one of the two.")
    if prediction_path is not None:
        params = replace(params, prediction=read_text(prediction_path, "predicted answer", "Give a text file."))
        _check_predictions(config.speculation.drafters)
    requests: list[Request] = []

    def expected(tokenizer: Tokenizer) -> list[Request]:
        requests.append(Request("prompt", framing.encode(tokenizer, text), params))
        return requests

    with open_llm(config, expected=expected) as llm:
        stream = llm.stream(requests[0].prompt, params)
        colorer = _colorer(llm.tokenizer, stream.request.prompt) if show else None
        to_stdout = str(json_path) != "-"
        report = _print_rounds(stream, llm, to_stdout=to_stdout) if rounds else None
        if to_stdout:
            _print(stream, colorer)  # nothing is left of it after the rounds
        else:
            deque(stream, maxlen=0)
        [answer] = stream.completions()
        if json_path:
            details: dict[str, object] = {"round_details": report.as_dicts()} if report else {}
            console.write_json(_result(answer, config, llm.engine) | details, json_path)
        if colorer:
            click.echo(f"guessed by: {colorer.legend()}", err=True, color=True)
        _say_details(llm.engine, explain=explain)
    console.say(footer(answer.stats, sampled=params.temperature > 0))
    if answer.finish_reason == "error":
        raise click.ClickException(answer.error)


def _say_details(engine: LoadedEngine, *, explain: bool) -> None:
    for name, figures in engine.ahead.items():
        console.say(f"{name}, ahead of the target: {figures}")
    if explain:
        from wager.cli.loading import loaded_lines

        for line in (*loaded_lines(engine), engine.policy.explain()):
            console.say(line)


def _check_predictions(drafters: Sequence[DrafterSpec]) -> None:
    """UsageError if none of the drafters reads predictions."""
    named = [part for spec in drafters for part in (spec.parts or (spec,))]
    if not any(spec.option.reads_predictions for spec in named):
        raise UsageError(
            f"--prediction has no effect with --drafter {','.join(map(str, drafters)) or 'none'}.",
            "Use --drafter prediction, or another that looks up.",
        )


def _print_rounds(deltas: Iterable[OutputDelta], llm: LLM, *, to_stdout: bool) -> RoundReport:
    """Collect every round; print it as it ends, and the sums over all, unless stdout is for something else."""
    from wager.cli.rounds import RoundReport
    from wager.engine.rounds import RoundRecorder

    recorder, report = RoundRecorder.attach(llm.engine), RoundReport(llm.tokenizer)
    for delta in deltas:
        item = recorder.take(delta)
        if item:
            lines = report.add(item)
            if to_stdout:
                click.echo(lines)
    if to_stdout:
        click.echo(report.summary())
    return report


def _print(deltas: Iterable[OutputDelta], colorer: DraftColorer | None) -> None:
    """Print the text as it is generated, in colour with a `colorer`; the last line always ends with a newline."""
    written = 0
    try:
        for delta in deltas:
            text = colorer.paint(delta.text, delta.token_ids, delta.drafted_by) if colorer else delta.text
            click.echo(text, nl=False, color=True if colorer else None)
            written += len(text)
    finally:
        if written:
            click.echo()


def footer(stats: Stats, *, sampled: bool) -> str:
    """The last line: tokens, tokens per second of decoding, mean acceptance length, the counts behind them, and the
    seed if it matters."""
    speed = f"{stats.completion_tokens / stats.decode_s:.1f}" if stats.decode_s > 0 else "–"
    return (
        f"{stats.completion_tokens} tokens, {speed} tok/s, τ {stats.mean_acceptance_length:.2f} "
        f"({stats.drafter}: {stats.accepted} of {stats.drafted} guesses accepted; "
        f"prompt {stats.prompt_tokens} tokens, {stats.cached_tokens} cached, {stats.prefill_s:.2f} s"
        + (f"; seed {stats.seed})" if sampled else ")")
    )


def _prompt(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError('Give a prompt: wager run "PROMPT", or pipe one in.')
    if prompt in (None, "-"):
        prompt = sys.stdin.read()
    if not prompt or not prompt.strip():
        raise click.UsageError("The prompt is empty.")
    return prompt


def _colorer(tokenizer: Tokenizer, prompt: Sequence[int]) -> DraftColorer:
    from wager.cli.coloring import DraftColorer
    from wager.models.tokenizer import IncrementalDecoder

    return DraftColorer(IncrementalDecoder(tokenizer, after=prompt))


def _result(answer: Completion, config: EngineConfig, engine: LoadedEngine) -> dict[str, object]:
    stats = answer.stats
    ahead = {name: figures.as_dict() for name, figures in engine.ahead.items()}
    return {
        "model": config.model.model,
        "kernels": engine.kernels.name,
        "prompt_tokens": stats.prompt_tokens,
        "tokens": stats.completion_tokens,
        "token_ids": list(answer.token_ids),
        "drafted_by": list(answer.drafted_by),
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "error": answer.error,
        "seed": stats.seed,
        "prefill_s": stats.prefill_s,
        "decode_s": stats.decode_s,
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "drafter": stats.drafter,
        "mean_acceptance_length": stats.mean_acceptance_length,
        **({"ahead": ahead} if ahead else {}),
    }
