"""The target's states in torch: those of transformers and of our own decoder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from trained import states_of

from wager.errors import UsageError
from wager.models.opening import open_model
from wager.models.weights import open_weights
from wager.train.target import TorchTarget, default_taps


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
        ("Qwen3ForCausalLM", {"head_dim": 16}),
        ("MistralForCausalLM", {"sliding_window": 7}),
    ],
)
def test_taps_and_logits_are_those_of_transformers(architecture: str, config: dict, tmp_path: Path) -> None:
    model = tiny_models.oracle(architecture, **config)
    weights = open_weights(tiny_models.save(model, tmp_path / "model"))
    tokens = [tiny_models.TOKENS[:25], tiny_models.TOKENS[25:50]]
    target = TorchTarget(weights, (0, 1, 2, 3), dtype=torch.float32)
    found = states_of(target, tokens)
    with torch.no_grad():
        expected = model.model(torch.tensor(tokens), output_hidden_states=True)
    for tap in (0, 1, 2):
        torch.testing.assert_close(found.taps[:, :, tap], expected.hidden_states[tap].float(), atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(found.final, expected.last_hidden_state.float(), atol=2e-3, rtol=2e-3)
    assert not torch.allclose(found.taps[:, :, 3], found.final), "the last tap is before the final norm"
    for row, ids in enumerate(tokens):
        plain = tiny_models.logits(weights, ids)
        np.testing.assert_allclose(target.logits(found.final)[row].numpy(), plain, atol=5e-3, rtol=5e-3)


def test_padding_on_the_right_changes_nothing_before_it() -> None:
    target = TorchTarget(open_model("random:llama:tiny")[1], (1,), dtype=torch.float32)
    alone = states_of(target, [[5, 6, 7]])
    padded = states_of(target, [[5, 6, 7, 0, 0], [1, 2, 3, 4, 5]])
    torch.testing.assert_close(padded.taps[:1, :3], alone.taps)
    torch.testing.assert_close(padded.final[:1, :3], alone.final)


def test_targets_and_taps_that_cannot_be_used_are_named() -> None:
    with pytest.raises(UsageError, match="latent attention or experts"):
        TorchTarget(open_model("random:mixtral:tiny")[1], (1,), dtype=torch.float32)
    with pytest.raises(UsageError, match=r"Layer .3. cannot be tapped"):
        TorchTarget(open_model("random:llama:tiny")[1], (1, 3), dtype=torch.float32)
    target = TorchTarget(open_model("random:llama:tiny")[1], (1,), dtype=torch.float32, positions=4)
    with pytest.raises(UsageError, match="5 tokens exceeds the 4"):
        states_of(target, [[1, 2, 3, 4, 5]])


def test_the_usual_taps() -> None:
    assert default_taps(30) == (2, 15, 27)
    assert default_taps(2) == (0, 1)
    assert default_taps(1) == (0,)
