"""From a configuration to a running engine, with the wait shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wager.cli import console
from wager.config import EngineConfig
from wager.draft import roster

if TYPE_CHECKING:
    from wager.build.load import LoadedEngine
    from wager.draft.base import Drafter


def open_engine(
    config: EngineConfig, *, like: LoadedEngine | None = None, drafter: Drafter | None = None
) -> LoadedEngine:
    """Load an engine, fetching its models first if they are not here.

    `like` lends its target, so that weights load once; `drafter` is used in place of the configuration's.
    """
    import torch

    import wager
    from wager.models import hub, random_models

    drafting = [argument for name, argument in roster(config.drafter) if name == "model" and argument]
    models = [config.model, *drafting]
    with console.meter("bytes") as update:
        for model in models if like is None else models[1:]:
            if not random_models.is_random(model):
                hub.resolve(model, update)
    torch.set_num_threads(1)  # its idle workers would spin on the cores that the native kernels use
    with console.working(f"Loading {config.model}") as report:
        return wager.load(config, report=report, target=like.target if like else None, drafter=drafter)
