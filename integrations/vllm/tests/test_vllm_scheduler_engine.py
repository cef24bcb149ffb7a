"""The scheduler in vLLM itself, over draft models: the first layer of a model whose other layers add nothing guesses it
always, that of another model never. Started as in test_vllm_engine.py, in float32."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_vllm_engine import (  # noqa: F401 (fixtures)
    CONFIG,
    complete,
    environment,
    model,
    python,
    requests,
    run,
    scrape,
    server,
)

pytestmark = pytest.mark.vllm

DEPTH = 5


@pytest.fixture(scope="session")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:  # noqa: F811
    """`target`, a draft model that is `always` right about it, and one that is `never`."""
    weights, made = load_file(model / "model.safetensors"), {}
    first = {name: tensor for name, tensor in weights.items() if ".layers.1." not in name}
    upper = {name: tensor for name, tensor in weights.items() if ".layers.1." in name}
    target = dict(first)
    for layer in range(1, 6):
        for name, tensor in upper.items():
            silent = "o_proj" in name or "down_proj" in name
            target[name.replace(".1.", f".{layer}.")] = torch.zeros_like(tensor) if silent else tensor.clone()
    never = {name: torch.randn_like(tensor) * tensor.std() for name, tensor in first.items()}
    for name, tensors, layers in (("target", target, 6), ("always", first, 1), ("never", never, 1)):
        made[name] = folder = tmp_path_factory.mktemp(name)
        for file in model.iterdir():
            if file.suffix == ".json":
                (folder / file.name).write_text(file.read_text())
        (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return made


def drafting(draft: Path) -> dict[str, Any]:
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": DEPTH}
    return {"speculative_config": speculation, "scheduler_cls": "wager_vllm.Scheduler"}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_drafts_that_pay_are_made_and_others_are_not(asynchronous: bool, python, pair, environment) -> None:  # noqa: F811
    """The texts are vLLM's own; where one drafter pays, it is used, and one that is never right is off soon."""
    asked = requests(8, tokens=200)
    plain = run(python, pair["target"], environment, asked, wager=False, streams=4)
    found = {
        name: run(
            python,
            pair["target"],
            environment,
            asked,
            wager=False,
            streams=4,
            async_scheduling=asynchronous,
            **drafting(pair[name]),
        )
        for name in ("always", "never")
    }
    assert found["always"].texts == found["never"].texts == plain.texts
    assert found["always"].steps < 0.6 * plain.steps
    assert found["never"].counters["draft_tokens"] < 0.4 * found["always"].counters["draft_tokens"]
    assert found["never"].lines("wager decides over draft_model, at most 5 tokens")


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_fault_leaves_vllm_to_its_own_depth(asynchronous: bool, python, pair, environment) -> None:  # noqa: F811
    asked = requests(4)
    plain = run(python, pair["target"], environment, asked, wager=False)
    own = {"async_scheduling": asynchronous, **drafting(pair["always"])}
    failed = run(python, pair["target"], environment, asked, wager=False, fault="proposer", **own)
    assert failed.texts == plain.texts
    assert len(failed.lines("wager failed, and vLLM goes on with 5 draft tokens")) == 1
    assert failed.steps < 0.4 * plain.steps


@pytest.fixture(scope="session")
def experts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """`model` with four experts in place of its feed-forwards."""
    folder, weights = tmp_path_factory.mktemp("experts"), load_file(model / "model.safetensors")
    for file in model.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_text(file.read_text())
    mixture = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **mixture, **sizes}))
    tensors = {name: tensor for name, tensor in weights.items() if ".mlp." not in name}
    for layer in range(2):
        at, names = f"model.layers.{layer}", {"gate": "w1", "up": "w3", "down": "w2"}
        tensors[f"{at}.block_sparse_moe.gate.weight"] = torch.randn(4, CONFIG["hidden_size"])
        for expert in range(4):
            for name, written in names.items():
                source = weights[f"{at}.mlp.{name}_proj.weight"]
                tensors[f"{at}.block_sparse_moe.experts.{expert}.{written}.weight"] = source + 0.1 * torch.randn_like(
                    source
                )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_engines_over_experts_agree_on_a_depth(server, experts, pair) -> None:  # noqa: F811
    """Two engines whose workers wait for one another in every pass, one of them mostly without requests: were they to
    draft to different depths, both would hang."""
    speculation = json.dumps(drafting(pair["never"])["speculative_config"])
    flags = ["--model", str(experts), "--speculative-config", speculation, "--scheduler-cls", "wager_vllm.Scheduler"]
    address = server(*flags, "--data-parallel-size", "2", VLLM_CPU_OMP_THREADS_BIND="0|1")
    asked, answers = requests(7, tokens=120), dict[int, str]()
    alone = [complete(address, each) for each in asked[:3]]

    def answer(number: int) -> None:
        answers[number] = complete(address, asked[number])

    threads = [threading.Thread(target=answer, args=(number,)) for number in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[number] for number in range(3)] == alone
    assert "vllm:spec_decode_num_draft_tokens_total" in scrape(address)
