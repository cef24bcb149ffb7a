"""The target's states, kept on disk after the first pass over the data, since computing them is most of a pass's work.

One file of bfloat16 for taps, one for final states, one byte for each text that says whether they are there. States of
a batch are kept together or not at all, so that a resumed run computes what is missing in the same batches.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wager.errors import UsageError
from wager.train.examples import TextBatch, TrainingData, TrainingText
from wager.train.target_states import TargetStates, TorchTarget


class StateSource:
    """States of batches: computed, and with `folder` kept there for the next pass."""

    def __init__(self, target: TorchTarget, data: TrainingData, *, identity: str, folder: Path | None = None) -> None:
        self.target, self._folder = target, folder
        if folder is None:
            return
        lengths = [min(len(text.ids), data.longest) for text in data.train]
        self._places = {text: place for place, text in enumerate(data.train)}
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        hidden, rows = target.spec.hidden, int(self._starts[-1])
        written = {"identity": identity, "data": data.digest, "taps": list(target.taps), "longest": data.longest}
        digest = hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()[:16]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._taps = _mapped(folder / f"{digest}.taps", (rows, len(target.taps), hidden), np.uint16)
            self._final = _mapped(folder / f"{digest}.final", (rows, hidden), np.uint16)
            self._kept = _mapped(folder / f"{digest}.kept", (len(lengths),), np.uint8)
        except OSError as error:
            raise UsageError(f"States cannot be kept in {folder}: {error}.", "Give another --states folder.") from error

    def of(self, texts: list[TrainingText], batch: TextBatch) -> TargetStates:
        """The states of a batch made of these texts."""
        device = self.target.device
        tokens, weights = torch.from_numpy(batch.tokens).to(device), torch.from_numpy(batch.weights).to(device)
        if self._folder is None:
            return self.target.states(tokens, weights)
        places = [self._places[text] for text in texts]
        if not all(self._kept[place] for place in places):
            self._keep(places, self.target.states(tokens, weights))
        return self._read(places, tokens, weights)

    def _keep(self, places: list[int], states: TargetStates) -> None:
        for row, place in enumerate(places):
            first, last = self._starts[place], self._starts[place + 1]
            self._taps[first:last] = _bits(states.taps[row, : last - first])
            self._final[first:last] = _bits(states.final[row, : last - first])
        self._taps.flush()
        self._final.flush()
        self._kept[places] = 1

    def _read(self, places: list[int], tokens: Tensor, weights: Tensor) -> TargetStates:
        batch, longest = tokens.shape
        taps = torch.zeros(batch, longest, *self._taps.shape[1:], dtype=torch.bfloat16)
        final = torch.zeros(batch, longest, self._final.shape[1], dtype=torch.bfloat16)
        for row, place in enumerate(places):
            first, last = self._starts[place], self._starts[place + 1]
            taps[row, : last - first] = _floats(self._taps[first:last])
            final[row, : last - first] = _floats(self._final[first:last])
        device = self.target.device
        return TargetStates(tokens, taps.to(device).float(), final.to(device).float(), weights)


def _mapped(path: Path, shape: tuple[int, ...], dtype: type[np.generic]) -> np.memmap:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if not path.exists() or path.stat().st_size != size:
        with path.open("wb") as file:
            file.truncate(size)
    return np.memmap(path, dtype, "r+", shape=shape)


def _bits(values: Tensor) -> np.ndarray:
    return values.to(torch.bfloat16).cpu().contiguous().view(torch.uint16).numpy()


def _floats(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(bits)).view(torch.bfloat16)
