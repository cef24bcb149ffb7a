"""The keys of a GGUF file that every architecture shares, each with its type and range: checked once, when the file is
opened, so that whoever reads them later may rely on it.

Keys of an architecture are read and checked in gguf_config.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from wager.arch.config_keys import ConfigKeys
from wager.errors import TokenizerError

log = logging.getLogger("wager")

_ALIGNMENT, _MOST_ALIGNMENT, _MOST_PARTS = 32, 1 << 20, 1 << 16
_TOKENS = "tokenizer.ggml.tokens"
_TEXTS = ("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template")
_FLAGS = ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix")
_IDS, _OPTIONAL_IDS = ("bos", "eos", "unknown"), ("eot", "eom", "padding")
_TOKEN_KINDS = range(7)
"""llama.cpp's types of tokens: 3 control, 4 user-defined, 6 byte."""


def read_alignment(metadata: Mapping[str, Any], where: str) -> int:
    """Bytes at whose multiples tensors begin."""
    keys = ConfigKeys(metadata, where=where)
    alignment = keys.integer("general.alignment", default=_ALIGNMENT, most=_MOST_ALIGNMENT)
    if alignment & (alignment - 1) or alignment < 8:
        raise keys.wrong("general.alignment", "a power of 2 from 8 on")
    return alignment


def read_parts_count(metadata: Mapping[str, Any], where: str) -> int:
    """The number of files that the model is split into."""
    keys = ConfigKeys(metadata, where=where)
    return 1 if keys.get("split.count") == 0 else keys.integer("split.count", default=1, most=_MOST_PARTS)


def check_tokenizer_keys(metadata: Mapping[str, Any], where: str) -> None:
    """TokenizerError unless every key of the tokenizer that the file has is of its type, lists have an entry for each
    token, and special tokens are ids of the vocabulary."""
    keys = ConfigKeys(metadata, where=where, error=TokenizerError)
    for name in _TEXTS:
        keys.text(name)
    for name in _FLAGS:
        keys.flag(name)
    tokens, scores = keys.texts(_TOKENS), keys.numbers("tokenizer.ggml.scores")
    kinds = keys.integers("tokenizer.ggml.token_type")
    keys.texts("tokenizer.ggml.merges")
    if tokens is None:
        return
    for name, values in (("scores", scores), ("types", kinds)):
        if values is not None and len(values) != len(tokens):
            raise TokenizerError(f"{where} has {len(values)} {name} for {len(tokens)} tokens.", "The file is damaged.")
    if kinds is not None and not set(kinds) <= set(_TOKEN_KINDS):
        raise keys.wrong("tokenizer.ggml.token_type", f"a list of types from 0 to {_TOKEN_KINDS[-1]}")
    for name in _IDS + _OPTIONAL_IDS:
        _check_id(keys, name, len(tokens))


def _check_id(keys: ConfigKeys, name: str, vocab: int) -> None:
    """Of the tokens that a model can do without, one outside the vocabulary is only warned of, as llama.cpp does."""
    key = f"tokenizer.ggml.{name}_token_id"
    if isinstance(keys.get(key), list):
        raise keys.wrong(key, "one token id")
    if name in _OPTIONAL_IDS and type(keys.get(key)) is int and not 0 <= keys.get(key) < vocab:
        log.warning(
            "%s = %d in %s is no id of the vocabulary of %d tokens; it is not used.",
            key,
            keys.get(key),
            keys.where,
            vocab,
        )
        return
    keys.token_ids(key, vocab=vocab)
