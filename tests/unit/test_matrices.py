"""In which form matrices are multiplied, by dtype and by the types of a file, and that the model stays the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from packing import batch, chain
from test_models_gguf import make, rounded_to
from tiny_models import TOKENS, logits, oracle, oracle_logits, save

from oracle.kernels import ReferenceKernels
from quantised_cases import raw_rows
from wager.errors import ModelError
from wager.kernels.arrays import FLOAT32, Array
from wager.kernels.blocks import QuantisedMatrix
from wager.kernels.cpu import select
from wager.models.transformer import Decoder
from wager.models.weights import Matrices, Weights, open_weights

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
MIXED = {
    "q": Kind.Q4_0,
    "k": Kind.Q4_0,
    "v": Kind.Q8_0,
    "o": Kind.Q5_1,
    "gate": Kind.Q4_1,
    "up": Kind.Q4_1,
    "down": Kind.Q5_0,
    "embed": Kind.Q8_0,
}
"""A file that mixes types within a layer, as llama.cpp's _M files do."""


def computed(weights: Weights, dtype: str, kernels: Any = None, *, tokens: Any = TOKENS) -> Array:
    kernels = kernels or ReferenceKernels()
    decoder = Decoder(weights, kernels, num_blocks=8, max_rows=64, max_sequences=1, max_blocks=8, dtype=dtype)
    return decoder.forward(batch([chain(0, tokens, range(8))], range(len(tokens)))).logits.copy()


def apart(found: Array, expected: Array) -> float:
    """The mean difference of logits in standard deviations."""
    return float(np.abs(found - expected).mean() / expected.std())


@pytest.mark.parametrize(("name", "up"), [("llama", Kind.Q4_1), ("llama", Kind.Q8_0), ("qwen2", Kind.Q4_1)])
def test_a_file_is_computed_in_its_own_types(name: str, up: Kind, tmp_path: Path) -> None:
    """8-bit activations move logits by a fiftieth; a row in the wrong place would move them by more."""
    kinds = {**MIXED, "up": up}
    model, shape, path = make(tmp_path, name, kinds=kinds, **SIZES, tie_word_embeddings=True)
    rounded_to(model, shape, kinds, permuted=name == "llama")
    weights, expected = open_weights(path), oracle_logits(model, TOKENS)
    formats = Matrices(weights, "auto").formats
    assert {part: formats[f"layers.0.{part}.weight"] for part in kinds if part != "embed"} == {
        part: kind.name.lower() for part, kind in kinds.items() if part != "embed"
    }
    assert formats["embed.weight"] == "q8_0"
    assert apart(logits(weights, TOKENS), expected) < 1e-4  # in float32 nothing is quantised but the weights
    assert 1e-3 < apart(computed(weights, "auto"), expected) < 0.04
    assert apart(computed(weights, "bf16"), expected) < 0.02
    native = select(threads=1)
    assert apart(computed(weights, "auto", native), computed(weights, "auto")) < 0.02


@pytest.mark.parametrize("dtype", ["bf16", "q8", "q4"])
def test_a_checkpoint_is_quantised_as_it_is_read(dtype: str, tmp_path: Path) -> None:
    model = oracle("LlamaForCausalLM", **SIZES, tie_word_embeddings=False)
    weights, expected = open_weights(save(model, tmp_path / "hf")), oracle_logits(model, TOKENS)
    matrices = Matrices(weights, dtype)
    found = {name.split(".")[-2]: known for name, known in matrices.formats.items()}
    layer = {"bf16": None, "q8": "q8_0", "q4": "q4_1"}[dtype]
    assert {found[part] for part in ("q", "k", "v", "o", "gate", "up", "down")} == {layer}
    assert {found["embed"], found["head"]} == {None if dtype == "bf16" else "q8_0"}
    assert apart(computed(weights, dtype), expected) < {"bf16": 0.02, "q8": 0.04, "q4": 0.3}[dtype]
    read = matrices.read("layers.0.q.weight")
    whole = weights.read("layers.0.q.weight", FLOAT32)
    if isinstance(read, QuantisedMatrix):
        error = np.linalg.norm(read.dequantise() - whole) / np.linalg.norm(whole)
        assert error < {"q8": 0.006, "q4": 0.08}[dtype]


def test_inputs_that_blocks_do_not_divide_stay_in_bf16(tmp_path: Path) -> None:
    model = oracle("LlamaForCausalLM", **{**SIZES, "intermediate_size": 80})
    weights = open_weights(save(model, tmp_path / "hf"))
    formats = Matrices(weights, "q8").formats
    assert formats["layers.0.down.weight"] is None and formats["layers.0.up.weight"] == "q8_0"
    assert apart(computed(weights, "q8"), oracle_logits(model, TOKENS)) < 0.04


@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [
        (Kind.F16, "auto", None),
        (Kind.F16, "q4", "q4_1"),
        (Kind.Q8_0, "auto", "q8_0"),
        (Kind.Q8_0, "q4", "q4_1"),
        (Kind.Q8_0, "bf16", None),
        (Kind.Q5_0, "q8", "q5_0"),
        (Kind.Q5_0, "q4", "q4_1"),
        (Kind.Q4_0, "q8", "q4_0"),
        (Kind.Q4_0, "q4", "q4_0"),
        (Kind.Q4_0, "bf16", None),
    ],
)
def test_matrices_stored_in_few_bits_keep_them(kind: Kind, dtype: str, expected: str | None, tmp_path: Path) -> None:
    """q8 and q4 say how many bits are enough: nothing is made wider."""
    path = make(tmp_path, "llama", kinds={"down": kind}, **SIZES)[2]
    assert Matrices(open_weights(path), dtype).formats["layers.0.down.weight"] == expected


def test_types_without_kernels_are_named(tmp_path: Path) -> None:
    kinds = (Kind.IQ4_NL, Kind.NVFP4)
    tensors = {f"blk.{i}.ffn_up.weight": (raw_rows(kind, 96, 64), kind) for i, kind in enumerate(kinds)}
    weights = open_weights(make(tmp_path, "llama", replaced=tensors, **SIZES)[2])
    matrices = Matrices(weights, "auto")
    assert matrices.converted == {"IQ4_NL": "q8_0", "NVFP4": "q8_0 (rounded)"}
    assert matrices.description == "bfloat16 x21 + q8_0 x2"
    assert Matrices(weights, "bf16").converted == {} and Matrices(weights, "bf16").description == "bfloat16"
    exact = gguf.quants.dequantize(tensors["blk.0.ffn_up.weight"][0], Kind.IQ4_NL)
    found = matrices.read("layers.0.up.weight")
    assert isinstance(found, QuantisedMatrix) and np.array_equal(found.dequantise(), exact)


def test_a_type_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    tensors = {"blk.0.ffn_down.weight": (raw_rows(Kind.Q1_0, 64, 128), Kind.Q1_0)}
    _, _, path = make(tmp_path, "llama", replaced=tensors, **{**SIZES, "intermediate_size": 128})
    weights = open_weights(path)
    for dtype in ("auto", "bf16"):
        with pytest.raises(ModelError, match=r"blk\.0\.ffn_down\.weight .* stored as Q1_0"):
            computed(weights, dtype)


def test_damaged_scales_are_named(tmp_path: Path) -> None:
    _, _, path = make(tmp_path, "llama", kinds={"q": Kind.Q8_0}, **SIZES)
    raw = bytearray(path.read_bytes())
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.attn_q.weight")
    raw[tensor.data_offset + 34 : tensor.data_offset + 36] = np.float16(np.nan).tobytes()
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=r"blk\.1\.attn_q\.weight .* no finite numbers"):
        computed(open_weights(path), "auto")
