"""What the adaptive policy learns from: verdicts, drafts that were not verified, and the seconds of steps; and whether
a drafter's guesses go on being accepted as they were.

Every draft token that can be compared with an emitted token is an observation, verified or not: the token after the
verified ones shows whether the next draft token was right, and a draft that was right so far is compared with the
tokens of later steps. Depths that were not reached stay unobserved.

A drafter that was good and is so no more for any text (a head beside another target, a store of other texts) would be
tried again by each new one: it is reported, and not used until it recovers. Each draft shows whether a first guess
was right, also the drafts that are made only to learn. The evidence is a cumulative sum of log-likelihood ratios
(Page 1954): nearly never right, against a quarter as often right as in the long run, since other texts may be guessed
as rarely as that by a drafter that is what it was; that of a collapse must come from several sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from wager.economics.acceptance import AcceptanceModel
from wager.economics.policy.base import EARLY_STEPS, UPDATE_INTERVAL
from wager.economics.policy.state import PlannedSequence, PolicyStep, Prices
from wager.kernels import _native
from wager.types import Draft, DraftDecision, StepRecord, Verdict

log = logging.getLogger("wager")

_EARLY_DRAFTS = 1024  # the first ones, of which up to a quarter in a step are learned from
_MAX_DRAFTS = 4  # drafts of a step that are learned from, about, in rotation
_LONG_RUN = 512  # drafts that the long run's rate is a mean of
_KNOWN = 48  # drafts after which there is a long run
_OTHER_TEXTS = 0.25  # of the long run's rate: that of texts which are hard to guess
_NEARLY_NEVER = 0.02  # of the rate of these
_ENOUGH = 10.0  # evidence: a false alarm in e^10 drafts of equal sequences
_SHARE = 0.49  # of that, what one sequence may count for: it takes three
_MOST_SEEN = 8  # drafts of one step that are looked at


class Learning:
    """Learns for `models` (by drafter) and for prices, of some drafts and steps."""

    def __init__(self, models: Mapping[str, AcceptanceModel], prices: Prices, *, draws_tokens: bool) -> None:
        """`draws_tokens`: under a rule that draws from draft_probs, what is accepted need not be what is emitted."""
        self._models, self._prices, self._draws_tokens = models, prices, draws_tokens
        self._turn = self._drafts = 0
        self._next_record = 0  # the step from which one is learned from again
        self._unlearned: StepRecord | None = None  # of the last step, if it is not learned from
        # by sequence, drafts that may be compared further: the drafter, the tokens, and how many of them were right
        self._remaining: dict[str, tuple[PlannedSequence, str, Sequence[int], int]] = {}

    def add_verdicts(self, step: PolicyStep) -> dict[str, bool]:
        """A step's verdicts. By sequence whose draft was made for exploration, whether its first guess was right."""
        if self._remaining:  # drafts that no newer one follows are compared further
            self._remaining = {seq_id: left for seq_id, left in self._remaining.items() if seq_id not in step.plan}
            for verdict in step.verdicts if self._remaining else ():
                if verdict.seq_id in self._remaining:
                    self._compare_remaining(verdict)
        sampled: list[Verdict] = []  # some in rotation, now and then, and all of exploration
        early = self._drafts < _EARLY_DRAFTS
        if step.plan and step.number % (self._prices.own.update_interval // UPDATE_INTERVAL) == 0:
            interval = max(1, len(step.plan) // (_EARLY_DRAFTS // 4 if early else _MAX_DRAFTS))
            self._turn += 1
            sampled = list(step.verdicts[self._turn % interval :: interval])
        explored = [verdict for verdict in step.verdicts if verdict.seq_id in step.explored] if step.explored else []
        sampled += [verdict for verdict in explored if verdict not in sampled]
        shifts = len(sampled) if early else step.number % 2  # whose shift of survival by scores is learned
        self._drafts += len(sampled)
        for verdict in sampled:
            state, decision = step.states.get(verdict.seq_id), step.plan.get(verdict.seq_id)
            if state is None or decision is None:
                continue
            draft = step.drafted.get(verdict.seq_id)
            self._learn_draft(state, decision, draft, verdict, shifts=shifts > 0)
            shifts -= 1
        return {
            verdict.seq_id: bool(_native.compare(step.drafted[verdict.seq_id], verdict.tokens)[1])
            for verdict in explored
            if verdict.seq_id in step.drafted
        }

    def add_record(self, step: PolicyStep, record: StepRecord) -> None:
        """What a step took; it is learned from every few steps, and those beside one that measures: what slows the
        machine for a while slows them as much."""
        number, measures, observe = step.number, step.measured_depth is not None, self._prices.latency.model.observe
        if measures and self._unlearned is not None:
            observe(self._unlearned)
        self._unlearned = None
        if measures or number >= self._next_record:
            every = measures or number < EARLY_STEPS
            self._next_record = number + (1 if every else self._prices.own.update_interval)
            observe(record)
        else:
            self._unlearned = record

    def end_sequence(self, state: PlannedSequence) -> None:
        self._remaining.pop(state.seq_id, None)
        for name, model in self._models.items():
            model.end_sequence(state.acceptance[name])

    def _learn_draft(
        self, state: PlannedSequence, decision: DraftDecision, draft: Draft | None, verdict: Verdict, *, shifts: bool
    ) -> None:
        """`shifts`: the shift of survival by scores is learned too."""
        drawn = self._draws_tokens and draft is not None and draft.draft_probs is not None
        more = self._models[decision.drafter].learn_draft(
            state.acceptance[decision.drafter],
            draft,
            verdict.tokens,
            accepted=len(verdict.accepted) if drawn else None,
            depth=decision.depth,
            stops_early=decision.min_survival > 0,
            forecast=state.forecasts[decision.drafter][state.row] if shifts and state.forecasts else None,
        )
        if draft is not None and more:
            self._remaining[state.seq_id] = state, decision.drafter, draft.tokens, len(verdict.tokens)

    def _compare_remaining(self, verdict: Verdict) -> None:
        """Compare what is left of a draft with the tokens of a step without a draft."""
        state, drafter, tokens, known = self._remaining.pop(verdict.seq_id)
        right, last = known, min(len(tokens), known + len(verdict.tokens))
        while right < last and tokens[right] == verdict.tokens[right - known]:
            right += 1
        tested = min(right + 1, last)
        self._models[drafter].learn_round(state.acceptance[drafter], accepted=right, tested=tested, known=known)
        if right == last < len(tokens):
            self._remaining[verdict.seq_id] = state, drafter, tokens, right


# ---- collapse -------------------------------------------------------------------------------------------------------


COLLAPSE_RULES = _native.CollapseRules(
    long_run=_LONG_RUN,
    known=_KNOWN,
    other_texts=_OTHER_TEXTS,
    nearly_never=_NEARLY_NEVER,
    enough=_ENOUGH,
    share=_SHARE,
)


class CollapseWatch:
    """`collapsed` are the drafters whose acceptance has, with a sentence about each. The first collapse of each is a
    warning, the next ones are noted."""

    def __init__(self) -> None:
        self.collapsed: dict[str, str] = {}
        self._records = _native.DrafterRecords(COLLAPSE_RULES, most_seen=_MOST_SEEN)
        self._warned: set[str] = set()

    def add(self, steps: list[PolicyStep]) -> bool:
        """Steps were taken; whether a drafter has collapsed or recovered in them."""
        changes = self._records.add(steps)
        for drafter, collapsed, usual, lately in changes:
            self._report(drafter, usual=usual, lately=lately if collapsed else "")
        return bool(changes)

    def _report(self, name: str, *, usual: float, lately: str) -> None:
        """`lately`: how many guesses were right of a drafter that has collapsed, "" of one that has recovered."""
        if not lately:
            del self.collapsed[name]
            log.info("Drafter %r is right again, and used as far as that pays.", name)
            return
        self.collapsed[name] = words = (
            f"Drafter {name!r} has collapsed: its first guesses were right {usual:.0%} of the time, and "
            f"lately {lately}."
        )
        level = logging.INFO if name in self._warned else logging.WARNING
        log.log(level, "%s It is not used while that is so, except to see whether it changes.", words)
        self._warned.add(name)
