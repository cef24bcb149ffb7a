"""Training texts by the target itself: prompts from a file or made up by the model, and its answers to them.

Answers are appended to a JSON-lines file whose first line names the model; a run that was killed goes on after the last
whole line, and trains on the same texts if the engine writes them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from wager.engine.core import Engine
from wager.errors import MALFORMED, UsageError
from wager.inputs import naming, read_text, replacing, shown
from wager.models.tokenizer import Tokenizer
from wager.prompts import (
    OTHER,
    ChatTokenizer,
    Prompt,
    TextPart,
    as_conversation,
    encode_answer,
    encode_content,
    read_prompts,
)
from wager.train.data import TrainingTarget, TrainingText, check_disjoint
from wager.types import OutputDelta, Request, SamplingParams

log = logging.getLogger("wager")

_HINT = 'A row is {"prompt_ids": [...], "token_ids": [...], "temperature": 0.8}, as `wager train` writes it.'
_MARK = "WAGERUSERTEXT"


OnOutput = Callable[[OutputDelta], None]


class Author(Protocol):
    """What writes answers: the engine, or the target in torch. `batch` requests are between two writes to a file."""

    @property
    def batch(self) -> int: ...

    def write(self, requests: Sequence[Request], on_output: OnOutput | None = None) -> list[tuple[int, ...] | None]:
        """The token ids of every answer; None of one that failed."""


@dataclass(frozen=True, slots=True)
class EngineAuthor:
    """The engine, `concurrency` requests at a time."""

    engine: Engine
    concurrency: int
    batch: int = 128

    def write(self, requests: Sequence[Request], on_output: OnOutput | None = None) -> list[tuple[int, ...] | None]:
        found = self.engine.generate(requests, concurrency=self.concurrency, on_output=on_output)
        return [None if answer.finish_reason == "error" else tuple(answer.token_ids) for answer in found]


def author_of(
    target: TrainingTarget, *, device: str, precision: str, engine: Callable[[], Engine], concurrency: int
) -> Author:
    """The engine, which is loaded for it; on a GPU the target in torch."""
    if device == "cpu":
        return EngineAuthor(engine(), concurrency)
    from wager.train.generation import TorchAuthor

    tokenizer, vocab = target.tokenizer, target.weights.spec.vocab
    return TorchAuthor(
        target.weights,
        eos=tokenizer.eos_ids,
        suppressed=[each for each in tokenizer.suppressed_ids if each < vocab],
        precision=precision,
        device=device,
    )


def answer(author: Author, requests: Sequence[Request], path: Path, on_output: OnOutput | None = None) -> None:
    """Answer the requests and append the answers to the file at `path`."""
    for first in range(0, len(requests), author.batch):
        part = requests[first : first + author.batch]
        written = author.write(part, on_output)
        rows = [
            {"prompt_ids": list(asked.prompt), "token_ids": list(ids), "temperature": asked.params.temperature}
            for asked, ids in zip(part, written, strict=True)
            if ids is not None
        ]
        with naming(path), path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))


def unanswered(requests: Iterable[Request], path: Path, *, target: str) -> list[Request]:
    """The requests that the file at `path` has no answer for, by prompt and temperature. The file is made if it is not
    there, for the model of the fingerprint `target`, and a line that a kill has cut off is removed.

    UsageError if the file has answers of another model.
    """
    data = path.read_bytes() if path.exists() else b""
    whole = data.rfind(b"\n") + 1
    if not whole:
        with naming(path):
            path.write_text(json.dumps({"target": target}) + "\n", encoding="utf-8")
    elif whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
    known = {(text.ids[: text.prompt_length], temperature) for text, temperature in _answers(_read(path), path, target)}
    return [request for request in requests if (request.prompt, request.params.temperature) not in known]


def read_answers(path: Path, *, target: str, vocab: int | None = None) -> Iterator[TrainingText]:
    """The answers of a file; without a first line that names the model it is believed. UsageError names file and line
    of a row that is none, and a file that is of another model; with `vocab` ids must be below it."""
    return (answered for answered, _ in _answers(_read(path), path, target, vocab))


def _read(path: Path) -> str:
    """The text of a file of answers, which may be a pipe: it is read once."""
    return read_text(path, "file of answers", _HINT)


def _is_log(text: str) -> bool:
    """Whether a file of this text is not as `wager train` writes it."""
    try:
        row = json.loads(text.partition("\n")[0])
    except (ValueError, RecursionError):
        return True
    return not isinstance(row, dict) or ("prompt_ids" not in row and row.keys() != {"target"})


_CHARACTERS = 4
"""Of a token, about."""


def count_tokens(path: Path) -> int:
    """Tokens of the texts in a file of answers; about how many in a log, whose texts need no tokenizer for it.
    UsageError as `read_answers`."""
    if not _is_log(text := _read(path)):
        return sum(len(answered.ids) for answered, _ in _answers(text, path))
    found = 0
    for prompt in read_prompts(path, text=text):
        for part in (prompt.text or prompt.content, prompt.answer) if prompt.answer else ():
            found += len(part) // _CHARACTERS if isinstance(part, str) else len(part) if isinstance(part, tuple) else 0
    return found


def _logged(path: Path, requests: Sequence[Prompt], target: TrainingTarget, vocab: int) -> Iterator[TrainingText]:
    """The answers of a log, of which these are the requests."""
    tokenizer = target.tokenizer
    answered = [prompt for prompt in requests if prompt.answer]
    if not answered:
        raise UsageError(f"{path} has no answers.", f"{_HINT} Or it is a log, with what was answered.")
    if len(answered) < len(requests):
        missing = len(requests) - len(answered)
        log.warning("%d of %d requests in %s have no answer and are left out.", missing, len(requests), path)
    for prompt in answered:
        asked = encode_content(tokenizer, as_conversation(prompt.content))
        said = encode_answer(tokenizer, prompt.answer)
        ids = (*asked, *said)
        if max(ids) >= vocab:
            raise UsageError(f"{path}: request {prompt.id} has a token id that is not of this model.", _HINT)
        yield TrainingText(ids, len(asked))


def _answers(
    text: str, path: Path, target: str | None = None, vocab: int | None = None
) -> Iterator[tuple[TrainingText, float]]:
    """Each answer in the text of a file, and its temperature. `target`: of any model where it is None."""
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
            if number == 1 and "target" in row:
                if target not in (None, row["target"]):
                    raise UsageError(
                        f"{where}: these are answers of another model.", "Write to another file or folder."
                    )
                continue
            prompt, answered = row["prompt_ids"], row["token_ids"]
            ids = (*prompt, *answered)
            temperature = float(row.get("temperature", 0))
        except MALFORMED as error:
            raise UsageError(f"{where}: {shown(line)} is no answer.", _HINT) from error
        if not all(type(token) is int and token >= 0 and (vocab is None or token < vocab) for token in ids):
            raise UsageError(f"{where}: a token id is not of this model.", "Give answers of the same model.")
        yield TrainingText(ids, len(prompt)), temperature


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
    """Where training texts come from: prompts, how many the model makes up, files of answers, files of
    prompts that must not be among them, how long answers are (0: prompts are not answered), the temperatures at each of
    which a prompt is answered once, and the seed of what is drawn."""

    prompts: Sequence[Prompt] = ()
    made_up: int = 0
    answers: tuple[Path, ...] = ()
    apart_from: tuple[Path, ...] = ()
    answer_tokens: int = 160
    temperature: tuple[float, ...] = (0.0,)
    seed: int = 0


def collect_texts(
    target: TrainingTarget,
    sources: TextSources,
    folder: Path,
    *,
    author: Callable[[], Author],
    on_output: Callable[[int], OnOutput],
) -> list[TrainingText]:
    """The texts, of which those that are missing are written by `author()`, which is called only then; `on_output` is
    asked for a function of its deltas with the number of answers to come. UsageError names what cannot be used."""
    vocab, fingerprint = target.weights.spec.vocab, target.fingerprint
    given: list[TrainingText] = []
    logged: list[Prompt] = []
    for path in sources.answers:
        if _is_log(text := _read(path)):
            recorded = read_prompts(path, text=text)
            given += _logged(path, recorded, target, vocab)
            logged += recorded
        else:
            given += (answered for answered, _ in _answers(text, path, fingerprint, vocab))
    asked = [*sources.prompts]
    if sources.made_up:
        texts = _made_up(target.tokenizer, sources, folder / MADE_UP, author)
        asked += [Prompt(f"made-up-{number}", OTHER, text) for number, text in enumerate(texts)]
    for path in sources.apart_from:
        measured = [prompt.text for prompt in read_prompts(path) if prompt.text]
        check_disjoint([prompt.text for prompt in (*asked, *logged)], measured, where=str(path))
    prompts = [encode_content(target.tokenizer, as_conversation(each.content)) for each in asked]
    room = target.weights.spec.context - sources.answer_tokens
    wanted = dict.fromkeys(prompt for prompt in prompts if len(prompt) <= room)
    if long := sum(len(prompt) > room for prompt in prompts):
        said = "%d of %d prompts leave no room in the context for an answer of %d tokens, and are left out."
        log.warning(said, long, len(prompts), sources.answer_tokens)
    if not sources.answer_tokens:
        return [*given, *(TrainingText(prompt, len(prompt)) for prompt in wanted)]
    if not wanted:
        return given
    path = folder / ANSWERS
    requests = [
        Request(
            f"answer-{number}-{place}",
            prompt,
            SamplingParams(max_tokens=sources.answer_tokens, temperature=temperature, seed=sources.seed + number),
        )
        for number, prompt in enumerate(wanted)
        for place, temperature in enumerate(dict.fromkeys(sources.temperature))
    ]
    missing = unanswered(requests, path, target=fingerprint)
    if missing:
        answer(author(), missing, path, on_output(len(missing)))
    asked_for = {(request.prompt, request.params.temperature) for request in requests}
    found = _answers(_read(path), path, fingerprint, vocab)
    return [*given, *(text for text, at in found if (text.ids[: text.prompt_length], at) in asked_for)]


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


def _made_up(tokenizer: Tokenizer, sources: TextSources, path: Path, author: Callable[[], Author]) -> list[str]:
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
    texts = [tokenizer.decode(ids).strip() for ids in author().write(requests) if ids is not None]
    found = [text for text in dict.fromkeys(texts) if text]
    with replacing(path) as file:
        file.write(json.dumps({"key": wanted, "prompts": found}).encode())
    return found
