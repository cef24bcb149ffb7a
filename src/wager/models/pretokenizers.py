"""Pre-tokenizers of byte-level vocabularies by the name in a GGUF file (`tokenizer.ggml.pre`).

Each row splits text as the model's own tokenizer does, for which its merges were trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wager.errors import TokenizerError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is split before merging.

    `cuts` are regular expressions, applied one after the other; every match becomes a piece of its own. `whole_words`:
    a piece that is itself a token is taken without merging. `nfc`: text is normalised to NFC first. `add_bos` is the
    default if the file does not state it.
    """

    cuts: tuple[str, ...]
    whole_words: bool = False
    nfc: bool = False
    add_bos: bool = False


_PLAIN = PreTokenizer((_GPT2,))
_SINGLE_DIGITS = PreTokenizer((_DIGIT, _GPT2))
_LLAMA = PreTokenizer((_LLAMA3,), whole_words=True, add_bos=True)
_QWEN = PreTokenizer((_QWEN2,), nfc=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": _PLAIN,
    "gpt-2": _PLAIN,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "command-r": _SINGLE_DIGITS,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "llama-bpe": _LLAMA,
    "falcon3": _LLAMA,
    "smaug-bpe": _LLAMA,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, add_bos=True),
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The row of that name. TokenizerError names one that is not known."""
    if name not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"The pre-tokenizer {name!r} is not supported.",
            f"Supported are: {', '.join(PRE_TOKENIZERS)}. The model's Hugging Face directory defines its own.",
        )
    return PRE_TOKENIZERS[name]
