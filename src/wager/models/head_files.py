"""Files of a head that drafts from a target's states: its configuration, and tensors checked by name and shape.

A head is a directory with config.json and its weights: safetensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from wager.arch.config_keys import ConfigKeys, brief
from wager.errors import ModelError
from wager.kernels.arrays import FLOAT32, Array, DType, all_finite
from wager.kernels.blocks import QuantisedMatrix
from wager.models.gguf_blocks import StoredAs
from wager.models.json_files import read_json
from wager.models.weights import Source


class HeadFiles:
    """The configuration and the tensors of a head, under the names that `renamed` gives them. ModelError names what is
    absent or damaged."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise ModelError(f"There is no head at {path}.", "Give a directory with config.json and model.safetensors.")
        self.where = str(path)
        self.config: Mapping[str, Any] = read_json(path / "config.json")
        self.keys = ConfigKeys(self.config, where=str(path / "config.json"))
        self._source = _open_source(path)
        self._names = {name: name for name in self._source.shapes}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = self._source.shapes
        return {name: shapes[stored] for name, stored in self._names.items()}

    def rename(self, patterns: Mapping[str, str]) -> None:
        """Replace the beginnings of names by others: regular expressions to what stands for them."""
        renamed = {}
        for name, stored in self._names.items():
            for pattern, new in patterns.items():
                name = re.sub(f"^{pattern}", new, name)
            renamed[name] = stored
        self._names = renamed

    def check(self, expected: Mapping[str, tuple[int, ...]], *, optional: Sequence[str] = ()) -> None:
        """ModelError unless there are exactly these tensors in these shapes, and beside them none but names that match
        a pattern of `optional`."""
        shapes = self.shapes
        for name, shape in expected.items():
            if name not in shapes:
                raise ModelError(
                    f"The head in {self.where} lacks the tensor {name} {list(shape)}.",
                    "It is incomplete, or its config.json describes another kind of head.",
                )
            self.check_shape(name, shape)
        for name in shapes:
            if name not in expected and not any(re.fullmatch(pattern, name) for pattern in optional):
                raise ModelError(
                    f"The head in {self.where} has a tensor {brief(self._names[name])} that is not used.",
                    "It has parts that its config.json does not describe, so its guesses would be wrong.",
                )

    def check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        """ModelError if a tensor that is there has another shape."""
        if self.shapes[name] != expected:
            raise ModelError(
                f"{self._names[name]} in {self.where} has shape {list(self.shapes[name])}; this target and the head's "
                f"config.json require {list(expected)}.",
                "The head was trained for another target, or its files do not belong together.",
            )

    def read(self, name: str, dtype: DType = FLOAT32) -> Array:
        """One tensor of floats; ModelError if some are not finite."""
        tensor = self._source.read(self._names[name], dtype)
        if not all_finite(tensor):
            raise ModelError(
                f"{self._names[name]} in {self.where} has weights that are no finite numbers.",
                "The file is damaged, or was saved before the target's weights were loaded.",
            )
        return tensor

    def stored(self, name: str) -> StoredAs:
        """How a tensor is stored."""
        return self._source.stored(self._names[name])

    def read_blocks(self, name: str) -> QuantisedMatrix:
        """A matrix in the format that `stored` gives, which is not None."""
        return self._source.read_blocks(self._names[name])

    def integers(self, name: str) -> Array:
        """One tensor of whole numbers or truth values, as int64."""
        return self._source.read_integers(self._names[name])


class HeadSource(Source, Protocol):
    """A source of tensors that has whole numbers too."""

    def read_integers(self, name: str) -> Array: ...


def _open_source(path: Path) -> HeadSource:
    from wager.models.safetensors_files import SafetensorsSource  # imports its library

    return SafetensorsSource(path)
