"""The physics of models as plain values: what a published configuration says about FLOPs and bytes. No torch."""

from wager.arch.attention import Attention, Compressed, DeltaNet, Gqa, Indexer, Mla, Quoted
from wager.arch.catalog import TABLE, find_model
from wager.arch.formats import FORMATS, Format, Precision, Stream, find_format
from wager.arch.hf_configs import from_config
from wager.arch.shape import Dense, Experts, Layer, Model, from_spec

__all__ = [
    "FORMATS",
    "TABLE",
    "Attention",
    "Compressed",
    "DeltaNet",
    "Dense",
    "Experts",
    "Format",
    "Gqa",
    "Indexer",
    "Layer",
    "Mla",
    "Model",
    "Precision",
    "Quoted",
    "Stream",
    "find_format",
    "find_model",
    "from_config",
    "from_spec",
]
