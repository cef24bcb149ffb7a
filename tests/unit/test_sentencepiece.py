"""SentencePiece vocabularies of GGUF files against llama.cpp and transformers: token ids, and texts from them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import transformers
from corpus import TEXTS
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import as_gguf, gguf_metadata, oracle, save, write_gguf
from tokenizer_models import llama_golden, sentencepiece_metadata, write

import wager
from wager.models.tokenizer import IncrementalDecoder, Tokenizer
from wager.models.tokenizer_files import scored_merges
from wager.models.weights import open_weights

_loaded = cache(Tokenizer.load)


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("spm") / "t.gguf", sentencepiece_metadata())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write(tmp_path_factory.mktemp("llama") / "t.gguf", llama_golden().metadata))


def test_sentencepiece_agrees_with_transformers(spm: Path) -> None:
    """On one fragment of text that begins with a word; transformers differs from llama.cpp on the others."""
    ours = Tokenizer.load(spm)
    theirs = transformers.AutoTokenizer.from_pretrained(spm.parent, gguf_file=spm.name)
    texts = [text for text in TEXTS if not text.startswith((" ", "▁"))]
    assert len(texts) > 30
    for text in (*texts, "</s>", "<s></s>", "Hello</s>", "call <tool>"):
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special).input_ids
            assert ours.encode(text, special=special) == ids, text
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    assert ours.encode("Hello")[0] == 1
    assert ours.eos_ids == (2,)


def test_sentencepiece_ids_are_llama_cpps(llama: Tokenizer) -> None:
    golden = llama_golden().ids
    assert len(golden) > 80
    assert set(TEXTS) <= set(golden), "run dev/compare_sentencepiece.py --write"
    assert {text: llama.encode(text) for text in golden} == golden


FRAGMENTS = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=8),
        st.sampled_from(["<s>", "</s>", "<unk>", "<tool>", " ", "  ", "\n", "<0x0A>"]),
    ),
    max_size=8,
)


@settings(max_examples=80, deadline=None)
@given(fragments=FRAGMENTS)
def test_any_sentencepiece_text_comes_back(spm: Path, fragments: list[str]) -> None:
    tokenizer, text = _loaded(spm), "".join(fragments)
    assert tokenizer.decode(tokenizer.encode(text, special=False), special=True) == text


def test_without_space_prefix_no_space_is_added_or_removed(tmp_path: Path) -> None:
    golden = llama_golden()
    metadata = {**golden.metadata, "tokenizer.ggml.add_space_prefix": False}
    plain = Tokenizer.load(write(tmp_path / "t.gguf", metadata))
    assert plain.encode(" Hello world") == golden.ids["Hello world"]
    assert plain.encode("  Hello") == golden.ids[" Hello world"][:-1]
    for text in golden.ids:
        assert plain.decode(plain.encode(text, special=False), special=True) == text.replace("▁", " ")


def test_text_is_never_merged_into_control_or_byte_tokens() -> None:
    tokens = ["<", "s", ">", "<s", "s>", "<s>", "0", "x", "0A", "<0", "<0x0A>", "x0A>", "<0x0A", "<unk>"]
    kinds = [1, 1, 1, 1, 1, 3, 1, 1, 1, 1, 6, 1, 1, 2]
    made = {left + right for left, right in scored_merges(tokens, [0.0] * len(tokens), kinds)}
    assert made == {"<s", "s>", "<0"}
    assert "<s>" in {left + right for left, right in scored_merges(tokens, [0.0] * len(tokens))}


def test_tokens_with_spaces_inside_are_merged_across_words(tmp_path: Path) -> None:
    """Ids from llama.cpp: a vocabulary of such tokens cannot be merged word by word."""
    base = sentencepiece_metadata()
    pieces = ["a▁b", "a▁", "▁a", "▁b", "▁", "a", "b"]
    tokens = [*base["tokenizer.ggml.tokens"][:259], *pieces]
    metadata = {
        **base,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 7],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(7)],
    }
    ours = Tokenizer.load(write(tmp_path / "t.gguf", metadata))
    assert [ours.token(i) for i in ours.encode("a b ab", special=False)] == ["▁", "a▁b", "▁a", "b"]


def test_sentencepiece_tokens_that_a_file_does_not_name(spm: Path, tmp_path: Path) -> None:
    metadata = sentencepiece_metadata()
    for name in ("bos", "eos", "unknown"):
        del metadata[f"tokenizer.ggml.{name}_token_id"]
    ours = Tokenizer.load(write(tmp_path / "t.gguf", metadata))
    assert ours.encode("the fox") == [1, *ours.encode("the fox", special=False)]
    assert ours.eos_ids == (2,)


@settings(max_examples=60, deadline=None)
@given(prompt=FRAGMENTS, answer=FRAGMENTS)
def test_an_answer_continues_the_text_of_its_prompt(spm: Path, prompt: list[str], answer: list[str]) -> None:
    """Wherever a text is cut between two tokens, the two texts joined are the whole."""
    tokenizer = _loaded(spm)
    ids = tokenizer.encode("".join([*prompt, *answer]))
    whole = tokenizer.decode(ids)
    for cut in range(len(ids) + 1):
        before, stream = tokenizer.decode(ids[:cut]), IncrementalDecoder(tokenizer, after=ids[:cut])
        if not before.endswith("\ufffd"):  # not within a character
            assert before + "".join([stream.push(i) for i in ids[cut:]]) + stream.flush() == whole


@pytest.mark.parametrize(("prompt", "expected"), [("the fox", "   "), ("the fox</s>", "  "), ("", "  ")])
def test_an_answer_begins_with_the_space_that_its_token_has(tmp_path: Path, prompt: str, expected: str) -> None:
    metadata = sentencepiece_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    model = oracle("LlamaForCausalLM", vocab_size=len(tokens), head_dim=16)
    spec = open_weights(save(model, tmp_path / "hf")).spec
    path = write_gguf(
        tmp_path / "model.gguf",
        "llama",
        {**gguf_metadata(spec, "llama"), **metadata},
        as_gguf(model, spec, {}, permuted=True),
    )
    space = tokens.index("▁")
    params = wager.SamplingParams(max_tokens=3, temperature=0, logit_bias={space: 100})
    with wager.LLM(str(path), max_context=64, max_sequences=2, threads=1, drafter="none") as llm:
        answer = llm.generate(prompt, params)
        assert answer.token_ids == (space,) * 3
        assert answer.text == expected
        assert "".join(delta.text for delta in llm.stream(prompt, params)) == expected
