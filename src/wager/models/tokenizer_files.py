"""Reads tokenizers: tokenizer.json and related files from a directory, or the metadata of a GGUF file.

The keys of a GGUF file are those that llama.cpp's converter writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from wager.errors import TokenizerError
from wager.models.gguf_file import open_gguf
from wager.models.json_files import read_json
from wager.models.pretokenizers import PreTokenizer, pre_tokenizer
from wager.models.special_ids import read_eos_ids
from wager.models.tokenizer_errors import library_errors
from wager.models.tokenizer_parts import SpacePrefix, Spelling, TokenizerParts

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
_GGUF_IDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}
"""Ids of SentencePiece's own tokens where a GGUF file names none (llama.cpp's defaults)."""
_SPACE_INSIDE = re.compile("[^▁]▁")


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
        where=str(path),
        space_prefix=space_prefix,
        named=named,
        chat_template=_directory_template(path, config),
        **_added(backend),
    )


def _from_gguf(metadata: Mapping[str, Any], where: str) -> TokenizerParts:
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama") or not isinstance(tokens, list):
        raise TokenizerError(
            f"{where} has a tokenizer of model {kind!r}, which is not supported.",
            "Supported are gpt2 (byte-level merges) and llama (SentencePiece) with their tokens in the file.",
        )
    pre = pre_tokenizer(metadata.get("tokenizer.ggml.pre") or "default") if kind == "gpt2" else None
    spaced = pre is None and bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    if pre is not None:
        backend = _byte_level(tokens, _merges(metadata, where), pre, where)
    else:
        metadata = {**{f"tokenizer.ggml.{name}_token_id": i for name, i in _SENTENCEPIECE_IDS.items()}, **metadata}
        backend = _sentencepiece(tokens, metadata, where, spaced=spaced)
    named = {name: tokens[i] for name, key in _GGUF_IDS.items() if (i := _id(metadata, key, tokens)) is not None}
    _add_tokens(backend, tokens, metadata.get("tokenizer.ggml.token_type") or [], named)
    bos = metadata.get("tokenizer.ggml.add_bos_token", pre is None or pre.add_bos)
    eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    _surround(backend, named.get("bos_token") if bos else None, named.get("eos_token") if eos else None)
    ends = [i for key in ("eos", "eot", "eom") if (i := _id(metadata, key, tokens)) is not None]
    return TokenizerParts(
        backend=backend,
        spelling="sentencepiece" if pre is None else "byte-level",
        vocab_size=len(tokens),
        eos_ids=tuple(dict.fromkeys(ends)),
        where=where,
        space_prefix="fragment" if spaced else "none",
        named=named,
        chat_template=metadata.get("tokenizer.chat_template"),
        **_added(backend),
    )


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


def _add_tokens(backend: Backend, tokens: list[str], kinds: Sequence[int], named: Mapping[str, str]) -> None:
    """Tokens that are matched before merging: control and unknown tokens (special), user-defined ones (not special)."""
    control = [token for token, kind in zip(tokens, kinds, strict=False) if kind in (_CONTROL, _UNKNOWN)]
    special = list(dict.fromkeys([*control, *named.values()]))
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
