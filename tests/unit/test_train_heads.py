"""The modules of heads: they are those that the engine's heads are compared with, Medusa's residual blocks, that
every weight learns, and the names of their exports."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from eagle_heads import VOCAB, Flags, ReferenceHead
from safetensors.torch import load_file
from test_block_heads import SLOTS, Kind, ReferenceBlock
from trained import module_of, states_of, target_of, texts

from closeness import assert_close
from wager.train.losses import LOSSES, divergence, rows_loss, unrolled_loss
from wager.train.session import RunOptions, TrainingSession, TrainSettings

TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5]]
LOSS = {"depth": 3, "decay": 0.8, "loss": "tv"}
SETTINGS = TrainSettings(steps=40, batch=160, depth=3, precision="float32", rate=3e-3, warmup=2)
OPTIONS = RunOptions(vocabulary=300, longest=32)


@pytest.mark.parametrize("state_norms", [True, False])
def test_the_unrolled_rows_are_those_of_a_chain(state_norms: bool) -> None:
    module, target = module_of("eagle3", state_norms=state_norms)
    matrix, states = target.embedding.numpy(), states_of(target, TOKENS)
    flags = Flags(target.taps, VOCAB, fc_norm=state_norms, norm_output=state_norms)
    head = ReferenceHead(flags, target_embedding=matrix, target_output=matrix, tensors=module.state_dict())
    with torch.no_grad():
        steps = list(module.steps(states, 4, None))
        for text, row in itertools.product(range(2), (0, 3, 7)):
            tokens, taps = TOKENS[text], states.taps[text, : row + 1].flatten(1).numpy()
            chain = head.rows(taps, tokens[: row + 2], tokens[row + 2 : row + 5])
            for depth, (found, expected) in enumerate(zip(steps, chain, strict=True)):
                assert_close(module.logits(found.take(text))[row].numpy(), expected, rtol=1e-3, atol=1e-3)
                assert found.positions[text, row] == row + 1 + depth
    rows = len(TOKENS[0]) - 1
    assert [int(step.valid.sum()) for step in steps] == [2 * (rows - depth) for depth in range(4)]


def test_every_block_is_what_it_is_alone() -> None:
    module, target = module_of("dspark")
    states = states_of(target, TOKENS)
    kind = Kind(target.taps, draft_vocab=VOCAB, anchor_guesses=True, rank=5)
    head = ReferenceBlock(kind, {**module.state_dict(), "embed_tokens.weight": target.embedding})
    with torch.no_grad():
        steps = list(module.steps(states, SLOTS, None))
        for text, row in itertools.product(range(2), (0, 4, 7)):
            tokens = TOKENS[text]
            alone = head.slots(states.taps[text, : row + 1].flatten(1).numpy(), tokens[: row + 2])
            for slot, found in enumerate(steps):
                assert found.positions[text, row] == row + 1 + slot
                assert found.previous[text, row] == tokens[row + 1 + slot]
                expected, _ = head.slot_logits(alone[slot], tokens[row + 1 + slot])
                assert_close(module.logits(found.take(text))[row].numpy(), expected.numpy(), rtol=1e-3, atol=1e-3)


def test_a_medusa_head_is_a_residual_block_on_the_last_state() -> None:
    module, target = module_of("medusa", noise=0)
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
    assert int(found[1].valid.sum()) == 2 * 10


def test_the_loss_counts_weighted_rows_alone() -> None:
    module, target = module_of("eagle3", vocabulary=range(0, VOCAB, 2))
    states = states_of(target, TOKENS)
    states.weights[:] = 0
    states.weights[0, 5] = 2.0
    loss, _ = unrolled_loss(module, states, depth=2, decay=0.5, loss="kl")
    with torch.no_grad():
        label = module.labels(states.final[0, 5]).log_softmax(-1)
        parts = []
        for depth, step in enumerate(module.steps(states, 2, None)):
            found = module.logits(step.take(0)).log_softmax(-1)[4 - depth]
            parts.append((label.exp() * (label - found)).sum())
    assert loss.item() == pytest.approx(((parts[0] + 0.5 * parts[1]) / 1.5).item(), rel=1e-5)


@pytest.mark.parametrize("kind", ["eagle3", "dspark", "medusa"])
def test_every_weight_learns_and_the_target_does_not(kind: str) -> None:
    module, target = module_of(kind, vocabulary=range(60))
    loss, agreement = unrolled_loss(module, states_of(target, TOKENS), **LOSS)
    loss.backward()
    assert [name for name, value in module.named_parameters() if value.grad is None or not value.grad.any()] == []
    assert len(agreement) == 3
    assert not target.embedding.requires_grad
    assert "embedding" not in module.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "dspark", "medusa"])
def test_it_learns_and_its_export_has_the_formats_names(kind: str, tmp_path: Path) -> None:
    run = TrainingSession(target_of(), texts(150), replace(SETTINGS, kind=kind), OPTIONS, tmp_path)
    run.run(lambda _: None)
    losses = [step["loss"] for step in run.history]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    extra = {"medusa": {"token_map"}}.get(kind, {"d2t", "t2d"})
    assert tensors.keys() == {*run.module.state_dict(), *extra}
    for name, value in run.module.state_dict().items():
        assert torch.equal(tensors[name], value.to(torch.bfloat16)), name
    assert shapes["lm_head.weight"] == (300, 64)
    assert config["wager"]["target_fingerprint"] == target_of().fingerprint
    assert config["wager"]["figures"]["held_out"]["texts"] > 0
    if kind == "medusa":
        assert config["model_type"] == "medusa"
        assert {key for key in config if "num" in key} == {"num_heads", "num_hidden_layers"}
        assert config["medusa_fc_bias"] is True, "readers drop the biases otherwise"
        assert tensors["token_map"].tolist() == run.vocabulary.ids.tolist()
        assert config["truncated_vocab_size"] == 300
        return
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == kind
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["draft_vocab_size"] == 300
    assert (np.arange(300) + tensors["d2t"].numpy()).tolist() == run.vocabulary.ids.tolist()
    assert np.flatnonzero(tensors["t2d"].numpy()).tolist() == run.vocabulary.ids.tolist()
    layer = config["transformer_layer_config"]
    assert layer["num_aux_hidden_states"] == 2, "readers assume three"
    assert (layer["head_dim"], layer["max_position_embeddings"]) == (16, 8192)
    if kind == "eagle3":
        for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad"):
            assert isinstance(config[flag], bool)
        assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1]
        assert shapes["layers.0.self_attn.q_proj.weight"] == (64, 128)
        return
    assert config["sample_from_anchor"] is True, "vLLM reads a missing key as false"
    assert config["sliding_window_non_causal"] is True, "false would make all layers causal"
    assert config["block_size"] == 3
    rank = config["markov_rank"]
    assert shapes["markov_head.markov_w1.weight"] == (512, rank)
    assert shapes["confidence_head.proj.weight"] == (1, 64 + rank)
    assert shapes["layers.1.self_attn.q_norm.weight"] == (16,)
    assert config["mask_token_id"] not in {token for text in run.data.train for token in text.ids}


# ---- losses ----


@pytest.mark.parametrize("loss", list(LOSSES))
def test_a_loss_is_its_definition_in_numpy(loss: str) -> None:
    noise = np.random.default_rng(1)
    draft, target = noise.normal(size=(40, 9)) * 3, noise.normal(size=(40, 9)) * 3
    draft[0] = target[0]
    q, p = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (draft, target))
    kl, tv = (p * np.log(p / q)).sum(-1), 0.5 * np.abs(p - q).sum(-1)
    share = np.exp(-3 * (1 - tv))
    expected = {
        "kl": kl,
        "tv": tv,
        "ce": -np.log(q[np.arange(40), p.argmax(-1)]),
        "lk": share * kl + (1 - share) * tv,
    }
    found = divergence(loss, torch.from_numpy(draft), torch.from_numpy(target)).numpy()
    np.testing.assert_allclose(found, expected[loss], atol=2e-6)


@pytest.mark.parametrize("count", [1, 512, 1300])
def test_losses_of_some_rows_at_a_time_have_the_gradients_of_all_at_once(count: int) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(6, 11)
    states = torch.randn(count, 6, requires_grad=True)
    weights, labels = torch.rand(count), torch.randn(count, 11)

    def compute(part: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        logits = head(part)
        return divergence("kl", logits, labels[rows]), logits.argmax(-1) == labels[rows].argmax(-1)

    total, weight = rows_loss(states, weights, list(head.parameters()), compute)
    (3 * total).backward()
    chunked = [states.grad, head.weight.grad, head.bias.grad]
    states.grad = None
    head.zero_grad()
    losses, right = compute(states, slice(None))
    (3 * (losses * weights).sum()).backward()
    torch.testing.assert_close(total, (losses * weights).sum())
    assert weight == pytest.approx(float((right * weights).sum()), rel=1e-5)
    for one, other in zip(chunked, [states.grad, head.weight.grad, head.bias.grad], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
