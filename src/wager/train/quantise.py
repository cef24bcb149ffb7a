"""`python -m wager.train.quantise HEAD FOLDER`: a trained head in under half its size, its output matrix in 8 bits and
the others in 4. (4 bits of the output matrix alone cost three times as many guesses as 4 bits of all others.)

The form is compressed-tensors' pack-quantized with groups of 32 inputs, each with a float16 scale and a whole zero
point. The range of a group is that of its weights, narrowed as far as this lowers the sum of squared errors.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wager.arch.config_keys import read_json
from wager.errors import UsageError
from wager.kernels.arrays import FLOAT32
from wager.models.safetensors_files import SafetensorsSource, TensorBytes, write_tensors
from wager.train import run_on_folders

_GROUP = 32
_OUTPUT = "lm_head"
_NARROWED = np.linspace(1, 0.7, 13, dtype=np.float32)
"""Shares of a group's range that are tried."""


def rounded(matrix: NDArray[np.float32], bits: int) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.uint8]]:
    """Codes [n, k], and scales and zero points [n, k / 32]: a weight is about scale * (code - zero). In 8 bits all zero
    points are in the middle."""
    (n, k), levels = matrix.shape, (1 << bits) - 1
    groups = matrix.reshape(n, -1, _GROUP)
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    if bits == 8:
        high = np.maximum(high, -low)
        low = -high * np.float32(128 / 127)
    least = np.full(low.shape, np.inf, np.float32)
    codes = np.zeros(groups.shape, np.uint8)
    scales, zeros = np.ones(low.shape, np.float16), np.zeros(low.shape, np.uint8)
    for share in _NARROWED:
        scale = np.maximum((high - low) * share / levels, 2.0**-14).astype(np.float16)
        step = scale.astype(np.float32)[..., None]
        zero = np.clip(np.rint(-low * share / step[..., 0]), 0, levels) if bits == 4 else np.full(low.shape, 128)
        code = np.clip(np.rint(groups / step) + zero[..., None], 0, levels)
        error = np.square((code - zero[..., None]) * step - groups).sum(-1)
        better = error < least
        least = np.where(better, error, least)
        codes[better], scales[better], zeros[better] = code[better], scale[better], zero[better]
    return codes.reshape(n, k), scales, zeros


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
    tensors: dict[str, TensorBytes] = {}
    for name, shape in files.shapes.items():
        base = name.removesuffix(".weight")
        if base == name or len(shape) != 2 or shape[0] % 8 or shape[1] % _GROUP:
            tensors[name] = files.read_bytes(name)
            continue
        bits = 8 if base == _OUTPUT else 4
        codes, scales, zeros = rounded(files.read(name, FLOAT32), bits)
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
        "config_groups": {"output": _group([f"re:.*{_OUTPUT}"], 8), "layers": _group(["Linear"], 4)},
        "ignore": [],
    }
    for file in source.iterdir():
        if file.is_file() and file.suffix in (".json", ".jinja") and file.name != "config.json":
            shutil.copy(file, folder)
    write_tensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": method}, indent=2) + "\n")
    return folder


def _group(targets: list[str], bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": bits == 8, "strategy": "group", "group_size": _GROUP}
    return {"targets": targets, "weights": {**weights, "dynamic": False}, "input_activations": None}


def main(arguments: list[str]) -> int:
    """Quantise the head in one folder into another, and say where it is."""
    usage = "python -m wager.train.quantise HEAD FOLDER"
    return run_on_folders(arguments, quantise_head, count=2, asked="Name two folders.", usage=usage)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
