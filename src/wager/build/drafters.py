"""The drafters of a configuration: their models are opened and checked first, and loaded once everything fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from wager.build.opened import OpenedModel, open_draft
from wager.config import EngineConfig
from wager.draft.base import Drafter
from wager.draft.registry import KINDS, DrafterParts, DrafterSpec, build_drafter
from wager.kernels.base import Kernels


@dataclass(frozen=True, slots=True)
class OpenedDrafter:
    """A drafter that was asked for and checked, but not built. `label` names its guesses; `model` is its model, opened
    but not loaded, if it runs one."""

    label: str
    spec: DrafterSpec
    model: OpenedModel | None = None


def open_drafters(config: EngineConfig, target: OpenedModel) -> list[OpenedDrafter]:
    """The drafters of a configuration. The label is the name, with the argument where a name is there twice."""
    specs = config.speculation.drafters
    counts = Counter(spec.name for spec in specs)
    return [
        OpenedDrafter(
            spec.name if counts[spec.name] == 1 else str(spec),
            spec,
            open_draft(config, target, spec.argument or "") if KINDS[spec.name].runs_a_model else None,
        )
        for spec in specs
    ]


@dataclass(frozen=True, slots=True)
class DrafterBytes:
    """Memory of all drafters together: `fixed` bytes, and `per_token` bytes for every position of the cache."""

    fixed: int
    per_token: int


def footprint(drafters: Sequence[OpenedDrafter], kernels: Kernels) -> DrafterBytes:
    """The memory that drafters take; only those that run a model take any worth counting."""
    models = [each.model for each in drafters if each.model is not None]
    return DrafterBytes(
        sum(model.weight_bytes(kernels) + model.workspace_bytes(kernels) for model in models),
        sum(model.token_bytes(kernels) for model in models),
    )


def build(opened: OpenedDrafter, config: EngineConfig, *, kernels: Kernels, num_blocks: int, vocab: int) -> Drafter:
    """Build one; a model's weights are loaded here, its cache has `num_blocks` blocks."""
    model = opened.model
    parts = DrafterParts(
        vocab,
        max_context=model.limits.context if model else None,
        model=model.load(kernels, num_blocks) if model else None,
        kernels=kernels,
        prefix_cache=config.capacity.prefix_cache,
    )
    drafter = build_drafter(opened.spec, parts)
    drafter.name = opened.label
    return drafter
