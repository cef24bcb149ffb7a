"""The tensors of one layer: packed where they are multiplied, from the store or from the model's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from wager.kernels.arrays import Array, DType
from wager.kernels.blocks import Matrix, stack
from wager.models.matrices import Matrices, in_one_form
from wager.models.packed_cache import PackedStore
from wager.models.weights import Weights


class LayerWeights:
    """The tensors of layer `index` by their short names; `known` are the shapes of all the model's tensors."""

    def __init__(
        self,
        weights: Weights,
        matrices: Matrices,
        store: PackedStore,
        known: Mapping[str, Sequence[int]],
        *,
        index: int,
    ) -> None:
        self._weights, self._matrices, self._store, self._known, self._index = weights, matrices, store, known, index
        self._packed: dict[str, Any] = {}

    def _name(self, part: str, suffix: str) -> str:
        return f"layers.{self._index}.{part}.{suffix}"

    def packed(self, name: str, make: Callable[[], Any]) -> Any:
        """What the store has under that name for the layer, or `make` packs, once."""
        if name not in self._packed:
            self._packed[name] = self._store.get(f"layers.{self._index}.{name}", make)
        return self._packed[name]

    def matrix(self, part: str) -> Matrix:
        return self._matrices.read(self._name(part, "weight"))

    def floats(self, part: str, dtype: DType) -> Array:
        return self._weights.read(self._name(part, "weight"), dtype)

    def vector(self, part: str, suffix: str = "weight") -> Array:
        return self._weights.read(self._name(part, suffix))

    def refit(self, heads: Array) -> list[Matrix]:
        """Matrices of heads that were cut from one, each in the form that they are multiplied in."""
        return [self._matrices.refit(head) for head in heads]

    def expert(self, expert: int) -> tuple[Matrix, Matrix, Matrix]:
        """Gate, up and down of one expert."""
        gate, up = in_one_form([self.matrix(f"{expert}.expert_{part}") for part in ("gate", "up")])
        return gate, up, self.matrix(f"{expert}.expert_down")

    def bias(self, part: str) -> Array | None:
        return self.vector(part, "bias") if self._name(part, "bias") in self._known else None

    def groups(self, *parts: str) -> list[list[str]]:
        """Matrices of the same inputs as few products: neighbours of one form are one."""
        groups: list[list[str]] = []
        for part in parts:
            same = groups and self._form(part) == self._form(groups[-1][-1])
            groups = [*groups[:-1], [*groups[-1], part]] if same else [*groups, [part]]
        return groups

    def stacked(self, group: Sequence[str]) -> tuple[Matrix, Array | None]:
        """The matrices of a group as one, and their biases."""
        return stack([self.matrix(part) for part in group]), self._biases(group)

    def outputs(self, group: Sequence[str]) -> int:
        return sum(self._known[self._name(part, "weight")][0] for part in group)

    def _form(self, part: str) -> str | None:
        return self._matrices.formats[self._name(part, "weight")]

    def _biases(self, parts: Sequence[str]) -> Array | None:
        biases = [bias for part in parts if (bias := self.bias(part)) is not None]
        return np.concatenate(biases) if biases else None
