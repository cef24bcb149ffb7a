"""Output deltas to completions, and which part of a streamed text which drafter guessed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from wager.errors import RequestError, WagerError
from wager.types import Completion, OutputDelta, Request


class OutputCollector:
    """Completions in the order in which their requests were expected; a request's choices follow each other."""

    def __init__(self) -> None:
        self._deltas: dict[tuple[str, int], list[OutputDelta]] = {}  # by request id and choice
        self._completed: dict[tuple[str, int], Completion] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens that came so far."""
        return sum(len(delta.token_ids) for deltas in self._deltas.values() for delta in deltas)

    @property
    def finish_reasons(self) -> list[str]:
        """Why each choice ended, in the order of their ends."""
        return [completion.finish_reason for completion in self._completed.values()]

    def expect(self, request: Request) -> None:
        """RequestError if a request of that id was expected before."""
        if (request.id, request.first_choice) in self._deltas:
            raise RequestError(f"Two requests have the id {request.id!r}.", "Give every request its own id.")
        for choice in request.choices:
            self._deltas[request.id, choice] = []

    def add(self, delta: OutputDelta) -> None:
        """Add a delta; those of requests that were not expected are ignored."""
        deltas = self._deltas.get((delta.request_id, delta.index))
        if deltas is None:
            return
        deltas.append(delta)
        if delta.finish_reason and delta.stats:
            self._completed[delta.request_id, delta.index] = Completion(
                request_id=delta.request_id,
                index=delta.index,
                token_ids=tuple(chain.from_iterable([each.token_ids for each in deltas])),
                text="".join([each.text for each in deltas]),
                finish_reason=delta.finish_reason,
                stats=delta.stats,
                drafted_by=tuple(chain.from_iterable([each.drafted_by for each in deltas])),
                logprobs=tuple(chain.from_iterable([each.logprobs for each in deltas])),
                error=delta.error,
                error_status=delta.error_status,
                stop_string=delta.stop_string,
            )

    def completions(self) -> list[Completion]:
        """All of them; WagerError if one has not ended."""
        missing = [key for key in self._deltas if key not in self._completed]
        if missing:
            raise WagerError(f"Request {missing[0][0]!r} never ended.", "This is a defect in wager; please report it.")
        return [self._completed[key] for key in self._deltas]


def one_or_all(completions: list[Completion], *, one: bool) -> Completion | list[Completion]:
    """The only completion of `one` prompt; a list where there are several prompts or choices."""
    return completions[0] if one and len(completions) == 1 else completions


# ---- which part of a text which drafter guessed ----------------------------------------------------------


class TokenDecoder(Protocol):
    """Incremental decoder of a tokenizer: holds back bytes that do not make a character yet."""

    def push(self, token: int, /) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True, slots=True)
class GuessedPart:
    """A part of a text, and the drafter that guessed it ("": the target itself)."""

    text: str
    drafter: str


class GuessedText:
    """Splits streamed text. `token_text` gives the text that each token adds, so that text is assigned to its drafter.

    Text may lag behind its tokens (stop strings, unfinished characters); it is assigned in order of arrival.
    """

    def __init__(self, token_text: TokenDecoder) -> None:
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
