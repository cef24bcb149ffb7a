"""Small targets, texts and modules that the tests of training share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from eagle_heads import EPS, HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, THETA, VOCAB
from tiny_models import spec

from wager.arch import Gqa, Rope
from wager.models.opening import open_model
from wager.models.random_models import RandomWeights
from wager.train.data import DraftVocabulary, TrainingTarget, TrainingText
from wager.train.draft_module import DraftModule, DraftSizes
from wager.train.session import MODULES
from wager.train.target import TargetStates, TorchTarget

MODEL = "random:llama:tiny"


def target_of(model: str = MODEL) -> TrainingTarget:
    return TrainingTarget(model, *open_model(model))


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


def module_of(
    kind: str, *, vocabulary: Sequence[int] = range(VOCAB), noise: float = 0.2, state_norms: bool = True
) -> tuple[DraftModule, TorchTarget]:
    """A float32 module with random weights, norms included, on a torch target; of the sizes of eagle_heads."""
    weights = RandomWeights(spec((Gqa(6, 2, 16),) * 2, rope=Rope(THETA)), 1)
    target = TorchTarget(weights, (0, 1, 2), dtype=torch.float32, positions=96)
    layers = {"eagle3": 1, "dspark": 2, "medusa": 3}[kind]
    torch.manual_seed(3)
    sizes = DraftSizes(
        HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, EPS, target.taps, layers=layers, mask_token=81, markov_rank=5
    )
    module = MODULES[kind](replace(sizes, state_norms=state_norms))
    module.attach(target, DraftVocabulary(np.array(vocabulary, np.int64), VOCAB))
    for parameter in module.parameters():
        parameter.data.add_(torch.randn_like(parameter) * noise)
    return module, target
