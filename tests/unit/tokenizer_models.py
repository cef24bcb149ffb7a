"""Small real vocabularies, trained on the corpus, as tokenizer.json and as GGUF metadata."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tiny_models
from corpus import TEXTS
from tiny_models import oracle, write_gguf
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN35

SPECIAL = ("<|start|>", "<|end|>")
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = "{% for m in messages %}{{ bos_token + m['role'] + ': ' + m['content'] + eos_token }}\n{% endfor %}"


def byte_level(*, use_regex: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior="isolated"), byte_level(use_regex=False)]
    )


PRE = {
    "gpt-2": byte_level(use_regex=True),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(use_regex=True)]),
    "llama-bpe": split(LLAMA3),
    "qwen2": split(PRETOKENIZE_REGEX),
    "qwen35": split(QWEN35),
    "gpt-4o": split(GPT4O),
    "dbrx": split(LLAMA3),
}
"""The pre-tokenizers of the models' own tokenizer.json files, as published."""


def train(pre: str) -> Tokenizer:
    """A byte-level tokenizer of 700 tokens with the pre-tokenizer of that name and two special tokens."""
    return Tokenizer.from_str(_trained(pre))


@cache
def _trained(pre: str) -> str:
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = PRE[pre]
    backend.decoder = decoders.ByteLevel()
    if pre.startswith("qwen"):
        backend.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([text for text in TEXTS for _ in range(3)], trainer)
    return str(backend.to_str())


def parts(backend: Tokenizer) -> tuple[list[str], list[str]]:
    """Tokens in order of their ids, and merges as a GGUF file writes them."""
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(backend.get_vocab(), key=backend.get_vocab().__getitem__)
    return tokens, [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]


def gguf_metadata(backend: Tokenizer, pre: str) -> dict[str, Any]:
    tokens, merges = parts(backend)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def sentencepiece_metadata() -> dict[str, Any]:
    """A SentencePiece vocabulary as GGUF has it: control and byte tokens, pieces with falling scores."""
    backend = Tokenizer(BPE(byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, limit_alphabet=150)
    latin = [text for text in TEXTS if text.isascii()]
    backend.train_from_iterator([text for text in latin for _ in range(3)], trainer)
    pieces, _ = parts(backend)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<tool>"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@dataclass(frozen=True, slots=True)
class LlamaGolden:
    """Llama's vocabulary as far as it matters for some texts, and the texts with their ids from llama.cpp (BOS
    included, special tokens parsed). dev/compare_sentencepiece.py writes the file; there it says why a part is enough.
    """

    metadata: dict[str, Any]
    ids: dict[str, list[int]]


def llama_golden() -> LlamaGolden:
    stored = json.loads((Path(__file__).parent / "llama_sentencepiece.json").read_text())
    size, kept = stored["vocab_size"], {int(i): token for i, token in stored["tokens"].items()}
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = [*first, *(kept.get(i, f"\ue123{i}") for i in range(len(first), size))]
    scores = [0.0] * len(first) + [
        -1e9 if set(token) == {"▁"} else 259.0 - i for i, token in enumerate(tokens) if i > 258
    ]
    metadata = {
        **sentencepiece_metadata(),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (size - len(first))],
        "tokenizer.ggml.scores": scores,
    }
    return LlamaGolden(metadata, dict(stored["ids"]))


def write(path: Path, metadata: dict[str, Any]) -> Path:
    """A GGUF file with a tokenizer and no tensors. transformers wants the model's sizes beside it."""
    sizes = {"block_count": 1, "context_length": 8, "embedding_length": 8, "attention.head_count": 1}
    return write_gguf(path, "llama", {"general.name": "test", **sizes, **metadata}, {})


def save(path: Path) -> Path:
    """A directory with the smollm tokenizer, as transformers saves it."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=train("smollm"), bos_token=SPECIAL[0], eos_token=SPECIAL[1], chat_template=TEMPLATE
    )
    fast.save_pretrained(path)
    return path


def save_model(path: Path, architecture: str = "LlamaForCausalLM", *, pre: str = "gpt-2", **config: Any) -> str:
    """A directory of a random model, as tiny_models has them, with a tokenizer of 700 tokens."""
    tokenizer = train(pre)
    model = oracle(architecture, **{"vocab_size": tokenizer.get_vocab_size(), "head_dim": 16, **config})
    tokenizer.save(str(tiny_models.save(model, path) / "tokenizer.json"))
    return str(path)


def copy(folder: Path, target: Path, **config: Any) -> None:
    """The directory again, with changes to tokenizer_config.json."""
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    path = target / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
