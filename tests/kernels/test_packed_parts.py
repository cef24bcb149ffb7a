"""Packed weights in parts and together again: the same bytes and products; the bytes of every format are pinned."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from cases import chain_inputs, run_chain

from quantised_cases import matrix
from wager.kernels.arrays import BFLOAT16, Array, WeightParts
from wager.kernels.blocks import BLOCK_FORMATS, Matrix, quantise
from wager.kernels.cpu import Kernels

DIGESTS = {
    (4, "bf16"): "062c36c46b71ddaf",
    (4, "q8_0"): "974afe12cdcfcdd7",
    (4, "q4_0"): "a1633c2adf5d6f21",
    (4, "q4_1"): "7d297af6aa354ceb",
    (4, "q5_0"): "d8274d807caee218",
    (4, "q5_1"): "676f9e3f9b5909bd",
    (4, "q4_k"): "d7e5b3944cd95ef8",
    (4, "q5_k"): "692dfd9ffe6ab72f",
    (4, "q6_k"): "c01198c6c0f8ed46",
    (4, "q2_k"): "9ce6160235729d4e",
    (4, "q3_k"): "0ef28254aebcf1b6",
    (4, "iq4_nl"): "bb10ba629767b460",
    (4, "iq4_xs"): "aeb685bea3a77de6",
    (4, "iq3_s"): "da3855cdece44502",
    (4, "iq3_xxs"): "dc9b1c58243ad1a7",
    (4, "iq2_s"): "4282c502ba21ba13",
    (4, "iq2_xxs"): "4ee75dbbab4f1366",
    (4, "iq1"): "122ec1dd64bc36be",
    (4, "q4_z"): "c3424d310fd18654",
    (4, "q4_z128"): "5f2cef28642d2bec",
    (4, "mxfp4"): "75b9de05e24d4397",
    (4, "e4m3"): "182ac84e9cffbe17",
    (4, "e4m3_128"): "8412d3483f08241f",
}
"""Of all the packed bytes of `weights` in each format, under the layout version that they belong to. Where they change,
raise kWeightLayoutVersion in csrc/weight_layout.h: stored files of packed weights would be read with other values."""


def given(name: str, n: int, k: int, seed: int = 0) -> Matrix:
    if name != "bf16":
        return matrix(name, n, k, seed)
    return np.random.default_rng(seed).standard_normal((n, k), np.float32).astype(BFLOAT16)


@pytest.fixture(scope="module")
def kernels() -> Any:
    return Kernels()


def copied(parts: WeightParts) -> WeightParts:
    """With arrays elsewhere that cannot be written, as those of a mapped file."""
    arrays = [array.copy() for array in parts.arrays]
    for array in arrays:
        array.flags.writeable = False
    return WeightParts(dict(parts.fields), tuple(arrays))


def weights(kernels: Any, name: str) -> dict[str, Any]:
    bias = np.arange(70, dtype=np.float32)
    experts = [(given(name, 256, 256, i), given(name, 256, 256, i + 9), given(name, 256, 256, i + 5)) for i in range(3)]
    floats = given("bf16", 70, 512)
    return {
        "matrix": kernels.pack(given(name, 70, 512)),
        "bias": kernels.pack(given(name, 70, 512), bias),
        "gated": kernels.pack_gated(given(name, 70, 512, 1), given(name, 70, 512, 2), bias=(bias, -bias)),
        "heads": kernels.pack_heads([given(name, 24, 256, i) for i in range(3)]),
        "experts": kernels.pack_experts(iter(experts), count=3),
        "quantised": kernels.pack(quantise(floats, name) if name in ("q8_0", "q4_0", "q4_1") else floats),
    }


@pytest.mark.parametrize("name", ["bf16", *BLOCK_FORMATS])
def test_parts_have_the_bytes_of_the_layout_version_and_are_put_together_again(kernels: Any, name: str) -> None:
    digests = ""
    for what, weight in weights(kernels, name).items():
        parts = kernels.dismantle(weight)
        digests += hashlib.sha256(b"".join(array.tobytes() for array in parts.arrays)).hexdigest()[:16]
        again = kernels.assemble(copied(parts))
        assert kernels.dismantle(again).fields == parts.fields, what
        assert [array.tobytes() for array in kernels.dismantle(again).arrays] == [a.tobytes() for a in parts.arrays]
    assert DIGESTS[kernels.weight_layout, name] == hashlib.sha256(digests.encode()).hexdigest()[:16]
    x = np.random.default_rng(3).standard_normal((5, 512), np.float32).astype(BFLOAT16)

    def product(weight: Any) -> Array:
        tape = kernels.tape(max_rows=5, max_sequences=1, max_blocks=4)
        out = np.zeros((5, 70), np.float32)
        chain_inputs(tape)
        tape.linear(x, weight, out)
        run_chain(tape, 5)
        return out

    weight = kernels.pack(given(name, 70, 512), np.arange(70, dtype=np.float32))
    mapped, found = (product(each) for each in (kernels.assemble(copied(kernels.dismantle(weight))), weight))
    assert mapped.tobytes() == found.tobytes() and mapped.any()


def test_biases_of_experts_are_kept(kernels: Any) -> None:
    parts = [(given("q8_0", 40, 64, i), given("q8_0", 40, 64, i + 9), given("bf16", 64, 40, i)) for i in range(3)]
    biases = [tuple(np.arange(n, dtype=np.float32) + i for n in (40, 40, 64)) for i in range(3)]
    weight = kernels.pack_experts(iter(parts), count=3, biases=biases)
    again = kernels.assemble(copied(kernels.dismantle(weight)))
    assert np.array_equal(again.into_bias, weight.into_bias) and np.array_equal(again.down_bias, weight.down_bias)
    assert weight.into_bias.shape == (3, 96) and weight.into_bias[2, 16:20].tolist() == [2, 3, 4, 5]
    alone = kernels.pack_experts(((None, up, down) for _, up, down in parts), count=3)
    kept = kernels.assemble(copied(kernels.dismantle(alone)))
    assert not kept.gated and kept.into_bias is None
    fields, arrays = kernels.dismantle(weight).fields, kernels.dismantle(weight).arrays
    with pytest.raises(ValueError, match="parts of"):
        kernels.assemble(WeightParts(fields, (*arrays[:3], arrays[3][:-4])))


def test_parts_that_do_not_agree_are_refused(kernels: Any) -> None:
    parts = kernels.dismantle(kernels.pack(given("q4_1", 70, 512), np.arange(70, dtype=np.float32)))
    kernels.assemble(parts)
    first, second = parts.arrays
    others = {"k": 480}, {"panels": 4}, {"n": 170}, {"gated": True}, {"format": "q9_9"}
    kinds = {"kind": "heads"}, {"kind": "tail"}, {"colour": 3}
    wrong = [({**parts.fields, **change}, parts.arrays) for change in (*others, *kinds)]
    wrong += [({}, parts.arrays)]
    wrong += [(parts.fields, arrays) for arrays in ((), (first[:-1], second), (first, second[:-4]))]
    for fields, arrays in wrong:
        with pytest.raises((ValueError, KeyError, TypeError)):
            kernels.assemble(WeightParts(fields, arrays))
