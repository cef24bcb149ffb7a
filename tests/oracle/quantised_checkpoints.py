"""Quantised checkpoints as their authors define them: what is stored for a matrix, and the values that it stands for.

Each maker draws a matrix [n, k] and returns its tensors by the ends of their names, and its values in float32. Numbers
are put in their places one by one, by index, so that a mistake of the reader's shuffles cannot be here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

Stored = Mapping[str, np.ndarray]
Made = tuple[Stored, np.ndarray]


def _put(words: np.ndarray, at: Any, bits: int, place: int, value: int) -> None:
    words[at] |= np.uint32(int(value) << (bits * place))


def _draw(rng: np.random.Generator, n: int, k: int, bits: int, groups: int, *, symmetric: bool) -> tuple[Any, Any, Any]:
    """Codes [n, k], zero points [n, groups], scales float16 [n, groups]."""
    codes = rng.integers(0, 1 << bits, (n, k))
    zeros = np.full((n, groups), 1 << (bits - 1)) if symmetric else rng.integers(1, 1 << bits, (n, groups))
    scales = (rng.uniform(0.5, 1.5, (n, groups)) * 0.6 / ((1 << bits) * k**0.5)).astype(np.float16)
    return codes, zeros, scales


def _values(codes: Any, zeros: Any, scales: Any, group_of: Any) -> np.ndarray:
    whole = (codes - zeros[:, group_of]).astype(np.float32)
    return whole * scales[:, group_of].astype(np.float32)


def awq(rng: np.random.Generator, n: int, k: int, group: int = 128) -> Made:
    """AutoAWQ, WQLinear_GEMM: inputs by words of eight outputs; nibble i is output (0, 2, 4, 6, 1, 3, 5, 7)[i]."""
    codes, zeros, scales = _draw(rng, n, k, 4, k // group, symmetric=False)
    words, zero_words = np.zeros((k, n // 8), np.uint32), np.zeros((k // group, n // 8), np.uint32)
    for output in range(n):
        place = (0, 4, 1, 5, 2, 6, 3, 7)[output % 8]
        for i in range(k):
            _put(words, (i, output // 8), 4, place, codes[output, i])
        for g in range(k // group):
            _put(zero_words, (g, output // 8), 4, place, zeros[output, g])
    tensors = {"qweight": words.view(np.int32), "qzeros": zero_words.view(np.int32), "scales": scales.T.copy()}
    return tensors, _values(codes, zeros, scales, np.arange(k) // group)


def gptq(
    rng: np.random.Generator,
    n: int,
    k: int,
    group: int = 128,
    *,
    bits: int = 4,
    version: int = 1,
    symmetric: bool = True,
    act_order: bool = False,
) -> Made:
    """AutoGPTQ, QuantLinear: words of 32 / bits inputs by outputs, g_idx; version 1 stores zero points less one."""
    per = 32 // bits
    codes, zeros, scales = _draw(rng, n, k, bits, k // group, symmetric=symmetric)
    group_of = rng.permutation(np.arange(k) // group) if act_order else np.arange(k) // group
    words, zero_words = np.zeros((k // per, n), np.uint32), np.zeros((k // group, n // per), np.uint32)
    for output in range(n):
        for i in range(k):
            _put(words, (i // per, output), bits, i % per, codes[output, i])
        for g in range(k // group):
            _put(zero_words, (g, output // per), bits, output % per, zeros[output, g] - (version == 1))
    tensors = {
        "qweight": words.view(np.int32),
        "qzeros": zero_words.view(np.int32),
        "scales": scales.T.copy(),
        "g_idx": group_of.astype(np.int32),
        "bias": np.zeros(n, np.float16),
    }
    return tensors, _values(codes, zeros, scales, group_of)


def packed(rng: np.random.Generator, n: int, k: int, group: int = 128, *, symmetric: bool = True) -> Made:
    """compressed-tensors, pack-quantized W4A16: outputs by words of eight inputs, bfloat16 scales."""
    codes, zeros, scales = _draw(rng, n, k, 4, k // group, symmetric=symmetric)
    scales = scales.astype(ml_dtypes.bfloat16)
    words, zero_words = np.zeros((n, k // 8), np.uint32), np.zeros((n // 8, k // group), np.uint32)
    for output in range(n):
        for i in range(k):
            _put(words, (output, i // 8), 4, i % 8, codes[output, i])
        for g in range(k // group):
            _put(zero_words, (output // 8, g), 4, output % 8, zeros[output, g])
    tensors = {"weight_packed": words.view(np.int32), "weight_scale": scales, "weight_shape": np.array([n, k])}
    if not symmetric:
        tensors["weight_zero_point"] = zero_words.view(np.int32)
    return tensors, _values(codes, zeros, scales, np.arange(k) // group)


def int8(rng: np.random.Generator, n: int, k: int, *, scale: Any = ml_dtypes.bfloat16) -> Made:
    """compressed-tensors, int-quantized W8A8: a scale for each output."""
    codes = rng.integers(-127, 128, (n, k)).astype(np.int8)
    scales = (rng.uniform(0.5, 1.5, (n, 1)) / (70 * k**0.5)).astype(scale)
    values = codes.astype(np.float32) * scales.astype(np.float32)
    return {"weight": codes, "weight_scale": scales, "input_scale": np.ones(1, np.float32)}, values


def fp8(rng: np.random.Generator, n: int, k: int, kind: str, *, inputs: int = 128, powers: bool = False) -> Made:
    """e4m3 with a scale for the tensor, each output, or (DeepSeek-V3: weight_scale_inv) blocks of 128 x 128."""
    codes = (rng.standard_normal((n, k)) * 40).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    shape = {"tensor": (), "channel": (n, 1), "block": (-(-n // 128), -(-k // inputs))}[kind]
    scales = np.asarray(rng.uniform(0.5, 1.5, shape) / (40 * k**0.5), np.float32)
    if powers:
        scales = np.asarray(np.exp2(np.round(np.log2(scales))), np.float32)
    spread = scales if kind != "block" else np.kron(scales, np.ones((128, inputs), np.float32))[:n, :k]
    name = "weight_scale_inv" if kind == "block" else "weight_scale"
    return {"weight": codes, name: scales, "input_scale": np.ones((), np.float32)}, codes.astype(np.float32) * spread


Maker = Callable[[np.random.Generator, int, int], Made]
