"""Quantised Hugging Face checkpoints: values bit for bit, the form that they are multiplied in, transformers' ids, and
what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file
from tiny_models import TOKENS, edit, logits, oracle, oracle_logits

from oracle import quantised_checkpoints as published
from oracle.quantised_checkpoints import Maker
from wager.arch.layers import Experts
from wager.errors import ModelError
from wager.kernels.arrays import BFLOAT16, FLOAT32
from wager.kernels.cpu import Kernels
from wager.models.quantised_checkpoints import QuantisedSource
from wager.models.safetensors_files import TensorBytes, write_tensors
from wager.models.transformer import Decoder, weight_bytes
from wager.models.weights import Matrices, open_weights

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
KINDS = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    BFLOAT16: "BF16",
    np.dtype(np.int8): "I8",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def compressed(layout: str, weights: Mapping[str, Any], active: Mapping[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": active}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


PACKED = compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128})
INT8 = compressed("int-quantized", {"num_bits": 8, "type": "int"}, {"num_bits": 8, "type": "int", "dynamic": True})
FLOAT8 = compressed("float-quantized", {"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "float"})
CASES: Mapping[str, tuple[Maker, Mapping[str, Any], str | None, bool]] = {
    "awq": (published.awq, AWQ, "q4_z128", True),
    "awq in groups of 64": (partial(published.awq, group=64), AWQ, "q4_z", True),
    "awq in groups of 32": (partial(published.awq, group=32), AWQ, "q4_z", True),
    "gptq": (published.gptq, GPTQ, "q4_0", True),
    "gptq v2": (
        partial(published.gptq, version=2, symmetric=False),
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        "q4_z128",
        True,
    ),
    "gptq asymmetric": (partial(published.gptq, symmetric=False, group=32), GPTQ, "q4_z", True),
    "gptq in act-order": (partial(published.gptq, act_order=True), {**GPTQ, "desc_act": True}, None, False),
    "gptq 8 bits": (partial(published.gptq, bits=8), {**GPTQ, "bits": 8}, "q8_0", True),
    "gptq 8 bits, asymmetric": (partial(published.gptq, bits=8, symmetric=False), {**GPTQ, "bits": 8}, None, False),
    "W4A16": (published.packed, PACKED, "q4_0", True),
    "W4A16, asymmetric": (partial(published.packed, symmetric=False, group=32), PACKED, "q4_z", True),
    "W8A8": (published.int8, INT8, "q8_0", True),
    "W8A8, scales in float32": (partial(published.int8, scale=np.float32), INT8, "q8_0", False),
    "fp8 of a tensor": (partial(published.fp8, kind="tensor"), {"quant_method": "fp8"}, "e4m3", True),
    "fp8 of outputs": (partial(published.fp8, kind="channel"), FLOAT8, "e4m3", True),
    "fp8 of blocks": (
        partial(published.fp8, kind="block"),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "e4m3_128",
        True,
    ),
    "fp8 of blocks of 64 inputs": (
        partial(published.fp8, kind="block", inputs=64),
        {"quant_method": "fp8", "weight_block_size": [128, 64]},
        None,
        False,
    ),
    "fp8 of blocks of 64 inputs, powers of two": (
        partial(published.fp8, kind="block", inputs=64, powers=True),
        {"quant_method": "fp8", "weight_block_size": [128, 64]},
        None,
        True,
    ),
}


def is_quantised(name: str) -> bool:
    return "_proj" in name or ".w1." in name or ".w2." in name or ".w3." in name


def write(path: Path, model: Any, maker: Maker, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A checkpoint of the model whose projections `maker` draws: they become the model's own. Their values by name."""
    rng, tensors, values = np.random.default_rng(3), {}, {}
    model.save_pretrained(path / "floats")
    stored = load_file(path / "floats" / "model.safetensors")
    for name, value in stored.items():
        if not is_quantised(name):
            tensors[name] = value
            continue
        parts, values[name] = maker(rng, *value.shape)
        tensors |= {f"{name.removesuffix('weight')}{end}": np.ascontiguousarray(part) for end, part in parts.items()}
    out = path / "quantised"
    out.mkdir()
    (out / "config.json").write_bytes((path / "floats" / "config.json").read_bytes())
    edit(out / "config.json", quantization_config=dict(config))
    write_tensors(
        out / "model.safetensors",
        {name: TensorBytes(KINDS[each.dtype], each.shape, each.tobytes()) for name, each in tensors.items()},
    )
    state = {name: torch.tensor(value) for name, value in {**stored, **values}.items()}
    save_file(state, path / "floats" / "model.safetensors", metadata={"format": "pt"})
    same = type(model).from_pretrained(path / "floats", attn_implementation="eager", dtype=torch.float32)
    model.load_state_dict(same.state_dict())
    return values


@pytest.mark.parametrize("case", CASES)
def test_values_are_the_published_ones_and_ids_those_of_transformers(case: str, tmp_path: Path) -> None:
    maker, config, form, exact = CASES[case]
    model = oracle("LlamaForCausalLM", **SHAPE)
    values = write(tmp_path, model, maker, config)
    weights = open_weights(tmp_path / "quantised")
    matrices = Matrices(weights, "auto")
    assert len(values) == 7
    narrow = form == "e4m3_128"
    wide = case == "gptq in act-order"
    for name, value in values.items():
        ours = f"layers.0.{name.split('.')[-2].removesuffix('_proj')}.weight"
        assert np.array_equal(weights.read(ours, FLOAT32), value), name
        stored = weights.stored(ours)
        if wide:  # inputs of 256 have two groups, those of 128 one, whose order says nothing
            form, exact = (None, False) if value.shape[1] == 256 else ("q4_0", True)
        if narrow:  # inputs of 128 have one block, whose scale is that of the output
            form = "e4m3_128" if value.shape[1] == 256 else "e4m3"
        assert (stored.format, stored.exact) == (form, exact), stored
        assert matrices.formats[ours] == form
        found = matrices.read(ours)
        if form is None:
            assert np.array_equal(found, value.astype(BFLOAT16))
            assert not exact or np.array_equal(found.astype(np.float32), value)
        else:
            error = np.abs(found.dequantise() - value)
            assert not error.any() if exact else (error <= np.abs(value) / 2048).all() and error.any()
    said = f"{form or 'bfloat16'}{'' if exact else ' (rounded)'}"
    assert set(matrices.converted.values()) == (
        {said, "bfloat16 (rounded)"} if wide else {"e4m3", "e4m3_128"} if narrow else {said}
    )
    ours, theirs = logits(weights, TOKENS[:24]), oracle_logits(model, TOKENS[:24])
    assert np.abs(ours - theirs).max() < 1e-3
    assert np.array_equal(ours.argmax(axis=1), theirs.argmax(axis=1))


@pytest.mark.parametrize(
    ("maker", "config"),
    [
        (partial(published.awq, group=64), AWQ),
        (partial(published.gptq, group=64), GPTQ),
        (partial(published.packed, group=64), PACKED),
        (published.int8, INT8),
        (partial(published.fp8, kind="block"), {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    ],
)
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        (
            "Qwen3MoeForCausalLM",
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1},
        ),
    ],
)
def test_experts_are_read_in_every_method(
    architecture: str, options: dict[str, Any], maker: Maker, config: dict[str, Any], tmp_path: Path
) -> None:
    model = oracle(architecture, **{**SHAPE, "intermediate_size": 64, **options})
    values = write(tmp_path, model, maker, config)
    weights = open_weights(tmp_path / "quantised")
    assert isinstance(weights.spec.experts, Experts) and sum("experts" in name for name in values) == 12
    ours, theirs = logits(weights, TOKENS[:24]), oracle_logits(model, TOKENS[:24])
    assert np.array_equal(ours.argmax(axis=1), theirs.argmax(axis=1))
    decoder = Decoder(weights, Kernels(), num_blocks=4, max_rows=4, max_sequences=1, max_blocks=4)
    assert decoder.weight_form == Matrices(weights, "auto").description


def small(path: Path, maker: Maker, config: Mapping[str, Any]) -> Path:
    write(path, oracle("LlamaForCausalLM", **SHAPE), maker, config)
    return path / "quantised"


@pytest.mark.parametrize(
    ("maker", "config", "named"),
    [
        (published.awq, {**AWQ, "version": "gemv"}, "gemv"),
        (published.gptq, {**GPTQ, "checkpoint_format": "marlin"}, "marlin"),
        (published.packed, {**PACKED, "format": "nvfp4-pack-quantized"}, "nvfp4"),
        (published.packed, {**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        (published.packed, {**PACKED, "transform_config": {"R1": {}}}, "rotated"),
        (published.int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
        (published.gptq, {**GPTQ, "quant_method": "quip"}, "quip"),
    ],
)
def test_layouts_that_are_not_read_are_refused_by_name(
    maker: Maker, config: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = small(tmp_path, maker, config)
    with pytest.raises(ModelError, match=named):
        open_weights(path)


@pytest.mark.slow
def test_tensors_that_do_not_agree_are_refused(tmp_path: Path) -> None:
    path = small(tmp_path, published.awq, AWQ) / "model.safetensors"
    whole = path.read_bytes()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    data = whole[8 + int.from_bytes(whole[:8], "little") :]
    del header["__metadata__"]
    tensors = {
        name: TensorBytes(item["dtype"], tuple(item["shape"]), data[slice(*item["data_offsets"])])
        for name, item in header.items()
    }
    base = "model.layers.0.mlp.down_proj."
    scales = tensors[base + "scales"]
    for change, message in (
        ({base + "scales": None}, "no scales"),
        ({base + "qzeros": None}, "no qzeros"),
        ({base + "scales": TensorBytes("F16", (1, 128), scales.data[:256])}, "zero points"),
        ({base + "scales": TensorBytes("F16", (2, 128), b"\xff\x7f" * 256)}, "finite"),
        ({base + "qweight": TensorBytes("F32", (256, 16), bytes(256 * 64))}, "float32"),
        ({base + "qzeros": TensorBytes("I32", (1, 16), bytes(64))}, "zero points"),
        ({base + "qweight": TensorBytes("I32", (256, 0), b"")}, "qweight of type int32"),
    ):
        changed = {name: each for name, each in {**tensors, **change}.items() if each is not None}
        write_tensors(path, changed)
        with pytest.raises(ModelError, match=message):
            open_weights(path.parent)


@pytest.mark.slow
def test_biases_that_are_zero_are_left_out_and_others_refused(tmp_path: Path) -> None:
    def biased(rng: Any, n: int, k: int) -> Any:
        tensors, values = published.gptq(rng, n, k)
        return {**tensors, "bias": np.ones(n, np.float16)}, values

    with pytest.raises(ModelError, match="bias"):
        open_weights(small(tmp_path, biased, GPTQ))


@pytest.mark.slow
def test_the_memory_of_a_checkpoint_is_known_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index, case in enumerate(("awq", "gptq", "W8A8", "fp8 of blocks")):
        maker, config, _, _ = CASES[case]
        folder = tmp_path / str(index)
        folder.mkdir()
        path = small(folder, maker, config)
        with monkeypatch.context() as closed:
            for name in ("read", "read_blocks"):
                closed.setattr(QuantisedSource, name, None)
            planned = weight_bytes(Matrices(open_weights(path), "auto"), Kernels())
        decoder = Decoder(open_weights(path), Kernels(), num_blocks=4, max_rows=4, max_sequences=1, max_blocks=4)
        assert decoder.weight_bytes == planned
