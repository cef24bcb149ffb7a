"""Packed weights in parts and together again: the same bytes and products; the bytes of every format are pinned."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import chain_inputs, run_chain

from quantised_cases import matrix
from wager.kernels.arrays import BFLOAT16, Array, WeightParts
from wager.kernels.blocks import BLOCK_FORMATS, Matrix, quantise

cpu = pytest.importorskip("wager.kernels.cpu")

DIGESTS = {
    (1, "bf16"): "062c36c46b71ddaf",
    (1, "q8_0"): "974afe12cdcfcdd7",
    (1, "q4_0"): "a1633c2adf5d6f21",
    (1, "q4_1"): "7d297af6aa354ceb",
    (1, "q5_0"): "d8274d807caee218",
    (1, "q5_1"): "676f9e3f9b5909bd",
    (1, "q4_k"): "d7e5b3944cd95ef8",
    (1, "q5_k"): "692dfd9ffe6ab72f",
    (1, "q6_k"): "c01198c6c0f8ed46",
}
"""Of all the packed bytes of `weights` in each format, under the layout version that they belong to. Where they change,
raise kWeightLayoutVersion in csrc/weight_layout.h: stored files of packed weights would be read with other values."""


def given(name: str, n: int, k: int, seed: int = 0) -> Matrix:
    if name != "bf16":
        return matrix(name, n, k, seed)
    return np.random.default_rng(seed).standard_normal((n, k), np.float32).astype(BFLOAT16)


@pytest.fixture(scope="module")
def kernels() -> Any:
    return cpu.Kernels()


@pytest.fixture(params=["bf16", *BLOCK_FORMATS])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def digest(parts: WeightParts) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in parts.arrays)).hexdigest()[:16]


def copied(parts: WeightParts) -> WeightParts:
    """With arrays elsewhere that cannot be written, as those of a mapped file."""
    arrays = [array.copy() for array in parts.arrays]
    for array in arrays:
        array.flags.writeable = False
    return WeightParts(dict(parts.fields), tuple(arrays))


def test_packed_bytes_are_those_of_the_layout_version(kernels: Any, name: str) -> None:
    found = "".join(digest(kernels.dismantle(weight)) for weight in weights(kernels, name).values())
    assert DIGESTS[kernels.weight_layout, name] == hashlib.sha256(found.encode()).hexdigest()[:16]


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


def test_what_is_put_together_again_has_the_same_fields_and_bytes(kernels: Any, name: str) -> None:
    for what, weight in weights(kernels, name).items():
        parts = kernels.dismantle(weight)
        again = kernels.dismantle(kernels.assemble(copied(parts)))
        assert again.fields == parts.fields, what
        assert [array.tobytes() for array in again.arrays] == [array.tobytes() for array in parts.arrays], what
        assert kernels.assemble(copied(parts)).nbytes == weight.nbytes


def test_a_product_is_the_same(kernels: Any, name: str) -> None:
    x = np.random.default_rng(3).standard_normal((5, 512), np.float32).astype(BFLOAT16)

    def product(weight: Any) -> Array:
        tape = kernels.tape(max_rows=5, max_sequences=1, max_blocks=4, heads=1, kv_heads=1, head_dim=16)
        out = np.zeros((5, 70), np.float32)
        chain_inputs(tape)
        tape.linear(x, weight, out)
        run_chain(tape, 5)
        return out

    weight = kernels.pack(given(name, 70, 512), np.arange(70, dtype=np.float32))
    apart = copied(kernels.dismantle(weight))
    mapped = product(kernels.assemble(apart))
    assert mapped.tobytes() == product(weight).tobytes()
    assert np.abs(mapped).max() > 0


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: WeightParts({**parts.fields, "k": 480}, parts.arrays),
        lambda parts: WeightParts({**parts.fields, "panels": 4}, parts.arrays),
        lambda parts: WeightParts({**parts.fields, "n": 170}, parts.arrays),
        lambda parts: WeightParts({**parts.fields, "gated": True}, parts.arrays),
        lambda parts: WeightParts({**parts.fields, "format": "q9_9"}, parts.arrays),
        lambda parts: WeightParts({**parts.fields, "kind": "heads"}, parts.arrays),
        lambda parts: WeightParts({**parts.fields, "kind": "tail"}, parts.arrays),
        lambda parts: WeightParts({**parts.fields, "colour": 3}, parts.arrays),
        lambda parts: WeightParts({}, parts.arrays),
        lambda parts: WeightParts(parts.fields, ()),
        lambda parts: WeightParts(parts.fields, (parts.arrays[0][:-1], parts.arrays[1])),
        lambda parts: WeightParts(parts.fields, (parts.arrays[0], parts.arrays[1][:-4])),
    ],
)
def test_parts_that_do_not_agree_are_refused(kernels: Any, change: Callable[[WeightParts], WeightParts]) -> None:
    parts = kernels.dismantle(kernels.pack(given("q4_1", 70, 512), np.arange(70, dtype=np.float32)))
    kernels.assemble(parts)
    with pytest.raises((ValueError, KeyError, TypeError)):
        kernels.assemble(change(parts))
