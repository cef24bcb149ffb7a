"""One request while the simulated server runs it: what it drafts at its position, what of it is accepted, its times."""

from __future__ import annotations

from dataclasses import dataclass

from wager.simulation.traces import MAX_DRAFTED, RequestTrace
from wager.types import Draft, DraftDecision, Verdict

_WRONG = -1
"""A draft token that does not match the answer."""

_CHAINS = tuple([tuple(range(-1, size - 1)) for size in range(MAX_DRAFTED + 1)])
"""The parents of a chain, by its length."""


@dataclass(slots=True)
class RequestTimes:
    """One request: its number, when it arrived and got its first and last token (-1: not yet), tokens and rounds."""

    number: int
    arrived: float
    first_token: float = -1.0
    last_token: float = -1.0
    tokens: int = 0
    rounds: int = 0

    def add_round(self, now: float, tokens: int) -> None:
        """A round at `now` emitted that many tokens."""
        self.first_token = now if self.first_token < 0 else self.first_token
        self.last_token = now
        self.tokens += tokens
        self.rounds += 1


class SimulatedRequest:
    """A request in the batch: `done` of its answer's tokens are known, and the keys of `cached` tokens stored."""

    __slots__ = ("cached", "done", "seq_id", "times", "trace")

    def __init__(self, trace: RequestTrace, times: RequestTimes, *, done: int = 0) -> None:
        self.seq_id = f"r{times.number}"
        self.trace, self.times, self.done = trace, times, done
        self.cached = trace.prompt_tokens + done - 1 if done else 0

    def draft(self, drafter: str, decision: DraftDecision) -> SimulatedDraft:
        """The drafter's draft under the decision. Draft tokens are positions of the answer, or _WRONG."""
        trace, at = self.trace.drafts[drafter], self.done
        size = min(decision.depth, int(trace.num_drafted[at]))
        scores: list[float] = [] if trace.scores is None else trace.scores[at, :size].tolist()
        passes = decision.depth
        if decision.min_survival:
            stop = next((node for node, score in enumerate(scores) if score < decision.min_survival), size - 1)
            size = min(size, stop + 1)
            passes = max(1, size)
        matching = min(size, int(trace.num_matching[at]))
        tokens = (*range(at, at + matching), *((_WRONG,) * (size - matching)))
        return SimulatedDraft(Draft(self.seq_id, tokens, _CHAINS[size], tuple(scores[:size]), drafter), passes)

    def verify(self, draft: Draft | None) -> Verdict:
        """Tokens are numbered by their position in the answer, so a draft token matches if it is its own position."""
        at, run = self.done, 0
        for token in draft.tokens if draft else ():
            if token != at + run:
                break
            run += 1
        return Verdict(self.seq_id, tuple(range(run)), tuple(range(at, at + run + 1)))

    def commit(self, tokens: int) -> None:
        """That many tokens more of the answer are known."""
        self.done += tokens
        self.cached = self.trace.prompt_tokens + self.done - 1


@dataclass(frozen=True, slots=True)
class SimulatedDraft:
    """A draft, and the passes of the drafter that it took."""

    draft: Draft
    passes: int
