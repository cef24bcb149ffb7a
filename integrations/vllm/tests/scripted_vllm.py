"""vLLM's part for a proposer, scripted: batches whose rows move, chunks of prompts, preemption, answers that are known
beforehand, and a clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wager.economics.surface import LatencySurface
from wager.testing import FakeClock
from wager_vllm.compat import Deployment, RequestFacts, RowFacts, RunnerStep
from wager_vllm.options import Options
from wager_vllm.proposer import Proposer

VOCAB = 1000
STEPS = LatencySurface([1, 2, 8, 64, 256], [1e-2, 1.02e-2, 1.1e-2, 1.6e-2, 4e-2])
"""Seconds of a pass."""


def deployment(**values: Any) -> Deployment:
    return Deployment(
        **{
            "version": "0.32.0",
            "device": "script",
            "model": "script",
            "tokenizer": "script",
            "fingerprint": "script",
            "served_as": "script",
            "dtype": "bfloat16",
            "execution": "eager",
            "vocab": VOCAB,
            "max_context": 4096,
            "max_requests": 32,
            "max_rows": 512,
            "layout": {"tensor": 1, "pipeline": 1, "data": 1},
            "engine": 0,
            "depth": 8,
            "method": "custom_class",
            "leads": True,
            **values,
        }
    )


class ScriptedPasses:
    """Passes on the clock: a whole step takes longer."""

    max_rows = 512

    def __init__(self, clock: FakeClock) -> None:
        self.clock, self.count = clock, 0

    def agree(self, value: bool) -> bool:
        return value

    def run(self, rows: int, *, context: int, drafted: bool) -> int:
        requests = -(-rows // 9) if drafted else rows
        self.clock.advance(STEPS.seconds(rows, requests, requests * context))
        self.count += 1
        return requests


@dataclass
class ScriptedRequest:
    """A prompt and the answer that the target gives whatever is guessed."""

    prompt: list[int]
    answer: list[int]
    tenant: str = ""
    prediction: str | Sequence[int] = ()
    known: list[int] = field(default_factory=list)
    cached: int = 0
    drafts: list[int] = field(default_factory=list)


@dataclass
class ScriptedVLLM:
    """`proposer` beside a target on `clock`, whose steps take `beside` seconds more than their passes."""

    proposer: Proposer
    clock: FakeClock
    beside: float = 3e-3
    chunk: int = 64
    moves: bool = False
    running: dict[str, ScriptedRequest] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    _new: dict[str, str] = field(default_factory=dict)
    _random: random.Random = field(default_factory=lambda: random.Random(3))

    def add(self, name: str, request: ScriptedRequest) -> None:
        request.known = list(request.prompt)
        self.running[name] = request
        self._new[name] = request.tenant

    def preempt(self, name: str) -> None:
        """Its cache is gone; its tokens are not."""
        self.running[name].cached, self.running[name].drafts = 0, []

    def abort(self, name: str) -> None:
        del self.running[name]
        self.finished.add(name)

    def facts(self, name: str) -> RequestFacts:
        request = self.running[name]
        size = len(request.prompt)
        return RequestFacts(size, size + len(request.answer), (), request.prediction)

    def step(self, *, without: Sequence[str] = ()) -> None:
        names = [name for name in self.running if name not in without]
        if self.moves:
            self._random.shuffle(names)
        self.proposer.step_begins(self._new, self.finished)
        self._new, self.finished = {}, set()
        rows: list[RowFacts] = []
        verified: dict[str, list[int]] = {}
        requests, computed, context = [self.running[name] for name in names], 0, 0
        for name, request in zip(names, requests, strict=True):
            pending = len(request.known) - request.cached
            count, sampled = min(pending, self.chunk), list[int]()
            context += request.cached
            if count == pending:
                if request.drafts:
                    verified[name] = request.drafts
                sampled = self._sample(request)
            scheduled = count + len(verified.get(name, ()))
            request.known += sampled
            tokens = np.array(request.known, np.int32)
            rows.append(RowFacts(name, tokens, len(sampled), request.cached, scheduled))
            request.cached = len(request.known) - 1 if sampled else request.cached + count
            computed += scheduled
        self.clock.advance(self.beside + STEPS.seconds(computed, len(rows), context))
        drafts = self.proposer.step_sampled(RunnerStep(rows, verified, self.facts))
        assert len(drafts) == len(rows)
        for name, request, draft in zip(names, requests, drafts, strict=True):
            request.drafts = draft
            if len(request.known) == len(request.prompt) + len(request.answer):
                self.abort(name)
        self.steps += 1

    def _sample(self, request: ScriptedRequest) -> list[int]:
        at = len(request.known) - len(request.prompt)
        right = 0
        while right < len(request.drafts) and request.drafts[right : right + 1] == request.answer[at + right :][:1]:
            right += 1
        sampled = request.answer[at : at + right + 1]
        self.drafted += len(request.drafts)
        self.accepted += min(right, len(sampled))
        self.tokens += len(sampled)
        return sampled

    def run(self, steps: int = 10_000) -> None:
        while self.running and steps:
            self.step()
            steps -= 1


def start(clock: FakeClock | None = None, *, options: Options | None = None, **values: Any) -> ScriptedVLLM:
    clock = clock or FakeClock()
    proposer = Proposer.__new__(Proposer)
    proposer._off = ""
    proposer._start(options or Options(drafters="suffix"), deployment(**values), clock)
    proposer.model_ready(ScriptedPasses(clock))  # type: ignore[arg-type]
    return ScriptedVLLM(proposer, clock)


def periodic(seed: int, length: int, *, period: int = 23, noise: float = 0.0) -> list[int]:
    """A text that repeats itself, but for some tokens."""
    rng = random.Random(seed)
    words = [rng.randrange(VOCAB) for _ in range(period)]
    return [rng.randrange(VOCAB) if rng.random() < noise else words[at % period] for at in range(length)]
