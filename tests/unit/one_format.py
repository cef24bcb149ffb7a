"""Small random models whose matrices are all of one of the kernels' formats."""

from __future__ import annotations

import zlib

from quantised_cases import matrix
from wager.arch.hf_config import read_config
from wager.kernels.blocks import BLOCK_FORMATS, QuantisedMatrix
from wager.models.gguf import StoredAs
from wager.models.random_models import RandomWeights, byte_tokenizer
from wager.models.tokenizer import Tokenizer

FORMATS = ("bf16", *BLOCK_FORMATS)

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 512,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}

_LARGE = {"q6_k"}
"""Formats of whose random blocks both codes and scales are large."""


class OneFormat(RandomWeights):
    """Random weights, with every matrix in that format; bf16 are RandomWeights as they are."""

    def __init__(self, name: str) -> None:
        super().__init__(read_config(dict(_CONFIG), name=name, runnable=True), 0)
        self._format = name

    def stored(self, name: str) -> StoredAs:
        return super().stored(name) if self._format == "bf16" else StoredAs(self._format, self._format)

    def quantised(self, name: str, format_name: str) -> QuantisedMatrix:
        size = 2e-4 if format_name in _LARGE else 2e-3
        return matrix(format_name, *self._shapes[name], zlib.crc32(name.encode()), size=size)


def made_of(name: str) -> tuple[OneFormat, Tokenizer]:
    """What random_models.make returns, with matrices of that format."""
    weights = OneFormat(name)
    return weights, byte_tokenizer(weights.spec.vocab, where=name)
