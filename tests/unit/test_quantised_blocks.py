"""Block formats against gguf's own dequantiser, conversions of other types, and quantising."""

from __future__ import annotations

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from quantised_cases import HALVES, matrix, raw_rows
from wager.errors import ModelError
from wager.kernels.blocks import BLOCK_FORMATS, CODEBOOKS, QuantisedMatrix, quantise, stack
from wager.models.gguf import GgufType, convert_blocks, stored_as

FORMATS = [name for name in BLOCK_FORMATS if name.upper() in Kind.__members__ and name not in CODEBOOKS]
OTHERS = [
    kind
    for kind, (inputs, _) in gguf.GGML_QUANT_SIZES.items()
    if inputs > 1 and kind.name.lower() not in FORMATS and kind not in (Kind.Q8_1, Kind.Q8_K, Kind.Q1_0)
]


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.int32)


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_of_the_gguf_library_bit_for_bit(name: str) -> None:
    known = BLOCK_FORMATS[name]
    assert gguf.GGML_QUANT_SIZES[Kind[name.upper()]] == (known.inputs, known.bytes)
    assert HALVES.get(Kind[name.upper()], ()) == known.fields
    found = matrix(name, 37, 768)
    expected = gguf.quants.dequantize(found.data, Kind[name.upper()])
    assert expected.std() > 1e-3
    assert np.array_equal(bits(found.dequantise()), bits(expected))
    assert np.array_equal(found.dequantise(ml_dtypes.bfloat16), expected.astype(ml_dtypes.bfloat16))
    assert (found.shape, found.data.nbytes) == ((37, 768), 37 * 768 // known.inputs * known.bytes)
    order = np.array([3, 0, 8, 3])
    assert np.array_equal(bits(found.take(order).dequantise()), bits(expected[order]))
    again = stack([found.take(slice(0, 4)), found.take(slice(4, 37))])
    assert np.array_equal(again.data, found.data) and again.k == 768
    with pytest.raises(ModelError, match="cannot be one"):
        stack([found, matrix("q8_0" if name != "q8_0" else "q4_0", 2, 768)])


@pytest.mark.parametrize("name", FORMATS)
def test_scales_that_are_not_finite_are_found(name: str) -> None:
    known = BLOCK_FORMATS[name]
    for at in known.fields:
        for bad in (np.nan, np.inf, -np.inf):
            found = matrix(name, 5, 512)
            assert found.is_finite()
            block = known.bytes + at  # of the second block of a row
            found.data[3, block : block + 2] = np.frombuffer(np.float16(bad).tobytes(), np.uint8)
            assert not found.is_finite()
            assert not np.isfinite(found.dequantise()[3]).all()


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.name)
def test_other_types_are_converted(kind: Kind) -> None:
    """Exactly where the table says so; else as near as 8 bits are."""
    raw = raw_rows(kind, 23, 1024)
    expected = gguf.quants.dequantize(raw, kind)
    assert np.isfinite(expected).all() and expected.std() > 0
    found, known = convert_blocks(raw, GgufType(kind), 1024), stored_as(GgufType(kind))
    assert found.format.name == known.format
    if known.exact:
        assert np.array_equal(found.dequantise(), expected)
        assert found.is_finite() and np.array_equal(found.take([3, 1]).dequantise(), expected[[3, 1]])
    else:
        blocks, errors = expected.reshape(-1, 32), (found.dequantise() - expected).reshape(-1, 32)
        assert (np.abs(errors) <= np.abs(blocks).max(axis=1, keepdims=True) * 0.0042).all()
        assert np.abs(errors).max() > 0


def test_types_of_the_kernels_keep_their_bytes() -> None:
    raw = raw_rows(Kind.Q5_K, 3, 512)
    assert convert_blocks(raw, GgufType.Q5_K, 512).data is raw


@pytest.mark.parametrize("name", ["q4_z", "q4_z128"])
def test_a_weight_with_a_zero_is_scale_times_the_difference(name: str) -> None:
    found, known = matrix(name, 7, 256), BLOCK_FORMATS[name]
    blocks = found.data.reshape(7, -1, known.bytes)
    scales = np.ascontiguousarray(blocks[..., :2]).view("<f2").astype(np.float64)
    nibbles = blocks[..., 3:].reshape(7, -1, known.inputs // 32, 1, 16) >> np.array([[0], [4]], np.uint8) & 15
    differences = nibbles.reshape(7, -1, known.inputs) - blocks[..., 2:3].astype(np.float64)
    assert np.array_equal(found.dequantise(), (scales * differences).reshape(7, 256))


def test_exponents_of_mxfp4_that_float16_lacks() -> None:
    raw = raw_rows(Kind.MXFP4, 5, 32)
    raw[:, 0] = (0, 1, 103, 251, 255)
    with np.errstate(over="ignore"):
        expected, found = gguf.quants.dequantize(raw, Kind.MXFP4), convert_blocks(raw, GgufType.MXFP4, 32)
    assert np.array_equal(bits(found.dequantise()[:4]), bits(expected[:4])) and expected[0].any()
    assert not found.is_finite() and found.take([0, 1, 2, 3]).is_finite()
    assert not np.isfinite(found.dequantise()[4]).all()


def normal(n: int, k: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=(n, k)).astype(np.float32)


def error(x: np.ndarray, found: QuantisedMatrix) -> float:
    return float(np.linalg.norm(x - found.dequantise()) / np.linalg.norm(x))


@pytest.mark.parametrize(
    ("name", "most", "gain"), [("q8_0", 0.0055, 1.0), ("q4_0", 0.083, 0.96), ("q4_1", 0.075, 0.95)]
)
def test_quantising_is_at_least_as_near_as_ggml(name: str, most: float, gain: float) -> None:
    x, kind = normal(256, 768), Kind[name.upper()]
    plain = QuantisedMatrix(BLOCK_FORMATS[name], gguf.quants.quantize(x, kind), 768)
    assert error(x, quantise(x, name)) <= min(most, gain * error(x, plain))
    assert np.array_equal(
        quantise(x.astype(ml_dtypes.bfloat16), name).data,
        quantise(x.astype(ml_dtypes.bfloat16).astype(np.float32), name).data,
    )


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1"])
def test_quantising_in_parts_and_special_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(50, 96)
    whole = quantise(x, name)
    with monkeypatch.context() as small:
        small.setattr("wager.kernels.blocks._PART", 400)
        assert np.array_equal(quantise(x, name).data, whole.data)
    x = normal(6, 64)
    x[0] = 0
    x[1] = 0.25
    x[2, 5] = np.nan
    x[3, 40] = -np.inf
    x[4] = 1e-7
    x[5] *= 1e8
    found = quantise(x, name)
    assert not found.dequantise()[0].any()
    assert np.abs(found.dequantise()[1] - 0.25).max() <= 1e-3
    assert [found.take([row]).is_finite() for row in range(6)] == [True, True, False, False, True, True]
    assert np.isnan(found.dequantise()[2, :32]).all() and np.isfinite(found.dequantise()[2, 32:]).all()
    assert np.isfinite(found.dequantise()[5]).all()


def test_formats_and_sizes_that_cannot_be_are_refused() -> None:
    for k, message in ((33, "32 inputs a block"), (64, "are 36 bytes")):
        with pytest.raises(ModelError, match=message):
            QuantisedMatrix(BLOCK_FORMATS["q4_0"], np.zeros((2, 18), np.uint8), k)
    with pytest.raises(ModelError, match="q5_k"):
        quantise(normal(1, 256), "q5_k")
    with pytest.raises(ModelError, match="do not divide 40"):
        quantise(normal(1, 40), "q8_0")
