"""What the adaptive policy learns from: verdicts, drafts that were not verified, and the seconds of steps.

Observations are collected and learned from together every few steps, so that the tables are in the processor's
caches, and only a sample of them in large batches. Every draft token that can be compared with an emitted token is an
observation, verified or not: the token after the verified ones shows whether the next draft token was right, and a
draft that was right so far is compared with the tokens of later steps. Depths that were not reached stay unobserved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from wager.economics.acceptance import AGING_INTERVAL, AcceptanceModel
from wager.economics.latency import LatencyModel
from wager.economics.policy.base import EARLY_STEPS, UPDATE_INTERVAL
from wager.economics.policy.prices import PolicySeconds
from wager.economics.policy.state import PlannedSequence, PolicyStep, RemainingDraft, SequencePlan, StepDraft
from wager.types import Draft, StepRecord, Verdict

_EARLY_DRAFTS = 1024  # the first ones, of which up to a quarter in a step are learned from
_MAX_DRAFTS = 4  # about so many drafts of a step are learned from, in rotation


class DeferredLearning:
    """Collects observations for `models` (by drafter) and `latency`, and applies them every few steps."""

    def __init__(
        self, models: Sequence[AcceptanceModel], latency: LatencyModel, *, own: PolicySeconds, draws_tokens: bool
    ) -> None:
        """`draws_tokens`: under a rule that draws from draft_probs, what is accepted need not be what is emitted."""
        self._models, self._latency, self._own, self._draws_tokens = models, latency, own, draws_tokens
        self._turn = self._drafts = 0
        self._now = self._learned = 0  # the last step, and the one in which it last learned
        self._next = self._next_record = 0.0  # the steps from which drafts, and seconds, are learned from again
        self._pending: list[Callable[[], None]] = []
        self._remaining: dict[str, PlannedSequence] = {}  # sequences whose last draft may be compared further

    def add_verdicts(self, step: PolicyStep) -> None:
        """A step's verdicts."""
        if self._remaining:
            self._compare(step.verdicts, step)
        due = step.number >= self._next and bool(step.plan)
        if due or step.explored:
            self._collect(self._sample(step, due=due), step)

    def _sample(self, step: PolicyStep, *, due: bool) -> list[Verdict]:
        """The verdicts to learn from: some in rotation, where it is `due`, and all of exploration."""
        sampled: list[Verdict] = []
        verdicts = step.verdicts
        if due:
            self._next = max(self._next, step.number - 1) + self._own.pace
            interval = max(1, len(step.plan) // (_EARLY_DRAFTS // 4 if self._early else _MAX_DRAFTS))
            self._turn += 1
            sampled = list(verdicts[self._turn % interval :: interval])
        explored = step.explored
        return sampled + [each for each in verdicts if each.seq_id in explored and each not in sampled]

    @property
    def _early(self) -> bool:
        return self._drafts < _EARLY_DRAFTS

    def _collect(self, sampled: Sequence[Verdict], step: PolicyStep) -> None:
        shifts = len(sampled) if self._early else step.number % 2  # whose shift of survival by scores is learned
        self._drafts += len(sampled)
        for verdict in sampled:
            state = step.states.get(verdict.seq_id)
            if state is not None and verdict.seq_id in step.plan:
                step_draft = step.draft_of(state)
                drawn = self._draws_tokens and step_draft.draft is not None and step_draft.draft.draft_probs is not None
                self._remaining[verdict.seq_id] = state
                self._pending.append(partial(self._learn_draft, step_draft, verdict, comparable=not drawn))
                if shifts > 0 and not drawn:
                    shifts -= 1
                    self._pending.append(partial(self._learn_shift, step_draft, state.plan))

    def _compare(self, verdicts: Sequence[Verdict], step: PolicyStep) -> None:
        """Compare what is left of drafts with the tokens of this step, where it has no newer one."""
        plain = {seq_id: state for seq_id, state in self._remaining.items() if seq_id not in step.plan}
        for seq_id in [seq_id for seq_id in self._remaining if seq_id in step.plan]:
            self._pending.append(partial(self._compare_remaining, self._remaining.pop(seq_id), None))
        emitted = {verdict.seq_id: verdict.tokens for verdict in verdicts} if plain else {}
        for seq_id, state in plain.items():
            if seq_id in emitted:
                self._pending.append(partial(self._compare_remaining, state, emitted[seq_id]))

    def add_record(self, step: PolicyStep, record: StepRecord) -> None:
        """What a step took."""
        self._now = number = step.number
        due = number >= self._next_record
        if due:
            interval = 1.0 if number < EARLY_STEPS else UPDATE_INTERVAL * self._own.pace
            self._next_record = max(self._next_record, number - 1) + interval
        if (due or step.measures) and self._latency.learns:
            self._pending.append(partial(self._latency.observe, record))
        if number >= self._learned + AGING_INTERVAL:
            self.learn()

    def end_sequence(self, state: PlannedSequence) -> None:
        """The sequence is over."""
        self._remaining.pop(state.seq_id, None)
        ended = zip(self._models, state.acceptance, strict=True)
        self._pending += [partial(model.end_sequence, sequence) for model, sequence in ended]

    def learn(self) -> None:
        """Learn from all that was collected, in order."""
        self._learned = self._now
        for learn in self._pending:
            learn()
        self._pending.clear()
        self._remaining = {seq_id: state for seq_id, state in self._remaining.items() if state.remaining is not None}

    def _learn_draft(self, step_draft: StepDraft, verdict: Verdict, *, comparable: bool) -> None:
        draft, state, model = step_draft.draft, step_draft.state, self._models[step_draft.drafter]
        sequence, emitted = state.acceptance[step_draft.drafter], verdict.tokens
        state.remaining = None
        if draft is None:
            model.learn_round(sequence, accepted=0, tested=1)  # a token that is not drafted is not accepted
            return
        tested, path = compare(draft, emitted)
        if not comparable:  # sampled from draft_probs: what is accepted need not equal what is emitted
            path = list(verdict.accepted)
        right, deepest = len(path), len(draft.tokens) if draft.is_chain else max(draft.depths)
        # the drafter could have drafted deeper and did not: a token that is not accepted
        declined = right == deepest < step_draft.depth and not step_draft.min_survival and len(emitted) > right
        if comparable and draft.scores and not draft.is_chain:
            model.learn_tree(sequence, model.survival(draft, sequence))
        else:
            model.learn_round(sequence, accepted=right, tested=min(right + 1, deepest + declined, len(emitted)))
        if comparable and draft.scores:
            model.learn_scores(draft, tested, path)
        if comparable and right == len(emitted) < deepest == len(draft):
            state.remaining = RemainingDraft(step_draft.drafter, draft.tokens, right)

    def _compare_remaining(self, state: PlannedSequence, emitted: Sequence[int] | None) -> None:
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

    def _learn_shift(self, step_draft: StepDraft, plan: SequencePlan) -> None:
        draft, model, state = step_draft.draft, self._models[step_draft.drafter], step_draft.state
        if plan.forecasts and model.has_scores:
            survival = model.survival(draft, state.acceptance[step_draft.drafter]) if draft else []
            survival.sort(reverse=True)  # of a tree too: see AcceptanceModel.learn_tree
            forecast = plan.forecasts[step_draft.drafter][plan.row].tolist()
            model.learn_shift(forecast, survival + [0.0] * (step_draft.passes - len(survival)))


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
