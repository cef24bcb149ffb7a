"""Reads JSON files of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wager.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model. ModelError if it is absent, damaged or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is absent.", "A model directory needs it; fetch the model again.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}.", "The file is damaged; fetch it again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object.", "The file is damaged; fetch it again.")
    return value
