"""Files with modules of multi-token prediction: targets that have them load, and what does not fit is named."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mtp_modules import VARIANTS, ReferenceModules, Variant, save
from test_eagle_files import retensored
from tiny_models import TOKENS, logits
from tokenizer_models import train

import wager
from wager.errors import ModelError, UsageError
from wager.loading.load import load
from wager.models.head_files import HeadFiles
from wager.models.head_mtp import CheckedMtp, open_mtp
from wager.models.weights import open_weights
from wager.types import Request, SamplingParams

PARAMS = SamplingParams(max_tokens=16, temperature=0.7, seed=3, ignore_eos=True)


@cache
def reference_of(name: str) -> ReferenceModules:
    return ReferenceModules(VARIANTS[name])


def opened(folder: Path, *, target: Path | None = None, **options: bool) -> CheckedMtp:
    spec = open_weights(target or folder).spec
    return open_mtp(HeadFiles(folder), spec, quantised=False, inside=target is None, **options)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "speculators"])
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
        ({"mlp.experts.gate_up_proj": torch.zeros(2, 4, 48)}, "are fused"),
    ],
)
def test_tensors_that_are_missing_or_unknown_are_named(tensors: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    reference = reference_of("deepseek")
    target, folder = reference.save_target(tmp_path / "target"), reference.save_modules(tmp_path / "modules")
    retensored(folder, **{f"model.layers.3.{name}": value for name, value in tensors.items()})
    with pytest.raises(ModelError, match=complaint):
        opened(folder, target=target)


def test_modules_of_another_target_are_named(tmp_path: Path) -> None:
    reference = reference_of("qwen")
    target = reference.save_target(tmp_path / "target")
    other = ReferenceModules(Variant("Qwen", "Qwen3ForCausalLM", config={"head_dim": 16, "vocab_size": 90}))
    with pytest.raises(ModelError, match=r"was trained for a target of vocabulary 90; .* has 83"):
        opened(other.save_modules(tmp_path / "vocabulary"), target=target)
    with pytest.raises(ModelError, match=r"was trained for a target of hidden size 64; .* has 48"):
        opened(reference.save_modules(tmp_path / "hidden", hidden_size=64), target=target)
    with pytest.raises(ModelError, match=r"mtp_num_hidden_layers .* is 2, and its files have 1 MTP modules"):
        opened(reference.save_target(tmp_path / "count", mtp_num_hidden_layers=2))
    with pytest.raises(ModelError, match="is a eagle3 head"):
        opened(reference.save_modules(tmp_path / "kind", speculators_model_type="eagle3"), target=target)


def directory(folder: Path, name: str) -> str:
    """A target with modules and a tokenizer."""
    tokenizer, variant = train("gpt-2"), VARIANTS[name]
    config = {**variant.config, "vocab_size": tokenizer.get_vocab_size()}
    reference = ReferenceModules(Variant(variant.format, variant.architecture, variant.modules, variant.own, config))
    reference.save_target(folder)
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


def test_targets_without_modules_say_so(tmp_path: Path) -> None:
    plain = reference_of("qwen")
    folder = save(tmp_path / "plain", plain.config(), plain.target_tensors())
    with pytest.raises(ModelError, match="plain has no MTP weights: no tensor is named as in modules of DeepSeek"):
        opened(folder)
    with pytest.raises(ModelError, match="has no MTP weights: they are read from directories"):
        load(wager.EngineConfig.from_options(model="random:llama:tiny", drafter="mtp"))
    path = directory(tmp_path / "three", "deepseek-three")
    with pytest.raises(
        ModelError, match="three has 3 MTP modules, which guess in turn; trees are those of a single one"
    ):
        load(wager.EngineConfig.from_options(model=path, drafter="mtp:tree"))
    with pytest.raises(ModelError, match="There is no head at nowhere@behind"):
        load(wager.EngineConfig.from_options(model=path, drafter="mtp:nowhere@behind"))
    with pytest.raises(UsageError, match="'mtp' reads the target's states, which a draft model"):
        wager.EngineConfig.from_options(model=path, drafter=f"model:{path}+mtp")
