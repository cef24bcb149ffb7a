"""The engine's side of a drafter: asks, checks what comes back, and goes on without one that fails.

Guesses cannot change the text, so a drafter's mistake costs speed at most: nodes with unknown tokens, bad parents or
beyond the room are cut off, and a drafter that raises is dropped with a warning. Knows no target and no cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from wager.draft.base import Drafter
from wager.kernels.base import Output
from wager.types import Ask, Draft, SamplingParams

log = logging.getLogger("wager")


class Drafting:
    """A drafter, or none, behind the five verbs; never raises."""

    def __init__(self, drafter: Drafter | None, *, vocab: int, chains: bool = False) -> None:
        """`chains`: cut what branches, for the rule that verifies chains only."""
        self.drafter = drafter
        self.vocab = vocab
        self._chains = chains

    @property
    def name(self) -> str:
        return self.drafter.name if self.drafter else "none"

    def begin(self, sequence: str, tokens: Sequence[int], params: SamplingParams) -> None:
        self._try(lambda drafter: drafter.begin(sequence, tokens, params))

    def propose(self, asks: Sequence[Ask], rooms: Mapping[str, int]) -> dict[str, Draft]:
        """Sound, non-empty drafts by sequence, none larger than its room."""
        known = {ask.sequence: ask for ask in asks}
        sound: dict[str, Draft] = {}

        def collect(drafter: Drafter) -> None:
            ours = [draft for draft in drafter.propose(asks) if draft.sequence in known]
            sound.update({d.sequence: self._sound(d, known[d.sequence], rooms[d.sequence]) for d in ours})

        if asks:
            self._try(collect)
        return {sequence: draft for sequence, draft in sound.items() if len(draft)}

    def observe(self, output: Output) -> None:
        self._try(lambda drafter: drafter.observe(output))

    def accept(self, sequence: str, tokens: Sequence[int]) -> None:
        self._try(lambda drafter: drafter.accept(sequence, tokens))

    def end(self, sequence: str) -> None:
        self._try(lambda drafter: drafter.end(sequence))

    def _try(self, verb: Callable[[Drafter], None]) -> None:
        if self.drafter is None:
            return
        try:
            verb(self.drafter)
        except Exception as error:
            log.warning("Drafter %r failed and is switched off: %s: %s", self.name, type(error).__name__, error)
            self.drafter = None

    def _sound(self, draft: Draft, ask: Ask, room: int) -> Draft:
        """The longest beginning of a draft that is a tree of known tokens within the room and has the law it needs."""
        size = min(room, len(draft.tokens), len(draft.parents)) if self._lawful(draft, ask) else 0
        for node in range(size):
            lowest = node - 1 if self._chains else -1
            if not (0 <= draft.tokens[node] < self.vocab and lowest <= draft.parents[node] < node):
                size = node
                break
        return Draft(
            draft.sequence,
            tuple(draft.tokens[:size]),
            tuple(draft.parents[:size]),
            tuple(draft.scores[:size]),
            self.name,
            None if draft.law is None else draft.law[:size],
        )

    def _lawful(self, draft: Draft, ask: Ask) -> bool:
        """Draws come with the law they were drawn from when it was asked for: without it no rule would be exact."""
        if draft.law is not None:
            return draft.law.shape == (len(draft.tokens), self.vocab)
        drawn = self.drafter is not None and self.drafter.needs_law and not ask.params.greedy
        return not (ask.law and drawn)
