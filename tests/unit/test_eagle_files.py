"""Files of EAGLE-3 heads: what does not fit the target, or itself, is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eagle_heads import VARIANTS, VOCAB, Flags, ReferenceHead, changed
from safetensors.torch import load_file, save_file
from tiny_models import spec

from wager.arch import Dense, Gqa
from wager.errors import ModelError
from wager.models.head_eagle import CheckedEagle, open_eagle
from wager.models.head_files import HeadFiles

TARGET = spec((Gqa(6, 2, 16),) * 5, (Dense(64),) * 5)


def reference(flags: Flags = VARIANTS["eagle3.1"]) -> ReferenceHead:
    matrix = np.random.default_rng(0).standard_normal((VOCAB, 48)).astype(np.float32)
    return ReferenceHead(flags, target_embedding=matrix, target_output=matrix)


def opened(folder: Path) -> CheckedEagle:
    return open_eagle(HeadFiles(folder), TARGET, quantised=False)


def retensored(folder: Path, **changes: Any) -> Path:
    """Change tensors of a file; None removes one."""
    found = load_file(folder / "model.safetensors") | changes
    save_file({name: value for name, value in found.items() if value is not None}, folder / "model.safetensors")
    return folder


def test_a_missing_flag_means_what_its_format_means(tmp_path: Path) -> None:
    for name, meant in (("speculators", True), ("eagle3", False)):
        folder = reference(VARIANTS[name]).save(tmp_path / name, norm_before_residual=None, norm_output=None)
        assert opened(folder).norm_before_residual is meant and not opened(folder).norm_output


def test_taps_that_are_not_named_are_those_of_the_paper(tmp_path: Path) -> None:
    folder = reference(changed("eagle3", taps=(2, 2, 2))).save(tmp_path, eagle_config=None)
    assert opened(folder).taps == (2, 2, 2)  # 2, L // 2, L - 3 of five layers


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 5]}, "taps the target after layer 5; test has 5 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, -1]}, "after layer -1"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, r"fc.weight .* has shape \[48, 96\]"),
        ({"target_hidden_size": 64}, "trained for a target of hidden size 64; test has 48"),
        ({"speculators_model_type": "dflash"}, "is a dflash head"),
        ({"norm_before_fc": True}, "exclude each other"),
        ({"draft_vocab_size": 50}, r"lm_head.weight .* has shape \[40, 48\].*require \[50, 48\]|d2t"),
        ({"fc_norm": False}, "has a tensor 'fc_norm.0.weight' that is not used|fc_norm.0.weight"),
        ({"norm_output": "yes"}, "norm_output = 'yes' .* must be true or false"),
        ({"layer": {"vocab_size": 99}}, "trained for a target of vocabulary 99; test has 83"),
        ({"layer": {"model_type": "gemma"}}, "layers of model_type 'gemma', which are not supported"),
        ({"layer": {"hidden_size": 64}}, "of hidden size 64 has no embedding matrix of its own"),
        ({"layer": {"num_aux_hidden_states": 3}}, "lists 2 layers, and num_aux_hidden_states is 3"),
        ({"layer": {"intermediate_size": 64}}, r"mlp.gate_proj.weight .* require \[64, 48\]"),
        ({"layer": {"rope_scaling": {"rope_type": "longrope"}}}, "longrope"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    """`layer`: changes to the section that describes the head's layers."""
    if layer := changes.get("layer"):
        changes = {"transformer_layer_config": {**reference().config()["transformer_layer_config"], **layer}}
    with pytest.raises(ModelError, match=complaint):
        opened(reference().save(tmp_path, **changes))


def test_tensors_that_are_missing_damaged_or_unknown_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="There is no head at"):
        HeadFiles(tmp_path / "nowhere")
    folder = reference().save(tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    for tensors, complaint in (
        ({"norm.weight": None}, r"lacks the tensor norm.weight \[48\]"),
        ({"extra.weight": torch.zeros(3)}, "has a tensor extra.weight that is not used"),
        ({"norm.weight": torch.zeros(47)}, r"norm.weight .* has shape \[47\]"),
    ):
        with pytest.raises(ModelError, match=complaint):
            opened(retensored(folder, **tensors))
        (folder / "model.safetensors").write_bytes(whole)
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read: .*The file is truncated|cannot be read"):
        opened(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has neither"):
        opened(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json cannot be read"):
        opened(folder)


def test_vocabularies_that_contradict_themselves_are_named(tmp_path: Path) -> None:
    made = reference()
    folder = made.save(tmp_path)
    ids, whole = torch.from_numpy(made.ids), (folder / "model.safetensors").read_bytes()
    offsets = ids - torch.arange(len(ids))
    known = torch.from_numpy(np.isin(np.arange(VOCAB), made.ids))
    for tensors, complaint in (
        ({"d2t": ids}, "d2t holds the target's ids, and must hold their distance"),
        ({"d2t": offsets + 1}, "d2t and t2d in .* name different ids"),
        ({"d2t": offsets + 60, "t2d": None}, "names ids that the target's vocabulary of 83 does not have"),
        ({"d2t": offsets * 0 - torch.arange(len(ids)), "t2d": None}, "or one twice"),
        ({"d2t": None, "t2d": None}, "guesses 40 ids of a vocabulary of 83 and has no d2t"),
        ({"t2d": known[:-1]}, r"different ids|t2d .* has shape \[82\]"),
        ({"d2t": offsets.float()}, "d2t in .* is stored as F32, not as whole numbers"),
    ):
        with pytest.raises(ModelError, match=complaint):
            opened(retensored(folder, **tensors))
        (folder / "model.safetensors").write_bytes(whole)


def test_weights_that_are_no_numbers_are_refused_when_they_are_read(tmp_path: Path) -> None:
    folder = reference().save(tmp_path)
    retensored(folder, **{"norm.weight": torch.full((48,), float("nan"))})
    with pytest.raises(ModelError, match=r"norm.weight in .* has weights that are no finite numbers"):
        opened(folder).files.read("norm.weight")
