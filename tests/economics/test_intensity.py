"""FLOPs per byte against the device's ridge: published curves, knees and crossings; and against formulas by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from published_intensities import GQA_PLATEAUS, LATENT, LLAMA_70B_AT_4096

from wager.arch import TABLE, Gqa, Layer, Mla, ModelSpec, Precision
from wager.planner.cost import CostModel, SequenceLoad
from wager.planner.devices import B200_CHARTS, DEVICES
from wager.planner.figures import (
    DENSE_TWIN,
    FEED_FORWARD,
    MIXTURE,
    IntensityCurve,
    attention_curves,
    feed_forward_curves,
    step_intensity,
)

B200, H100, H200 = DEVICES["B200"], DEVICES["H100"], DEVICES["H200"]


FLASH, PRO = (
    replace(TABLE[name], precision=Precision.of("fp8", "fp4", cache="fp8"))
    for name in ("DeepSeek-V4-Flash", "DeepSeek-V4-Pro")
)
"""As the published figures take them: the shared expert is stored as the routed ones are."""


def by_name(curves: list[IntensityCurve]) -> dict[str, IntensityCurve]:
    return {curve.name: curve for curve in curves}


# ---- feed-forwards, by batch ----------------------------------------------------------------------------------------


def test_a_mixture_beside_its_dense_twin() -> None:
    """6 of 256 experts and a shared one at 0.53 bytes: published intensities, and both knees on a B200."""
    golden = {1: 3.77, 2: 4.11, 8: 4.67, 43: 6.90, 128: 13.82, 512: 52.62, 4096: 421.0}
    curves = by_name(feed_forward_curves(CostModel(FLASH, B200), list(golden)))
    assert list(curves) == [MIXTURE, DENSE_TWIN]
    assert curves[MIXTURE].values == pytest.approx(list(golden.values()), rel=1.1e-3)
    assert curves[DENSE_TWIN].values == pytest.approx([2 * batch / 0.53 for batch in golden])
    assert curves[MIXTURE].knee == pytest.approx(10_945, abs=0.7)
    assert curves[DENSE_TWIN].knee == pytest.approx(298, abs=0.5)
    assert {(curve.compute, curve.ridge) for curve in curves.values()} == {("fp4", 1125.0)}


DENSE_KNEES = [
    ("B200", "bf16", 281),
    ("B200", "fp8", 281),
    ("B200", "mxfp4", 75),
    ("B200", "fp4", 298),
    ("H100", "bf16", 295),
    ("H100", "fp8", 295),
    ("H100", "int4", 78),
    ("H200", "bf16", 206),
    ("H200", "int4", 55),
    ("A100-80GB", "bf16", 153),
    ("A100-80GB", "int4", 41),
]


def test_the_knee_of_a_dense_model() -> None:
    """R b / 2 tokens: 4-bit weights multiplied in bf16 turn compute-bound earlier."""
    for device, kept, knee in DENSE_KNEES:
        model = replace(TABLE["Llama-3.1-8B"], precision=Precision.of(kept))
        [curve] = feed_forward_curves(CostModel(model, DEVICES[device]), [1, 64])
        assert curve.name == FEED_FORWARD
        assert curve.knee == pytest.approx(knee, abs=0.55), (device, kept)
        bytes_each = {"bf16": 2, "fp8": 1}.get(kept, 0.53)
        assert curve.values == pytest.approx([2 / bytes_each, 128 / bytes_each])


MIXTURE_KNEES = [
    ("Qwen3-30B-A3B", 4500, 3298),
    ("DeepSeek-V3", 8031, 5887),
    ("Qwen3.6-35B-A3B", 8031, 5887),
    (FLASH, 10_945, 2006),
    (PRO, 16_397, 3005),
    ("gpt-oss-120b", None, 1748),
]


def test_the_knee_of_a_mixture() -> None:
    """(E + s) b R / (2 (k + s)), where all experts are read long before."""
    for model, b200, h200 in MIXTURE_KNEES:
        shape = TABLE[model] if isinstance(model, str) else model
        for device, expected in ((B200, b200), (H200, h200)):
            mixture = by_name(feed_forward_curves(CostModel(shape, device), [1]))[MIXTURE]
            assert expected is None or mixture.knee == pytest.approx(expected, abs=0.7), shape.name


def test_the_whole_step_is_flops_over_bytes() -> None:
    cost = CostModel(TABLE["Llama-3.1-8B"], H100)
    step = cost.step([SequenceLoad(4096, 3, 16)])
    flops, read = sum(part.flops for part in step.parts.values()), sum(part.bytes for part in step.parts.values())
    assert step_intensity(cost, batch=16, context=4096, rows=3) == pytest.approx(flops / read)
    shared = CostModel(TABLE["Llama-3.1-8B"], H100, tp=8)
    assert step_intensity(shared, batch=16, context=4096, rows=3) == pytest.approx(flops / read)  # links are no memory


# ---- attention, by query rows ---------------------------------------------------------------------------------------


def with_attention(kind: Gqa | Mla, cache: str) -> ModelSpec:
    """A model of one layer with that attention."""
    model = TABLE["Llama-3.1-8B"]
    return replace(model, layers=(Layer(kind, model.layers[0].ffn),), precision=Precision.of("bf16", cache=cache))


def test_grouped_query_attention_rises_with_the_group_and_the_rows() -> None:
    for name, plateau in GQA_PLATEAUS.items():
        [curve] = attention_curves(CostModel(TABLE[name], B200), [1, 2], context=1e9)
        assert curve.name == "GQA"
        assert curve.values == pytest.approx([plateau, 2 * plateau], rel=1e-3)
    [curve] = attention_curves(CostModel(TABLE["Llama-3.1-70B"], B200), list(LLAMA_70B_AT_4096), context=4096)
    assert curve.values == pytest.approx(list(LLAMA_70B_AT_4096.values()), abs=0.0051)
    knees = {"SmolLM2-135M": 94, "Llama-3.1-8B": 70, "Llama-3.1-70B": 35, "Qwen3-235B-A22B": 17.6}
    for name, rows in knees.items():
        [curve] = attention_curves(CostModel(TABLE[name], B200), [1], context=1e12)
        assert curve.knee == pytest.approx(rows, abs=0.55)


@pytest.mark.parametrize("line", LATENT, ids=lambda line: line.split()[0])
def test_latent_attention_crosses_the_ridge_at_the_second_row(line: str) -> None:
    context, *expected = (float(word) for word in line.split())
    [curve] = attention_curves(
        CostModel(with_attention(Mla(64, 1536, 512, 128, 64, 128), "fp8"), B200), [1, 2, 4, 8], context=context
    )
    assert curve.name == "MLA"
    assert curve.values == pytest.approx(expected, abs=0.0501)
    assert curve.values[0] < curve.ridge < curve.values[1]
    assert curve.knee is not None
    assert 1 < curve.knee < 2


def test_the_rows_at_which_latent_attention_turns_compute_bound() -> None:
    rows = [
        (64, "bf16", (2.33, 2.44, 1.71)),
        (64, "fp8", (1.16, 1.22, 0.85)),
        (128, "bf16", (1.16, 1.22, 0.85)),
        (128, "fp8", (0.58, 0.61, 0.43)),
    ]
    for heads, cache, expected in rows:
        model = with_attention(Mla(heads, 1536, 512, 128, 64, 128), cache)
        found = [attention_curves(CostModel(model, device), [1], context=1e12)[0].knee for device in (B200, H100, H200)]
        assert found == pytest.approx(list(expected), abs=0.0051)


@pytest.mark.parametrize(("rows", "context"), [(2, 45_458), (3, 31_084), (4, 26_841), (8, 22_278)])
def test_the_context_at_which_compressed_attention_crosses_the_ridge(rows: int, context: int) -> None:
    """Published for latent attention over one entry per 128 positions, ridge 281; and V4's own HCA by its formula."""
    entries = with_attention(Mla(64, 1536, 512, 128, 64, 128), "fp8")
    after, before = (
        attention_curves(CostModel(entries, B200_CHARTS), [1], context=(context + by) / 128)[0].knee
        for by in (0.5, -0.5)
    )
    assert after is not None and before is not None
    assert after <= rows <= before  # the published context is the exact one, rounded
    heavy = by_name(attention_curves(CostModel(TABLE["DeepSeek-V4-Flash"], B200), [rows], context=context))["HCA"]
    kept = 128 + context // 128
    assert heavy.values[0] == pytest.approx(131_072 * kept * rows / (584 * kept + 131_072 * rows))


def test_every_kind_of_a_model_has_a_curve() -> None:
    """V4-Flash: window, CSA, indexer and HCA; Qwen3.6: GQA and DeltaNet, whose intensity does not depend on context."""
    flash = CostModel(TABLE["DeepSeek-V4-Flash"], B200)
    curves = by_name(attention_curves(flash, [1, 4], context=32_768))
    assert set(curves) == {"sliding window", "CSA", "indexer", "HCA"}
    assert curves["indexer"].compute == "fp8"
    assert curves["indexer"].values == pytest.approx([16_384 / 132, 4 * 16_384 / 132])
    for rows, found in zip((1, 4), curves["CSA"].values, strict=True):
        read = 584 * (128 + 512 * rows) + 131_072 * rows
        assert found == pytest.approx(131_072 * (128 + 512) * rows / read)
    mixed = CostModel(TABLE["Qwen3.6-35B-A3B"], B200)
    near, far = (by_name(attention_curves(mixed, [1, 2], context=context)) for context in (1024, 100_000))
    assert set(near) == {"GQA", "DeltaNet"}
    state, conv = 32 * 128 * 128, 4 * (2 * 16 * 128 + 32 * 128)
    assert near["DeltaNet"].values == far["DeltaNet"].values
    assert near["DeltaNet"].values[1] == pytest.approx(2 * 8 * state / (2 * (state + conv)))
    windows = by_name(attention_curves(CostModel(TABLE["gpt-oss-20b"], H100), [1], context=4096))
    assert set(windows) == {"sliding window", "GQA"}


def test_attention_without_work_has_no_curve() -> None:
    """No context, no attention; and no compressed entry before the first is complete."""
    assert attention_curves(CostModel(TABLE["Llama-3.1-8B"], B200), [1], context=0) == []
    early = by_name(attention_curves(CostModel(TABLE["DeepSeek-V4-Flash"], B200), [1], context=3))
    assert "indexer" not in early
