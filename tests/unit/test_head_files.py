"""Files of heads and of modules of multi-token prediction: what does not fit the target, or itself, is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eagle_heads import VARIANTS, VOCAB, Flags, ReferenceHead, changed
from mtp_modules import VARIANTS as MODULES
from mtp_modules import ReferenceModules, Variant, save
from safetensors.torch import load_file, save_file
from tiny_models import TOKENS, logits, spec
from tokenizer_models import train

import wager
from wager.arch import Dense, Gqa
from wager.config import DEFAULT_MODEL
from wager.draft.store_file import read_store_header
from wager.drafter_spec import DrafterSpec
from wager.errors import ModelError, UsageError
from wager.loading.load import load
from wager.models import hub
from wager.models.companions import drafter_fingerprint
from wager.models.head_eagle import CheckedEagle, open_eagle
from wager.models.head_files import HeadFiles
from wager.models.head_mtp import CheckedMtp, open_mtp
from wager.models.opening import open_model
from wager.models.weights import open_weights
from wager.types import Request, SamplingParams

TARGET = spec((Gqa(6, 2, 16),) * 5, (Dense(64),) * 5)


def reference(flags: Flags = VARIANTS["eagle3.1"]) -> ReferenceHead:
    matrix = np.random.default_rng(0).standard_normal((VOCAB, 48)).astype(np.float32)
    return ReferenceHead(flags, target_embedding=matrix, target_output=matrix)


def opened(folder: Path) -> CheckedEagle:
    return open_eagle(HeadFiles(folder), TARGET, dtype="bf16")


def retensored(folder: Path, **changes: Any) -> Path:
    """Change tensors of a file; None removes one."""
    found = load_file(folder / "model.safetensors") | changes
    save_file({name: value for name, value in found.items() if value is not None}, folder / "model.safetensors")
    return folder


def test_what_a_head_does_not_say_means_what_its_format_means(tmp_path: Path) -> None:
    for name, meant in (("speculators", True), ("eagle3", False)):
        folder = reference(VARIANTS[name]).save(tmp_path / name, norm_before_residual=None, norm_output=None)
        assert opened(folder).norm_before_residual is meant and not opened(folder).norm_output

    folder = reference(changed("eagle3", taps=(2, 2, 2))).save(tmp_path, eagle_config=None)
    assert opened(folder).taps == (2, 2, 2)  # 2, L // 2, L - 3 of five layers


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 5]}, "taps the target after layer 5; test has 5 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, r"fc.weight .* has shape \[48, 96\]"),
        ({"target_hidden_size": 64}, "trained for a target of hidden size 64; test has 48"),
        ({"speculators_model_type": "dflash"}, "is a dflash head"),
        ({"norm_before_fc": True}, "exclude each other"),
        ({"fc_norm": False}, "has a tensor 'fc_norm.0.weight' that is not used|fc_norm.0.weight"),
        ({"norm_output": "yes"}, "norm_output = 'yes' .* must be true or false"),
        ({"layer": {"vocab_size": 99}}, "trained for a target of vocabulary 99; test has 83"),
        ({"layer": {"model_type": "gemma"}}, "layers of model_type 'gemma', which are not supported"),
        ({"layer": {"hidden_size": 64}}, "of hidden size 64 has no embedding matrix of its own"),
        ({"layer": {"num_aux_hidden_states": 3}}, "lists 2 layers, and num_aux_hidden_states is 3"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    """`layer`: changes to the section that describes the head's layers."""
    if layer := changes.get("layer"):
        changes = {"transformer_layer_config": {**reference().config()["transformer_layer_config"], **layer}}
    with pytest.raises(ModelError, match=complaint):
        opened(reference().save(tmp_path, **changes))


def test_tensors_that_are_missing_or_unknown_and_a_damaged_configuration_are_named(tmp_path: Path) -> None:
    """Files that are cut off or absent: see test_refused_drafters.py."""
    folder = reference().save(tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    for tensors, complaint in (
        ({"norm.weight": None}, r"lacks the tensor norm.weight \[48\]"),
        ({"extra.weight": torch.zeros(3)}, "has a tensor extra.weight that is not used"),
    ):
        with pytest.raises(ModelError, match=complaint):
            opened(retensored(folder, **tensors))
        (folder / "model.safetensors").write_bytes(whole)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json cannot be read"):
        opened(folder)


def test_vocabularies_that_contradict_themselves_are_named(tmp_path: Path) -> None:
    made = reference()
    folder = made.save(tmp_path)
    ids, whole = torch.from_numpy(made.ids), (folder / "model.safetensors").read_bytes()
    offsets = ids - torch.arange(len(ids))
    for tensors, complaint in (
        ({"d2t": ids}, "d2t holds the target's ids, and must hold their distance"),
        ({"d2t": offsets + 1}, "d2t and t2d in .* name different ids"),
        ({"d2t": offsets + 60, "t2d": None}, "names ids that the target's vocabulary of 83 does not have"),
        ({"d2t": offsets * 0 - torch.arange(len(ids)), "t2d": None}, "or one twice"),
        ({"d2t": None, "t2d": None}, "guesses 40 ids of a vocabulary of 83 and has no d2t"),
        ({"d2t": offsets.float()}, "d2t in .* is stored as F32, not as whole numbers"),
    ):
        with pytest.raises(ModelError, match=complaint):
            opened(retensored(folder, **tensors))
        (folder / "model.safetensors").write_bytes(whole)
    assert np.array_equal(opened(retensored(folder, d2t=offsets[None])).vocabulary.ids, made.ids), "a matrix of one row"


def test_weights_that_are_no_numbers_are_refused_when_they_are_read(tmp_path: Path) -> None:
    folder = reference().save(tmp_path)
    retensored(folder, **{"norm.weight": torch.full((48,), float("nan"))})
    with pytest.raises(ModelError, match=r"norm.weight in .* has weights that are no finite numbers"):
        opened(folder).files.read("norm.weight")


# ---- modules of multi-token prediction ----


PARAMS = SamplingParams(max_tokens=16, temperature=0.7, seed=3, ignore_eos=True)


def reference_of(name: str) -> ReferenceModules:
    return ReferenceModules(MODULES[name])


def opened_modules(folder: Path, *, target: Path | None = None, **options: bool) -> CheckedMtp:
    spec = open_weights(target or folder).spec
    return open_mtp(HeadFiles(folder), spec, dtype="bf16", inside=target is None, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODULES if name != "speculators"])
def test_a_target_with_modules_is_the_same_model(name: str, tmp_path: Path) -> None:
    reference = reference_of(name)
    whole = open_weights(reference.save_target(tmp_path / "whole"))
    plain = open_weights(save(tmp_path / "plain", reference.config(), reference.target_tensors()))
    assert whole.spec == plain.spec
    assert np.array_equal(logits(whole, TOKENS[:20]), logits(plain, TOKENS[:20]))


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({"eh_proj.weight": None}, r"lacks the tensor modules.0.proj.weight \[48, 96\]"),
        ({"eh_proj.weight": torch.zeros(48, 48)}, r"eh_proj.weight in .* has shape \[48, 48\]; .* require \[48, 96\]"),
        ({"extra.weight": torch.zeros(3)}, r"has a tensor model.layers.3.extra.weight that is not used"),
        (
            {"mlp.experts.gate_up_proj": torch.zeros(2, 4, 48)},
            r"gate_up_proj in .* has shape \[2, 4, 48\]; .* \[8, 64, 48\]",
        ),
    ],
)
def test_tensors_that_are_missing_or_unknown_are_named(tensors: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    reference = reference_of("deepseek")
    target, folder = reference.save_target(tmp_path / "target"), reference.save_modules(tmp_path / "modules")
    retensored(folder, **{f"model.layers.3.{name}": value for name, value in tensors.items()})
    with pytest.raises(ModelError, match=complaint):
        opened_modules(folder, target=target)


def test_a_number_that_no_layer_has_is_none_of_a_module(tmp_path: Path) -> None:
    reference = reference_of("deepseek")
    target, folder = reference.save_target(tmp_path / "target"), reference.save_modules(tmp_path / "modules")
    retensored(folder, **{f"model.layers.{'9' * 5000}.enorm.weight": torch.zeros(48)})
    assert opened_modules(folder, target=target).modules == 1


def test_modules_of_another_target_are_named(tmp_path: Path) -> None:
    reference = reference_of("qwen")
    target = reference.save_target(tmp_path / "target")
    other = ReferenceModules(Variant("Qwen", "Qwen3ForCausalLM", config={"head_dim": 16, "vocab_size": 90}))
    with pytest.raises(ModelError, match=r"was trained for a target of vocabulary 90; .* has 83"):
        opened_modules(other.save_modules(tmp_path / "vocabulary"), target=target)
    with pytest.raises(ModelError, match=r"mtp_num_hidden_layers .* is 2, and its files have 1 MTP modules"):
        opened_modules(reference.save_target(tmp_path / "count", mtp_num_hidden_layers=2))
    with pytest.raises(ModelError, match="is a eagle3 head"):
        opened_modules(reference.save_modules(tmp_path / "kind", speculators_model_type="eagle3"), target=target)


def directory(folder: Path, name: str) -> str:
    """A target with modules and a tokenizer."""
    tokenizer, variant = train("gpt-2"), MODULES[name]
    config = {**variant.config, "vocab_size": tokenizer.get_vocab_size()}
    reference = ReferenceModules(replace(variant, config=config))
    reference.save_target(folder, wrapped=name == "qwen3.5-experts")
    tokenizer.save(str(folder / "tokenizer.json"))
    if variant.format == "speculators":
        reference.save_modules(folder / "modules")
    return str(folder)


@pytest.mark.parametrize(
    ("name", "drafters"),
    [
        ("deepseek", ["mtp", "mtp:@before", "mtp:tree"]),
        ("deepseek-three", ["mtp"]),
        ("qwen", ["mtp", "ngram//mtp", "mtp:{}@before"]),
        ("qwen3.5-experts", ["mtp", "mtp:tree", "suffix//mtp"]),
        ("speculators", ["mtp:{}/modules", "mtp:{}/modules@after", "mtp:tree:{}/modules"]),
    ],
)
def test_engines_with_modules_give_the_same_text(name: str, drafters: list[str], tmp_path: Path) -> None:
    config = wager.EngineConfig.from_options(model=directory(tmp_path, name), max_rows=32, max_sequences=4, depth=3)
    dtype = "q8" if name == "qwen" else "auto"
    plain = load(config.with_options(dtype=dtype, drafter="none", depth=None))
    request = Request("r", tuple(plain.tokenizer.encode("The quick brown fox")), PARAMS)
    (one,) = plain.generate([request])
    for drafter in drafters:
        drafted = load(config.with_options(dtype=dtype, drafter=drafter.format(tmp_path)))
        assert drafted.memory_plan.drafter > 0 == plain.memory_plan.drafter
        (two,) = drafted.generate([request])
        assert one.token_ids == two.token_ids and two.stats.drafted > 0
        (spec,) = drafted.target.config.with_options(drafter=drafter.format(tmp_path)).speculation.drafters
        assert drafted.drafter_name == spec.label


def test_fingerprints_are_of_the_files_that_a_head_is_read_from(tmp_path: Path) -> None:
    """Not of the side of the norm that is written behind the path; an @ may be part of a path."""
    path = reference().save(tmp_path / "head@before")
    assert drafter_fingerprint(DrafterSpec("mtp", "@before")) == drafter_fingerprint(DrafterSpec("mtp")) == ""
    named = [DrafterSpec("eagle3", str(path)), DrafterSpec("mtp", f"{path}@after")]
    [found] = {drafter_fingerprint(spec) for spec in named}
    assert len(found) == 64


def test_targets_without_modules_say_so(tmp_path: Path) -> None:
    plain = reference_of("qwen")
    folder = save(tmp_path / "plain", plain.config(), plain.target_tensors())
    with pytest.raises(ModelError, match="plain has no MTP weights: no tensor is named as in modules of DeepSeek"):
        opened_modules(folder)
    with pytest.raises(ModelError, match="has no MTP weights: they are read from files"):
        load(wager.EngineConfig.from_options(model="random:llama:tiny", drafter="mtp"))
    path = directory(tmp_path / "three", "deepseek-three")
    with pytest.raises(ModelError, match="three has 3 MTP modules, which guess in turn; trees are those of a single"):
        load(wager.EngineConfig.from_options(model=path, drafter="mtp:tree"))
    with pytest.raises(ModelError, match="There is no head at nowhere@behind"):
        load(wager.EngineConfig.from_options(model=path, drafter="mtp:nowhere@behind"))
    with pytest.raises(UsageError, match="'mtp' reads the target's states, which a draft model"):
        wager.EngineConfig.from_options(model=path, drafter=f"model:{path}+mtp")


def test_what_comes_with_wager_is_found_by_the_name_of_its_model() -> None:
    head = hub.head_path(DEFAULT_MODEL)
    target = open_model("random:llama:135m")[1].spec  # of the same shape
    opened = open_eagle(HeadFiles(head), target, dtype="q4")
    assert opened.taps == (2, 15, 27) and len(opened.vocabulary.ids) == 8192
    store = hub.shipped(DEFAULT_MODEL, "store")
    assert store is not None and read_store_header(store).vocab == target.vocab
    for name in ("SmolLM2", f"../shipped/{DEFAULT_MODEL}", "", "."):
        assert hub.shipped(name, "eagle3") is None
