"""What has happened and was not learned from yet. It is learned in one go every few steps: a pass over the weights
leaves cold caches behind, and a loop warms them.

Knows sequences, bets and skills; no prices but those it passes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from wager.economics.policy.acceptance import Skill
from wager.economics.policy.bets import Bet, Seat, follow, settle
from wager.types import StepRecord, Verdict

_MOST = 16
"""Steps that may wait to be learned from."""

_ENOUGH, _EAGER = 4, 256
"""In a step with more bets, about this many of them teach, in turns; the second number holds at first."""

_SAMPLES = 16
"""Drafts of a step that tell how they came out, at first; later one does."""

_FIRST, _SELDOM = 64, 5
"""Steps at first, which all tell what steps take; of later ones every fifth does."""


class Lessons:
    """`skills` by drafter's index; `tell` is told every step's record, if anybody wants to know."""

    def __init__(self, skills: Sequence[Skill], tell: Callable[[StepRecord], None] | None) -> None:
        self._skills, self._tell = skills, tell
        self._verdicts: list[tuple[Seat, Bet | None, Verdict | None, bool]] = []  # no verdict: the sequence ended
        self._samples: list[Bet] = []
        self._records: list[StepRecord] = []
        self._steps = 0

    def verdicts(self, told: Sequence[tuple[Seat, Verdict]], bets: Mapping[str, Bet], *, number: int) -> None:
        """What became of live sequences in step `number`, and of the bets on them."""
        early = self._steps < _FIRST
        turns = max(1, len(bets) // (_EAGER if early else _ENOUGH))
        for turn, (seat, verdict) in enumerate(told, number):
            bet = bets.get(verdict.seq_id)
            if bet is not None:
                seat.watched = True
            elif not seat.watched:
                continue
            self._verdicts.append((seat, bet, verdict, turn % turns == 0))
        if bets and (early or number % 2):
            asked = list(bets.values())
            apart = max(1, len(asked) // (_SAMPLES if early else 1))
            self._samples += asked[number // 2 % apart :: apart]

    def record(self, record: StepRecord, *, rare: bool) -> None:
        """What a step took; a `rare` one tells in any case."""
        self._steps += 1
        if self._tell and (rare or self._steps < _FIRST or self._steps % _SELDOM == 0):
            self._records.append(record)
        if self._steps % _MOST == 0:
            self.learn()

    def end(self, seat: Seat) -> None:
        """The sequence is over."""
        self._verdicts.append((seat, None, None, False))

    def learn(self) -> None:
        """All of it."""
        for seat, bet, verdict, turn in self._verdicts:
            if verdict is None:
                for skill, rating in zip(self._skills, seat.ratings, strict=True):
                    skill.close(rating)
            elif bet is None:
                follow(seat, verdict.tokens, self._skills)
            else:
                seat.left = None
                if turn or bet.probe:
                    settle(bet, verdict, self._skills[bet.drafter])
            seat.watched = seat.left is not None
        for bet in self._samples:
            self._shift(bet)
        for record in self._records:
            if self._tell:
                self._tell(record)
        self._verdicts, self._samples, self._records = [], [], []

    def _shift(self, bet: Bet) -> None:
        """How a draft came out, one a step."""
        expected, skill = bet.seat.choice.expected, self._skills[bet.drafter]
        if bet.draft is not None and bet.survival is None:
            return  # draws were not judged
        if expected and skill.scored and (bet.draft is None or bet.draft.is_chain):
            made = bet.survival or []
            skill.learn_shift(expected[bet.drafter], made + [0.0] * (bet.passes - len(made)))
