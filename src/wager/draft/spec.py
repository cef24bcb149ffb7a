"""What a drafter is as it is written, what it is built from, and what is known of its kind; see registry.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from wager.draft.base import Drafter
    from wager.draft.store_file import StoreFile
    from wager.draft.vocabulary import TextVocabulary
    from wager.kernels.base import Kernels, Target


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A parsed drafter option: `NAME[:ARG]`, with `+INNER` behind it the drafter of the drafter, or `A//B`: the `parts`
    of which one tree is made."""

    name: str
    argument: str | None = None
    inner: DrafterSpec | None = None
    parts: tuple[DrafterSpec, ...] = ()

    def __str__(self) -> str:
        own = self.name if self.argument is None else f"{self.name}:{self.argument}"
        return own if self.inner is None else f"{own}+{self.inner}"

    @property
    def all(self) -> tuple[DrafterSpec, ...]:
        """This drafter, its own drafter or its parts, theirs, and so on."""
        below = self.parts if self.inner is None else (self.inner, *self.parts)
        return (self, *(each for spec in below for each in spec.all))


@dataclass(frozen=True, slots=True)
class DrafterParts:
    """What a factory may build from: the verified model's number of logits `vocab`, the positions of a sequence
    `max_context`; for a drafter that runs a model, that model, loaded, and the kernels it samples with; for one that
    reads a store, the store, open; `inner` is the drafter's own drafter, `vocabularies` are the
    verified model's and the other one, of a model that drafts in it."""

    vocab: int
    max_context: int | None = None
    model: Target | None = None
    kernels: Kernels | None = None
    prefix_cache: bool = True
    store: StoreFile | None = None
    inner: Drafter | None = None
    max_logits_rows: int | None = None
    vocabularies: tuple[TextVocabulary, TextVocabulary] | None = None


Factory = Callable[[DrafterSpec, DrafterParts], "Drafter"]


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """A name in the registry.

    argument: what may follow the name: "none", "number" (optional), "path" (required, of the draft model that is
    loaded for it), "store" (required, the file of a store) or "layers" (required, of the target). placeholder: what
    the argument is called in help. range: least and largest number. makes_trees: drafts may branch. samples: guesses
    are draws from a distribution, not certain. takes_inner: it may have a drafter of its own. other_vocabulary: its
    model's tokenizer may be another.
    """

    description: str
    factory: Factory
    argument: Literal["none", "number", "path", "store", "layers"] = "none"
    placeholder: str = ""
    range: tuple[int, int] = (0, 0)
    makes_trees: bool = False
    samples: bool = False
    takes_inner: bool = False
    other_vocabulary: bool = False

    @property
    def runs_a_model(self) -> bool:
        return self.argument == "path"
