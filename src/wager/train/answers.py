"""Training texts by the target itself: prompts from a file or made up by the model, and its answers to them.

Answers are appended to a JSON-lines file whose first line names the model; a run that was killed goes on after the last
whole line, and trains on the same texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from wager.engine.core import Engine
from wager.errors import MALFORMED, UsageError
from wager.inputs import read_text, replacing, shown
from wager.models.tokenizer import Tokenizer
from wager.prompts import OTHER, ChatTokenizer, Prompt, TextPart, as_conversation, encode_content, read_prompts
from wager.train.data import TrainingTarget, TrainingText, check_disjoint
from wager.types import OutputDelta, Request, SamplingParams

_BATCH = 128
"""Requests between two writes."""

_HINT = 'A row is {"prompt_ids": [...], "token_ids": [...]}, as `wager train` writes it.'
_MARK = "WAGERUSERTEXT"


def answer(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    path: Path,
    *,
    params: SamplingParams,
    concurrency: int,
    on_output: Callable[[OutputDelta], None] | None = None,
) -> None:
    """Answer the prompts (token ids) and append the answers to the file at `path`."""
    for first in range(0, len(prompts), _BATCH):
        part = prompts[first : first + _BATCH]
        requests = [Request(f"answer-{first + number}", prompt, params) for number, prompt in enumerate(part)]
        completions = engine.generate(requests, concurrency=concurrency, on_output=on_output)
        rows = [
            {"prompt_ids": list(prompt), "token_ids": list(completion.token_ids)}
            for prompt, completion in zip(part, completions, strict=True)
            if completion.finish_reason != "error"
        ]
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))


def unanswered(prompts: Iterable[tuple[int, ...]], path: Path, *, target: str) -> list[tuple[int, ...]]:
    """The different prompts that the file at `path` has no answer for. The file is made if it is not there, for the
    model of the fingerprint `target`, and a line that a kill has cut off is removed.

    UsageError if the file has answers of another model.
    """
    data = path.read_bytes() if path.exists() else b""
    whole = data.rfind(b"\n") + 1
    if not whole:
        path.write_text(json.dumps({"target": target}) + "\n", encoding="utf-8")
    elif whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
    known = {text.ids[: text.prompt_length] for text in read_answers(path, target=target)}
    return [prompt for prompt in dict.fromkeys(prompts) if prompt not in known]


def read_answers(path: Path, *, target: str, vocab: int | None = None) -> Iterator[TrainingText]:
    """The answers of a file; without a first line that names the model it is believed. UsageError names file and line
    of a row that is none, and a file that is of another model; with `vocab` ids must be below it."""
    for number, line in enumerate(read_text(path, "file of answers", _HINT).splitlines(), 1):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
            if number == 1 and "target" in row:
                if row["target"] != target:
                    raise UsageError(
                        f"{where}: these are answers of another model.", "Write to another file or folder."
                    )
                continue
            prompt, answered = row["prompt_ids"], row["token_ids"]
            ids = (*prompt, *answered)
        except MALFORMED as error:
            raise UsageError(f"{where}: {shown(line)} is no answer.", _HINT) from error
        if not all(type(token) is int and token >= 0 and (vocab is None or token < vocab) for token in ids):
            raise UsageError(f"{where}: a token id is not of this model.", "Give answers of the same model.")
        yield TrainingText(ids, len(prompt))


def bare_header(tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """Token ids of what the chat template writes before a user's message."""
    before: list[TextPart] = []
    for part in tokenizer.chat_parts([{"role": "user", "content": _MARK}], add_generation_prompt=False):
        head, found, _ = part.text.partition(_MARK)
        before.append(TextPart(head, part.parse_special))
        if found:
            break
    return tuple(tokenizer.encode_parts([part for part in before if part.text]))


ANSWERS, MADE_UP = "answers.jsonl", "made_up.json"


@dataclass(frozen=True, slots=True)
class TextSources:
    """Where training texts come from: a file of prompts, how many the model makes up, files of answers, files of
    prompts that must not be among them, how long answers are (0: prompts are not answered), how many are given
    together, and the seed of what is drawn."""

    prompts: Path | None = None
    made_up: int = 0
    answers: tuple[Path, ...] = ()
    apart_from: tuple[Path, ...] = ()
    answer_tokens: int = 160
    concurrency: int = 32
    seed: int = 0


def collect_texts(
    target: TrainingTarget,
    sources: TextSources,
    folder: Path,
    *,
    engine: Callable[[], Engine],
    on_output: Callable[[int], Callable[[OutputDelta], None]],
) -> list[TrainingText]:
    """The texts, of which those that are missing are generated by `engine()`, which is called only then; `on_output` is
    asked for a function of its deltas with the number of answers to come. UsageError names what cannot be used."""
    vocab, fingerprint = target.weights.spec.vocab, target.fingerprint
    given = [text for path in sources.answers for text in read_answers(path, target=fingerprint, vocab=vocab)]
    asked = read_prompts(sources.prompts) if sources.prompts else []
    if sources.made_up:
        texts = _made_up(target.tokenizer, sources, folder / MADE_UP, engine)
        asked += [Prompt(f"made-up-{number}", OTHER, text) for number, text in enumerate(texts)]
    for path in sources.apart_from:
        measured = [prompt.text for prompt in read_prompts(path) if prompt.text]
        check_disjoint([prompt.text for prompt in asked], measured, where=str(path))
    prompts = [encode_content(target.tokenizer, as_conversation(each.content)) for each in asked]
    room = target.weights.spec.context - sources.answer_tokens
    wanted = dict.fromkeys(prompt for prompt in prompts if len(prompt) <= room)
    if not sources.answer_tokens:
        return [*given, *(TrainingText(prompt, len(prompt)) for prompt in wanted)]
    if not wanted:
        return given
    path = folder / ANSWERS
    missing = unanswered(wanted, path, target=fingerprint)
    if missing:
        params = SamplingParams(max_tokens=sources.answer_tokens, seed=sources.seed)
        report = on_output(len(missing))
        answer(engine(), missing, path, params=params, concurrency=sources.concurrency, on_output=report)
    found = read_answers(path, target=fingerprint, vocab=vocab)
    return [*given, *(text for text in found if text.ids[: text.prompt_length] in wanted)]


def read_made_up(path: Path) -> tuple[list[int], list[str]]:
    """The number and seed of an earlier start of a run, and the prompts that the model made up for it. UsageError if
    the file is damaged."""
    text = read_text(path, "file of made-up prompts", "Remove it.")
    try:
        kept = json.loads(text)
        key, prompts = list(kept["key"]), list(kept["prompts"])
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise TypeError("a prompt is no text")
    except MALFORMED as error:
        raise UsageError(f"The file of made-up prompts {path} is damaged: {error!r}.", "Remove it.") from error
    return key, prompts


def _made_up(tokenizer: Tokenizer, sources: TextSources, path: Path, engine: Callable[[], Engine]) -> list[str]:
    """Texts that the model writes where a user's message would stand, at temperature 1, empty ones left out: those of
    an earlier start of this run, or new ones."""
    wanted = [sources.made_up, sources.seed]
    if path.exists():
        key, prompts = read_made_up(path)
        if key == wanted:
            return prompts
    header = bare_header(tokenizer)
    requests = [
        Request(f"prompt-{number}", header, SamplingParams(max_tokens=96, temperature=1.0, seed=sources.seed + number))
        for number in range(sources.made_up)
    ]
    answers = engine().generate(requests, concurrency=sources.concurrency)
    texts = [tokenizer.decode(completion.token_ids).strip() for completion in answers]
    found = [text for text in dict.fromkeys(texts) if text]
    with replacing(path) as file:
        file.write(json.dumps({"key": wanted, "prompts": found}).encode())
    return found
