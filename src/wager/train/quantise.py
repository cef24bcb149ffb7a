"""`python -m wager.train.quantise HEAD FOLDER`: a trained head in under half its size, in 4 bits. The output matrix has
8 if the head was not trained with 4 (`wager train --rounded`): they would cost three times as many guesses as 4 bits of
all others.

The form is compressed-tensors' pack-quantized; rounding.py has the values.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wager.arch.config_keys import read_json
from wager.errors import UsageError
from wager.kernels.arrays import FLOAT32
from wager.models.safetensors_files import SafetensorsSource, TensorBytes, write_tensors
from wager.train import run_on_folders
from wager.train.rounding import GROUP, fits_groups, rounded

_OUTPUT = "lm_head"


def _packed(numbers: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Numbers [n, 32 m / bits] in words [n, m], the first one lowest."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    words = numbers.reshape(len(numbers), -1, len(shifts)).astype(np.uint32) << shifts
    found: NDArray[np.int32] = np.bitwise_or.reduce(words, -1).view(np.int32)
    return found


def quantise_head(source: Path, folder: Path) -> Path:
    """Write the head in `source` to `folder`, which is new or empty, and return it. UsageError if it is not, or if the
    head is quantised already."""
    config = read_json(source / "config.json")
    if "quantization_config" in config:
        raise UsageError(f"The head in {source} is quantised already.", "Give the one that `wager train` wrote.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is there already.", "Give a folder that is new or empty.")
    folder.mkdir(parents=True, exist_ok=True)
    files = SafetensorsSource(source)
    output_bits = 4 if config.get("wager", {}).get("rounded") else 8
    tensors: dict[str, TensorBytes] = {}
    for name, shape in files.shapes.items():
        base = name.removesuffix(".weight")
        if base == name or not fits_groups(shape):
            tensors[name] = files.read_bytes(name)
            continue
        bits = output_bits if base == _OUTPUT else 4
        codes, scales, zeros = (part.numpy() for part in rounded(torch.from_numpy(files.read(name, FLOAT32)), bits))
        parts: dict[str, tuple[str, NDArray[Any]]] = {
            "packed": ("I32", _packed(codes, bits)),
            "scale": ("F16", scales),
            "shape": ("I64", np.array(shape, np.int64)),
        }
        if bits == 4:
            parts["zero_point"] = "I32", np.ascontiguousarray(_packed(np.ascontiguousarray(zeros.T), bits).T)
        for part, (kind, values) in parts.items():
            tensors[f"{base}.weight_{part}"] = TensorBytes(kind, values.shape, values.tobytes())
    method = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"output": _group([f"re:.*{_OUTPUT}"], output_bits), "layers": _group(["Linear"], 4)},
        "ignore": [],
    }
    for file in source.iterdir():
        if file.is_file() and file.suffix in (".json", ".jinja") and file.name != "config.json":
            shutil.copy(file, folder)
    write_tensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": method}, indent=2) + "\n")
    return folder


def _group(targets: list[str], bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": bits == 8, "strategy": "group", "group_size": GROUP}
    return {"targets": targets, "weights": {**weights, "dynamic": False}, "input_activations": None}


def main(arguments: list[str]) -> int:
    """Quantise the head in one folder into another, and say where it is."""
    usage = "python -m wager.train.quantise HEAD FOLDER"
    return run_on_folders(arguments, quantise_head, count=2, asked="Name two folders.", usage=usage)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
