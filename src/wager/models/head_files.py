"""What drafter heads on the target's states have in common: their files, the maps of their vocabularies, their matrices
in the form that kernels multiply, and the logits that they give.

A head is a directory with config.json and safetensors, or a GGUF file (head_gguf.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wager.arch.config_keys import ConfigKeys, one_line, read_json, short_repr
from wager.arch.hf_config import read_config
from wager.arch.layers import Dense, Gqa
from wager.arch.spec import ModelSpec
from wager.errors import ModelError, UsageError
from wager.kernels._native import BlockPool, HeadDrafts
from wager.kernels.arrays import BFLOAT16, FLOAT32, INT32, Array, DType, all_finite, empty, zeros
from wager.kernels.base import BLOCK_SIZE, TargetOutput
from wager.kernels.blocks import BLOCK, Matrix, QuantisedMatrix, quantise, stack
from wager.kernels.cpu import Kernels
from wager.kernels.cpu_cache import CpuCache
from wager.kernels.tape import NOISE_KEY, GuessedIds, RowSet, Tape
from wager.models.gguf import GgufFile, StoredAs
from wager.models.packed_cache import PackedStore
from wager.models.transformer import NEVER, Decoder, LayerWeights
from wager.models.weights import (
    NAMES,
    Matrices,
    StoredWeights,
    Weights,
    block_format,
    source_name,
    stored_names,
    tensor_shapes,
)
from wager.types import PackedBatch

if TYPE_CHECKING:
    from wager.models.quantised_checkpoints import QuantisedSource
    from wager.models.safetensors_files import SafetensorsSource, TensorBytes

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Model types of a head's layers."""


class HeadFiles:
    """The configuration and the tensors of a head, under the names that `rename` gives them. ModelError names what is
    absent or damaged. `names`: what each tensor is called in its file, or was before it was quantised; `quantised`:
    those of matrices that are; `among_others`: they may be a part of a model's own."""

    quantised: Collection[str] = ()
    among_others = False

    def __init__(self, path: Path) -> None:
        if not (path / "config.json").is_file():
            raise ModelError(
                f"There is no head at {path}.",
                "Give a directory with config.json and model.safetensors, as wager train writes them at its end, or "
                "a GGUF file.",
            )
        self.where = str(path)
        self.config: Mapping[str, Any] = read_json(path / "config.json")
        self.keys = ConfigKeys(self.config, where=str(path / "config.json"))
        from wager.models.safetensors_files import SafetensorsSource  # imports its library

        self._files = SafetensorsSource(path)
        self._source: SafetensorsSource | QuantisedSource | GgufFile = self._files
        if "quantization_config" in self.config:
            from wager.models.quantised_checkpoints import QuantisedSource

            self._source = QuantisedSource(self._files, self.keys.section("quantization_config").values)
            self.quantised = self._source.quantised
        self.names = {name: name for name in self._source.shapes}

    @property
    def is_assistant(self) -> bool:
        """Whether they are those of an assistant, see head_assistant.py."""
        return str(self.config.get("model_type")).endswith("_assistant")

    @property
    def has_tokenizer(self) -> bool:
        return (Path(self.where) / "tokenizer.json").is_file()

    @property
    def flat(self) -> bool:
        """Whether the layers are described beside the rest, as in configurations of the heads' own repositories."""
        return "transformer_layer_config" not in self.config

    @property
    def layer_keys(self) -> ConfigKeys:
        """The keys that describe the layers."""
        return self.keys if self.flat else self.keys.section("transformer_layer_config")

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = self._source.shapes
        return {name: shapes[stored] for name, stored in self.names.items()}

    def read_layers(self) -> ModelSpec:
        """The layers of a head as a model."""
        if self.is_assistant:  # none of its layers has keys and values, which no model is like
            own = {"architectures": ["Gemma4ForCausalLM"], "num_kv_shared_layers": 0}
            text = {**self.keys.section("text_config").values, **own}
            return read_config(text, runnable=True, where=f"{self.where}/config.json")
        model_type = self.layer_keys.text("model_type") or "llama"
        if model_type not in _ARCHITECTURES:
            raise ModelError(
                f"The head in {self.where} has layers of model_type {short_repr(model_type)}, which are not supported.",
                f"Supported are: {', '.join(_ARCHITECTURES)}.",
            )
        config: dict[str, Any] = {**self.layer_keys.values, "architectures": [_ARCHITECTURES[model_type]]}
        config.setdefault("tie_word_embeddings", False)
        return read_config(config, runnable=True, where=f"{self.where}/config.json")

    def read_base(self) -> ModelSpec:
        """The model that modules belong to."""
        return read_config(self.layer_keys.values, runnable=True, where=f"{self.where}/config.json")

    def layer_names(self, architecture: str) -> Mapping[str, str]:
        """What tensors of layers of that architecture are called, by their canonical names."""
        return stored_names(architecture, self.shapes)

    def rename(self, patterns: Mapping[str, str]) -> None:
        """Replace the beginnings of names by others: regular expressions to what stands for them."""
        renamed = {}
        for name, stored in self.names.items():
            for pattern, new in patterns.items():
                name = re.sub(f"^{pattern}", new, name)
            renamed[name] = stored
        self.names = renamed

    def check(self, expected: Mapping[str, tuple[int, ...]], *, optional: Sequence[str] = ()) -> None:
        """ModelError unless there are exactly these tensors in these shapes, and no others but those whose names match
        a pattern of `optional`."""
        shapes = self.shapes
        for name, shape in expected.items():
            if name not in shapes:
                raise ModelError(
                    f"The head in {self.where} lacks the tensor {name} {list(shape)}.",
                    "It is incomplete, or its config.json describes another kind of head.",
                )
            self.check_shape(name, shape)
        for name in shapes:
            if name not in expected and not any(re.fullmatch(pattern, name) for pattern in optional):
                raise ModelError(
                    f"The head in {self.where} has a tensor {one_line(self.names[name])} that is not used.",
                    "It has parts that its config.json does not describe, so its guesses would be wrong.",
                )

    def check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        """ModelError if a tensor that is there has another shape. A vector may be a matrix of one row."""
        if self.shapes[name] != expected and not (len(expected) == 1 and self.shapes[name] == (1, *expected)):
            raise ModelError(
                f"{self.names[name]} in {self.where} has shape {list(self.shapes[name])}; this target and the head's "
                f"config.json require {list(expected)}.",
                "The head was trained for another target, or its files do not belong together.",
            )

    def read(self, name: str, dtype: DType = FLOAT32) -> Array:
        """One tensor of floats; ModelError if some are not finite."""
        tensor = self._source.read(self._stored_name(name), dtype)
        if not all_finite(tensor):
            raise ModelError(
                f"{self._stored_name(name)} in {self.where} has weights that are no finite numbers.",
                "The file is damaged, or was saved before the target's weights were loaded.",
            )
        return tensor

    def read_bytes(self, name: str) -> TensorBytes:
        """One tensor as it is stored, a quantised matrix in bfloat16."""
        from wager.models.safetensors_files import TensorBytes  # imports its library

        if self.names[name] not in self.quantised:
            return self._files.read_bytes(self.names[name])
        values = self.read(name, BFLOAT16)
        return TensorBytes("BF16", values.shape, values.tobytes())

    def stored(self, name: str) -> StoredAs:
        """How a tensor is stored."""
        return self._source.stored(self._stored_name(name))

    def read_blocks(self, name: str) -> QuantisedMatrix:
        """A matrix in the format that `stored` gives, which is not None."""
        return self._source.read_blocks(self._stored_name(name))

    def _stored_name(self, name: str) -> str:
        """What a tensor or a part of one is called in its file."""
        tensor, bracket, index = name.partition("[")
        return self.names[tensor] + bracket + index

    def integers(self, name: str) -> Array:
        """One vector of whole numbers or truth values, as int64."""
        return self._files.read_integers(self.names[name]).reshape(-1)


def check_sizes(files: HeadFiles, target: ModelSpec, *, hidden: int, vocab: int) -> None:
    """ModelError if these sizes, of the target that the head was trained for, are another target's."""
    for name, found, own in (("hidden size", hidden, target.hidden), ("vocabulary", vocab, target.vocab)):
        if found != own:
            raise ModelError(
                f"The head in {files.where} was trained for a target of {name} {found}; {target.name} has {own}.",
                "Give a head of this target.",
            )


def check_taps(keys: ConfigKeys, taps: Sequence[int], target: ModelSpec) -> None:
    """ModelError if a head reads states behind layers that the target does not have."""
    for tap in taps:
        if not 0 <= tap < target.num_layers:
            raise ModelError(
                f"The head in {keys.where} taps the target after layer {tap}; {target.name} has {target.num_layers} "
                f"layers, of which 0 to {target.num_layers - 1} can be tapped.",
                "The head was trained for another target.",
            )


def read_proposed(keys: ConfigKeys) -> int | None:
    """Guesses of a round that the head was made for."""
    methods = keys.section("speculators_config").get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    depth = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    return depth if isinstance(depth, int) and depth > 0 else None


@dataclass(frozen=True, eq=False)
class HeadVocabulary:
    """`ids` int64 [draft ids]: the target's id of each id of the head; `size`: the target's vocabulary."""

    ids: Array
    size: int

    @property
    def whole(self) -> bool:
        """Whether the head's ids are the target's."""
        return len(self.ids) == self.size and bool((self.ids == np.arange(self.size)).all())


def read_vocabulary(files: HeadFiles, *, draft: int, size: int) -> HeadVocabulary:
    """From d2t (the target's id minus the head's own) and t2d (which ids of the target it has), for a head of `draft`
    ids and a target of `size`. Without d2t the ids are the target's. ModelError if they contradict each other."""
    if "d2t" not in files.shapes:
        return check_ids(files, "d2t", None, draft=draft, size=size)
    for name, shape in vocabulary_shapes(files, draft=draft, size=size).items():
        files.check_shape(name, shape)
    ids = np.arange(draft) + files.integers("d2t")
    known = files.integers("t2d").astype(bool) if "t2d" in files.shapes else None
    if known is not None and not _agree(ids, known):
        offsets = files.integers("d2t")
        absolute = bool(offsets.min() >= 0) and bool(offsets.max() < size) and _agree(offsets, known)
        raise ModelError(
            f"d2t and t2d in {files.where} name different ids"
            + (": d2t holds the target's ids, and must hold their distance from the head's own." if absolute else "."),
            "Export the head again.",
        )
    return check_ids(files, "d2t", ids, draft=draft, size=size)


def check_ids(files: HeadFiles, name: str, ids: Array | None, *, draft: int, size: int) -> HeadVocabulary:
    """The vocabulary of a head of `draft` ids, which a tensor of that name says are these ids of a target of `size`
    (None: it is absent). ModelError if they are not."""
    if ids is None:
        if draft != size:
            raise ModelError(
                f"The head in {files.where} guesses {draft} ids of a vocabulary of {size} and has no {name} to "
                "say which.",
                "The head was trained for another target, or is incomplete.",
            )
        ids = np.arange(size)
    if ids.min() < 0 or ids.max() >= size or len(np.unique(ids)) < draft:
        raise ModelError(
            f"{name} in {files.where} names ids that the target's vocabulary of {size} does not have, or one twice.",
            "The head was trained for another target, or its file is damaged: d2t holds distances, token_map ids.",
        )
    return HeadVocabulary(ids, size)


def vocabulary_shapes(files: HeadFiles, *, draft: int, size: int) -> dict[str, tuple[int, ...]]:
    """The shapes of d2t and t2d, if the head has them."""
    shapes: Sequence[tuple[str, tuple[int, ...]]] = (("d2t", (draft,)), ("t2d", (size,)))
    return {name: shape for name, shape in shapes if name in files.shapes}


def _agree(ids: Array, known: Array) -> bool:
    return bool(ids.min() >= 0) and bool(ids.max() < len(known)) and np.array_equal(np.sort(ids), np.flatnonzero(known))


class HeadWeights:
    """The tensors of a head, packed as they are asked for: matrices as `dtype` (a key of weights.FORMAT_OF_DTYPE) says,
    as far as blocks fit."""

    def __init__(self, files: HeadFiles, kernels: Kernels, *, dtype: str) -> None:
        self.files, self.kernels, self.dtype = files, kernels, dtype

    def vector(self, name: str) -> Array:
        """A tensor in float32."""
        return self.files.read(name)

    def matrix(self, name: str) -> Array:
        """A matrix [outputs, inputs] in the kernels' activation type, not packed."""
        return self.files.read(name, self.kernels.act)

    def pack(self, names: Sequence[str], columns: slice = slice(None), *, biased: bool = True) -> Any:
        """Matrices of the same inputs, one below the other, of which only `columns` are taken, with their biases."""
        parts = [self._part(name, columns) for name in names]
        if len({part.format.name if isinstance(part, QuantisedMatrix) else "" for part in parts}) > 1:
            parts = [self._formed(name, self.matrix(name)[:, columns]) for name in names]
        found = [name.removesuffix("weight") + "bias" for name in names if biased]
        biases = [self.vector(name) for name in found if name in self.files.shapes]
        return self.kernels.pack(stack(parts), np.concatenate(biases) if biases else None)

    def pack_wide(self, matrix: Array) -> Any:
        """An embedding or output matrix: in q8_0 where others are quantised, as the target's."""
        return self.kernels.pack(self._formed("lm_head.weight", matrix))

    def _part(self, name: str, columns: slice) -> Matrix:
        """Some columns of a matrix: in its own blocks where these are kept and none is cut, else as they are wanted."""
        if self.kept(name):
            blocks = self.files.read_blocks(name)
            first, last, _ = columns.indices(blocks.k)
            if (part := blocks.columns(first, last)) is not None:
                return part
        return self._formed(name, self.matrix(name)[:, columns])

    def kept(self, name: str) -> str | None:
        """The block format of a matrix that is stored in one and multiplied so."""
        own = self.files.stored(name).format
        return own if own is not None and own == self._format(name, own, BLOCK) else None

    def nbytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Bytes of tensors by name as they are packed, vectors in float32, without the maps of token ids."""
        return sum(self._packed_bytes(name, *shape) for name, shape in shapes.items() if name not in _ID_MAPS)

    def _packed_bytes(self, name: str, *shape: int) -> int:
        if len(shape) == 1:
            return 4 * shape[0]
        *many, outputs, inputs = shape
        form = self._format(name, self.files.stored(name).format, inputs)
        return math.prod(many) * self.kernels.matrix_bytes(outputs, inputs, form)

    def _format(self, name: str, own: str | None, inputs: int) -> str | None:
        return block_format(self.dtype, own, inputs, wide=_WIDE.fullmatch(name) is not None)

    def _formed(self, name: str, values: Array) -> Matrix:
        known = self._format(name, None, values.shape[1])
        return np.ascontiguousarray(values) if known is None else quantise(values, known)


def row_tape(weights: HeadWeights, rows: int) -> Tape:
    """A tape for ops without positions: its rows are one sequence; `run_rows` runs it."""
    blocks = -(-rows // BLOCK_SIZE)
    tape = weights.kernels.tape(max_rows=rows, max_sequences=1, max_blocks=blocks)
    places = np.arange(rows, dtype=INT32)
    inputs = tape.inputs
    inputs.positions[:] = places
    inputs.slot_mapping[:] = places
    inputs.parents[:] = places - 1
    inputs.block_tables[0] = np.arange(blocks)
    return tape


def run_rows(tape: Tape, rows: int) -> None:
    tape.inputs.query_start_loc[1] = rows
    tape.run(rows=rows, sequences=1, logits_rows=0)


_ID_MAPS = ("d2t", "t2d", "token_map")
_WIDE = re.compile(r"(lm_head|lm_heads\.\d+|(model\.)?embed_tokens|token_embd|modules\.\d+\.(head|embed))\.weight")
"""Embeddings and output matrices."""


TREE_ROWS = 16
"""Rows of logits that a head gives at least in one go: as many as a level of a tree may have."""


class HeadLogits:
    """Rows of a head's logits, at most `rows`, and the guess of each; `keys` NOISE_KEY [rows] are for drawing them."""

    def __init__(self, vocabulary: HeadVocabulary, rows: int) -> None:
        whole = vocabulary.whole
        self._ids = None if whole else vocabulary.ids
        self.ids = GuessedIds(self._ids, count=len(vocabulary.ids))
        self.keys = zeros(rows, dtype=NOISE_KEY)
        self.tokens, self.probabilities = zeros(rows, dtype=INT32), zeros(rows)
        self._whole = np.empty((0, 0) if whole else (rows, vocabulary.size), np.float32)
        self._whole.fill(NEVER)  # ids that the head cannot guess

    def record(self, tape: Tape, logits: Array, *, of: RowSet = "logits") -> None:
        """Guess the rows of logits f32 [rows, ids]."""
        tape.guess(logits, self.ids, self.keys, self.tokens, self.probabilities, of=of)

    def output(self, logits: Array, fed: Array | None = None, given: Array | None = None) -> HeadOutput:
        """What a pass gave with these rows of logits, valid until the next one."""
        return HeadOutput(self, logits, self.tokens[: len(logits)], self.probabilities[: len(logits)], fed, given)

    def spread(self, logits: Array) -> Array:
        """Logits f32 [n, ids] by the target's ids, valid until the next call."""
        if self._ids is None:
            return logits
        rows = len(logits)
        self._whole[:rows, self._ids] = logits
        return self._whole[:rows]


@dataclass(slots=True)
class HeadOutput:
    """The result of a pass of a head: `logits` f32 [n, ids] by its own ids, the token of each row and its probability
    as `Tape.guess` finds them, what is `fed` to the next row [n, hidden]; with several modules what all rows gave."""

    of: HeadLogits
    logits: Array
    tokens: Array
    probabilities: Array
    fed: Array | None = None
    given: Array | None = None

    def by_target(self) -> TargetOutput:
        """The rows by the target's ids, with those that the head cannot guess far below all others; greedy tokens."""
        logits, own = self.logits, self.of.ids.own
        greedy = logits.argmax(axis=1).astype(INT32)
        greedy = np.where(np.isfinite(logits).all(axis=1), greedy if own is None else own[greedy], INT32.type(-1))
        return TargetOutput(self.of.spread(logits), greedy, self.fed)


def layer_weights(weights: HeadWeights, spec: ModelSpec, names: Mapping[str, str]) -> list[LayerWeights]:
    """The layers of a head that are those of a decoder of that spec; `names` are its tensors' as in weights.NAMES."""
    kernels = weights.kernels
    stored = StoredWeights(spec, weights.files, names)
    matrices = Matrices(stored, weights.dtype, kernels.act, only_layers=True)
    known = tensor_shapes(spec)
    return [
        LayerWeights(stored, matrices, PackedStore(kernels), known, index=index) for index in range(spec.num_layers)
    ]


def output_matrix(weights: HeadWeights, vocabulary: HeadVocabulary, decoder: Decoder, target: Weights) -> Any:
    """The target's output matrix, or only the rows that a head guesses."""
    if vocabulary.whole:
        return decoder.head
    name = "embed.weight" if target.spec.tied else "head.weight"
    return weights.pack_wide(target.read(name, weights.kernels.act)[vocabulary.ids])


# ---- heads as they are opened and run ------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckedHead:
    """A head whose files were checked against its target, but not loaded; `dtype` is the form of its matrices, a key of
    weights.FORMAT_OF_DTYPE."""

    files: HeadFiles
    dtype: str

    def weights(self, kernels: Kernels) -> HeadWeights:
        return HeadWeights(self.files, kernels, dtype=self.dtype)

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Its tensors with their shapes."""
        return self.files.shapes

    def weight_bytes(self, kernels: Kernels) -> int:
        return self.weights(kernels).nbytes(self.tensors())

    def token_bytes(self, kernels: Kernels) -> int:
        """Bytes of keys and values per position, of those that cache some."""
        del kernels
        return 0


_LAYER_NAMES = {part: name.removeprefix("model.") for part, name in NAMES.items()}


@dataclass(frozen=True)
class CheckedLayers(CheckedHead):
    """A head of layers like a decoder's on states of the target. `decoder` has sizes, rotation and norms of its layers,
    which have one kind of `attention` and feed-forwards of the inner size `inner`; `taps` are the target's layers that
    it reads, of `target_hidden` elements each. own_embedding, own_output: whether it has these matrices, or uses the
    target's."""

    decoder: ModelSpec
    attention: Gqa
    inner: int
    vocabulary: HeadVocabulary
    target_hidden: int
    own_embedding: bool
    own_output: bool
    taps: tuple[int, ...]

    @property
    def state_width(self) -> int:
        """Elements of a position's tapped states."""
        return len(self.taps) * self.target_hidden

    def token_bytes(self, kernels: Kernels) -> int:
        return self.decoder.num_layers * self.attention.cache_width * kernels.act.itemsize

    def cache(self, kernels: Kernels, *, num_blocks: int) -> CpuCache:
        """For the keys and values of its layers."""
        layers, kind = self.decoder.num_layers, self.attention
        return kernels.cache(layers=layers, num_blocks=num_blocks, kv_heads=kind.kv_heads, head_dim=kind.head_dim)

    def layers(self, weights: HeadWeights) -> list[LayerWeights]:
        return layer_weights(weights, self.decoder, _LAYER_NAMES)

    def embedding(self, weights: HeadWeights, decoder: Decoder) -> Any:
        """Its embedding, packed, or the target's."""
        return weights.pack(["embed_tokens.weight"]) if self.own_embedding else decoder.embedding

    def output(self, weights: HeadWeights, decoder: Decoder, target: Weights) -> Any:
        """Its output matrix, packed, or the target's."""
        if self.own_output:
            return weights.pack(["lm_head.weight"])
        return output_matrix(weights, self.vocabulary, decoder, target)

    def check_tensors(self, further: Mapping[str, tuple[int, ...]], *, first_width: int) -> None:
        """ModelError unless the files have the tensors of such a head, whose first layer reads `first_width` elements,
        and those of `further`."""
        hidden, draft, size = self.decoder.hidden, len(self.vocabulary.ids), self.vocabulary.size
        expected = {"fc.weight": (hidden, self.state_width), "norm.weight": (hidden,), **further}
        for name, shape in tensor_shapes(self.decoder).items():
            if name.startswith("layers."):
                reads = (first_width,) if re.fullmatch(r"layers\.0\.[qkv]\.weight", name) else shape[1:]
                expected[source_name(_LAYER_NAMES, name)] = (shape[0], *reads)
        if self.own_output:
            expected["lm_head.weight"] = (draft, hidden)
        if self.own_embedding:
            expected["embed_tokens.weight"] = (size, hidden)
        expected |= vocabulary_shapes(self.files, draft=draft, size=size)
        self.files.check(expected, optional=(r".*rotary_emb\.inv_freq", r"verifier_.*"))


def read_layers(files: HeadFiles, target: ModelSpec) -> dict[str, Any]:
    """The fields of CheckedLayers but for the taps. ModelError if they are not supported, or of another target."""
    decoder = files.read_layers()
    attention, ffn = decoder.layers[0].attention, decoder.layers[0].ffn
    if not isinstance(attention, Gqa) or not isinstance(ffn, Dense):
        raise ModelError(f"The layers of the head in {files.where} are of a kind that is not supported.")
    keys, layer, hidden = files.keys, files.layer_keys, decoder.hidden
    check_sizes(
        files,
        target,
        hidden=keys.integer("target_hidden_size", default=target.hidden),
        vocab=layer.integer("vocab_size", default=target.vocab),
    )
    draft = keys.integer("draft_vocab_size", default=layer.integer("draft_vocab_size", default=target.vocab))
    for name, tensor in (("embedding", "embed_tokens.weight"), ("output", "lm_head.weight")):
        if tensor not in files.shapes and hidden != target.hidden:
            raise ModelError(
                f"The head in {files.where} of hidden size {hidden} has no {name} matrix of its own, and the target's "
                f"is of {target.hidden}.",
                "The head was trained for another target, or is incomplete.",
            )
    return {
        "decoder": decoder,
        "attention": attention,
        "inner": ffn.width,
        "vocabulary": read_vocabulary(files, draft=draft, size=target.vocab),
        "target_hidden": target.hidden,
        "own_embedding": "embed_tokens.weight" in files.shapes,
        "own_output": "lm_head.weight" in files.shapes,
    }


class CachedHead:
    """A head with a cache of keys and values of its own, within the limits of the target's `decoder`, but for
    `least_rows`. `_state` f32 [max_rows, hidden] is what it makes of the target's states, f32 [max_rows, state_width]:
    where rows read both these and what it gave itself, by the first `_fused` ops of its tape. `follows`: whether
    the tape says how it goes on behind a guess. whole_spans: as of Kernels.tape."""

    follows = False

    def __init__(
        self,
        decoder: Decoder,
        kernels: Kernels,
        hidden: int,
        *,
        state_width: int,
        least_rows: int = 1,
        whole_spans: bool = False,
    ) -> None:
        self.vocab, self.hidden, self.state_width = decoder.vocab, hidden, state_width
        self.max_rows = max(decoder.max_rows, least_rows)
        self.max_sequences = decoder.max_sequences
        self.max_blocks = decoder.max_blocks
        self.max_logits_rows = min(self.max_rows, max(self.max_sequences, TREE_ROWS))
        self.max_context = self.max_blocks * BLOCK_SIZE
        self._tape = kernels.tape(
            max_rows=self.max_rows,
            max_sequences=self.max_sequences,
            max_blocks=self.max_blocks,
            whole_spans=whole_spans,
        )
        self.buffers = self._tape.buffers
        self._target_states = empty(self.max_rows, state_width)
        self._state = empty(self.max_rows, hidden)  # what the rows read
        self._fused = 0

    def rounds(self, drafter: str, pool: BlockPool) -> HeadDrafts | None:
        """Makes the drafts of a drafter of that name whose cache has the blocks of `pool`; None where Python makes each
        pass."""
        if not self.follows:
            return None
        limits = self.max_rows, self.max_sequences, self.max_context
        return self._tape.rounds(drafter, pool, self._target_states, limits=limits)

    def _run(self, batch: PackedBatch, states: Array, fed: Array, *, further: Tape | None = None) -> int:
        """A pass whose first rows have the target's `states` and the others `fed`; the number of rows with logits. All
        rows are fed where it is another tape's. UsageError if the batch exceeds the buffers."""
        rows, sequences, logits_rows, known = batch.rows, batch.num_sequences, len(batch.logits_indices), len(states)
        if rows > self.max_rows or sequences > self.max_sequences or known + len(fed) != rows:
            raise UsageError(
                f"A pass of {rows} rows and {sequences} sequences with {known} + {len(fed)} states does not fit this "
                "head."
            )
        if self.buffers.packed is not batch:
            self._tape.inputs.fill(batch)
        sizes = {"rows": rows, "sequences": sequences, "logits_rows": logits_rows}
        if known:
            self._target_states[:known] = states
        if len(fed):
            if known:  # other rows are fused too, and then overwritten
                self._tape.run(**sizes, last=self._fused)
            self._state[known:rows] = fed
        if further is None:
            self._tape.run(**sizes, first=self._fused if len(fed) else 0)
        else:
            further.run(**sizes)
        return logits_rows
