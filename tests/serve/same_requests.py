"""Requests of every kind, what must not change their answers, and answers in a form that can be compared."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import openai

from serve.serving import metrics_of, server_process, tool

NAME = "smollm2"
CHAT, COMPLETION = "chat", "completion"

PROMPTS = (
    "Name three rivers of Europe and the seas they flow into.",
    "Repeat twice: the quick brown fox jumps over the lazy dog.",
    "Write a Python function that adds two numbers.",
    "Translate to French: I would like a cup of coffee, please.",
)
SYSTEM = "You are a careful assistant of a library. " * 6

SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "seed": 11},
    "narrow": {"temperature": 1.2, "seed": -5, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
}

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = tool("weather", place={"type": "string"}, days={"type": "integer"})
PREDICTED = "1. The Rhine flows into the North Sea.\n2. The Danube flows into the Black Sea.\n3. The Volga"

FEATURES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "choices": {"n": 3},
    "stop": {"stop": [".\n", " and", "\n\n"], "max_tokens": 48},
    "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.15},
    "bias": {"logit_bias": {"28": -100, "30": -100, "339": 2.5}},
    "ends": {"stop_token_ids": [30, 28], "n": 2},
    "onward": {"ignore_eos": True, "max_tokens": 64},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}},
    "object": {"response_format": {"type": "json_object"}, "n": 2},
}
"""Fields of both kinds of requests, beside those of SAMPLINGS."""

CHAT_FEATURES: Mapping[str, Mapping[str, Any]] = {
    "tool": {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 48},
    "tools": {"tools": [WEATHER], "tool_choice": "auto"},
    "prediction": {"prediction": {"type": "content", "content": PREDICTED}, "max_tokens": 48},
    "conversation": {},
}

COMPLETION_FEATURES: Mapping[str, Mapping[str, Any]] = {
    "ids": {},
    "prompts": {"n": 2},
    "growing": {"n": 4, "max_tokens": 112, "ignore_eos": True},  # more than a small cache holds at once
}

_OWN = ("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "speculation", "speculation_stats")
"""Fields that the official client takes in extra_body."""


@dataclass(frozen=True)
class Case:
    """A request: its fields, without those of a Variant."""

    name: str
    kind: str
    body: Mapping[str, Any]

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.kind == CHAT else "/v1/completions"


@dataclass(frozen=True)
class Variant:
    """What must not change an answer. `speculation` None: the request says nothing about it. `official`: it is sent by
    OpenAI's own client."""

    speculation: Any = None
    stream: bool = False
    logprobs: bool = True
    stats: bool = False
    official: bool = False

    def body(self, case: Case) -> dict[str, Any]:
        body = {**case.body, "model": NAME, "stream": self.stream}
        if self.logprobs:
            body |= {"logprobs": True, "top_logprobs": 3} if case.kind == CHAT else {"logprobs": 3}
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        if self.speculation is not None:
            body["speculation"] = self.speculation
        if self.stats:
            body["speculation_stats"] = True
        return body

    def arguments(self, case: Case) -> dict[str, Any]:
        """The same for the official client."""
        body = self.body(case)
        others = _OWN if case.kind == CHAT else (*_OWN, "response_format")
        own = {name: body.pop(name) for name in others if name in body}
        return {**body, "extra_body": own}


def cases(prompts: Sequence[str] = PROMPTS, *, every: bool = False) -> list[Case]:
    """Each feature greedy and with one of the other samplings, with the prompts in turn; `every`: with each sampling
    and each prompt."""
    found, turn = [], itertools.cycle(prompts)
    drawn = itertools.cycle(list(SAMPLINGS)[1:])
    for kind, further in ((CHAT, CHAT_FEATURES), (COMPLETION, COMPLETION_FEATURES)):
        for feature, fields in {**FEATURES, **further}.items():
            for sampling in SAMPLINGS if every else ("greedy", next(drawn)):
                for number, prompt in enumerate(prompts if every else [next(turn)]):
                    own = {**SAMPLINGS[sampling], **_prompt(kind, feature, prompt, prompts), **fields}
                    name = f"{kind} {feature} {sampling}" + (f" {number}" if every else "")
                    found.append(Case(name, kind, {"max_tokens": 24, **own}))
    return found


def _prompt(kind: str, feature: str, prompt: str, prompts: Sequence[str]) -> dict[str, Any]:
    if kind == COMPLETION:
        ids = [1, 9690, 198, 2683, 359, 253, 5356, 5646]  # as the chat template begins: control tokens included
        return {"prompt": ids if feature == "ids" else [prompt, prompts[0]] if feature == "prompts" else prompt}
    before = [{"role": "system", "content": SYSTEM}]
    if feature == "conversation":
        before += [{"role": "user", "content": prompts[-1]}, {"role": "assistant", "content": "Gladly."}]
    return {"messages": [*before, {"role": "user", "content": prompt}]}


def variants(drafters: Sequence[str], *, seed: int = 0, official: bool = True) -> Iterator[Variant]:
    """Without end, all in another order each time: how the request speculates, in each form of an answer."""
    choices: list[Any] = [None, "off", {"depth": 0}, {"weight": 7.5}]
    if drafters:
        choices += [{"depth": 1}, {"depth": 8, "weight": 0.1}]
    for name in drafters:
        choices += [{"drafter": name}, {"drafter": name, "depth": 2}, {"drafter": name, "depth": 7, "weight": 3}]
    forms = [
        Variant(stream=stream, logprobs=logprobs, stats=stats)
        for stream, logprobs, stats in itertools.product((False, True), repeat=3)
    ]
    rng = random.Random(seed)
    while True:
        rng.shuffle(choices)
        for choice in choices:
            yield replace(rng.choice(forms), speculation=choice, official=official and rng.random() < 0.3)


# ---- answers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """One choice of an answer. `logprobs`: for each token its text and number, its bytes where the API gives them, and
    the alternatives; None if they were not asked for. `ids`: token ids, None where the API does not give them.
    `drafted`: how many of its tokens were guessed."""

    text: str
    calls: tuple[tuple[str, str], ...]
    finish_reason: str
    logprobs: Any
    ids: tuple[int, ...] | None
    drafted: int


@dataclass(frozen=True)
class Answer:
    """`usage`: tokens of the prompt and of the answer; `cached`: of the prompt's those that were computed before;
    `rounds`: the statistics of the choices, if they were asked for."""

    choices: tuple[Choice, ...]
    usage: tuple[int, int]
    cached: int
    rounds: tuple[Mapping[str, Any], ...] = ()


def read_whole(case: Case, found: Mapping[str, Any]) -> Answer:
    """The answer in a response that is not streamed."""
    choices = []
    for each in sorted(found["choices"], key=lambda choice: choice["index"]):
        message = each.get("message") or {"content": each.get("text")}
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
        logprobs = _logprobs(case, [each["logprobs"]] if each.get("logprobs") else [])
        choices.append(Choice(message["content"] or "", tuple(calls), each["finish_reason"], logprobs, None, 0))
    return _answer(choices, found["usage"], found.get("speculation"))


def read_events(case: Case, events: Sequence[Mapping[str, Any]]) -> Answer:
    """The answer in the events of a stream."""
    parts: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        assert "error" not in event, event
        for each in event["choices"]:
            parts.setdefault(each["index"], []).append(each)
    choices = [_streamed_choice(case, parts[index]) for index in sorted(parts)]
    [usage] = [event["usage"] for event in events if event.get("usage")]
    told = [event["speculation"] for event in events if event.get("speculation")]
    return _answer(choices, usage, told[0] if told else None)


def _streamed_choice(case: Case, parts: Sequence[Mapping[str, Any]]) -> Choice:
    text, calls, told = "", {}, []
    for part in parts:
        delta = part.get("delta") or {}
        text += (delta.get("content") if case.kind == CHAT else part["text"]) or ""
        for call in delta.get("tool_calls") or ():
            name, arguments = calls.get(call["index"], ("", ""))
            function = call["function"]
            calls[call["index"]] = (name + (function.get("name") or ""), arguments + (function.get("arguments") or ""))
        told += [part["speculation"]] if part.get("speculation") else []
    [reason] = [part["finish_reason"] for part in parts if part["finish_reason"]]
    ids = tuple(token for item in told for token in item["token_ids"]) if told else None
    drafted = sum(name != "" for item in told for name in item["drafted_by"])
    logprobs = _logprobs(case, [part["logprobs"] for part in parts if part.get("logprobs")])
    return Choice(text, tuple(calls[index] for index in sorted(calls)), reason, logprobs, ids, drafted)


def _logprobs(case: Case, objects: Sequence[Mapping[str, Any]]) -> Any:
    """Lists of several parts as one."""
    if not objects:
        return None
    if case.kind == CHAT:
        return [
            (
                item["token"],
                item["logprob"],
                tuple(item["bytes"]),
                tuple((top["token"], top["logprob"], tuple(top["bytes"])) for top in item["top_logprobs"]),
            )
            for each in objects
            for item in each["content"]
        ]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [item for each in objects for item in each[name]] for name in names}


def _answer(choices: Sequence[Choice], usage: Mapping[str, Any], speculation: Mapping[str, Any] | None) -> Answer:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    rounds = tuple(speculation["choices"]) if speculation else ()
    return Answer(tuple(choices), (usage["prompt_tokens"], usage["completion_tokens"]), cached, rounds)


def difference(expected: Answer, found: Answer, variant: Variant) -> str:
    """Where an answer differs from the one that it must equal; "" if nowhere."""
    if expected.usage != found.usage:
        return f"usage {found.usage} instead of {expected.usage}"
    if len(expected.choices) != len(found.choices):
        return f"{len(found.choices)} choices instead of {len(expected.choices)}"
    for index, (one, other) in enumerate(zip(expected.choices, found.choices, strict=True)):
        for name in ("text", "calls", "finish_reason", "logprobs", "ids"):
            wanted, got = getattr(one, name), getattr(other, name)
            asked = {"logprobs": variant.logprobs, "ids": got is not None}.get(name, True)
            if asked and wanted != got:
                return f"choice {index}: {name} {got!r} instead of {wanted!r}"
    drafted = sum(each["drafted"] for each in found.rounds)
    if variant.speculation in ("off", {"depth": 0}) and drafted:
        return f"{drafted} guesses where none were wanted"
    return ""


# ---- asking them -----------------------------------------------------------------------------------------------------


USERS = 32


@dataclass
class ServedProcess:
    """A server that runs, with clients for it."""

    url: str
    http: httpx2.Client
    official: openai.OpenAI

    def ask(self, case: Case, variant: Variant) -> Answer:
        if variant.official:
            return self._ask_officially(case, variant)
        response = self.http.post(case.path, json=variant.body(case))
        assert response.status_code == 200, f"{case.name}, {variant}: {response.text}"
        if not variant.stream:
            return read_whole(case, response.json())
        lines = [line for line in response.text.split("\n") if line.startswith("data: ")]  # text may hold other ends
        assert lines[-1] == "data: [DONE]", lines[-1]
        return read_events(case, [json.loads(line.removeprefix("data: ")) for line in lines[:-1]])

    def _ask_officially(self, case: Case, variant: Variant) -> Answer:
        endpoint: Any = self.official.chat.completions if case.kind == CHAT else self.official.completions
        found = endpoint.create(**variant.arguments(case))
        if not variant.stream:
            return read_whole(case, found.model_dump())
        return read_events(case, [event.model_dump() for event in found])

    def differences(
        self, expected: Sequence[Answer], work: Sequence[tuple[Case, Variant]], *, users: int = USERS
    ) -> tuple[list[str], list[Answer]]:
        """Ask for everything, `users` at a time. Where answers differ from those expected, and all answers."""
        with ThreadPoolExecutor(users) as pool:
            answers = list(pool.map(lambda item: self.ask(*item), work))
        found = []
        for (case, variant), wanted, answer in zip(work, expected, answers, strict=True):
            if told := difference(wanted, answer, variant):
                found.append(f"{case.name}, {variant}: {told}")
        return found, answers

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's values that have these labels."""
        wanted = {f"{label}={value}" for label, value in labels.items()}
        samples = [(key.split(","), value) for key, value in metrics_of(self.http.get("/metrics").text).items()]
        return sum(value for parts, value in samples if parts[0] == f"wager:{name}" and wanted <= {*parts})


@contextmanager
def served_process(model: Path | str, *flags: str) -> Iterator[ServedProcess]:
    """`wager serve`, from its start to its orderly end."""
    with (
        server_process("--model", str(model), "--served-name", NAME, *flags) as server,
        httpx2.Client(base_url=server.url, timeout=300) as http,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as official,
    ):
        yield ServedProcess(server.url, http, official)
    assert server.process.returncode == 0, server.log
