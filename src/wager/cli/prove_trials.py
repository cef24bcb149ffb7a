"""The trials of `wager prove`: one drafter under several conditions, its answers compared with the plain ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from wager.bench.comparison import ALONE, Condition, OnDelta, TokenComparison, answers, compare_answers
from wager.config import EngineConfig
from wager.errors import RequestError
from wager.testing.drafters import PROOF_DRAFTERS, ReferenceOracle
from wager.types import Completion, Request

if TYPE_CHECKING:
    from wager.engine.proposer import Proposer
    from wager.loading.load import LoadedEngine

Serve = Callable[..., "dict[str, Completion]"]


@dataclass(frozen=True, slots=True)
class Questions:
    """The requests of one sampling mode, and their plain answers by request id."""

    mode: str
    requests: Sequence[Request]
    plain: Mapping[str, Completion]

    @property
    def texts(self) -> dict[str, list[int]]:
        """All tokens of every sequence, for an oracle."""
        return {request.id: [*request.prompt, *self.plain[request.id].token_ids] for request in self.requests}

    def with_predictions(self, vocab: int) -> list[Request]:
        """The requests, each with its plain answer as its predicted output, in which some tokens are changed."""
        return [
            replace(
                request,
                params=replace(request.params, prediction=edited(self.plain[request.id].token_ids, vocab=vocab)),
            )
            for request in self.requests
        ]


def edited(tokens: Sequence[int], *, vocab: int) -> tuple[int, ...]:
    """The tokens with one replaced a third of the way on, two inserted in the middle, and one left out near the end."""
    third, half, late = len(tokens) // 3, len(tokens) // 2, 5 * len(tokens) // 6
    strange = [(token + 1) % vocab for token in tokens]
    return (
        *tokens[:third],
        *strange[third : third + 1],
        *tokens[third + 1 : half],
        *strange[half : half + 2],
        *tokens[half:late],
        *tokens[late + 1 :],
    )


class FailureCount(logging.Filter):
    """Counts the warnings of drafters that failed; those of a drafter that fails on purpose are not shown."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.last, self.expected = 0, "", False

    def filter(self, record: logging.LogRecord) -> bool:
        message = str(record.msg)
        if not (message.startswith("Drafter %r") and "failed" in message):
            return True
        self.count, self.last = self.count + 1, record.getMessage()
        return not self.expected


@contextmanager
def counted_failures() -> Iterator[FailureCount]:
    """Count the drafters that fail meanwhile."""
    log, found = logging.getLogger("wager"), FailureCount()
    log.addFilter(found)
    try:
        yield found
    finally:
        log.removeFilter(found)


@dataclass(slots=True)
class Trials:
    """One loaded model and the conditions under which its drafters are tried. `serve` answers requests, as
    `comparison.answers` does; `failures` are drafters that failed and were not made to, by name, with the reason."""

    plain: LoadedEngine
    conditions: Sequence[Condition]
    on_delta: OnDelta
    serve: Serve = answers
    failures: dict[str, str] = field(default_factory=dict)

    def plain_answers(self, requests: Sequence[Request]) -> dict[str, Completion]:
        """What every trial is compared with; RequestError if one fails."""
        expected = self.serve(self.plain, requests, ALONE, on_delta=self.on_delta)
        for name, answer in expected.items():
            if answer.finish_reason == "error":
                raise RequestError(f"Prompt {name} fails even without speculation: {answer.error}", "Leave it out.")
        return expected

    def run(self, drafter: str, config: EngineConfig, questions: Sequence[Questions]) -> list[TokenComparison]:
        """The answers with one drafter in every mode under every condition, compared with the plain ones."""
        found = [trial for group in self._groups() for trial in self._run(drafter, config, questions, group)]
        order = [each.mode for each in questions]
        return sorted(found, key=lambda trial: order.index(trial.mode))

    def _groups(self) -> list[list[Condition]]:
        """The conditions of an engine without a prefix cache, and those of one with it."""
        alone = [each for each in self.conditions if each is ALONE]
        cached = [each for each in self.conditions if each is not ALONE]
        return [group for group in (alone, cached) if group]

    def _run(
        self, drafter: str, config: EngineConfig, questions: Sequence[Questions], group: Sequence[Condition]
    ) -> Iterator[TokenComparison]:
        """The conditions of one engine, which serves all modes: what a drafter remembers of one it has in the next."""
        from wager.cli.loading import open_engine

        config = config.with_options(prefix_cache=config.capacity.prefix_cache and group[0] is not ALONE)
        oracle, vocab = ReferenceOracle({}), self.plain.target.decoder.vocab

        def open_one() -> LoadedEngine:
            made = PROOF_DRAFTERS[drafter](vocab, oracle) if drafter in PROOF_DRAFTERS else None
            return open_engine(config, like=self.plain, drafter=made)

        engine = open_one()
        specs = [spec for each in config.speculation.drafters for spec in each.all]
        breaks, predicts = drafter == "failing", any(spec.name == "prediction" for spec in specs)
        for each in questions:
            oracle.texts = each.texts
            requests = each.with_predictions(self.plain.spec.vocab) if predicts else each.requests
            for condition in group:
                with counted_failures() as failures:
                    failures.expected = breaks
                    renewed = (lambda: open_one().proposer) if breaks else None
                    tried = self._answers(engine, requests, condition, renewed)
                if failures.count and not breaks:
                    self.failures[drafter] = failures.last
                yield compare_answers(
                    each.plain, tried, mode=each.mode, drafter=drafter, condition=condition, failures=failures.count
                )
        engine.check()

    def _answers(
        self,
        engine: LoadedEngine,
        requests: Sequence[Request],
        condition: Condition,
        renewed: Callable[[], Proposer] | None,
    ) -> dict[str, Completion]:
        """The answers; with a drafter that fails on purpose some requests at a time, each with a new one."""
        if renewed is None:
            return self.serve(engine, requests, condition, on_delta=self.on_delta)
        done: dict[str, Completion] = {}
        size = 2 * condition.concurrency
        for first in range(0, len(requests), size):
            engine.proposer = renewed()
            done |= self.serve(engine, requests[first : first + size], condition, on_delta=self.on_delta)
        return done
