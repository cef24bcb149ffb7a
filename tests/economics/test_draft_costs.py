"""The drafter's own roofline, and whether weights, drafter and cache fit in memory."""

from __future__ import annotations

import pytest

from wager.arch import TABLE
from wager.planner.cost import Cluster, CostModel, SequenceLoad
from wager.planner.devices import DEVICES
from wager.planner.drafting import (
    ConstantDraftCost,
    FractionalDraftCost,
    FreeDraftCost,
    PassDraftCost,
    block_drafter_cost,
    draft_model_cost,
    mtp_cost,
)
from wager.planner.plan import SPARE_SHARE, Deployment
from wager.simulation.latency import PublishedLatency

B200 = Cluster(DEVICES["B200"])
QWEN = TABLE["Qwen3.6-35B-A3B"]
HEAD, BLOCK = mtp_cost(QWEN, B200), block_drafter_cost(QWEN, B200)
PUBLISHED = PublishedLatency()
"""The model behind the golden values: one maximum over all weights of a pass, and experts picked with replacement."""

GOLDEN = {
    1: (140.9, 245.6),
    8: (179.4, 245.6),
    16: (214.1, 245.6),
    32: (262.1, 447.2),
    64: (308.9, 894.3),
    128: (332.4, 1788.6),
    256: (336.0, 3577.2),
    512: (336.1, 7154.5),
}


ROUTER = 256 * 2048
"""Elements of the head's router, which published drafter curves leave out."""


def without_attention(drafter: PassDraftCost, batch: float) -> float:
    """Seconds of a pass but for attention, which published drafter curves leave out."""
    step = drafter.cost.step([SequenceLoad(0, drafter.rows, batch)])
    return step.seconds - step.parts["attention"].seconds


def test_shapes_follow_from_the_target() -> None:
    vocabulary = QWEN.vocab * QWEN.hidden
    assert HEAD.own_elements + vocabulary - ROUTER == 535_822_336
    assert BLOCK.own_elements + vocabulary == 982_515_712
    experts = HEAD.cost.model.experts
    assert experts is not None
    assert HEAD.own_elements + vocabulary - ROUTER + 9 * experts.expert(QWEN.hidden) == 564_133_888


@pytest.mark.parametrize("batch", GOLDEN)
def test_a_pass_in_microseconds(batch: int) -> None:
    one, block = GOLDEN[batch]
    assert PUBLISHED.draft_seconds("mtp", batch, 1) * 1e6 == pytest.approx(one, abs=0.051)
    for depth in (1, 7, 15):
        assert BLOCK.seconds(batch, depth, context=0) == BLOCK.seconds(batch, 1, context=0)
        assert without_attention(BLOCK, batch) * 1e6 == pytest.approx(block, abs=0.051)
        assert PUBLISHED.draft_seconds("dflash", batch, depth) * 1e6 == pytest.approx(block, abs=0.051)
        assert HEAD.seconds(batch, depth, context=0) == pytest.approx(depth * HEAD.seconds(batch, 1, context=0))


@pytest.mark.parametrize(
    ("depth", "batch"), [(2, 39.8), (3, 66.8), (4, 93.1), (6, 143.3), (8, 192.1), (12, 288.6), (16, 384.8)]
)
def test_where_a_block_costs_as_much_as_passes(depth: int, batch: float) -> None:
    low, high = 20.0, 500.0
    for _ in range(60):
        middle = (low + high) / 2
        slower = PUBLISHED.draft_seconds("dflash", middle, 15) > PUBLISHED.draft_seconds("mtp", middle, depth)  # type: ignore[arg-type]
        low, high = (low, middle) if slower else (middle, high)
    assert high == pytest.approx(batch, abs=0.051)
    for drafted in (1, 8, 64, 512, 4096):
        assert PUBLISHED.draft_seconds("mtp", drafted, 1) < PUBLISHED.draft_seconds("dflash", drafted, 1)


def test_where_passes_turn_compute_bound() -> None:
    """Batch 670 for a pass of one position, 17.6 for a block of sixteen: from there on another request costs time."""

    def steep(drafter: str, batch: float) -> bool:
        before, after = (PUBLISHED.draft_seconds(drafter, each, 1) for each in (batch, batch * 1.001))  # type: ignore[arg-type]
        return after > 1.0005 * before

    assert [steep("mtp", batch) for batch in (660, 680)] == [False, True]
    assert [steep("dflash", batch) for batch in (17.5, 17.7)] == [False, True]
    steps = [BLOCK.seconds(batch, 1, context=0) for batch in (17.5, 17.5 * 1.001, 17.7, 17.7 * 1.001)]
    assert [steps[1] > 1.0005 * steps[0], steps[3] > 1.0005 * steps[2]] == [False, True]


def test_bounding_streams_apart_costs_more_only_where_one_is_saturated() -> None:
    for batch in (1, 16, 128):
        assert HEAD.seconds(batch, 1, context=0) == pytest.approx(PUBLISHED.draft_seconds("mtp", batch, 1), rel=0.01)
    assert HEAD.seconds(512, 1, context=0) > 1.3 * PUBLISHED.draft_seconds("mtp", 512, 1)


def test_drafters_without_a_roofline() -> None:
    cost = CostModel(QWEN, DEVICES["B200"])
    assert FreeDraftCost().seconds(64, 9, context=100) == 0
    assert ConstantDraftCost(3e-4).seconds(64, 3, context=0) == pytest.approx(9e-4)
    assert FractionalDraftCost(cost, 0.1).seconds(8, 4, context=77) == pytest.approx(
        0.4 * cost.seconds([SequenceLoad(77, 1, 8)])
    )
    small = draft_model_cost(TABLE["SmolLM2-135M"], B200)
    assert small.seconds(2, 5, context=50) == pytest.approx(5 * small.cost.seconds([SequenceLoad(50, 1, 2)]))
    for drafter in (HEAD, BLOCK, small, FractionalDraftCost(cost, 0.1)):
        assert drafter.seconds(8, 0, context=0) == 0


def test_a_dense_target_gets_a_dense_layer() -> None:
    model = TABLE["Llama-3.1-8B"]
    drafter = mtp_cost(model, B200)
    assert drafter.own_elements == 218_103_808 + 2 * 4096**2
    assert drafter.device_bytes == drafter.resident_bytes
    assert drafter.resident_bytes == 2 * drafter.own_elements
    assert drafter.kv_bytes(1000) == model.kv_bytes(1000) / 32


def test_a_cluster_divides_the_drafter_too() -> None:
    """And pays for the messages: two all-reduces of 4096 16-bit activations, 2 x 3/4 of them through every link."""
    alone = mtp_cost(TABLE["Llama-3.1-8B"], B200)
    divided = mtp_cost(TABLE["Llama-3.1-8B"], Cluster(DEVICES["B200"], tp=4, latency=5e-6))
    messages = 2 * (4096 * 2 * 1.5 / 900e9 + 5e-6)
    assert divided.seconds(1, 1, context=0) == pytest.approx(alone.seconds(1, 1, context=0) / 4 + messages)
    assert divided.device_bytes == alone.device_bytes / 4
    assert divided.kv_bytes(100) == alone.kv_bytes(100) / 4
    wide = mtp_cost(QWEN, Cluster(DEVICES["B200"], ep=8, latency=0))
    assert wide.seconds(32, 1, context=0) < mtp_cost(QWEN, B200).seconds(32, 1, context=0)
    # at batch 1 the fullest of eight ranks reads more than the 8 experts of one token, as in the target's step
    assert wide.seconds(1, 1, context=0) > mtp_cost(QWEN, B200).seconds(1, 1, context=0)


def test_a_heads_experts_are_stored_as_they_are_timed() -> None:
    """Over 8 ranks each reads at most, and stores, 256 / 8 of the head's experts; the rest of it is on every rank."""
    one, eight = (mtp_cost(QWEN, Cluster(DEVICES["B200"], ep=ranks)) for ranks in (1, 8))
    expert = 3 * 2048 * 512
    assert one.resident_bytes == eight.resident_bytes == one.device_bytes
    assert one.device_bytes - eight.device_bytes == 2 * expert * 256 * 7 / 8
    assert (
        Deployment(CostModel(QWEN, DEVICES["B200"], ep=8), eight).footprint(batch=1, context=1).drafter
        == eight.device_bytes
    )
    read = eight.cost.step([SequenceLoad(0, 1, 4096)]).parts["experts"].bytes
    assert read == pytest.approx(2 * expert * (256 / 8 + 1))


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_what_a_batch_takes() -> None:
    cost = CostModel(TABLE["Llama-3.1-8B"], DEVICES["H100"])
    drafter = mtp_cost(cost.model, cost.cluster)
    result = Deployment(cost, drafter).footprint(batch=10, context=1000)
    assert result.weights == 2 * (8_030_261_248 - 65 * 4096)
    assert result.cache == 10 * 1000 * (131_072 + 4096)
    assert result.total == result.weights + result.drafter + result.cache
    assert result.fits


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (8, 1), (1, 32)])
def test_the_largest_batch_fits_and_one_more_does_not(tp: int, ep: int) -> None:
    cost = CostModel(TABLE["DeepSeek-V3"], DEVICES["B200"], tp=tp, ep=ep)
    drafter = mtp_cost(cost.model, cost.cluster)
    most = Deployment(cost, drafter).largest_batch(8192)
    assert most is not None
    assert Deployment(cost, drafter).footprint(batch=most, context=8192).fits == (most > 0)
    assert Deployment(cost, drafter).footprint(batch=most + 1, context=8192).fits is False
    assert (most > 0) == (max(tp, ep) > 1)


def test_a_shared_latent_is_kept_on_every_device() -> None:
    one, eight = (CostModel(TABLE["DeepSeek-V3"], DEVICES["B200"], tp=tp) for tp in (1, 8))
    caches = [Deployment(cost, FreeDraftCost()).footprint(batch=1, context=1000).cache for cost in (one, eight)]
    assert caches[0] == caches[1] == 1000 * 70_272
    divided = Deployment(CostModel(TABLE["Llama-3.1-8B"], DEVICES["B200"], tp=8), FreeDraftCost()).footprint(
        batch=1, context=1000
    )
    assert divided.cache == 1000 * 131_072 / 8


def test_experts_are_spread_and_the_rest_is_replicated() -> None:
    model = TABLE["DeepSeek-V3"]
    routed = model.elements()["experts"]
    result = Deployment(CostModel(model, DEVICES["B200"], ep=32), FreeDraftCost()).footprint(batch=1, context=1)
    assert result.weights == pytest.approx(model.resident_bytes - routed + routed / 32)


def test_unknown_memory_is_unknown() -> None:
    cost = CostModel(TABLE["SmolLM2-135M"], DEVICES["CPU-2core-AVX512"])
    assert Deployment(cost, FreeDraftCost()).largest_batch(100) is None
    assert Deployment(cost, FreeDraftCost()).footprint(batch=1, context=100).fits is None
    assert 0 < SPARE_SHARE < 1
