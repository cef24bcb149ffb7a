"""`wager serve` as a process of its own, and many clients of it at once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai

from serve.real_server import server_process
from serve.same_requests import CHAT, NAME, Answer, Case, Variant, difference, read_events, read_whole

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
        lines = [line for line in response.text.split("\n") if line]  # text may hold other ends of lines
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
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            key, _, value = line.rpartition(" ")
            if key.split("{")[0] == f"wager:{name}" and all(f'{k}="{v}"' in key for k, v in labels.items()):
                total += float(value)
        return total


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
