"""`wager run`: answer one prompt, streamed."""

from __future__ import annotations

import os
import sys
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wager.config import EngineConfig
from wager.drafter_spec import DrafterSpec
from wager.engine.outputs import GuessedText, TokenDecoder
from wager.errors import UsageError, WagerError
from wager.inputs import read_text, strict_json
from wager.terminal import console, flags
from wager.types import Completion, Grammar, OutputDelta, Request, SamplingParams, Stats, VerifyRule

if TYPE_CHECKING:
    from wager.engine.rounds import Round, RoundSeconds
    from wager.llm import LLM
    from wager.loading.load import LoadedEngine
    from wager.models.tokenizer import Tokenizer
    from wager.receipts import SigningKey


@click.command(
    "run",
    cls=flags.Verb,
    main="show schema_path receipt_path system model drafter depth temperature top_p seed stop max_tokens json_path",
)
@click.argument("prompt", nargs=-1)
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
    type=flags.InputPath(),
    help="A text that the answer is expected to be like, such as a file that it edits: guesses come from it "
    "too. It changes no token.",
)
@click.option(
    "--json-schema",
    "schema_path",
    type=flags.InputPath(),
    help="A JSON schema that the answer keeps to; keywords that no grammar can say are checked at the end.",
)
@click.option(
    "--receipt",
    "receipt_path",
    type=flags.OutputPath(),
    metavar="FILE",
    help="Write a receipt, with which `wager verify` checks the answer on any machine that has the model.",
)
@flags.receipt_key_flag
@flags.framing_flags
@flags.engine_flags(learning=True)
@flags.sampling_flags()
@flags.json_flag
def command(
    prompt: tuple[str, ...],
    *,
    show: bool,
    rounds: bool,
    explain: bool,
    prediction_path: Path | None,
    schema_path: Path | None,
    receipt_path: Path | None,
    key_path: Path | None,
    framing: flags.Framing,
    config: EngineConfig,
    params: SamplingParams,
    json_path: Path | None,
) -> None:
    """Answer PROMPT and stream the text; the last line shows tokens, speed and τ, the mean acceptance length.

    PROMPT is one word or several. Without it, or with -, it is read from standard input.
    """
    text = _prompt(prompt)
    if prompt and ":" in prompt[0] and not flags.wrote("model"):
        _note_a_name(prompt[0])
    schema = _schema(schema_path) if schema_path else None
    from wager.cli.loading import loaded_lines, open_llm
    from wager.models.tokenizer import IncrementalDecoder

    if show and rounds:
        raise click.UsageError("--show colours the text; --rounds prints rounds in its place. Give one of the two.")
    if json_path == console.STDOUT:
        flags.refuse(["show"], "with --json -", "Write the JSON to a file.")
    if prediction_path is not None:
        params = replace(params, prediction=read_text(prediction_path, "predicted answer", "Give a text file."))
        _check_predictions(config.speculation.drafters)
    if schema is not None:
        params, unenforced = _keeping_to(schema, params)
    requests: list[Request] = []
    key = _receipt_key(receipt_path, key_path, config.speculation.verify)

    def expected(tokenizer: Tokenizer) -> list[Request]:
        requests.append(Request("prompt", framing.encode(tokenizer, text), params))
        return requests

    to_stdout = json_path != console.STDOUT
    with open_llm(config, expected=expected) as llm:
        stream = llm.stream(requests[0].prompt, params)
        colorer = DraftColorer(IncrementalDecoder(llm.tokenizer, after=stream.request.prompt)) if show else None
        report = _print_rounds(stream, llm, to_stdout=to_stdout) if rounds else None
        if to_stdout:
            _print(stream, colorer)  # nothing is left of it after the rounds
        else:
            deque(stream, maxlen=0)
        [answer] = stream.completions()
        details = {"round_details": report.as_dicts()} if report else {}
        console.write_json(_result(answer, config, llm.engine) | details, json_path)
        if receipt_path is not None and answer.finish_reason != "error":
            from wager.receipts import Receipt

            console.write_json(Receipt.of(llm.engine, stream.request, answer, key=key).as_dict(), receipt_path)
        if colorer:
            click.echo(f"guessed by: {colorer.legend()}", err=True, color=True)
        for name, figures in llm.engine.ahead.items():
            console.say(f"{name}, ahead of the target: {figures}")
        if explain:
            console.say("\n".join([*loaded_lines(llm.engine), llm.engine.policy.explain()]))
    if answer.finish_reason == "length":
        console.say(cut(answer.stats, params))
    console.say(footer(answer.stats, sampled=params.temperature > 0))
    if answer.finish_reason == "error":
        raise click.ClickException(answer.error)
    if answer.finish_reason != "length" and schema is not None and unenforced:
        from wager.constrain.schemas import violations

        if broken := violations(schema, answer.text):
            raise WagerError(" ".join(broken), f"No grammar can say {', '.join(unenforced)}. Ask again, or otherwise.")


def cut(stats: Stats, params: SamplingParams) -> str:
    """What is said of an answer that a limit ended."""
    if stats.completion_tokens >= params.max_tokens:
        return f"The answer was cut off after {params.max_tokens} tokens: -n N allows more."
    return "The answer was cut off where the context is full: --max-context N allows more, if the model does."


def _schema(path: Path) -> dict[str, Any]:
    """The JSON schema of a file; UsageError if it holds none."""
    try:
        value = strict_json(read_text(path, "schema", "Give a file with a JSON schema."))
    except ValueError as error:
        raise UsageError(f"The schema {path} is not JSON: {error}.", "Give one JSON object.") from None
    if not isinstance(value, dict):
        raise UsageError(f"The schema {path} is no object.", 'For example {"type": "object"}.')
    return value


def _keeping_to(schema: dict[str, Any], params: SamplingParams) -> tuple[SamplingParams, Sequence[str]]:
    """The parameters with the grammar of a schema, and the keywords that it lacks."""
    from wager.constrain.schemas import relaxed

    found = relaxed(schema)
    return replace(params, grammar=Grammar.json_schema(found.schema)), found.unenforced


def _receipt_key(receipt_path: Path | None, key_path: Path | None, rule: VerifyRule) -> SigningKey | None:
    """The key that signs the receipt, if one is wanted; UsageError if none can be made or signed."""
    if receipt_path is None:
        if key_path is not None:
            raise UsageError("--receipt-key has no effect without --receipt.", "Give the file of the receipt.")
        return None
    from wager.receipts import SigningKey, check_rule

    check_rule(rule)
    return SigningKey.read(key_path) if key_path else None


def _check_predictions(drafters: Sequence[DrafterSpec]) -> None:
    """UsageError if none of the drafters reads predictions."""
    named = [each for spec in drafters for each in spec.all if not each.parts]
    if not any(spec.option.reads_predictions for spec in named):
        raise UsageError(
            f"--prediction has no effect with --drafter {','.join(map(str, drafters)) or 'none'}.",
            "Use --drafter prediction, or another that looks up.",
        )


def _print_rounds(deltas: Iterable[OutputDelta], llm: LLM, *, to_stdout: bool) -> RoundReport:
    """Collect every round; print it as it ends, and the sums over all, unless stdout is for something else."""
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
    """The last line: tokens, tokens per second after the first, mean acceptance length, the counts behind them, and the
    seed if it matters."""
    speed = f"{(stats.completion_tokens - 1) / stats.decode_s:.1f}" if stats.decode_s > 0 else "–"
    return (
        f"{stats.completion_tokens} tokens, {speed} tok/s, τ {stats.mean_acceptance_length:.2f} "
        f"({stats.drafter}: {stats.accepted} of {stats.drafted} guesses accepted; "
        f"prompt {stats.prompt_tokens} tokens, {stats.cached_tokens} cached, {stats.prefill_s:.2f} s"
        + (f"; seed {stats.seed})" if sampled else ")")
    )


def _prompt(words: Sequence[str]) -> str:
    if not words and sys.stdin.isatty():
        raise click.UsageError('Give a prompt: wager run "PROMPT", or pipe one in.')
    prompt = sys.stdin.read() if words in ((), ("-",)) else " ".join(words)
    if not prompt.strip():
        raise click.UsageError("The prompt is empty.")
    return prompt


def _note_a_name(word: str) -> None:
    """Say it of a prompt that begins with the name of a model, as other programs' commands do."""
    from wager.models.names import named_model

    if named_model(word):
        console.say(f"note: {word} is read as a word of the prompt; -m {word} would choose that model.")


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


class RoundReport:
    """Collects the rounds of one answer, in order."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.rounds: list[Round] = []

    def add(self, item: Round) -> str:
        """Take the next round; its lines: each part with its tokens, separated by spaces."""
        self.rounds.append(item)
        tokens = item.draft.tokens
        inner = set(item.draft.parents)
        paths = [item.draft.path(node) for node in range(len(item.draft)) if node not in inner]
        parts = {
            f"guessed by {item.draft.drafter}": " / ".join(self._shown(tokens, path) for path in paths),
            f"accepted {len(item.accepted)}": self._shown(tokens, item.accepted),
            _own_kind(item): "" if item.target_token is None else visible(self._text(item.target_token)),
            f"discarded {len(item.discarded)}": self._shown(tokens, item.discarded),
            f"not verified {len(item.unverified)}": self._shown(tokens, item.unverified),
        }
        rows = f"{item.rows} row{'s' * (item.rows != 1)}"
        first = f"round {len(self.rounds)}: {rows}, {_times(item.seconds)}"
        return "\n".join([first, *(f"  {name}: {text}" for name, text in parts.items() if text)])

    def _shown(self, tokens: Sequence[int], nodes: Sequence[int]) -> str:
        return " ".join(visible(self._text(tokens[node])) for node in nodes)

    def _text(self, token: int) -> str:
        """The token's text; bytes of a character that it holds only in part as \\xNN."""
        return self._tokenizer.token_bytes(token).decode("utf-8", "backslashreplace")

    def summary(self) -> str:
        """The sums over all rounds."""
        rounds = self.rounds
        names = ("accepted", "discarded", "unverified", "emitted")
        accepted, discarded, unverified, emitted = (sum(len(getattr(item, name)) for item in rounds) for name in names)
        kinds = Counter(_own_kind(item) for item in rounds if item.target_token is not None)
        own = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        seconds = _times(*(item.seconds for item in rounds))
        return (
            f"total: {len(rounds)} rounds, {sum(item.rows for item in rounds)} rows, {seconds}\n"
            f"  {accepted + discarded + unverified} guessed: {accepted} accepted, {discarded} discarded, "
            f"{unverified} not verified\n"
            f"  {emitted} tokens: {accepted} guessed and accepted, {kinds.total()} of the target's own ({own})"
        )

    def as_dicts(self) -> list[dict[str, Any]]:
        """The rounds for JSON. `text` of all rounds, joined, is the answer."""
        return [
            {
                "drafted": list(item.draft.tokens),
                "drafted_text": [self._text(token) for token in item.draft.tokens],
                "parents": list(item.draft.parents),
                "verified": list(item.verified),
                "accepted": len(item.accepted),
                "accepted_nodes": list(item.accepted),
                "discarded": list(item.discarded),
                "emitted": list(item.emitted),
                "corrected": item.corrected,
                "text": item.text,
                "drafter": item.draft.drafter,
                "rows": item.rows,
                "seconds": {"draft": item.seconds.draft, "forward": item.seconds.forward, "rest": item.seconds.rest},
            }
            for item in self.rounds
        ]


def visible(text: str) -> str:
    """Text with spaces as · and whatever cannot be printed as an escape (a newline is \\n)."""
    return "".join(
        "·" if letter == " " else letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def _own_kind(item: Round) -> str:
    """What the target's own token is: it replaces a wrong guess, follows the last guess, or nothing was verified."""
    if item.corrected:
        return "corrected"
    return "bonus" if item.verified else "no guess"


def _times(*seconds: RoundSeconds) -> str:
    """The sums, in milliseconds."""
    parts = {name: sum(getattr(each, name) for each in seconds) for name in ("draft", "forward", "rest")}
    listed = ", ".join(f"{name} {1e3 * value:.2f}" for name, value in parts.items())
    return f"{1e3 * sum(parts.values()):.2f} ms ({listed})"


_COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "bright_red")


class DraftColorer:
    """Colours streamed text. `token_text` gives the text that each token adds, so that text is assigned to its drafter.

    Text may lag behind its tokens (stop strings, unfinished characters); it is assigned in order of arrival.
    """

    def __init__(self, token_text: TokenDecoder) -> None:
        self._text = GuessedText(token_text)
        self._colours: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    def paint(self, text: str, tokens: Sequence[int], drafted_by: Sequence[str]) -> str:
        """`text` with colours; `tokens` and the drafter of each ("": the target) arrived with it."""
        self._counts.update(drafted_by)
        return "".join(self._styled(part.text, part.drafter) for part in self._text.split(text, tokens, drafted_by))

    def legend(self) -> str:
        """How many tokens came from the target and from each drafter, in their colours."""
        drafters = [self._styled(f"{name} {count}", name) for name, count in sorted(self._counts.items()) if name]
        return ", ".join([f"target {self._counts['']}", *drafters])

    def _styled(self, text: str, drafter: str) -> str:
        if not drafter:
            return text
        if os.environ.get("NO_COLOR"):
            return f"[{text}]"
        return click.style(text, fg=self._colours.setdefault(drafter, _COLOURS[len(self._colours) % len(_COLOURS)]))
