"""Reads quantised Hugging Face checkpoints: fp8, AWQ, GPTQ and compressed-tensors, under the names that the unquantised
checkpoint has.

A module that is quantised is known by its tensors, so lists of modules to leave alone need not be read. A matrix of
whole numbers is written in a block format of the kernels if that holds every value: q4_0 and q8_0 where all zero
points are in the middle, q4_z and q4_z128 for 4 bits with others. Scales that float16 does not hold are rounded to it.
fp8 keeps its codes and its scales, in float32. What fits no format (inputs whose groups are scattered, 8 bits with
other zero points, scales of fewer inputs) is read as floats.

Layouts: AutoAWQ's WQLinear_GEMM, AutoGPTQ's QuantLinear, vllm-project/compressed-tensors, and the fp8 checkpoints of
DeepSeek-V3. Activation scales are not used: products quantise activations as they always do.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wager.arch.config_keys import one_line, short_repr
from wager.errors import MALFORMED, ModelError
from wager.kernels.arrays import Array, DType
from wager.kernels.blocks import BLOCK, BLOCK_FORMATS, E4M3, Bytes, Floats, QuantisedMatrix
from wager.models.gguf import StoredAs
from wager.models.safetensors_files import SafetensorsSource

log = logging.getLogger("wager")

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The outputs, of eight, in the nibbles of a word of AWQ, the lowest first."""

_CODES, _FLOATS, _PACKED = ".qweight", ".weight", ".weight_packed"
_BESIDE = (
    *(".qzeros", ".scales", ".g_idx"),
    *(".weight_scale", ".weight_scale_inv", ".weight_zero_point", ".weight_shape", ".weight_g_idx"),
)
_ACTIVATIONS = (".input_scale", ".input_zero_point", ".activation_scale", ".output_scale", ".input_scale_ub")
_CACHE = (".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point")


# ---- whole numbers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Integers:
    """A weight is scale * (code - zero), of its output and its input's group. `codes` reads uint8 [outputs, inputs];
    `scales` float32 and `zeros` int16 [outputs, groups]; `groups` are those of the inputs [inputs]."""

    method: str
    shape: tuple[int, int]
    bits: int
    codes: Callable[[], Bytes]
    scales: Floats
    zeros: NDArray[np.int16]
    groups: NDArray[np.int64]

    @cached_property
    def _run(self) -> int:
        """Inputs of a group, if groups are consecutive inputs in order; else 0."""
        size = self.shape[1] // self.scales.shape[1]
        return size if np.array_equal(self.groups, np.arange(self.shape[1]) // max(size, 1)) else 0

    @cached_property
    def stored(self) -> StoredAs:
        kind = f"{self.method} ({self.bits} bits, {f'groups of {self._run}' if self._run else 'groups in act-order'})"
        halves = self.scales.astype(np.float16)
        held = bool(np.isfinite(halves).all() and (np.abs(halves) >= np.float16(2**-14)).all())
        exact = np.array_equal(halves.astype(np.float32), self.scales)
        middle = bool((self.zeros == 1 << (self.bits - 1)).all())
        if not self._run or self._run % BLOCK or not (exact or held) or (self.bits == 8 and not middle):
            return StoredAs(kind, None, exact=False)
        known = "q8_0" if self.bits == 8 else "q4_0" if middle else "q4_z" if self._run % 128 else "q4_z128"
        return StoredAs(kind, known, exact=exact)

    def dequantise(self, dtype: DType) -> Array:
        out, codes = np.empty(self.shape, dtype), self.codes()
        step = max(1, (1 << 22) // self.shape[1])
        for first in range(0, len(out), step):
            part = slice(first, first + step)
            differences = codes[part].astype(np.int16) - self.zeros[part][:, self.groups]
            out[part] = differences * self.scales[part][:, self.groups]
        return out

    def blocks(self) -> QuantisedMatrix:
        known = BLOCK_FORMATS[self.stored.format or ""]
        (n, k), repeats = self.shape, self._run // known.inputs
        scales = np.repeat(self.scales.astype("<f2"), repeats, axis=1)[..., None].view(np.uint8)
        codes = self.codes().reshape(n, -1, known.inputs // BLOCK, BLOCK)
        if known.name == "q8_0":
            parts = [scales, codes.reshape(n, -1, BLOCK) ^ np.uint8(128)]
        else:
            nibbles: Bytes = codes[..., :16] | codes[..., 16:] << np.uint8(4)
            zeros = np.repeat(self.zeros.astype(np.uint8), repeats, axis=1)[..., None]
            zero = [] if known.name == "q4_0" else [zeros]
            parts = [scales, *zero, nibbles.reshape(n, -1, known.inputs // 2)]
        return QuantisedMatrix(known, np.concatenate(parts, axis=-1).reshape(n, -1), k)


def _fields(words: Array, bits: int) -> Bytes:
    """Unsigned numbers in 32-bit words [...] -> uint8 [..., 32 / bits], the lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return (words.view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)).astype(np.uint8)


def _along_rows(words: Array, bits: int) -> Bytes:
    """Words [a, b] of numbers along the first axis -> [a * 32 / bits, b]."""
    return np.ascontiguousarray(_fields(words, bits).swapaxes(1, 2)).reshape(-1, words.shape[1])


def _along_columns(words: Array, bits: int) -> Bytes:
    return _fields(words, bits).reshape(len(words), -1)


def _of_awq(words: Array) -> Bytes:
    """Words [inputs, outputs / 8] -> [inputs, outputs]."""
    found = np.empty((*words.shape, 8), np.uint8)
    found[..., _AWQ_ORDER] = _fields(words, 4)
    return found.reshape(len(words), -1)


# ---- fp8 -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Float8:
    """e4m3 [outputs, inputs], and float32 scales [outputs / rows, inputs / columns], both rounded up."""

    kind: str
    shape: tuple[int, int]
    codes: Bytes
    scales: Floats
    block: tuple[int, int]

    @property
    def stored(self) -> StoredAs:
        """In blocks where scales belong to whole rows or to multiples of 128 inputs. Else bfloat16 holds the products
        where all scales are powers of two."""
        known = "e4m3" if self.scales.shape[1] == 1 else "e4m3_128"
        inputs = BLOCK_FORMATS[known].inputs
        if not self.shape[1] % inputs and (known == "e4m3" or not self.block[1] % inputs):
            return StoredAs(self.kind, known)
        fractions, exponents = np.frexp(self.scales)
        exact = bool((np.abs(fractions) == 0.5).all() and (exponents > -100).all())
        return StoredAs(self.kind, None, exact=exact)

    def dequantise(self, dtype: DType) -> Array:
        (rows, columns), k = self.block, self.shape[1]
        out = np.empty(self.shape, dtype)
        for index, scales in enumerate(self.scales):
            part = slice(index * rows, (index + 1) * rows)
            out[part] = E4M3[self.codes[part]] * np.repeat(scales, columns)[:k]
        return out

    def blocks(self) -> QuantisedMatrix:
        known, (n, k), (rows, columns) = BLOCK_FORMATS[self.stored.format or ""], self.shape, self.block
        inputs = k if known.head else known.inputs
        scales = np.repeat(np.repeat(self.scales, rows, axis=0)[:n], -(-columns // inputs), axis=1)[:, : k // inputs]
        parts = scales.astype("<f4")[..., None].view(np.uint8), self.codes.reshape(n, -1, inputs)
        return QuantisedMatrix(known, np.concatenate(parts, axis=-1).reshape(n, -1), k)


# ---- the checkpoint --------------------------------------------------------------------------------------------------


class QuantisedSource:
    """A directory's safetensors with its `quantization_config`; matrices that are quantised have the names and shapes
    that they have in the checkpoint they were made from. ModelError names a method or layout that is not supported."""

    def __init__(self, source: SafetensorsSource, config: Mapping[str, Any]) -> None:
        self.where = source.where
        self._source = source
        self._config = config
        self._method = str(config.get("quant_method", "unnamed"))
        _refuse_layouts(config, self._method, self.where)
        self._matrices: dict[str, _Integers | _Float8] = {}
        self._names = self._quantised_names()
        unused = [name for name in source.shapes if name.endswith((*_ACTIVATIONS, *_CACHE))]
        if unused:
            log.info(
                "%d scales of activations and of the cache in %s are not used: both are quantised by what they hold.",
                len(unused),
                self.where,
            )
        hidden = {base + suffix for base in self._names for suffix in (_CODES, _PACKED, _FLOATS, *_BESIDE)}
        rest = {name: shape for name, shape in source.shapes.items() if name not in {*hidden, *unused}}
        self.shapes: Mapping[str, tuple[int, ...]] = rest | {
            base + _FLOATS: self._matrix(base).shape for base in self._names
        }

    @property
    def quantised(self) -> frozenset[str]:
        """The names of the matrices that are."""
        return frozenset(base + _FLOATS for base in self._names)

    @property
    def zero_biases(self) -> tuple[str, ...]:
        """Biases of quantised modules that are zero, which some GPTQ checkpoints have where the model has none."""
        found = (base + ".bias" for base in self._names)
        return tuple(name for name in found if name in self.shapes and not self._source.raw(name).any())

    def read(self, name: str, dtype: DType) -> Array:
        base = name.removesuffix(_FLOATS)
        return self._matrix(base).dequantise(dtype) if base in self._names else self._source.read(name, dtype)

    def stored(self, name: str) -> StoredAs:
        base = name.removesuffix(_FLOATS)
        return self._matrix(base).stored if base in self._names else self._source.stored(name)

    def read_blocks(self, name: str) -> QuantisedMatrix:
        base = name.removesuffix(_FLOATS)
        return self._matrix(base).blocks() if base in self._names else self._source.read_blocks(name)

    def _quantised_names(self) -> Mapping[str, Callable[[str], _Integers | _Float8]]:
        """How each quantised module is read, by its name."""
        found: dict[str, Callable[[str], _Integers | _Float8]] = {}
        for name in self._source.shapes:
            if name.endswith(_CODES):
                found[name.removesuffix(_CODES)] = self._awq if self._method == "awq" else self._gptq
            elif name.endswith(_PACKED):
                found[name.removesuffix(_PACKED)] = self._packed
            elif name.endswith(_FLOATS) and self._source.stored(name).kind in ("I8", "F8_E4M3"):
                byte = self._source.stored(name).kind == "I8"
                found[name.removesuffix(_FLOATS)] = self._bytes if byte else self._float8
        return found

    def _matrix(self, base: str) -> _Integers | _Float8:
        if base not in self._matrices:
            try:
                self._matrices[base] = self._names[base](base)
            except MALFORMED as error:
                raise self._wrong(base, f"tensors that do not agree ({one_line(error)})") from error
        return self._matrices[base]

    # ---- one module --------------------------------------------------------------------------------------------------

    def _awq(self, base: str) -> _Integers:
        words = self._raw(base, _CODES)
        k, n = len(words), words.shape[1] * 8
        scales = self._floats(base, ".scales").T
        zeros = _of_awq(self._raw(base, ".qzeros")).T
        return self._integers("AWQ", base, (n, k), 4, lambda: _turned(_of_awq(words)), scales, zeros)

    def _gptq(self, base: str) -> _Integers:
        words = self._raw(base, _CODES)
        order = self._source.raw(base + ".g_idx").astype(np.int64) if base + ".g_idx" in self._source.shapes else None
        bits = self._bits(base, len(words), order.size if order is not None else 0)
        k, n = len(words) * 32 // bits, words.shape[1]
        scales = self._floats(base, ".scales").T
        zeros = _along_columns(self._raw(base, ".qzeros"), bits).T
        if str(self._config.get("checkpoint_format", "gptq")) != "gptq_v2":
            zeros = (zeros + 1) & np.uint8((1 << bits) - 1)  # the first layout stores them less one
        codes = lambda: _turned(_along_rows(words, bits))  # noqa: E731
        return self._integers("GPTQ", base, (n, k), bits, codes, scales, zeros, order)

    def _packed(self, base: str) -> _Integers:
        words = self._raw(base, _PACKED)
        n, k = (int(size) for size in self._source.raw(base + ".weight_shape").ravel())
        bits = self._bits(base, words.shape[1], k)
        if words.shape != (n, -(-k * bits // 32)):
            raise self._wrong(base, f"{list(words.shape)} words for weights of shape {[n, k]}")
        scales = self._floats(base, ".weight_scale")
        scales = np.broadcast_to(scales, (n, scales.shape[1]))
        middle = 1 << (bits - 1)
        stored = base + ".weight_zero_point"
        zeros: Array = np.full(scales.shape, middle, np.int16)
        if stored in self._source.shapes:
            raw = self._raw(base, ".weight_zero_point")
            zeros = raw + np.int16(middle) if raw.dtype == np.int8 else _along_rows(raw, bits)[:n]
        given = base + ".weight_g_idx"
        order = self._source.raw(given).astype(np.int64) if given in self._source.shapes else None
        if order is not None and (order < 0).any():  # written where the order is that of the inputs
            order = None
        codes = lambda: np.ascontiguousarray(_along_columns(words, bits)[:, :k])  # noqa: E731
        return self._integers("compressed-tensors", base, (n, k), bits, codes, scales, zeros, order)

    def _bytes(self, base: str) -> _Integers:
        weight = self._raw(base, _FLOATS)
        n, k = weight.shape
        scales = self._floats(base, ".weight_scale")
        scales = np.broadcast_to(scales, (n, scales.shape[1]))
        zeros = np.full(scales.shape, 128, np.int16)
        if base + ".weight_zero_point" in self._source.shapes:
            zeros = zeros + self._source.raw(base + ".weight_zero_point").astype(np.int16).reshape(-1, scales.shape[1])
        codes = lambda: np.ascontiguousarray(weight).view(np.uint8) ^ np.uint8(128)  # noqa: E731
        return self._integers("int8", base, (n, k), 8, codes, scales, zeros)

    def _float8(self, base: str) -> _Float8:
        codes = self._source.raw(base + _FLOATS).view(np.uint8)
        n, k = codes.shape
        inverse = base + ".weight_scale_inv"
        scales = self._floats(base, ".weight_scale_inv" if inverse in self._source.shapes else ".weight_scale")
        block = (n if len(scales) == 1 else 1, k)
        if scales.shape not in ((1, 1), (n, 1)):
            block = self._block_size(base)
        if scales.shape != (math.ceil(n / block[0]), math.ceil(k / block[1])):
            raise self._wrong(base, f"{list(scales.shape)} scales of {list(codes.shape)} weights")
        rows = "output" if scales.shape == (n, 1) else f"{block[0]} outputs"
        size = "tensor" if scales.size == 1 else rows if scales.shape[1] == 1 else f"{block[0]} x {block[1]}"
        return _Float8(f"fp8 (a scale for each {size})", (n, k), codes, scales, block)

    def _block_size(self, base: str) -> tuple[int, int]:
        groups = self._config.get("config_groups")
        found = [self._config.get("weight_block_size")]
        for group in groups.values() if isinstance(groups, Mapping) else ():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            found.append(weights.get("block_structure") if isinstance(weights, Mapping) else None)
        for size in found:
            if (
                isinstance(size, Sequence)
                and len(size) == 2
                and all(isinstance(each, int) and each > 0 for each in size)
            ):
                return size[0], size[1]
        raise self._wrong(base, "scales of blocks whose size quantization_config does not state")

    def _integers(
        self,
        method: str,
        base: str,
        shape: tuple[int, int],
        bits: int,
        codes: Callable[[], Bytes],
        scales: Floats,
        zeros: Array,
        order: NDArray[np.int64] | None = None,
    ) -> _Integers:
        """`order`: the group of each input, where they do not follow each other. ModelError if sizes disagree."""
        (n, k), count = shape, scales.shape[1]
        if scales.shape[0] != n or zeros.shape != scales.shape or not count or (k % count and order is None):
            raise self._wrong(base, f"{list(scales.shape)} scales and {list(zeros.shape)} zero points of {k} inputs")
        if order is None:
            order = np.repeat(np.arange(count, dtype=np.int64), k // count)
        elif order.shape != (k,) or order.min() < 0 or order.max() >= count:
            raise self._wrong(base, "a g_idx that names groups which it does not have")
        return _Integers(method, shape, bits, codes, np.ascontiguousarray(scales), zeros.astype(np.int16), order)

    def _bits(self, base: str, words: int, inputs: int) -> int:
        """Bits of a number, from `words` of 32 bits for so many inputs; as the configuration states them if these are
        not known (0)."""
        bits = -(-words * 32 // inputs) if inputs else self._config.get("bits")
        if bits not in (4, 8):
            raise self._wrong(base, f"weights of {short_repr(bits)} bits; 4 and 8 are supported")
        return int(bits)

    def _raw(self, base: str, suffix: str) -> Array:
        """Words, or bytes, with two dimensions."""
        found = self._tensor(base, suffix)
        if found.ndim != 2 or not found.size or found.dtype not in (np.int32, np.int8):
            raise self._wrong(base, f"{suffix[1:]} of type {found.dtype} and shape {list(found.shape)}")
        return np.ascontiguousarray(found)

    def _floats(self, base: str, suffix: str) -> Floats:
        """Scales as float32 [outputs or 1, groups]."""
        found = self._tensor(base, suffix).astype(np.float32)
        if found.ndim < 2:
            found = found.reshape(-1, 1)
        if found.ndim != 2 or not np.isfinite(found).all():
            raise self._wrong(base, f"{suffix[1:]} of shape {list(found.shape)}, or not all of them finite")
        return found

    def _tensor(self, base: str, suffix: str) -> Array:
        if base + suffix not in self._source.shapes:
            raise self._wrong(base, f"no {suffix[1:]}")
        return self._source.raw(base + suffix)

    def _wrong(self, base: str, what: str) -> ModelError:
        return ModelError(
            f"{base} in {self.where} ({self._method}) has {what}.",
            "The file is damaged, or in a layout that this wager does not read; use another quantisation of the model.",
        )


def _turned(codes: Bytes) -> Bytes:
    return np.ascontiguousarray(codes.T)


_REFUSED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "awq": {"version": ("gemm",)},
    "gptq": {"checkpoint_format": ("gptq", "gptq_v2")},
    "compressed-tensors": {
        "format": ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
    },
    "modelopt": {"quant_algo": ("fp8",)},
}
"""By method, the keys that name a layout and their values that are read."""


def _refuse_layouts(config: Mapping[str, Any], method: str, where: str) -> None:
    for key, read in _REFUSED.get(method, {}).items():
        value = config.get(key)
        if value is not None and str(value).lower() not in read:
            raise ModelError(
                f"quantization_config of {where} has {key} {short_repr(value)}, which is not supported for {method}.",
                f"Supported: {', '.join(read)}.",
            )
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and str(sparsity.get("format", "dense")) != "dense":
        raise ModelError(f"{where} stores sparse weights ({short_repr(sparsity.get('format'))}), which are not read.")
    if config.get("transform_config"):
        raise ModelError(f"{where} needs activations to be rotated (transform_config), which is not supported.")
