"""What the adaptive policy learns from: verdicts, drafts that were not verified, and the seconds of steps.

Observations are collected and learned from together every few steps, so that the tables are in the processor's
caches, and only a sample of them in large batches. Every draft token that can be compared with an emitted token is an
observation, verified or not: the token after the verified ones shows whether the next draft token was right, and a
draft that was right so far is compared with the tokens of later steps. Depths that were not reached stay unobserved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from wager.economics.acceptance import AcceptanceModel
from wager.economics.latency_model import LatencyModel
from wager.economics.policy.sequence_state import RemainingDraft, SequencePolicyState, StepDraft
from wager.types import Draft, StepRecord, Verdict

_INTERVAL = 16  # steps after which what was collected is learned, if no plan was made before
_EARLY_STEPS = 64  # first steps, in which more is learned from
_MAX_DRAFTS, _MAX_DRAFTS_EARLY = 4, 256  # about so many drafts of a step are learned from, in rotation
_SHIFTS_EARLY = 16  # drafts of a step whose shift of survival by scores is learned; later one in every other step
_RECORD_INTERVAL = 5  # steps between those whose seconds the latency model learns


class DeferredLearning:
    """Collects observations for `models` (by drafter) and `latency`, and applies them every few steps."""

    def __init__(self, models: Sequence[AcceptanceModel], latency: LatencyModel) -> None:
        self._models, self._latency = models, latency
        self._steps = 0
        self._pending: list[Callable[[], None]] = []
        self._drafted: set[str] = set()  # sequences with a draft that is pending

    def add_verdicts(
        self, verdicts: Sequence[Verdict], states: Mapping[str, SequencePolicyState], drafts: Mapping[str, StepDraft]
    ) -> None:
        """A step's verdicts and drafts."""
        number, early = self._steps + 1, self._steps < _EARLY_STEPS
        interval = max(1, len(drafts) // (_MAX_DRAFTS_EARLY if early else _MAX_DRAFTS))
        for turn, verdict in enumerate(verdicts, number):
            state, step_draft = states[verdict.seq_id], drafts.get(verdict.seq_id)
            if step_draft is not None and (step_draft.exploration or turn % interval == 0):
                self._drafted.add(verdict.seq_id)
                self._pending.append(partial(self._learn_draft, step_draft, verdict))
            elif state.remaining is not None or verdict.seq_id in self._drafted:
                emitted = verdict.tokens if step_draft is None else None
                self._pending.append(partial(self._compare_remaining, state, emitted))
        if drafts and (early or number % 2):
            interval = max(1, len(drafts) // (_SHIFTS_EARLY if early else 1))
            sample = list(drafts.values())[number // 2 % interval :: interval]
            self._pending += [partial(self._learn_shift, step_draft) for step_draft in sample]

    def add_record(self, record: StepRecord, *, always: bool) -> None:
        """What a step took; `always`: it is learned from in any case."""
        self._steps += 1
        sampled = always or self._steps < _EARLY_STEPS or self._steps % _RECORD_INTERVAL == 0
        if sampled and self._latency.learns:
            self._pending.append(partial(self._latency.observe, record))
        if self._steps % _INTERVAL == 0:
            self.learn()

    def end_sequence(self, state: SequencePolicyState) -> None:
        """The sequence is over."""
        ended = zip(self._models, state.acceptance, strict=True)
        self._pending += [partial(model.end_sequence, sequence) for model, sequence in ended]

    def learn(self) -> None:
        """Learn from all that was collected, in order."""
        for learn in self._pending:
            learn()
        self._pending.clear()
        self._drafted.clear()

    def _learn_draft(self, step_draft: StepDraft, verdict: Verdict) -> None:
        draft, state, model = step_draft.draft, step_draft.state, self._models[step_draft.drafter]
        sequence, emitted = state.acceptance[step_draft.drafter], verdict.tokens
        state.remaining = None
        if draft is None:
            model.learn_round(sequence, accepted=0, tested=1)  # a token that is not drafted is not accepted
            return
        tested, path = compare(draft, emitted)
        judged = step_draft.survival is not None
        if not judged:  # sampled from draft_probs: what is accepted need not equal what is emitted
            path = list(verdict.accepted)
        right, deepest = len(path), max(draft.depths, default=0)
        # the drafter could have drafted deeper and did not: a token that is not accepted
        declined = right == deepest < step_draft.depth and not step_draft.min_survival and len(emitted) > right
        model.learn_round(sequence, accepted=right, tested=min(right + 1, deepest + declined, len(emitted)))
        if judged and draft.scores:
            model.learn_scores(draft, tested, path)
        if judged and right == len(emitted) < deepest == len(draft):
            state.remaining = RemainingDraft(step_draft.drafter, draft.tokens, right)

    def _compare_remaining(self, state: SequencePolicyState, emitted: Sequence[int] | None) -> None:
        """Compare what is left of a draft with the tokens of a step without a draft (None: there was a newer one)."""
        remaining, state.remaining = state.remaining, None
        if remaining is None or emitted is None:
            return
        drafter, tokens, known = remaining
        right, last = known, min(len(tokens), known + len(emitted))
        while right < last and tokens[right] == emitted[right - known]:
            right += 1
        sequence, tested = state.acceptance[drafter], min(right + 1, last)
        self._models[drafter].learn_round(sequence, accepted=right, tested=tested, known=known)
        state.remaining = RemainingDraft(drafter, tokens, right) if right == last < len(tokens) else None

    def _learn_shift(self, step_draft: StepDraft) -> None:
        forecast, model, survival = (
            step_draft.state.plan.forecast,
            self._models[step_draft.drafter],
            step_draft.survival or [],
        )
        judged = step_draft.draft is None or (step_draft.survival is not None and step_draft.draft.is_chain)
        if forecast and model.has_scores and judged:
            model.learn_shift(forecast[step_draft.drafter], survival + [0.0] * (step_draft.passes - len(survival)))


def compare(draft: Draft, emitted: Sequence[int]) -> tuple[list[int], list[int]]:
    """Nodes that the emitted tokens can be compared with, and those of them that agree, from the root down."""
    tested: list[int] = []
    path: list[int] = []
    next_token = {-1: emitted[0]} if emitted else {}  # after each node of the path
    for node, parent in enumerate(draft.parents):
        if parent in next_token:
            tested.append(node)
            if draft.tokens[node] == next_token[parent] and parent == (path[-1] if path else -1):
                path.append(node)
                if len(path) < len(emitted):
                    next_token[node] = emitted[len(path)]
    return tested, path
