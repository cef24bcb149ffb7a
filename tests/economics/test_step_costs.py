"""Seconds of a step: its parts, marginal costs and many devices, against formulas written out by hand; speed-ups that a
second cost model, written from the formulas alone, gave; and the devices: their peaks, how they are found by name, the
CPU against measured passes. (Attention and experts by their FLOPs per byte: test_intensity.py.)
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from wager.arch import FORMATS, TABLE, Gqa, Layer, Precision
from wager.economics.surface import LatencySurface
from wager.errors import UsageError
from wager.planner.acceptance import AcceptanceRates
from wager.planner.cost import Cluster, CostModel
from wager.planner.devices import DEVICES, Device, find_device
from wager.planner.drafting import FREE
from wager.planner.plan import Deployment
from wager.planner.routing import distinct_experts, experts_on_fullest_rank
from wager.types import StepRecord

B200, H100 = DEVICES["B200"], DEVICES["H100"]

LLAMA, V3 = TABLE["Llama-3.1-8B"], TABLE["DeepSeek-V3"]

FLASH_PRECISION = TABLE["DeepSeek-V4-Flash"].precision
FLASH = replace(TABLE["DeepSeek-V4-Flash"], precision=replace(FLASH_PRECISION, shared=FLASH_PRECISION.experts))
"""With shared experts in fp4 as the routed ones, which the reference's figures assume."""


def test_marginal_costs_are_zero_on_a_memory_branch_and_one_on_a_compute_branch() -> None:
    """Two rows are charged for each element of weights read; beyond 295 rows the H100 waits for compute."""
    cost = CostModel(LLAMA, Cluster(H100))
    assert cost.marginal_cost(0, batch=200)["ffn"] == pytest.approx(0, abs=1e-5)
    assert cost.marginal_cost(0, batch=400)["ffn"] == pytest.approx(1, abs=1e-5)
    marginal, step = cost.marginal_cost(4096, batch=64), cost.step(4096, 1, batch=64)
    blended = sum(marginal[name] * part.seconds for name, part in step.parts.items()) / step.seconds
    assert marginal["step"] == pytest.approx(blended, abs=1e-6)


def test_measured_seconds_are_those_that_are_measured_by_now() -> None:
    """Computed ones are kept."""
    surface = LatencySurface([1, 8], [1e-3, 2e-3])
    cost = CostModel(LLAMA, Cluster(H100), measured=surface)
    assert cost.seconds(0, 1) == pytest.approx(1e-3)
    for _ in range(50):
        surface.observe(StepRecord(1, 1, 0, 0, 1, {"forward": 3e-3}, (0,)))
    assert 2e-3 < cost.seconds(0, 1) == pytest.approx(surface.seconds(1, 1, 0))


def test_a_part_may_wait_for_both() -> None:
    """8 rows over keys of 64 heads wait for memory, over keys that all heads share for compute."""
    own, shared = (Layer(Gqa(64, heads, 128), LLAMA.layers[0].ffn) for heads in (64, 1))
    bounds = [
        CostModel(replace(LLAMA, layers=layers), Cluster(H100)).step(10_000, 8).parts["attention"].bound
        for layers in ((own,), (shared,), (own, shared))
    ]
    assert bounds == ["memory", "compute", "both"]


def test_parts_in_formats_of_their_own() -> None:
    """V4-Flash's shared experts are a part of their own in fp8, and one with the routed ones where both are in fp4;
    router and head have any formats."""
    shared, cluster = 43 * 25_165_824, Cluster(B200)
    apart = CostModel(TABLE["DeepSeek-V4-Flash"], cluster).step(0, 1).parts
    together = CostModel(FLASH, cluster).step(0, 1).parts
    assert (apart["shared experts"].bytes, apart["shared experts"].flops) == (shared, 2 * shared)
    assert together["experts"].bytes == pytest.approx(apart["experts"].bytes + shared * 0.53)
    assert together["experts"].flops == pytest.approx(apart["experts"].flops + 2 * shared)
    assert "shared experts" not in together
    kept = replace(V3.precision, router=FORMATS["fp8"], head=FORMATS["int4"])
    parts = CostModel(replace(V3, precision=kept), cluster).step(0, 1).parts
    assert (parts["router"].bytes, parts["head"].bytes) == (58 * 7168 * 256, pytest.approx(129_280 * 7168 * 0.53))


def test_a_window_bounds_what_is_computed_too() -> None:
    near = CostModel(TABLE["gpt-oss-20b"], Cluster(H100)).step(10_000, 2).parts["window attention"]
    assert near.flops == 12 * 4 * 64 * 64 * 128 * 2


# ---- many devices ----------------------------------------------------------------------------------------------------


def test_dispatch_in_microseconds_a_token() -> None:
    """The published table counts 8 bits both ways."""
    both_ways = replace(FLASH, precision=replace(FLASH.precision, combine=1.0))
    for ranks, expected in {2: 1.174, 4: 1.761, 8: 2.055, 16: 21.135, 32: 31.703}.items():
        dispatch = CostModel(both_ways, Cluster(B200, ep=ranks)).step(0, 1, batch=100).parts["dispatch"]
        assert dispatch.seconds / 100 * 1e6 == pytest.approx(expected, abs=5.1e-4)
        assert dispatch.bound == "link"


def test_ranks_share_the_experts_that_all_of_them_hit() -> None:
    expert = 43 * 25_165_824 * 0.53
    fullest, mean = (
        CostModel(FLASH, Cluster(B200, ep=16), balanced=balanced).step(0, 1, batch=2).parts["experts"].bytes / expert
        for balanced in (False, True)
    )
    distinct = distinct_experts(256, 6, 32)
    assert mean == pytest.approx(distinct / 16 + 1)
    assert fullest == pytest.approx(experts_on_fullest_rank(16, distinct / 256, 16) + 1)
    assert 1.2 * mean < fullest < 17
    uneven = CostModel(FLASH, Cluster(B200, ep=24)).step(0, 1, batch=2).parts["experts"].bytes / expert
    assert uneven == pytest.approx(experts_on_fullest_rank(11, distinct_experts(256, 6, 48) / 256, 24) + 1)


def test_key_value_heads_fewer_than_the_devices_are_kept_by_several() -> None:
    """Qwen3-30B has 4 key-value heads: eight devices keep one each, every head twice. A latent that all heads share is
    read on every device."""
    context, queries = 10_000, 32 * 128 * 2
    for tp, kept in ((8, 1 / 4), (2, 2 / 4)):
        attention = CostModel(TABLE["Qwen3-30B-A3B"], Cluster(H100, tp)).step(context, 1).parts["attention"]
        assert attention.bytes == pytest.approx(48 * (context * 2 * 4 * 128 * 2 * kept + queries / tp))
    one, eight = (CostModel(V3, Cluster(B200, tp)).step(100_000, 1).parts["latent attention"] for tp in (1, 8))
    assert eight.bytes > 0.99 * one.bytes
    assert eight.flops == one.flops / 8


def test_a_collective_takes_its_latency_whatever_it_sends() -> None:
    """Two all-reduces in each of 80 layers; in each of 43 layers of experts a dispatch and the way back."""
    for model, cluster, messages in (
        (TABLE["Llama-3.1-70B"], Cluster(H100, 8, latency=5e-6), 2 * 80),
        (FLASH, Cluster(B200, ep=8, latency=5e-6), 2 * 43),
    ):
        parts = CostModel(model, cluster).step(0, 1).parts
        assert parts["link latency"].seconds == pytest.approx(messages * 5e-6)
    for cluster in (Cluster(B200, latency=5e-6), Cluster(B200, ep=8, latency=0)):
        assert "link latency" not in CostModel(FLASH, cluster).step(0, 1).parts


def test_tensor_and_expert_parallelism_together() -> None:
    """DeepSeek-V3 on 32 devices in 8 groups of 4: attention, dense layers and the head are those of 4 devices, the
    experts those of 32 ranks that see the tokens of all groups, and every device dispatches a quarter of the rows."""
    rows = 32
    both = CostModel(V3, Cluster(B200, 4, 32, 5e-6)).step(2000, 2, batch=16).parts
    split = CostModel(V3, Cluster(B200, 4)).step(2000, 2, batch=16).parts
    for part in ("projections", "latent attention", "ffn", "router", "head"):
        assert both[part] == split[part]
    on_one = experts_on_fullest_rank(8, distinct_experts(256, 8, 8 * rows) / 256, 32)
    assert both["experts"].bytes == pytest.approx(58 * 3 * 7168 * 2048 * (on_one + 1 / 4))
    assert both["experts"].flops == pytest.approx(58 * 2 * 3 * 7168 * 2048 * rows * (8 + 1) / 4)
    assert both["dispatch"].bytes == pytest.approx(rows / 4 * (1 + 2) * 58 * 8 * 7168)  # out in fp8, back in bf16
    # an all-reduce after attention and one after a dense layer; a layer of experts replaces its own by the dispatch
    assert both["all-reduce"].bytes == pytest.approx((2 * 3 + 58) * rows * 7168 * 2 * 2 * 3 / 4)
    assert both["link latency"].seconds == pytest.approx((2 * 61 + 2 * 58) * 5e-6)


DEPLOYMENTS = """
DeepSeek-V3          B200 1 32  8 1024 0.90  7 2.506533
DeepSeek-V3          H200 1 16 32 4096 0.75  2 1.455033
DeepSeek-V3          B200 4 32 16 1024 0.80  5 2.385411
DeepSeek-V3          H200 8  1 64 8000 0.85  8 3.757510
Kimi-K2              B200 1 64  4 1024 0.90  8 2.871184
Kimi-K2-Thinking     H200 8  8 16 8000 0.75 12 1.913175
Qwen3-235B-A22B      H200 1 16 32 4096 0.85  5 2.072787
Qwen3-235B-A22B-FP8  H100 4  8  8 1024 0.75 12 3.205599
gpt-oss-120b         B200 1  8 64 4096 0.75  4 2.614038
Llama-3.1-70B        H100 8  1 16 8000 0.85 12 4.726416
"""
"""Model, device, tp, ep, batch of a group, context, acceptance of free drafts; best depth of 12, speed-up."""


def test_whole_deployments() -> None:
    for line in DEPLOYMENTS.strip().splitlines():
        name, device, *numbers = line.split()
        tp, ep, batch, context = map(int, numbers[:4])
        deployment = Deployment(CostModel(TABLE[name], Cluster(DEVICES[device], tp, ep)), FREE, max_depth=12)
        chosen = deployment.point(AcceptanceRates("", float(numbers[4])), batch=batch, context=context).chosen
        assert (chosen.depth, chosen.speedup) == (int(numbers[5]), pytest.approx(float(numbers[6]), abs=5e-7)), line


# ---- devices ---------------------------------------------------------------------------------------------------------


def test_devices_are_found_by_the_names_that_people_type() -> None:
    for device, names in {
        "B200": ("b200", "B200 180GB"),
        "H100": ("H100-SXM", "H100 80GB", "NVIDIA H100 80GB HBM3"),
        "H100-PCIe": ("H100-PCIe",),
        "H200": ("H200 141GB",),
        "A100-80GB": ("A100", "NVIDIA A100-SXM4-80GB"),
        "GH200": ("NVIDIA GH200 480GB", "NVIDIA-GH200-480GB", "GH200 120GB", "gh200 96gb"),
        "A100-40GB": ("A100 40GB",),
        "A100-80GB-PCIe": ("A100 80GB PCIe",),
        "RTX-4090": ("RTX4090", "rtx 4090 24gb"),
        "RTX-5090": ("NVIDIA GeForce RTX 5090",),
        "T4": ("Tesla T4",),
        "MI300X": ("AMD Instinct MI300X",),
        "MI325X": ("mi325x 256GB",),
        "CPU-2core-AVX512": ("cpu",),
    }.items():
        assert {find_device(name).name for name in names} == {device}


def test_an_unknown_device_is_named_with_the_nearest() -> None:
    for name, near in {"H10": "H100", "MI300": "MI300X", "4090": "RTX-4090", "A10": "A10G", "L40": "L40S"}.items():
        with pytest.raises(UsageError, match=f"'{name}' is not known") as caught:
            find_device(name)
        assert re.search(rf"Did you mean [^?]*{near}[^?]*\?.*`this` is this machine", caught.value.hint or "")
    with pytest.raises(UsageError, match="No H100 of 94 GB is known") as caught:
        find_device("H100 94GB")
    assert "85.52 GB" in (caught.value.hint or "")


def test_numbers_that_a_device_has_no_units_for_run_at_the_rate_of_others() -> None:
    """W8A8 in integers is twice as fast as bf16 on an A100, weights alone in 8 bits are multiplied as bf16; the T4 has
    no bf16 and serves such weights in fp16."""

    def ffn(precision: str, device: str) -> float:
        model = replace(LLAMA, precision=Precision.of(precision))
        return CostModel(model, Cluster(DEVICES[device])).step(0, 1, batch=512).parts["ffn"].seconds

    assert ffn("int8", "A100-80GB") == pytest.approx(ffn("bf16", "A100-80GB") / 2)
    assert ffn("w8a16", "H100") == pytest.approx(ffn("bf16", "H100"))
    assert ffn("bf16", "T4") == ffn("fp16", "T4")
    assert DEVICES["T4"].peak("fp4") == 65e12


def test_the_cpu_follows_measured_passes() -> None:
    """Of SmolLM2-135M, in milliseconds by rows: a larger-of-both roofline at the best rate seen (814 GFLOP/s) takes 16
    rows for free and is 54 % too fast there."""
    for precision, measured in {
        "bf16": {1: 5.25, 2: 5.79, 4: 6.26, 8: 6.87, 12: 9.9, 16: 11.3},
        "q8_0": {1: 2.76, 4: 3.47, 8: 4.51, 16: 7.33},
        "q4_1::q8_0": {1: 1.85, 4: 2.54, 8: 4.20, 16: 7.61},
    }.items():
        model = replace(TABLE["SmolLM2-135M"], precision=Precision.parse(precision))
        found = [CostModel(model, Cluster(find_device("cpu"))).seconds(0, rows) * 1e3 for rows in measured]
        assert found == pytest.approx(list(measured.values()), rel=0.08)


def test_how_far_reading_and_computing_overlap() -> None:
    """Powers of small seconds do not vanish, nothing to compute costs the reading alone, and 1 is their sum."""
    for overlap, expected in ((None, 4.0), (1.0, 7.0), (2.0, 5.0), (1e6, 4.0)):
        device = Device("x", {"bf16": 1e12}, 1e12, None, overlap=overlap)
        assert device.seconds(3e12, 4e12, compute="bf16") == pytest.approx(expected)
        assert device.seconds(3e-300, 4e-300, compute="bf16") == pytest.approx(expected * 1e-312)
        assert device.seconds(3e12, 0, compute="bf16") == 3


def test_a_machine_of_ones_own() -> None:
    values = {key: value for key, value in B200.as_dict().items() if key != "label"}
    assert Device.from_dict(values) == replace(B200, label="given")
    for values, message in (
        ({"name": "x", "peaks": {"bf16": 1e12}}, "lacks 'bandwidth'"),
        ({"name": "x", "peaks": {}, "bandwidth": 1e9}, "lacks 'peaks'"),
        ({"name": "x", "peaks": {"bf16": -1}, "bandwidth": 1e9}, "peaks.bf16 = -1"),
        ({"name": "x", "peaks": {"bf16": 1e12}, "bandwidth": 1e9, "bandwith": 1}, "no 'bandwith'"),
        ({"name": "x", "peaks": {"bf16": 1e12, "FP8": 2e12}, "bandwidth": 1e9}, "No step computes in 'FP8'"),
        ({"name": "x", "peaks": {"bf16": 989}, "bandwidth": 1e9}, "peaks.bf16 = 989 is out of range: .* FLOP/s"),
        ({"name": "x", "peaks": {"bf16": 1e12}, "bandwidth": 1e9, "memory": 80}, "memory = 80 .* bytes"),
        ({"name": "x", "peaks": {"bf16": 1e12}, "bandwidth": 1e9, "intra": 450}, "intra = 450 .* bytes/s"),
    ):
        with pytest.raises(UsageError, match=message):
            Device.from_dict(values)
