"""The engine's side of a drafter: asks, checks what comes back, and goes on without one that fails.

Guesses cannot change the text, so a drafter's mistake costs speed at most: nodes with unknown tokens, bad parents or
beyond the room are cut off, and a drafter that raises is dropped with a warning. Knows no target and no cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from wager.draft.base import Drafter
from wager.kernels.base import Output
from wager.types import Ask, Draft, SamplingParams

log = logging.getLogger("wager")


class Drafting:
    """A drafter, or none, behind the five verbs; never raises."""

    def __init__(self, drafter: Drafter | None, *, vocab: int) -> None:
        self.drafter = drafter
        self.vocab = vocab

    @property
    def name(self) -> str:
        return self.drafter.name if self.drafter else "none"

    def begin(self, sequence: str, tokens: Sequence[int], params: SamplingParams) -> None:
        self._try(lambda drafter: drafter.begin(sequence, tokens, params))

    def propose(self, asks: Sequence[Ask], rooms: Mapping[str, int]) -> dict[str, Draft]:
        """Sound, non-empty drafts by sequence, none larger than its room."""
        drafts: list[Draft] = []
        if asks:
            self._try(lambda drafter: drafts.extend(drafter.propose(asks)))
        known = {ask.sequence: ask for ask in asks}
        sound = {
            d.sequence: self._sound(d, known[d.sequence], rooms[d.sequence]) for d in drafts if d.sequence in known
        }
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
            if not (0 <= draft.tokens[node] < self.vocab and -1 <= draft.parents[node] < node):
                size = node
                break
        law = None if draft.law is None else draft.law[:size]
        return replace(
            draft, tokens=draft.tokens[:size], parents=draft.parents[:size], scores=draft.scores[:size], law=law
        )

    def _lawful(self, draft: Draft, ask: Ask) -> bool:
        """Draws come with the law they were drawn from when it was asked for: without it no rule would be exact."""
        if draft.law is not None:
            return draft.law.shape == (len(draft.tokens), self.vocab)
        return not (ask.law and self.drafter is not None and self.drafter.needs_law)
