"""The real SmolLM2-135M-Instruct against transformers: logits, greedy text, token ids, chat."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import regex
import torch
import transformers
from corpus import TEXTS, with_special
from tiny_models import permute
from tokenizers import pre_tokenizers

from closeness import assert_close
from oracle.kernels import ReferenceKernels
from packing import batch, chain
from wager.config import EngineConfig
from wager.kernels.arrays import Array
from wager.kernels.cpu import Kernels, select
from wager.loading.load import load
from wager.models.tokenizer import Tokenizer
from wager.models.transformer import Decoder
from wager.models.weights import open_weights
from wager.types import Request, SamplingParams

pytestmark = [pytest.mark.real, pytest.mark.slow]

PROMPT = [{"role": "user", "content": "Name three rivers of Europe and the seas they flow into.\n\n1. The Rhine"}]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(tokenizer.chat(PROMPT), special=False)


@pytest.fixture(scope="module")
def oracle(smollm2: Path) -> Any:
    """transformers' Llama with the file's tensors, put together by the gguf library and nothing of ours."""
    reader = gguf.GGUFReader(smollm2)
    field = {name: value.contents() for name, value in reader.fields.items() if name.startswith("llama.")}
    heads, kv_heads = field["llama.attention.head_count"], field["llama.attention.head_count_kv"]
    config = transformers.LlamaConfig(
        vocab_size=field["llama.vocab_size"],
        hidden_size=field["llama.embedding_length"],
        intermediate_size=field["llama.feed_forward_length"],
        num_hidden_layers=field["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field["llama.context_length"],
        rms_norm_eps=field["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": field["llama.rope.freq_base"]},
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    for name, parameter in model.named_parameters():
        tensor = stored[f"{names.get_name(name.removesuffix('.weight'))}.weight"]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if "q_proj" in name or "k_proj" in name:
            values = values[np.argsort(permute(np.arange(len(values)), heads if "q_proj" in name else kv_heads))]
        parameter.data = torch.from_numpy(np.array(values))
    return model


@pytest.fixture(scope="module")
def expected(oracle: Any, prompt: list[int]) -> Array:
    with torch.no_grad():
        logits: Array = oracle(torch.tensor([prompt])).logits[0].numpy()
    return logits


def decoder(smollm2: Path, kernels: Kernels, dtype: str = "auto") -> Decoder:
    limits = dict(num_blocks=12, max_rows=96, max_sequences=1, max_blocks=12)
    return Decoder(open_weights(smollm2), kernels, **limits, dtype=dtype)


def test_logits_in_float32(smollm2: Path, prompt: list[int], expected: Array) -> None:
    ours = decoder(smollm2, ReferenceKernels("float32"))
    output = ours.forward(batch([chain(0, prompt, list(range(12)))], range(len(prompt))))
    assert_close(output.logits, expected, atol=2e-3, rtol=1e-3)
    assert np.array_equal(output.greedy_tokens, expected.argmax(-1))


@pytest.mark.parametrize(("dtype", "error", "agreeing"), [("bf16", 0.02, 0.95), ("auto", 0.05, 0.9)])
def test_logits_in_bfloat16_and_in_the_files_own_bits(
    dtype: str, error: float, agreeing: float, smollm2: Path, prompt: list[int], expected: Array
) -> None:
    """In its own bits weights are those of the file and activations have 8 bits."""
    ours = decoder(smollm2, select(threads=1), dtype)
    logits = ours.forward(batch([chain(0, prompt, list(range(12)))], range(len(prompt)))).logits
    assert np.abs(logits - expected).mean() < error * expected.std()
    assert (logits.argmax(-1) == expected.argmax(-1)).mean() > agreeing


def test_a_prompt_in_chunks_of_any_size_has_the_bits_of_one_pass(smollm2: Path, prompt: list[int]) -> None:
    ours, blocks = decoder(smollm2, select(threads=1)), list(range(12))
    whole = ours.forward(batch([chain(0, prompt, blocks)], range(len(prompt)))).logits.copy()
    for size in (7, 1):
        for first in range(0, len(prompt), size):
            part = prompt[first : first + size]
            found = ours.forward(batch([chain(first, part, blocks)], range(len(part)))).logits
            assert np.array_equal(found, whole[first : first + len(part)])


def test_as_its_own_draft_model_it_is_always_right(smollm2: Path, prompt: list[int]) -> None:
    """Its guesses are processed as the target's tokens, with the same noise; only those beyond the end are lost."""
    config = EngineConfig.from_options(model=str(smollm2), drafter="none", threads=1, max_context=256)
    plain = load(config)
    twin = load(config.with_options(drafter=f"model:{smollm2}", depth=4), target=plain.target)
    greedy = SamplingParams(max_tokens=24, ignore_eos=True)
    sampled = replace(greedy, temperature=0.8, seed=5)
    kinds = [greedy, sampled, replace(sampled, top_p=0.9, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.3)]
    asked = [Request(f"r{number}", tuple(prompt), params) for number, params in enumerate(kinds)]
    found = twin.generate(asked)
    assert [each.token_ids for each in found] == [each.token_ids for each in plain.generate(asked)]
    assert all(each.stats.drafted >= 16 and each.stats.drafted - each.stats.accepted <= 4 for each in found)


SAMPLES = (*TEXTS, *with_special("<|im_start|>", "<|im_end|>"), *with_special("<|endoftext|>", "<repo_name>"))
_CUT_DIFFERENTLY = regex.compile(r"\s\s\p{N}|\s[\p{N}--[0-9]]", regex.V1)


def test_token_ids(tokenizer: Tokenizer, theirs: Any) -> None:
    """transformers reads this file without its pre-tokenizer's digit rule. With the rule the ids are equal everywhere;
    without it, wherever no run of whitespace stands before a digit and no space before a digit beyond ASCII."""
    found = {text: tokenizer.encode(text) for text in SAMPLES}
    for text, ids in found.items():
        assert tokenizer.decode(ids, special=True) == text
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        if not _CUT_DIFFERENTLY.search(text):
            assert ids == theirs(text).input_ids
    backend, byte_level = theirs.backend_tokenizer, pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain = backend.pre_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    try:
        assert found == {text: theirs(text).input_ids for text in SAMPLES}
    finally:
        backend.pre_tokenizer = plain
