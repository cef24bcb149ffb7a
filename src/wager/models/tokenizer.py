"""Text to token ids and back, chat messages to text.

The `tokenizers` library encodes. Decoding joins the tokens' bytes and reads them as UTF-8, so that text streamed token
by token equals the text decoded at once.

Only some parts of a prompt may bring control tokens. If all that its text spells are allowed, it is one text to encode.
Otherwise the allowed ones are renamed, in the text and in a second tokenizer that has them under the new names only, so
the same library splits, strips and merges in both cases. The second tokenizer shares the model of the first, and takes
no time to make. Only for a text of which the model itself would make a control token (by merges that spell one) there
is a copy whose vocabulary has none; making it takes some 0.2 s, in which nothing else runs.
"""

from __future__ import annotations

import codecs
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from wager.errors import RequestError, TokenizerError
from wager.models.tokenizer_files import TokenizerParts, library_errors, read_parts, tokenizer_files
from wager.prompts import TextPart

# ---- prompts of which only some parts may bring control tokens -------------------------------------------------------

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


# ---- the tokenizer ---------------------------------------------------------------------------------------------------

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_APART = "\x02"


def byte_alphabet() -> dict[str, int]:
    """The character for every byte in a byte-level vocabulary (GPT-2): printable Latin-1 characters stand for
    themselves, the others, in order, for the characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = byte_alphabet()


class Tokenizer:
    """A model's tokenizer. `vocab_size` is the number of its ids, `eos_ids` are those that end a text,
    `suppressed_ids` those that no text has: the model writes others in their place."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._part_encoder = PartEncoder(parts)
        self._bytes: dict[int, bytes] = {}
        self._spelt: Sequence[int] = ()  # what `spell` was given last
        self.whole_texts = WholeTexts(self)
        """The text of tokens met so far, if it is whole characters, without those that are special or end a fragment:
        after whole characters it is what such a token adds."""
        self.vocab_size = parts.vocab_size
        self.eos_ids, self.suppressed_ids = parts.eos_ids, parts.suppressed_ids
        self.chat_template = parts.chat_template
        self.named = parts.named
        """The texts of tokens that have a role, by it: `eos_token` and the like."""
        self.space_prefix = parts.space_prefix

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[TokenizerParts]]:
        """What it has met is not written."""
        return Tokenizer, (self._parts,)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """From a GGUF file or a Hugging Face directory with tokenizer.json.

        TokenizerError names what is absent, damaged or not supported.
        """
        return cls(read_parts(Path(path)))

    def with_chat_template(self, template: str) -> Tokenizer:
        """The same with another chat template, which also decides what control tokens are; see `encode_parts`.
        TokenizerError for one that is none."""
        from wager.models.chat_template import check

        check(template)
        return Tokenizer(replace(self._parts, chat_template=template))

    def files(self) -> dict[str, str]:
        """The texts of the files of a Hugging Face directory with this tokenizer, by their names."""
        return tokenizer_files(self._parts)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text.

        `special` adds the tokens that the model's tokenizer puts around every text (BOS for Llama, none for SmolLM2 or
        Qwen). Control tokens written out in the text are parsed in both cases, so a text that strangers have written
        belongs into `encode_parts`. RequestError if the text cannot be written in UTF-8.
        """
        check_unicode(text)
        with library_errors(self._parts.where):
            return token_ids(self._parts.backend, text, special=special)

    def encode_parts(self, parts: Iterable[TextPart]) -> list[int]:
        """Token ids of the parts joined, without the tokens put around every text; the parts of a chat have them.

        Control tokens come only from parts with parse_special: one written out in another part, or across the end of
        such a part, is encoded as ordinary text. Control tokens are the tokenizer's special tokens, and further added
        tokens that the chat template names (such as Qwen's <tool_call>) or that are written like <|fim_prefix|>.
        Without such text the ids are those of the joined text, merges across parts included. RequestError as `encode`.
        """
        with library_errors(self._parts.where):
            return self._part_encoder.encode(tuple(parts))

    def encode_untrusted(self, text: str) -> list[int]:
        """As `encode`, with the tokens that are put around every text, but control tokens written out in it are
        ordinary text: for prompts of strangers."""
        before, after = self._around
        return [*before, *self.encode_parts([TextPart(text)]), *after]

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The tokens put before every text, and those behind it."""
        alone, whole = self.encode("a", special=False), self.encode("a")
        start = next((at for at in range(len(whole)) if whole[at : at + len(alone)] == alone), 0)
        return whole[:start], whole[start + len(alone) :]

    def encode_text(self, text: str) -> list[int]:
        """Token ids of text that stands within another one: no control tokens, and no space before it."""
        if self.space_prefix == "none":
            return self.encode_parts([TextPart(text)])
        ids = self.encode_parts([TextPart(_APART + text)])  # a byte of its own, with which nothing is merged
        place = next((i for i, token in enumerate(ids) if self.token_bytes(token) == _APART.encode()), -1)
        return ids[place + 1 :] if place >= 0 else self.encode_parts([TextPart(text)])

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of token ids; special tokens are shown only if `special`. Bytes that are not UTF-8 become U+FFFD."""
        stream = IncrementalDecoder(self, special=special)
        return "".join([stream.push(token) for token in ids]) + stream.flush()

    def token(self, token_id: int) -> str:
        """The token's entry in the vocabulary; empty for an id outside the vocabulary."""
        return self._parts.backend.id_to_token(token_id) or ""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._parts.special

    def is_control(self, token_id: int) -> bool:
        """Whether only a template may write it: a special token, or an added one that templates use as such."""
        return token_id in self._parts.special or token_id in self._part_encoder.control_ids

    def control_id(self, text: str) -> int | None:
        """The id of a control token by its text."""
        return self._part_encoder.control.get(text)

    def ends_fragment(self, token_id: int) -> bool:
        """Whether encoding puts a space before text after this token, wherever it stands."""
        return self.space_prefix == "fragment" and token_id in self._parts.literal

    def begins_fragment(self, before: Sequence[int]) -> bool:
        """Whether encoding puts a space before text that follows these tokens."""
        if self.space_prefix == "text":
            return all(map(self.is_special, before))
        return self.space_prefix == "fragment" and (not before or self.ends_fragment(before[-1]))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id outside the vocabulary."""
        value = self._bytes.get(token_id)
        if value is None:
            value = self._bytes[token_id] = self._spell(token_id)
            if not (token_id in self._parts.special or self.ends_fragment(token_id)):
                text = value.decode(errors="replace")
                if text.encode() == value:  # no part of a character
                    self.whole_texts[token_id] = text
        return value

    def spell(self, token_ids: Sequence[int]) -> None:
        """Get ready the bytes of tokens that will be asked for. The choices of a request have one prompt: it is
        gone through once."""
        if token_ids is not self._spelt:
            for token in set(token_ids) - self._bytes.keys():
                self.token_bytes(token)
            self._spelt = token_ids

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of messages, to be read; encode `chat_parts` instead. Arguments and errors as there."""
        parts = self.chat_parts(messages, add_generation_prompt=add_generation_prompt, variables=variables)
        return "".join(part.text for part in parts)

    def chat_parts(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[TextPart]:
        """The prompt that the model's chat template renders for messages ({"role", "content"} each), for
        `encode_parts`: what the template wrote with parse_special, what comes from messages and `variables` (further
        values for the template, such as tools) without.

        With `add_generation_prompt` the prompt ends where the model's answer begins. TokenizerError if there is no
        template, or it refuses the messages.
        """
        from wager.models.chat_template import own, render  # imports Jinja, which only a conversation needs

        if self.chat_template is None:
            raise TokenizerError(
                f"{self._parts.where} has no chat template.",
                "Give one (--chat-template FILE), or the prompt as plain text (--raw on the command line).",
            )
        context = {"tools": None, "documents": None, **own(dict(self.named)), **(variables or {})}
        return render(self.chat_template, messages, {**context, "add_generation_prompt": add_generation_prompt}).parts()

    def _spell(self, token_id: int) -> bytes:
        text = self.token(token_id)
        if token_id in self._parts.literal:
            return text.encode()
        if self._parts.spelling == "byte-level":
            try:
                return bytes(map(_BYTES.__getitem__, text))
            except KeyError:
                return text.encode()
        byte = _BYTE_TOKEN.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace("▁", " ").encode()


class WholeTexts(dict[int, str]):
    """Texts of the tokens that are whole characters, spelt when they are first met: `[]` spells a token, and raises
    KeyError for one of which the text depends on others; `get` and `in` tell what is known so far."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        self._tokenizer.token_bytes(token_id)
        if (text := self.get(token_id)) is None:
            raise KeyError(token_id)
        return text


class IncrementalDecoder:
    """Text of a stream of tokens: what `push` and then `flush` return, joined, is `Tokenizer.decode` of the ids.

    Bytes of an incomplete character are kept until it is complete. `after` are the tokens before the stream, such as
    the prompt of an answer: a space at the beginning is text, unless encoding puts one there.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False, after: Sequence[int] = ()) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = tokenizer.begins_fragment(after)
        self.known_texts: dict[int, str] = {} if self._drop_space else tokenizer.whole_texts
        """The texts of tokens that can be added as they are: nothing is kept, and no space is to be dropped."""
        tokenizer.spell(after)  # answers repeat them: spelt now, they need not be looked up between two steps

    def push(self, token_id: int, /) -> str:
        """The text that becomes complete with this token."""
        text = self.known_texts.get(token_id)
        if text is not None:
            return text
        value = self._tokenizer.token_bytes(token_id)
        text = self.known_texts.get(token_id)  # a new one
        if text is None:
            text = self._push(token_id, value)
            whole = not (self._drop_space or self._utf8.getstate()[0])
            self.known_texts = self._tokenizer.whole_texts if whole else {}
        return text

    def _push(self, token_id: int, value: bytes) -> str:
        hidden = not self._special and self._tokenizer.is_special(token_id)
        text = "" if hidden else self._utf8.decode(value)
        if self._tokenizer.ends_fragment(token_id):
            self._drop_space = True
            return text
        return self._first(text)

    def flush(self) -> str:
        """At the end of the stream: U+FFFD if the last character is incomplete, else nothing."""
        return self._first(self._utf8.decode(b"", final=True))

    def _first(self, text: str) -> str:
        if text and self._drop_space:
            self._drop_space = False
            return text.removeprefix(" ")
        return text


def unpadded(token_id: int, text: str) -> str | None:
    """The token `text` of an id, None where it is padding."""
    return text if text not in ("", f"[PAD{token_id}]") else None


def num_tokens(vocabulary: Tokenizer) -> int:
    """How many ids there are up to the last one with a token: without the padding behind."""
    size = vocabulary.vocab_size
    while size and unpadded(size - 1, vocabulary.token(size - 1)) is None:
        size -= 1
    return size
