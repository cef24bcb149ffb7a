"""Token ids, texts and conversations against transformers, the tokenizers library and llama.cpp, for GGUF metadata and
tokenizer.json."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import transformers
from corpus import TEXTS, with_special
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import as_gguf, oracle, write_gguf
from tokenizer_models import (
    PRE,
    SPECIAL,
    copy,
    gguf_metadata,
    llama_golden,
    parts,
    save,
    sentencepiece_metadata,
    train,
    write,
)
from tokenizers import Regex, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as HfTokenizer
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

import wager
from wager.errors import ModelError, TokenizerError
from wager.models.random_models import byte_tokenizer
from wager.models.tokenizer import IncrementalDecoder, Tokenizer
from wager.models.tokenizer_files import pre_tokenizer
from wager.models.weights import open_weights

CHAT = [
    {"role": "system", "content": 'Be brief. 日本 "quoted" <b>&</b>'},
    {"role": "user", "content": "Hi\n\nthere"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "  Bye?  "},
]

SAMPLES = (*TEXTS, *with_special(*SPECIAL))


@pytest.fixture(scope="module", params=PRE)
def pre(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def backend(pre: str) -> Any:
    return train(pre)


@pytest.fixture(scope="module")
def from_gguf(backend: Any, pre: str, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write(tmp_path_factory.mktemp("gguf") / "t.gguf", gguf_metadata(backend, pre)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("folder"))


@settings(max_examples=40, deadline=None)
@given(text=st.sampled_from(SAMPLES) | st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@example(text="".join(SAMPLES))
def test_any_text_agrees_and_comes_back(backend: Any, from_gguf: Tokenizer, pre: str, text: str) -> None:
    ids, expected = from_gguf.encode(text), backend.encode(text)
    assert ids == expected.ids
    assert [from_gguf.token(i) for i in ids] == expected.tokens
    assert from_gguf.token(10**6) == "" and from_gguf.token_bytes(10**6) == b""
    special = re.search("|".join(map(re.escape, SPECIAL)), text)
    if special is None and not pre.startswith("qwen"):  # it normalises
        assert from_gguf.decode(ids) == text


def test_a_directory_agrees_with_transformers(folder: Path) -> None:
    ours, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.vocab_size == len(theirs)
    for text in SAMPLES:
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, special=True) == theirs.decode(ids)


@pytest.mark.parametrize(("pre", "bos"), [("llama-bpe", [0]), ("smaug-bpe", [])])
def test_llama3_files_add_bos_by_default(pre: str, bos: list[int], tmp_path: Path) -> None:
    """Not those whose tokenizer is Llama 3's without it, which llama.cpp calls smaug-bpe."""
    metadata = gguf_metadata(train("llama-bpe"), pre)
    del metadata["tokenizer.ggml.add_bos_token"]
    ours = Tokenizer.load(write(tmp_path / "t.gguf", metadata))
    assert ours.encode("hi") == [*bos, *ours.encode("hi", special=False)]
    assert ours.decode(ours.encode("hi")) == "hi"


def test_end_of_turn_ends_a_text_too(tmp_path: Path) -> None:
    ends = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 10**6}
    metadata = {**gguf_metadata(train("smollm"), "smollm"), **ends}
    assert Tokenizer.load(write(tmp_path / "t.gguf", metadata)).eos_ids == (1, 5)


def test_a_file_that_does_not_say_how_text_is_split_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metadata = gguf_metadata(train("gpt-2"), "gpt-2")
    del metadata["tokenizer.ggml.pre"]
    path = write(tmp_path / "t.gguf", metadata)
    assert Tokenizer.load(path).encode("12 ab") == train("gpt-2").encode("12 ab").ids
    assert f"{path} does not say how" in caplog.text


@pytest.mark.parametrize(
    ("texts", "kind", "ends"),
    [
        (("<eos>", "<end_of_turn>"), 3, (1, 5)),  # Gemma 3
        (("<|endoftext|>", "<|end|>"), 4, (1, 5)),  # Phi-3
        (("<|return|>", "<|end|>"), 3, (1,)),  # gpt-oss
        (("<|im_end|>", "<|endoftext|>"), 3, (1, 5)),  # Qwen
        (("<|eot_id|>", "<|end_of_text|>"), 3, (1, 5)),  # Llama 3
        (("<|im_end|>", "<|end|>"), 1, (1,)),  # an ordinary token
    ],
)
def test_texts_end_by_tokens_that_a_file_does_not_name(
    texts: tuple[str, str], kind: int, ends: tuple[int, ...], tmp_path: Path
) -> None:
    metadata = gguf_metadata(train("smollm"), "smollm")
    tokens, kinds = list(metadata["tokenizer.ggml.tokens"]), list(metadata["tokenizer.ggml.token_type"])
    tokens[1], tokens[5], kinds[5] = *texts, kind
    changed = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": ["a b"]}
    found = Tokenizer.load(write(tmp_path / "t.gguf", {**metadata, **changed}))
    assert found.eos_ids == ends
    assert all(map(found.is_special, ends))  # and no text
    unknown = {**metadata, **changed, "tokenizer.ggml.unknown_token_id": 5}  # as SmolLM2's <|endoftext|>
    assert Tokenizer.load(write(tmp_path / "u.gguf", unknown)).eos_ids == (1,)


def test_user_defined_tokens_are_not_split_and_are_text(tmp_path: Path) -> None:
    metadata = gguf_metadata(train("smollm"), "smollm")
    tokens = [*metadata["tokenizer.ggml.tokens"], "<think ü>", "<|ctl ü|>"]
    types = [*metadata["tokenizer.ggml.token_type"], 4, 3]
    changed = {**metadata, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    ours = Tokenizer.load(write(tmp_path / "t.gguf", changed))
    ids = ours.encode("a<think ü>b<|ctl ü|>c")
    assert ids[1] == len(tokens) - 2
    assert ids[3] == len(tokens) - 1
    assert ours.decode(ids) == "a<think ü>bc"
    assert ours.decode(ids, special=True) == "a<think ü>b<|ctl ü|>c"


@settings(max_examples=40, deadline=None)
@given(ids=st.lists(st.integers(0, 720), max_size=30), special=st.booleans())
def test_streamed_text_is_the_decoded_text(from_gguf: Tokenizer, backend: Any, ids: list[int], special: bool) -> None:
    """Any ids: half characters, special tokens in the middle of one, ids beyond the vocabulary."""
    stream = IncrementalDecoder(from_gguf, special=special)
    pieces = [stream.push(i) for i in ids] + [stream.flush()]
    text = from_gguf.decode(ids, special=special)
    assert "".join(pieces) == text
    assert text == backend.decode([i for i in ids if i < 700], skip_special_tokens=not special)


def test_eos_comes_from_the_most_specific_file(folder: Path, tmp_path: Path) -> None:
    copy(folder, tmp_path)
    assert Tokenizer.load(tmp_path).eos_ids == (1,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer.load(tmp_path).eos_ids == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    assert Tokenizer.load(tmp_path).eos_ids == (8, 9)


def test_bos_in_a_directory_follows_tokenizer_json_alone(folder: Path, tmp_path: Path) -> None:
    """As in transformers: flags in tokenizer_config.json have no effect, nor have stored truncation and padding."""
    copy(folder, tmp_path, add_bos_token=True)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert Tokenizer.load(tmp_path).encode("Hello") == theirs("Hello").input_ids
    backend = train("smollm")
    backend.post_processor = TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 0)])
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.load(tmp_path)
    ids = train("smollm").encode("Hello to everyone").ids
    assert ours.encode("Hello to everyone") == [0, *ids]
    assert ours.encode("Hello to everyone", special=False) == ids


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer.ggml.pre": "kimi-k2"}, "kimi-k2"),
        ({"tokenizer.ggml.model": "bert"}, "bert"),
        ({"tokenizer.ggml.model": "llama"}, "0 scores"),
        ({"tokenizer.ggml.merges": ["qzx qzx"]}, "t.gguf has unusable merges"),
        ({"tokenizer.ggml.model": None}, "not supported"),
    ],
)
def test_a_file_without_a_usable_tokenizer_is_named(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    changed = {**gguf_metadata(train("smollm"), "smollm"), **change}
    if "llama" in change.values():
        del changed["tokenizer.ggml.merges"]
    path = write(tmp_path / "t.gguf", {key: value for key, value in changed.items() if value is not None})
    with pytest.raises(TokenizerError, match=named):
        Tokenizer.load(path)


def test_a_directory_without_a_usable_tokenizer_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer.json is absent"):
        Tokenizer.load(tmp_path)
    for content in ("{", "{}", '{"model": {"type": "BPE"}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ModelError, match=r"tokenizer.json"):
            Tokenizer.load(tmp_path)
    copy(folder, tmp_path)
    description = json.loads((tmp_path / "tokenizer.json").read_text())
    description["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(TokenizerError, match="WordPiece"):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_of_a_gguf_file_is_the_same_one_as_files_of_a_directory(
    from_gguf: Tokenizer, tmp_path: Path
) -> None:
    for name, text in from_gguf.files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = Tokenizer.load(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in SAMPLES:
        ids = from_gguf.encode(text)
        assert found.encode(text) == ids == theirs(text).input_ids
        for special in (True, False):
            assert found.decode(ids, special=special) == from_gguf.decode(ids, special=special)
        assert found.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert [found.token(i) for i in range(found.vocab_size)] == [from_gguf.token(i) for i in range(found.vocab_size)]
    assert found.eos_ids == from_gguf.eos_ids
    assert found.chat_template == from_gguf.chat_template == theirs.chat_template


def test_a_tokenizer_in_another_process_is_the_same() -> None:
    tokenizer = byte_tokenizer(512, where="toy")
    tokenizer.token_bytes(65)
    copied = pickle.loads(pickle.dumps(tokenizer))
    for text in SAMPLES:
        assert copied.encode_untrusted(text) == tokenizer.encode_untrusted(text)
    assert copied.decode(range(512)) == tokenizer.decode(range(512)) and copied.eos_ids == tokenizer.eos_ids


# ---- chat templates ----


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for m in messages %}", "damaged"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ 1 // 0 }}", "refuses"),
    ],
)
def test_a_template_that_refuses_is_an_error_with_its_message(template: str, named: str, tmp_path: Path) -> None:
    metadata = {**gguf_metadata(train("smollm"), "smollm"), "tokenizer.chat_template": template}
    tokenizer = Tokenizer.load(write(tmp_path / "t.gguf", metadata))
    with pytest.raises(TokenizerError, match=named):
        tokenizer.chat(CHAT)


def test_an_absent_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"t\.gguf has no chat template") as caught:
        Tokenizer.load(write(tmp_path / "t.gguf", sentencepiece_metadata())).chat(CHAT)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("{{ 1 }}", "1"),
        ([{"name": "tool_use", "template": "{{ 2 }}"}, {"name": "default", "template": "{{ 3 }}"}], "3"),
    ],
)
def test_a_template_in_the_configuration(stored: Any, expected: str, folder: Path, tmp_path: Path) -> None:
    copy(folder, tmp_path, chat_template=stored)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    assert Tokenizer.load(tmp_path).chat(CHAT) == expected


# ---- SentencePiece vocabularies of GGUF files ----


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write(tmp_path_factory.mktemp("spm") / "t.gguf", sentencepiece_metadata()))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write(tmp_path_factory.mktemp("llama") / "t.gguf", llama_golden().metadata))


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
def test_any_sentencepiece_text_comes_back(spm: Tokenizer, fragments: list[str]) -> None:
    text = "".join(fragments)
    assert spm.decode(spm.encode(text, special=False), special=True) == text


@pytest.mark.slow
def test_without_space_prefix_no_space_is_added_or_removed(tmp_path: Path) -> None:
    golden = llama_golden()
    metadata = {**golden.metadata, "tokenizer.ggml.add_space_prefix": False}
    plain = Tokenizer.load(write(tmp_path / "t.gguf", metadata))
    assert plain.encode(" Hello world") == golden.ids["Hello world"]
    assert plain.encode("  Hello") == golden.ids[" Hello world"][:-1]
    for text in golden.ids:
        assert plain.decode(plain.encode(text, special=False), special=True) == text.replace("▁", " ")


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


def test_gemma_4s_tokenizer_is_transformers(tmp_path: Path) -> None:
    trained = HfTokenizer(BPE(byte_fallback=True))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁+[^▁\n]*|\n+|[^▁\n]+"), behavior="isolated")
    first = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "<|turn>", "<|channel>"]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=first, show_progress=False)
    trained.train_from_iterator([text for text in TEXTS if text.isascii() for _ in range(3)], trainer)
    tokens, merges = parts(trained)
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 3, *[6] * 256, 3, 4, *[1] * (len(tokens) - 262)],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
        **{f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(("padding", "eos", "bos", "unknown"))},
    }
    ours = Tokenizer.load(write(tmp_path / "t.gguf", metadata))
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    theirs = transformers.GemmaTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs)
    theirs.add_special_tokens({"additional_special_tokens": ["<|turn>", "<|channel>"]})
    for text in (*TEXTS, "<|turn>user\n\n\nHi  there\n<|channel>", " a\n \n  b  "):
        ids = ours.encode(text)
        assert ids == [2, *theirs.encode(text, add_special_tokens=False)], text
        assert ours.decode(ids, special=True) == f"<bos>{text}".replace("▁", " ")


def test_sentencepiece_tokens_that_a_file_does_not_name(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata()
    for name in ("bos", "eos", "unknown"):
        del metadata[f"tokenizer.ggml.{name}_token_id"]
    ours = Tokenizer.load(write(tmp_path / "t.gguf", metadata))
    assert ours.encode("the fox") == [1, *ours.encode("the fox", special=False)]
    assert ours.eos_ids == (2,)


@settings(max_examples=60, deadline=None)
@given(fragments=FRAGMENTS)
def test_an_answer_continues_the_text_of_its_prompt(spm: Tokenizer, fragments: list[str]) -> None:
    """Wherever a text is cut between two tokens, the two texts joined are the whole."""
    ids = spm.encode("".join(fragments))
    whole = spm.decode(ids)
    for cut in range(len(ids) + 1):
        before, stream = spm.decode(ids[:cut]), IncrementalDecoder(spm, after=ids[:cut])
        if not before.endswith("\ufffd"):  # not within a character
            assert before + "".join([stream.push(i) for i in ids[cut:]]) + stream.flush() == whole


def test_an_answer_begins_with_the_space_that_its_token_has(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    model = oracle("LlamaForCausalLM", vocab_size=len(tokens), head_dim=16)
    spec = open_weights(tiny_models.save(model, tmp_path / "hf")).spec
    path = write_gguf(
        tmp_path / "model.gguf",
        "llama",
        {**tiny_models.gguf_metadata(spec, "llama"), **metadata},
        as_gguf(model, spec, {}, permuted=True),
    )
    space = tokens.index("▁")
    params = wager.SamplingParams(max_tokens=3, temperature=0, logit_bias={space: 100})
    with wager.LLM(str(path), max_context=64, max_sequences=2, threads=1, drafter="none") as llm:
        for prompt, expected in (("the fox", "   "), ("the fox</s>", "  "), ("", "  ")):
            answer = llm.generate(prompt, params)
            assert (answer.token_ids, answer.text) == ((space,) * 3, expected)
            assert "".join(delta.text for delta in llm.stream(prompt, params)) == expected


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("gpt-4o", ["Hello", "World's", " ", "123", "45", " naïve", "/\n\n", "XYZabc"]),
        ("deepseek-v3", ["HelloWorld", "'s", " ", "123", "45", " naïve", "/\n\n", "XYZabc"]),
        ("deepseek-llm", ["HelloWorld", "'", "s", " ", *"12345", " na", "ï", "ve", *"/\n\n", "XYZabc"]),
        ("deepseek-coder", ["HelloWorld", "'", "s", " ", *"12345", " naïve", *"/\n\n", "XYZabc"]),
    ],
)
def test_words_of_newer_vocabularies(name: str, pieces: list[str]) -> None:
    """As tiktoken's o200k_base cuts them, and DeepSeek's own tokenizers."""
    cuts = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in pre_tokenizer(name).cuts]
    found = pre_tokenizers.Sequence(cuts).pre_tokenize_str("HelloWorld's 12345 naïve/\n\nXYZabc")
    assert [piece for piece, _ in found] == pieces
