"""Heads in GGUF files, as llama.cpp's converter writes them: EAGLE-3, DFlash and DSpark, and Gemma 4's assistants under
architectures of their own; modules of multi-token prediction as the last layers of a file of their target's
architecture, with the target's layers before them or without.

The metadata of a head becomes the configuration that it has in a directory, and its tensors get the names that they
have there, so that a head is checked and run in one way, whatever it is stored in. Two things are turned back when a
tensor is read: the rows of EAGLE-3's queries and keys, whose rotated dimensions lie side by side, and d2t, which holds
the target's ids in place of their distance from the head's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from wager.arch.config_keys import ConfigKeys
from wager.arch.gguf_config import GGUF_NAMES, HEADS, gguf_names, read_further_layers, read_gguf
from wager.arch.spec import ModelSpec
from wager.errors import ModelError
from wager.kernels.arrays import FLOAT32, Array, DType
from wager.kernels.blocks import QuantisedMatrix
from wager.models.gguf import open_gguf
from wager.models.head_files import HeadFiles
from wager.models.weights import LONG_ROPE_FACTORS, NAMES, ROPE_FACTORS, half_split, with_rope_factors

_LAYERS_OF = {"eagle3": "llama", "dflash": "qwen3", "gemma4-assistant": "gemma4"}
"""Architectures of heads -> the one that their layers are of."""

_PARTS = ("attn_norm", "mlp_norm", "q", "k", "v", "o", "q_norm", "k_norm", "gate", "up", "down")
_NOT_OF_LAYERS = (".nextn_predict_layers", ".attention.shared_kv_layers")
_BLOCK_SIZE = 16
"""Slots of a block where the file does not say, as llama.cpp has it."""

_CONFIDENCE = "confidence_head.proj.weight"


class GgufHeadFiles(HeadFiles):
    """A head in a GGUF file, or modules in the file of a model. ModelError as HeadFiles'."""

    def __init__(self, path: Path) -> None:
        self._file = self._source = file = open_gguf(path)
        self.where = file.where
        keys = ConfigKeys(file.metadata, where=file.where)
        self.architecture = keys.text("general.architecture") or "none"
        factors = (ROPE_FACTORS, *LONG_ROPE_FACTORS)
        self.names = {name: name for name in file.shapes if self.architecture not in HEADS or name not in factors}
        self.among_others = self.architecture not in HEADS
        if self.among_others:
            further = read_further_layers(file.metadata, file.where)
            self.config = {"num_nextn_predict_layers": further} if further else {}
        else:
            self.rename(_renamed(self.architecture))
            if self.architecture == "dflash" and keys.get("dflash.attention.sliding_window"):
                raise ModelError(f"The head in {file.where} has layers of a sliding window, which are not supported.")
            self._layers = with_rope_factors(self._read(layers_of=_LAYERS_OF[self.architecture]), file)
            self.config = self._head_config(keys)
        self.keys = ConfigKeys(self.config, where=file.where)

    def _read(self, *, layers_of: str | None = None) -> ModelSpec:
        metadata, shapes = self._file.metadata, _with_first_layer(self._file.shapes)
        if layers_of is not None:  # an assistant's are all of that kind, and share keys and values with other layers
            metadata = {key: value for key, value in metadata.items() if not key.endswith(_NOT_OF_LAYERS)}
        return read_gguf(metadata, shapes, where=self.where, layers_of=layers_of)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """A row alone is stored as a vector."""
        shapes = super().shapes
        row = shapes.get(_CONFIDENCE, ())
        return {**shapes, _CONFIDENCE: (1, *row)} if len(row) == 1 else shapes

    @property
    def has_tokenizer(self) -> bool:
        return "tokenizer.ggml.tokens" in self._file.metadata

    def read_layers(self) -> ModelSpec:
        """As HeadFiles'; ModelError for a file that is no head by itself."""
        if self.among_others:
            raise ModelError(
                f"{self.where} is a model (general.architecture = {self.architecture!r}), not the head of a drafter.",
                "Give the file of a head that was made for the target.",
            )
        details = self._layers.details
        return replace(self._layers, decoder=replace(details, interleaved_rope=False))

    def read_base(self) -> ModelSpec:
        return with_rope_factors(self._read(), self._file)

    def layer_names(self, architecture: str) -> Mapping[str, str]:
        names = gguf_names(_with_first_layer(self._file.shapes))
        return {"q_gate": names["q"], **names}

    def read(self, name: str, dtype: DType = FLOAT32) -> Array:
        tensor = super().read(name, dtype)
        tensor = tensor[None] if name == _CONFIDENCE and tensor.ndim == 1 else tensor
        order = self._order(name, len(tensor))
        return tensor if order is None else tensor[order]

    def read_blocks(self, name: str) -> QuantisedMatrix:
        matrix = super().read_blocks(name)
        order = self._order(name, matrix.shape[0])
        return matrix if order is None else matrix.take(order)

    def integers(self, name: str) -> Array:
        values = self._file.read_integers(self.names[name]).reshape(-1)
        return values - np.arange(len(values)) if name == "d2t" else values

    def _order(self, name: str, rows: int) -> Array | None:
        """The stored row of each row, where they differ."""
        if self.architecture != "eagle3" or not re.fullmatch(r"layers\.\d+\.self_attn\.[qk]_proj\.\w+", name):
            return None
        attention = self._layers.attention
        return half_split(rows, heads=rows // attention.head_dim, rotated=self._layers.rope_dim("global"))

    def _head_config(self, every: ConfigKeys) -> dict[str, Any]:
        """What the metadata says, by the keys of speculators' configurations."""
        prefix, shapes, layers = f"{self.architecture}.", self.shapes, self._layers
        own = {key.removeprefix(prefix): value for key, value in every.values.items() if key.startswith(prefix)}
        keys = ConfigKeys(own, where=self.where, prefix=prefix)
        if self.architecture == "gemma4-assistant":
            return {"model_type": "gemma4_assistant", "backbone_hidden_size": keys.get("embedding_length_out")}
        taps = keys.integers("target_layers") or keys.integers("extract_layers")
        if not taps:
            raise ModelError(f"{self.where} lacks {prefix}target_layers.", "The head was not converted for llama.cpp.")
        output = shapes.get("d2t") or shapes.get("lm_head.weight") or (layers.vocab,)
        config: dict[str, Any] = {
            "draft_vocab_size": output[0],
            "target_hidden_size": keys.get("target_hidden_size"),
            "transformer_layer_config": {"vocab_size": layers.vocab},
        }
        if self.architecture == "eagle3":
            flags = {name: keys.flag(name) for name in ("norm_before_residual", "norm_before_fc")}
            kind = {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": taps}
            return {**config, **kind, **flags}
        return {**config, "aux_hidden_state_layer_ids": taps, **self._block_config(keys, every)}

    def _block_config(self, keys: ConfigKeys, every: ConfigKeys) -> dict[str, Any]:
        mask = every.get("tokenizer.ggml.mask_token_id")
        if mask is None and keys.get("mask_token_id") is not None:  # and target_layers was counted from another layer
            raise ModelError(
                f"{self.where} was written by a converter from before DFlash was a part of llama.cpp.",
                "Fetch or convert the head again.",
            )
        shapes = self.shapes
        rank = shapes.get("markov_head.markov_w1.weight", (0, 0))[-1]
        return {
            "speculators_model_type": "dspark" if rank else "dflash",
            "block_size": keys.integer("block_size", default=_BLOCK_SIZE),
            "mask_token_id": mask,
            "sample_from_anchor": keys.flag("sample_from_anchor", default=rank > 0),
            "markov_rank": rank or None,
            "enable_confidence_head": _CONFIDENCE in shapes,
            "confidence_head_with_markov": shapes.get(_CONFIDENCE, (0,))[-1] > self._layers.hidden,
        }


def open_head_files(path: Path) -> HeadFiles:
    """The files of a head: a GGUF file, or a directory."""
    return GgufHeadFiles(path) if path.is_file() else HeadFiles(path)


def _renamed(architecture: str) -> dict[str, str]:
    """Patterns of the names that a file of a head has -> what is called so in directories, but for layers of an
    assistant, whose names come from `layer_names`."""
    if architecture == "gemma4-assistant":
        return {r"nextn\.(pre|post)_projection\.": r"\1_projection."}
    found = {
        r"token_embd\.": "embed_tokens.",
        r"output_norm\.": "norm.",
        r"output\.": "lm_head.",
        r"enc\.output_norm\.": "hidden_norm." if architecture == "dflash" else "input_norm.",
        r"blk\.(\d+)\.attn_norm_2\.": r"layers.\1.hidden_norm.",
        r"markov_w([12])\.": r"markov_head.markov_w\1.",
        r"conf_proj\.": "confidence_head.proj.",
    }
    for part in _PARTS:
        pattern = re.escape(GGUF_NAMES[part] + ".").replace(r"\{\}", r"(\d+)")
        found[pattern] = NAMES[part].removeprefix("model.").replace("{}", r"\1") + "."
    return found


def _with_first_layer(shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, tuple[int, ...]]:
    """The tensors of a file whose first layers are absent, as if its first one were layer 0: what they say of a model's
    layers is read from that."""
    numbers = [int(match[1]) for name in shapes if (match := re.match(r"blk\.(\d{1,5})\.", name))]
    first = min(numbers, default=0)
    if not first:
        return shapes
    return {**shapes, **{name.replace(f"blk.{first}.", "blk.0."): shape for name, shape in shapes.items()}}
