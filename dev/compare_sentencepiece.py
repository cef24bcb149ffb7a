"""Token ids of wager and of llama.cpp for a GGUF file with a SentencePiece vocabulary, on texts and hostile strings.

    python dev/compare_sentencepiece.py VOCAB.gguf --library LIBLLAMA.so [FILE.jsonl ...] [--count N] [--seed N]
    python dev/compare_sentencepiece.py VOCAB.gguf --library LIBLLAMA.so --write tests/unit/llama_sentencepiece.json

The library is one that exports llama.cpp's C functions: libllama.so, or the extension module of the xllamacpp wheel.
Llama's vocabulary is models/ggml-vocab-llama-spm.gguf in llama.cpp's sources (the sdist of llama-cpp-python has them).
`--write` makes the golden file of tests/unit/test_sentencepiece.py: llama.cpp's ids, and the tokens of the vocabulary
that occur anywhere in the texts. No other token can take part in a merge, so the ids are those of the whole vocabulary.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))

from corpus import TEXTS, with_special

from wager.models.gguf import open_gguf
from wager.models.tokenizer import Tokenizer

_WORDS = """
▁ ▁▁ <0x0A> <0x 0A> < s > </ /s> a the Hello == = - .... . _ 日 本語 中文 😀 👩‍👩‍👧 <s> </s> <unk>
( )) 's // 0 00 ** ## ab aba ha haha xx
"""
ATOMS = (
    *(" ", "  ", "   ", "\n", "\n\n", "\t", "\r", "\0", "\x01", "\x7f", " world", " " * 15, " " * 17, " " * 40),
    *("é", "e\u0301", "\u200b", "\ufeff", "\u00a0", "\u2003", "ﬁ", "\U0010ffff", "\ue000", "ا", "1", "234", "{", "}}"),
    *_WORDS.split(),
)
GOLDEN = (
    *TEXTS,
    *with_special("<s>", "</s>"),
    *(
        " Hello world",
        "Hello world",
        "▁Hello world",
        "  Hello",
        "▁",
        "▁▁",
        " ▁ ",
        "\n",
        " \n",
        "\n ",
        "<unk>",
        "a<unk>b",
    ),
    *("<0x0A>", "<0x41>A", "a\0b", "</s> b", "</s>b", "a </s>", "<s> <s>", "日本 語", "😀 😀", "é e\u0301"),
    *(" " * count for count in (2, 3, 15, 16, 17, 31, 32, 33, 48, 100)),
    *("=" * 30, "-" * 17, "_" * 33, "ha" * 9, "    if x:\n        return  y\n", "\t\tx", "1 + 1 = 2"),
    "<s>[INST] Hi there [/INST] Hello! </s><s>[INST] And now? [/INST]",
    "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\nHello!</s>\n<|user|>\n And now?</s>\n<|assistant|>\n",
)


class LlamaCpp:
    """llama.cpp's tokenizer of one file."""

    class _ModelParams(ctypes.Structure):
        _fields_ = (("bytes", ctypes.c_ubyte * 256),)  # longer than llama_model_params is

    VOCAB_ONLY = 72  # offset of llama_model_params.vocab_only

    def __init__(self, library: str, path: str) -> None:
        self._llama = ctypes.CDLL(library)
        pointer, integers = ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32)
        self._quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, pointer)(lambda *_: None)
        self._llama.llama_log_set(self._quiet, None)
        self._llama.llama_backend_init()
        self._llama.llama_model_default_params.restype = self._ModelParams
        self._llama.llama_model_load_from_file.argtypes = [ctypes.c_char_p, self._ModelParams]
        self._llama.llama_model_load_from_file.restype = pointer
        self._llama.llama_model_get_vocab.argtypes, self._llama.llama_model_get_vocab.restype = [pointer], pointer
        self._llama.llama_tokenize.argtypes = [
            *(pointer, ctypes.c_char_p, ctypes.c_int32, integers, ctypes.c_int32, ctypes.c_bool, ctypes.c_bool)
        ]
        params = self._llama.llama_model_default_params()
        params.bytes[self.VOCAB_ONLY] = 1
        model = self._llama.llama_model_load_from_file(path.encode(), params)
        if not model:
            sys.exit(f"llama.cpp cannot read {path}.")
        self._vocab = self._llama.llama_model_get_vocab(model)

    def encode(self, text: str) -> list[int]:
        raw = text.encode()
        ids = (ctypes.c_int32 * (len(raw) + 16))()
        count = self._llama.llama_tokenize(self._vocab, raw, len(raw), ids, len(ids), True, True)
        return list(ids[:count])


def strings(value: object) -> list[str]:
    """Every string in a value of JSON."""
    if isinstance(value, str):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in inside for text in strings(part)]


def write_golden(path: str, tokens: list[str], theirs: LlamaCpp) -> None:
    fragments = ["▁" + part.replace(" ", "▁") for text in GOLDEN for part in re.split("<s>|</s>|<unk>", text)]
    longest = max(map(len, tokens))
    parts = {text[a:b] for text in fragments for a in range(len(text)) for b in range(a + 1, a + longest + 1)}
    kept = {i: token for i, token in enumerate(tokens) if i >= 259 and token in parts}  # the others are in every file
    ids = [json.dumps([text, theirs.encode(text)]) for text in dict.fromkeys(GOLDEN)]
    body = ",\n".join(ids)
    Path(path).write_text(f'{{"vocab_size": {len(tokens)},\n"tokens": {json.dumps(kept)},\n"ids": [\n{body}\n]}}\n')


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("vocabulary")
    parser.add_argument("files", nargs="*")
    parser.add_argument("--library", required=True)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write")
    given = parser.parse_intermixed_args()
    theirs = LlamaCpp(given.library, given.vocabulary)
    if given.write:
        return write_golden(given.write, open_gguf(Path(given.vocabulary)).metadata["tokenizer.ggml.tokens"], theirs)
    ours, chance = Tokenizer.load(Path(given.vocabulary)), random.Random(given.seed)
    kinds = {
        "written": GOLDEN,
        "files": [
            text
            for file in given.files
            for line in Path(file).read_text().rstrip().split("\n")
            for text in strings(json.loads(line))
        ],
        "runs": [character * count for character in " ▁=-_.#*\n\t0a/\\~é" for count in range(1, 200)],
        "hostile": ["".join(chance.choices(ATOMS, k=chance.randrange(1, 14))) for _ in range(given.count)],
    }
    for kind, texts in kinds.items():
        different = back = 0
        for text in texts:
            ids = ours.encode(text)
            different += ids != theirs.encode(text)
            back += ours.decode(ids[1:], special=True) != text.replace("▁", " ")
        print(f"{kind}: {len(texts)} texts, {different} with other ids than llama.cpp's, {back} that do not come back")


if __name__ == "__main__":
    main()
