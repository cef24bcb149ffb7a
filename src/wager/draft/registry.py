"""Drafters by name: what the argument of each is, what it does, and how it is built.

To add a drafter, write its file and add an entry to KINDS; a model family, a command or the engine need no change.
It imports no drafter: the configuration parses names with it; factories import later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from wager.errors import UsageError

if TYPE_CHECKING:
    from wager.draft.base import Drafter
    from wager.draft.heads.autoregressive import StateHead
    from wager.draft.heads.block import SlotHead
    from wager.draft.heads.parallel import ParallelHead
    from wager.draft.history import TargetOracle
    from wager.draft.model import DraftModel
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

    @property
    def models(self) -> list[str]:
        """Paths of all the models that it runs."""
        return [spec.argument or "" for spec in self.all if not spec.parts and KINDS[spec.name].runs_a_model]


@dataclass(frozen=True, slots=True)
class DrafterParts:
    """What a factory may build from: the verified model's number of logits `vocab`, the positions of a sequence
    `max_context`; for a drafter that runs a model or a head, that, loaded, and the kernels it samples with; for one
    that reads a store, the store, open; `inner` is the drafter's own drafter. `depth`: guesses of a round that the head
    was made for; `vocabularies`: the verified model's and the draft model's; `oracle` gives those made for proofs the
    target's tokens."""

    vocab: int
    max_context: int | None = None
    model: Target | None = None
    kernels: Kernels | None = None
    prefix_cache: bool = True
    head: StateHead | ParallelHead | SlotHead | None = None
    depth: int | None = None
    store: StoreFile | None = None
    inner: Drafter | None = None
    max_logits_rows: int | None = None
    vocabularies: tuple[TextVocabulary, TextVocabulary] | None = None
    oracle: TargetOracle | None = None


Factory = Callable[[DrafterSpec, DrafterParts], "Drafter"]


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """A name in the registry.

    argument: what may follow the name: "none", "number" (optional), "path" (required, of the draft model that is
    loaded for it), "head" (required, of a head on the target's states), "modules" (optional, of one that the target's
    own files may have), "store" (required, the file of a store) or "layers" (required, of the target). placeholder:
    what the argument is called in help. range: least and largest number. makes_trees: drafts may branch. samples:
    guesses are draws from a distribution, not certain. takes_inner: it may have a drafter of its own.
    reads_predictions: guesses may come from SamplingParams.prediction. other_vocabulary: its model's tokenizer may be
    another one. breaks: it fails on purpose.
    """

    description: str
    factory: Factory
    argument: Literal["none", "number", "path", "head", "modules", "store", "layers"] = "none"
    placeholder: str = ""
    range: tuple[int, int] = (0, 0)
    makes_trees: bool = False
    samples: bool = False
    takes_inner: bool = False
    reads_predictions: bool = False
    other_vocabulary: bool = False
    breaks: bool = False

    @property
    def runs_a_model(self) -> bool:
        return self.argument == "path"

    @property
    def runs_a_head(self) -> bool:
        """Whether it runs something on the target's states."""
        return self.argument in ("head", "modules")


def _ngram(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    from wager.draft.ngram import NgramDrafter

    return NgramDrafter(int(spec.argument)) if spec.argument else NgramDrafter()


def _lookup(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    from wager.draft.lookup import LookupDrafter
    from wager.draft.lookup_rates import DEFAULT_LONGEST, SHARED_TOKENS, LookupSources

    kind = KINDS[spec.name]
    if kind.argument == "store" and parts.store is None:
        raise UsageError(f"Drafter {str(spec)!r} was given no open store.", "Open it and pass it as a part.")
    longest = int(spec.argument) if spec.argument and kind.argument == "number" else DEFAULT_LONGEST
    return LookupDrafter(spec.name, LookupSources(longest, SHARED_TOKENS, parts.store), trees=kind.makes_trees)


def _recycle(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    from wager.draft.recycling import RecyclingDrafter

    return RecyclingDrafter(parts.vocab)


def _prediction(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    from wager.draft.prediction import PredictionDrafter

    return PredictionDrafter()


def _model(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    from wager.draft.stages import InnerDrafter

    known = min(parts.vocab, parts.model.vocab) if parts.model else parts.vocab  # ids that it can be fed
    inner = InnerDrafter(parts.inner, vocab=known) if parts.inner is not None else None
    return _draft_model(spec, parts, trees=KINDS[spec.name].makes_trees, inner=inner)


def _intersection(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    from wager.draft.intersection import SharedIds

    return _draft_model(spec, parts, shared=SharedIds(*parts.vocabularies) if parts.vocabularies else None)


def _text_route(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    from wager.draft.text_route import TextRouteDrafter

    drafter = _draft_model(spec, replace(parts, vocab=parts.model.vocab if parts.model else 0))
    if parts.vocabularies is None:
        raise UsageError(f"Drafter {str(spec)!r} was given no tokenizers.", "Pass both as parts.")
    return TextRouteDrafter(drafter, *parts.vocabularies)


def _draft_model(spec: DrafterSpec, parts: DrafterParts, **options: Any) -> DraftModel:
    from wager.draft.model import DraftModel

    if parts.model is None:
        raise UsageError(f"Drafter {str(spec)!r} was given no loaded model.", "Load the model and pass it as a part.")
    return DraftModel(
        parts.model,
        vocab=parts.vocab,
        max_context=parts.max_context,
        kernels=parts.kernels,
        prefix_cache=parts.prefix_cache,
        name=spec.name,
        max_logits_rows=parts.max_logits_rows,
        **options,
    )


def _head(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    from wager.draft.heads.kinds import head_drafter

    if parts.head is None:
        raise UsageError(f"Drafter {str(spec)!r} was given no loaded head.", "Load the head and pass it as a part.")
    return head_drafter(
        spec.name, parts.head, kernels=parts.kernels, prefix_cache=parts.prefix_cache, depth=parts.depth
    )


def _for_proofs(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    from wager.draft.for_proofs import proof_drafter

    return proof_drafter(spec.name, parts.vocab, oracle=parts.oracle)


_MTP = (
    "modules of multi-token prediction, the model's own or those in PATH, on its states before or after its last norm"
)
_MODEL_TREES = "the same, drafting trees: several candidates where it is in doubt"
_HEAD_TREES = DrafterKind("the same, drafting trees", _head, "head", "PATH", makes_trees=True, samples=True)

KINDS: Mapping[str, DrafterKind] = {
    "ngram": DrafterKind(
        "copies what followed the same tokens before; N: longest match looked up", _ngram, "number", "N", (1, 8)
    ),
    "suffix": DrafterKind(
        "what followed most often, in this text and in earlier answers; N: longest match looked up",
        _lookup,
        "number",
        "N",
        (1, 24),
        reads_predictions=True,
    ),
    "store": DrafterKind(
        "as suffix, and what followed most often in texts of the target, from a file",
        _lookup,
        "store",
        "PATH",
        reads_predictions=True,
    ),
    "suffix-tree": DrafterKind(
        "as suffix, drafting trees", _lookup, "number", "N", (1, 24), makes_trees=True, reads_predictions=True
    ),
    "store-tree": DrafterKind(
        "as store, drafting trees", _lookup, "store", "PATH", makes_trees=True, reads_predictions=True
    ),
    "recycle": DrafterKind(
        "trees of what the target last found likeliest after each token", _recycle, makes_trees=True
    ),
    "prediction": DrafterKind(
        "the output that the request predicts (--prediction)", _prediction, reads_predictions=True
    ),
    "model": DrafterKind(
        "a smaller model of the same vocabulary; model:PATH+ngram: another drafter guesses what it will draw",
        _model,
        "path",
        "PATH",
        samples=True,
        takes_inner=True,
    ),
    "model-tree": DrafterKind(_MODEL_TREES, _model, "path", "PATH", makes_trees=True, samples=True),
    "eagle3": DrafterKind("an EAGLE-3 head on the target's states", _head, "head", "PATH", samples=True),
    "eagle3-tree": _HEAD_TREES,
    "mtp": DrafterKind(_MTP, _head, "modules", "PATH", samples=True),
    "mtp-tree": replace(_HEAD_TREES, argument="modules"),
    "layers": DrafterKind(
        "some layers of the model itself, such as 0-9 or 0-9.20-29",
        _model,
        "layers",
        "FROM-TO",
        samples=True,
        takes_inner=True,
    ),
    "layers-tree": DrafterKind("the same, drafting trees", _model, "layers", "FROM-TO", makes_trees=True, samples=True),
    "slem": DrafterKind(
        "a model of another vocabulary, by way of text", _text_route, "path", "PATH", other_vocabulary=True
    ),
    "tli": DrafterKind(
        "a model of another vocabulary, by the tokens that both have",
        _intersection,
        "path",
        "PATH",
        samples=True,
        other_vocabulary=True,
    ),
    "medusa": DrafterKind("Medusa heads on the target's states", _head, "head", "PATH", samples=True),
    "medusa-tree": _HEAD_TREES,
    "dflash": DrafterKind(
        "a block head, DFlash or DSpark, on the target's states", _head, "head", "PATH", samples=True
    ),
    "dflash-tree": _HEAD_TREES,
    "adversary": DrafterKind("always wrong; for proofs", _for_proofs),
    "random-tree": DrafterKind("random trees; for proofs", _for_proofs, makes_trees=True),
    "garbage": DrafterKind("drafts that are no drafts, of every kind; for proofs", _for_proofs, makes_trees=True),
    "failing": DrafterKind("raises after a while, somewhere; for proofs", _for_proofs, breaks=True),
    "killed": DrafterKind("a process of its own, killed within an answer; for proofs", _for_proofs, breaks=True),
}
"""Drafters by name."""


def makes_trees(spec: DrafterSpec) -> bool:
    return bool(spec.parts) or KINDS[spec.name].makes_trees


def build_drafter(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    """Build a drafter by name; UsageError for one that is not registered. `merge_drafters` joins several."""
    if spec.name not in KINDS:
        raise UsageError(f"Unknown drafter {spec.name!r}.", f"Known drafters: {', '.join(KINDS)}.")
    return KINDS[spec.name].factory(spec, parts)


def merge_drafters(drafters: Sequence[Drafter], *, vocab: int) -> Drafter:
    """One drafter, of trees of the guesses of several."""
    from wager.draft.merged import MergedDrafter

    return MergedDrafter(drafters, vocab=vocab)
