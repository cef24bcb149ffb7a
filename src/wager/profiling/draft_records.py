"""Records what a drafter drafts at every position of an answer.

The engine decodes plainly; at every step the drafter drafts and nothing of the draft is verified. So the drafter is
called as in production, with the noise of the request, and the draft of every position is known. Since under `match`
the text does not depend on drafts, the rounds of any fixed depth follow without another run (`rounds_at`), and so
does a trace for `wager replay`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from wager.economics.policy.heuristics import FixedDepth
from wager.engine.core import Engine
from wager.errors import RequestError, UsageError, WagerError
from wager.types import Draft, DraftDecision, OutputDelta, Plan, Request, Span


@dataclass(frozen=True, slots=True)
class PositionDraft:
    """The draft at one position of an answer: its tokens with their survival estimates (none where the drafter gives
    none), at most `room` of them. Fewer mean that the drafter made no more. `parents`: of a tree, as in types.Draft; ()
    of a chain."""

    room: int
    tokens: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    parents: tuple[int, ...] = ()


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
            parents = () if draft.is_chain else draft.parents
            self.drafts.setdefault(seq_id, []).append(PositionDraft(room, draft.tokens, draft.scores, parents))
        return {}

    def explain(self) -> str:
        return f"Drafts of depth {self.depth} are recorded and not verified."


@dataclass(frozen=True, slots=True)
class FixedDepthRound:
    """One round of a fixed depth: the position of the answer that it begins at, the draft tokens made and accepted, the
    depths at which the answer and its limits allow a verdict, and whether a draft token was rejected, rather than none
    made, where the accepted ones end."""

    position: int
    drafted: int
    accepted: int
    observable: int
    rejected: bool


_NEVER = 1 << 30


@dataclass(frozen=True, slots=True)
class AnswerPath:
    """Where the answer goes in a draft of which the likeliest guesses are verified, so that one more guess adds a node.

    `needed[d]`: guesses that must be made until the node at depth d + 1 of the answer's path is among them, ascending.
    `guessed[d]`: until any child of the path's node at depth d (0: the root) is; _NEVER if it has none."""

    needed: tuple[int, ...]
    guessed: tuple[int, ...]

    @classmethod
    def of(cls, draft: PositionDraft, ahead: Sequence[int]) -> AnswerPath:
        """Of the answer's next tokens `ahead`."""
        if not draft.parents:
            matching = takewhile(lambda pair: pair[0] == pair[1], zip(draft.tokens, ahead, strict=False))
            return cls.chain(sum(1 for _ in matching), drafted=len(draft.tokens))
        order = _likeliest_first(draft)
        place = {node: rank for rank, node in enumerate(order, 1)}
        children: dict[int, list[int]] = {}
        for node in order:
            children.setdefault(draft.parents[node], []).append(node)
        at, needed, guessed = -1, list[int](), list[int]()
        for token in (*ahead, None):
            below = children.get(at, [])
            guessed.append(place[below[0]] if below else _NEVER)
            found = next((node for node in below if draft.tokens[node] == token), None)
            if found is None:
                break
            needed.append(place[found])
            at = found
        return cls(tuple(needed), tuple(guessed))

    @classmethod
    def chain(cls, matching: int, *, drafted: int) -> AnswerPath:
        """Of a chain of `drafted` tokens, of which the first `matching` agree with the answer."""
        return cls(tuple(range(1, matching + 1)), (*range(1, drafted + 1), _NEVER))

    def accepted(self, guesses: int) -> int:
        """Draft tokens that are accepted of so many guesses."""
        return bisect_right(self.needed, guesses)


def _likeliest_first(draft: PositionDraft) -> list[int]:
    """Nodes of a tree in the order of their estimates, none before its parent; in their own order without estimates."""
    if not draft.scores:
        return list(range(len(draft.tokens)))
    bounded: list[float] = []
    for parent, score in zip(draft.parents, draft.scores, strict=True):
        bounded.append(score if parent < 0 else min(score, bounded[parent]))
    return sorted(range(len(bounded)), key=lambda node: -bounded[node])  # stable, and parents have lower indices


@dataclass(frozen=True, slots=True)
class DraftedAnswer:
    """An answer of `len(drafts)` tokens, what was drafted at each, and the path of the answer from there on through the
    draft."""

    prompt_tokens: int
    drafts: tuple[PositionDraft, ...]
    paths: tuple[AnswerPath, ...]

    @classmethod
    def of(cls, token_ids: Sequence[int], drafts: Sequence[PositionDraft], *, prompt_tokens: int) -> DraftedAnswer:
        """From an answer's tokens and the drafts at its positions."""
        paths = [AnswerPath.of(draft, token_ids[at:]) for at, draft in enumerate(drafts)]
        return cls(prompt_tokens, tuple(drafts), tuple(paths))

    @property
    def matching(self) -> tuple[int, ...]:
        """The number of draft tokens at each position that agree with the answer."""
        return tuple(len(path.needed) for path in self.paths)

    def rounds_at(self, depth: int) -> list[FixedDepthRound]:
        """The rounds of an engine that drafts to `depth` in every step, of a tree the likeliest `depth` nodes: each
        begins where the last one ended."""
        rounds, at, length = [], 0, len(self.drafts)
        while at < length:
            draft, path = self.drafts[at], self.paths[at]
            accepted = path.accepted(depth)
            observable = min(depth, draft.room, length - at)
            rejected = accepted < observable and path.guessed[accepted] <= depth
            rounds.append(FixedDepthRound(at, min(depth, len(draft.tokens)), accepted, observable, rejected))
            at += accepted + 1
        return rounds

    def trace_values(self, survival: Sequence[float]) -> dict[str, Any]:
        """`right` and `scores` as simulation/traces.py reads them; `survival` replaces missing estimates."""
        scores = [draft.scores or tuple(survival[: len(draft.tokens)]) for draft in self.drafts]
        return {"right": list(self.matching), "scores": [[round(score, 4) for score in row] for row in scores]}


@dataclass(frozen=True, slots=True)
class DraftRecording:
    """Answers in the order of the requests, drafted along to `depth`, which of `trees` is the number of nodes."""

    depth: int
    answers: tuple[DraftedAnswer, ...]
    trees: bool = False


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

    UsageError for a drafter that does not draft that deep; RequestError if a request fails; WagerError if the drafter
    fails.
    """
    [drafter] = engine.proposer.drafters.values()
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
    if engine.proposer.pauses.failures(drafter.name):
        raise WagerError(f"Drafter {drafter.name!r} failed.", "Without its drafts nothing can be measured.")
    recorded = [
        DraftedAnswer.of(answer.token_ids, recorder.drafts[request.id], prompt_tokens=len(request.prompt))
        for request, answer in zip(requests, answers, strict=True)
    ]
    return DraftRecording(recorder.depth, tuple(recorded), trees=drafter.makes_trees)
