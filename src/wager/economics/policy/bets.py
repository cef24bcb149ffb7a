"""What a policy keeps of every sequence, the bets of a step, and what a bet teaches once its verdict is in.

Every guess that can be compared with an emitted token is an observation, also one that was made and then not verified:
the token that follows the verified ones tells whether the next guess would have been right, and a draft that was right
so far goes on being compared with the steps that follow. Depths that were not reached stay unobserved. Knows no prices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from wager.economics.policy.acceptance import Rating, Skill
from wager.economics.policy.objective import Merit
from wager.types import Draft, Verdict


@dataclass(frozen=True, slots=True)
class Choice:
    """What was decided for a sequence: the drafter's index (-1: none), how deep, the floor as in Plan.floors (0: none),
    and the survival by depth that was expected of each drafter. Sequences yet to be decided for get a usual one, which
    is not their `own`."""

    drafter: int = -1
    depth: int = 0
    floor: float = 0.0
    expected: Sequence[Sequence[float]] = ()
    own: bool = False


class Seat:
    """A live sequence: what it is worth, how each drafter fares on it, and what was decided for it.

    `ratings`, `asked_at` (the position it was last drafted for at, 0 for never) and `asked_in` (in which step; -1 for
    never) have an item per drafter. `left` is what remains of the last draft if all of it that can be compared was
    right: drafter, guesses, and how many of them came true. `drawn` says that its last guesses were draws under an
    exact rule, which are verified unseen; `watched` that what it emits next may tell something.
    """

    __slots__ = ("asked_at", "asked_in", "choice", "drawn", "left", "merit", "ratings", "watched")

    def __init__(self, merit: Merit, ratings: list[Rating], choice: Choice) -> None:
        self.merit, self.ratings, self.choice = merit, ratings, choice
        self.left: tuple[int, Sequence[int], int] | None = None
        self.drawn = self.watched = False
        self.asked_at, self.asked_in = [0] * len(ratings), [-1] * len(ratings)


class Bet:
    """What was asked of a drafter (by index) for one sequence in a step, and what came: the draft, what its guesses
    were judged to be worth (None for draws under an exact rule), where they begin among all guesses of the step, and
    which were taken. A `probe` is a bet to find out."""

    __slots__ = ("depth", "draft", "drafter", "floor", "probe", "seat", "start", "survival", "taken")

    def __init__(self, seat: Seat, drafter: int, depth: int, *, floor: float = 0.0, probe: bool = False) -> None:
        self.seat, self.drafter, self.depth, self.floor, self.probe = seat, drafter, depth, floor, probe
        self.draft: Draft | None = None
        self.survival: list[float] | None = None
        self.start = 0
        self.taken: list[int] = []

    def promise(self, count: int) -> float:
        """How many of the first `count` guesses were expected to be right before drafting; 0 where nothing was."""
        expected = self.seat.choice.expected
        return sum(expected[self.drafter][:count]) if expected else 0.0

    @property
    def passes(self) -> int:
        """How many the drafter went through: it stops early only if it was given a floor."""
        return max(1, len(self.draft) if self.draft else 0) if self.floor else self.depth


@dataclass(slots=True)
class Step:
    """A step as it is being decided: its shape, what a second is worth (`price`), and what was bet in it.

    `worth` is what one token of each live sequence is worth together, `plain` the seconds of a step without guesses,
    `drafting` those that drafting should take; `control` says that it is plain to find out what plain steps take,
    `waking` that a drafter had to catch up.
    `open` are the live sequences with room for guesses: id, seat, room, and how many tokens are known.
    """

    rows: int = 0
    requests: int = 0
    context: int = 0
    live: int = 0
    worth: float = 0.0
    plain: float = 0.0
    price: float = 0.0
    drafting: float = 0.0
    control: bool = False
    waking: bool = False
    open: list[tuple[str, Seat, int, int]] = field(default_factory=list)
    bets: dict[str, Bet] = field(default_factory=dict)
    admitted: Mapping[str, Draft] = field(default_factory=dict)

    def passes(self) -> dict[int, list[int]]:
        """By drafter, how many passes each of its sequences took."""
        passes: dict[int, list[int]] = {}
        for bet in self.bets.values():
            passes.setdefault(bet.drafter, []).append(bet.passes)
        return passes


def settle(bet: Bet, verdict: Verdict, skill: Skill) -> None:
    """Learn from a bet. A draft that was not judged holds draws: acceptance tells whether they were right, not equality
    with what was emitted."""
    rating, draft = bet.seat.ratings[bet.drafter], bet.draft
    if draft is None:
        skill.learn_round(rating, right=0, tried=1)  # a guess that is not made is not right
        return
    nodes, path = _accepted(draft, verdict) if bet.survival is None else _tested(draft, verdict.tokens)
    right = len(path)
    deepest = len(draft.tokens) if draft.is_chain else max(draft.depths)
    declined = right == deepest < bet.depth and not bet.floor and len(verdict.tokens) > right
    skill.learn_round(rating, right=right, tried=min(right + 1, deepest + declined, len(verdict.tokens)))
    if bet.survival is not None and draft.scores:
        skill.learn_guesses(draft, nodes, path)
    if bet.survival is not None and right == len(verdict.tokens) < deepest == len(draft):
        bet.seat.left = bet.drafter, draft.tokens, right


def follow(seat: Seat, emitted: Sequence[int], skills: Sequence[Skill]) -> None:
    """Go on comparing a draft that was right and not verified with the tokens that came: it teaches for the price of
    drafting alone."""
    if seat.left is not None:
        drafter, tokens, done = seat.left
        right, most = done, min(len(tokens), done + len(emitted))
        while right < most and tokens[right] == emitted[right - done]:
            right += 1
        skills[drafter].learn_round(seat.ratings[drafter], first=done, right=right, tried=min(right + 1, most))
        seat.left = (drafter, tokens, right) if right == most < len(tokens) else None


def _accepted(draft: Draft, verdict: Verdict) -> tuple[Sequence[int], Sequence[int]]:
    return range(min(len(verdict.accepted) + 1, len(draft))), verdict.accepted


def _tested(draft: Draft, emitted: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Nodes that were put to the test, and those that were right, from the root down. What lies beyond the last emitted
    token was not tested."""
    tokens = draft.tokens
    if draft.is_chain:
        right, most = 0, min(len(tokens), len(emitted))
        while right < most and tokens[right] == emitted[right]:
            right += 1
        return range(min(right + 1, most)), range(right)
    nodes: list[int] = []
    path: list[int] = []
    for depth, token in enumerate(emitted):
        if len(path) < depth:
            break
        children = [node for node, parent in enumerate(draft.parents) if parent == (path[-1] if path else -1)]
        nodes += children
        path += [node for node in children if tokens[node] == token][:1]
    return nodes, path
