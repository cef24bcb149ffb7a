"""Output deltas to completions, and which part of a streamed text which drafter guessed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from wager.errors import RequestError, WagerError
from wager.types import Completion, OutputDelta, Request, TokenLogprob


@dataclass(slots=True)
class _PartialOutput:
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    drafted_by: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class OutputCollector:
    """Completions in the order in which their requests were expected; a request's choices follow each other."""

    def __init__(self) -> None:
        self._partial: dict[tuple[str, int], _PartialOutput] = {}
        self._completed: dict[tuple[str, int], Completion] = {}

    @property
    def expected(self) -> set[str]:
        """Ids of the requests that were expected."""
        return {request_id for request_id, _ in self._partial}

    @property
    def num_tokens(self) -> int:
        """Tokens that came so far."""
        return sum(len(partial.token_ids) for partial in self._partial.values())

    @property
    def finish_reasons(self) -> list[str]:
        """Of the choices that have ended, in that order."""
        return [completion.finish_reason for completion in self._completed.values()]

    def expect(self, request: Request) -> None:
        """RequestError if a request of that id was expected before."""
        if (request.id, 0) in self._partial:
            raise RequestError(f"Two requests have the id {request.id!r}.", "Give every request its own id.")
        for choice in range(request.params.n):
            self._partial[request.id, choice] = _PartialOutput()

    def add(self, delta: OutputDelta) -> None:
        """Add a delta; those of requests that were not expected are ignored."""
        partial = self._partial.get((delta.request_id, delta.index))
        if partial is None:
            return
        partial.token_ids += delta.token_ids
        partial.text.append(delta.text)
        partial.drafted_by += delta.drafted_by
        if delta.logprobs:
            partial.logprobs += delta.logprobs
        if delta.finish_reason and delta.stats:
            self._completed[delta.request_id, delta.index] = Completion(
                request_id=delta.request_id,
                index=delta.index,
                token_ids=tuple(partial.token_ids),
                text="".join(partial.text),
                finish_reason=delta.finish_reason,
                stats=delta.stats,
                drafted_by=tuple(partial.drafted_by),
                logprobs=tuple(partial.logprobs),
                error=delta.error,
                error_status=delta.error_status,
            )

    def completions(self) -> list[Completion]:
        """All of them; WagerError if one has not ended."""
        missing = [key for key in self._partial if key not in self._completed]
        if missing:
            raise WagerError(f"Request {missing[0][0]!r} never ended.", "This is a defect in wager; please report it.")
        return [self._completed[key] for key in self._partial]


def one_or_all(completions: list[Completion], *, one: bool) -> Completion | list[Completion]:
    """The only completion of `one` prompt; a list where there are several prompts or choices."""
    return completions[0] if one and len(completions) == 1 else completions


# ---- which part of a text which drafter guessed ----------------------------------------------------------


class TokenText(Protocol):
    """An incremental detokenizer: the text each token adds."""

    def push(self, token: int, /) -> str: ...


@dataclass(frozen=True, slots=True)
class GuessedPart:
    """A part of a text, and the drafter that guessed it ("": the target itself)."""

    text: str
    drafter: str


class GuessedText:
    """Splits streamed text. `token_text` gives the text that each token adds, so that text is assigned to its drafter.

    Text may lag behind its tokens (stop strings, unfinished characters); it is assigned in order of arrival.
    """

    def __init__(self, token_text: TokenText) -> None:
        self._token_text = token_text
        self._expected: deque[tuple[int, str]] = deque()  # characters to come, and their drafter

    def split(self, text: str, tokens: Sequence[int], drafted_by: Sequence[str]) -> list[GuessedPart]:
        """The parts of `text`; `tokens` and the drafter of each ("": the target) arrived with it."""
        for token, drafter in zip(tokens, drafted_by, strict=True):
            size = len(self._token_text.push(token))
            if size:
                self._expected.append((size, drafter))
        parts = []
        while text:
            size, drafter = self._expected.popleft() if self._expected else (len(text), "")
            if size > len(text):
                self._expected.appendleft((size - len(text), drafter))
            parts.append(GuessedPart(text[:size], drafter))
            text = text[size:]
        return parts
