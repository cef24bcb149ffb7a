"""Writes a tokenizer as the files of a Hugging Face directory: tokenizer.json, tokenizer_config.json and
chat_template.jinja, from which it is read as the same tokens."""

from __future__ import annotations

import json

from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from wager.models.tokenizer_errors import library_errors
from wager.models.tokenizer_parts import TokenizerParts

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
