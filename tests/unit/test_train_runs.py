"""Whole runs: one that is killed and resumed ends in the weights of one that was not, exports are read back, states are
kept, and the loss falls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from trained import contents, eagle, target_of, texts, torch_target

from wager.errors import ModelError, UsageError
from wager.models.tokenizer import Tokenizer
from wager.train.data import TrainingData, TrainingText
from wager.train.draft_module import DraftModule, OutputRows, StepRows
from wager.train.session import RunOptions, TrainingSession, held_out_acceptance
from wager.train.target import StateSource, TargetStates, TorchTarget
from wager.train.trainer import NAME, StepReport, TrainingCheckpoint, TrainSettings

SETTINGS = TrainSettings(steps=9, batch=160, depth=3, precision="float32", rate=3e-3, warmup=2, seed=5)
OPTIONS = RunOptions(vocabulary=300, longest=32, save_every=2, command="wager train")


class Killed(Exception):
    pass


def session(folder: Path, *, settings: TrainSettings = SETTINGS, options: RunOptions = OPTIONS) -> TrainingSession:
    folder.mkdir(exist_ok=True)
    return TrainingSession(target_of(), texts(150), settings, options, folder)


def kill_after(steps: int, folder: Path, *, options: RunOptions = OPTIONS) -> None:
    """A run that ends without warning after so many steps."""

    def report(step: StepReport) -> None:
        if step.step + 1 == steps:
            raise Killed

    with pytest.raises(Killed):
        session(folder, options=options).run(report)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(TrainingCheckpoint.load(folder).module)


@pytest.mark.parametrize("keep", [False, True])
def test_a_killed_run_ends_in_the_weights_of_an_uninterrupted_one(tmp_path: Path, keep: bool) -> None:
    options = replace(OPTIONS, keep=keep)
    whole = session(tmp_path / "whole", options=options).run(lambda _: None)
    for steps in (3, 2, 4, 1):  # 3: saved after 2; 2: begins at 2, saved after 4 ... each kill loses what was not saved
        kill_after(min(9, steps + _saved(tmp_path / "cut")), tmp_path / "cut", options=options)
    resumed = session(tmp_path / "cut", options=options)
    assert 0 < resumed.trainer.step < 9
    again = resumed.run(lambda _: None)
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert expected.keys() == found.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []
    assert again.history == whole.history
    assert again.acceptance == whole.acceptance


def _saved(folder: Path) -> int:
    return TrainingCheckpoint.load(folder).step if (folder / NAME).exists() else 0


def test_a_run_begins_with_the_weights_of_another(tmp_path: Path) -> None:
    session(tmp_path / "first").run(lambda _: None)
    options = replace(OPTIONS, begin_with=tmp_path / "first", vocabulary=200)
    (tmp_path / "second").mkdir()
    second = TrainingSession(target_of(), texts(80, seed=3), SETTINGS, options, tmp_path / "second")
    for name, value in weights(tmp_path / "first").items():
        assert torch.equal(value, second.module.state_dict()[name]), name
    assert len(second.vocabulary.ids) == 300, "that of the first run"
    second.run(lambda _: None)
    with pytest.raises(UsageError, match="begun_with = "):
        session(tmp_path / "second", options=replace(OPTIONS, vocabulary=200))
    for change, named in (
        ({"settings": replace(SETTINGS, kind="dspark")}, "kind = 'eagle3'|layers|kv_heads"),
        ({"options": replace(options, taps=(1,))}, "taps = "),
    ):
        with pytest.raises(UsageError, match=f"The weights in .*({named})"):
            session(tmp_path / "third", **{"options": options, **change})


@pytest.mark.slow
def test_other_seeds_end_in_other_weights(tmp_path: Path) -> None:
    session(tmp_path / "a").run(lambda _: None)
    session(tmp_path / "b", settings=replace(SETTINGS, seed=6)).run(lambda _: None)
    assert not torch.equal(weights(tmp_path / "a")["fc.weight"], weights(tmp_path / "b")["fc.weight"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda folder: session(folder, settings=replace(SETTINGS, rate=1e-4)),
            "rate = 0.003, and this run has 0.0001",
        ),
        (lambda folder: session(folder, options=replace(OPTIONS, taps=(1,))), r"taps = \(0, 1\)"),
        (lambda folder: TrainingSession(target_of(), texts(140), SETTINGS, OPTIONS, folder), "data = "),
        (lambda folder: TrainingSession(target_of("random:qwen3:tiny"), texts(150), SETTINGS, OPTIONS, folder), "="),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_what_differs(tmp_path: Path, change, named: str) -> None:
    kill_after(3, tmp_path)
    with pytest.raises(UsageError, match=named):
        change(tmp_path)


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    kill_after(3, tmp_path)
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"checkpoint\.pt cannot be read"):
        session(tmp_path)


def test_a_file_half_written_beside_the_checkpoint_is_harmless(tmp_path: Path) -> None:
    kill_after(3, tmp_path)
    (tmp_path / f"{NAME}.part").write_bytes(b"half")
    assert session(tmp_path).trainer.step == 2


@pytest.mark.slow
def test_training_lowers_the_loss_and_is_right_where_the_text_can_be_known(tmp_path: Path) -> None:
    """Texts that repeat three tokens: what the target says after them is learned by a few steps."""
    cycles = [TrainingText((7, 8, 9) * 8 + (7, 8, 9)[: n % 3], 3) for n in range(3)]
    cycles += [TrainingText(((n % 200) + 9, 8, 9) * 8, 3) for n in range(120)]
    settings = replace(SETTINGS, steps=40, batch=400, rate=5e-3)
    run = TrainingSession(target_of(), cycles, settings, OPTIONS, tmp_path)
    before = run.evaluate(10)
    result = run.run(lambda _: None)
    losses = [step["loss"] for step in result.history]
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])
    assert result.acceptance.survival[0] > before.survival[0] + 0.2
    assert result.acceptance.tau == pytest.approx(1 + sum(result.acceptance.survival))
    assert sorted(result.acceptance.survival, reverse=True) == list(result.acceptance.survival)


def test_passes_become_steps(tmp_path: Path) -> None:
    one = session(tmp_path / "a", options=replace(OPTIONS, passes=1.0)).settings.steps
    assert one == len(session(tmp_path / "b").data.batches(tokens=160, seed=5, number=0))
    assert session(tmp_path / "c", options=replace(OPTIONS, passes=2.5)).settings.steps == pytest.approx(
        2.5 * one, abs=2
    )


def test_the_learning_rate_rises_and_falls_to_nothing() -> None:
    rates = [replace(SETTINGS, steps=100, warmup=10).learning_rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(3e-4)
    assert max(rates) == rates[10] == rates[40] == 3e-3
    assert rates[99] == pytest.approx(3e-3 / 50)


def test_kept_states_are_the_computed_ones_to_bfloat16_and_are_computed_once(tmp_path: Path) -> None:
    run = session(tmp_path)
    source = StateSource(run.torch_target, run.data, identity="x", folder=tmp_path / "states")
    batch = list(run.data.train[:4])
    padded = run.data.padded(batch, run.trainer.weights)
    computed = StateSource(run.torch_target, run.data, identity="x").of(batch, padded)
    first = source.of(batch, padded)
    real = padded.tokens > 0
    for name in ("taps", "final"):
        expected, found = getattr(computed, name)[real], getattr(first, name)[real]
        torch.testing.assert_close(found, expected, atol=0, rtol=2**-7)
    run.torch_target.layers.clear()  # a second computation would fail
    again = StateSource(run.torch_target, run.data, identity="x", folder=tmp_path / "states").of(batch, padded)
    assert torch.equal(again.taps, first.taps)
    assert torch.equal(again.final, first.final)


def test_an_export_has_the_weights_in_bfloat16(tmp_path: Path) -> None:
    run = session(tmp_path)
    run.export(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert (np.arange(300) + tensors.pop("d2t").numpy()).tolist() == run.vocabulary.ids.tolist()
    assert np.flatnonzero(tensors.pop("t2d").numpy()).tolist() == run.vocabulary.ids.tolist()
    assert tensors.keys() == run.module.state_dict().keys()
    for name, value in run.module.state_dict().items():
        assert torch.equal(tensors[name], value.to(torch.bfloat16)), name


def test_the_export_has_every_flag_and_the_formats_names(tmp_path: Path) -> None:
    run = session(tmp_path)
    run.run(lambda _: None)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad"):
        assert isinstance(config[flag], bool)
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1]
    layer = config["transformer_layer_config"]
    assert layer["num_aux_hidden_states"] == 2, "readers assume three"
    assert layer["head_dim"] == 16
    assert layer["max_position_embeddings"] == 8192
    assert config["wager"]["target_fingerprint"] == target_of().fingerprint
    assert config["wager"]["figures"]["held_out"]["texts"] > 0
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert int(tensors["t2d"].sum()) == config["draft_vocab_size"] == len(tensors["lm_head.weight"]) == 300
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (64, 128)
    assert tensors["fc_norm.1.weight"].shape == (64,)
    assert {str(value.dtype) for name, value in tensors.items() if name not in ("d2t", "t2d")} == {"torch.bfloat16"}
    assert "embed_tokens.weight" not in tensors


def test_weights_that_are_no_numbers_are_not_written(tmp_path: Path) -> None:
    run = session(tmp_path)
    run.module.fc.weight.data[0, 0] = float("nan")  # type: ignore[union-attr, operator]
    with pytest.raises(ModelError, match=r"fc.weight has weights that are no finite numbers"):
        run.export(tmp_path)
    assert contents(tmp_path) == {}


def test_a_whole_vocabulary_is_written_without_maps(tmp_path: Path) -> None:
    run = session(tmp_path, options=replace(OPTIONS, vocabulary=None))
    run.export(tmp_path)
    assert {"d2t", "t2d"} & set(load_file(tmp_path / "model.safetensors")) == set()
    assert run.vocabulary.whole
    beside, own = Tokenizer.load(tmp_path), run.target.tokenizer
    assert [beside.token(token) for token in range(512)] == [own.token(token) for token in range(512)]
    assert beside.chat_template == own.chat_template


class Scripted(DraftModule):
    """Right at rows that are no multiple of 4, at depth 0, and at depth 1 in rows that are odd."""

    def __init__(self, target: TorchTarget) -> None:
        super().__init__(eagle()[0].sizes)
        self.target = target

    def logits(self, rows: OutputRows) -> torch.Tensor:
        return rows.states

    def steps(self, states: TargetStates, depth: int, generator: torch.Generator | None) -> Iterator[StepRows]:
        best = self.target.logits(states.final).argmax(-1)
        rows = torch.arange(states.tokens.shape[1] - 1)[None]
        for step, right in enumerate((rows % 4 != 0, rows % 2 == 1)):
            ahead = (rows + 1 + step).clamp(max=states.tokens.shape[1] - 1)
            guessed = torch.where(right, best.gather(1, ahead), (best.gather(1, ahead) + 1) % 512)
            yield StepRows(torch.nn.functional.one_hot(guessed, 512).float(), ahead, rows + 1 + step == ahead, ahead)


def test_the_estimate_walks_rounds_as_they_are_taken() -> None:
    """Answers begin at position 3, so the first round is row 3: two right, next row 6: one, row 8: none, 9: two, 12:
    none, 13: two, and rows from 16 on lack what they would be compared with."""
    target = torch_target()
    text = TrainingText(tuple(range(20, 38)), 4)
    found = held_out_acceptance(
        Scripted(target),
        target,
        [text],
        TrainingData((text, *texts(5)), 40),
        np.arange(512),
        depth=2,
        precision="float32",
    )
    assert found.rounds == 6
    assert found.survival == (4 / 6, 3 / 6)
    assert found.tau == pytest.approx(1 + 7 / 6)
