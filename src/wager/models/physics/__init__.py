"""The physics of models as plain values: what a published configuration says about FLOPs and bytes. No torch."""

from wager.models.physics.attention import Attention, Compressed, DeltaNet, Gqa, Indexer, Mla, Quoted
from wager.models.physics.configs import from_config
from wager.models.physics.formats import FORMATS, Format, Precision, Stream, find_format
from wager.models.physics.shape import Dense, Experts, Layer, Model, from_spec
from wager.models.physics.table import TABLE, find_model

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
