"""Weights drawn from a seed, scaled so that a model's answers are varied and depend on all of its layers.

The scales depend on shapes alone, so they hold for every size; docs/random_models.md states the reasons and figures.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from wager.arch.spec import ModelSpec
from wager.kernels.arrays import FLOAT32, Array, DType
from wager.kernels.blocks import BLOCK_FORMATS, QuantisedMatrix
from wager.models.gguf_blocks import StoredAs
from wager.models.tensors import tensor_shapes
from wager.models.weights import Weights

LOGIT_STD_PER_BIT = 0.28
"""Standard deviation of the logits, for each bit of log2(vocabulary)."""

SCORE_STD = 5.0
"""Standard deviation of the attention scores. At 1, attention averages its whole context, and greedy texts run into
cycles; at 5 a few positions have most of the weight."""


@dataclass(frozen=True, slots=True)
class _UniformCodes:
    """Mean and standard deviation of a format's codes when all are equally likely; `unused` is a byte that is drawn but
    means zero, so that the others are symmetric."""

    mean: float
    deviation: float
    unused: int | None = None


_CODES: Mapping[str, _UniformCodes] = {
    "q8_0": _UniformCodes(0.0, math.sqrt(2 * 127 * 128 * 255 / 6 / 256), unused=128),
    "q4_1": _UniformCodes(7.5, math.sqrt((16**2 - 1) / 12)),
}


class RandomWeights:
    """Weights drawn from a seed, each tensor when it is read: for tests and benchmarks."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self.spec = spec
        self._shapes, self._seed = tensor_shapes(spec), seed

    def read(self, name: str, dtype: DType = FLOAT32) -> Array:
        generator = self._generator(name)
        noise: Array = generator.standard_normal(self._shapes[name], np.float32)
        if noise.ndim == 1 and name.endswith("bias"):
            noise *= 0.1
        elif name == "norm.weight":
            noise = np.sign(noise)  # a tied head would else repeat the input: its embedding is in the residual stream
        elif noise.ndim == 1:
            noise = 0.1 * noise + 1.0
        noise *= self.scale(name)
        return noise.astype(dtype, copy=False)

    def stored(self, name: str) -> StoredAs:
        return StoredAs("random")

    def quantised(self, name: str, format_name: str) -> QuantisedMatrix:
        """Drawn in that format, all codes equally likely: other values than those of `read`, of the same size."""
        n, k = self._shapes[name]
        known, codes = BLOCK_FORMATS[format_name], _CODES[format_name]
        size = n * k // known.inputs * known.bytes
        words = self._generator(name).integers(0, 1 << 64, -(-size // 8), np.uint64)
        data = words.view(np.uint8)[:size]
        if codes.unused is not None:
            np.multiply(data, data != codes.unused, out=data)
        blocks = data.reshape(n, -1, known.bytes)
        step = np.float16(self.scale(name) / codes.deviation)
        for at, value in zip(known.fields, (step, np.float16(-codes.mean * step)), strict=False):
            blocks[..., at : at + 2] = np.frombuffer(value.tobytes(), np.uint8)
        return QuantisedMatrix(known, data.reshape(n, -1), k)

    def _generator(self, name: str) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(zlib.crc32(f"{self._seed} {name}".encode())))

    def scale(self, name: str) -> float:
        """Standard deviation of a matrix, size of a norm's weights; 1 for a bias.

        Products of normalised activations are of order one; so is what a feed-forward adds to the residual stream.
        """
        spec, shape, part = self.spec, self._shapes[name], name.split(".")[-2]
        if part == "norm":
            return LOGIT_STD_PER_BIT * math.log2(spec.vocab) / (math.sqrt(spec.hidden) if spec.tied else 1.0)
        scale = 1.0 if part == "embed" or len(shape) == 1 else shape[1] ** -0.5
        if part == self._query and name.endswith("weight"):
            scale *= SCORE_STD
        elif part == "expert_down" and spec.experts:
            scale *= math.sqrt(spec.experts.active) / spec.experts.gating.scale  # outputs are averaged, then scaled
        return scale

    @property
    def _query(self) -> str:
        """The last tensor that scales queries before they meet keys."""
        if self.spec.details.qk_norm:
            return "q_norm"
        return "q_b" if "layers.0.q_b.weight" in self._shapes else "q"


def random_weights(spec: ModelSpec, seed: int) -> Weights:
    """Random weights of the given shape, the same for the same seed; activations stay of order one."""
    return RandomWeights(spec, seed)
