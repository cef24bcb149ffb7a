"""Fuses a position's tapped states into one of the head's size: norms if the head has them, then its fc matrix."""

from __future__ import annotations

import numpy as np

from wager.kernels.arrays import FLOAT32, INT32, Array, DType, empty
from wager.kernels.base import BLOCK_SIZE, Tape
from wager.models.head_eagle_spec import EagleSpec
from wager.models.head_weights import HeadWeights


class StateFusion:
    """Writes to `out` f32 [max_rows, hidden], whose rows are as many as a pass has."""

    def __init__(self, spec: EagleSpec, weights: HeadWeights, out: Array) -> None:
        kernels, rows = weights.form.kernels, len(out)
        tape = self._tape = row_tape(weights, rows)
        normed = spec.fc_norm or spec.norm_before_fc
        self.dtype: DType = FLOAT32 if normed else kernels.act
        eps, width, total = spec.decoder.details.norm_eps, spec.target_hidden, spec.state_width
        step = width if spec.fc_norm else total
        self._parts = [empty(rows, step, dtype=self.dtype) for _ in range(total // step)]
        for index, part in enumerate(self._parts):
            ready = part
            if normed:
                ready = empty(rows, step, dtype=kernels.act)
                name = f"fc_norm.{index}.weight" if spec.fc_norm else "input_norm.weight"
                tape.rms_norm(part, weights.vector(name), eps, ready)
            matrix = weights.pack(["fc.weight"], slice(index * step, (index + 1) * step))
            tape.linear(ready, matrix, out, add=index > 0)

    def run(self, states: Array) -> None:
        """states [n, state_width]: the taps of each position side by side."""
        step, first = self._parts[0].shape[1], 0
        for part in self._parts:
            part[: len(states)] = states[:, first : first + step]
            first += step
        run_rows(self._tape, len(states))


def row_tape(weights: HeadWeights, rows: int) -> Tape:
    """A tape for ops that know no positions: its rows are those of one sequence, for which `run_rows` runs it."""
    blocks = -(-rows // BLOCK_SIZE)
    tape = weights.form.kernels.tape(
        max_rows=rows, max_sequences=1, max_blocks=blocks, heads=1, kv_heads=1, head_dim=16
    )
    places = np.arange(rows, dtype=INT32)
    inputs = tape.inputs
    inputs.positions[:], inputs.slot_mapping[:], inputs.parents[:] = places, places, places - 1
    inputs.block_tables[0] = np.arange(blocks)
    return tape


def run_rows(tape: Tape, rows: int, *, logits_rows: int = 0) -> None:
    tape.inputs.query_start_loc[1] = rows
    tape.run(rows=rows, sequences=1, logits_rows=logits_rows)
