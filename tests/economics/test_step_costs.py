"""Seconds of a step: streams, marginal costs, sharding, overheads; against formulas written out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wager.arch import TABLE, ModelSpec, Precision
from wager.errors import UsageError
from wager.planner.cost import CostModel, SequenceLoad
from wager.planner.devices import DEVICES, find_device
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


@pytest.mark.parametrize("line", STREAMS.strip().splitlines(), ids=lambda line: line.split()[0])
def test_one_token_costs_its_bytes(line: str) -> None:
    name, h200, b200 = line.split()
    for device, expected in ((H200, h200), (B200, b200)):
        cost = CostModel(as_the_reference_counts(TABLE[name]), device).step([SequenceLoad(0, 1)])
        weights = {"projections", "ffn", "router", "experts", "shared experts", "head"}
        taken = sum(part.seconds for part_name, part in cost.parts.items() if part_name in weights)
        assert taken * 1e3 == pytest.approx(float(expected), rel=0.012)


def test_a_dense_step_by_hand() -> None:
    """Llama-8B on H100, 3 requests of 1000 positions with 2 rows each: every stream written out."""
    step = CostModel(LLAMA, H100).step([SequenceLoad(1000, 2, 3)])
    bandwidth, peak = 3.35e12, 989.5e12
    projections = 32 * 4096 * 128 * 80
    ffn, head = 32 * 3 * 4096 * 14336, 128256 * 4096
    for name, size in (("projections", projections), ("ffn", ffn), ("head", head)):
        assert step.parts[name].seconds == pytest.approx(max(2 * size / bandwidth, 2 * size * 6 / peak))
        assert step.parts[name].bytes == 2 * size
        assert step.parts[name].bound == "memory"
    attention = 3 * 32 * max((4096 * 1000 + 8192 * 2) / bandwidth, 4 * 4096 * 1000 * 2 / peak)
    assert step.parts["attention"].seconds == pytest.approx(attention)
    assert step.seconds == pytest.approx(sum(part.seconds for part in step.parts.values()))
    assert step.binding == "ffn"


def test_an_expert_layer_by_hand() -> None:
    """Routed and shared experts are one stream of fp4 weights; beyond the knee compute is the larger."""
    step = CostModel(FLASH, B200).step([SequenceLoad(0, 1, 43)])
    size = 43 * 25_165_824 * 0.53 * (distinct_experts(256, 6, 43) + 1)
    assert step.parts["experts"].bytes == pytest.approx(size)
    assert step.parts["experts"].seconds == pytest.approx(size / 8e12)
    below, above = (
        CostModel(FLASH, B200).step([SequenceLoad(0, 1, batch)]).parts["experts"] for batch in (10_900, 11_000)
    )
    assert (below.bound, above.bound) == ("memory", "compute")


def test_head_router_and_shared_experts_are_billed_in_their_own_formats() -> None:
    """V4's release: head and router bf16, shared experts fp8, routed ones fp4; written out."""
    step = CostModel(TABLE["DeepSeek-V4-Flash"], B200).step([SequenceLoad(0, 1, 2)])
    assert step.parts["head"].bytes == 2 * 129280 * 4096
    assert step.parts["router"].bytes == 2 * 43 * 256 * 4096
    assert step.parts["shared experts"].bytes == 43 * 25_165_824
    assert step.parts["experts"].bytes == pytest.approx(0.53 * 43 * 25_165_824 * distinct_experts(256, 6, 2))
    many = CostModel(TABLE["DeepSeek-V4-Flash"], B200).step([SequenceLoad(0, 1, 1000)])
    assert many.parts["head"].seconds == pytest.approx(2 * 129280 * 4096 * 1000 / 2250e12)
    assert many.parts["projections"].seconds == pytest.approx(many.parts["projections"].flops / 4500e12)


def test_requests_alike_may_be_counted_or_listed() -> None:
    cost = CostModel(V3, H200)
    assert cost.seconds([SequenceLoad(500, 2, 3)]) == pytest.approx(cost.seconds([SequenceLoad(500, 2)] * 3))
    mixed = [SequenceLoad(500, 2), SequenceLoad(9000, 1), SequenceLoad(20, 7)]
    assert cost.seconds(mixed) == pytest.approx(cost.seconds(mixed[::-1]))


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


def test_the_first_draft_row_crosses_a_latent_attentions_ridge() -> None:
    """64 heads, fp8 cache on a B200: T* = 1.16, so the second row is the first that costs time."""
    kimi = replace(TABLE["Kimi-K2"], precision=Precision.of("bf16", "int4", shared="bf16", cache="fp8"))
    cost = CostModel(kimi, B200)
    assert cost.marginal_cost([SequenceLoad(10**6, 1)])["latent attention"] == pytest.approx(0, abs=1e-3)
    assert cost.marginal_cost([SequenceLoad(10**6, 2)])["latent attention"] == pytest.approx(1, abs=1e-3)


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


def test_an_overhead_is_added_to_every_step() -> None:
    ideal = CostModel(LLAMA, H100).step([SequenceLoad(100, 1, 2)])
    real = CostModel(LLAMA, H100, overhead=1.2e-4).step([SequenceLoad(100, 1, 2)])
    assert real.parts["overhead"].seconds == pytest.approx(1.2e-4)
    assert real.parts["ffn"] == ideal.parts["ffn"]
    assert real.seconds == pytest.approx(ideal.seconds + 1.2e-4)


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
    assert 1.2 * mean < fullest.bytes < 43 * 25_165_824 * 0.53 * 17


def test_wider_expert_parallelism_lowers_the_expert_tax() -> None:
    """The marginal cost of a row falls with the ranks, since they share experts; that of the links is always one."""
    costs = [CostModel(FLASH, B200, ep=ranks).marginal_cost([SequenceLoad(0, 1, 8)]) for ranks in (1, 4, 16)]
    assert costs[0]["experts"] > costs[1]["experts"] > costs[2]["experts"]
    assert costs[2]["dispatch"] == pytest.approx(1)


def test_tensor_parallelism_divides_matrices_and_pays_for_it() -> None:
    one, eight = (CostModel(LLAMA, H100, tp=tp).step([SequenceLoad(4096, 1, 4)]) for tp in (1, 8))
    assert eight.parts["ffn"].seconds == pytest.approx(one.parts["ffn"].seconds / 8)
    assert eight.parts["attention"].bytes == pytest.approx(one.parts["attention"].bytes / 8)
    sent = 2 * 32 * 4 * 4096 * 2 * 2 * 7 / 8
    assert eight.parts["all-reduce"].seconds == pytest.approx(sent / 450e9)


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


def test_one_group_of_tensor_parallel_ranks_reads_what_tensor_parallelism_reads() -> None:
    """With ep = tp there is one group, so balanced ranks read in all what the devices of tensor parallelism do."""
    load = [SequenceLoad(100, 1, 64)]
    both = CostModel(V3, B200, tp=8, ep=8, balanced=True).step(load).parts
    split = CostModel(V3, B200, tp=8).step(load).parts
    assert both["experts"].bytes == pytest.approx(split["experts"].bytes)


def test_balanced_ranks_read_the_mean() -> None:
    mean = 43 * 25_165_824 * 0.53 * (distinct_experts(256, 6, 32) / 16 + 1)
    balanced = CostModel(FLASH, B200, ep=16, balanced=True).step([SequenceLoad(0, 1, 2)]).parts["experts"]
    assert balanced.bytes == pytest.approx(mean)
    assert balanced.bytes < CostModel(FLASH, B200, ep=16).step([SequenceLoad(0, 1, 2)]).parts["experts"].bytes


def test_a_latent_that_all_heads_share_is_read_on_every_device() -> None:
    one, eight = (
        CostModel(V3, B200, tp=tp).step([SequenceLoad(100_000, 1)]).parts["latent attention"] for tp in (1, 8)
    )
    assert eight.bytes > 0.99 * one.bytes
    assert eight.flops == one.flops / 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 0}, "^tp = 0 is out of range"),
        ({"ep": 0}, "^ep = 0 is out of range"),
        ({"tp": 4, "ep": 2}, "tp = 4 does not divide ep = 2"),
        ({"tp": 16}, "8 devices of a node"),
        ({"tp": 7}, "tp = 7 does not divide the 128 attention heads of DeepSeek-V3"),
        ({"ep": 512}, "ep = 512 is more than the 256 experts"),
        ({"tp": 2, "link_latency": -1.0}, "link latency of -1.0"),
    ],
)
def test_clusters_that_are_not_modelled(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CostModel(V3, B200, **options)


def test_unknown_links_are_said_to_be_unknown() -> None:
    with pytest.raises(UsageError, match="link speed of RTX-4090 between devices of a node is not known"):
        CostModel(LLAMA, find_device("rtx-4090"), tp=2)
    with pytest.raises(UsageError, match="has no experts to spread"):
        CostModel(LLAMA, H100, ep=2)
