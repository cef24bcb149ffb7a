"""What a draft module would be worth on held-out texts: chains of its first choices against those of the target.

Rounds are walked as the engine walks them: each begins where the last one ended. On answers that the target gave
greedily this is what the engine measures, up to the rounding of its kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from wager.train.draft_module import DraftModule
from wager.train.examples import TextWeights, TrainingData, TrainingText
from wager.train.target_states import TorchTarget
from wager.train.trainer import autocast


@dataclass(frozen=True)
class HeldOutAcceptance:
    """`survival[j]` is the share of rounds whose first j + 1 guesses are accepted; `tau` counts the bonus token."""

    survival: tuple[float, ...]
    rounds: int
    texts: int

    @property
    def tau(self) -> float:
        return 1 + sum(self.survival)

    def as_dict(self) -> dict[str, float | int | list[float]]:
        return {"survival": list(self.survival), "tau": self.tau, "rounds": self.rounds, "texts": self.texts}


@torch.no_grad()
def held_out_acceptance(
    module: DraftModule,
    target: TorchTarget,
    texts: Sequence[TrainingText],
    data: TrainingData,
    vocabulary: NDArray[np.int64],
    *,
    depth: int,
    precision: str,
    most: int = 64,
) -> HeldOutAcceptance:
    """Rounds of `depth` guesses over the answers of the first `most` texts (over all of a text without an answer)."""
    accepted: list[int] = []
    plain = TextWeights(np.ones(target.spec.vocab, bool), 1.0, 0)
    ids = torch.from_numpy(vocabulary).to(target.device)
    chosen = [text for text in texts if len(text.ids) > depth + 2][:most]
    for text in chosen:
        batch = data.padded([text], plain)
        states = target.states(
            torch.from_numpy(batch.tokens).to(target.device), torch.from_numpy(batch.weights).to(target.device)
        )
        best = target.logits(states.final)[0].argmax(-1)
        right = np.zeros((depth, batch.tokens.shape[1]), bool)
        with autocast(precision, target.device):
            for step, rows in enumerate(module.steps(states, depth, None)):
                guesses = module.choices(rows.take(0), ids)
                found = (guesses == best[rows.positions[0]]) & rows.valid[0]
                right[step, : len(found)] = found.cpu().numpy()
        first = text.prompt_length if text.answered else 1
        accepted.extend(_walk(np.cumprod(right, 0).sum(0), first - 1, depth))
    counts = np.asarray(accepted)
    survival = tuple(float((counts > step).mean()) if len(counts) else 0.0 for step in range(depth))
    return HeldOutAcceptance(survival, len(accepted), len(chosen))


def _walk(lengths: NDArray[np.int64], first: int, depth: int) -> list[int]:
    """Guesses accepted in each round: `lengths[t]` if it begins at row t; the next begins after its bonus token. Rounds
    whose last guess would lie beyond the text are left out, since it cannot be judged."""
    found, row = [], first
    while row < len(lengths) - depth:
        found.append(int(lengths[row]))
        row += found[-1] + 1
    return found
