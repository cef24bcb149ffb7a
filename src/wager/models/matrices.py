"""A model's matrices in the form that kernels multiply them: floats, the blocks of their file, or quantised when they
are read, as --dtype wants it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat

from wager.arch.layers import Mla
from wager.kernels.arrays import BFLOAT16, Array, DType
from wager.kernels.blocks import BLOCK, BLOCK_FORMATS, Matrix, QuantisedMatrix
from wager.kernels.quantise import quantise
from wager.models.tensors import tensor_shapes
from wager.models.weights import Weights

WANTED: Mapping[str, str | None] = {"auto": None, "bf16": None, "q8": "q8_0", "q4": "q4_1"}
"""dtype -> the format of matrices that are not stored in as few bits already. q4 is q4_1 rather than q4_0: a tenth more
bytes and a sixth to two fifths less KL; see docs/quantisation.md."""

_WIDER = {"embed": "q8_0", "head": "q8_0"}
"""Parts that q4 keeps wider, as llama.cpp's files do."""

_FLOATS = frozenset({"router"})
"""Matrices that are read as float32."""


class Matrices:
    """The matrices of `weights`, by the names of tensors.tensor_shapes, in the form that `dtype` (a key of WANTED) asks
    for. Floats are of the kernels' activation type `act`."""

    def __init__(self, weights: Weights, dtype: str, act: DType = BFLOAT16, *, only_layers: bool = False) -> None:
        self._weights, self.spec, self.act = weights, weights.spec, act
        self._dtype = dtype
        self._shapes = {name: shape for name, shape in tensor_shapes(weights.spec).items() if len(shape) == 2}
        if only_layers:
            self._shapes = {name: shape for name, shape in self._shapes.items() if name.startswith("layers.")}
        self.formats = {name: self._format_of(name) for name in self._shapes}
        """Each matrix's block format; None: floats."""

    def read(self, name: str) -> Matrix:
        """A matrix [outputs, inputs]; ModelError as Weights.read."""
        known = self.formats[name]
        return self._weights.read(name, self.act) if known is None else self._weights.quantised(name, known)

    def refit(self, matrix: Array) -> Matrix:
        """A matrix that was made from others, quantised where `dtype` says so."""
        wanted = self._fitting(matrix.shape[1])
        return matrix if wanted is None else quantise(matrix, wanted)

    def packed(self) -> Iterator[tuple[tuple[int, int], str | None]]:
        """Shape and format of every matrix that is packed, the two halves of `kv_b` of each head."""
        attention = self.spec.attention
        for name, known in self.formats.items():
            part = name.split(".")[-2]
            if part == "kv_b" and isinstance(attention, Mla):
                for shape in (attention.kv_rank, attention.nope), (attention.value, attention.kv_rank):
                    yield from repeat((shape, self._fitting(shape[1])), attention.heads)
            elif part not in _FLOATS:
                rows, inputs = self._shapes[name]
                yield (rows, inputs), known

    @property
    def description(self) -> str:
        """The formats and how many matrices have each, the most frequent first, such as `q4_1 x210 + q8_0 x1`; the name
        of the activation type alone where no matrix is quantised."""
        counts = Counter(name for name in self.formats.values() if name is not None)
        floats = sum(known is None for name, known in self.formats.items() if name.split(".")[-2] not in _FLOATS)
        if not counts:
            return str(self.act)
        if floats:
            counts[str(self.act)] = floats
        return " + ".join(f"{name} x{count}" for name, count in counts.most_common())

    @property
    def converted(self) -> dict[str, str]:
        """Types of the file that the kernels do not multiply -> what their tensors are read as instead, in words."""
        found = {}
        for name, known in self.formats.items():
            stored = self._weights.stored(name)
            if known is not None and stored.format == known and stored.kind.lower() != known:
                found[stored.kind] = known if stored.exact else f"{known} (rounded)"
        return found

    def _fitting(self, inputs: int) -> str | None:
        return None if inputs % BLOCK else WANTED[self._dtype]

    def _format_of(self, name: str) -> str | None:
        part, own = name.split(".")[-2], self._weights.stored(name).format
        wanted = WANTED[self._dtype]
        if part in _FLOATS or self._dtype == "bf16":
            return None
        if wanted == "q4_1":
            wanted = _WIDER.get(part, wanted)
        if wanted is None or (own is not None and _bits(own) <= _bits(wanted)):
            return own
        return wanted if self._shapes[name][1] % BLOCK == 0 else own


def _bits(name: str) -> float:
    return BLOCK_FORMATS[name].packed_bits


def in_one_form(parts: Sequence[Matrix]) -> list[Matrix]:
    """The matrices as they are if all are floats or of one format; otherwise all in bfloat16, because products that are
    taken together need one format."""
    kinds = {part.format.name if isinstance(part, QuantisedMatrix) else None for part in parts}
    if len(kinds) == 1:
        return list(parts)
    return [part.dequantise(BFLOAT16) if isinstance(part, QuantisedMatrix) else part for part in parts]
