"""FLOPs per byte against the device's ridge: published curves, knees (the counts at which a
part turns compute-bound) and crossings; and against formulas by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pytest

from economics.published import B200_CHARTS
from wager.arch import TABLE, DeltaNet, Gqa, Layer, Mamba2, Mla, ModelSpec, Precision
from wager.arch.layers import Parallel
from wager.planner.cost import Cluster, CostModel
from wager.planner.devices import DEVICES, Device

B200, H100, H200 = DEVICES["B200"], DEVICES["H100"], DEVICES["H200"]

FLASH, PRO = (
    replace(TABLE[name], precision=Precision.of("fp8", "fp4", cache="fp8"))
    for name in ("DeepSeek-V4-Flash", "DeepSeek-V4-Pro")
)
"""As the published figures take them: the shared expert is stored as the routed ones are."""


@dataclass(frozen=True)
class Intensity:
    """FLOPs per byte of a part, of a batch or of a number of rows, and the device's ridge in its arithmetic."""

    at: Callable[[float], float]
    ridge: float


def feed_forward(model: ModelSpec, device: Device) -> Intensity:
    cost, precision = CostModel(model, Cluster(device)), model.precision
    name, kept = ("experts", precision.experts) if model.sparse else ("ffn", precision.weights)
    return Intensity(lambda batch: cost.step(0, 1, batch=batch).parts[name].intensity, device.ridge(kept.compute))


def attention(model: str | ModelSpec, context: float, *, device: Device = B200) -> dict[str, Intensity]:
    cost = CostModel(TABLE[model] if isinstance(model, str) else model, Cluster(device))
    streams = {
        stream.part: stream.compute
        for layer in cost.model.layers
        for stream in layer.attention.streams(context, 1, cost.model.precision)
    }

    def of_part(part: str) -> Callable[[float], float]:
        return lambda rows: cost.step(context, rows).parts[part].intensity

    return {part: Intensity(of_part(part), device.ridge(compute)) for part, compute in streams.items()}


def values(part: Intensity, counts: Iterable[float]) -> list[float]:
    return [part.at(count) for count in counts]


# ---- feed-forwards, by batch -----------------------------------------------------------------------------------------


def test_a_mixture() -> None:
    """6 of 256 experts and a shared one at 0.53 bytes: published intensities."""
    golden = {1: 3.77, 2: 4.11, 8: 4.67, 43: 6.90, 128: 13.82, 512: 52.62, 4096: 421.0}
    part = feed_forward(FLASH, B200)
    assert values(part, golden) == pytest.approx(list(golden.values()), rel=1.1e-3)
    assert part.ridge == 1125.0


def test_the_knee_of_a_dense_model() -> None:
    """R b / 2 tokens: 4-bit weights multiplied in bf16 turn compute-bound earlier."""
    for device, knees in {
        "B200": {"bf16": 281, "fp8": 281, "mxfp4": 75, "fp4": 298},
        "H100": {"bf16": 295, "fp8": 295, "int4": 78},
        "H200": {"bf16": 206, "int4": 55},
        "A100-80GB": {"bf16": 153, "int4": 41},
    }.items():
        for kept, knee in knees.items():
            model = replace(TABLE["Llama-3.1-8B"], precision=Precision.of(kept))
            part = feed_forward(model, DEVICES[device])
            assert part.at(knee - 0.55) < part.ridge < part.at(knee + 0.55), (device, kept)
            bytes_each = {"bf16": 2, "fp8": 1}.get(kept, 0.53)
            assert values(part, (1, 64)) == pytest.approx([2 / bytes_each, 128 / bytes_each])


def test_the_knee_of_a_mixture() -> None:
    """(E + s) b R / (2 (k + s)), where all experts are read long before."""
    for model, b200, h200 in (
        (TABLE["Qwen3-30B-A3B"], 4500, 3298),
        (TABLE["DeepSeek-V3"], 8031, 5887),
        (TABLE["Qwen3.6-35B-A3B"], 8031, 5887),
        (FLASH, 10_945, 2006),
        (PRO, 16_397, 3005),
    ):
        for device, knee in ((B200, b200), (H200, h200)):
            part = feed_forward(model, device)
            assert part.at(knee - 0.7) < part.ridge < part.at(knee + 0.7), model.name


# ---- attention, by query rows ----------------------------------------------------------------------------------------


def with_latents(heads: int, cache: str) -> ModelSpec:
    """A model of one layer of latent attention."""
    model, kind = TABLE["Llama-3.1-8B"], Mla(heads, 1536, 512, 128, 64, 128)
    return replace(model, layers=(Layer(kind, model.layers[0].ffn),), precision=Precision.of("bf16", cache=cache))


def test_the_rows_at_which_grouped_query_attention_turns_compute_bound() -> None:
    published = {1: 7.99, 2: 15.97, 4: 31.88, 8: 63.50}
    part = attention("Llama-3.1-70B", 4096)["attention"]
    assert values(part, published) == pytest.approx(list(published.values()), abs=0.0051)
    for name, knee in {"SmolLM2-135M": 94, "Llama-3.1-8B": 70, "Llama-3.1-70B": 35, "Qwen3-235B-A22B": 17.6}.items():
        part = attention(name, 1e12)["attention"]
        assert part.at(knee - 0.55) < part.ridge < part.at(knee + 0.55)


def test_latent_attention_and_the_rows_at_which_it_turns_compute_bound() -> None:
    """Absorbed: published intensities of 1, 2, 4 and 8 rows of 64 heads, and knees on B200, H100 and H200."""
    for context, published in {512: (193.4, 322.4, 483.6, 644.7), 2**20: (241.7, 483.4, 966.6, 1932.3)}.items():
        part = attention(with_latents(64, "fp8"), context)["latent attention"]
        assert values(part, (1, 2, 4, 8)) == pytest.approx(list(published), abs=0.0501)
    for heads, cache, expected in ((64, "bf16", (2.33, 2.44, 1.71)), (128, "fp8", (0.58, 0.61, 0.43))):
        for device, knee in zip((B200, H100, H200), expected, strict=True):
            part = attention(with_latents(heads, cache), 1e12, device=device)["latent attention"]
            assert part.at(knee - 0.0051) < part.ridge < part.at(knee + 0.0051)


@pytest.mark.parametrize(("rows", "context"), [(2, 45_458), (3, 31_084), (4, 26_841), (8, 22_278)])
def test_the_context_at_which_compressed_attention_crosses_the_ridge(rows: int, context: int) -> None:
    """Published for latent attention over one entry per 128 positions, ridge 281; and V4's own HCA by its formula."""
    before, after = (
        attention(with_latents(64, "fp8"), (context + by) / 128, device=B200_CHARTS)["latent attention"]
        for by in (-0.5, 0.5)
    )
    assert before.at(rows) <= before.ridge <= after.at(rows)  # the published context is the exact one, rounded
    kept = 128 + context // 128
    heavy = attention("DeepSeek-V4-Flash", context)["compressed attention"]
    assert heavy.at(rows) == pytest.approx(131_072 * kept * rows / (584 * kept + 131_072 * rows))


def test_every_kind_of_a_model_has_its_own() -> None:
    """V4-Flash: window, CSA, indexer and HCA; Qwen3.6: GQA and DeltaNet, whose intensity does not depend on context."""
    parts = attention("DeepSeek-V4-Flash", 32_768)
    assert set(parts) == {"window attention", "sparse attention", "indexer", "compressed attention"}
    assert parts["indexer"].ridge == B200.ridge("fp8")
    assert values(parts["indexer"], (1, 4)) == pytest.approx([16_384 / 132, 4 * 16_384 / 132])
    expected = [131_072 * (128 + 512) * rows / (584 * (128 + 512 * rows) + 131_072 * rows) for rows in (1, 4)]
    assert values(parts["sparse attention"], (1, 4)) == pytest.approx(expected)
    near, far = (attention("Qwen3.6-35B-A3B", context) for context in (1024, 100_000))
    assert set(near) == {"attention", "DeltaNet"}
    state, conv = 32 * 128 * 128, 4 * (2 * 16 * 128 + 32 * 128)
    assert values(near["DeltaNet"], (1, 2)) == values(far["DeltaNet"], (1, 2))
    assert near["DeltaNet"].at(2) == pytest.approx(2 * 8 * state / (2 * (state + conv)))
    assert set(attention("gpt-oss-20b", 4096)) == {"window attention", "attention"}


def test_states_are_read_and_written_under_the_name_of_their_kind() -> None:
    precision = Precision.of("bf16")
    for kind, name in ((DeltaNet(2, 4, 16, 32, 4), "DeltaNet"), (Mamba2(4, 16, 2, 32, 4), "Mamba-2")):
        [stream] = kind.streams(1000, 3, precision)
        assert (stream.part, stream.cached) == (name, 2 * kind.kv_bytes(1000, precision))
    both = Parallel(Gqa(4, 2, 16), Mamba2(4, 16, 2, 32, 4))
    assert [stream.part for stream in both.streams(10, 1, precision)] == ["attention", "Mamba-2"]
