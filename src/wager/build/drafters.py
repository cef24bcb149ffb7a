"""From drafters' names to drafters: what is asked for, what it takes, and how it is offered to a policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from wager.build.opened import OpenedModel, open_draft
from wager.config import EngineConfig
from wager.draft import roster
from wager.draft.base import Drafter
from wager.draft.model import DraftModel
from wager.draft.ngram import NgramDrafter
from wager.errors import UsageError
from wager.kernels.base import Kernels


@dataclass(frozen=True)
class Named:
    """A drafter that was asked for and checked, but not built. `label` names its guesses; `opened` is its model."""

    label: str
    kind: str
    argument: str | None
    opened: OpenedModel | None = None


def name_all(config: EngineConfig, target: OpenedModel) -> list[Named]:
    """The drafters of a configuration. A kind that is there once is its own label."""
    wanted = roster(config.drafter)
    kinds = Counter(kind for kind, _ in wanted)
    return [
        Named(
            kind if kinds[kind] == 1 or argument is None else f"{kind}:{argument}",
            kind,
            argument,
            open_draft(config, target, argument or "") if kind == "model" else None,
        )
        for kind, argument in wanted
    ]


def footprint(named: Sequence[Named], kernels: Kernels) -> tuple[int, int]:
    """Bytes that drafters take at rest, and bytes for every position of the cache."""
    models = [each.opened for each in named if each.opened is not None]
    resting = sum(opened.weight_bytes(kernels) + opened.workspace_bytes(kernels) for opened in models)
    return resting, sum(opened.token_bytes(kernels) for opened in models)


def make(named: Named, config: EngineConfig, *, kernels: Kernels, num_blocks: int, vocab: int) -> Drafter:
    """Build one; a model's weights are loaded here."""
    drafter = _make(named, config, kernels, num_blocks, vocab)
    drafter.name = named.label
    if drafter.makes_trees and config.verify == "block":
        raise UsageError(
            f"The block rule verifies chains, and drafter {drafter.name!r} makes trees.",
            "Use --verify rejection or match.",
        )
    return drafter


def _make(named: Named, config: EngineConfig, kernels: Kernels, pages: int, vocab: int) -> Drafter:
    if named.opened is not None:
        return DraftModel(
            named.opened.load(kernels, pages),
            vocab=vocab,
            max_context=named.opened.limits.context,
            kernels=kernels,
            prefix_cache=config.prefix_cache,
        )
    if named.kind == "ngram":
        return NgramDrafter(int(named.argument)) if named.argument else NgramDrafter()
    from wager.testing import AdversaryDrafter, RandomTreeDrafter

    return AdversaryDrafter(vocab) if named.kind == "adversary" else RandomTreeDrafter(vocab)
