"""Drafters by shape, each against a formula written out beside it or published figures: heads that read their own
cache, EAGLE, Medusa, models divided over devices; what fits in memory.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from economics.published import PublishedLatency
from wager.arch import TABLE, ModelSpec, Precision, find_head
from wager.planner.cost import Cluster, CostModel
from wager.planner.devices import DEVICES
from wager.planner.drafting import (
    FREE,
    PassDraftCost,
    block_drafter_cost,
    constant_cost,
    draft_model_cost,
    eagle_cost,
    fractional_cost,
    medusa_cost,
    mtp_cost,
    released_cost,
)
from wager.planner.plan import Deployment, Footprint

LLAMA, SMALL, V3, QWEN = (TABLE[name] for name in ("Llama-3.1-8B", "SmolLM2-135M", "DeepSeek-V3", "Qwen3.6-35B-A3B"))
H100, B200 = Cluster(DEVICES["H100"]), Cluster(DEVICES["B200"])
BANDWIDTH, PEAK = 3.35e12, 989.5e12
D, VOCAB = 4096, 128256


def mtp_of(model: ModelSpec, cluster: Cluster) -> PassDraftCost:
    return mtp_cost(CostModel(model, cluster), cluster)


def stream(elements: float, rows: float) -> float:
    """Seconds of bf16 matrices of that many elements for that many rows."""
    return max(2 * elements / BANDWIDTH, 2 * elements * rows / PEAK)


def attention(context: float, rows: float, *, heads: int) -> float:
    """Seconds of a layer's attention for one sequence, heads of 128, 8 of keys and values, in 16 bits."""
    read = 2 * 8 * 128 * 2 * context + heads * 128 * 2 * rows
    return max(read / BANDWIDTH, 4 * heads * 128 * context * rows / PEAK)


# ---- shapes, by hand -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "context", "depth"), [(64, 8192, 6), (500, 2000, 1)])
def test_an_mtp_head_reads_the_cache_of_every_sequence(batch: int, context: int, depth: int) -> None:
    layer = D * 128 * (2 * 32 + 2 * 8) + 3 * D * 14336
    one = stream(layer + 2 * D * D + VOCAB * D, batch) + batch * attention(context, 1, heads=32)
    assert mtp_of(LLAMA, H100).seconds(batch, depth, context=context) == pytest.approx(depth * one)


@pytest.mark.parametrize(("batch", "context", "width"), [(64, 8192, 4), (8, 100_000, 2)])
def test_a_block_attends_from_every_one_of_its_rows(batch: int, context: int, width: int) -> None:
    layer = D * 128 * (2 * 64 + 2 * 8) + 3 * D * 3 * D
    cached = 8 * batch * attention(context, width, heads=64)
    drafter = block_drafter_cost(LLAMA, H100, width=width)
    expected = stream(8 * layer + 5 * D * D + VOCAB * D, batch * width) + cached
    assert drafter.max_depth == width - 1
    assert [drafter.seconds(batch, depth, context=context) for depth in range(1, width)] == pytest.approx(
        [expected] * (width - 1)
    )
    assert drafter.kv_bytes(context) == 8 * 2 * 8 * 128 * 2 * context


@pytest.mark.parametrize("vocab", [32000, None])
def test_an_eagle_head(vocab: int | None) -> None:
    """One layer that reads 2 d, a fusion of 3 d into d, a head over the draft vocabulary or the target's."""
    batch, context = 16, 5000
    qkv, layer = D * 128 * (32 + 2 * 8), D * 128 * (2 * 32 + 2 * 8) + 3 * D * 14336
    own, head = 3 * D * D + qkv + layer, D * (vocab or VOCAB)
    drafter = eagle_cost(LLAMA, H100, vocab=vocab)
    one = stream(own + head, batch) + batch * attention(context, 1, heads=32)
    assert drafter.seconds(batch, 4, context=context) == pytest.approx(4 * one)
    assert drafter.resident_bytes == 2 * (own + (head if vocab else 0))
    assert (drafter.kv_bytes(context), drafter.max_depth) == (2 * 8 * 128 * 2 * context, None)


def test_an_eagle_head_of_a_mixture_of_latent_attention_is_dense_and_grouped() -> None:
    drafter = eagle_cost(V3, Cluster(DEVICES["B200"], tp=2, ep=16), vocab=32000)
    hidden, heads = 7168, 112
    layer = hidden * 128 * (2 * heads + 2 * 14) + 3 * hidden * 18432
    own = 3 * hidden**2 + hidden * 128 * (heads + 28) + layer + hidden * 32000
    assert drafter.resident_bytes == 2 * own  # 16 bits, beside an fp8 target
    assert drafter.device_bytes == own  # shared by the two devices of a group, whole in every group


def test_released_heads() -> None:
    """Sizes of EAGLE-3 for Llama-3.1-8B and DSpark for Qwen3-8B, by configuration; a DSpark block takes
    a pass over its rows and, for every draft token, a product over the vocabulary with its Markov head of rank 256."""
    layer, qwen = D * 128 * (2 * 32 + 2 * 8), TABLE["Qwen3-8B"]
    own = 3 * D * D + D * 128 * (32 + 16) + layer + 3 * D * 14336
    eagle = released_cost(CostModel(LLAMA, H100), H100, find_head("eagle3", "Llama-3.1-8B", hidden=D), name="eagle3")
    assert eagle.resident_bytes == 2 * (own + D * 32000)
    one = stream(own + D * 32000, 16) + 16 * attention(5000, 1, heads=32)
    assert eagle.seconds(16, 4, context=5000) == pytest.approx(4 * one)
    cost, body = CostModel(qwen, H100), 5 * (layer + 3 * D * 12288) + 5 * D * D
    for kind, rows, depth, markov in (("dflash", 16, 15, 0), ("dspark", 7, 7, 256)):
        block = released_cost(cost, H100, find_head(kind, "Qwen3-8B", hidden=D), name=kind)
        assert (block.max_depth, block.resident_bytes) == (depth, 2 * (body + 2 * markov * 151936))
        one_pass = stream(body + D * 151936, 8 * rows) + 5 * 8 * attention(900, rows, heads=32)
        for drafted in (1, depth):
            expected = one_pass + drafted * stream(markov * 151936, 8)
            assert block.seconds(8, drafted, context=900) == pytest.approx(expected)


def test_multi_token_prediction_modules_have_their_published_sizes() -> None:
    """DeepSeek-V3: the tensors of the release's files, of which eh_proj has bf16 and 205,520,896 bytes, as the router
    has; without the scales of the others. All files have 688,574,839,360 bytes (github.com/simpx/model-inspect), head
    and embedding twice. Qwen3.6-35B-A3B: 564,133,888 that a token uses, the head among them (fergusfinn.com, June
    2026)."""
    module = mtp_of(V3, B200).resident_bytes
    assert module == 257 * 44_040_192 + 187_105_280 + 2 * 256 * 7168 + 205_520_896
    narrow = sum(size for part, size in V3.elements().items() if V3.precision.format_of(part).bytes == 1)
    scales = 4 * (narrow + module - 205_520_896) / 128**2
    files = V3.resident_bytes + module + 2 * 1_853_358_080 + scales
    assert files == pytest.approx(688_574_839_360, rel=1e-5), "all but norms"
    unused = (256 - 8) * 3 * 2048 * 512
    used = mtp_of(QWEN, B200).resident_bytes / 2 - unused + 248320 * 2048
    assert used - 2048 * 256 == pytest.approx(564_133_888, abs=1)  # which leaves out the router


def test_deepseek_v4_has_the_bytes_of_its_files() -> None:
    """Compressors in bf16, all else of attention in fp8, a module with its window alone (the tensors of the release at
    revision 60d8d707: bytes of shared experts, attention, indexers and compressors, head, embedding, routers, fusion;
    of the module in all)."""
    flash, module = TABLE["DeepSeek-V4-Flash"], mtp_of(TABLE["DeepSeek-V4-Flash"], B200)
    files = 1_107_363_840 + 4_706_307_584 + 801_075_968 + 2 * 1_059_061_760 + 92_316_672 + 33_556_480
    experts = 44 * 256 * 25_165_824
    assert flash.elements()["experts"] * 44 / 43 == experts == 283_467_841_536
    assert flash.resident_bytes + module.resident_bytes - 0.53 * experts == pytest.approx(files, rel=1.5e-3)
    assert module.resident_bytes == pytest.approx(3_593_787_756, rel=4e-3), "0.53 bytes for 0.53125"
    assert module.kv_bytes(1_000_000) == module.kv_bytes(128) == 128 * 584
    head = find_head("dspark", flash.name, hidden=4096)
    dspark = released_cost(CostModel(flash, B200), B200, head, name="dspark")
    square, markov = 4096**2, 256 * 129280  # fused in fp8; both of the Markov head's matrices in bf16
    assert dspark.resident_bytes == 3 * (module.resident_bytes - 2 * square) + 3 * square + 2 * 2 * markov
    product = dspark.seconds(1, 5, context=0) - dspark.seconds(1, 4, context=0)
    assert product == pytest.approx(2 * markov / B200.device.bandwidth)


def test_a_drafter_that_grows_a_tree_makes_a_pass_for_each_level() -> None:
    """Over the first token, then over as many nodes as are looked at further; a block and heads make one."""
    eagle, medusa = eagle_cost(LLAMA, H100), medusa_cost(LLAMA, H100)
    one, four = (eagle.cost.seconds(300, rows, batch=8) for rows in (1, 4))
    assert eagle.seconds(8, 3, context=300, width=4) == pytest.approx(one + 2 * four)
    assert medusa.seconds(8, 3, context=300, width=4) == medusa.seconds(8, 3, context=300)


def test_medusa_heads() -> None:
    heads = 5
    drafter = medusa_cost(LLAMA, H100, heads=heads)
    elements = heads * (D * D + VOCAB * D)
    for batch, depth in ((1, 1), (700, heads)):
        assert drafter.seconds(batch, depth, context=9999) == pytest.approx(stream(elements, batch))
    assert drafter.resident_bytes == drafter.device_bytes == 2 * elements
    assert (drafter.max_depth, drafter.kv_bytes(10_000)) == (heads, 0)


def test_an_mtp_head_has_the_targets_formats_and_a_trained_head_16_bits() -> None:
    """An fp8 target whose head stays in bf16; a shared head is read in the target's format, an own one in 16 bits."""
    narrow, all_narrow = (
        replace(LLAMA, precision=precision) for precision in (Precision.of("fp8", head="bf16"), Precision.of("fp8"))
    )
    layer, shared = D * 128 * (2 * 32 + 2 * 8) + 3 * D * 14336, 2 * VOCAB * D / BANDWIDTH
    expected = layer / BANDWIDTH + shared + attention(0, 1, heads=32)
    fusion = 2 * D * D / BANDWIDTH
    assert mtp_of(narrow, H100).seconds(1, 1, context=0) == pytest.approx(expected + 2 * fusion)
    assert mtp_of(all_narrow, H100).seconds(1, 1, context=0) == pytest.approx(expected - shared / 2 + fusion)
    trained = eagle_cost(LLAMA, H100).seconds(1, 1, context=0)
    assert eagle_cost(narrow, H100).seconds(1, 1, context=0) == pytest.approx(trained)
    assert eagle_cost(all_narrow, H100).seconds(1, 1, context=0) == pytest.approx(trained - shared / 2)
    for target in (narrow, all_narrow):
        assert medusa_cost(target, H100).seconds(1, 1, context=0) == medusa_cost(LLAMA, H100).seconds(1, 1, context=0)


def test_drafters_without_a_roofline() -> None:
    cost = CostModel(QWEN, B200)
    fraction = fractional_cost(cost, 0.1)
    assert FREE.seconds(64, 9, context=100) == 0
    assert constant_cost(3e-4).seconds(64, 3, context=0) == pytest.approx(9e-4)
    assert fraction.seconds(8, 4, context=77) == pytest.approx(0.4 * cost.seconds(77, 1, batch=8))
    small = draft_model_cost(SMALL, B200)
    assert small.seconds(2, 5, context=50) == pytest.approx(5 * small.cost.seconds(50, 1, batch=2))
    assert all(drafter.seconds(8, 0, context=0) == 0 for drafter in (fraction, small, block_drafter_cost(QWEN, B200)))


# ---- over several devices --------------------------------------------------------------------------------------------


def test_a_drafter_is_divided_by_its_own_cluster() -> None:
    """And pays for the messages: of the MTP head's one layer two all-reduces of 4096 16-bit activations, 2 x 7/8 of
    them through every link; of a model of 32 layers as many times."""
    for make, layers in ((mtp_of, 1), (draft_model_cost, 32)):
        whole, divided = (make(LLAMA, Cluster(DEVICES["H100"], tp, latency=5e-6)) for tp in (1, 8))
        messages = 2 * layers * (4096 * 2 * 2 * 7 / 8 / 450e9 + 5e-6)
        expected = whole.seconds(1, 3, context=0) / 8 + 3 * messages
        assert divided.seconds(1, 3, context=0) == pytest.approx(expected)
        assert divided.device_bytes == whole.device_bytes / 8
        assert divided.kv_bytes(1000) == whole.kv_bytes(1000) / 8


def test_a_heads_experts_are_stored_as_they_are_timed() -> None:
    """Over 8 ranks each reads at most, and stores, 256 / 8 of the head's experts; the rest of it is on every rank. At
    batch 1 the fullest of the ranks reads more than the 8 experts of one token, as in the target's step."""
    one, eight = (mtp_of(QWEN, Cluster(DEVICES["B200"], ep=ranks, latency=0)) for ranks in (1, 8))
    expert = 3 * 2048 * 512
    assert one.resident_bytes == eight.resident_bytes == one.device_bytes
    assert one.device_bytes - eight.device_bytes == 2 * expert * 256 * 7 / 8
    deployment = Deployment(CostModel(QWEN, Cluster(DEVICES["B200"], ep=8)), eight)
    assert deployment.footprint(batch=1, context=1).drafter == eight.device_bytes
    assert eight.cost.step(0, 1, batch=4096).parts["experts"].bytes == pytest.approx(2 * expert * (256 / 8 + 1))
    assert eight.seconds(32, 1, context=0) < one.seconds(32, 1, context=0)
    assert eight.seconds(1, 1, context=0) > one.seconds(1, 1, context=0)


# ---- published figures -----------------------------------------------------------------------------------------------

BLOCK = block_drafter_cost(QWEN, B200)

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
"""Microseconds of a pass by batch: of the head, of the block."""


def test_a_pass_in_microseconds() -> None:
    for batch, (head, block) in GOLDEN.items():
        step = BLOCK.cost.step(0, BLOCK.rows, batch=batch)
        without_attention = step.seconds - step.parts["attention"].seconds
        assert PUBLISHED.draft_seconds("mtp", batch, 1) * 1e6 == pytest.approx(head, abs=0.051)
        for depth in (1, 7, 15):
            assert PUBLISHED.draft_seconds("dflash", batch, depth) * 1e6 == pytest.approx(block, abs=0.051)
        assert without_attention * 1e6 == pytest.approx(block, abs=0.051)


# ---- memory ----------------------------------------------------------------------------------------------------------


def footprint(model: ModelSpec, *, context: int, tp: int = 1, ep: int = 1) -> Footprint:
    return Deployment(CostModel(model, Cluster(DEVICES["B200"], tp, ep)), FREE).footprint(batch=1, context=context)


def test_what_is_divided_and_what_every_device_keeps() -> None:
    """A latent that all heads share is kept on every device, key-value heads are divided, routed experts spread."""
    assert footprint(V3, context=1000).cache == footprint(V3, context=1000, tp=8).cache == 1000 * 70_272
    assert footprint(LLAMA, context=1000, tp=8).cache == 1000 * 131_072 / 8
    routed = V3.elements()["experts"]
    spread = V3.resident_bytes - routed + routed / 32
    assert footprint(V3, context=1, ep=32).weights == pytest.approx(spread)


@pytest.mark.parametrize(("tp", "ep"), [(8, 1), (1, 1), (1, 32)])
def test_the_largest_batch_fits_and_one_more_does_not(tp: int, ep: int) -> None:
    cost = CostModel(V3, Cluster(DEVICES["B200"], tp, ep))
    deployment = Deployment(cost, mtp_cost(cost, cost.cluster))
    most = deployment.largest_batch(8192)
    assert most is not None
    assert (most > 0) == (max(tp, ep) > 1)
    fits = [deployment.footprint(batch=most + more, context=8192).fits for more in (0, 1)]
    assert fits == [most > 0, False]
