"""Experts that a running model chose: as transformers chooses, in chunks and token by token, and off by default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import TOKENS, oracle, save

from oracle.kernels import ReferenceKernels
from wager.cli import main
from wager.config import EngineConfig
from wager.errors import UsageError
from wager.kernels.cpu import Kernels, select
from wager.loading.load import load
from wager.models.random_models import MODELS, make
from wager.models.transformer import Decoder
from wager.models.weights import Weights, open_weights
from wager.profiling.texts import record_choices

MOE = "random:qwen3-moe:tiny"
QWEN = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "head_dim": 16}


def decoder_of(weights: Weights, kernels: Kernels, *, rows: int = 64) -> Decoder:
    return Decoder(
        weights, kernels, num_blocks=16, max_rows=rows, max_sequences=1, max_blocks=16, keep_expert_choices=True
    )


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("Qwen3MoeForCausalLM", {**QWEN, "decoder_sparse_step": 2}),
        ("MixtralForCausalLM", {"num_local_experts": 5}),
    ],
)
def test_the_choices_are_the_routers_top_experts(architecture: str, config: dict[str, Any], tmp_path: Path) -> None:
    """The experts of the highest router logits that transformers computes, at each position and layer."""
    model = oracle(architecture, **config)
    weights = open_weights(save(model, tmp_path))
    with torch.no_grad():
        logits = model(torch.tensor([list(TOKENS)]), output_router_logits=True).router_logits
    experts = weights.spec.experts
    assert experts is not None
    expected = [layer.topk(experts.active).indices.sort().values.numpy() for layer in logits]
    kernels = ReferenceKernels("float32")
    [found] = record_choices(decoder_of(weights, kernels), [TOKENS], max_tokens=0, max_context=256)
    assert found.shape == (len(TOKENS), len(expected), experts.active)
    for layer, chosen in enumerate(expected):
        np.testing.assert_array_equal(found[:, layer], chosen)


@pytest.mark.parametrize("name", [MOE, "random:deepseek:tiny", "random:mixtral:tiny"])
def test_chunks_and_single_tokens_choose_alike(name: str) -> None:
    """A prompt in one pass, in passes of 5 rows, and as the answer of its own beginning."""
    weights, tokenizer = make(name)
    kernels = select(threads=1, head_dim=weights.spec.attention.head_dim, latent=latent(weights))
    prompt = tokenizer.encode("What does a router of experts choose?")
    whole, chunked = decoder_of(weights, kernels), decoder_of(weights, kernels, rows=5)
    [answered] = record_choices(whole, [prompt], max_tokens=9, max_context=256)
    assert len(answered) == len(prompt) + 9
    [first] = record_choices(whole, [prompt], max_tokens=0, max_context=256)
    [again] = record_choices(chunked, [prompt], max_tokens=9, max_context=256)
    np.testing.assert_array_equal(first, answered[: len(prompt)])
    np.testing.assert_array_equal(again, answered)


def latent(weights: Weights) -> tuple[int, int] | None:
    attention = weights.spec.attention
    return (attention.kv_rank, attention.rope) if hasattr(attention, "kv_rank") else None


def test_an_answer_ends_with_its_text_and_with_the_context() -> None:
    weights, _ = make(MOE)
    decoder = decoder_of(weights, ReferenceKernels("float32"))
    [all_of_it] = record_choices(decoder, [[5, 6, 7]], max_tokens=4, max_context=256)
    [ended] = record_choices(decoder, [[5, 6, 7]], max_tokens=4, max_context=256, eos=range(weights.spec.vocab))
    [cut] = record_choices(decoder, [[5, 6, 7]], max_tokens=4, max_context=5)
    assert (len(all_of_it), len(ended), len(cut)) == (7, 3, 5)
    with pytest.raises(UsageError, match="Prompt 2 has 6 tokens; the context holds 1 to 5"):
        record_choices(decoder, [[1], [1] * 6], max_tokens=0, max_context=5)


def test_the_command_writes_what_plan_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fewer experts than under uniform routing, so planned steps are cheaper; the file's locality is used and said."""
    path = tmp_path / "routing.json"
    assert main(["popularity", "--model", MOE, "--limit", "6", "--max-tokens", "8", "--json", str(path)]) == 0
    shown = capsys.readouterr()
    assert "distinct experts of 16 in a layer, 4 a token" in shown.out
    assert "Locality: T consecutive tokens" in shown.out
    assert f"--popularity {path}" in shown.err
    values = json.loads(path.read_text())
    assert (values["model"], values["experts"], values["active"]) == (MOE, 16, 4)
    assert sum(values["popularity"]) == pytest.approx(4)
    shape = {"architectures": ["Qwen3MoeForCausalLM"], **MODELS["qwen3-moe"][1]["tiny"], "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    plan = ["plan", "--model", str(tmp_path), "--hardware", "H100", "--batch", "2", "--json", "-"]
    read = []
    for options in ([], ["--popularity", str(path)], ["--popularity", str(path), "--locality", "0.5"]):
        assert main([*plan, "--depth", "3", *options]) == 0
        read.append(json.loads(capsys.readouterr().out))
    locality = values["locality"]
    assert [plan["routing"]["locality"] for plan in read] == [1, locality, 0.5]
    assert [plan["routing"]["popularity"] for plan in read] == [None, values["popularity"], values["popularity"]]
    uniform, measured, local = (plan["points"][0]["parts"]["experts"]["bytes"] for plan in read)
    assert local < measured < uniform
    expert = 3 * 64 * 24 * 2
    distinct = sum(1 - (1 - p) ** (2 * 4**locality) for p in values["popularity"])
    assert measured == pytest.approx(2 * expert * distinct)
    assert any(f"as T^{locality:.3g} unrelated ones" in remark for remark in read[1]["remarks"])


def test_choices_are_kept_only_if_asked_and_only_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig.from_options(model=MOE, drafter="none", max_context=64)
    off = load(config).target.decoder
    assert off.expert_choices == []
    with pytest.raises(UsageError, match="no experts whose choice could be recorded"):
        record_choices(off, [[1, 2]], max_tokens=0, max_context=16)
    assert main(["popularity", "--model", "random:llama:tiny"]) == 2
    assert "random:llama:tiny has no experts" in capsys.readouterr().err


def test_a_locality_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "routing.json"
    for locality in (0, 1.5, "x", True):
        path.write_text(json.dumps({"popularity": [8 / 128] * 128, "locality": locality}))
        assert main(["plan", "--model", "Qwen3-30B-A3B", "--hardware", "H100", "--popularity", str(path)]) == 2
        assert f"locality = {locality!r} in {path} is out of range" in capsys.readouterr().err
