"""The engine's side of its drafters: asks, checks what comes back, and goes on without one that fails.

Guesses cannot change the text, so a drafter's mistake costs speed at most: nodes with unknown tokens, bad parents or
beyond the room are cut off, and a drafter that raises is dropped with a warning. Every drafter is told everything, so
that one that was not asked for a while is not stale. Knows no target and no cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from wager.draft.base import Drafter
from wager.kernels.base import TargetOutput
from wager.types import Draft, DraftRequest, SamplingParams

log = logging.getLogger("wager")


class Proposer:
    """Any number of drafters, their names all different, behind the five verbs; never raises."""

    def __init__(self, *drafters: Drafter, vocab: int, chains: bool = False) -> None:
        """`chains`: cut what branches, for the rule that verifies chains only."""
        self.drafters = {drafter.name: drafter for drafter in drafters}
        self.vocab = vocab
        self._chains = chains

    @property
    def name(self) -> str:
        """Who guesses, in one word."""
        return ",".join(self.drafters) or "none"

    def begin(self, sequence: str, tokens: Sequence[int], params: SamplingParams) -> None:
        self._tell(lambda drafter: drafter.begin(sequence, tokens, params))

    def propose(
        self, asks: Sequence[DraftRequest], rooms: Mapping[str, int], chosen: Mapping[str, str] | None = None
    ) -> dict[str, Draft]:
        """Sound, non-empty drafts by sequence, none larger than its room. `chosen` says by sequence who is asked; the
        first drafter where it says nothing."""
        sound: dict[str, Draft] = {}
        for name, ours in self._shares(asks, chosen or {}).items():
            self._ask(name, ours, rooms, sound)
        return {sequence: draft for sequence, draft in sound.items() if len(draft)}

    def observe(self, output: TargetOutput) -> None:
        self._tell(lambda drafter: drafter.observe(output))

    def accept(self, sequence: str, tokens: Sequence[int]) -> None:
        self._tell(lambda drafter: drafter.accept(sequence, tokens))

    def end(self, sequence: str) -> None:
        self._tell(lambda drafter: drafter.end(sequence))

    def _shares(self, asks: Sequence[DraftRequest], chosen: Mapping[str, str]) -> dict[str, list[DraftRequest]]:
        """Asks by drafter; a drafter that was dropped gets none."""
        first = next(iter(self.drafters), "")
        shares: dict[str, list[DraftRequest]] = {}
        for ask in asks:
            shares.setdefault(chosen.get(ask.seq_id, first), []).append(ask)
        return {name: ours for name, ours in shares.items() if name in self.drafters}

    def _ask(self, name: str, asks: Sequence[DraftRequest], rooms: Mapping[str, int], sound: dict[str, Draft]) -> None:
        known = {ask.seq_id: ask for ask in asks}

        def collect(drafter: Drafter) -> None:
            ours = [draft for draft in drafter.propose(asks) if draft.seq_id in known]
            sound.update({d.seq_id: self._sound(d, known[d.seq_id], rooms[d.seq_id], drafter) for d in ours})

        self._try(name, collect)

    def _tell(self, verb: Callable[[Drafter], None]) -> None:
        for name in list(self.drafters):
            self._try(name, verb)

    def _try(self, name: str, verb: Callable[[Drafter], None]) -> None:
        try:
            verb(self.drafters[name])
        except Exception as error:
            log.warning("Drafter %r failed and is switched off: %s: %s", name, type(error).__name__, error)
            del self.drafters[name]

    def _sound(self, draft: Draft, ask: DraftRequest, room: int, drafter: Drafter) -> Draft:
        """The longest beginning of a draft that is a tree of known tokens within the room and has the law it needs."""
        if self._whole(draft, ask, room, drafter):
            return draft
        size = min(room, len(draft.tokens), len(draft.parents)) if self._lawful(draft, ask, drafter) else 0
        for node in range(size):
            lowest = node - 1 if self._chains else -1
            if not (0 <= draft.tokens[node] < self.vocab and lowest <= draft.parents[node] < node):
                size = node
                break
        return replace(
            draft,
            tokens=tuple(draft.tokens[:size]),
            parents=tuple(draft.parents[:size]),
            scores=tuple(draft.scores[:size]) if _scored(draft) else (),
            drafter=drafter.name,
            draft_probs=None if draft.draft_probs is None else draft.draft_probs[:size],
        )

    def _whole(self, draft: Draft, ask: DraftRequest, room: int, drafter: Drafter) -> bool:
        """Whether it is a chain with nothing to cut, as nearly all are: seen at a glance."""
        tokens = draft.tokens
        return (
            len(tokens) <= room
            and draft.drafter == drafter.name
            and draft.is_chain
            and (not tokens or (min(tokens) >= 0 and max(tokens) < self.vocab))
            and (not draft.scores or _scored(draft))
            and self._lawful(draft, ask, drafter)
        )

    def _lawful(self, draft: Draft, ask: DraftRequest, drafter: Drafter) -> bool:
        """Draws come with the law they were drawn from when it was asked for: without it no rule would be exact."""
        if draft.draft_probs is not None:
            return draft.draft_probs.shape == (len(draft.tokens), self.vocab)
        drawn = drafter.samples and not ask.params.greedy
        return not (ask.needs_draft_probs and drawn)


def _scored(draft: Draft) -> bool:
    """Whether every guess has a score that is a chance."""
    return len(draft.scores) == len(draft.tokens) and all(0.0 <= score <= 1.0 for score in draft.scores)
