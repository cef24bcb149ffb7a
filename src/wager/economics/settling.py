"""After the pass: what was bet, what came of it, and what that teaches.

Every guess that can be compared with an emitted token is an observation, also one that was made and then not verified:
under `match` the text does not depend on guesses, so the token that follows the admitted ones tells whether the next
guess would have been right. A draft that was right and not verified goes on being compared with the steps that follow,
and so teaches for the price of drafting alone. Depths that were not reached stay unobserved. Knows no prices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from wager.economics.acceptance import Acceptance, Judged, Skill, is_chain
from wager.economics.ratings import Floats, Ints
from wager.types import Draft, Verdict

_SAMPLE = 4
"""How survival scatters is looked at in every so many steps."""


@dataclass(slots=True)
class Asked:
    """What was asked of one drafter in a step: `chance` and `survival` [sequences, depth] as expected, `depths`
    [sequences] asked, `passes` [sequences] how many of them the drafter went through, `seconds` what that should have
    taken."""

    drafter: str
    sequences: tuple[str, ...]
    slots: Ints
    depths: Ints
    chance: Floats
    survival: Floats
    passes: Ints
    seconds: float = 0.0


@dataclass(slots=True)
class Made:
    """Drafts of one drafter as they came, and as they were judged (None: admitted unseen, under an exact rule)."""

    drafter: str
    drafts: Sequence[Draft]
    slots: Ints
    judged: Judged | None


@dataclass(slots=True)
class Bets:
    """One step's asks and drafts, and what of them was admitted, until its verdicts are in."""

    asked: list[Asked] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    admitted: Mapping[str, Draft] = field(default_factory=dict)


@dataclass(slots=True)
class _Shadow:
    """A draft that is still being compared; `done` of its guesses were right so far."""

    drafter: str
    tokens: tuple[int, ...]
    done: int
    chance: Floats


class Settling:
    """Turns verdicts into observations. `exact`: drafts with a law are judged by acceptance, not by equality."""

    def __init__(self, acceptance: Acceptance, *, exact: bool) -> None:
        self._acceptance = acceptance
        self._exact = exact
        self._shadows: dict[str, _Shadow] = {}
        self._steps = 0

    def end(self, sequence: str) -> None:
        """Forget a sequence."""
        self._shadows.pop(sequence, None)

    def settle(self, bets: Bets, verdicts: Mapping[str, Verdict]) -> None:
        """Learn from a step."""
        drafts = {draft.sequence: draft for made in bets.made for draft in made.drafts}
        if self._shadows:
            self._follow(bets, verdicts)
        runs: dict[str, tuple[int, int]] = {}
        for asked in bets.asked:
            self._settle_asked(asked, bets, drafts, verdicts, runs)
        for made in bets.made:
            if made.judged is not None:
                self._settle_made(made, self._acceptance.skill(made.drafter), made.judged, verdicts, runs)
        self._steps += 1
        if self._steps % _SAMPLE == 0:
            for asked in bets.asked:
                self._spread(asked, bets)
        for drafter in {asked.drafter for asked in bets.asked}:
            self._acceptance.skill(drafter).digest()

    def _settle_asked(
        self,
        asked: Asked,
        bets: Bets,
        drafts: Mapping[str, Draft],
        verdicts: Mapping[str, Verdict],
        runs: dict[str, tuple[int, int]],
    ) -> None:
        run, seen = [0] * len(asked.sequences), [0] * len(asked.sequences)
        depths = asked.depths.tolist()
        for row, sequence in enumerate(asked.sequences):
            verdict = verdicts.get(sequence)
            if verdict is None:
                continue
            draft = drafts.get(sequence)
            if draft is None:
                seen[row] = 1  # asked, and nothing came
                continue
            right, tested = runs[sequence] = self._run(draft, verdict, bets.admitted.get(sequence))
            emitted, made = len(verdict.tokens), len(draft.tokens)
            declined = right == made < depths[row] and emitted > right
            run[row], seen[row] = right, tested + declined
            if right == emitted < made and not self._drawn(draft) and is_chain(draft):
                self._shadows[sequence] = _Shadow(asked.drafter, draft.tokens, right, asked.chance[row])
        self._acceptance.skill(asked.drafter).learn_offers(asked.slots, run=run, seen=seen, chance=asked.chance)

    def _settle_made(
        self,
        made: Made,
        skill: Skill,
        judged: Judged,
        verdicts: Mapping[str, Verdict],
        runs: Mapping[str, tuple[int, int]],
    ) -> None:
        if judged.chains:
            ends = [runs.get(draft.sequence, (0, 0)) for draft in made.drafts]
            skill.learn_guesses(made.slots, judged, run=[end[0] for end in ends], seen=[end[1] for end in ends])
            return
        trial, right = np.zeros_like(judged.made), np.zeros_like(judged.made)
        for row, draft in enumerate(made.drafts):
            trial[row], right[row] = _tree_trials(draft, verdicts.get(draft.sequence), width=judged.made.shape[1])
        skill.learn_nodes(made.slots, judged, trial=trial, right=right)

    def _run(self, draft: Draft, verdict: Verdict, admitted: Draft | None) -> tuple[int, int]:
        """How many depths of a draft were right, and how many were put to the test."""
        right = len(verdict.accepted)
        if self._drawn(draft):
            return right, min(right + 1, len(draft))
        if not is_chain(draft):
            right = len(_path(draft, verdict.tokens))
            return right, min(right + 1, max(draft.depths), len(verdict.tokens))
        if admitted is not None and right < len(admitted.tokens):
            return right, right + 1
        if right == len(draft.tokens) or right == len(verdict.tokens):
            return right, right
        return right + (draft.tokens[right] == verdict.tokens[right]), right + 1  # the first guess not verified

    def _drawn(self, draft: Draft) -> bool:
        return self._exact and draft.law is not None

    def _spread(self, asked: Asked, bets: Bets) -> None:
        """How far what was judged after drafting lay from what was expected before it."""
        made = next((each for each in bets.made if each.drafter == asked.drafter), None)
        judged = made.judged if made is not None else None
        if made is None or judged is None or not judged.scored or not judged.chains:
            return
        place = {sequence: row for row, sequence in enumerate(asked.sequences)}
        rows = [place[draft.sequence] for draft in made.drafts]
        after = np.zeros_like(asked.survival)
        width = min(after.shape[1], judged.survival.shape[1])
        after[rows, :width] = judged.survival[:, :width]
        within = np.arange(after.shape[1]) < asked.depths[:, None]
        self._acceptance.skill(asked.drafter).learn_spread(asked.survival, after, asked=within)

    def _follow(self, bets: Bets, verdicts: Mapping[str, Verdict]) -> None:
        """Compare what is left of older drafts with the tokens that came; a new ask ends an old draft."""
        for asked in bets.asked:
            for sequence in asked.sequences:
                self._shadows.pop(sequence, None)
        for sequence in [name for name in self._shadows if name in verdicts]:
            shadow, emitted = self._shadows.pop(sequence), verdicts[sequence].tokens
            left = shadow.tokens[shadow.done :]
            most = min(len(left), len(emitted))
            right = next((at for at in range(most) if left[at] != emitted[at]), most)
            self._acceptance.skill(shadow.drafter).learn_offers(
                np.array([self._acceptance.slot(sequence)]),
                run=[shadow.done + right],
                seen=[shadow.done + min(right + 1, most)],
                chance=shadow.chance[None],
                first=shadow.done,
            )
            self._acceptance.skill(shadow.drafter).digest()
            if right == len(emitted) < len(left):
                shadow.done += right
                self._shadows[sequence] = shadow


def _tree_trials(draft: Draft, verdict: Verdict | None, *, width: int) -> tuple[list[bool], list[bool]]:
    """Which nodes of a tree were put to the test, and which of them were right."""
    trial, right = [False] * width, [False] * width
    if verdict is not None:
        path = _path(draft, verdict.tokens)
        reached = {-1, *path[: len(verdict.tokens) - 1]}  # what follows the last emitted token is untested
        for node, parent in enumerate(draft.parents):
            trial[node], right[node] = parent in reached, node in path
    return trial, right


def _path(draft: Draft, tokens: Sequence[int]) -> list[int]:
    """Nodes of a tree that say what was emitted, from the root down."""
    edges = zip(draft.parents, draft.tokens, strict=True)
    children = {edge: node for node, edge in enumerate(edges)}
    path: list[int] = []
    for token in tokens:
        node = children.get((path[-1] if path else -1, token))
        if node is None:
            break
        path.append(node)
    return path
