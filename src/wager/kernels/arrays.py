"""Arrays of the kernels: numpy's, with ml_dtypes' bfloat16, allocated at cache lines and passed on by their address."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
DType = np.dtype[Any]

BFLOAT16: DType = np.dtype(ml_dtypes.bfloat16)
FLOAT32: DType = np.dtype(np.float32)
INT32: DType = np.dtype(np.int32)

_LINE = 64
"""Bytes of a cache line, and of the widest vector that a kernel loads."""


@dataclass(frozen=True, slots=True)
class WeightParts:
    """A packed weight taken apart: `fields` are plain values, as JSON has them, `arrays` its bytes, uint8 [n] each."""

    fields: Mapping[str, Any]
    arrays: tuple[Array, ...]


def empty(*shape: int, dtype: DType = FLOAT32) -> Array:
    """An array whose contents are undefined, its first element at the beginning of a cache line."""
    return _aligned(np.empty(math.prod(shape) * dtype.itemsize + _LINE, np.uint8), shape, dtype)


def zeros(*shape: int, dtype: DType = FLOAT32) -> Array:
    """As `empty`, with zeros; the system maps the memory of large arrays when it is first written."""
    return _aligned(np.zeros(math.prod(shape) * dtype.itemsize + _LINE, np.uint8), shape, dtype)


def unallocated(*shape: int, dtype: DType = FLOAT32) -> Array:
    """An array of that shape without memory, whose bytes are counted before one is made."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def address(array: Array) -> int:
    """The address of the first element; whoever passes it on checks contiguity and keeps the array alive."""
    return int(array.__array_interface__["data"][0])


def all_finite(array: Array) -> bool:
    """Whether no element is infinite or NaN; of bfloat16 by its bits, many times faster than by its values."""
    if array.dtype == BFLOAT16:
        bits = array.view(np.uint16)
        return bool((np.bitwise_and(bits, 0x7FFF).max(initial=0)) < 0x7F80)
    least, most = array.min(initial=0), array.max(initial=0)  # both are NaN if an element is
    return math.isfinite(least) and math.isfinite(most)


def _aligned(raw: NDArray[np.uint8], shape: tuple[int, ...], dtype: DType) -> Array:
    start = -address(raw) % _LINE
    return raw[start : start + len(raw) - _LINE].view(dtype).reshape(shape)
