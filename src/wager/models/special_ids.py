"""The ids that end a text, from the files of a model directory; ids outside the vocabulary are named."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from wager.arch.config_keys import ConfigKeys
from wager.errors import TokenizerError
from wager.models.json_files import read_json

log = logging.getLogger("wager")

_FILES = ("generation_config.json", "config.json")
_UNUSED = ("bos_token_id", "pad_token_id")


def read_eos_ids(path: Path, *, vocab: int, default: int | None) -> tuple[int, ...]:
    """From generation_config.json, else config.json, else `default`, the tokenizer's own.

    `vocab` is the size of the tokenizer's vocabulary; that of config.json counts if it is stated. TokenizerError names
    an id that is none of the vocabulary's, which would never end a text. Ids that wager does not use (BOS and padding
    of these files) are only warned of.
    """
    files = list(_present(path))
    sizes = [keys for keys in files if keys.get("vocab_size") is not None]
    vocab = sizes[-1].integer("vocab_size") if sizes else vocab
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
