"""How far drafters have kept up with the sequences, and which of them rest.

A drafter that reads the target's states costs something in every step, used or not, and the steps of a small target
are short. One that no plan has named for some steps rests: it is shown no states. When it is wanted again, by a plan or
to learn what it is worth by now, it is shown those of some steps before it is asked for drafts. Of the sequences that
decode meanwhile it has then seen the last tokens only, which is nearly as good (docs/policy.md), and of those that come
later everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wager.economics.policy.sequence_state import DrafterProfile, PolicyStep, SequencePolicyState
from wager.types import DraftDecision

REST_AFTER = 32  # steps for which nothing wants a drafter that then rests
TRIAL = 8  # steps after a request until one may rest: what it guessed is compared with the tokens of these
PAUSE = 4  # of so many steps one is learned from, and one in as many looks at the plan is made, while all rest
KEEPING_S = 1e-4  # seconds that keeping states takes in a step, about, whatever the target
_WORTH_A_REST = 0.002  # share of a step: keeping states that takes less goes on

_NONE: frozenset[str] = frozenset()


class DrafterReadiness:
    """Writes `last_position` and `last_step` of sequences. `resting` are the names of the drafters that rest,
    `left_out` of those that failed and pause."""

    def __init__(self, drafters: Sequence[DrafterProfile]) -> None:
        self.resting = self.left_out = _NONE
        self._drafters = drafters
        self._index = {profile.name: index for index, profile in enumerate(drafters)}
        self._can_rest = [index for index, profile in enumerate(drafters) if profile.capabilities.warm_up]
        self._ready = [0] * len(drafters)  # the step from which each has seen enough
        self._kept = [0] * len(drafters)  # the step until which it does not rest; 0: none was set yet

    # ---- what they have seen ----------------------------------------------------------------------------------------

    def note_request(self, state: SequencePolicyState, drafter: int, now: int) -> None:
        """In step number `now` it is asked for a draft."""
        state.last_position[drafter], state.last_step[drafter] = state.known, now
        self._kept[drafter] = max(self._kept[drafter], now + TRIAL)

    def note_drafted(self, step: PolicyStep, standing: Mapping[str, DraftDecision]) -> None:
        """Before a plan: until now the drafters kept up with the sequences that they were to draft for."""
        if not any(profile.capabilities.catch_up_s for profile in self._drafters):
            return
        for state in step.candidates:
            decision = standing.get(state.seq_id)
            if decision is not None and state.known_before:
                self.note_request(state, self._index[decision.drafter], step.number)
            state.known_before = True
        for name in self.resting:
            self._begin_anew(step, self._index[name])

    def _begin_anew(self, step: PolicyStep, drafter: int) -> None:
        """What it has missed of the sequences it never computes."""
        for state in step.candidates:
            state.last_position[drafter] = state.known

    # ---- which rest -------------------------------------------------------------------------------------------------

    @property
    def all_rest(self) -> bool:
        """Whether there is none that could be asked for a draft."""
        return len(self.resting) == len(self._drafters)

    def unready(self, now: int) -> frozenset[str]:
        """The drafters that rest, pause, or woke so lately that they have not seen enough."""
        waking = [self._drafters[index].name for index in self._can_rest if self._ready[index] > now]
        return self.resting.union(waking, self.left_out) if waking or self.left_out else self.resting

    def next_ready(self, now: int) -> int | None:
        """The next step in which one that woke has seen enough."""
        return min([self._ready[index] for index in self._can_rest if self._ready[index] > now], default=None)

    def settle(self, step: PolicyStep, standing: Mapping[str, DraftDecision]) -> None:
        """Those that sequences are to use are awake from now on; those that nothing wanted for long rest."""
        if not self._can_rest:
            return
        now, wanted = step.number, {self._index[decision.drafter] for decision in standing.values()}
        for index in self._can_rest:
            if index in wanted or not self._kept[index]:
                self.keep(step, index, steps=REST_AFTER)
        if _WORTH_A_REST * step.load.plain_seconds < KEEPING_S:
            tired = [self._drafters[index].name for index in self._can_rest if self._kept[index] <= now]
            if not self.resting.issuperset(tired):
                self.resting = self.resting.union(tired)

    def keep(self, step: PolicyStep, drafter: int, *, steps: int) -> None:
        """It does not rest within so many steps; one that rests wakes, and these begin when it has seen enough."""
        now, (name, capabilities, _) = step.number, self._drafters[drafter]
        if name in self.resting:
            self.resting = self.resting.difference([name])
            self._ready[drafter] = now = now + capabilities.warm_up
            self._begin_anew(step, drafter)
        self._kept[drafter] = max(self._kept[drafter], now + steps)
