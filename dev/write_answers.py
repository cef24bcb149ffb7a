"""Answers to train a drafter on, by the target itself, to more kinds of prompts than a file of them has.

    python dev/write_answers.py PROMPTS.jsonl -o answers.jsonl [--apart-from MEASURED.jsonl] [--device cuda]
        [--made-up 26000] [--each 6000] [--answer-tokens 256] [--seconds 220] [--seed 1]

Kinds: the prompts of the file at temperatures 0, 0.8 and 1; at two temperatures each: its long texts to be summarised;
three of them with a question, as retrieval gives them; sentences of them to be translated to German, and these
translations back; messages that the target makes up; second turns, which are other made-up messages behind an answer.
`--each` bounds the number of a kind. Kinds are mixed, and no more are asked after --seconds. What comes with wager for
SmolLM2-135M-Instruct is of 44,767 such answers (one H200, 220 seconds; the target made up the second messages behind
the answers there).
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from wager.config import EngineConfig
from wager.loading.load import load
from wager.models.opening import open_model
from wager.models.tokenizer import Tokenizer
from wager.prompts import Content, as_conversation, encode_content, read_prompts
from wager.train.answers import Author, answer, author_of, bare_header, unanswered
from wager.train.data import TrainingTarget, check_disjoint
from wager.train.target import choose_device
from wager.types import Request, SamplingParams

TEMPERATURES = (0.0, 0.8, 1.0)
CHUNK = 8192
LONGEST_PROMPT = 760


def texts_of(prompts: Sequence[str], each: int, chance: random.Random) -> dict[str, list[str]]:
    """Prompts of the kinds that are made of a file's."""
    bodies = [max(prompt.split("\n\n"), key=len).strip() for prompt in prompts]
    bodies = [body for body in dict.fromkeys(bodies) if len(body) > 300]
    sentences = [text for body in bodies for text in re.split(r"(?<=[.!?])\s+", body.replace("\n", " "))]
    sentences = [text for text in dict.fromkeys(sentences) if 6 <= len(text.split()) <= 28 and text[-1] in ".!?"]
    questions = [prompt for prompt in prompts if len(prompt) < 120 and prompt.endswith("?")] or ["What is said here?"]
    for texts in (bodies, sentences):
        chance.shuffle(texts)
    passages = [chance.sample(bodies, min(3, len(bodies))) for _ in range(min(each, len(bodies)))]
    return {
        "prompts": list(prompts),
        "summaries": [f"Summarize: {body}" for body in bodies[:each]],
        "retrieval": ["\n".join([*(text[:700] for text in some), chance.choice(questions)]) for some in passages],
        "translations": [f"Translate English to German: {sentence}" for sentence in sentences[:each]],
    }


class Asking:
    """Requests to an author, numbered, so that each has noise of its own."""

    def __init__(self, author: Author, tokenizer: Tokenizer, seed: int) -> None:
        self.author, self._tokenizer, self._next = author, tokenizer, seed

    def chat(self, content: Content) -> tuple[int, ...]:
        return tuple(encode_content(self._tokenizer, as_conversation(content)))

    def requests(self, prompts: Iterable[tuple[int, ...]], temperatures: Sequence[float], most: int) -> list[Request]:
        found = []
        for prompt in prompts:
            if len(prompt) <= LONGEST_PROMPT:
                for temperature in temperatures:
                    self._next += 1
                    params = SamplingParams(max_tokens=most, temperature=temperature, seed=self._next)
                    found.append(Request(str(self._next), prompt, params))
        return found

    def texts(self, requests: Sequence[Request]) -> list[str]:
        return [self._tokenizer.decode(ids or ()).strip() for ids in self.author.write(requests)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--apart-from", type=Path, action="append", default=[])
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--made-up", type=int, default=26_000)
    parser.add_argument("--each", type=int, default=6000)
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    chance, started = random.Random(given.seed), time.monotonic()
    device, precision = choose_device(given.device, "auto", threads=None)
    target = TrainingTarget(given.model, *open_model(given.model))
    tokenizer = target.tokenizer
    author = author_of(
        target,
        device=device,
        precision=precision,
        engine=lambda: load(EngineConfig.from_options(model=target.name)),
        concurrency=32,
    )
    asking = Asking(author, tokenizer, given.seed << 20)
    prompts = [prompt.text for prompt in read_prompts(given.prompts) if prompt.text]
    kinds = texts_of(prompts, given.each, chance)
    for path in given.apart_from:
        measured = [prompt.text for prompt in read_prompts(path) if prompt.text]
        for texts in kinds.values():
            check_disjoint(texts, measured, where=str(path))

    header = bare_header(tokenizer)
    made_up = asking.texts(asking.requests([header] * given.made_up, (1.0,), 96))
    kinds["made up"] = [text for text in dict.fromkeys(made_up) if len(text) > 8]
    to_german = [asking.chat(text) for text in kinds["translations"]]
    german = asking.texts(asking.requests(to_german, (0.0,), 160))
    kinds["back"] = [f"Translate German to English: {text}" for text in german if 20 < len(text) < 500]
    turns = second_turns(asking, kinds["made up"][: given.each])

    asked = asking.requests(map(asking.chat, kinds["prompts"]), TEMPERATURES, given.answer_tokens)
    for kind in ("summaries", "retrieval", "translations", "back", "made up"):
        asked += asking.requests(map(asking.chat, kinds[kind]), TEMPERATURES[::2], given.answer_tokens)
    asked += asking.requests(map(asking.chat, turns), TEMPERATURES[:2], given.answer_tokens)
    chance.shuffle(asked)
    missing = unanswered(asked, given.output, target=target.fingerprint)
    for first in range(0, len(missing), CHUNK):
        if time.monotonic() - started > given.seconds:
            print(f"out of time: {first} of {len(missing)} asked")
            break
        answer(author, missing[first : first + CHUNK], given.output)
        print(f"{min(first + CHUNK, len(missing))} of {len(missing)}, {time.monotonic() - started:.0f} s", flush=True)


def second_turns(asking: Asking, messages: Sequence[str]) -> list[Content]:
    """Conversations of a message, its answer, and another message."""
    answers = asking.texts(asking.requests(map(asking.chat, messages), (0.0,), 256))
    return [
        ({"role": "user", "content": first}, {"role": "assistant", "content": said}, {"role": "user", "content": then})
        for first, said, then in zip(messages, answers, [*messages[1:], *messages[:1]], strict=True)
    ]


if __name__ == "__main__":
    main()
