"""Gemma 4's assistants: they guess as transformers' own, from the target's cache, whatever the engine does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from decoder_engines import answers, decoder_on, engine_on, requests
from recorded_drafts import Recorded, keep_drafts
from test_models_families import GEMMA4, GEMMA4_EDGE
from tiny_models import SIZES, TOKENS, converted, oracle, save, spread, write_gguf
from tokenizer_models import train
from transformers import DynamicCache

from closeness import assert_close
from oracle.kernels import ReferenceKernels
from wager.cli import main
from wager.draft.heads.assistant import AssistantDrafter
from wager.engine.proposer import Proposer
from wager.kernels._native import BlockPool
from wager.kernels.cpu import Kernels
from wager.models.head_assistant import CheckedAssistant, open_assistant
from wager.models.head_gguf import open_head_files
from wager.models.weights import Weights, open_weights
from wager.profiling.calibrate import time_drafting
from wager.types import SamplingParams

VOCAB = int(SIZES["vocab_size"])
TARGETS: dict[str, dict[str, Any]] = {
    "apart": {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "sharing": GEMMA4_EDGE,
}
ASSISTANT = {
    **GEMMA4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "num_kv_shared_layers": 4,
    "vocab_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "max_position_embeddings": 96,
    "final_logit_softcapping": None,
}


@dataclass
class Pair:
    """A target and an assistant of transformers, and what the assistant guesses without an engine."""

    target: Any
    assistant: Any

    def guesses(self, text: Sequence[int], depth: int) -> tuple[list[int], list[float]]:
        """As generation with a cache has it: the window holds that many keys; and their probabilities."""
        config, known = self.target.config, torch.tensor([list(text[:-1])])
        cached = DynamicCache()
        with torch.no_grad():
            state = self.target.model(known, past_key_values=cached, use_cache=True).last_hidden_state[:, -1:]
            caching = range(config.num_hidden_layers - config.num_kv_shared_layers)
            shared = {}
            for kind in ("full_attention", "sliding_attention"):
                layer = cached.layers[[i for i in caching if config.layer_types[i] == kind][-1]]
                last = config.sliding_window if kind == "sliding_attention" else len(text)
                shared[kind] = layer.keys[:, :, -last:], layer.values[:, :, -last:]
            token, found, rates = text[-1], [], []
            for _ in range(depth):
                embedded = self.target.model.embed_tokens(torch.tensor([[token]]))
                given = self.assistant(
                    inputs_embeds=torch.cat([embedded, state], -1),
                    position_ids=torch.tensor([[len(text) - 1]]),
                    shared_kv_states=shared,
                )
                token, state = int(given.logits[0, -1].argmax()), given.last_hidden_state
                found.append(token)
                rates.append(float(given.logits[0, -1].softmax(-1).max()))
        return found, rates


@cache
def pair(name: str, **changes: Any) -> Pair:
    target = oracle("Gemma4ForCausalLM", **TARGETS[name], **changes)
    text = {**SIZES, **ASSISTANT, **changes, "attn_implementation": "eager"}
    if name == "apart":
        text |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    config = transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(**text), backbone_hidden_size=SIZES["hidden_size"]
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    reuse = property(lambda each: ["reuse"] * each.num_hidden_layers)
    with patch.object(transformers.Gemma4TextConfig, "kv_sharing_modes", reuse):  # 5.23 fails where all layers share
        assistant = spread(transformers.Gemma4AssistantForCausalLM(config).eval())
    assistant.model.embed_tokens.weight.data *= 0.3
    return Pair(target, assistant)


def assistant_gguf(assistant: Any, path: Path, **changes: Any) -> Path:
    """As llama.cpp's converter writes it."""

    @dataclass
    class Inner:
        config: Any
        tensors: dict[str, Any]

        def state_dict(self) -> dict[str, Any]:
            return self.tensors

    config, stored = assistant.config.text_config, assistant.state_dict()
    around = {name: value for name, value in stored.items() if name.endswith("_projection.weight")}
    inner = {name: value for name, value in stored.items() if name not in around and name != "lm_head.weight"}
    tensors = converted(Inner(config, inner), "gemma4")
    kind = tensors["output_norm.weight"][1]
    tensors |= {f"nextn.{name}": (value.numpy(), kind) for name, value in around.items()}
    kinds, wide, narrow = config.per_layer_config, int(GEMMA4["global_head_dim"]), int(GEMMA4["head_dim"])
    rotated = int(wide * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    pairs = np.arange(wide // 2) < rotated // 2
    tensors["rope_freqs.weight"] = np.where(pairs, 1.0, 1e30).astype(np.float32), kind
    metadata: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "embedding_length_out": assistant.config.backbone_hidden_size,
        "block_count": config.num_hidden_layers,
        "nextn_predict_layers": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [kinds[i].num_key_value_heads for i in range(config.num_hidden_layers)],
        "attention.key_length": wide,
        "attention.value_length": wide,
        "attention.key_length_swa": narrow,
        "attention.value_length_swa": narrow,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
        "attention.shared_kv_layers": config.num_hidden_layers,
        "rope.dimension_count": wide,
        "rope.dimension_count_swa": narrow,
        "rope.freq_base": float(config.rope_parameters["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    return write_gguf(path, "gemma4-assistant", metadata | changes, tensors)


def opened(name: str, folder: Path, *, gguf: bool, dtype: str = "bf16") -> tuple[CheckedAssistant, Weights]:
    made = pair(name)
    weights = open_weights(save(made.target, folder / "target"))
    path = save(made.assistant, folder / "assistant")
    if gguf:
        path = assistant_gguf(made.assistant, folder / "assistant.gguf")
    return open_assistant(open_head_files(path), weights.spec, dtype=dtype), weights


@pytest.mark.parametrize("gguf", [False, True], ids=["directory", "gguf"])
@pytest.mark.parametrize("name", TARGETS)
def test_guesses_are_those_of_transformers(name: str, gguf: bool, tmp_path: Path) -> None:
    """Behind prompts below and beyond the window, with requests beside each other and preempted, and while drafts are
    accepted in part."""
    head, weights = opened(name, tmp_path, gguf=gguf)
    decoder = decoder_on(weights, ReferenceKernels("float32"))
    prompts, params = [TOKENS[:3], TOKENS[:33], TOKENS[2:20]], SamplingParams(max_tokens=10)
    plain = answers(engine_on(decoder), requests(prompts, params))
    pool = BlockPool(decoder.cache.num_blocks, prefix_cache=True)
    drafter = AssistantDrafter(head.load(decoder, weights, num_blocks=48), pool)
    recorded = Recorded(drafter, vocab=VOCAB)
    recorded.texts = {f"r{i}": [*prompt, *plain[f"r{i}#0"]] for i, prompt in enumerate(prompts)}
    engine = engine_on(decoder, drafter, pool=pool)
    assert answers(engine, requests(prompts, params), preempt_every=4) == plain
    made = 0
    for (seq_id, position), draft in recorded.drafts.items():
        tokens, rates = pair(name).guesses(recorded.texts[seq_id][:position], len(draft))
        assert list(draft.tokens) == tokens, (seq_id, position)
        assert_close(np.array(draft.scores), np.cumprod(rates), rtol=1e-3, atol=1e-5)
        made += 1
    assert made >= 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_choices_of_one_prompt_share_blocks(temperature: float, tmp_path: Path) -> None:
    """Rows of several sequences lie in one block of the target's, which a pass of the assistant leaves as it is."""
    head, weights = opened("apart", tmp_path, gguf=False)
    decoder = decoder_on(weights, Kernels(threads=2))
    asked = requests([TOKENS[:32]], SamplingParams(max_tokens=20, temperature=temperature, seed=7, n=4))
    plain = answers(engine_on(decoder), asked)
    pool = BlockPool(decoder.cache.num_blocks, prefix_cache=True)
    drafter = AssistantDrafter(head.load(decoder, weights, num_blocks=48), pool, kernels=decoder.kernels)
    made = keep_drafts(drafter)
    engine = engine_on(decoder, drafter, pool=pool)
    assert answers(engine, asked) == plain and engine.proposer.failures.total() == 0
    assert sum(len(draft) for draft in made) > 40


def test_its_guesses_can_be_timed(tmp_path: Path) -> None:
    head, weights = opened("apart", tmp_path, gguf=False)
    decoder = decoder_on(weights, Kernels(threads=1))
    pool = BlockPool(decoder.cache.num_blocks, prefix_cache=False)
    drafter = AssistantDrafter(head.load(decoder, weights, num_blocks=48), pool)
    sizes: dict[str, Any] = {"vocab": VOCAB, "hidden": weights.spec.hidden, "batches": (1, 2), "seconds": 0.1}
    curve = time_drafting(Proposer(drafter, vocab=VOCAB), clock=perf_counter, reserve=pool.reserve, **sizes)
    assert curve.seconds(2, 4) > 0
    few = BlockPool(5, prefix_cache=False)  # room for one of the texts
    drafter = AssistantDrafter(head.load(decoder, weights, num_blocks=48), few)
    curve = time_drafting(
        Proposer(drafter, vocab=VOCAB), clock=perf_counter, reserve=few.reserve, **sizes | {"seconds": 0.0}
    )
    assert curve.seconds(1, 4) > 0 and not few.block_table("text 1")


def long_pair() -> Pair:
    """For texts of a tokenizer."""
    return pair("apart", vocab_size=train("gpt-2").get_vocab_size(), max_position_embeddings=2048)


def folders(path: Path) -> tuple[Path, Path, Path]:
    """A target with a tokenizer, and its assistant, as a directory and as a GGUF file."""
    made = long_pair()
    target, assistant = save(made.target, path / "target"), save(made.assistant, path / "assistant")
    train("gpt-2").save(str(target / "tokenizer.json"))
    (target / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return target, assistant, assistant_gguf(made.assistant, path / "assistant.gguf")


@pytest.mark.slow
def test_an_assistant_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As `wager prove` has it: greedy and sampled, in a batch, with preemption."""
    monkeypatch.setenv("WAGER_CACHE", str(tmp_path / "cache"))
    target, assistant, file = folders(tmp_path)
    short = ("--threads", "1", "--memory", "64MiB", "--max-tokens", "12", "--limit", "2")
    for drafter in (f"mtp:{assistant}", f"mtp:{file}", f"ngram//mtp:{assistant}", f"suffix..mtp:{file}"):
        code = main(["prove", "--model", str(target), *short, "--drafter", drafter])
        printed = capfd.readouterr()
        assert code == 0 and "none differs" in printed.err, printed


def test_what_an_assistant_is_not_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WAGER_CACHE", str(tmp_path / "cache"))
    target, assistant, file = folders(tmp_path)

    def said(model: Path | str, drafter: str) -> str:
        short = ("--threads", "1", "--memory", "64MiB", "--max-tokens", "2")
        assert main(["run", "hi", "--model", str(model), "--drafter", drafter, *short]) == 1
        return " ".join(capfd.readouterr().err.split())

    assert "is an assistant, whose guesses are chains" in said(target, f"mtp:tree:{assistant}")
    assert "reads states on a side that is chosen" in said(target, f"mtp:{assistant}@before")
    assert "was trained for a target of hidden size 48" in said("random:llama:tiny", f"mtp:{assistant}")
    assert "is the head of a drafter (general.architecture = 'gemma4-assistant')" in said(file, "none")
    assert "is the head of a drafter (architecture 'Gemma4AssistantForCausalLM')" in said(assistant, "none")
    config = json.loads((assistant / "config.json").read_text())
    config["text_config"]["num_attention_heads"] = 2
    (assistant / "config.json").write_text(json.dumps(config))
    assert "shape" in said(target, f"mtp:{assistant}")
