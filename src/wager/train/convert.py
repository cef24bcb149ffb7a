"""`python -m wager.train.convert FOLDER`: pickled weights of a head or model (pytorch_model.bin, medusa_lm_head.pt) as
model.safetensors beside them.

A pickle may run any code when it is read. torch reads these with weights_only, which accepts tensors and plain values
alone; the engine reads no pickle at all.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wager.errors import ModelError, UsageError
from wager.models.safetensors_files import pickled_weights
from wager.train import require_torch, run_on_folders


def convert(folder: Path) -> Path:
    """Write `folder`/model.safetensors and return its path. UsageError if there is nothing to convert, or it is there
    already; ModelError names a file that is damaged or holds more than named tensors."""
    require_torch()
    from wager.train.export import save_tensors

    found = folder / "model.safetensors"
    if found.exists():
        raise UsageError(f"{found} is there already.", "Remove it to convert again.")
    files = pickled_weights(folder)
    if not files:
        raise UsageError(
            f"{folder} has no pickled weights.", "Give a folder with pytorch_model.bin or medusa_lm_head.pt."
        )
    tensors: dict[str, Any] = {}
    for file in files:
        tensors |= _read(file)
    save_tensors(found, tensors)
    return found


def _read(file: Path) -> Mapping[str, Any]:
    import torch

    try:
        values = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file, and for one that would run code
        cause = str(error).partition("\n")[0][:200]
        raise ModelError(
            f"{file} cannot be read as plain tensors: {cause}.", "It is damaged, or holds objects that would run code."
        ) from error
    if not isinstance(values, Mapping) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in values.items()
    ):
        raise ModelError(f"{file} holds more than named tensors.", "Save the module's state_dict alone.")
    return {name: value.contiguous().clone() for name, value in values.items()}  # safetensors shares no memory


def main(arguments: list[str]) -> int:
    """Convert the one folder that is named, and say where the result is."""
    usage = "python -m wager.train.convert FOLDER"
    return run_on_folders(arguments, convert, count=1, asked="Name one folder.", usage=usage)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
