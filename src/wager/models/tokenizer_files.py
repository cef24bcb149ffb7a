"""Reads tokenizers: tokenizer.json and related files from a directory, or the metadata of a GGUF file, whose keys are
those that llama.cpp's converter writes; and writes the files of a Hugging Face directory.

A pre-tokenizer of a GGUF file (`tokenizer.ggml.pre`) is a row of PRE_TOKENIZERS.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from wager.arch.config_keys import ConfigKeys, one_line, read_json
from wager.errors import TokenizerError, WagerError
from wager.models.gguf import open_gguf

Spelling = Literal["byte-level", "sentencepiece"]
"""How bytes are written in the vocabulary: one character for each byte (GPT-2), or as text with ▁ for a space and
<0xNN> for other bytes."""

SpacePrefix = Literal["none", "text", "fragment"]
"""Where encoding puts a space that decoding removes: nowhere, before the text, or before every fragment of the text,
that is, also after every special or user-defined token (SentencePiece in GGUF files)."""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """The parts of a tokenizer; `where` names the file or directory it was read from.

    `special` ids are left out of decoded text; `literal` ids are spelled as text, not as bytes. `named` are the special
    tokens that a chat template may use.
    """

    backend: Backend
    spelling: Spelling
    vocab_size: int
    eos_ids: tuple[int, ...]
    where: str
    special: frozenset[int] = frozenset()
    literal: frozenset[int] = frozenset()
    space_prefix: SpacePrefix = "none"
    named: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    suppressed_ids: tuple[int, ...] = ()


@contextmanager
def library_errors(where: str) -> Iterator[None]:
    """Whatever the tokenizers library raises inside, as a TokenizerError about `where`."""
    try:
        yield
    except WagerError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of Rust, by PyO3
            raise
        raise TokenizerError(
            f"The tokenizer of {where} is damaged: {one_line(error)}.", "Fetch the model again."
        ) from error


# ---- pre-tokenizers of byte-level vocabularies in GGUF files ---------------------------------------------------------
# Each splits text as the model's own tokenizer does, for which its merges were trained.

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_LETTERS = (  # letters with two cases, as the models' tokenizer.json spells them
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_HAN = "[\u0800-\u9fa5\uac00-\ud7ff]+"
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _DEEPSEEK_HAN,
    _DIGIT,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN, _DIGIT)


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


_SUFFIX = rf"{_CONTRACTIONS}?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PLAIN = PreTokenizer((_GPT2,))
_SINGLE_DIGITS = PreTokenizer((_DIGIT, _GPT2))
_LLAMA = PreTokenizer((_LLAMA3,), whole_words=True, add_bos=True)
_QWEN = PreTokenizer((_QWEN2,), nfc=True)
_GPT4 = PreTokenizer((_LLAMA3,))

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
    "falcon-h1": _LLAMA,
    "pixtral": _LLAMA,
    "lfm2": _LLAMA,
    "smaug-bpe": PreTokenizer((_LLAMA3,), whole_words=True),
    "qwen2": _QWEN,
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "deepseek-r1-qwen": _QWEN,
    "olmo": _PLAIN,
    "dbrx": _GPT4,
    "glm4": _GPT4,
    "chatglm-bpe": _GPT4,
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, add_bos=True),
    "deepseek-llm": PreTokenizer(_DEEPSEEK),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "deepseek-v3": PreTokenizer(_DEEPSEEK_V3),
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The row of that name. TokenizerError names one that is not known."""
    if name not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"The pre-tokenizer {name!r} is not supported.",
            f"Supported are: {', '.join(PRE_TOKENIZERS)}. The model's Hugging Face directory defines its own.",
        )
    return PRE_TOKENIZERS[name]


log = logging.getLogger("wager")

# ---- ids that end a text ---------------------------------------------------------------------------------------------

_FILES = ("generation_config.json", "config.json")
_UNUSED = ("bos_token_id", "pad_token_id")


def read_eos_ids(path: Path, *, vocab: int, default: int | None) -> tuple[int, ...]:
    """From generation_config.json, else config.json, else `default`, the tokenizer's own.

    `vocab` is the size of the tokenizer's vocabulary; that of config.json counts if it is stated. TokenizerError names
    an id that is none of the vocabulary's, which would never end a text. Ids that wager does not use (BOS and padding
    of these files) are only warned of.
    """
    files = list(_present(path))
    vocab = _stated_size(files, vocab)
    found: tuple[int, ...] = ()
    for keys in files:
        ids = keys.token_ids("eos_token_id", vocab=vocab)
        found = found or ids
        for name in _UNUSED:
            _warn_of(keys, name, vocab)
    if not found and default is not None:
        if default >= vocab:
            raise TokenizerError(
                f"The eos_token of {path} has the id {default}, which is not in the vocabulary of {vocab} ids.",
                "The model could never end a text: state eos_token_id in generation_config.json.",
            )
        found = (default,)
    return found


def read_suppressed_ids(path: Path, *, vocab: int) -> tuple[int, ...]:
    """The ids that generation_config.json lets no text have. TokenizerError as read_eos_ids."""
    files = list(_present(path))
    found = [keys.token_ids("suppress_tokens", vocab=_stated_size(files, vocab)) for keys in files]
    return next((ids for ids in found if ids), ())


def _stated_size(files: Sequence[ConfigKeys], vocab: int) -> int:
    """The size of the vocabulary that the files state, else `vocab`."""
    sizes = [keys for keys in files if keys.get("vocab_size") is not None]
    return sizes[-1].integer("vocab_size") if sizes else vocab


def _present(path: Path) -> Iterator[ConfigKeys]:
    for name in _FILES:
        if (path / name).exists():
            keys = ConfigKeys(read_json(path / name), where=str(path / name), error=TokenizerError)
            yield keys
            if keys.get("text_config") is not None:
                yield keys.section("text_config")


def _warn_of(keys: ConfigKeys, name: str, vocab: int) -> None:
    try:
        keys.token_ids(name, vocab=vocab)
    except TokenizerError as error:
        log.warning("%s It is not used.", error.message)


# ---- reading ---------------------------------------------------------------------------------------------------------

_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_BYTE = 6
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
_GGUF_IDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}
"""Ids of SentencePiece's own tokens where a GGUF file names none (llama.cpp's defaults)."""
_SPACE_INSIDE = re.compile("[^▁]▁")
_ENDS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|tool_response>"),
        *("<|return|>", "<|call|>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<｜end▁of▁sentence｜>"),
    }
)
"""Tokens that end a turn or a text, and so are control tokens. Converters state few of them (Gemma 3's <end_of_turn>,
Phi-3's <|end|> and the <|endoftext|> of Qwen's chat models are not their eos_token), so llama.cpp knows them by these
texts; generation_config.json of the models has them, too."""


def read_parts(path: Path) -> TokenizerParts:
    """A model's tokenizer from its directory or GGUF file. TokenizerError names what is absent or not supported."""
    with library_errors(str(path)):
        if path.is_dir():
            return _from_directory(path)
        return _from_gguf(open_gguf(path).metadata, str(path))


def _from_directory(path: Path) -> TokenizerParts:
    file = path / "tokenizer.json"
    if not file.exists():
        raise TokenizerError(
            f"{file} is absent.", "Save the model's fast tokenizer into the directory (save_pretrained writes it)."
        )
    description = read_json(file)
    with library_errors(str(file)):
        backend = Backend.from_file(str(file))
    backend.no_truncation()
    backend.no_padding()
    config = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").exists() else {}
    named = {name: text for name in _NAMED if (text := _content(config.get(name)))}
    vocab, eos = backend.get_vocab_size(with_added_tokens=True), named.get("eos_token")
    spelling, space_prefix = _spelling(description.get("decoder"), file)
    return TokenizerParts(
        backend=backend,
        spelling=spelling,
        vocab_size=vocab,
        eos_ids=read_eos_ids(path, vocab=vocab, default=backend.token_to_id(eos) if eos else None),
        suppressed_ids=read_suppressed_ids(path, vocab=vocab),
        where=str(path),
        space_prefix=space_prefix,
        named=named,
        chat_template=_directory_template(path, config),
        **_added(backend),
    )


def _from_gguf(metadata: Mapping[str, Any], where: str) -> TokenizerParts:
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama", "gemma4") or not isinstance(tokens, list):
        raise TokenizerError(
            f"{where} has a tokenizer of model {kind!r}, which is not supported.",
            "Supported are gpt2 (byte-level merges), llama and gemma4 (SentencePiece) with their tokens in the file.",
        )
    stated = metadata.get("tokenizer.ggml.pre")
    if kind == "gpt2" and not stated:
        log.warning(
            "%s does not say how text is split (tokenizer.ggml.pre): GPT-2's way may not be the model's.", where
        )
    pre = pre_tokenizer(stated or "default") if kind == "gpt2" else None
    spaced = pre is None and bool(metadata.get("tokenizer.ggml.add_space_prefix", kind == "llama"))
    if pre is not None:
        backend = _byte_level(tokens, _merges(metadata, where), pre, where)
    else:
        metadata = {**{f"tokenizer.ggml.{name}_token_id": i for name, i in _SENTENCEPIECE_IDS.items()}, **metadata}
        backend = _sentencepiece(tokens, metadata, where, spaced=spaced)
    named = {name: tokens[i] for name, key in _GGUF_IDS.items() if (i := _id(metadata, key, tokens)) is not None}
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    known_ends = _known_ends(tokens, kinds, unknown=_id(metadata, "unknown", tokens))
    _add_tokens(backend, tokens, kinds, special=[*named.values(), *(tokens[i] for i in known_ends)])
    bos = metadata.get("tokenizer.ggml.add_bos_token", pre is None or pre.add_bos)
    bos = bos or kind == "gemma4"  # as llama.cpp, since the first files of Gemma 4 deny it
    eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    _surround(backend, named.get("bos_token") if bos else None, named.get("eos_token") if eos else None)
    ends = [i for key in ("eos", "eot", "eom") if (i := _id(metadata, key, tokens)) is not None]
    keys = ConfigKeys(metadata, where=where, error=TokenizerError)
    return TokenizerParts(
        backend=backend,
        spelling="sentencepiece" if pre is None else "byte-level",
        vocab_size=len(tokens),
        eos_ids=tuple(dict.fromkeys([*ends, *known_ends])),
        suppressed_ids=keys.token_ids("tokenizer.ggml.suppress_tokens", vocab=len(tokens)),
        where=where,
        space_prefix="fragment" if spaced else "none",
        named=named,
        chat_template=metadata.get("tokenizer.chat_template"),
        **_added(backend),
    )


def _known_ends(tokens: Sequence[str], kinds: Sequence[int], *, unknown: int | None) -> list[int]:
    """The ids of tokens that end a turn or a text by their texts. The one that stands for what is `unknown` is none:
    SmolLM2's own configuration does not end answers with its <|endoftext|> either."""
    known = [i for i, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED) and tokens[i] in _ENDS]
    apart = [i for i in known if i != unknown]
    harmony = any(tokens[i] == "<|return|>" for i in apart)  # of gpt-oss, whose <|end|> ends one of several messages
    return [i for i in apart if not (harmony and tokens[i] == "<|end|>")]


def _byte_level(tokens: list[str], merges: list[tuple[str, str]], pre: PreTokenizer, where: str) -> Backend:
    """GPT-2's BPE over bytes, with the model's own splits before merging."""
    backend = _bpe(tokens, merges, where, ignore_merges=pre.whole_words)
    cuts = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in pre.cuts]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(tokens: list[str], metadata: Mapping[str, Any], where: str, *, spaced: bool) -> Backend:
    """SentencePiece's BPE as in llama.cpp: byte-pair merges in the order of the scores, and with `spaced` a space
    before every fragment of text, that is, at the beginning and after every special or user-defined token."""
    stored = "tokenizer.ggml.merges" in metadata
    scores = metadata.get("tokenizer.ggml.scores") or []
    if not stored and len(scores) != len(tokens):
        raise TokenizerError(f"{where} has {len(scores)} scores for {len(tokens)} tokens.", "The file is damaged.")
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    merges = _merges(metadata, where) if stored else scored_merges(tokens, scores, kinds)
    unknown = _id(metadata, "unknown", tokens)
    token = None if unknown is None else tokens[unknown]
    backend = _bpe(tokens, merges, where, unk_token=token, fuse_unk=True, byte_fallback=True)
    prefix = [normalizers.Prepend("▁")] if spaced else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    if not any(_SPACE_INSIDE.search(token) for token in tokens):
        # No merge crosses the beginning of a run of spaces, so the words may be merged, and remembered, one by one.
        backend.pre_tokenizer = pre_tokenizers.Split(Regex("▁+[^▁]*|[^▁]+"), behavior="isolated")
    return backend


def scored_merges(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int] = ()) -> list[tuple[str, str]]:
    """Every merge of two tokens into a third, best score first; among equal scores the longer left part first.

    llama.cpp takes the leftmost place among equal scores, the library one merge after the other. On runs of one
    character, which are where Llama's vocabulary has equal scores (spaces), both come to the same.

    Control, unknown and byte tokens (by `kinds`) are never merged from text, nor into other tokens.
    """
    apart = {token for token, kind in zip(tokens, kinds, strict=False) if kind in (_UNKNOWN, _CONTROL, _BYTE)}
    ids = {token: i for token, i in _ids(tokens).items() if token not in apart}
    merges: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        if token in apart:
            continue
        parts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in parts if left in ids and right in ids]
        for left, right in sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]])):
            merges.append((-score, -len(left), -len(right), left, right))
    merges.sort(key=lambda entry: entry[:3])
    return [(left, right) for *_, left, right in merges]


def _merges(metadata: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or []]
    if not merges or set(map(len, merges)) != {2}:
        raise TokenizerError(f"{where} has no usable tokenizer.ggml.merges.", "The file is damaged; fetch it again.")
    return merges


def _bpe(tokens: list[str], merges: list[tuple[str, str]], where: str, **options: Any) -> Backend:
    try:
        return Backend(BPE(_ids(tokens), merges, **options))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(
            f"{where} has unusable merges: {error}.", "The file is damaged; fetch it again."
        ) from error


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}


def _id(metadata: Mapping[str, Any], name: str, tokens: Sequence[str]) -> int | None:
    """A special token's id from the metadata, None if the file names none or one beyond the vocabulary."""
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if isinstance(value, int) and 0 <= value < len(tokens) else None


def _add_tokens(backend: Backend, tokens: list[str], kinds: Sequence[int], *, special: Sequence[str]) -> None:
    """Tokens that are matched before merging: control and unknown tokens, and others that are `special`; user-defined
    ones (not special)."""
    control = [token for token, kind in zip(tokens, kinds, strict=False) if kind in (_CONTROL, _UNKNOWN)]
    special = list(dict.fromkeys([*control, *special]))
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    plain = [
        token for token, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED and token not in special
    ]
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])


def _surround(backend: Backend, bos: str | None, eos: str | None) -> None:
    """Configure `backend` to add these tokens before and after every text."""
    around = [(token, backend.token_to_id(token)) for token in (bos, eos) if token is not None]
    pattern = " ".join(part for part in (bos, "$A", eos) if part is not None)
    pair = pattern + " " + pattern.replace("$A", "$B")
    backend.post_processor = TemplateProcessing(single=pattern.split(), pair=pair.split(), special_tokens=around)


def _added(backend: Backend) -> dict[str, frozenset[int]]:
    added = backend.get_added_tokens_decoder()
    special = frozenset(i for i, token in added.items() if token.special)
    return {"special": special, "literal": frozenset(added)}


def _spelling(decoder: Any, file: Path) -> tuple[Spelling, SpacePrefix]:
    """From the decoder in tokenizer.json: the spelling of bytes, and whether decoding removes a leading space."""
    steps = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    kinds = {step.get("type"): step for step in steps if isinstance(step, dict)}
    if "ByteLevel" in kinds:
        return "byte-level", "none"
    if "ByteFallback" in kinds:
        return "sentencepiece", "text" if kinds.get("Strip", {}).get("start") == 1 else "none"
    if "Metaspace" in kinds:
        return "sentencepiece", "text" if kinds["Metaspace"].get("prepend_scheme", "always") != "never" else "none"
    raise TokenizerError(
        f"{file} has a decoder of type {', '.join(map(str, kinds)) or 'none'}, which is not supported.",
        "Supported are ByteLevel, ByteFallback and Metaspace.",
    )


def _content(token: Any) -> str | None:
    """A special token in tokenizer_config.json: a string, or an object with its content."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _directory_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """From chat_template.jinja, chat_template.json or tokenizer_config.json; of several the default one."""
    if (path / "chat_template.jinja").exists():
        try:
            return (path / "chat_template.jinja").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"The chat template of {path} cannot be read: {error}.") from error
    separate = path / "chat_template.json"
    template = (read_json(separate) if separate.exists() else config).get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise TokenizerError(f"The chat template of {path} is {json.dumps(template)[:60]}, not a text.")
    return template


# ---- writing ---------------------------------------------------------------------------------------------------------

CHAT_TEMPLATE = "chat_template.jinja"


def tokenizer_files(parts: TokenizerParts) -> dict[str, str]:
    """The texts of the files by their names. TokenizerError if the library cannot write the tokenizer."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **parts.named}
    found = {"tokenizer.json": _description(parts), "tokenizer_config.json": json.dumps(config, indent=2) + "\n"}
    return found if parts.chat_template is None else {**found, CHAT_TEMPLATE: parts.chat_template}


def _description(parts: TokenizerParts) -> str:
    """tokenizer.json. A tokenizer of a GGUF file has no decoder of the library's; readers tell its spelling by that."""
    with library_errors(parts.where):
        text = parts.backend.to_str()
        if parts.backend.decoder is not None:
            return text
        copy = Backend.from_str(text)
        copy.decoder = _decoder(parts)
        return copy.to_str()


def _decoder(parts: TokenizerParts) -> decoders.Decoder:
    if parts.spelling == "byte-level":
        return decoders.ByteLevel()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(steps if parts.space_prefix == "none" else [*steps, decoders.Strip(" ", 1, 0)])
