"""How the drafters of the registry are built; each imports its own file only when it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wager.draft.spec import DrafterParts, DrafterSpec
from wager.errors import UsageError

if TYPE_CHECKING:
    from wager.draft.base import Drafter
    from wager.draft.vocabulary import TextVocabulary
    from wager.kernels.base import Target


def ngram(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    from wager.draft.ngram import NgramDrafter

    return NgramDrafter(int(spec.argument)) if spec.argument else NgramDrafter()


def suffix(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    from wager.draft.lookup import DEFAULT_LONGEST, SHARED_TOKENS, LookupDrafter, LookupSources

    longest = int(spec.argument) if spec.argument else DEFAULT_LONGEST
    return LookupDrafter(spec.name, LookupSources(longest, SHARED_TOKENS))


def store(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    from wager.draft.lookup import LookupDrafter, LookupSources

    if parts.store is None:
        raise UsageError(f"Drafter {str(spec)!r} was given no open store.", "Open it and pass it as a part.")
    return LookupDrafter(spec.name, LookupSources(store=parts.store))


def model(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    from wager.draft.model import DraftModel
    from wager.draft.stages import InnerDrafter

    if parts.model is None:
        raise UsageError(f"Drafter {str(spec)!r} was given no loaded model.", "Load the model and pass it as a part.")
    return DraftModel(
        parts.model,
        vocab=parts.vocab,
        max_context=parts.max_context,
        kernels=parts.kernels,
        prefix_cache=parts.prefix_cache,
        name=spec.name,
        trees=spec.name == "model-tree",
        inner=InnerDrafter(parts.inner, vocab=parts.vocab) if parts.inner is not None else None,
        max_logits_rows=parts.max_logits_rows,
    )


def intersection(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    from wager.draft.intersection import SharedIds
    from wager.draft.model import DraftModel

    model, vocabularies = _other(spec, parts)
    return DraftModel(
        model,
        vocab=parts.vocab,
        max_context=parts.max_context,
        prefix_cache=parts.prefix_cache,
        name=spec.name,
        max_logits_rows=parts.max_logits_rows,
        shared=SharedIds(*vocabularies),
    )


def text_route(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    from wager.draft.model import DraftModel
    from wager.draft.text_route import TextRouteDrafter

    model, (target, other) = _other(spec, parts)
    drafter = DraftModel(
        model,
        max_context=parts.max_context,
        kernels=parts.kernels,
        prefix_cache=parts.prefix_cache,
        max_logits_rows=parts.max_logits_rows,
    )
    return TextRouteDrafter(drafter, target, other, name=spec.name)


def _other(spec: DrafterSpec, parts: DrafterParts) -> tuple[Target, tuple[TextVocabulary, TextVocabulary]]:
    """A model with another vocabulary, and the verified model's and its own."""
    if parts.model is None or parts.vocabularies is None:
        raise UsageError(f"Drafter {str(spec)!r} was given no loaded model.", "Load the model and pass it as a part.")
    return parts.model, parts.vocabularies


def adversary(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    from wager.draft.adversary import AdversaryDrafter

    return AdversaryDrafter(parts.vocab)


def random_tree(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    from wager.draft.random_tree import RandomTreeDrafter

    return RandomTreeDrafter(parts.vocab)
