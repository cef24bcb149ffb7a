"""Published shapes as numbers: parameters, streamed bytes, cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wager.arch import (
    TABLE,
    Compressed,
    DeltaNet,
    Experts,
    Gqa,
    Mla,
    ModelSpec,
    Precision,
    Quoted,
    find_model,
)
from wager.errors import UsageError
from wager.models.weights import num_parameters

BF16 = Precision.of("bf16")


MODELS = """
SmolLM2-135M      0.134515 0      0.1345 0.269    23040
Llama-3.1-8B      8.03     0      7.505  15.0    131072
Llama-3.2-1B      1.2358   0      1.2358 2.472    32768
Qwen3-0.6B        0.596    0      0.596  1.192   114688
Qwen3-8B          8.19     0      7.568  15.1    147456
Llama-3.1-70B     70.6     0      69.50  139     327680
Qwen3-30B-A3B     30.53    1.812  1.230  6.08     98304
Qwen3.6-35B-A3B   34.6     1.132  1.726  5.72     20480
gpt-oss-20b       20.91    2.389  1.218  3.70     24576
gpt-oss-120b      116.8    3.583  1.548  4.99     36864
Qwen3-235B-A22B   235.1    14.19  7.374  43.1    192512
Qwen3-235B-A22B-FP8 235.1  14.19  7.374  21.6    192512
DeepSeek-V3       671.0    22.99  13.64  36.6     70272
DeepSeek-V4-Flash 284.3    7.575  5.661  9.68   3850.25
Kimi-K2           1026.4   23.78  7.904  31.7     70272
Kimi-K2-Thinking  1026.4   21.14  10.55  33.0     70272
"""
"""Billions of parameters, of expert elements and of others that a token uses, of bytes that it streams; bytes that a
position caches beyond all windows. The releases of a name: Qwen3-235B-A22B in bf16 and -FP8, Kimi-K2-Instruct in fp8,
Kimi-K2-Thinking with int4 experts and a 16-bit scale for 32 of their elements, 0.5625 bytes each."""


def as_the_reference_counts(model: ModelSpec) -> ModelSpec:
    """The reference table stores router and head as the dense weights, and V4's shared experts as the routed ones."""
    stored = model.precision
    shared = stored.experts if model.name.startswith("DeepSeek-V4") else stored.shared
    kept = {"router": stored.weights, "head": stored.weights, "embedding": stored.weights, "shared": shared}
    return replace(model, precision=replace(stored, **kept))


@pytest.mark.parametrize("line", MODELS.strip().splitlines(), ids=lambda line: line.split()[0])
def test_parameters_and_what_one_token_streams_and_caches(line: str) -> None:
    """The reference's bytes, and what the release's wider router, head, shared experts and compressors add."""
    name, *numbers = line.split()
    billions, touched, other, size, cached = map(float, numbers)
    model = TABLE[name]
    assert num_parameters(model) / 1e9 == pytest.approx(billions, rel=1e-3)
    assert model.kv_bytes(8192 + 128) - model.kv_bytes(8192) == pytest.approx(128 * cached, rel=1e-4)
    plain = as_the_reference_counts(model)
    alike = plain.precision.shared == plain.precision.experts
    layers = [(layer.ffn, layer.count) for layer in model.layers]
    experts = sum(
        count * (ffn.active * ffn.expert(model.hidden) + alike * ffn.shared_weights(model.hidden))
        for ffn, count in layers
        if isinstance(ffn, Experts)
    )
    assert experts / 1e9 == pytest.approx(touched, rel=5e-4)
    assert (model.active - experts) / 1e9 == pytest.approx(other, rel=5e-4)
    assert plain.streamed_bytes / 1e9 == pytest.approx(size, rel=3e-3)
    wider = {
        "DeepSeek-V3": 0.9267 + 0.1064,
        "Qwen3-235B-A22B-FP8": 0.6223 + 0.0493,
        "Kimi-K2": 1.1744 + 0.1652,
        "DeepSeek-V4-Flash": 0.5295 + 0.0451 + 1.0821 * 0.47 + 0.3055,  # compressors
    }
    assert (model.streamed_bytes - plain.streamed_bytes) / 1e9 == pytest.approx(wider.get(name, 0), abs=2e-4)


def test_caches_with_windows_and_states() -> None:
    gpt = TABLE["gpt-oss-20b"]
    assert gpt.kv_bytes(100) == 100 * 49_152
    assert TABLE["Qwen3.6-35B-A3B"].kv_bytes(0) == pytest.approx(33.42e6, rel=1e-3)
    flash, wide = TABLE["DeepSeek-V4-Flash"], Precision.of("fp8", "fp4", cache="bf16")
    assert flash.kv_bytes(131_072) / 1e9 == pytest.approx(0.51, abs=0.005)
    assert flash.kv_bytes(8192) - 8192 * 3850.25 == pytest.approx(3.2e6, rel=0.01)
    pro = replace(TABLE["DeepSeek-V4-Pro"], precision=wide)
    assert (pro.kv_bytes(2**20) - 61 * 128 * 1024) / 2**30 == pytest.approx(9.62, abs=0.005)
    narrow = TABLE["DeepSeek-V4-Pro"]
    assert narrow.kv_bytes(8192 + 128) - narrow.kv_bytes(8192) == pytest.approx(128 * 5511.4, rel=1e-4)


def test_projection_weights() -> None:
    assert Mla(128, 1536, 512, 128, 64, 128).weights(7168) == 187_105_280
    bare = Compressed(64, 512, 64, 1024, 8, 1024, window=128)
    assert bare.weights(4096) == 106_954_752
    assert Gqa(16, 2, 256, gated=True).weights(2048) == Gqa(16, 2, 256).weights(2048) + 2048 * 16 * 256
    small = 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048
    assert Mla(16, None, 512, 128, 64, 128).weights(2048) == small
    assert Quoted(7, 2.0, 3.0).kv_bytes(10, BF16) == 30
    state = DeltaNet(16, 32, 128, 128, 4)
    assert state.kv_bytes(0, BF16) == state.kv_bytes(10**6, BF16) == 1_114_112


def test_models_are_found_by_name_and_impossible_experts_refused() -> None:
    for name in ("deepseek-v3", "deepseek-ai/DeepSeek-V3", "DeepSeek-R1"):
        assert find_model(name) is TABLE["DeepSeek-V3"]
    with pytest.raises(UsageError, match="9 active"):
        Experts(8, 9, 0, 64)
