"""What a model is, in digests: of each weight as it is multiplied, of its configuration, tokenizer and chat template.

All are SHA-256 in hex. Packed weights have the digests of their file in the cache; vectors, routers and convolutions,
which are kept as floats, are hashed here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from wager.arch.spec import ModelSpec
from wager.models.tokenizer import Tokenizer
from wager.models.tokenizer_files import CHAT_TEMPLATE
from wager.models.transformer import Decoder
from wager.models.weights import Weights, float_tensors


@dataclass(frozen=True, slots=True)
class ModelDigests:
    """The digests of a model. `weights` are by name: packed matrices of the same inputs are one (`layers.0.q+k+v`),
    other tensors have their canonical names. `chat_template` is "" where there is none."""

    weights: Mapping[str, str]
    config: str
    tokenizer: str
    chat_template: str

    @classmethod
    def of(cls, decoder: Decoder, weights: Weights, tokenizer: Tokenizer) -> ModelDigests:
        """Those of a loaded model. Quick where its packed weights are in the cache, else a second a gigabyte or two."""
        floats = {
            name: _hashed(np.ascontiguousarray(weights.read(name), "<f4").tobytes())
            for name in float_tensors(weights.spec)
        }
        template = tokenizer.chat_template
        return cls(
            {**decoder.store.digests(), **floats},
            _config(weights.spec),
            _tokenizer(tokenizer),
            "" if template is None else _hashed(template.encode("utf-8", "surrogatepass")),
        )

    @property
    def summary(self) -> dict[str, str]:
        """One digest of all weights, and the others, by their names."""
        weights = _hashed(json.dumps(dict(self.weights), sort_keys=True).encode())
        return {
            "weights": weights,
            "config": self.config,
            "tokenizer": self.tokenizer,
            "chat_template": self.chat_template,
        }


def _config(spec: ModelSpec) -> str:
    """Of everything in the configuration that the decoder computes with."""
    values = spec.details, spec.layers, spec.hidden, spec.vocab, spec.tied
    return _hashed(repr(values).encode())


def _tokenizer(tokenizer: Tokenizer) -> str:
    """Of the files of a Hugging Face directory with it, but for the chat template, and of the ids that end a text."""
    files = {name: text for name, text in tokenizer.files().items() if name != CHAT_TEMPLATE}
    values = sorted(files.items()), sorted(tokenizer.eos_ids)
    return _hashed(repr(values).encode("utf-8", "surrogatepass"))


def _hashed(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
