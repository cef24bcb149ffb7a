"""The unrolled EAGLE-3 module: what a drafter computes row by row, at every depth, with every flag."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from plain_eagle import PlainEagle
from trained import eagle, states_of

from wager.train.trainer import TrainSettings, unrolled_loss

TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5]]
DEPTH = 4
NAMES = ("norm_before_residual", "fc_norm", "norm_output")
FLAGS = [dict(zip(NAMES, on, strict=True)) for on in itertools.product([True, False], repeat=3)]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_the_unrolled_rows_are_those_of_a_chain(flags: dict[str, bool]) -> None:
    module, target = eagle(**flags)
    states = states_of(target, TOKENS)
    weights = {name: value.double().numpy() for name, value in module.state_dict().items()}
    plain = PlainEagle(module.sizes, weights, target.embedding.double().numpy(), target.rotation.double().numpy())
    with torch.no_grad():
        steps = list(module.steps(states, DEPTH, None))
    for text, row in itertools.product(range(2), (0, 3, 7)):
        chain = plain.chain(states.taps[text, : row + 1].double().numpy(), TOKENS[text], DEPTH)
        for depth, (found, expected) in enumerate(zip(steps, chain, strict=True)):
            np.testing.assert_allclose(found.states[text, row].numpy(), expected, atol=2e-4, rtol=2e-4)
            assert found.positions[text, row] == row + 1 + depth
            assert found.valid[text, row]


def test_rows_beyond_the_text_are_not_valid() -> None:
    module, target = eagle()
    with torch.no_grad():
        steps = list(module.steps(states_of(target, TOKENS), 3, None))
    rows = len(TOKENS[0]) - 1
    assert [int(step.valid.sum()) for step in steps] == [2 * rows, 2 * (rows - 1), 2 * (rows - 2)]


def test_thinned_rows_are_the_same_rows_fewer_of_them() -> None:
    module, target = eagle()
    object.__setattr__(module.sizes, "depth_share", 0.5)
    states = states_of(target, TOKENS)
    with torch.no_grad():
        whole = list(module.steps(states, 3, None))
        thin = list(module.steps(states, 3, torch.Generator().manual_seed(1)))
    assert [step.states.shape[1] for step in thin] == [11, 6, 3]
    for depth, (some, every) in enumerate(zip(thin, whole, strict=True)):
        rows = (some.positions - 1 - depth)[..., None].expand_as(some.states)
        torch.testing.assert_close(some.states[some.valid], every.states.gather(1, rows)[some.valid])


def test_the_loss_counts_weighted_rows_alone() -> None:
    module, target = eagle(vocabulary=range(0, 512, 2))
    states = states_of(target, TOKENS)
    settings = TrainSettings(depth=2, decay=0.5, precision="float32")
    states.weights[:] = 0
    states.weights[0, 5] = 2.0
    loss, _ = unrolled_loss(module, states, settings, None)
    with torch.no_grad():
        steps = list(module.steps(states, 2, None))
        label = module.labels(states.final[0, 5]).log_softmax(-1)
        parts = []
        for depth, step in enumerate(steps):
            found = module.logits(step.take(0)).log_softmax(-1)[4 - depth]
            parts.append((label.exp() * (label - found)).sum())
    assert loss.item() == pytest.approx(((parts[0] + 0.5 * parts[1]) / 1.5).item(), rel=1e-5)


def test_every_weight_learns_and_the_target_does_not() -> None:
    module, target = eagle()
    loss, _ = unrolled_loss(module, states_of(target, TOKENS), TrainSettings(precision="float32"), None)
    loss.backward()
    assert [name for name, parameter in module.named_parameters() if parameter.grad is None] == []
    assert not target.embedding.requires_grad
    assert "embedding" not in module.state_dict()
