"""GGUF files: the same logits as the model they were made from, at every quantisation, in the form that each dtype asks
for, and damage named."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.constants import GGML_QUANT_SIZES
from test_models_families import CASES, LINEAR, LLAMA3, LONGROPE, YARN
from tiny_models import (
    TOKENS,
    as_gguf,
    converted,
    gguf_metadata,
    logits,
    oracle,
    oracle_logits,
    permute,
    save,
    spec,
    write_gguf,
)

from closeness import assert_close
from oracle.kernels import ReferenceKernels
from packing import batch, chain
from quantised_cases import raw_rows
from wager.arch import ModelSpec, Precision, Rope, gguf_precision, read_gguf
from wager.arch.gguf_config import GGUF_NAMES
from wager.errors import ModelError
from wager.kernels.arrays import BFLOAT16, FLOAT32, Array
from wager.kernels.blocks import QuantisedMatrix
from wager.kernels.cpu import select
from wager.models import hub
from wager.models.gguf import GgufFile, GgufType
from wager.models.transformer import Decoder
from wager.models.weights import NAMES, Matrices, Weights, open_weights, source_name, tensor_shapes

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2vl": "Qwen2ForCausalLM",
    "qwen3vl": "Qwen3ForCausalLM",
}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


def make(
    tmp_path: Path,
    name: str,
    *,
    kinds: dict[str, Kind] | None = None,
    metadata: dict[str, Any] | None = None,
    replaced: dict[str, tuple[np.ndarray, Kind]] | None = None,
    part_of: int = 0,
    **config: Any,
) -> tuple[Any, ModelSpec, Path]:
    """A random model, its spec, and the GGUF file llama.cpp's converter would make of it, with changes to its metadata
    (None removes a key) and tensors; the first of its parts with `part_of` tensors in each."""
    model = oracle(ARCHITECTURES[name], **config)
    spec = open_weights(save(model, tmp_path / "hf")).spec
    tensors = as_gguf(model, spec, kinds or {}, permuted=name == "llama") | (replaced or {})
    written = {
        key: value for key, value in {**gguf_metadata(spec, name), **(metadata or {})}.items() if value is not None
    }
    return model, spec, write_gguf(tmp_path / "model.gguf", name, written, tensors, part_of=part_of)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        *((name, {"tie_word_embeddings": tied}) for tied in (True, False) for name in ARCHITECTURES),
    ],
)
def test_logits_agree_with_transformers(name: str, config: dict[str, bool], tmp_path: Path) -> None:
    sections = {"rope.dimension_sections": [2, 1, 1, 0]} if name.endswith("vl") else {}
    model, spec, path = make(tmp_path, name, metadata=sections, **config)
    weights = open_weights(path)
    assert weights.spec.tied == spec.tied
    assert weights.spec.details.qkv_bias == spec.details.qkv_bias
    assert weights.spec.details.output_bias == ("mlp_bias" in config)
    assert_close(logits(weights, TOKENS), oracle_logits(model, TOKENS), atol=1e-4, rtol=1e-4)


GEMMA_CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 30.0}
GRANITE_SCALES = {"embedding_scale": 3.0, "residual_scale": 0.4, "attention.scale": 0.2, "logit_scale": 1.5}
SSM = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 32,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 96,
}
GEMMA4 = {
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "attention.sliding_window": 7,
    "attention.shared_kv_layers": 0,
    "embedding_length_per_layer_input": 0,
    "rope.dimension_count": 32,
    "rope.dimension_count_swa": 16,
    "rope.freq_base": 1000000.0,
    "rope.freq_base_swa": 10000.0,
    "final_logit_softcapping": 30.0,
}
UNTURNED = {"rope_freqs.weight": (np.array([1.0] * 4 + [1e30] * 12, np.float32), Kind.F32)}
LONG_TENSORS = {
    f"rope_factors_{name}.weight": (np.array(LONGROPE[f"{name}_factor"], np.float32), Kind.F32)
    for name in ("short", "long")
}

NEMOTRON_MOE = {
    **SSM,
    "attention.head_count_kv": [0, 0, 2, 0, 0],
    "feed_forward_length": [0, 40, 0, 0, 40],
    "expert_count": 6,
    "expert_used_count": 3,
    "expert_feed_forward_length": 40,
    "expert_shared_feed_forward_length": 56,
    "expert_shared_count": 1,
    "expert_weights_scale": 1.7,
    "expert_group_count": 1,
    "rope.dimension_count": 8,
    "rope.scaling.finetuned": False,
}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, tuple[np.ndarray, Kind]]]] = {
    "gemma 3": ("gemma3", {"attention.sliding_window": 7, "attention.sliding_window_pattern": 3}, {}),
    "gemma 3 scaled": (
        "gemma3",
        {
            "attention.sliding_window": 7,
            "attention.sliding_window_pattern": 3,
            "rope.freq_base_swa": 70.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 3.0,
            "final_logit_softcapping": 7.0,
        },
        {},
    ),
    "gemma 4": (
        "gemma4",
        {**GEMMA4, "attention.head_count_kv": [2, 1, 2, 1], "attention.sliding_window_pattern": [True, False] * 2},
        UNTURNED,
    ),
    "gemma 4, embeddings by layer": (
        "gemma4",
        {
            **GEMMA4,
            "attention.sliding_window_pattern": [True, False] * 3,
            "attention.shared_kv_layers": 3,
            "feed_forward_length": [80] * 3 + [160] * 3,
            "embedding_length_per_layer_input": 16,
        },
        UNTURNED,
    ),
    "gemma 4, experts": (
        "gemma4",
        {
            **GEMMA4,
            "attention.head_count_kv": [2, 3, 2, 3],
            "attention.sliding_window_pattern": [True, False] * 2,
            "expert_count": 6,
            "expert_used_count": 3,
            "feed_forward_length": 80,
            "expert_feed_forward_length": 16,
        },
        UNTURNED,
    ),
    "gemma 2": ("gemma2", {"attention.sliding_window": 7, **GEMMA_CAPS}, {}),
    "phi 3": ("phi3", {"attention.sliding_window": 9}, {}),
    "phi 4 mini": (
        "phi3",
        {
            "attention.sliding_window": 0,
            "rope.dimension_count": 6,
            "rope.scaling.original_context_length": 48,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(2) / math.log(48)),
        },
        LONG_TENSORS,
    ),
    "granite": ("granite", GRANITE_SCALES, {}),
    "granite 4": ("granite", {**GRANITE_SCALES, "feed_forward_length": 72}, {}),
    "smollm3": ("smollm3", {}, {}),
    "olmo 2": ("olmo2", {}, {}),
    "olmo 3": (
        "olmo2",
        {
            "attention.sliding_window": 7,
            "attention.sliding_window_pattern": [True, True, True, False],
            "rope.freq_base_swa": 500000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 24,
        },
        {},
    ),
    "qwen3.5": (
        "qwen35",
        {
            "rope.dimension_count": 4,
            "full_attention_interval": 2,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 16,
            "ssm.group_count": 2,
            "ssm.time_step_rank": 4,
            "ssm.inner_size": 128,
        },
        {},
    ),
    "granite 4 hybrid": (
        "granitehybrid",
        {
            **GRANITE_SCALES,
            "feed_forward_length": 72,
            "attention.head_count_kv": [0, 2, 0],
            "rope.scaling.finetuned": False,
            **SSM,
        },
        {},
    ),
    "falcon h1": ("falcon-h1", SSM, {}),
    "falcon h1, norm behind the gate": ("falcon-h1", SSM, {}),
    "nemotron h": (
        "nemotron_h",
        {
            **SSM,
            "attention.head_count_kv": [0, 0, 2, 0, 0],
            "feed_forward_length": [0, 80, 0, 0, 80],
            "rope.dimension_count": 8,
            "rope.scaling.finetuned": False,
        },
        {},
    ),
    "nemotron h, experts": ("nemotron_h_moe", {**NEMOTRON_MOE, "expert_weights_norm": True}, {}),
    "nemotron h, experts of latents in groups": (
        "nemotron_h_moe",
        {
            **NEMOTRON_MOE,
            "expert_weights_norm": False,
            "expert_count": 8,
            "expert_group_count": 2,
            "moe_latent_size": 32,
        },
        {},
    ),
    "lfm2": (
        "lfm2",
        {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2, 0], "feed_forward_length": 56},
        {},
    ),
    "glm": ("chatglm", {"rope.dimension_count": 8}, {}),
    "glm 4": ("glm4", {"rope.dimension_count": 8}, {}),
}
"""A case of test_models_families -> its architecture, and the keys and tensors that its converter writes besides."""

UNLIKE: dict[str, dict[str, Any]] = {"smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 4}}
"""Configurations that GGUF files of the family cannot leave."""


@pytest.mark.parametrize("case", FAMILIES)
def test_families_agree_with_transformers(case: str, tmp_path: Path) -> None:
    architecture, metadata, extra = FAMILIES[case]
    class_, config = CASES[case]
    changed = {"query_pre_attn_scalar": 16} if architecture in ("gemma2", "gemma3") else UNLIKE.get(case, {})
    model = oracle(class_, **{**config, **changed})
    hf = open_weights(save(model, tmp_path / "hf")).spec
    tensors = {**converted(model, architecture), **extra}
    path = write_gguf(tmp_path / "m.gguf", architecture, {**gguf_metadata(hf, architecture), **metadata}, tensors)
    weights = open_weights(path)
    found, expected = logits(weights, TOKENS), oracle_logits(model, TOKENS)
    assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert np.array_equal(found.argmax(axis=1), expected.argmax(axis=1))
    if weights.spec.recurrent is None:  # whose heads lie in another order
        assert weights.spec.ordered_layers == hf.ordered_layers


def test_a_window_that_the_family_has_on_some_layers_is_refused(tmp_path: Path) -> None:
    """On which, a file does not say."""
    _, _, path = make(tmp_path, "qwen2", metadata={"attention.sliding_window": 7})
    with pytest.raises(ModelError, match="sliding window of 7"):
        open_weights(path)


@pytest.mark.parametrize("scaling", [LLAMA3, LINEAR, YARN], ids=lambda scaling: scaling["rope_type"])
def test_rope_scaling_in_a_file(scaling: dict[str, Any], tmp_path: Path) -> None:
    model = oracle("LlamaForCausalLM", rope_parameters=dict(scaling))
    spec = open_weights(save(model, tmp_path / "hf")).spec
    metadata, tensors = gguf_metadata(spec, "llama"), as_gguf(model, spec, {}, permuted=True)
    if scaling["rope_type"] == "llama3":
        plain = 500.0 ** (-np.arange(0, spec.attention.head_dim, 2) / spec.attention.head_dim)
        factors = plain / model.model.rotary_emb.inv_freq.numpy()
        tensors["rope_freqs.weight"] = (factors.astype(np.float32), Kind.F32)
    else:
        metadata |= {"rope.scaling.type": scaling["rope_type"], "rope.scaling.factor": scaling["factor"]}
        if "original_max_position_embeddings" in scaling:
            metadata["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata, tensors)
    assert_close(logits(open_weights(path), TOKENS), oracle_logits(model, TOKENS), atol=1e-4, rtol=1e-4)


def rounded_to(model: Any, spec: ModelSpec, kinds: dict[str, Kind], *, permuted: bool) -> None:
    """Replace the model's weights by the values of their quantised form, undoing the permutation by hand."""
    state = model.state_dict()
    for name, (values, kind) in as_gguf(model, spec, kinds, permuted=permuted).items():
        rounded = gguf.quants.dequantize(gguf.quants.quantize(values.astype(np.float32), kind), kind)
        canonical = next(n for n in tensor_shapes(spec) if source_name(GGUF_NAMES, n) == name)
        if permuted and canonical.split(".")[-2] in ("q", "k"):
            heads = spec.attention.heads if ".q." in canonical else spec.attention.kv_heads
            order = permute(np.arange(len(rounded)), heads)
            rounded = rounded[np.argsort(order)]
        state[source_name(NAMES, canonical)].copy_(torch.from_numpy(np.array(rounded)))


@pytest.mark.parametrize("arch", [gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.QWEN2, gguf.MODEL_ARCH.QWEN3])
def test_tensor_names_are_those_of_the_gguf_library(arch: gguf.MODEL_ARCH) -> None:
    library = gguf.get_tensor_name_map(arch, 2)
    parts = ("embed", "head", "q", "k", "v", "o", "gate", "up", "down")
    assert {part: library.get_name(NAMES[part].format(1)) for part in parts} == {
        part: GGUF_NAMES[part].format(1) for part in parts
    }
    for part in ("norm", "attn_norm", "mlp_norm", *(("q_norm", "k_norm") if arch == gguf.MODEL_ARCH.QWEN3 else ())):
        assert library.get_name(NAMES[part].format(1)) == GGUF_NAMES[part].format(1)


def test_tensors_larger_than_a_chunk_are_read_completely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(size=(37, 96)).astype(np.float32)
    kinds = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1)
    file = GgufFile(write_gguf(tmp_path / "t.gguf", "llama", {}, {kind.name: (values, kind) for kind in kinds}))
    monkeypatch.setattr("wager.models.gguf._CHUNK", 500)
    for kind in kinds:
        expected = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        assert np.array_equal(file.read(kind.name, FLOAT32), expected)
        assert np.array_equal(file.read(kind.name, BFLOAT16), expected.astype(BFLOAT16))


@pytest.mark.parametrize(
    ("content", "named"),
    [(b"", "cannot be read"), (b"PK\3\4 something else", "not a GGUF"), (b"GGUF\1\0\0\0" + bytes(16), "version 1")],
)
def test_a_file_that_is_not_gguf_is_named(content: bytes, named: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=named):
        open_weights(path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attention.head_count": None}, "llama.attention.head_count"),
        ({"attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon"),
        ({"expert_count": 8}, "expert_used_count"),
        ({"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ({"attention.value_length": 4}, "value_length"),
        ({"rope.dimension_count": 4}, "rope.dimension_count"),
        ({"rope.scaling.type": "longrope"}, "longrope"),
        ({"attention.head_count_kv": [2, 1, 2]}, "differs from layer to layer"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"feed_forward_length": 79}, r"blk.0.ffn_gate.weight .* \[80, 48\].* \[79, 48\]"),
        ({"block_count": 4}, "lacks the tensor blk.3.attn_norm.weight"),
        ({"block_count": 2**32 - 1}, "number of layers"),
    ],
)
def test_unsupported_values_are_refused_by_name(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    _, _, path = make(tmp_path, "llama", metadata=change)
    with pytest.raises(ModelError, match=named):
        open_weights(path)


def test_norms_of_a_family_that_has_none_are_refused(tmp_path: Path) -> None:
    norms = {
        f"blk.{layer}.attn_{part}_norm.weight": (np.ones(8, np.float32), Kind.F32)
        for layer in range(3)
        for part in "qk"
    }
    with pytest.raises(ModelError, match=r"has a tensor blk\.\d\.attn_[qk]_norm\.weight that llama does not use"):
        open_weights(make(tmp_path, "llama", replaced=norms)[2])


def test_the_parts_of_a_split_file_are_one(tmp_path: Path) -> None:
    whole = make(tmp_path, "llama")[2]
    expected = logits(open_weights(whole), TOKENS)
    folder = tmp_path / "parts"
    folder.mkdir()
    make(folder, "llama", part_of=11)
    parts = sorted(folder.glob("*.gguf"))
    assert [part.name for part in parts] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for part in parts:
        assert np.array_equal(logits(open_weights(part), TOKENS), expected)
    assert hub.find(str(folder)) == parts[0]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda one, two, three: two.unlink(), r"model-00002-of-00003\.gguf is missing in"),
        (lambda one, two, three: one.unlink(), r"model-00001-of-00003\.gguf is missing in"),
        (lambda one, two, three: two.write_bytes(three.read_bytes()), "says that it is part 3 of 3"),
        (lambda one, two, three: three.rename(three.with_name("m-00001-of-00002.gguf")), "00003-of-00003.gguf is miss"),
        (lambda one, two, three: two.write_bytes(two.read_bytes()[:-4000]), "model-00002-of-00003.gguf is truncated"),
    ],
)
def test_parts_that_do_not_belong_together_are_named(change: Any, named: str, tmp_path: Path) -> None:
    make(tmp_path, "llama", part_of=11)
    parts = sorted(tmp_path.glob("*.gguf"))
    change(*parts)
    for part in parts:
        if part.exists():
            with pytest.raises(ModelError, match=named):
                open_weights(part)


def test_attention_factors_of_a_file_multiply() -> None:
    """llama.cpp scales by attn_factor with any scaling type, and by YaRN's own magnitude besides."""
    model_spec = spec()
    metadata = {f"llama.{key}": value for key, value in gguf_metadata(model_spec, "llama").items()}
    metadata |= {"general.architecture": "llama", "llama.rope.scaling.attn_factor": 1.5}
    assert read_gguf(metadata, {}).details.rope == Rope(10000.0, (), 1.5)
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    assert read_gguf(metadata | yarn, {}).details.rope.magnitude == pytest.approx(1.5 * (0.1 * math.log(4) + 1))


def test_plan_counts_the_types_of_the_tensors(tmp_path: Path) -> None:
    """Part by part the file's own bytes; the engine's spec, which states what it computes in, stays bf16."""
    kinds = {"v": Kind.Q8_0, "q": Kind.Q4_0, "gate": Kind.Q4_0, "up": Kind.Q4_0, "down": Kind.Q4_0, "head": Kind.Q8_0}
    _, spec, path = make(tmp_path, "llama", kinds=kinds, tie_word_embeddings=False, **SIZES)
    file = GgufFile(path)
    found = gguf_precision(file.sizes)
    assert open_weights(path).spec.precision == Precision.of("bf16")
    assert (found.weights.name, found.weights.compute, found.weights.bytes) == ("q4_0", "int8", 18 / 32)
    assert (found.head.name, found.head.bytes, found.state) == ("q8_0", 34 / 32, 4)
    model = replace(spec, precision=found)
    matrices = sum(stored.size for name, stored in file.tensors.items() if len(stored.shape) == 2)
    assert model.resident_bytes == pytest.approx(matrices)
    assert "q4_0" in found.projections.name and "q8_0" in found.projections.name


def test_our_table_of_types_is_the_librarys() -> None:
    ours = {kind.name: (int(kind), (kind.elements, kind.size)) for kind in GgufType}
    theirs = {kind.name: (int(kind), GGML_QUANT_SIZES[kind]) for kind in Kind}
    both = ours.keys() & theirs.keys()
    assert {name: ours[name] for name in both} == {name: theirs[name] for name in both}
    assert set(ours) >= {name for name, (code, _) in theirs.items() if code <= max(code for code, _ in ours.values())}


# ---- the form in which matrices are multiplied, by dtype and by the types of a file ----


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


@pytest.mark.parametrize(("name", "up"), [("llama", Kind.Q4_1), ("qwen3", Kind.Q8_0)])
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
        (Kind.Q4_0, "q8", "q4_0"),
        (Kind.F16, "auto", None),
        (Kind.F16, "q4", "q4_1"),
        (Kind.Q8_0, "q4", "q4_1"),
        (Kind.Q5_0, "q8", "q5_0"),
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
    assert matrices.converted == {"NVFP4": "q8_0 (rounded)"}
    assert matrices.description == "bfloat16 x21 + iq4_nl x1 + q8_0 x1"
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
