"""Whole runs: one that is killed and resumed ends in the weights of one that was not, exports are read back, states are
kept, and the loss falls."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from safetensors.torch import load_file
from trained import module_of, states_of, target_of, texts

from wager.errors import ModelError, UsageError
from wager.models.head_files import HeadFiles
from wager.models.tokenizer import Tokenizer
from wager.models.weights import open_weights
from wager.train.data import TrainingText
from wager.train.draft_module import DraftModule, StepRows, drawn_rows
from wager.train.quantise import quantise_head
from wager.train.rounding import fits_groups, rounded
from wager.train.session import (
    NAME,
    RunOptions,
    StepReport,
    TrainingCheckpoint,
    TrainingSession,
    TrainSettings,
)
from wager.train.target import TargetStates, TorchTarget

KILLS = [(3, 2), (4, 2), (8, 6), (9, 8)]
SETTINGS = TrainSettings(steps=9, batch=160, depth=3, precision="float32", rate=3e-3, warmup=2, seed=5)
OPTIONS = RunOptions(vocabulary=300, longest=32, save_every=2, command="wager train")


class Killed(Exception):
    pass


def session(folder: Path, *, settings: TrainSettings = SETTINGS, options: RunOptions = OPTIONS) -> TrainingSession:
    folder.mkdir(exist_ok=True)
    return TrainingSession(target_of(), texts(150), settings, options, folder)


def killer(steps: int) -> Callable[[StepReport], None]:
    """Ends a run without warning after so many steps."""

    def report(step: StepReport) -> None:
        if step.step + 1 == steps:
            raise Killed

    return report


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """The folder of a run that was killed after three steps, and saved after two."""
    with pytest.raises(Killed):
        session(tmp_path).run(killer(3))
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "options", "kills"),  # the steps after which it is killed, and the last one before that was saved
    [
        ("eagle3", OPTIONS, [(9, 8)]),
        ("eagle3", OPTIONS, KILLS),
        ("dspark", OPTIONS, KILLS),
        ("pruned", replace(OPTIONS, layers=(1,)), KILLS),
    ],
)
def test_a_killed_run_ends_in_the_weights_of_an_uninterrupted_one(
    tmp_path: Path, kind: str, options: RunOptions, kills: Sequence[tuple[int, int]]
) -> None:
    chosen = {"settings": replace(SETTINGS, kind=kind), "options": options}
    whole = session(tmp_path / "whole", **chosen)
    figures = whole.run(lambda _: None)
    for steps, saved in kills:  # each kill loses what was not saved
        with pytest.raises(Killed):
            session(tmp_path / "cut", **chosen).run(killer(steps))
        assert TrainingCheckpoint.load(tmp_path / "cut").step in (saved, steps)
    resumed = session(tmp_path / "cut", **chosen)
    assert resumed.step == 8
    assert resumed.run(lambda _: None)["held_out"] == figures["held_out"]
    assert resumed.history == whole.history
    found = resumed.module.state_dict()
    assert [name for name, value in whole.module.state_dict().items() if not torch.equal(value, found[name])] == []
    other = session(tmp_path / "other", settings=replace(chosen["settings"], seed=6, steps=1), options=options)
    other.run(lambda _: None)
    assert not all(torch.equal(value, found[name]) for name, value in other.module.state_dict().items())


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_another(tmp_path: Path) -> None:
    first = session(tmp_path / "first")
    first.run(lambda _: None)
    options = replace(OPTIONS, begin_with=tmp_path / "first", vocabulary=200)
    (tmp_path / "second").mkdir()
    second = TrainingSession(target_of(), texts(80, seed=3), SETTINGS, options, tmp_path / "second")
    for name, value in first.module.state_dict().items():
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
def test_a_run_begins_with_a_head_that_was_exported_or_stored_in_fewer_bits(tmp_path: Path) -> None:
    first = session(tmp_path / "first", settings=replace(SETTINGS, rounded=True))
    first.run(lambda _: None)
    (tmp_path / "first" / NAME).unlink()
    small = quantise_head(tmp_path / "first", tmp_path / "small")
    exported = load_file(tmp_path / "first" / "model.safetensors")
    read = {name: torch.from_numpy(HeadFiles(small).read(name)) for name in exported if name not in ("d2t", "t2d")}
    for folder, weights in ((tmp_path / "first", exported), (small, read)):
        run = session(tmp_path / f"after-{folder.name}", options=replace(OPTIONS, begin_with=folder, vocabulary=200))
        assert np.array_equal(run.vocabulary.ids, first.vocabulary.ids)
        for name, value in run.module.state_dict().items():
            assert torch.equal(value, weights[name].float()), name
    with pytest.raises(UsageError, match=r"The weights in .*small are of taps = "):
        session(tmp_path / "other", options=replace(OPTIONS, begin_with=small, taps=(1,)))
    config = small / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "wager": {}}))
    for folder, cause in ((small, "KeyError"), (tmp_path, "There is no head at")):
        with pytest.raises(UsageError, match=f"no EAGLE-3 head that wager trained: .*{cause}"):
            session(tmp_path / "other", options=replace(OPTIONS, begin_with=folder))


@pytest.mark.slow
def test_a_run_with_rounded_matrices_estimates_them_and_keeps_the_whole_ones(tmp_path: Path) -> None:
    run = session(tmp_path, settings=replace(SETTINGS, rounded=True, steps=2))
    run.run(lambda _: None)
    matrix = run.module.lm_head.weight.detach()
    assert not torch.equal(matrix, rounded(matrix, 4).weights), "the weights that are trained have all their bits"
    figures = run.evaluate()
    run.module.load_state_dict(
        {
            name: rounded(value, 4).weights if fits_groups(value.shape) else value
            for name, value in run.module.state_dict().items()
        }
    )
    run.settings = replace(run.settings, rounded=False)
    assert run.evaluate() == figures


def test_a_checkpoint_of_another_run_is_refused_by_what_differs(cut: Path) -> None:
    changes: list[tuple[Callable[[], object], str]] = [
        (lambda: session(cut, settings=replace(SETTINGS, rate=1e-4)), "rate = 0.003, and this run has 0.0001"),
        (lambda: session(cut, options=replace(OPTIONS, taps=(1,))), r"taps = \(0, 1\)"),
        (lambda: session(cut, options=replace(OPTIONS, vocabulary=99)), "vocabulary = 300, and this run has 99"),
        (lambda: TrainingSession(target_of(), texts(140), SETTINGS, OPTIONS, cut), "data = "),
        (lambda: TrainingSession(target_of("random:qwen3:tiny"), texts(150), SETTINGS, OPTIONS, cut), "="),
    ]
    for change, named in changes:
        with pytest.raises(UsageError, match=named):
            change()


def test_a_damaged_checkpoint_is_named_and_a_file_half_written_beside_it_is_harmless(cut: Path) -> None:
    (cut / f"{NAME}.part").write_bytes(b"half")
    assert session(cut).step == 2
    path = cut / NAME
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"checkpoint\.pt cannot be read"):
        session(cut)


def test_a_full_disk_is_named_by_the_checkpoint_and_leaves_the_one_before(cut: Path) -> None:
    run, before, limits = session(cut), (cut / NAME).read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            run.checkpoint().save(cut)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(cut / NAME)
    assert [path.read_bytes() for path in cut.iterdir()] == [before]


def test_an_export_of_a_whole_vocabulary_has_no_maps_and_the_targets_tokenizer(tmp_path: Path) -> None:
    run = session(tmp_path / "run", options=replace(OPTIONS, vocabulary=None))
    run.export(tmp_path / "export")
    assert {"d2t", "t2d"} & set(load_file(tmp_path / "export" / "model.safetensors")) == set()
    beside, own = Tokenizer.load(tmp_path / "export"), run.target.tokenizer
    assert [beside.token(token) for token in range(512)] == [own.token(token) for token in range(512)]
    assert beside.chat_template == own.chat_template
    run.module.fc.weight.data[0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"fc.weight has weights that are no finite numbers"):
        run.export(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


class Scripted(DraftModule):
    """Right at rows that are no multiple of 4, at depth 0, and at depth 1 in rows that are odd."""

    def __init__(self, target: TorchTarget) -> None:
        super().__init__(module_of("medusa")[0].sizes)
        self.target = target

    def logits(self, rows: StepRows) -> torch.Tensor:
        assert not torch.is_grad_enabled(), "an estimate keeps nothing of every row for gradients"
        return rows.states

    def steps(self, states: TargetStates, depth: int, generator: torch.Generator | None) -> Iterator[StepRows]:
        best = self.target.logits(states.final).argmax(-1)
        rows = torch.arange(states.tokens.shape[1] - 1)[None]
        for step, right in enumerate((rows % 4 != 0, rows % 2 == 1)):
            ahead = (rows + 1 + step).clamp(max=states.tokens.shape[1] - 1)
            guessed = torch.where(right, best.gather(1, ahead), (best.gather(1, ahead) + 1) % 512)
            yield StepRows(torch.nn.functional.one_hot(guessed, 512).float(), ahead, rows + 1 + step == ahead, ahead)


def test_the_estimate_walks_rounds_as_they_are_taken(tmp_path: Path) -> None:
    """Answers begin at position 3, so the first round is row 3: two right, next row 6: one, row 8: none, 9: two, 12:
    none, 13: two, and rows from 16 on lack what they would be compared with."""
    text = TrainingText(tuple(range(20, 38)), 4)
    settings, options = replace(SETTINGS, depth=2), replace(OPTIONS, vocabulary=None, longest=40)
    run = TrainingSession(target_of(), (text, *texts(5)), settings, options, tmp_path)
    run.module = Scripted(run.torch_target)
    found = run.evaluate([text])
    assert found.rounds == 6
    assert found.survival == (4 / 6, 3 / 6)
    assert found.tau == pytest.approx(1 + 7 / 6)


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


def test_rows_that_count_more_are_drawn_first() -> None:
    weights = torch.tensor([[0.0, 1, 1, 0, 0, 1], [1, 0, 1, 1, 1, 1]])
    drawn = [drawn_rows(weights, 0.5, torch.Generator().manual_seed(seed)) for seed in range(20)]
    assert all(rows[0].tolist() == [1, 2, 5] and 1 not in rows[1] for rows in drawn)
    assert len({tuple(rows[1].tolist()) for rows in drawn}) > 3
    assert drawn_rows(weights, 0.5, None).tolist() == [list(range(6))] * 2
