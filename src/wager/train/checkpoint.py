"""Checkpoints of a run: one file, written under another name and renamed, from which a killed run goes on.

A run resumed from it ends in the same weights as one that was never interrupted: everything random is drawn from the
seed and the step. What decides the numbers (settings, sizes, data, target) must be equal, or it is refused by name.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wager.errors import ModelError, UsageError
from wager.train.draft_module import DraftModule, DraftSizes
from wager.train.trainer import Trainer, TrainSettings

_FORMAT = 1
NAME = "checkpoint.pt"


@dataclass(frozen=True)
class Provenance:
    """Where the weights come from: the target's name and fingerprint, its tokenizer's, the data's digest and size, the
    command, and `figures` of the run: tokens, seconds, held-out acceptance."""

    target: str
    target_fingerprint: str
    tokenizer_fingerprint: str
    data_digest: str
    texts: int
    command: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingCheckpoint:
    """A run at a step. `module` and `optimiser` are state dictionaries."""

    settings: TrainSettings
    sizes: DraftSizes
    vocabulary: NDArray[np.int64]
    provenance: Provenance
    step: int
    module: Mapping[str, Any]
    optimiser: Mapping[str, Any]
    history: tuple[dict[str, Any], ...] = ()

    @classmethod
    def of(
        cls, trainer: Trainer, vocabulary: NDArray[np.int64], provenance: Provenance, history: list[dict[str, Any]]
    ) -> TrainingCheckpoint:
        module = trainer.module
        return cls(
            trainer.settings,
            module.sizes,
            vocabulary,
            provenance,
            trainer.step,
            module.state_dict(),
            trainer.optimiser.state_dict(),
            tuple(history),
        )

    def save(self, folder: Path) -> None:
        """Write it to `folder`; at every moment there is the old one or the new one, whole."""
        values = {
            "format": _FORMAT,
            "settings": asdict(self.settings),
            "sizes": {name: _listed(value) for name, value in asdict(self.sizes).items()},
            "vocabulary": torch.from_numpy(self.vocabulary),
            "provenance": asdict(self.provenance),
            "step": self.step,
            "module": dict(self.module),
            "optimiser": dict(self.optimiser),
            "history": list(self.history),
        }
        part = folder / f"{NAME}.part"
        with part.open("wb") as file:
            torch.save(values, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(folder / NAME)

    @classmethod
    def load(cls, folder: Path) -> TrainingCheckpoint:
        """The checkpoint of `folder`. ModelError if it is damaged."""
        path = folder / NAME
        try:
            values = torch.load(path, map_location="cpu", weights_only=True)
            if values["format"] != _FORMAT:
                raise ModelError(f"{path} is a checkpoint of format {values['format']}.", "Train again.")
            sizes = values["sizes"]
            lists = {name: tuple(value) for name, value in sizes.items() if isinstance(value, list)}
            sizes = DraftSizes(**{**sizes, **lists})
            return cls(
                TrainSettings(**values["settings"]),
                sizes,
                values["vocabulary"].numpy(),
                Provenance(**values["provenance"]),
                values["step"],
                values["module"],
                values["optimiser"],
                tuple(values["history"]),
            )
        except ModelError:
            raise
        except Exception as error:  # torch raises many kinds for a damaged file
            raise ModelError(f"{path} cannot be read: {error}.", "The file is damaged; train again.") from error

    @property
    def digest(self) -> str:
        """SHA-256 of the module's weights, in hex."""
        found = hashlib.sha256()
        for name, value in sorted(self.module.items()):
            found.update(name.encode() + value.float().numpy().tobytes())
        return found.hexdigest()

    def check_can_begin(self, kind: str, sizes: DraftSizes, fingerprint: str, where: Path) -> None:
        """UsageError unless a run of this kind, of these sizes and for this target can begin with these weights."""
        old = {**asdict(self.sizes), "kind": self.settings.kind, "target": self.provenance.target_fingerprint}
        new = {**asdict(sizes), "kind": kind, "target": fingerprint}
        for name, value in new.items():
            if old[name] != value and name not in ("mask_token", "depth_share", "anchor_share"):
                raise UsageError(
                    f"The weights in {where} are of {name} = {old[name]!r}, and this run has {value!r}.",
                    "Begin with a run of the same kind, sizes and target.",
                )

    def check_same(self, settings: TrainSettings, sizes: DraftSizes, provenance: Provenance) -> None:
        """UsageError that names what differs from the run that this checkpoint is of."""
        old = {**asdict(self.settings), **asdict(self.sizes), **_identity(self.provenance)}
        new = {**asdict(settings), **asdict(sizes), **_identity(provenance)}
        for name, value in new.items():
            if old[name] != value:
                raise UsageError(
                    f"The checkpoint was made with {name} = {old[name]!r}, and this run has {value!r}.",
                    "Resume with the options and data it was begun with, or write to another folder.",
                )

    def restore(self, trainer: Trainer) -> None:
        """Set the trainer to this step."""
        self.restore_module(trainer.module)
        trainer.optimiser.load_state_dict(dict(self.optimiser))
        trainer.step = self.step

    def restore_module(self, module: DraftModule) -> None:
        try:
            module.load_state_dict(dict(self.module))
        except RuntimeError as error:
            raise ModelError(f"The checkpoint does not fit this drafter: {error}.", "Train again.") from error


def _identity(provenance: Provenance) -> dict[str, str]:
    return {"target": provenance.target_fingerprint, "data": provenance.data_digest}


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
