"""A Hugging Face configuration whose values are checked as they are read; null counts as absent.

Knows what a number may be, not what it means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from wager.errors import ModelError


class Keys:
    """The values of a config.json."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number above 0. ModelError if it is absent without a default, or something else."""
        value = self.number(name, default)
        if value != int(value):
            raise ModelError(f"{name} = {value!r} in config.json is not a whole number.")
        return int(value)

    def count(self, name: str) -> int:
        """A whole number that may be 0, and is where it is absent."""
        return self.integer(name) if self.values.get(name) else 0

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0. ModelError if it is absent without a default, or something else."""
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"config.json lacks {name!r}.", "The model's configuration is damaged or incomplete.")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelError(f"{name} = {value!r} in config.json must be a number above 0.")
        return value

    def flag(self, name: bool | str) -> bool:
        """A constant, or whether the key of that name says yes."""
        return name if isinstance(name, bool) else bool(self.values.get(name))

    def refuse(self, name: str, *, unless: tuple[Any, ...]) -> None:
        """ModelError if the key is there with a value that is not one of `unless`."""
        value = self.get(name)
        if value is not None and value not in unless:
            allowed = ", ".join(map(str, unless))
            raise ModelError(f"{name} = {value!r} is not supported for this architecture.", f"Supported is: {allowed}.")
