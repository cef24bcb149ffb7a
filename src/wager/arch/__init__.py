"""The shape of a model as plain values: ModelSpec, from a published name, config.json or GGUF metadata."""

from __future__ import annotations

from wager.arch.catalog import RELEASED_HEADS, TABLE, WITH_MTP, ReleasedHead, find_head, find_model
from wager.arch.formats import FORMATS, Format, Precision, Stream, find_format
from wager.arch.gguf_config import TensorSize, gguf_precision, read_gguf
from wager.arch.hf_config import read_config
from wager.arch.layers import (
    Attention,
    Compressed,
    DeltaNet,
    Dense,
    Experts,
    Gating,
    Gqa,
    Indexer,
    Mamba2,
    Mla,
    Quoted,
    ShortConv,
)
from wager.arch.rope import Rope
from wager.arch.spec import DecoderDetails, Layer, ModelSpec

__all__ = [
    "FORMATS",
    "RELEASED_HEADS",
    "TABLE",
    "WITH_MTP",
    "Attention",
    "Compressed",
    "DecoderDetails",
    "DeltaNet",
    "Dense",
    "Experts",
    "Format",
    "Gating",
    "Gqa",
    "Indexer",
    "Layer",
    "Mamba2",
    "Mla",
    "ModelSpec",
    "Precision",
    "Quoted",
    "ReleasedHead",
    "Rope",
    "ShortConv",
    "Stream",
    "TensorSize",
    "find_format",
    "find_head",
    "find_model",
    "gguf_precision",
    "read_config",
    "read_gguf",
]
