"""The real Gemma-3-270M, a Q4_K_M file, against transformers: logits and greedy text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

import wager
from packing import batch, chain
from wager.kernels.cpu import select
from wager.models.tokenizer import Tokenizer
from wager.models.transformer import Decoder
from wager.models.weights import open_weights

pytestmark = [pytest.mark.real, pytest.mark.slow]

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def ids(gemma3: Path) -> list[int]:
    return Tokenizer.load(gemma3).encode(PROMPT)


@pytest.fixture(scope="module")
def oracle(gemma3: Path) -> Any:
    """transformers' Gemma 3 with the file's tensors, put together by the gguf library and nothing of ours."""
    reader = gguf.GGUFReader(gemma3)
    field = {name.partition(".")[2]: value.contents() for name, value in reader.fields.items() if "gemma3." in name}
    stored = {tensor.name: tensor for tensor in reader.tensors}
    config = transformers.Gemma3TextConfig(
        vocab_size=int(stored["token_embd.weight"].shape[1]),
        hidden_size=field["embedding_length"],
        intermediate_size=field["feed_forward_length"],
        num_hidden_layers=field["block_count"],
        num_attention_heads=field["attention.head_count"],
        num_key_value_heads=field["attention.head_count_kv"],
        head_dim=field["attention.key_length"],
        max_position_embeddings=field["context_length"],
        sliding_window=field["attention.sliding_window"],
        attn_implementation="eager",
    )
    model = transformers.Gemma3ForCausalLM(config).eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        tensor = stored[f"{names.get_name(name.removesuffix('.weight'))}.weight"]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        parameter.data = torch.from_numpy(np.array(values - 1 if name.endswith("norm.weight") else values))
    return model


@pytest.mark.parametrize(("dtype", "error"), [("bf16", 0.01), ("auto", 0.05)])
def test_logits(gemma3: Path, ids: list[int], oracle: Any, dtype: str, error: float) -> None:
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0].numpy()
    limits = dict(num_blocks=2, max_rows=16, max_sequences=1, max_blocks=2)
    decoder = Decoder(open_weights(gemma3), select(threads=1), **limits, dtype=dtype)
    found = decoder.forward(batch([chain(0, ids, [1, 0])], range(len(ids)))).logits
    assert np.abs(found - expected).mean() < error * expected.std()
    assert np.array_equal(found.argmax(-1), expected.argmax(-1))


def test_greedy_text_is_sane_and_the_same_with_drafts(gemma3: Path) -> None:
    texts = []
    for drafter in ("none", "suffix"):
        with wager.LLM(model=str(gemma3), drafter=drafter, max_context=256) as llm:
            [output] = llm.generate([PROMPT], wager.SamplingParams(temperature=0, max_tokens=24))
            texts.append(output.text)
    assert texts[0] == texts[1] and "capital" in texts[0]
