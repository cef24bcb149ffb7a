"""How far one sequence has come in its grammar, and what may follow it and the guesses behind it.

llguidance's matcher goes forward by tokens and back again, so one of them serves all paths of a draft: it is moved to
where a question is asked. Answers depend on the tokens alone, never on what was asked before.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wager.errors import GrammarError


class TokenMask:
    """The tokens that may come next, one bit each, the lowest first."""

    __slots__ = ("_bits",)

    def __init__(self, bits: bytes) -> None:
        self._bits = bits

    def __contains__(self, token: int) -> bool:
        return 0 <= token < 8 * len(self._bits) and bool(self._bits[token >> 3] >> (token & 7) & 1)

    def __bool__(self) -> bool:
        return any(self._bits)

    def only(self) -> int | None:
        """The token, if there is a single one."""
        bits = int.from_bytes(self._bits, "little")
        return bits.bit_length() - 1 if bits.bit_count() == 1 else None

    def ids(self, vocab: int) -> NDArray[np.int64]:
        """Those below `vocab`, ascending."""
        bits = np.unpackbits(np.frombuffer(self._bits, np.uint8), count=vocab, bitorder="little")
        return np.flatnonzero(bits)


class RenewableMatcher(Protocol):
    """llguidance's matcher at the beginning of a grammar, which stays there; `renew` makes another one."""

    matcher: Any
    vocab_size: int

    def renew(self) -> None: ...


class GrammarMatcher:
    """A `GrammarState`: starts from a copy of the matcher of `grammar`.

    Copies share what the lexer has met, and it may get too much for its limits because of others. A question that fails
    is asked again of a new matcher that has met nothing but the tokens before it: so whether it fails depends on
    these alone. (What succeeds along with others succeeds alone, where less is met.)
    """

    def __init__(self, grammar: RenewableMatcher) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher.deep_copy()
        self._output: list[int] = []
        self._ahead: list[int] = []  # tokens behind the output that the matcher has consumed
        self._left: GrammarError | None = None  # why the output left the grammar, if it did after all
        self._masks: dict[tuple[int, ...], TokenMask] = {}  # by the path behind the output

    def append(self, tokens: Sequence[int], /) -> None:
        """Tokens that are now part of the output."""
        if self._left is None and not self._move(tokens):
            self._left = self._failure() if self._matcher.is_error() else _left()
        self._output += tokens
        del self._ahead[: len(tokens)]
        self._masks.clear()

    def copy(self) -> GrammarMatcher:
        """See GrammarState."""
        made = object.__new__(GrammarMatcher)
        made._grammar, made._matcher = self._grammar, self._matcher.deep_copy()
        made._output, made._ahead, made._left = self._output.copy(), self._ahead.copy(), self._left
        made._masks = self._masks.copy()
        return made

    def allowed(self, path: Sequence[int], /) -> TokenMask | None:
        """See GrammarState."""
        if self._left is not None:
            raise GrammarError(self._left.message, self._left.hint)
        key = tuple(path)
        mask = self._masks.get(key)
        if mask is None:
            if not self._move(key):
                if self._matcher.is_error():
                    raise self._failure()
                return None
            mask = self._mask()
            if mask is None and self._renewed(key):
                mask = self._mask()
            if mask is None:
                raise self._failure()
            self._masks[key] = mask
        return mask

    def forced(self, path: Sequence[int], /) -> list[int]:
        """See GrammarState."""
        if self._left is not None or not self._move(path) or self._matcher.is_stopped():
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return [] if self._matcher.is_error() else tokens

    def check(self, path: Sequence[int], /) -> None:
        """GrammarError if a limit is reached in the tokens of a path that is allowed."""
        if not self._move(path) and self._matcher.is_error():
            raise self._failure()

    def complete(self) -> bool:
        """See GrammarState."""
        return self._left is None and self._move(()) and bool(self._matcher.is_stopped())

    def _mask(self) -> TokenMask | None:
        """The mask where the matcher is; None if it fails."""
        mask = TokenMask(self._matcher.compute_bitmask())
        return None if self._matcher.is_error() or not self._can_go_on(mask) else mask

    def _can_go_on(self, mask: TokenMask) -> bool:
        """Whether a token is allowed that the matcher would take: a single one is how the tokenizer writes what the
        grammar forces, and a tokenizer may lack a byte of it."""
        only = mask.only()
        if only is None:
            return bool(mask)
        return bool(self._matcher.is_stopped() or self._matcher.validate_tokens([only]) == 1)

    def _move(self, path: Sequence[int]) -> bool:
        """Move the matcher behind output and path; False if the path leaves the grammar."""
        if path and not 0 <= min(path) <= max(path) < self._grammar.vocab_size:
            return False  # an id of the model's own, of which the tokenizer knows nothing
        if self._matcher.is_error():
            return self._renewed(path)
        ahead, same = self._ahead, 0
        while same < len(ahead) and same < len(path) and ahead[same] == path[same]:
            same += 1
        if same < len(ahead):
            if not self._matcher.rollback(len(ahead) - same):
                return self._renewed(path)
            del ahead[same:]
        rest = list(path[same:])
        if not rest:
            return True
        consumed: int = self._matcher.try_consume_tokens(rest)
        if self._matcher.is_error():
            return self._renewed(path)
        ahead += rest[:consumed]
        if consumed == len(rest) or self._matcher.is_stopped():
            return consumed == len(rest)
        # a lexer that may meet no more refuses without a word, even what the mask has
        mask = self._masks.get(tuple(ahead)) or self._mask()
        return (mask is None or rest[consumed] in mask) and self._renewed(path)

    def _renewed(self, path: Sequence[int]) -> bool:
        """A new matcher behind output and path; False if the path leaves the grammar, or the matcher fails there."""
        self._grammar.renew()
        self._matcher, self._ahead = self._grammar.matcher.deep_copy(), []
        if self._matcher.try_consume_tokens(self._output) < len(self._output):
            return False
        self._ahead = list(path[: self._matcher.try_consume_tokens(list(path))])
        return len(self._ahead) == len(path) and not self._matcher.is_error()

    def _failure(self) -> GrammarError:
        lines = self._matcher.get_error().splitlines()
        reason = lines[0].removeprefix("Parser Error: ") if lines else "no token is allowed"
        for words, plain in _REASONS:
            if found := words.search(reason):
                reason = found.expand(plain)
        return GrammarError(f"The grammar cannot go on: {reason}.", "Simplify the grammar, or let it end.")


_REASONS = (
    (re.compile("NoExtensionBias"), "no text fits it; a rule or $ref that leads back to itself has no end"),
    (
        re.compile(r"Current row has (\d+) items; max is (\d+)"),
        r"it has too many alternatives at one place (\1, at most \2), such as optional properties of one object",
    ),
)
"""What llguidance means."""


def _left() -> GrammarError:
    return GrammarError(
        "The output has left the grammar.", "The model's tokens cannot write what it demands, or it has ended."
    )
