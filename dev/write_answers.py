"""Answers to train a drafter on, by the target itself, to more kinds of prompts than a file of them has.

    python dev/write_answers.py PROMPTS.jsonl -o answers.jsonl [--apart-from MEASURED.jsonl] [--device cuda]
        [--made-up 16000] [--each 5000] [--answer-tokens 256] [--seconds 200] [--seed 1]

Kinds: the prompts of the file; of their texts: summaries, questions behind one to three passages, questions alone, sums
with other numbers, translations of sentences to another language, and back of what the target made of them; messages
that the target makes up, half of them begun for it; and second turns, which are other made-up messages behind an
answer. A prompt is answered at temperatures 0, 0.8 and 1. `--each` bounds the number of a kind. Kinds are mixed, and no
more are asked after --seconds.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from wager.config import EngineConfig
from wager.loading.load import load
from wager.models.opening import open_model
from wager.models.tokenizer import Tokenizer
from wager.prompts import Content, as_conversation, encode_content, read_prompts
from wager.train.answers import Author, answer, author_of, bare_header, read_answers, unanswered
from wager.train.data import TrainingTarget, check_disjoint
from wager.train.target import choose_device
from wager.types import Request, SamplingParams

SAMPLED = (0.8, 1.0)
CHUNK = 8192
LONGEST_PROMPT = 900
LANGUAGES = ("German", "German", "German", "French", "Spanish")
"""In turns."""
ASKED = ("Who", "When", "Where", "What", "Why", "How", "Which", "who", "when did", "where is", "what is", "how many")
BEGUN = ("Write", "Describe", "Explain", "Compose", "Imagine", "Create", "Suppose", "Design", "If", "You are", "Act as")
"""How made-up messages begin: questions, which end with their question mark, and others."""

_QUESTION = re.compile(r"(?:^|: |\n)\"?([A-Z][^.?!:\n\"]{14,140}\?)(?=\"?\s*(?:\n|$))")
_OF_A_TEXT = re.compile(r"question|answer|passage|article|paragraph|following|text|sentence", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_NUMBER = re.compile(r"(?<![\d.,$])\d{1,3}(?![\d.,%]*\d)")


@dataclass(frozen=True)
class Parts:
    """What prompts of a file consist of: texts of more than 300 characters, sentences of them, questions, questions
    with the text that stands beside them, and prompts with numbers."""

    bodies: list[str]
    sentences: list[str]
    questions: list[str]
    asked: list[tuple[str, str]]
    numbered: list[str]

    @classmethod
    def of(cls, prompts: Sequence[str], chance: random.Random) -> Parts:
        bodies, questions, asked = [], [], []
        for prompt in prompts:
            body = max(re.split(r"\n\s*\n|\n(?=[A-Z]\w+:)", prompt), key=len).strip()
            body = "" if body == prompt.strip() else re.sub(r"^[A-Z][\w ]{1,20}: *\"?", "", body)
            beside = prompt.replace(body, "") if len(body) > 300 else prompt
            found = [text for text in _QUESTION.findall(beside) if not _OF_A_TEXT.search(text)]
            questions += found
            if len(body) > 300:
                bodies += [body, *([body[: len(body) // 2]] if len(body) > 1600 else [])]
                asked += [(body, text) for text in found[:1]]
        sentences = [text for body in bodies for text in _SENTENCE_END.split(body.replace("\n", " "))]
        sentences = [text for text in sentences if 6 <= len(text.split()) <= 28 and text[-1] in ".!?"]
        numbered = [prompt for prompt in prompts if len(prompt) < 600 and len(_NUMBER.findall(prompt)) > 1]
        parts = cls(*(list(dict.fromkeys(each)) for each in (bodies, sentences, questions, asked, numbered)))
        for part in (parts.bodies, parts.sentences, parts.questions, parts.asked, parts.numbered):
            chance.shuffle(part)
        return parts

    def retrieval(self, chance: random.Random) -> list[str]:
        """Questions behind their passage, which others may stand beside."""
        found = []
        for body, question in self.asked:
            passages = [body[:1600], *(other[:700] for other in chance.sample(self.bodies, chance.randint(0, 2)))]
            chance.shuffle(passages)
            found.append("\n".join([*passages, question]))
        return found

    def sums(self, chance: random.Random) -> list[str]:
        """Prompts with other numbers."""
        return [
            _NUMBER.sub(lambda match: str(max(2, int(int(match[0]) * chance.uniform(0.5, 2)))), text)
            for text in self.numbered
        ]


class Asking:
    """Requests to an author, numbered, so that each has noise of its own. What is answered goes to a file."""

    def __init__(self, author: Author, target: TrainingTarget, output: Path, seed: int, most: int) -> None:
        self.author, self._target, self._output, self._next, self._most = author, target, output, seed << 20, most

    @property
    def tokenizer(self) -> Tokenizer:
        return self._target.tokenizer

    def chat(self, content: Content) -> tuple[int, ...]:
        return tuple(encode_content(self.tokenizer, as_conversation(content)))

    def request(self, prompt: tuple[int, ...], temperature: float, most: int | None = None) -> Request:
        self._next += 1
        params = SamplingParams(max_tokens=most or self._most, temperature=temperature, seed=self._next)
        return Request(str(self._next), prompt, params)

    def greedy(self, prompts: Iterable[tuple[int, ...]]) -> list[Request]:
        return [self.request(prompt, 0.0) for prompt in prompts if len(prompt) <= LONGEST_PROMPT]

    def each(self, contents: Iterable[Content]) -> list[Request]:
        """Greedy requests, and sampled ones of the same prompts."""
        requests = self.greedy(map(self.chat, contents))
        return requests + [self.request(each.prompt, temperature) for temperature in SAMPLED for each in requests]

    def greedy_answers(self, contents: Sequence[Content]) -> list[tuple[Content, str]]:
        """Each content that is short enough, and its greedy answer, which is written first."""
        prompts = {self.chat(content): content for content in contents}
        target = self._target.fingerprint
        answer(self.author, unanswered(self.greedy(prompts), self._output, target=target), self._output)
        found: dict[tuple[int, ...], tuple[int, ...]] = {}
        for text in read_answers(self._output, target=target):
            found.setdefault(text.ids[: text.prompt_length], text.ids[text.prompt_length :])
        return [
            (content, self.tokenizer.decode(found[prompt]).strip())
            for prompt, content in prompts.items()
            if prompt in found
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--apart-from", type=Path, action="append", default=[])
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--made-up", type=int, default=16_000)
    parser.add_argument("--each", type=int, default=5000)
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    chance, started = random.Random(given.seed), time.monotonic()
    device, precision = choose_device(given.device, "auto", threads=None)
    target = TrainingTarget(given.model, *open_model(given.model))
    author = author_of(
        target,
        device=device,
        precision=precision,
        engine=lambda: load(EngineConfig.from_options(model=target.name)),
        concurrency=32,
    )
    asking = Asking(author, target, given.output, given.seed, given.answer_tokens)
    prompts = [prompt.text for prompt in read_prompts(given.prompts) if prompt.text]
    parts = Parts.of(prompts, chance)
    kinds: dict[str, Sequence[str]] = {
        "summaries": [f"Summarize: {body}" for body in parts.bodies],
        "retrieval": [text for _ in range(3) for text in parts.retrieval(chance)],
        "questions": parts.questions,
        "sums": [text for _ in range(2) for text in parts.sums(chance)],
        "translations": [
            f"Translate English to {LANGUAGES[at % 5]}: {text}"
            for first in (0, 3)
            for at, text in enumerate(parts.sentences, first)
        ],
    }
    kinds = {kind: list(dict.fromkeys(texts))[: given.each] for kind, texts in kinds.items()}
    kinds["prompts"] = prompts
    for path in given.apart_from:
        measured = [prompt.text for prompt in read_prompts(path) if prompt.text]
        for texts in kinds.values():
            check_disjoint(texts, measured, where=str(path))

    kinds["made up"] = made_up(asking, given.made_up)
    said(started, "prompts made up", len(kinds["made up"]))
    kinds["back"] = [
        f"Translate {str(wanted).partition(':')[0].split()[-1]} to English: {text}"
        for wanted, text in asking.greedy_answers(kinds.pop("translations"))
        if 20 < len(text) < 500
    ]
    turns: list[Content] = [
        (
            {"role": "user", "content": first},
            {"role": "assistant", "content": answered},
            {"role": "user", "content": then},
        )
        for then, (first, answered) in zip(
            kinds["made up"][::-1], asking.greedy_answers(kinds["made up"][: given.each // 2]), strict=False
        )
    ]
    said(started, "translations and first turns", len(kinds["back"]) + len(turns))
    asked = [request for contents in (*kinds.values(), turns) for request in asking.each(contents)]
    chance.shuffle(asked)
    asked = unanswered(asked, given.output, target=target.fingerprint)
    for first in range(0, len(asked), CHUNK):
        if time.monotonic() - started > given.seconds:
            said(started, f"out of time, of {len(asked)} asked", first)
            break
        answer(author, asked[first : first + CHUNK], given.output)
        said(started, f"of {len(asked)} answered", min(first + CHUNK, len(asked)))


def made_up(asking: Asking, count: int) -> list[str]:
    """Messages that the target writes at temperature 1, half of them with a beginning that is given."""
    header, begun = bare_header(asking.tokenizer), ("", *ASKED, "", *BEGUN)
    firsts = [begun[place // 2 % len(begun)] if place % 2 else "" for place in range(count)]
    requests = [asking.request((*header, *asking.tokenizer.encode_text(first)), 1.0, 96) for first in firsts]
    messages = []
    for first, ids in zip(firsts, asking.author.write(requests), strict=True):
        message = (first + asking.tokenizer.decode(ids or ())).strip()
        end = message.find("?") + 1 if first in ASKED else 0
        messages.append(message[:end] if end else message)
    return [message for message in dict.fromkeys(messages) if len(message) > 8]


def said(started: float, what: str, count: int) -> None:
    print(f"{time.monotonic() - started:.0f} s: {count} {what}", flush=True)


if __name__ == "__main__":
    main()
