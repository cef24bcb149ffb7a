"""Taps of the decoder: the residual stream of every row, as transformers gives it, whatever the other rows are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoder_engines import decoder_on, native
from hypothesis import given, settings
from hypothesis import strategies as st
from test_models_families import GEMMA4_EDGE
from tiny_models import SIZES, TOKENS, oracle, save, spec

from closeness import assert_close
from oracle.kernels import ReferenceKernels
from packing import Rows, batch, chain
from wager.arch import Dense, Experts, Gqa, Mla
from wager.errors import UsageError
from wager.kernels.arrays import Array
from wager.models.random_models import RandomWeights
from wager.models.transformer import Decoder
from wager.models.weights import open_weights

LAYERS = int(SIZES["num_hidden_layers"])


def taken(decoder: Decoder, spans: list[Rows], logits: Sequence[int] | None = None) -> tuple[dict[int, Array], Array]:
    rows = sum(len(span[1]) for span in spans)
    output = decoder.forward(batch(spans, range(rows) if logits is None else logits))
    assert output.last_hidden is not None
    return {layer: states.copy() for layer, states in output.taps.items()}, output.last_hidden.copy()


def test_they_are_the_hidden_states_of_transformers(tmp_path: Path) -> None:
    model = oracle("LlamaForCausalLM")
    decoder = decoder_on(open_weights(save(model, tmp_path)), ReferenceKernels("float32"))
    decoder.tap(range(LAYERS + 1))
    taps, last = taken(decoder, [chain(0, TOKENS[:40], [3, 9, 1])])
    unnormed: list[Array] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: unnormed.append(inputs[0][0].numpy()))
    with torch.no_grad():
        states = model(torch.tensor([TOKENS[:40]]), output_hidden_states=True).hidden_states
    assert list(taps) == list(range(LAYERS + 1))
    for layer, rows in taps.items():
        assert_close(rows, unnormed[0] if layer == LAYERS else states[layer][0].numpy(), rtol=1e-4, atol=1e-4)
    assert_close(last, unnormed[0], rtol=1e-4, atol=1e-4)
    decoder.tap([LAYERS])
    some = decoder.forward(batch([chain(0, TOKENS[:40], [3, 9, 1])], [7, 39])).taps
    assert list(some) == [LAYERS] and np.array_equal(some[LAYERS], taps[LAYERS])


@pytest.mark.slow
def test_they_are_those_of_layers_without_keys_and_values_too(tmp_path: Path) -> None:
    """From the last layer on that has some, a pass computes rows with logits alone."""
    model = oracle("Gemma4ForCausalLM", **GEMMA4_EDGE)
    decoder = decoder_on(open_weights(save(model, tmp_path)), ReferenceKernels("float32"))
    layers = GEMMA4_EDGE["num_hidden_layers"]
    decoder.tap(range(layers + 1))
    taps, _ = taken(decoder, [chain(0, TOKENS[:40], [3, 9, 1])])
    unnormed: list[Array] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: unnormed.append(inputs[0][0].numpy()))
    with torch.no_grad():
        states = model(torch.tensor([TOKENS[:40]]), output_hidden_states=True).hidden_states
    assert list(taps) == list(range(layers + 1))
    for layer, rows in taps.items():
        assert_close(rows, unnormed[0] if layer == layers else states[layer][0].numpy(), rtol=1e-4, atol=1e-4)
    for tapped in ([layers], [3, 5], [0, 4, layers]):
        decoder.tap(tapped)
        output = decoder.forward(batch([chain(0, TOKENS[:40], [3, 9, 1])], [7, 39]))
        assert sorted(output.taps) == tapped
        assert all(np.array_equal(output.taps[layer], taps[layer]) for layer in tapped)


@pytest.fixture(scope="module", params=["reference", "native", "experts", "latent", "shared"])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    """A decoder of two layers, tapped before and behind the last one."""
    kernels = ReferenceKernels() if request.param == "reference" else native()
    shapes: dict[str, Any] = {
        "experts": {"ffn": (Dense(64), Experts(6, 2, 1, 32))},
        "latent": {"attention": (Mla(6, 24, 32, 16, 16, 16),) * 2},
        "shared": {"attention": (Gqa(6, 2, 16), Gqa(6, 2, 16, shared=True)), "layer_embedding": 16, "post_norms": True},
    }
    made = decoder_on(RandomWeights(spec(**shapes.get(request.param, {})), 1), kernels)
    made.tap([1, 2])
    return made


@pytest.fixture(scope="module")
def expected(decoder: Decoder) -> tuple[Array, Array]:
    passes = [taken(decoder, [chain(i, [token], [0, 1, 2])]) for i, token in enumerate(TOKENS[:40])]
    assert all(np.array_equal(taps[2], last) for taps, last in passes)
    return np.concatenate([taps[1] for taps, _ in passes]), np.concatenate([taps[2] for taps, _ in passes])


@settings(max_examples=10, deadline=None)
@given(cuts=st.sets(st.integers(1, 39), max_size=5), ends=st.lists(st.integers(1, 39), max_size=3), every=st.booleans())
def test_rows_do_not_depend_on_chunks_or_neighbours(
    decoder: Decoder, expected: tuple[Array, Array], cuts: set[int], ends: list[int], *, every: bool
) -> None:
    """Nor on how many of them have logits."""
    edges = [0, *sorted(cuts), 40]
    for i, end in enumerate(ends):
        decoder.forward(batch([chain(0, TOKENS[:end], [3 * i + 5, 3 * i + 3, 3 * i + 4])], [0]))
    others = [chain(end, TOKENS[end : end + 1], [3 * i + 5, 3 * i + 3, 3 * i + 4]) for i, end in enumerate(ends)]
    for start, end in zip(edges, edges[1:], strict=False):
        spans, final = [*others, chain(start, TOKENS[start:end], [0, 1, 2])], len(others) + end - start - 1
        taps, last = taken(decoder, spans, None if every else [final])
        for got, whole in ((taps[1], expected[0]), (taps[2], expected[1])):
            assert np.array_equal(got[len(others) :], whole[start:end])
            assert all(np.array_equal(got[i], whole[at]) for i, at in enumerate(ends))
        assert np.array_equal(last, taps[2] if every else taps[2][[final]])


def test_only_what_is_tapped_is_given_and_nothing_else_changes(decoder: Decoder) -> None:
    span = [chain(0, TOKENS[:10], [7])]
    try:
        decoder.tap([])
        output = decoder.forward(batch(span, [9]))
        plain = output.logits.copy()
        assert not output.taps
        decoder.tap([0, 1, 2])
        output = decoder.forward(batch(span, [9]))
        assert np.array_equal(output.logits, plain) and [a.shape for a in output.taps.values()] == [(10, 48)] * 3
        with pytest.raises(UsageError, match="Layer 3 cannot be tapped: test has 2 layers"):
            decoder.tap([0, 3])
        assert sorted(decoder.forward(batch(span, [9])).taps) == [0, 1, 2]
    finally:
        decoder.tap([1, 2])
