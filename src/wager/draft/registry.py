"""Builds drafters by name. To add one, write its file with a function `build`, and an entry in DRAFTERS of
drafter_spec.py."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from wager.draft.base import Drafter
from wager.draft.store_file import StoreFile
from wager.drafter_spec import DRAFTERS, DrafterSpec
from wager.errors import UsageError
from wager.kernels._native import BlockPool
from wager.kernels.base import Target
from wager.kernels.cpu import Kernels
from wager.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from wager.draft.corpus.learning import LearnedTexts


@dataclass(frozen=True, slots=True)
class DrafterParts:
    """What a drafter may be built from: the verified model's number of logits `vocab`, the positions of a sequence
    `max_context`; for a drafter that runs a model or a head, that, loaded, and the kernels it samples with; for one
    that reads a store, the store, open; `learned`: what was learned of earlier requests; `inner` is the drafter's own
    drafter. `depth`: guesses of a round that the head was made for; `vocabularies`: the verified model's and the draft
    model's; `target_pool`: which blocks of the verified model's cache are whose, for a head that reads it. `behind`:
    it is asked where another drafter's guesses are worth little."""

    vocab: int
    max_context: int | None = None
    model: Target | None = None
    kernels: Kernels | None = None
    prefix_cache: bool = True
    head: Any = None
    depth: int | None = None
    store: StoreFile | None = None
    learned: LearnedTexts | None = None
    inner: Drafter | None = None
    max_logits_rows: int | None = None
    vocabularies: tuple[Tokenizer, Tokenizer] | None = None
    target_pool: BlockPool | None = None
    behind: bool = False

    def loaded_head(self, spec: DrafterSpec) -> Any:
        """The head; UsageError if there is none."""
        if self.head is None:
            raise UsageError(f"Drafter {str(spec)!r} was given no loaded head.", "Load the head and pass it as a part.")
        return self.head


def build_drafter(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    """The drafter of a spec that joins none (see combined.JoinedDrafter); UsageError for one that is not registered.
    Its module is imported now: a start does not wait for those that it does not use."""
    if spec.name not in DRAFTERS:
        raise UsageError(f"Unknown drafter {spec.name!r}.", f"Known drafters: {', '.join(DRAFTERS)}.")
    built: Drafter = import_module(f"wager.draft.{spec.option.module}").build(spec, parts)
    return built
