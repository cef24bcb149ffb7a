"""Tokens that a model's files let no text have: Gemma 4's files name two."""

from __future__ import annotations

import json
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from decoder_engines import decoder_on
from test_models_families import GEMMA4
from tiny_models import oracle, save, write_gguf
from tokenizer_models import gguf_metadata, train

import wager
from packing import batch, chain
from wager.errors import TokenizerError
from wager.kernels.cpu import Kernels
from wager.loading.load import load
from wager.loading.opened import open_target
from wager.models.gguf import GgufFile
from wager.models.random_models import make
from wager.models.tokenizer import Tokenizer
from wager.models.transformer import Decoder
from wager.types import Grammar, Request, SamplingParams, TokenLogprob


def saved(folder: Path, suppressed: list[int]) -> Path:
    tokenizer = train("gpt-2")
    path = save(oracle("Gemma4ForCausalLM", **{**GEMMA4, "vocab_size": tokenizer.get_vocab_size()}), folder)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "generation_config.json").write_text(json.dumps({"suppress_tokens": suppressed}))
    return path


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_text_has_them(temperature: float, tmp_path: Path) -> None:
    """Drafts change nothing of that; logits of the others stay as they are, behind the cap, too."""
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=5, ignore_eos=True)

    def answer(path: Path, drafter: str = "none") -> list[int]:
        config = wager.EngineConfig.from_options(model=str(path), max_rows=32, max_sequences=2, drafter=drafter)
        engine = load(config)
        [found] = engine.generate([Request("r", tuple(range(9)), params)])
        return list(found.token_ids)

    plain = answer(saved(tmp_path / "plain", []))
    unwanted = sorted({plain[0], plain[0] + 1, plain[5]})
    path = saved(tmp_path / "suppressed", unwanted)
    found = answer(path)
    assert plain[0] in unwanted and not set(found) & set(unwanted)
    assert answer(path, "ngram") == answer(path, "layers:0-2") == found


def test_logits_of_the_others_stay(tmp_path: Path) -> None:
    weights, _ = make("random:llama:tiny")
    sizes = {"num_blocks": 4, "max_rows": 16, "max_sequences": 1, "max_blocks": 4}
    packed = batch([chain(0, list(range(10)), [0])], [3, 9])
    plain = decoder_on(weights, Kernels()).forward(packed).logits.copy()
    ids = [0, 7, 8, weights.spec.vocab - 1]
    output = Decoder(weights, Kernels(), **sizes, suppressed=ids).forward(packed)
    assert (output.logits[:, ids] == np.float32(-1e30)).all()
    others = np.setdiff1d(np.arange(weights.spec.vocab), ids)
    assert np.array_equal(output.logits[:, others], plain[:, others])
    assert np.array_equal(output.greedy_tokens, output.logits.argmax(axis=1))
    assert np.array_equal(output.model_logits(slice(None)), plain) and np.array_equal(output.model_logits(1), plain[1])


def test_log_probabilities_are_the_models_own(tmp_path: Path) -> None:
    """Of a text that has such tokens too, as prompts may: with the bits of a model that has none, and transformers'."""
    text = [5, 3, 11, 7, 2, 9]
    known = Grammar.tokens(text[1:])
    params = SamplingParams(max_tokens=len(text) - 1, ignore_eos=True, logprobs=2, grammar=known)

    def scored(path: Path, drafter: str = "none") -> tuple[TokenLogprob, ...]:
        config = wager.EngineConfig.from_options(model=str(path), max_rows=32, max_sequences=2, drafter=drafter)
        [found] = load(config).generate([Request("r", tuple(text[:1]), params)])
        assert list(found.token_ids) == text[1:]
        return found.logprobs

    plain = scored(saved(tmp_path / "plain", []))
    path = saved(tmp_path / "suppressed", [9, 3, plain[1].top_logprobs[0][0], 9])  # one may be named twice
    assert scored(path) == scored(path, "ngram") == plain
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        rows = model(torch.tensor([text])).logits[0].log_softmax(-1)
    for row, item in enumerate(plain):
        assert item.logprob == pytest.approx(float(rows[row, text[row + 1]]), abs=0.05)


def test_tokens_without_logits_are_none_that_a_text_could_have() -> None:
    opened = open_target(wager.EngineConfig.from_options(model="random:llama:tiny"))
    tokenizer = copy(opened.tokenizer)
    tokenizer.suppressed_ids = (3, opened.spec.vocab)  # a GGUF file may have more tokens than its embedding rows
    decoder = replace(opened, tokenizer=tokenizer).load(Kernels(), 4)
    output = decoder.forward(batch([chain(0, list(range(10)), [0])], [9]))
    assert (output.logits == np.float32(-1e30)).sum() == 1


def test_files_name_them(tmp_path: Path) -> None:
    tokens = gguf_metadata(train("gpt-2"), "gpt-2")
    values = {"general.name": "x", **tokens, "tokenizer.ggml.suppress_tokens": [3, 4]}
    path = write_gguf(tmp_path / "a.gguf", "llama", values, {"a": (np.zeros((1, 32), np.float32), 0)})
    assert Tokenizer.load(path).suppressed_ids == (3, 4) and GgufFile(path).metadata
    values["tokenizer.ggml.suppress_tokens"] = 5
    one = write_gguf(tmp_path / "one.gguf", "llama", values, {"a": (np.zeros((1, 32), np.float32), 0)})
    assert Tokenizer.load(one).suppressed_ids == (5,)
    values["tokenizer.ggml.suppress_tokens"] = [3, 99999]
    with pytest.raises(TokenizerError, match="suppress_tokens"):
        Tokenizer.load(write_gguf(tmp_path / "b.gguf", "llama", values, {"a": (np.zeros((1, 32), np.float32), 0)}))
    with pytest.raises(TokenizerError, match="suppress_tokens"):
        Tokenizer.load(saved(tmp_path / "far", [99999]))
