"""Training texts by the target itself: prompts from a file or made up by the model, and its answers to them.

Answers are appended to a JSON-lines file whose first line names the model; a run that was killed goes on after the last
whole line, and trains on the same texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from wager.errors import MALFORMED, UsageError
from wager.inputs import read_text, replacing, shown
from wager.models.tokenizer import Tokenizer
from wager.prompts import ChatTokenizer, TextPart, encode_chat
from wager.train.data import TrainingTarget, TrainingText, check_disjoint
from wager.types import Completion, OutputDelta, Request, SamplingParams

_BATCH = 128
"""Requests between two writes."""

_HINT = 'A row is {"prompt_ids": [...], "token_ids": [...]}, as `wager train` writes it.'
_MARK = "WAGERUSERTEXT"


class AnsweringEngine(Protocol):
    """What is used of an engine."""

    def generate(
        self,
        requests: Sequence[Request],
        *,
        concurrency: int | None = None,
        on_output: Callable[[OutputDelta], None] | None = None,
    ) -> list[Completion]: ...


def answer(
    engine: AnsweringEngine,
    prompts: Sequence[Sequence[int]],
    path: Path,
    *,
    target: str,
    params: SamplingParams,
    concurrency: int,
    on_output: Callable[[OutputDelta], None] | None = None,
) -> None:
    """Answer the prompts (token ids) that the file at `path` has no answer for, and append those answers.

    `target` is the fingerprint of the model. UsageError if the file has answers of another.
    """
    known = {text.ids[: text.prompt_length] for text in _resumable(path, target)}
    missing = [tuple(prompt) for prompt in dict.fromkeys(map(tuple, prompts)) if tuple(prompt) not in known]
    for first in range(0, len(missing), _BATCH):
        part = missing[first : first + _BATCH]
        requests = [Request(f"answer-{first + number}", prompt, params) for number, prompt in enumerate(part)]
        completions = engine.generate(requests, concurrency=concurrency, on_output=on_output)
        rows = [
            {"prompt_ids": list(prompt), "token_ids": list(completion.token_ids)}
            for prompt, completion in zip(part, completions, strict=True)
            if completion.finish_reason != "error"
        ]
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))


def unanswered(prompts: Sequence[Sequence[int]], path: Path, *, target: str) -> int:
    """How many different prompts have no answer yet."""
    known = {text.ids[: text.prompt_length] for text in _resumable(path, target)}
    return len({tuple(prompt) for prompt in prompts} - known)


def _resumable(path: Path, target: str) -> list[TrainingText]:
    """The answers that are there, the file made if it is not, and a line that a kill has cut off removed."""
    header = json.dumps({"target": target}) + "\n"
    if not path.exists() or not path.stat().st_size:
        path.write_text(header, encoding="utf-8")
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return list(read_answers(path, target=target))


def read_answers(path: Path, *, target: str, vocab: int | None = None) -> Iterator[TrainingText]:
    """The answers of a file; without a first line that names the model it is believed. UsageError names file and line
    of a row that is none, and a file that is of another model; with `vocab` ids must be below it."""
    for number, line in enumerate(read_text(path, "file of answers", _HINT).splitlines(), 1):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
            if number == 1 and "target" in row:
                _check_target(row["target"], target, where)
                continue
            prompt, answered = row["prompt_ids"], row["token_ids"]
            ids = (*prompt, *answered)
        except MALFORMED as error:
            raise UsageError(f"{where}: {shown(line)} is no answer.", _HINT) from error
        if not all(type(token) is int and token >= 0 and (vocab is None or token < vocab) for token in ids):
            raise UsageError(f"{where}: a token id is not of this model.", "Give answers of the same model.")
        yield TrainingText(ids, len(prompt))


def _check_target(found: object, target: str, where: str) -> None:
    if found != target:
        raise UsageError(f"{where}: these are answers of another model.", "Write to another file or folder.")


def made_up_prompts(
    engine: AnsweringEngine,
    tokenizer: ChatTokenizer,
    decode: Callable[[Sequence[int]], str],
    count: int,
    *,
    seed: int,
    concurrency: int,
) -> list[str]:
    """Texts that the model writes where a user's message would stand, at temperature 1; empty ones left out."""
    header = bare_header(tokenizer)
    requests = [
        Request(f"prompt-{number}", header, SamplingParams(max_tokens=96, temperature=1.0, seed=seed + number))
        for number in range(count)
    ]
    found = [decode(completion.token_ids).strip() for completion in engine.generate(requests, concurrency=concurrency)]
    return [text for text in dict.fromkeys(found) if text]


def bare_header(tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """Token ids of what the chat template writes before a user's message."""
    before: list[TextPart] = []
    for part in tokenizer.chat_parts([{"role": "user", "content": _MARK}], add_generation_prompt=False):
        head, found, _ = part.text.partition(_MARK)
        before.append(TextPart(head, part.parse_special))
        if found:
            break
    return tuple(tokenizer.encode_parts([part for part in before if part.text]))


def read_prompt_texts(path: Path) -> list[str]:
    """The prompts of a JSON-lines file: rows with "prompt", or with "turns", of which the first is taken. UsageError
    names the file and the line of the first bad row."""
    hint = 'A row is {"prompt": TEXT} or {"turns": [TEXT, ...]}; other keys are ignored.'
    found = []
    for number, line in enumerate(read_text(path, "prompt file", hint).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = row["prompt"] if "prompt" in row else row["turns"][0]
            str(text).encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"{path}, line {number}: half a surrogate pair is no text.", hint) from error
        except MALFORMED as error:
            raise UsageError(f"{path}, line {number}: {shown(line)} has no prompt.", hint) from error
        if not isinstance(text, str) or not text.strip():
            raise UsageError(f"{path}, line {number}: the prompt is empty or not a text.", hint)
        found.append(text)
    if not found:
        raise UsageError(f"{path} holds no prompts.", hint)
    return found


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
    tokenizer: Tokenizer,
    sources: TextSources,
    folder: Path,
    *,
    engine: Callable[[], AnsweringEngine],
    on_output: Callable[[int], Callable[[OutputDelta], None]],
) -> list[TrainingText]:
    """The texts, of which those that are missing are generated by `engine()`, which is called only then; `on_output` is
    asked for a function of its deltas with the number of answers to come. UsageError names what cannot be used."""
    vocab, fingerprint = target.weights.spec.vocab, target.fingerprint
    given = [text for path in sources.answers for text in read_answers(path, target=fingerprint, vocab=vocab)]
    asked = read_prompt_texts(sources.prompts) if sources.prompts else []
    asked += _made_up(tokenizer, sources, folder, engine)
    for path in sources.apart_from:
        check_disjoint(asked, read_prompt_texts(path), where=str(path))
    prompts = list(dict.fromkeys(encode_chat(tokenizer, [{"role": "user", "content": text}]) for text in asked))
    prompts = [prompt for prompt in prompts if len(prompt) + sources.answer_tokens <= target.weights.spec.context]
    if not sources.answer_tokens:
        return [*given, *(TrainingText(prompt, len(prompt)) for prompt in prompts)]
    if not prompts:
        return given
    path = folder / ANSWERS
    missing = unanswered(prompts, path, target=fingerprint)
    if missing:
        params = SamplingParams(max_tokens=sources.answer_tokens, seed=sources.seed)
        answer(
            engine(),
            prompts,
            path,
            target=fingerprint,
            params=params,
            concurrency=sources.concurrency,
            on_output=on_output(missing),
        )
    wanted = set(prompts)
    found = read_answers(path, target=fingerprint, vocab=vocab)
    return [*given, *(text for text in found if text.ids[: text.prompt_length] in wanted)]


class MadeUpPrompts(NamedTuple):
    """The prompts of an earlier start of a run, and their number and seed."""

    key: list[int]
    prompts: list[str]


def read_made_up(path: Path) -> MadeUpPrompts:
    """From the file of a run. UsageError if it is damaged."""
    text = read_text(path, "file of made-up prompts", "Remove it.")
    try:
        kept = json.loads(text)
        found = MadeUpPrompts(list(kept["key"]), list(kept["prompts"]))
        if not all(isinstance(prompt, str) for prompt in found.prompts):
            raise TypeError("a prompt is no text")
    except MALFORMED as error:
        raise UsageError(f"The file of made-up prompts {path} is damaged: {error!r}.", "Remove it.") from error
    return found


def _made_up(
    tokenizer: Tokenizer, sources: TextSources, folder: Path, engine: Callable[[], AnsweringEngine]
) -> Sequence[str]:
    """The prompts that the model makes up: those of an earlier start of this run, or new ones."""
    if not sources.made_up:
        return []
    path, key = folder / MADE_UP, [sources.made_up, sources.seed]
    if path.exists():
        kept = read_made_up(path)
        if kept.key == key:
            return kept.prompts
    found = made_up_prompts(
        engine(), tokenizer, tokenizer.decode, sources.made_up, seed=sources.seed, concurrency=sources.concurrency
    )
    with replacing(path) as file:
        file.write(json.dumps({"key": key, "prompts": found}).encode())
    return found
