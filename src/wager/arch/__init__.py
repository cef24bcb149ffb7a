"""The shape of a model as plain values: ModelSpec, from a published name, config.json or GGUF metadata.

The catalog of published models is imported when one of its names is first used: `wager run` needs none of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from wager.arch.formats import FORMATS, Format, Precision, Stream, find_format
from wager.arch.gguf_config import TensorSize, gguf_precision, read_gguf
from wager.arch.hf_config import read_config
from wager.arch.layers import Attention, Compressed, DeltaNet, Dense, Experts, Gating, Gqa, Indexer, Mla, Quoted
from wager.arch.rope import Rope
from wager.arch.spec import DecoderDetails, Layer, LayerStack, ModelSpec

if TYPE_CHECKING:
    from wager.arch.catalog import TABLE, find_model

__all__ = [
    "FORMATS",
    "TABLE",
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
    "LayerStack",
    "Mla",
    "ModelSpec",
    "Precision",
    "Quoted",
    "Rope",
    "Stream",
    "TensorSize",
    "find_format",
    "find_model",
    "gguf_precision",
    "read_config",
    "read_gguf",
]


def __getattr__(name: str) -> Any:
    if name not in ("TABLE", "find_model"):
        raise AttributeError(f"module 'wager.arch' has no attribute {name!r}")
    return getattr(importlib.import_module("wager.arch.catalog"), name)
