"""The experts of a gpt-oss checkpoint from Hugging Face, which joins those of a layer in one tensor, the outputs of
gate and up in turns: read as gate, up and down projection of each expert, floats or in MXFP4 as it is stored."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from wager.arch.spec import ModelSpec
from wager.errors import ModelError
from wager.kernels.arrays import Array, DType
from wager.kernels.blocks import BLOCK, BLOCK_FORMATS, Bytes, QuantisedMatrix
from wager.models.gguf import StoredAs
from wager.models.safetensors_files import SafetensorsSource

_NAME = re.compile(r"(.*\.mlp\.experts)\.(gate|up|down)_proj\.(weight|bias)\[(\d+)\]")
_JOINED = re.compile(r".*\.mlp\.experts\.(gate_up|down)_proj(_blocks|_scales|_bias)?")
_MXFP4 = BLOCK_FORMATS["mxfp4"]


class JoinedExperts:
    """A source of the tensors of `source` whose experts have names of their own: `...experts.gate_proj.weight[E]`."""

    def __init__(self, source: SafetensorsSource, spec: ModelSpec) -> None:
        if spec.experts is None:
            raise ModelError(f"{spec.name} has no experts.", "The configuration names the wrong architecture.")
        self.where = source.where
        self._source = source
        self._experts, self._hidden = spec.experts, spec.hidden
        self._stored = source.shapes

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Those of joined tensors as they must be, if they are; others as stored."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in self._stored.items():
            match = _JOINED.fullmatch(name)
            if match is None or not self._fits(match[1], match[2] or "", shape):
                shapes[name] = shape
            elif match[2] != "_scales":
                self._add(shapes, name, match)
        return shapes

    def _add(self, shapes: dict[str, tuple[int, ...]], name: str, match: re.Match[str]) -> None:
        experts, hidden = self._experts, self._hidden
        base, suffix = name.partition(".experts.")[0], "bias" if match[2] == "_bias" else "weight"
        for part in ("gate", "up") if match[1] == "gate_up" else ("down",):
            rows, inputs = (hidden, experts.width) if part == "down" else (experts.width, hidden)
            shape = (experts.count, rows) if suffix == "bias" else (experts.count, rows, inputs)
            shapes[f"{base}.experts.{part}_proj.{suffix}"] = shape

    def _fits(self, part: str, kind: str, shape: tuple[int, ...]) -> bool:
        experts, hidden = self._experts, self._hidden
        rows, inputs = (hidden, experts.width) if part == "down" else (2 * experts.width, hidden)
        expected = {
            "": (inputs, rows),
            "_bias": (rows,),
            "_scales": (rows, inputs // BLOCK),
            "_blocks": (rows, inputs // BLOCK, BLOCK // 2),
        }
        return shape == (experts.count, *expected[kind]) and (kind in ("", "_bias") or inputs % BLOCK == 0)

    def read(self, name: str, dtype: DType) -> Array:
        match = _NAME.fullmatch(name)
        if match is None:
            return self._source.read(name, dtype)
        if self.stored(name).format:
            return self.read_blocks(name).dequantise(dtype)
        joined, taken = _place(match)
        values = self._source.read(joined, dtype)
        return np.ascontiguousarray(values[taken] if match[3] == "bias" else values.T[taken])

    def stored(self, name: str) -> StoredAs:
        match = _NAME.fullmatch(name)
        if match is None:
            return self._source.stored(name)
        joined, _ = _place(match)
        if joined.partition("[")[0] not in self._stored:
            return StoredAs("MXFP4", "mxfp4")
        return self._source.stored(joined)

    def read_blocks(self, name: str) -> QuantisedMatrix:
        match = _NAME.fullmatch(name)
        if match is None:
            return self._source.read_blocks(name)
        joined, taken = _place(match)
        tensor, bracket, index = joined.partition("[")
        blocks, scales = (self._source.raw(f"{tensor}_{kind}{bracket}{index}")[taken] for kind in ("blocks", "scales"))
        data = np.concatenate([scales[..., None], _regrouped(blocks)], axis=-1)
        return QuantisedMatrix(_MXFP4, data.reshape(len(data), -1), blocks.shape[1] * BLOCK)


def _place(match: re.Match[str]) -> tuple[str, slice]:
    """The joined tensor of an expert's projection, and its outputs among those of the tensor."""
    base, part, kind, index = match.groups()
    suffix = "_bias" if kind == "bias" else ""
    if part == "down":
        return f"{base}.down_proj{suffix}[{index}]", slice(None)
    return f"{base}.gate_up_proj{suffix}[{index}]", slice(0 if part == "gate" else 1, None, 2)


def _regrouped(blocks: Bytes) -> Bytes:
    """Bytes [.., 16] of inputs 2 i and 2 i + 1 as bytes of inputs i and i + 16, as GGUF has them."""
    values = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], BLOCK)
    regrouped: Bytes = values[..., : BLOCK // 2] | values[..., BLOCK // 2 :] << 4
    return regrouped
