"""Small targets, texts and modules that the tests of training share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from wager.models.opening import open_model
from wager.train.data import DraftVocabulary, TrainingTarget, TrainingText
from wager.train.draft_module import DraftSizes
from wager.train.eagle import EagleModule
from wager.train.target import TargetStates, TorchTarget

torch.set_num_threads(1)
MODEL = "random:llama:tiny"


def target_of(model: str = MODEL) -> TrainingTarget:
    return TrainingTarget.of(model, *open_model(model))


def texts(count: int, *, seed: int = 0, vocab: int = 512, longest: int = 40) -> list[TrainingText]:
    """Random texts with answers, all with the same first three tokens."""
    noise = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        ids = (7, 8, 9, *noise.integers(0, vocab, noise.integers(9, longest)).tolist())
        found.append(TrainingText(ids, 3 + len(ids) // 4))
    return found


def states_of(target: TorchTarget, ids: Sequence[Sequence[int]]) -> TargetStates:
    tokens = torch.tensor(ids)
    return target.states(tokens, torch.ones(tokens.shape))


def eagle(
    model: str = MODEL, *, vocabulary: Sequence[int] | None = None, **flags: bool
) -> tuple[EagleModule, TorchTarget]:
    """A float32 module with random weights, norms included, on a torch target."""
    target = torch_target(model)
    spec = target.spec
    torch.manual_seed(3)
    sizes = DraftSizes(spec.hidden, 96, 4, 2, 16, 1e-5, target.taps, **flags)
    module = EagleModule(sizes)
    ids = np.arange(spec.vocab) if vocabulary is None else np.asarray(vocabulary)
    module.attach(target, DraftVocabulary(ids.astype(np.int64), spec.vocab))
    for parameter in module.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return module, target


def torch_target(model: str = MODEL, taps: Sequence[int] = (0, 1, 2)) -> TorchTarget:
    return TorchTarget(open_model(model)[1], taps, dtype=torch.float32, positions=96)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
