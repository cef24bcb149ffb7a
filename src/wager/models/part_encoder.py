"""Encodes prompts of which only some parts may bring control tokens.

A prompt whose control tokens are all allowed is encoded as one text. Otherwise the allowed ones are renamed, in the
text and in a second tokenizer that has them under the new names only; so the same library splits, strips and merges in
both cases. The second one shares the model of the first, and takes no time to make. Only for a text of which the model
itself would make a control token (by merges that spell one) there is a copy whose vocabulary has none, which takes some
0.2 s, in which nothing else runs.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from wager.errors import RequestError
from wager.models.tokenizer_files import TokenizerParts
from wager.prompts import TextPart

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_WRITTEN_AS_CONTROL = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)


class PartEncoder:
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
            ids = token_ids(self._backend, text)
            if self._none_beyond(expected, ids):
                return ids
        shared = None if self._shared is None else self._shared.encode(text, spans)
        return self._copied.encode(text, spans) if shared is None else shared

    def _none_beyond(self, expected: list[int], ids: list[int]) -> bool:
        """Whether the control tokens among the ids are a subsequence of those expected (the library may skip one that
        is only valid as a single word)."""
        remaining = iter(expected)
        return all(token in remaining for token in ids if token in self._ids)

    @cached_property
    def _shared(self) -> _SharedModel | None:
        return _SharedModel.of(self._backend, self.control)

    @cached_property
    def _copied(self) -> _RenamedTokens:
        return _RenamedTokens.of(self._backend, self.control)


@dataclass(frozen=True, slots=True)
class _SharedModel:
    """A tokenizer with the model of another one, and with its added tokens, of which control tokens have other `names`.
    `ids` maps the ids of added tokens here to their ids in the other one; `spelled` finds a control token."""

    backend: Backend
    names: dict[str, str]
    ids: dict[int, int]
    spelled: re.Pattern[str]

    @classmethod
    def of(cls, backend: Backend, control: Mapping[str, int]) -> _SharedModel | None:
        """None where it might encode text otherwise than a copy would that lacks the control tokens."""
        if not isinstance(backend.model, models.BPE | models.Unigram):
            return None
        made = Backend(backend.model)
        names = _new_names(control)
        ids = {}
        made.normalizer, made.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
        for i, token in sorted(backend.get_added_tokens_decoder().items()):
            name = names.get(token.content, token.content)
            made.add_tokens([AddedToken(name, **{flag: getattr(token, flag) for flag in _FLAGS})])
            new = made.token_to_id(name)
            of_model = None if new is None else backend.model.id_to_token(new)
            if new is None or (of_model is not None and (of_model, new) != (name, i)):
                return None  # an id would mean two tokens
            ids[new] = i
        return cls(made, names, ids, re.compile("|".join(map(re.escape, control))))

    def encode(self, text: str, spans: Sequence[tuple[int, int]]) -> list[int] | None:
        """See _RenamedTokens.encode. None if the model made a token that spells a control token, alone or with more:
        without such tokens the text might be encoded otherwise. (If it made none, it never merged one.)"""
        found = token_ids(self.backend, _renamed(text, spans, self.names))
        of_model = {*found} - self.ids.keys()
        if any(self.spelled.search(self.backend.id_to_token(i) or "") for i in of_model):
            return None
        return [self.ids.get(i, i) for i in found]


@dataclass(frozen=True, slots=True)
class _RenamedTokens:
    """A copy of a tokenizer whose control tokens have other names, and these names by their own."""

    backend: Backend
    names: dict[str, str]

    @classmethod
    def of(cls, backend: Backend, control: Iterable[str]) -> _RenamedTokens:
        names = _new_names(control)
        description = json.loads(backend.to_str())
        description["post_processor"] = None  # it refers to the tokens by name, and adds those around a text
        for token in description["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        _rename_model(description["model"], names)
        return cls(Backend.from_str(json.dumps(description)), names)

    def encode(self, text: str, spans: Sequence[tuple[int, int]]) -> list[int]:
        """Token ids of a text whose control tokens are those at `spans`, and no others."""
        return token_ids(self.backend, _renamed(text, spans, self.names))


def _new_names(control: Iterable[str]) -> dict[str, str]:
    """Names that no text has, by the tokens' own."""
    unguessable = f"\ue000{secrets.token_hex(16)}-"
    return {text: f"{unguessable}{i}\ue001" for i, text in enumerate(control)}


def _renamed(text: str, spans: Sequence[tuple[int, int]], names: Mapping[str, str]) -> str:
    """The text with other names for the tokens at `spans`."""
    pieces, at = [], 0
    for start, end in spans:
        pieces += [text[at:start], names[text[start:end]]]
        at = end
    return "".join([*pieces, text[at:]])


def token_ids(backend: Backend, text: str, *, special: bool = False) -> list[int]:
    """The ids that the library gives; `special` as in Tokenizer.encode. Alone of its calls this one releases the
    interpreter's lock, and finds no places of tokens in the text, which takes as long as the ids."""
    return list(backend.encode_batch_fast([text], add_special_tokens=special)[0].ids)


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
