"""What the output of a request must be like: a JSON schema, a regular expression, one of several texts, or a grammar.

A `Grammar` is plain data. An engine compiles it with its tokenizer when the request is added (constrain/compiler.py);
from then on the values below say, token by token, which ones may come next.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from wager.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GrammarKind = Literal["json_schema", "regex", "choice", "lark"]

MAX_CHARACTERS = 64 * 1024
"""Of a grammar's text: larger ones are refused before they are compiled."""


class AllowedTokens(Protocol):
    """The tokens that may come next."""

    def __contains__(self, token: int) -> bool: ...

    def ids(self, vocab: int) -> NDArray[np.int64]:
        """Those below `vocab`, ascending."""


class GrammarState(Protocol):
    """How far the output of one sequence has come in its grammar. Everything below depends on the tokens alone."""

    def append(self, tokens: Sequence[int], /) -> None:
        """Tokens that are now part of the output."""

    def allowed(self, path: Sequence[int], /) -> AllowedTokens | None:
        """What may follow the output and the further tokens of `path`; None if the path leaves the grammar. Raises
        GrammarError if the grammar cannot go on."""

    def forced(self, path: Sequence[int], /) -> list[int]:
        """Tokens that the grammar leaves no choice about after `path`, as texts are usually written in tokens."""

    def copy(self) -> GrammarState:
        """A state of its own that has come as far."""

    def complete(self) -> bool:
        """Whether the output is whole, and nothing but its end may follow."""


class CompiledGrammar(Protocol):
    """A grammar compiled for one vocabulary."""

    def start(self) -> GrammarState:
        """The state of a sequence without output."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the output of a request, made by one of the class methods. `text` is the JSON text of the schema
    or of the list of choices, the expression, or the Lark grammar in llguidance's dialect.

    JSON is written on one line, with a space after every comma and colon, unless `any_whitespace`. `compiled` is set
    by the engine that runs the request.
    """

    kind: GrammarKind
    text: str
    any_whitespace: bool = False
    compiled: CompiledGrammar | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise UsageError(
                f"Unknown kind of grammar {self.kind!r}.", f"Kinds are {', '.join(get_args(GrammarKind))}."
            )
        if not isinstance(self.text, str) or not self.text.strip():
            raise UsageError(f"A grammar of kind {self.kind} needs a text.", "Give it as a string that is not empty.")
        if self.any_whitespace and self.kind != "json_schema":
            raise UsageError(f"any_whitespace means nothing for {self.kind}.", "It is an option of JSON schemas.")
        _check_size(self.kind, self.text)
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"The grammar ({self.kind}) has an unpaired surrogate at {error.start}.", "Give valid Unicode."
            ) from None

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str, *, any_whitespace: bool = False) -> Grammar:
        """JSON that a schema allows, given as a mapping or as JSON text. Keywords that cannot be enforced are refused
        when the request is added."""
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"The JSON schema is not valid JSON: {error}.", "Give one JSON object.") from None
        if not isinstance(schema, Mapping):
            raise UsageError(
                f"A JSON schema is an object, not {type(schema).__name__}.", 'For example {"type": "object"}.'
            )
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"The JSON schema cannot be written as JSON: {error}.", "Use JSON's own types.") from None
        return cls("json_schema", text, any_whitespace)

    @classmethod
    def json_object(cls, *, any_whitespace: bool = False) -> Grammar:
        """Any JSON object."""
        return cls("json_schema", '{"type": "object"}', any_whitespace)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression matches from its beginning to its end (Rust's syntax, no look-around)."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of several texts."""
        valid = not isinstance(texts, str) and isinstance(texts, Sequence) and texts
        if not valid or not all(isinstance(each, str) and each for each in texts):
            raise UsageError("choice needs texts that are not empty.", 'For example ["yes", "no"].')
        return cls("choice", json.dumps(list(dict.fromkeys(texts)), ensure_ascii=False))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Text of a context-free grammar, in llguidance's dialect of Lark with the rule `start`."""
        return cls("lark", text)


def _check_size(kind: str, text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise UsageError(
            f"The grammar ({kind}) has {len(text)} characters; at most {MAX_CHARACTERS} are taken.", "Make it smaller."
        )
