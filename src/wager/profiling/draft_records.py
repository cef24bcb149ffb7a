"""Records what a drafter drafts at every position of an answer.

The engine decodes plainly; at every step the drafter drafts and nothing of the draft is verified. So the drafter is
called as in production, with the noise of the request, and the draft of every position is known. Since under `match`
the text does not depend on drafts, the rounds of any fixed depth follow without another run (`rounds_at`), and so
does a trace for `wager replay`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wager.economics.policy.fixed import FixedDepth
from wager.engine.core import Engine
from wager.errors import RequestError, UsageError, WagerError
from wager.types import Draft, DraftDecision, OutputDelta, Plan, Request, Span


@dataclass(frozen=True, slots=True)
class PositionDraft:
    """The draft at one position of an answer: its tokens with their survival estimates (none where the drafter gives
    none), at most `room` of them. Fewer mean that the drafter made no more."""

    room: int
    tokens: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()


class DraftRecorder(FixedDepth):
    """A policy that drafts to `depth` at every step and verifies nothing. `drafts` holds, by sequence, a PositionDraft
    for each token of its answer."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.drafts: dict[str, list[PositionDraft]] = {}
        self._rooms: dict[str, int] = {}

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        """See Policy. What is not verified takes no rows, so the budget does not bound it."""
        self._rooms = {span.seq_id: min(self.depth, span.max_draft_tokens) for span in spans if span.needs_logits}
        return {seq_id: DraftDecision(room) for seq_id, room in self._rooms.items() if room}

    def admit(self, drafts: Mapping[str, Draft], budget: int) -> Mapping[str, Draft]:
        """See Policy."""
        for seq_id, room in self._rooms.items():
            draft = drafts.get(seq_id) or Draft(seq_id)
            self.drafts.setdefault(seq_id, []).append(PositionDraft(room, draft.tokens, draft.scores))
        return {}

    def explain(self) -> str:
        return f"Drafts of depth {self.depth} are recorded and not verified."


@dataclass(frozen=True, slots=True)
class FixedDepthRound:
    """One round of a fixed depth: the position of the answer that it begins at, the draft tokens made and accepted,
    and the depths at which the answer and its limits allow a verdict."""

    position: int
    drafted: int
    accepted: int
    observable: int


@dataclass(frozen=True, slots=True)
class DraftedAnswer:
    """An answer of `len(drafts)` tokens, what was drafted at each, and the number of draft tokens `matching` that agree
    with the answer from there on."""

    prompt_tokens: int
    drafts: tuple[PositionDraft, ...]
    matching: tuple[int, ...]

    @classmethod
    def of(cls, token_ids: Sequence[int], drafts: Sequence[PositionDraft], *, prompt_tokens: int) -> DraftedAnswer:
        """From an answer's tokens and the drafts at its positions."""
        matching = [_matching(draft.tokens, token_ids[at:]) for at, draft in enumerate(drafts)]
        return cls(prompt_tokens, tuple(drafts), tuple(matching))

    def rounds_at(self, depth: int) -> list[FixedDepthRound]:
        """The rounds of an engine that drafts to `depth` in every step: each begins where the last one ended."""
        rounds, at, length = [], 0, len(self.drafts)
        while at < length:
            draft = self.drafts[at]
            accepted = min(depth, self.matching[at])
            observable = min(depth, draft.room, length - at)
            rounds.append(FixedDepthRound(at, min(depth, len(draft.tokens)), accepted, observable))
            at += accepted + 1
        return rounds

    def trace_values(self, survival: Sequence[float]) -> dict[str, Any]:
        """`right` and `scores` as simulation/traces.py reads them; `survival` replaces missing estimates."""
        scores = [draft.scores or tuple(survival[: len(draft.tokens)]) for draft in self.drafts]
        return {"right": list(self.matching), "scores": [[round(score, 4) for score in row] for row in scores]}


def _matching(tokens: Sequence[int], ahead: Sequence[int]) -> int:
    count = 0
    for guess, token in zip(tokens, ahead, strict=False):
        if guess != token:
            break
        count += 1
    return count


@dataclass(frozen=True, slots=True)
class DraftRecording:
    """Answers in the order of the requests, drafted along to `depth`."""

    depth: int
    answers: tuple[DraftedAnswer, ...]


def record_drafts(
    engine: Engine,
    requests: Sequence[Request],
    *,
    depth: int | None = None,
    concurrency: int | None = None,
    on_output: Callable[[OutputDelta], None] | None = None,
) -> DraftRecording:
    """Answer `requests` (of one choice each) on an engine with one drafter under the `match` rule, and record its
    drafts to `depth` (None: as deep as it can). The engine's policy is replaced.

    UsageError for a drafter that makes trees or does not draft that deep; RequestError if a request fails; WagerError
    if the drafter fails.
    """
    [drafter] = engine.proposer.drafters.values()
    if drafter.makes_trees:
        raise UsageError(
            f"Drafter {drafter.name!r} makes trees, and acceptance by depth is measured for chains.",
            "Name a drafter that makes chains, such as ngram.",
        )
    if depth is not None and depth > drafter.max_depth:
        raise UsageError(
            f"Depth {depth} is out of range: {drafter.name} drafts at most {drafter.max_depth} tokens.",
            f"Give --depth {drafter.max_depth} or less.",
        )
    recorder = DraftRecorder(drafter.max_depth if depth is None else depth)
    engine.policy = recorder
    engine.scheduler.max_draft_tokens = recorder.depth
    answers = engine.generate(requests, concurrency=concurrency, on_output=on_output)
    for answer in answers:
        if answer.finish_reason == "error":
            raise RequestError(f"Prompt {answer.request_id!r} failed: {answer.error}", "Leave the prompt out.")
    if drafter.name not in engine.proposer.drafters:
        raise WagerError(f"Drafter {drafter.name!r} failed.", "Without its drafts nothing can be measured.")
    recorded = [
        DraftedAnswer.of(answer.token_ids, recorder.drafts[request.id], prompt_tokens=len(request.prompt))
        for request, answer in zip(requests, answers, strict=True)
    ]
    return DraftRecording(recorder.depth, tuple(recorded))
