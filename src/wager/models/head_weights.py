"""The matrices of a head in the form that the kernels multiply: bfloat16 as they are stored, or rounded to q8_0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wager.kernels.arrays import Array
from wager.kernels.base import Kernels
from wager.kernels.blocks import BLOCK, Matrix
from wager.kernels.quantise import quantise
from wager.models.head_files import HeadFiles

_ROUNDED = "q8_0"
_ID_MAPS = ("d2t", "t2d", "token_map")


@dataclass(frozen=True)
class HeadForm:
    """In which form a head's matrices are multiplied on these kernels."""

    kernels: Kernels
    quantised: bool

    def format_of(self, inputs: int) -> str | None:
        """The format of matrices of so many inputs; None: floats."""
        return _ROUNDED if self.quantised and inputs % BLOCK == 0 else None

    def matrix(self, values: Array) -> Matrix:
        known = self.format_of(values.shape[1])
        return np.ascontiguousarray(values) if known is None else quantise(values, known)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a packed matrix, or of a vector in float32."""
        if len(shape) < 2:
            return 4 * shape[0]
        return self.kernels.matrix_bytes(shape[0], shape[1], self.format_of(shape[1]))

    def weight_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Bytes of all tensors of a head's files, by name, without its maps of token ids."""
        return sum(self.nbytes(shape) for name, shape in shapes.items() if name not in _ID_MAPS)


class HeadWeights:
    """The tensors of a head, packed as they are asked for."""

    def __init__(self, files: HeadFiles, form: HeadForm) -> None:
        self.files, self.form = files, form

    def vector(self, name: str) -> Array:
        return self.files.read(name)

    def pack(self, names: Sequence[str], columns: slice = slice(None), *, biased: bool = True) -> Any:
        """Matrices of the same inputs, one below the other, of which only `columns` are taken, with their biases."""
        matrix = np.concatenate([self.matrix(name)[:, columns] for name in names])
        biases = [self.vector(bias) for bias in _biases(names) if biased and bias in self.files.shapes]
        return self.form.kernels.pack(self.form.matrix(matrix), np.concatenate(biases) if biases else None)

    def pack_gated(self, gate: str, up: str) -> Any:
        first, second = (self.form.matrix(self.matrix(name)) for name in (gate, up))
        biases = [self.vector(bias) for bias in _biases([gate, up]) if bias in self.files.shapes]
        return self.form.kernels.pack_gated(first, second, bias=(biases[0], biases[1]) if biases else None)

    def pack_values(self, matrix: Array) -> Any:
        """A matrix that the head does not have itself."""
        return self.form.kernels.pack(self.form.matrix(matrix))

    def matrix(self, name: str) -> Array:
        return self.files.read(name, self.form.kernels.act)


def _biases(names: Sequence[str]) -> Iterator[str]:
    return (name.removesuffix("weight") + "bias" for name in names)
