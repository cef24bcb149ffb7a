"""Events to completions: gathers what a request's choices said until each has ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from wager.errors import RequestError, WagerError
from wager.types import Completion, OutputDelta, Request, TokenLogprob


@dataclass(slots=True)
class _PartialOutput:
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class OutputCollector:
    """Completions in the order their requests were expected; a request's choices follow each other."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, int], _PartialOutput] = {}
        self._done: dict[tuple[str, int], Completion] = {}

    @property
    def expected(self) -> set[str]:
        """Ids of the requests that were expected."""
        return {request for request, _ in self._parts}

    def expect(self, request: Request) -> None:
        if (request.id, 0) in self._parts:
            raise RequestError(f"Two requests have the id {request.id!r}.", "Give every request an id of its own.")
        for choice in range(request.params.n):
            self._parts[request.id, choice] = _PartialOutput()

    def take(self, event: OutputDelta) -> None:
        """Add an event; those of requests nobody expects are passed over."""
        parts = self._parts.get((event.request_id, event.index))
        if parts is None:
            return
        parts.tokens += event.token_ids
        parts.text.append(event.text)
        parts.origins += event.drafted_by
        parts.logprobs += event.logprobs
        if event.finish_reason and event.stats:
            self._done[event.request_id, event.index] = Completion(
                event.request_id,
                event.index,
                tuple(parts.tokens),
                "".join(parts.text),
                event.finish_reason,
                event.stats,
                tuple(parts.origins),
                tuple(parts.logprobs),
                event.error,
            )

    def completions(self) -> list[Completion]:
        missing = [key for key in self._parts if key not in self._done]
        if missing:
            raise WagerError(f"Request {missing[0][0]!r} never ended.", "This is a defect in wager; please report it.")
        return [self._done[key] for key in self._parts]
