"""Encodes prompts of which only some parts may bring control tokens.

A prompt whose control tokens are all allowed is encoded as one text. Otherwise the allowed ones are renamed, in the
text and in a second copy of the tokenizer whose vocabulary has them under the new names only; so the same library
splits, strips and merges in both cases.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer as Backend

from wager.errors import RequestError
from wager.models.tokenizer_parts import TokenizerParts
from wager.prompts import TextPart

_WRITTEN_AS_CONTROL = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)


class FencedEncoder:
    """`encode` gives the token ids of parts; control tokens come only from those with parse_special."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self.control = _control_tokens(parts)
        texts = sorted(self.control, key=len, reverse=True)  # the longest match wins, as in the library
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        unknown = parts.named.get("unk_token")
        self.control_ids = frozenset(self.control.values())
        self._ids = frozenset(i for text, i in self.control.items() if text != unknown)  # any text may be unknown

    def encode(self, parts: Sequence[TextPart]) -> list[int]:
        text = "".join(part.text for part in parts)
        check_unicode(text)
        allowed, at = [], 0
        for parse_special, run in groupby(parts, key=lambda part: part.parse_special):
            end = at + sum(len(part.text) for part in run)
            if parse_special:
                allowed += list(self._pattern.finditer(text, at, end))
            at = end
        spans = [match.span() for match in allowed]
        expected = [self.control[match[0]] for match in allowed]
        if spans == [match.span() for match in self._pattern.finditer(text)]:
            ids = list(self._backend.encode(text, add_special_tokens=False).ids)
            if self._none_beyond(expected, ids):
                return ids
        return self._renamed.encode(text, spans)

    def _none_beyond(self, expected: list[int], ids: list[int]) -> bool:
        """Whether the control tokens among the ids are a subsequence of those expected (the library may skip one that
        is only valid as a single word)."""
        remaining = iter(expected)
        return all(token in remaining for token in ids if token in self._ids)

    @cached_property
    def _renamed(self) -> _RenamedTokens:
        return _RenamedTokens.of(self._backend, self.control)


@dataclass(frozen=True, slots=True)
class _RenamedTokens:
    """A copy of a tokenizer whose control tokens have other names, and these names by their own."""

    backend: Backend
    names: dict[str, str]

    @classmethod
    def of(cls, backend: Backend, control: Iterable[str]) -> _RenamedTokens:
        unguessable = f"\ue000{secrets.token_hex(16)}-"
        names = {text: f"{unguessable}{i}\ue001" for i, text in enumerate(control)}
        description = json.loads(backend.to_str())
        description["post_processor"] = None  # it refers to the tokens by name, and adds those around a text
        for token in description["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        _rename_model(description["model"], names)
        return cls(Backend.from_str(json.dumps(description)), names)

    def encode(self, text: str, spans: Sequence[tuple[int, int]]) -> list[int]:
        """Token ids of a text whose control tokens are those at `spans`, and no others."""
        pieces, at = [], 0
        for start, end in spans:
            pieces += [text[at:start], self.names[text[start:end]]]
            at = end
        return list(self.backend.encode("".join([*pieces, text[at:]]), add_special_tokens=False).ids)


def check_unicode(text: str) -> None:
    """RequestError if the text cannot be written in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"The text has an unpaired surrogate ({text[error.start]!r}) at {error.start}.", "Give valid Unicode."
        ) from error


def _control_tokens(parts: TokenizerParts) -> dict[str, int]:
    """Special tokens, and added tokens that the chat template names or that are written like <|user|>, which templates
    put together ('<|' + role + '|>'); the others (such as runs of spaces, or HTML tags) are ordinary text that is
    matched before merging."""
    template = parts.chat_template or ""

    def is_control(text: str) -> bool:
        return bool(_WRITTEN_AS_CONTROL.fullmatch(text) or (text.strip() and text in template))

    return {
        token.content: i
        for i, token in parts.backend.get_added_tokens_decoder().items()
        if token.content and (token.special or is_control(token.content))
    }


def _rename_model(model: dict[str, Any], names: dict[str, str]) -> None:
    """Rename tokens in a model of the library's JSON; merges that would make one of them are left out."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): i for token, i in vocab.items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names.keys()]
