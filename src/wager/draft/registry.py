"""Builds drafters by name. To add one, write its file, an entry in DRAFTERS of drafter_spec.py and one in FACTORIES."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from wager.draft.base import Drafter
from wager.draft.combined import InnerDrafter
from wager.draft.heads.autoregressive import HeadDrafter, HeadTreeDrafter, ModulesDrafter, StateHead
from wager.draft.heads.one_pass import (
    BlockDrafter,
    BlockTreeDrafter,
    ParallelDrafter,
    ParallelHead,
    ParallelTreeDrafter,
    SlotHead,
)
from wager.draft.lookup import DEFAULT_LONGEST, SHARED_TOKENS, LookupDrafter, LookupSources
from wager.draft.model import DraftModel
from wager.draft.ngram import NgramDrafter
from wager.draft.other_vocabulary import IntersectionSampler, SharedIds, TextRouteDrafter
from wager.draft.prediction import PredictionDrafter
from wager.draft.recycling import RecyclingDrafter
from wager.draft.store_file import StoreFile
from wager.draft.vocabulary import TextVocabulary
from wager.drafter_spec import DrafterSpec
from wager.errors import UsageError
from wager.kernels.base import Target
from wager.kernels.cpu import Kernels


@dataclass(frozen=True, slots=True)
class DrafterParts:
    """What a drafter may be built from: the verified model's number of logits `vocab`, the positions of a sequence
    `max_context`; for a drafter that runs a model or a head, that, loaded, and the kernels it samples with; for one
    that reads a store, the store, open; `inner` is the drafter's own drafter. `depth`: guesses of a round that the head
    was made for; `vocabularies`: the verified model's and the draft model's."""

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


def build_drafter(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    """The drafter of a spec that joins none (see combined.MergedDrafter); UsageError for one that is not registered."""
    if spec.name not in FACTORIES:
        raise UsageError(f"Unknown drafter {spec.name!r}.", f"Known drafters: {', '.join(FACTORIES)}.")
    return FACTORIES[spec.name](spec, parts)


def _ngram(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    return NgramDrafter(int(spec.argument)) if spec.argument else NgramDrafter()


def _suffix(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    longest = int(spec.argument) if spec.argument else DEFAULT_LONGEST
    return LookupDrafter(spec.label, LookupSources(longest, SHARED_TOKENS), trees=spec.trees)


def _store(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    if parts.store is None:
        raise UsageError(f"Drafter {str(spec)!r} was given no open store.", "Open it and pass it as a part.")
    return LookupDrafter(spec.label, LookupSources(DEFAULT_LONGEST, SHARED_TOKENS, parts.store), trees=spec.trees)


def _recycle(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    return RecyclingDrafter(parts.vocab)


def _prediction(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    return PredictionDrafter()


def _model(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    known = min(parts.vocab, parts.model.vocab) if parts.model else parts.vocab  # ids that it can be fed
    inner = InnerDrafter(parts.inner, vocab=known) if parts.inner is not None else None
    return _draft_model(spec, parts, trees=spec.trees, inner=inner)


def _intersection(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    if parts.vocabularies is None or parts.model is None:
        return _draft_model(spec, parts)
    shared = SharedIds(*parts.vocabularies)
    sampler = IntersectionSampler(parts.model.vocab, vocab=parts.vocab, shared=shared)
    return _draft_model(spec, parts, sampler=sampler)


def _text_route(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    drafter = _draft_model(spec, replace(parts, vocab=parts.model.vocab if parts.model else 0))
    if parts.vocabularies is None:
        raise UsageError(f"Drafter {str(spec)!r} was given no tokenizers.", "Pass both as parts.")
    return TextRouteDrafter(drafter, *parts.vocabularies)


def _draft_model(spec: DrafterSpec, parts: DrafterParts, **options: Any) -> DraftModel:
    if parts.model is None:
        raise UsageError(f"Drafter {str(spec)!r} was given no loaded model.", "Load the model and pass it as a part.")
    return DraftModel(
        parts.model,
        vocab=parts.vocab,
        max_context=parts.max_context,
        kernels=parts.kernels,
        prefix_cache=parts.prefix_cache,
        name=spec.label,
        max_logits_rows=parts.max_logits_rows,
        **options,
    )


def _loaded_head(spec: DrafterSpec, parts: DrafterParts) -> Any:
    if parts.head is None:
        raise UsageError(f"Drafter {str(spec)!r} was given no loaded head.", "Load the head and pass it as a part.")
    return parts.head


def _autoregressive(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    head = _loaded_head(spec, parts)
    kind: type[HeadDrafter] = HeadTreeDrafter if spec.trees else HeadDrafter
    if spec.name == "mtp" and head.modules > 1:
        kind = ModulesDrafter
    return kind(head, kernels=parts.kernels, prefix_cache=parts.prefix_cache, depth=parts.depth, name=spec.label)


def _medusa(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    kind = ParallelTreeDrafter if spec.trees else ParallelDrafter
    return kind(_loaded_head(spec, parts), kernels=parts.kernels, name=spec.label)


def _block(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    kind = BlockTreeDrafter if spec.trees else BlockDrafter
    return kind(_loaded_head(spec, parts), kernels=parts.kernels, name=spec.label)


FACTORIES: Mapping[str, Callable[[DrafterSpec, DrafterParts], Drafter]] = {
    "ngram": _ngram,
    "suffix": _suffix,
    "store": _store,
    "recycle": _recycle,
    "prediction": _prediction,
    "model": _model,
    "layers": _model,
    "slem": _text_route,
    "tli": _intersection,
    "eagle3": _autoregressive,
    "mtp": _autoregressive,
    "medusa": _medusa,
    "dflash": _block,
}
