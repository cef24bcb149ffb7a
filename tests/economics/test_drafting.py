"""Drafters by shape, each against a formula written out beside it or published figures: heads that read their own
cache, EAGLE, Medusa, models divided over devices, staged, remote and asynchronous drafting; what fits in memory.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wager.arch import TABLE, Precision
from wager.errors import UsageError
from wager.planner.acceptance import AcceptanceRates
from wager.planner.cost import Cluster, CostModel, SequenceLoad
from wager.planner.devices import DEVICES
from wager.planner.drafting import (
    ConstantDraftCost,
    DraftCost,
    DrafterLink,
    FractionalDraftCost,
    FreeDraftCost,
    PassDraftCost,
    block_drafter_cost,
    draft_model_cost,
    eagle_cost,
    medusa_cost,
    mtp_cost,
    staged_cost,
)
from wager.planner.plan import SPARE_SHARE, Deployment, round_seconds
from wager.simulation.latency import PublishedLatency

H100 = DEVICES["H100"]


LLAMA, SMALL = TABLE["Llama-3.1-8B"], TABLE["SmolLM2-135M"]


ONE = Cluster(H100)


BANDWIDTH, PEAK = 3.35e12, 989.5e12


D, VOCAB = 4096, 128256


def stream(elements: float, rows: float) -> float:
    """Seconds of bf16 matrices of that many elements for that many rows."""
    return max(2 * elements / BANDWIDTH, 2 * elements * rows / PEAK)


def attention(context: float, rows: float, *, heads: int, kv_heads: int) -> float:
    """Seconds of a layer's attention for one sequence, heads of 128, 16-bit cache and queries."""
    read = 2 * kv_heads * 128 * 2 * context + heads * 128 * 2 * rows
    return max(read / BANDWIDTH, 4 * heads * 128 * context * rows / PEAK)


@pytest.mark.parametrize(("batch", "context", "depth"), [(1, 0, 3), (64, 8192, 6), (500, 2000, 1)])
def test_an_mtp_head_reads_the_cache_of_every_sequence(batch: int, context: int, depth: int) -> None:
    layer = D * 128 * (2 * 32 + 2 * 8) + 3 * D * 14336
    one = stream(layer + 2 * D * D + VOCAB * D, batch) + batch * attention(context, 1, heads=32, kv_heads=8)
    assert mtp_cost(LLAMA, ONE).seconds(batch, depth, context=context) == pytest.approx(depth * one)


@pytest.mark.parametrize(("batch", "context", "width"), [(1, 0, 16), (64, 8192, 16), (64, 8192, 4), (8, 100_000, 2)])
def test_a_block_attends_from_every_one_of_its_rows(batch: int, context: int, width: int) -> None:
    layer = D * 128 * (2 * 64 + 2 * 8) + 3 * D * 3 * D
    rows = batch * width
    cached = 8 * batch * attention(context, width, heads=64, kv_heads=8)
    drafter = block_drafter_cost(LLAMA, ONE, width=width)
    expected = stream(8 * layer + 5 * D * D + VOCAB * D, rows) + cached
    assert drafter.max_depth == width - 1
    for depth in range(1, width):
        assert drafter.seconds(batch, depth, context=context) == pytest.approx(expected)
    assert drafter.kv_bytes(context) == 8 * 2 * 8 * 128 * 2 * context


@pytest.mark.parametrize("vocab", [None, 32000])
def test_an_eagle_head_by_hand(vocab: int | None) -> None:
    """One layer that reads 2 d, a fusion of 3 d into d, a head over the draft vocabulary or the target's."""
    batch, context = 16, 5000
    qkv, layer = D * 128 * (32 + 2 * 8), D * 128 * (2 * 32 + 2 * 8) + 3 * D * 14336
    own, head = 3 * D * D + qkv + layer, D * (vocab or VOCAB)
    drafter = eagle_cost(LLAMA, ONE, vocab=vocab)
    one = stream(own + head, batch) + batch * attention(context, 1, heads=32, kv_heads=8)
    assert drafter.seconds(batch, 4, context=context) == pytest.approx(4 * one)
    assert drafter.resident_bytes == 2 * (own + (head if vocab else 0))
    assert drafter.kv_bytes(context) == 2 * 8 * 128 * 2 * context
    assert drafter.max_depth is None


def test_an_eagle_head_of_a_mixture_of_latent_attention_is_dense_and_grouped() -> None:
    model = TABLE["DeepSeek-V3"]
    drafter = eagle_cost(model, Cluster(DEVICES["B200"], tp=2, ep=16), vocab=32000)
    hidden, heads = 7168, 112
    layer = hidden * 128 * (2 * heads + 2 * 14) + 3 * hidden * 18432
    own = 3 * hidden**2 + hidden * 128 * (heads + 28) + layer + hidden * 32000
    assert drafter.resident_bytes == 2 * own  # 16 bits, beside an fp8 target
    assert drafter.device_bytes == own  # shared by the two devices of a group, whole in every group


@pytest.mark.parametrize("heads", [1, 5])
def test_medusa_heads_by_hand(heads: int) -> None:
    drafter = medusa_cost(LLAMA, ONE, heads=heads)
    elements = heads * (D * D + VOCAB * D)
    for batch in (1, 700):
        for depth in range(1, heads + 1):
            assert drafter.seconds(batch, depth, context=9999) == pytest.approx(stream(elements, batch))
    assert drafter.resident_bytes == drafter.device_bytes == 2 * elements
    assert (drafter.max_depth, drafter.kv_bytes(10_000)) == (heads, 0)
    with pytest.raises(UsageError, match="0 heads"):
        medusa_cost(LLAMA, ONE, heads=0)


def test_a_draft_model_is_divided_by_its_own_cluster() -> None:
    """Llama-8B beside Llama-70B on eight devices: an eighth of its bytes, and two all-reduces in each of 32 layers."""
    whole, divided = (draft_model_cost(LLAMA, Cluster(H100, tp, latency=5e-6)) for tp in (1, 8))
    sent = 2 * 32 * 4096 * 2 * 2 * 7 / 8 / 450e9
    assert divided.seconds(1, 3, context=0) == pytest.approx(
        whole.seconds(1, 3, context=0) / 8 + 3 * (sent + 64 * 5e-6)
    )
    assert divided.device_bytes == whole.device_bytes / 8
    assert divided.kv_bytes(1000) == whole.kv_bytes(1000) / 8


# ---- staged ---------------------------------------------------------------------------------------------------------


def expected_passes(depth: int, acceptance: float, *, inner: int) -> float:
    """By enumeration of how many guesses every pass accepts."""
    if depth <= 0:
        return 0.0
    chances = [acceptance**i * (1 - acceptance) for i in range(inner)] + [acceptance**inner]
    return 1 + sum(chance * expected_passes(depth - i - 1, acceptance, inner=inner) for i, chance in enumerate(chances))


@pytest.mark.parametrize(
    ("depth", "acceptance", "inner"), [(1, 0.5, 3), (4, 0.5, 3), (6, 0.8, 2), (5, 0.0, 2), (6, 1.0, 2)]
)
def test_a_staged_drafter_of_one_sequence_takes_the_expected_passes(depth: int, acceptance: float, inner: int) -> None:
    small = draft_model_cost(SMALL, ONE)
    drafter = staged_cost(small, ConstantDraftCost(1e-5), acceptance=acceptance, depth=inner)
    guessed = min(inner, depth - 1)
    one = small.cost.seconds([SequenceLoad(700, guessed + 1, 1)]) + guessed * 1e-5
    passes = expected_passes(depth, acceptance, inner=guessed)
    assert drafter.seconds(1, depth, context=700) == pytest.approx(passes * one)
    assert drafter.seconds(1, 0, context=700) == 0


def test_a_batch_of_staged_drafts_waits_for_its_slowest_sequence() -> None:
    """Two tokens each for three sequences, one guess a pass: the second pass is made unless all three guesses hold."""
    small = draft_model_cost(SMALL, ONE)
    drafter = staged_cost(small, FreeDraftCost(), acceptance=0.6, depth=1)
    first = small.cost.seconds([SequenceLoad(100, 2, 3)])
    second = sum(chance * small.cost.seconds([SequenceLoad(100, 2, 3 * 0.4 / (1 - 0.6**3))]) for chance in [1 - 0.6**3])
    assert drafter.seconds(3, 2, context=100) == pytest.approx(first + second)
    assert sum(0.6 ** (3 - n) * 0.4**n for k in itertools.product((0, 1), repeat=3) if (n := sum(k))) == pytest.approx(
        1 - 0.6**3
    )


# ---- a device of its own, and drafting beside verification ----------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "hidden"), [(mtp_cost, 5 * D), (eagle_cost, 5 * 3 * D), (block_drafter_cost, 5 * 5 * D), (medusa_cost, D)]
)
def test_a_drafter_on_another_device_pays_for_the_link(make: object, hidden: int) -> None:
    """Four draft tokens: five verified rows of hidden states (Medusa: the last) and nine token ids a sequence."""
    drafter: DraftCost = make(LLAMA, ONE)  # type: ignore[operator]
    remote = replace(drafter, own_device=DEVICES["L40S"], link=DrafterLink(50e9, 5e-6))
    link = 10 * (2 * hidden + 9 * 4) / 50e9 + 2 * 5e-6
    assert remote.seconds(10, 4, context=300) == pytest.approx(drafter.seconds(10, 4, context=300) + link)
    assert remote.seconds(10, 0, context=300) == 0


def test_a_drafter_on_another_device_takes_memory_there() -> None:
    cost = CostModel(TABLE["Llama-3.1-70B"], DEVICES["B200"])
    drafter = draft_model_cost(LLAMA, Cluster(DEVICES["RTX-4090"]))
    remote = replace(drafter, own_device=DEVICES["RTX-4090"], link=DrafterLink(50e9))
    deployment = Deployment(cost, remote)
    alone = Deployment(cost, FreeDraftCost())
    assert deployment.footprint(batch=8, context=4096) == alone.footprint(batch=8, context=4096)
    there = deployment.drafter_footprint(batch=8, context=4096)
    assert there is not None
    assert (there.drafter, there.cache) == (LLAMA.resident_bytes, 8 * LLAMA.kv_bytes(4096))
    most = deployment.largest_batch(4096)
    room = (DEVICES["RTX-4090"].memory or 0) * 0.9 - LLAMA.resident_bytes
    assert most == int(room // LLAMA.kv_bytes(4096)) > 0
    point = deployment.point(AcceptanceRates("0.7", 0.7), batch=most + 1, context=4096)
    assert (point.memory.fits, point.fits) == (True, False)


@settings(deadline=None)
@given(st.floats(1e-6, 1), st.floats(0, 1), st.floats(0, 1))
def test_drafting_beside_verification_lies_between_the_larger_and_the_sum(
    step: float, draft: float, hit: float
) -> None:
    found = round_seconds(step, draft, hit_rate=hit)
    assert found == pytest.approx(hit * (step if step > draft else draft) + (1 - hit) * (step + draft))
    assert max(step, draft) - 1e-12 <= found <= step + draft + 1e-12
    assert round_seconds(step, draft) == step + draft


def test_asynchronous_drafting_in_a_plan() -> None:
    """Drafting that takes less than the step costs nothing where every outcome was drafted in advance."""
    cost, drafter, rate = CostModel(LLAMA, H100), ConstantDraftCost(5e-4), AcceptanceRates("0.8", 0.8)
    free, hit, half, miss, sync = (
        Deployment(cost, price, depth=4, hit_rate=share).point(rate, batch=4, context=1000)
        for price, share in ((FreeDraftCost(), None), (drafter, 1.0), (drafter, 0.5), (drafter, 0.0), (drafter, None))
    )
    assert hit.chosen.draft_s == pytest.approx(2e-3)
    assert hit.chosen.speedup == free.chosen.speedup
    assert miss.chosen.speedup == sync.chosen.speedup
    assert half.chosen.round_s == pytest.approx(half.chosen.step_s + 1e-3)
    assert half.seconds_per_token == pytest.approx(half.chosen.round_s / (4 * half.chosen.tokens))
    with pytest.raises(UsageError, match=r"hit rate of 1\.5"):
        Deployment(cost, drafter, hit_rate=1.5)


def test_an_mtp_head_has_the_targets_formats_and_a_trained_head_16_bits() -> None:
    """An fp8 target whose head stays in bf16; a shared head is read in the target's format, an own one in 16 bits."""
    narrow = replace(LLAMA, precision=Precision.of("fp8", head="bf16"))
    layer = D * 128 * (2 * 32 + 2 * 8) + 3 * D * 14336
    queries = attention(0, 1, heads=32, kv_heads=8)
    shared = 2 * VOCAB * D / BANDWIDTH
    assert mtp_cost(narrow, ONE).seconds(1, 1, context=0) == pytest.approx(
        (layer + 2 * D * D) / BANDWIDTH + shared + queries
    )
    trained = eagle_cost(LLAMA, ONE).seconds(1, 1, context=0)
    assert eagle_cost(narrow, ONE).seconds(1, 1, context=0) == pytest.approx(trained)
    all_narrow = replace(LLAMA, precision=Precision.of("fp8"))
    assert eagle_cost(all_narrow, ONE).seconds(1, 1, context=0) == pytest.approx(trained - shared / 2)
    for target in (narrow, all_narrow):
        assert medusa_cost(target, ONE).seconds(1, 1, context=0) == medusa_cost(LLAMA, ONE).seconds(1, 1, context=0)


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
