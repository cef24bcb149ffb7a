"""The block drafter: every block is what numpy computes for it alone, its heads learn, its export has its names."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from trained import states_of, target_of, texts, torch_target

from wager.train.block import BlockModule
from wager.train.data import DraftVocabulary
from wager.train.draft_module import DraftSizes
from wager.train.session import RunOptions, TrainingSession
from wager.train.target import TorchTarget
from wager.train.trainer import StepReport, TrainSettings, unrolled_loss

TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5]]
SLOTS, MASK = 3, 500
Floats = NDArray[np.float64]
SETTINGS = TrainSettings(kind="dspark", steps=6, batch=160, depth=3, precision="float32", rate=3e-3, warmup=2)
OPTIONS = RunOptions(vocabulary=300, longest=32, save_every=2)


def block(vocabulary: int = 512) -> tuple[BlockModule, TorchTarget]:
    target = torch_target()
    torch.manual_seed(4)
    sizes = DraftSizes(64, 96, 4, 2, 16, 1e-5, target.taps, layers=2, mask_token=MASK, markov_rank=5)
    module = BlockModule(sizes)
    module.attach(target, DraftVocabulary(np.arange(vocabulary), 512))
    for parameter in module.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return module, target


class PlainBlock:
    """One block in numpy, from the weights by their exported names."""

    def __init__(self, module: BlockModule, target: TorchTarget) -> None:
        self.sizes = module.sizes
        self.w = {name: value.double().numpy() for name, value in module.state_dict().items()}
        self.embedding, self.rotation = target.embedding.double().numpy(), target.rotation.double().numpy()

    def norm(self, x: Floats, name: str) -> Floats:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.sizes.norm_eps) * self.w[f"{name}.weight"]

    def turn(self, heads: Floats, position: int) -> Floats:
        cos, sin = np.split(self.rotation[position], 2)
        first, second = np.split(heads, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def key(self, layer: int, x: Floats, position: int) -> tuple[Floats, Floats]:
        name = f"layers.{layer}.self_attn"
        k = (self.w[f"{name}.k_proj.weight"] @ x).reshape(self.sizes.kv_heads, -1)
        v = (self.w[f"{name}.v_proj.weight"] @ x).reshape(self.sizes.kv_heads, -1)
        return self.turn(self.norm(k, f"{name}.k_norm"), position), v

    def run(self, taps: Floats, anchor: int) -> Floats:
        """What enters the output matrix [S, H], after states of positions 0 to len(taps) - 1."""
        count = len(taps)
        context = [self.norm(self.w["fc.weight"] @ row.reshape(-1), "hidden_norm") for row in taps]
        x = self.embedding[[anchor, *[MASK] * (SLOTS - 1)]]
        for layer in range(self.sizes.layers):
            name = f"layers.{layer}"
            normed = self.norm(x, f"{name}.input_layernorm")
            pairs = [self.key(layer, row, position) for position, row in enumerate(context)]
            pairs += [self.key(layer, row, count + slot) for slot, row in enumerate(normed)]
            keys, values = (np.stack(part, 1) for part in zip(*pairs, strict=True))
            found = []
            for slot, row in enumerate(normed):
                q = (self.w[f"{name}.self_attn.q_proj.weight"] @ row).reshape(self.sizes.heads, -1)
                q = self.turn(self.norm(q, f"{name}.self_attn.q_norm"), count + slot)
                heads = []
                for head in range(self.sizes.heads):
                    shared = head * self.sizes.kv_heads // self.sizes.heads
                    scores = np.exp(keys[shared] @ q[head] * self.sizes.head_dim**-0.5)
                    heads.append(scores / scores.sum() @ values[shared])
                found.append(self.w[f"{name}.self_attn.o_proj.weight"] @ np.concatenate(heads))
            x = x + np.stack(found)
            inner = self.norm(x, f"{name}.post_attention_layernorm")
            gate, up = inner @ self.w[f"{name}.mlp.gate_proj.weight"].T, inner @ self.w[f"{name}.mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.w[f"{name}.mlp.down_proj.weight"].T
        return self.norm(x, "norm")


def test_every_block_is_what_it_is_alone() -> None:
    module, target = block()
    states = states_of(target, TOKENS)
    plain = PlainBlock(module, target)
    with torch.no_grad():
        steps = list(module.steps(states, SLOTS, None))
    for text, row in itertools.product(range(2), (0, 4, 8)):
        alone = plain.run(states.taps[text, : row + 1].double().numpy(), TOKENS[text][row + 1])
        for slot, found in enumerate(steps):
            np.testing.assert_allclose(found.states[text, row].numpy(), alone[slot], atol=2e-4, rtol=2e-4)
            assert found.positions[text, row] == row + 1 + slot
            assert found.previous[text, row] == TOKENS[text][row + 1 + slot]
            with torch.no_grad():
                logits = module.logits(found.take(text))[row].double().numpy()
            markov = (
                plain.w["markov_head.markov_w2.weight"]
                @ plain.w["markov_head.markov_w1.weight"][TOKENS[text][row + 1 + slot]]
            )
            np.testing.assert_allclose(logits, plain.w["lm_head.weight"] @ alone[slot] + markov, atol=2e-3, rtol=2e-3)


def test_anchors_are_drawn_and_blocks_stay_the_same() -> None:
    module, target = block()
    states = states_of(target, TOKENS)
    with torch.no_grad():
        every = list(module.steps(states, SLOTS, None))
        some = list(module.steps(states, SLOTS, torch.Generator().manual_seed(1)))
    for slot, (few, whole) in enumerate(zip(some, every, strict=True)):
        assert few.states.shape[1] == 3
        rows = (few.positions - 1 - slot)[..., None].expand_as(few.states)
        inside = few.valid
        torch.testing.assert_close(few.states[inside], whole.states.gather(1, rows)[inside])


def test_every_weight_learns_the_confidence_too() -> None:
    module, target = block(400)
    loss, agreement = unrolled_loss(module, states_of(target, TOKENS), replace(SETTINGS, loss="tv"), None)
    loss.backward()
    assert [name for name, parameter in module.named_parameters() if parameter.grad is None] == []
    assert module.confidence_head.proj.weight.grad.abs().sum() > 0
    assert len(agreement) == 3


@pytest.mark.slow
def test_the_confidence_comes_to_be_the_acceptance(tmp_path: Path) -> None:
    run = TrainingSession(target_of(), texts(150), replace(SETTINGS, steps=40, rate=1e-2), OPTIONS, tmp_path)
    result = run.run(lambda _: None)
    losses = [step["loss"] for step in result.history]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])


def test_the_export_has_the_formats_names(tmp_path: Path) -> None:
    run = TrainingSession(target_of(), texts(150), SETTINGS, OPTIONS, tmp_path)
    run.run(lambda _: None)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "dspark"
    assert config["sample_from_anchor"] is True, "vLLM reads a missing key as false"
    assert config["sliding_window_non_causal"] is True, "false would make all layers causal"
    assert config["block_size"] == config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["markov_head.markov_w1.weight"].shape == (512, config["markov_rank"])
    assert tensors["markov_head.markov_w2.weight"].shape == (300, config["markov_rank"])
    assert tensors["confidence_head.proj.weight"].shape == (1, 64 + config["markov_rank"])
    assert tensors["layers.1.self_attn.q_norm.weight"].shape == (16,)
    assert config["mask_token_id"] not in {token for text in run.data.train for token in text.ids}


@pytest.mark.parametrize("after", [3, 5])
def test_a_killed_run_ends_in_the_same_weights(tmp_path: Path, after: int) -> None:
    def stop(step: StepReport) -> None:
        if step.step + 1 == after:
            raise KeyboardInterrupt

    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = TrainingSession(target_of(), texts(150), SETTINGS, OPTIONS, tmp_path / "whole")
    whole.run(lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        TrainingSession(target_of(), texts(150), SETTINGS, OPTIONS, tmp_path / "cut").run(stop)
    resumed = TrainingSession(target_of(), texts(150), SETTINGS, OPTIONS, tmp_path / "cut")
    assert resumed.trainer.step == after - 1
    resumed.run(lambda _: None)
    for name, value in whole.module.state_dict().items():
        assert torch.equal(value, resumed.module.state_dict()[name]), name
