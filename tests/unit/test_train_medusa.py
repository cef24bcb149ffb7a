"""Medusa heads: what they compute, that they learn, and vLLM's names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from trained import states_of, target_of, texts, torch_target

from wager.train.data import DraftVocabulary
from wager.train.draft_module import DraftSizes, MedusaModule
from wager.train.session import RunOptions, TrainingSession
from wager.train.trainer import TrainSettings

TOKENS = [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]]
SETTINGS = TrainSettings(kind="medusa", steps=40, batch=160, depth=3, precision="float32", rate=3e-3, warmup=2)


def test_a_head_is_a_residual_block_on_the_last_state() -> None:
    target = torch_target()
    module = MedusaModule(DraftSizes(64, 96, 4, 2, 16, 1e-5, (0,), layers=2))
    module.attach(target, DraftVocabulary(np.arange(512), 512))
    states = states_of(target, TOKENS)
    with torch.no_grad():
        untrained = list(module.steps(states, 2, None))
        torch.testing.assert_close(module.logits(untrained[0].take(0)), target.logits(states.final)[0, :-1])
        for value in module.blocks.parameters():
            value.normal_()
        found = list(module.steps(states, 2, None))
    for head, step in enumerate(found):
        weight, bias = (module.state_dict()[f"blocks.{head}.layers.0.{part}"].double() for part in ("weight", "bias"))
        x = states.final[1, 2].double()
        inner = weight @ x + bias
        torch.testing.assert_close(step.states[1, 2].double(), x + inner * inner.sigmoid(), atol=1e-4, rtol=1e-4)
        assert step.positions[1, 2] == 3 + head
    assert int(found[1].valid.sum()) == 2 * 4


def test_it_learns_and_is_written_in_vllms_format(tmp_path: Path) -> None:
    run = TrainingSession(target_of(), texts(150), SETTINGS, RunOptions(vocabulary=300, longest=32), tmp_path)
    losses = [step["loss"] for step in run.run(lambda _: None).history]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "medusa"
    assert {key for key in config if "num" in key} == {"num_heads", "num_hidden_layers"}
    assert config["medusa_fc_bias"] is True, "readers drop the biases otherwise"
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(tensors) == {"lm_head.weight", "token_map"} | {
        f"blocks.{head}.layers.0.{part}" for head in range(3) for part in ("weight", "bias")
    }
    assert tensors["token_map"].tolist() == run.vocabulary.ids.tolist()
    assert config["truncated_vocab_size"] == len(tensors["lm_head.weight"]) == 300
