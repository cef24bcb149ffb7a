"""A model's configuration whose values are checked as they are read; null counts as absent.

Used for config.json of Hugging Face and for the metadata of GGUF files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from wager.errors import ModelError

_MOST = 1 << 40
"""No size of a model is larger; a configuration with larger values is damaged."""


class ConfigKeys:
    """The values of a configuration. Error messages name it `where` and put `prefix` before the names of its keys."""

    def __init__(self, values: Mapping[str, Any], *, where: str = "config.json", prefix: str = "") -> None:
        self.values, self.where, self.prefix = values, where, prefix

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def integer(self, *names: str, default: int | None = None) -> int:
        """A whole number above 0, from the first of `names` that is present.

        ModelError if none is present and there is no default, or if the value is something else.
        """
        name = next((key for key in names if self.get(key) is not None), names[0])
        value = self.number(name, default=default)
        if value != int(value):
            raise ModelError(f"{self._named(name, value)} is not a whole number.")
        if value >= _MOST:
            raise ModelError(f"{self._named(name, value)} is larger than any model.", "The configuration is damaged.")
        return int(value)

    def count(self, name: str, *, default: int = 0) -> int:
        """A whole number that may be 0; `default` where it is absent."""
        value = self.get(name)
        if value is None:
            return default
        return 0 if value == 0 and not isinstance(value, bool) else self.integer(name)

    def number(self, name: str, *, default: float | None = None) -> float:
        """A number above 0. ModelError if it is absent without a default, or something else."""
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise ModelError(
                f"{self.where} lacks {self.prefix + name!r}.", "The model's configuration is damaged or incomplete."
            )
        if isinstance(value, list):
            raise ModelError(
                f"{self.prefix}{name} differs from layer to layer, which is not supported.",
                "Supported are models whose layers have one shape.",
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelError(f"{self._named(name, value)} must be a number above 0.")
        return value

    def flag(self, name: bool | str) -> bool:
        """A constant, or whether the key of that name is set."""
        return name if isinstance(name, bool) else bool(self.get(name))

    def per_layer(self, name: str, layers: int) -> Sequence[str] | None:
        """One word for each layer, or None if the key is absent. Entries beyond the layers (of draft modules) are
        left out."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < layers:
            cause = f"has {len(value)} entries" if isinstance(value, list) else "is no list"
            raise ModelError(f"{self.prefix}{name} in {self.where} {cause}; it must list each of the {layers} layers.")
        return [str(entry) for entry in value[:layers]]

    def refuse(self, name: str, *, unless: tuple[Any, ...]) -> None:
        """ModelError if the key is present with a value that is not one of `unless`."""
        value = self.get(name)
        if value is not None and value not in unless:
            allowed = ", ".join(map(str, unless))
            raise ModelError(
                f"{self.prefix}{name} = {value!r} is not supported for this architecture.", f"Supported is: {allowed}."
            )

    def _named(self, name: str, value: Any) -> str:
        return f"{self.prefix}{name} = {value!r} in {self.where}"
