"""Heads in GGUF files, as llama.cpp's converter writes them: EAGLE-3, DFlash and DSpark, and Gemma 4's assistants under
architectures of their own; modules of multi-token prediction as the last layers of a file of their target's
architecture, with the target's layers before them or without.

The metadata of a head becomes the configuration that it has in a directory, and its tensors get the names that they
have there, so that a head is checked and run in one way, whatever it is stored in. Two things are turned back when a
tensor is read: the rows of EAGLE-3's queries and keys, whose rotated dimensions lie side by side, and d2t, which holds
the target's ids in place of their distance from the head's own. `write_head` does the same the other way round.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wager.arch.config_keys import ConfigKeys
from wager.arch.gguf_config import GGUF_NAMES, HEADS, gguf_names, read_further_layers, read_gguf
from wager.arch.spec import ModelSpec
from wager.errors import ModelError
from wager.kernels.arrays import FLOAT32, Array, DType
from wager.kernels.blocks import QuantisedMatrix
from wager.models.gguf import GgufFile, open_gguf
from wager.models.head_block import CheckedBlock
from wager.models.head_eagle import CheckedEagle
from wager.models.head_files import HeadFiles
from wager.models.weights import LONG_ROPE_FACTORS, NAMES, ROPE_FACTORS, half_split, with_rope_factors

if TYPE_CHECKING:
    from wager.models.safetensors_files import TensorBytes

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
            self.rename(_renaming(_names(self.architecture)))
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
        if self.architecture != "eagle3":
            return None
        return _rotated_rows(name, rows, self._layers.attention.head_dim, self._layers.rope_dim("global"))

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


def _names(architecture: str) -> dict[str, str]:
    """What tensors are called in the file of a head -> in directories, {} a layer's number; but for layers of an
    assistant, whose names come from `layer_names`."""
    if architecture == "gemma4-assistant":
        return {f"nextn.{part}_projection": f"{part}_projection" for part in ("pre", "post")}
    return {
        "token_embd": "embed_tokens",
        "output_norm": "norm",
        "output": "lm_head",
        "fc": "fc",
        "enc.output_norm": "hidden_norm" if architecture == "dflash" else "input_norm",
        "blk.{}.attn_norm_2": "layers.{}.hidden_norm",
        "markov_w1": "markov_head.markov_w1",
        "markov_w2": "markov_head.markov_w2",
        "conf_proj": "confidence_head.proj",
        **{GGUF_NAMES[part]: NAMES[part].removeprefix("model.") for part in _PARTS},
    }


def _renaming(names: Mapping[str, str]) -> dict[str, str]:
    """Patterns of the beginnings of names -> what stands for them."""
    return {
        re.escape(name + ".").replace(r"\{\}", r"(\d+)"): other.replace("{}", r"\1") + "."
        for name, other in names.items()
    }


def _with_first_layer(shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, tuple[int, ...]]:
    """The tensors of a file whose first layers are absent, as if its first one were layer 0: what they say of a model's
    layers is read from that."""
    numbers = [int(match[1]) for name in shapes if (match := re.match(r"blk\.(\d{1,5})\.", name))]
    first = min(numbers, default=0)
    if not first:
        return shapes
    return {**shapes, **{name.replace(f"blk.{first}.", "blk.0."): shape for name, shape in shapes.items()}}


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_head(
    path: Path,
    head: CheckedEagle | CheckedBlock,
    target: GgufFile,
    *,
    output: TensorBytes | None = None,
) -> None:
    """A head as a file, which has the tokenizer of the file of its target. `output`: the matrix that it guesses with,
    where it has none of its own. Matrices keep their bits, where GGUF has them: those of 4 bits with zero points get
    minima, rounded to float16; what else is quantised is bfloat16. OSError if it cannot be written."""
    from gguf import GGMLQuantizationType, GGUFWriter  # importing it takes longer than opening a file

    architecture = "eagle3" if isinstance(head, CheckedEagle) else "dflash"
    writer = GGUFWriter(path, architecture)
    adders: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    tokenizer = {key: value for key, value in target.metadata.items() if key.startswith("tokenizer.")}
    own = {f"{architecture}.{key}": value for key, value in _metadata(head).items()}
    if isinstance(head, CheckedBlock):
        tokenizer["tokenizer.ggml.mask_token_id"] = head.mask_token
    for key, value in {"general.name": path.stem, **own, **tokenizer}.items():
        adders[type(value)](key, value)
    names = _renaming({name: stored for stored, name in _names(architecture).items()})
    for name in head.files.shapes:
        if name == "d2t":
            writer.add_tensor(name, head.vocabulary.ids.astype(np.int64))
            continue
        for pattern, new in names.items():  # what has no name there is of no use: see CheckedLayers.check_tensors
            if re.match(pattern, name):
                kind, values = _stored(head, name)
                writer.add_tensor(re.sub(f"^{pattern}", new, name), values, raw_dtype=GGMLQuantizationType[kind])
    if output is not None:
        values = np.frombuffer(output.data, np.uint8).reshape(output.shape[0], -1)
        writer.add_tensor("output.weight", values, raw_dtype=GGMLQuantizationType[output.kind])
    if factors := head.decoder.details.rope.factors:
        writer.add_tensor(ROPE_FACTORS, np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _metadata(head: CheckedEagle | CheckedBlock) -> dict[str, Any]:
    """What a file says of a head, without its architecture's name."""
    layers, attention = head.decoder, head.attention
    found = {
        "vocab_size": layers.vocab,
        "context_length": layers.context,
        "embedding_length": layers.hidden,
        "block_count": layers.num_layers,
        "feed_forward_length": head.inner,
        "attention.head_count": attention.heads,
        "attention.head_count_kv": attention.kv_heads,
        "attention.key_length": attention.head_dim,
        "attention.value_length": attention.head_dim,
        "attention.layer_norm_rms_epsilon": layers.details.norm_eps,
        "rope.dimension_count": attention.rope_dim,
        "rope.freq_base": layers.details.rope.theta,
        "target_layers": list(head.taps),
        "target_hidden_size": head.target_hidden,
    }
    if isinstance(head, CheckedBlock):
        return {**found, "block_size": head.slots, "sample_from_anchor": head.anchor_guesses}
    return {**found, "norm_before_residual": head.norm_before_residual, "norm_before_fc": head.norm_before_fc}


def _stored(head: CheckedEagle | CheckedBlock, name: str) -> tuple[str, Array]:
    """The type of a tensor in a file, and its bytes by row; vectors are floats of 32 bits."""
    files, shape = head.files, head.files.shapes[name]
    if len(shape) == 1:
        return "F32", files.read(name)
    known = files.stored(name).format
    if known in ("q8_0", "q4_0", "q4_z", "q4_z128"):
        blocks = files.read_blocks(name)
        kind, rows = ("Q4_1", _with_minima(blocks)) if "z" in known else (known.upper(), blocks.data)
    else:
        stored = files.read_bytes(name)
        kind, rows = stored.kind, np.frombuffer(stored.data, np.uint8).reshape(shape[0], -1)
    order = _rotated_rows(name, shape[0], head.attention.head_dim, head.attention.rope_dim)
    return kind, rows if order is None or isinstance(head, CheckedBlock) else rows[np.argsort(order)]


def _with_minima(matrix: QuantisedMatrix) -> Array:
    """Rows of q4_z or q4_z128 as q4_1: what a code of 0 stands for, rounded, in the place of the zero point."""
    blocks = matrix.data.reshape(len(matrix.data), -1, matrix.format.bytes)
    scales = np.ascontiguousarray(blocks[..., :2]).view("<f2")
    minima = -(scales.astype(np.float32) * blocks[..., 2:3])
    begin = np.concatenate([scales, minima.astype("<f2")], axis=-1).view(np.uint8)
    codes = blocks[..., 3:].reshape(len(blocks), -1, 16)
    return np.concatenate([begin.repeat(codes.shape[1] // begin.shape[1], axis=1), codes], axis=-1).reshape(
        len(blocks), -1
    )


def _rotated_rows(name: str, rows: int, head_dim: int, rotated: int) -> Array | None:
    """The stored row of each row of an EAGLE-3 head's queries and keys; None of another tensor."""
    if not re.fullmatch(r"layers\.\d+\.self_attn\.[qk]_proj\.\w+", name):
        return None
    return half_split(rows, heads=rows // head_dim, rotated=rotated)
