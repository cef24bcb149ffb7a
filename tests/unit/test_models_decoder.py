"""The decoder as a target: rows do not depend on each other, and buffers have the planned size."""

from __future__ import annotations

import gc
import math
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import TOKENS, spec

from closeness import assert_close
from oracle.kernels import ReferenceKernels
from packing import Rows, batch, chain
from wager.arch import DeltaNet, Dense, Experts, Gating, Gqa, Mamba2, Mla, ModelSpec, Rope, ShortConv
from wager.arch.layers import Absent, Parallel
from wager.arch.spec import Multipliers
from wager.errors import UsageError
from wager.kernels.arrays import Array
from wager.kernels.base import BLOCK_SIZE
from wager.kernels.cpu import Kernels
from wager.models.random_models import RandomWeights
from wager.models.transformer import Decoder, block_bytes, states_bytes, weight_bytes, workspace_bytes
from wager.models.weights import Matrices
from wager.types import KVDtype

SIGMOID = Gating("sigmoid", correction_bias=True, groups=4, top_groups=2, group_best=2)
GEMMA4: dict[str, Any] = {
    "qk_norm": True,
    "value_norm": True,
    "layer_scales": True,
    "post_norms": True,
    "rope": Rope(500.0, (1.0,) * 4 + (math.inf,) * 12),
    "local_rope": Rope(70.0),
    "activation": "gelu",
    "attention_scale": 1.0,
    "embedding_scale": 7.0,
    "logit_cap": 9.0,
}
SHAPES: dict[str, ModelSpec] = {
    "plain": spec(),
    "everything": spec(
        (Gqa(6, 2, 16, window=11), Gqa(6, 2, 16)),
        tied=False,
        qk_norm=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        rope=Rope(500.0, (3.0,) * 8, 1.2),
    ),
    "norms on both sides": spec(
        (Gqa(6, 2, 16, window=11, rotation="local"), Gqa(6, 2, 16, rotated=12), Gqa(6, 2, 16, rotation="none")),
        (Dense(64),) * 3,
        qk_norm=True,
        post_norms=True,
        local_rope=Rope(70.0),
        activation="gelu",
        embedding_scale=7.0,
        attention_scale=0.2,
        attention_cap=4.0,
        logit_cap=3.0,
    ),
    "norms behind": spec(
        qk_norm=True, whole_qk_norm=True, pre_norms=False, post_norms=True, rope=Rope(500.0, (), 1.0, (3.0,) * 8, 32)
    ),
    "multipliers": spec(embedding_scale=3.0, residual_scale=0.4, attention_scale=0.1),
    "experts": spec(ffn=(Dense(64), Experts(9, 3, 1, 24, 20))),
    "sinks and biased experts": spec(
        (Gqa(6, 2, 16, window=11, sinks=True), Gqa(6, 2, 16, sinks=True)),
        (Experts(9, 3, 0, 24, biased=True),) * 2,
        qkv_bias=True,
        output_bias=True,
        activation="clamped",
    ),
    "shared experts behind a gate": spec(ffn=(Experts(9, 3, 1, 24, 20, shared_gate=True),) * 2, residual_scale=0.5),
    "recurrent": spec(
        (DeltaNet(2, 4, 16, 32, 4), Gqa(6, 2, 16, gated=True, rotated=8), DeltaNet(2, 4, 16, 32, 4)),
        (Dense(64), Experts(9, 3, 1, 24, 20, shared_gate=True), Dense(64)),
        qk_norm=True,
    ),
    "mamba": spec(
        (Mamba2(4, 16, 2, 32, 4), Gqa(6, 2, 16, rotation="none"), Mamba2(4, 16, 2, 32, 4)),
        (Dense(64),) * 3,
        residual_scale=0.4,
    ),
    "attention beside mamba": spec(
        (
            Parallel(Gqa(6, 2, 16), Mamba2(4, 16, 2, 32, 4, normed=False)),
            Parallel(Gqa(6, 2, 16), Mamba2(4, 16, 2, 32, 4, gate_first=False)),
        ),
        multipliers=Multipliers(0.9, 0.4, 0.6, 0.9, 0.5, 0.3, 0.4, 0.6, 0.5),
    ),
    "two sizes of heads, embeddings by layer": spec(
        (
            Gqa(6, 2, 16, window=11, rotation="local"),
            Gqa(6, 1, 32),
            Gqa(6, 2, 16, window=11, rotation="local", shared=True),
        ),
        (Dense(64), Dense(64), Dense(96)),
        **GEMMA4,
        layer_embedding=16,
    ),
    "two sizes of heads, experts apart": spec(
        (Gqa(6, 2, 16, window=11, rotation="local"), Gqa(6, 3, 32, keys_as_values=True)),
        (Dense(64), Experts(9, 3, 1, 24, 20, Gating(expert_scales=True), apart=True)),
        **GEMMA4,
    ),
    "sublayers alone": spec(
        (Mamba2(4, 16, 2, 32, 4), Absent(), Gqa(6, 2, 16, rotation="none"), Absent()),
        (Absent(), Dense(64, gated=False), Absent(), Dense(64, gated=False)),
        mlp_bias=True,
        activation="relu2",
    ),
    "experts without gates, of latents": spec(
        (Gqa(6, 2, 16, rotation="none"), Absent(), Gqa(6, 2, 16, rotation="none"), Absent()),
        (Absent(), Dense(64, gated=False), Absent(), Experts(9, 3, 1, 24, 80, gated=False, latent=32)),
        activation="relu2",
    ),
    "short convolutions": spec((ShortConv(48, 3), Gqa(6, 2, 16), ShortConv(48, 3)), (Dense(64),) * 3, qk_norm=True),
    "split latent": spec((Mla(6, None, 32, 24, 16, 20),) * 2, (Dense(64),) * 2, split_latent=True),
    "latent": spec(
        (Mla(6, 26, 32, 24, 16, 20),) * 2, (Experts(8, 2, 0, 18, gating=SIGMOID),) * 2, attention_scale=0.15
    ),
}


def build(
    shape: ModelSpec,
    kernels: Kernels | None = None,
    *,
    blocks: int = 24,
    max_logits_rows: int | None = None,
    kv_dtype: KVDtype = "bf16",
    dtype: str = "auto",
) -> Decoder:
    return Decoder(
        RandomWeights(shape, 1),
        kernels or ReferenceKernels(),
        num_blocks=blocks,
        max_rows=48,
        max_sequences=6,
        max_blocks=6,
        max_logits_rows=max_logits_rows,
        kv_dtype=kv_dtype,
        dtype=dtype,
    )


def alone(decoder: Decoder, tokens: Sequence[int], blocks: Sequence[int]) -> Array:
    """Logits after every token, decoded one by one."""
    passes = [batch([chain(i, [token], blocks)], [0]) for i, token in enumerate(tokens)]
    return np.concatenate([decoder.forward(packed).logits.copy() for packed in passes])


@pytest.fixture(scope="module", params=SHAPES)
def shape(request: pytest.FixtureRequest) -> ModelSpec:
    return SHAPES[request.param]


@pytest.fixture(scope="module")
def decoder(shape: ModelSpec) -> Decoder:
    return build(shape, Kernels(threads=1))


@pytest.fixture(scope="module")
def expected(decoder: Decoder) -> Array:
    return alone(decoder, TOKENS[:40], [0, 1, 2])


@settings(max_examples=10, deadline=None)
@given(cuts=st.sets(st.integers(1, 39), max_size=6), blocks=st.permutations(range(8)))
def test_any_chunking_in_any_blocks_is_bit_equal(
    decoder: Decoder, expected: Array, cuts: set[int], blocks: list[int]
) -> None:
    edges, parts = [0, *sorted(cuts), 40], []
    for start, end in zip(edges, edges[1:], strict=False):
        packed = batch([chain(start, TOKENS[start:end], blocks[:4])], range(end - start))
        parts.append(decoder.forward(packed).logits.copy())
    assert np.array_equal(np.concatenate(parts), expected)


@settings(max_examples=10, deadline=None)
@given(ends=st.lists(st.integers(1, 39), min_size=1, max_size=6))
def test_any_other_rows_of_the_batch_are_bit_equal(decoder: Decoder, expected: Array, ends: list[int]) -> None:
    """Sequences of several lengths in one pass, each prefilled to its end and then decoding beside the others."""
    spans: list[Rows] = []
    for i, end in enumerate(ends):
        blocks = [3 * i + 2, 3 * i, 3 * i + 1]
        if end > 1:
            decoder.forward(batch([chain(0, TOKENS[: end - 1], blocks)], [0], first_state=i))
        spans.append(chain(end - 1, TOKENS[end - 1 : end], blocks))
    output = decoder.forward(batch(spans, range(len(ends))))
    for row, end in enumerate(ends):
        assert np.array_equal(output.logits[row], expected[end - 1])
        assert int(output.greedy_tokens[row]) == int(expected[end - 1].argmax())


@settings(max_examples=10, deadline=None)
@given(data=st.data(), base=st.integers(0, 30))
def test_any_tree_is_bit_equal_to_its_chains(decoder: Decoder, data: st.DataObject, base: int) -> None:
    size = data.draw(st.integers(1, 9))
    guesses = data.draw(st.lists(st.integers(0, 82), min_size=size, max_size=size))
    parents = [data.draw(st.integers(0, i)) for i in range(size)]  # row 0 is the last known token
    if base:
        decoder.forward(batch([chain(0, TOKENS[:base], [5, 9, 12])], [0]))
    rows: Rows = (base, [TOKENS[base], *guesses], [-1, *parents], [5, 9, 12])
    tree = decoder.forward(batch([rows], range(size + 1))).logits.copy()
    node = data.draw(st.integers(1, size))
    path: list[int] = []
    while node > 0:
        path.insert(0, node)
        node = parents[node - 1]
    tokens = [*TOKENS[: base + 1], *(guesses[n - 1] for n in path)]
    assert np.array_equal(tree[[0, *path]], alone(decoder, tokens, [1, 7, 3])[base:])


def test_nan_logits_are_reported_in_their_row_alone(shape: ModelSpec) -> None:
    decoder = build(shape)
    decoder.cache.of_layer(0)[0].keys[:, 2 * BLOCK_SIZE] = float("nan")
    spans = [chain(1, [3], [2]), chain(0, [3], [1])]
    output = decoder.forward(batch(spans, [0, 1]))
    assert int(output.greedy_tokens[0]) == -1
    assert int(output.greedy_tokens[1]) == int(output.logits[1].argmax())


@pytest.mark.parametrize(
    ("spans", "logits_rows", "named"),
    [
        ([chain(0, [1] * 49, [0, 1, 2, 3])], 1, "49 rows"),
        ([chain(0, [1], [i]) for i in range(7)], 1, "7 sequences"),
        ([chain(0, [1] * 9, [0])], 9, "9 logits rows"),
        ([chain(0, [1], list(range(7)))], 1, "7 blocks"),
    ],
)
def test_a_pass_too_large_is_refused(spans: list[Rows], logits_rows: int, named: str) -> None:
    decoder = build(SHAPES["plain"], max_logits_rows=8)
    with pytest.raises(UsageError, match=named):
        decoder.forward(batch(spans, range(logits_rows)))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bf16", "bf16"), ("q4", "q8")])
def test_allocated_bytes_equal_the_plan(shape: ModelSpec, dtype: str, kv_dtype: KVDtype) -> None:
    if kv_dtype == "q8" and isinstance(shape.attention, Mla):
        with pytest.raises(UsageError, match="kv_dtype = 'q8' is not possible with latent attention"):
            build(shape, kv_dtype=kv_dtype)
        return
    kernels = ReferenceKernels()
    sizes = {"max_rows": 48, "max_sequences": 6, "max_blocks": 6, "max_logits_rows": 20}
    tracemalloc.start()
    decoder = build(shape, kernels, max_logits_rows=20, dtype=dtype, kv_dtype=kv_dtype)
    allocated = array_bytes()
    tracemalloc.stop()
    weights = weight_bytes(Matrices(RandomWeights(shape, 1), dtype, kernels.act), kernels)
    planned = weights + workspace_bytes(shape, kernels, **sizes)
    planned += 24 * block_bytes(shape, kernels, kv_dtype) + states_bytes(shape, max_rows=48, max_sequences=6)
    assert allocated == pytest.approx(planned, rel=0.01)
    assert decoder.weight_bytes == weights
    assert decoder.workspace_bytes == workspace_bytes(shape, kernels, **sizes)


def array_bytes() -> int:
    """Bytes of all arrays at this moment, of those made since tracemalloc was started."""
    gc.collect()
    arrays = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([arrays]).traces)


@pytest.mark.parametrize("name", SHAPES)
def test_the_native_kernels_compute_the_same_model(name: str) -> None:
    shape = SHAPES[name]
    ours = build(shape, Kernels(threads=1))
    exact = build(shape, ReferenceKernels())
    packed = batch([chain(0, TOKENS[:40], [4, 5, 6])], range(40))
    near, far = ours.forward(packed).logits.copy(), exact.forward(packed).logits
    fewer = ours.forward(batch([chain(0, TOKENS[:40], [4, 5, 6])], [39, 0, 7]))
    assert np.array_equal(fewer.logits, near[[39, 0, 7]])
    apart = np.abs(near - far).max(axis=1)  # a row whose nearly equal experts change places is another text
    assert (apart < 0.05 * far.std()).astype(np.float32).mean() > (
        0.8 if shape.experts or shape.layer_embedding else 0.99
    )
    assert_close(
        ours.cache.read(4 * BLOCK_SIZE + 3).astype(np.float32),
        exact.cache.read(4 * BLOCK_SIZE + 3).astype(np.float32),
        atol=0.05,
        rtol=0.02,
    )
