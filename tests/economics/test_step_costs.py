"""Seconds of a step: streams, marginal costs, many devices, against formulas written out by hand; and the devices:
their peaks, how they are found by name, the CPU against measured passes.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wager.arch import TABLE, ModelSpec, Precision
from wager.errors import UsageError
from wager.planner.cost import CostModel, SequenceLoad
from wager.planner.devices import DEVICES, Device, find_device
from wager.planner.routing import ExpertRouting, distinct_experts, experts_on_fullest_rank

B200, H100, H200 = DEVICES["B200"], DEVICES["H100"], DEVICES["H200"]


LLAMA, V3 = TABLE["Llama-3.1-8B"], TABLE["DeepSeek-V3"]


FLASH_PRECISION = TABLE["DeepSeek-V4-Flash"].precision


FLASH = replace(TABLE["DeepSeek-V4-Flash"], precision=replace(FLASH_PRECISION, shared=FLASH_PRECISION.experts))
"""With shared experts in fp4 as the routed ones, which the reference's figures assume."""


STREAMS = """
SmolLM2-135M 0.056 0.034
Llama-3.1-8B 3.13 1.88
Qwen3-8B 3.15 1.89
Llama-3.1-70B 29.0 17.4
Qwen3-30B-A3B 1.27 0.76
Qwen3.6-35B-A3B 1.19 0.71
gpt-oss-20b 0.77 0.46
gpt-oss-120b 1.04 0.62
Qwen3-235B-A22B 4.49 2.70
DeepSeek-V3 7.63 4.58
DeepSeek-V4-Flash 2.02 1.21
Kimi-K2 6.73 4.04
"""


def as_the_reference_counts(model: ModelSpec) -> ModelSpec:
    """The reference stores router and head as the dense weights, and V4's shared experts as the routed ones."""
    stored = model.precision
    shared = stored.experts if model.name.startswith("DeepSeek-V4") else stored.shared
    return replace(model, precision=replace(stored, router=stored.weights, head=stored.weights, shared=shared))


def test_one_token_costs_its_bytes() -> None:
    weights = {"projections", "ffn", "router", "experts", "shared experts", "head"}
    for line in STREAMS.strip().splitlines():
        name, h200, b200 = line.split()
        for device, expected in ((H200, h200), (B200, b200)):
            cost = CostModel(as_the_reference_counts(TABLE[name]), device).step([SequenceLoad(0, 1)])
            taken = sum(part.seconds for part_name, part in cost.parts.items() if part_name in weights)
            assert taken * 1e3 == pytest.approx(float(expected), rel=0.012), name


def test_prompt_rows_need_no_logits() -> None:
    cost = CostModel(LLAMA, H100)
    every_row, last_row = cost.step([SequenceLoad(0, 2048)]), cost.step([SequenceLoad(0, 2048, logits_rows=1)])
    assert last_row.parts["head"].flops * 2048 == every_row.parts["head"].flops
    assert last_row.parts["ffn"] == every_row.parts["ffn"]


def test_a_measured_count_of_experts_replaces_the_expected_one() -> None:
    cost = CostModel(TABLE["Qwen3-30B-A3B"], H100)
    step = cost.step([SequenceLoad(0, 4)], distinct_experts=20)
    assert step.parts["experts"].bytes == pytest.approx(48 * 20 * 4_718_592 * 2)


def test_locality_makes_a_run_of_rows_cheaper_than_as_many_requests() -> None:
    cost = CostModel(TABLE["Qwen3.6-35B-A3B"], B200, routing=ExpertRouting(locality=0.79))
    run, batch = (cost.step(loads).parts["experts"].bytes for loads in ([SequenceLoad(0, 8)], [SequenceLoad(0, 1, 8)]))
    uniform = CostModel(TABLE["Qwen3.6-35B-A3B"], B200).step([SequenceLoad(0, 8)]).parts["experts"].bytes
    assert run < batch == pytest.approx(uniform)
    assert run / (40 * 2 * 3_145_728) - 1 == pytest.approx(distinct_experts(256, 8, 8**0.79))


def test_marginal_costs_are_zero_on_a_memory_branch_and_one_on_a_compute_branch() -> None:
    """Two rows are charged for each element of weights read; beyond 295 rows the H100 waits for compute."""
    cost = CostModel(LLAMA, H100)
    assert cost.marginal_cost([SequenceLoad(0, 1, 200)])["ffn"] == pytest.approx(0, abs=1e-5)
    assert cost.marginal_cost([SequenceLoad(0, 1, 400)])["ffn"] == pytest.approx(1, abs=1e-5)
    marginal = cost.marginal_cost([SequenceLoad(4096, 1, 64)])
    step = cost.step([SequenceLoad(4096, 1, 64)])
    blended = sum(marginal[name] * part.seconds for name, part in step.parts.items()) / step.seconds
    assert marginal["step"] == pytest.approx(blended, abs=1e-6)


@settings(deadline=None)
@given(
    st.sampled_from(sorted(TABLE)),
    st.lists(st.tuples(st.integers(0, 30_000), st.integers(1, 300)), min_size=1, max_size=4),
)
def test_more_rows_and_longer_contexts_never_cost_less(name: str, shape: list[tuple[int, int]]) -> None:
    cost = CostModel(TABLE[name], B200)
    loads = [SequenceLoad(context, rows) for context, rows in shape]
    here = cost.seconds(loads)
    assert here > 0
    more = [SequenceLoad(shape[0][0], shape[0][1] + 1), *loads[1:]]
    assert cost.seconds(more) >= here - 1e-12
    assert cost.seconds([*loads[1:], SequenceLoad(shape[0][0] + 500, shape[0][1])]) >= here - 1e-12
    assert all(0 <= each <= 1 + 1e-4 for each in cost.marginal_cost(loads).values())


def test_a_step_of_nothing_costs_nothing_and_less_than_nothing_is_refused() -> None:
    cost = CostModel(LLAMA, H100, overhead=1.0)
    assert cost.seconds([]) == cost.seconds([SequenceLoad(100, 0)]) == 0
    assert cost.step([SequenceLoad(0, 1), SequenceLoad(10**5, 0)]) == cost.step([SequenceLoad(0, 1)])
    for load in (SequenceLoad(-1, 1), SequenceLoad(1, -1), SequenceLoad(1, 1, -2)):
        with pytest.raises(UsageError, match="no part of a step"):
            cost.step([load])


# ---- many devices -------------------------------------------------------------------------------------------------


def test_dispatch_in_microseconds_a_token() -> None:
    for ranks, expected in {2: 1.174, 4: 1.761, 8: 2.055, 16: 21.135, 32: 31.703}.items():
        step = CostModel(FLASH, B200, ep=ranks).step([SequenceLoad(0, 1, 100)])
        assert step.parts["dispatch"].seconds / 100 * 1e6 == pytest.approx(expected, abs=5.1e-4)
        assert step.parts["dispatch"].bound == "link"


def test_ranks_share_the_experts_that_all_of_them_hit() -> None:
    mean = 43 * 25_165_824 * 0.53 * (distinct_experts(256, 6, 32) / 16 + 1)
    fullest = CostModel(FLASH, B200, ep=16).step([SequenceLoad(0, 1, 2)]).parts["experts"]
    on_one = experts_on_fullest_rank(16, distinct_experts(256, 6, 32) / 256, 16)
    assert fullest.bytes == pytest.approx(43 * 25_165_824 * 0.53 * (on_one + 1))
    balanced = CostModel(FLASH, B200, ep=16, balanced=True).step([SequenceLoad(0, 1, 2)]).parts["experts"]
    assert balanced.bytes == pytest.approx(mean)
    assert 1.2 * mean < fullest.bytes < 43 * 25_165_824 * 0.53 * 17


@pytest.mark.parametrize(("tp", "kept"), [(2, 2 / 4), (4, 1 / 4), (8, 1 / 4)])
def test_key_value_heads_fewer_than_the_devices_are_kept_by_several(tp: int, kept: float) -> None:
    """Qwen3-30B has 4 key-value heads: eight devices keep one each, every head twice."""
    model = TABLE["Qwen3-30B-A3B"]
    context, queries = 10_000, 32 * 128 * 2
    read = 48 * (context * 2 * 4 * 128 * 2 * kept + queries / tp)
    assert CostModel(model, H100, tp=tp).step([SequenceLoad(context, 1)]).parts["attention"].bytes == pytest.approx(
        read
    )


def test_a_collective_takes_its_latency_whatever_it_sends() -> None:
    """Two all-reduces in each of 80 layers; in each of 43 layers of experts a dispatch and the way back."""
    for options, messages in (({"tp": 8}, 2 * 80), ({"tp": 1}, 0)):
        parts = CostModel(TABLE["Llama-3.1-70B"], H100, link_latency=5e-6, **options).step([SequenceLoad(0, 1)]).parts
        assert (parts["link latency"].seconds if messages else 0.0) == pytest.approx(messages * 5e-6)
    assert "link latency" not in CostModel(FLASH, B200, ep=8, link_latency=0).step([SequenceLoad(0, 1)]).parts
    dispatched = CostModel(FLASH, B200, ep=8, link_latency=5e-6).step([SequenceLoad(0, 1)])
    assert dispatched.parts["link latency"].seconds == pytest.approx(2 * 43 * 5e-6)


def test_tensor_and_expert_parallelism_together() -> None:
    """DeepSeek-V3 on 32 devices in 8 groups of 4: attention, dense layers and the head are those of 4 devices, the
    experts those of 32 ranks that see the tokens of all groups, and every device dispatches a quarter of the rows."""
    load, rows = SequenceLoad(2000, 2, 16), 32
    both = CostModel(V3, B200, tp=4, ep=32, link_latency=5e-6).step([load]).parts
    split = CostModel(V3, B200, tp=4, link_latency=0).step([load]).parts
    for part in ("projections", "latent attention", "ffn", "router", "head"):
        assert both[part] == split[part]
    on_one = experts_on_fullest_rank(8, distinct_experts(256, 8, 8 * rows) / 256, 32)
    assert both["experts"].bytes == pytest.approx(58 * 3 * 7168 * 2048 * (on_one + 1 / 4))
    assert both["experts"].flops == pytest.approx(58 * 2 * 3 * 7168 * 2048 * rows * (8 + 1) / 4)
    sent = rows / 4 * 2 * 58 * 8 * 7168
    assert both["dispatch"].bytes == pytest.approx(sent)
    # an all-reduce after attention and one after a dense layer; a layer of experts replaces its own by the dispatch
    assert both["all-reduce"].bytes == pytest.approx((2 * 3 + 58) * rows * 7168 * 2 * 2 * 3 / 4)
    assert both["link latency"].seconds == pytest.approx((2 * 61 + 2 * 58) * 5e-6)


def test_a_latent_that_all_heads_share_is_read_on_every_device() -> None:
    one, eight = (
        CostModel(V3, B200, tp=tp).step([SequenceLoad(100_000, 1)]).parts["latent attention"] for tp in (1, 8)
    )
    assert eight.bytes > 0.99 * one.bytes
    assert eight.flops == one.flops / 8


B200, H100, LLAMA = DEVICES["B200"], DEVICES["H100"], TABLE["Llama-3.1-8B"]


def test_ridges() -> None:
    ridges = {
        "B300": (281, 563, 1688),
        "B200": (281, 563, 1125),
        "H200": (206, 412),
        "GH200": (247, 495),
        "H100": (295, 591),
        "A100-80GB": (153,),
        "CPU-2core-AVX512": (8.33,),
    }
    for name, expected in ridges.items():
        device = DEVICES[name]
        found = [device.ridge(kind) for kind in ("bf16", "fp8", "fp4") if kind in device.peaks]
        assert found == pytest.approx(list(expected), rel=4e-3)


def test_devices_are_found_by_the_names_that_people_type() -> None:
    for device, names in {
        "B200": ("b200", "B200 180GB"),
        "H100": ("H100-SXM", "H100 80GB", "NVIDIA H100 80GB HBM3"),
        "H100-PCIe": ("H100-PCIe",),
        "H200": ("H200 141GB",),
        "A100-80GB": ("A100", "NVIDIA A100-SXM4-80GB"),
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
        assert re.search(rf"Did you mean [^?]*{near}[^?]*\?", caught.value.hint or "")
        assert "`this` is this machine" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="No H100 of 94 GB is known") as caught:
        find_device("H100 94GB")
    assert "85.52 GB" in (caught.value.hint or "")


def test_8_bit_integers_run_at_their_own_rate() -> None:
    """W8A8 in integers is as fast as in floats on an H100, faster than bf16 on an A100; the B300 gave its units up."""
    for name, teraflops in {
        "A100-80GB": 624,
        "H100": 1979,
        "L4": 242.5,
        "T4": 130,
        "L40S": 733,
        "A10G": 140,
        "MI300X": 2614.9,
        "RTX-4090": 660.6,
        "B200": 4500,
        "B300": 150,
    }.items():
        assert DEVICES[name].peak("int8") == teraflops * 1e12
    model = replace(LLAMA, precision=Precision.of("int8"))
    wide, narrow = (CostModel(each, DEVICES["A100-80GB"]).step([SequenceLoad(0, 1, 512)]) for each in (LLAMA, model))
    assert narrow.parts["ffn"].seconds == pytest.approx(wide.parts["ffn"].seconds / 2)
    alone = replace(LLAMA, precision=Precision.of("w8a16"))
    assert CostModel(alone, H100).step([SequenceLoad(0, 1, 512)]).parts["ffn"].seconds == pytest.approx(
        CostModel(LLAMA, H100).step([SequenceLoad(0, 1, 512)]).parts["ffn"].seconds
    )


def test_16_bits_of_either_kind() -> None:
    """The T4 has no bf16 and serves such weights in fp16; the others list one rate for both kinds."""
    t4 = DEVICES["T4"]
    assert t4.peak("bf16") == t4.peak("fp16") == t4.peak("fp4") == 65e12
    assert H100.peak("fp16") == H100.peak("bf16")
    assert CostModel(LLAMA, t4).seconds([SequenceLoad(100, 1)]) == pytest.approx(
        CostModel(replace(LLAMA, precision=Precision.of("fp16")), t4).seconds([SequenceLoad(100, 1)])
    )


KERNEL_MS = {1: 5.25, 2: 5.79, 4: 6.26, 8: 6.87, 12: 9.9, 16: 11.3}


def test_the_cpu_follows_measured_passes_within_7_percent() -> None:
    """The measured passes of SmolLM2-135M in bf16 by rows: a larger-of-both roofline at the best rate seen (814
    GFLOP/s) takes 16 rows for free and is 54 % too fast there."""
    cost = CostModel(TABLE["SmolLM2-135M"], find_device("cpu"))
    for rows, measured in KERNEL_MS.items():
        found = cost.seconds([SequenceLoad(0, rows)]) * 1e3
        assert found == pytest.approx(measured, rel=0.07)
        read, computed = 2 * 134_479_872 / 51e9, 2 * 134_479_872 * rows / 425e9
        assert found == pytest.approx(1e3 * (read**2 + computed**2) ** 0.5, rel=1e-3)


@pytest.mark.parametrize(
    ("precision", "measured"),
    [("q8_0", {1: 2.76, 4: 3.47, 8: 4.51, 16: 7.33}), ("q4_1::q8_0", {1: 1.85, 4: 2.54, 8: 4.20, 16: 7.61})],
)
def test_the_cpu_follows_quantised_passes(precision: str, measured: dict[int, float]) -> None:
    model = replace(TABLE["SmolLM2-135M"], precision=Precision.parse(precision))
    cost = CostModel(model, find_device("cpu"))
    for rows, milliseconds in measured.items():
        assert cost.seconds([SequenceLoad(0, rows)]) * 1e3 == pytest.approx(milliseconds, rel=0.08)


def test_how_far_reading_and_computing_overlap() -> None:
    """Powers of small seconds do not vanish, nothing to compute costs the reading alone, and 1 is their sum."""
    for overlap, expected in ((None, 4.0), (1.0, 7.0), (2.0, 5.0)):
        device = Device("x", {"bf16": 1e12}, 1e12, None, overlap=overlap)
        assert device.seconds(3e12, 4e12, compute="bf16") == pytest.approx(expected)
        assert device.seconds(3e-300, 4e-300, compute="bf16") == pytest.approx(expected * 1e-312)
        assert device.seconds(3e12, 0, compute="bf16") == 3
    wide = Device("x", {"bf16": 1e12}, 1e12, None, overlap=1e6)
    assert wide.seconds(3e12, 4e12, compute="bf16") == pytest.approx(4)


def test_a_machine_of_ones_own() -> None:
    assert Device.from_dict({key: value for key, value in B200.as_dict().items() if key != "label"}) == replace(
        B200, label="given"
    )
    for values, message in (
        ({"name": "x", "peaks": {"bf16": 1e12}}, "lacks 'bandwidth'"),
        ({"name": "x", "peaks": {}, "bandwidth": 1e9}, "lacks 'peaks'"),
        ({"name": "x", "peaks": {"bf16": -1}, "bandwidth": 1e9}, "peaks.bf16 = -1"),
        ({"name": "x", "peaks": {"bf16": 1e12}, "bandwidth": 1e9, "bandwith": 1}, "no 'bandwith'"),
    ):
        with pytest.raises(UsageError, match=message):
            Device.from_dict(values)
