"""How far one sequence has come in its grammar, and what may follow it and the guesses behind it.

llguidance's matcher goes forward by tokens and back again, so one of them serves all paths of a draft: it is moved to
where a question is asked. Answers depend on the tokens alone, never on what was asked before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


class GrammarMatcher:
    """A `GrammarState`: starts from a copy of llguidance's matcher `start`, which stays as it is."""

    def __init__(self, start: Any) -> None:
        self._start = start
        self._matcher = start.deep_copy()
        self._output: list[int] = []
        self._ahead: list[int] = []  # tokens behind the output that the matcher has consumed
        self._left = False  # whether the output left the grammar after all
        self._masks: dict[tuple[int, ...], TokenMask] = {}  # by the path behind the output

    def append(self, tokens: Sequence[int], /) -> None:
        """Tokens that are now part of the output."""
        self._left = self._left or not self._move(tokens)
        self._output += tokens
        del self._ahead[: len(tokens)]
        self._masks.clear()

    def allowed(self, path: Sequence[int], /) -> TokenMask | None:
        """See GrammarState."""
        if self._left:
            raise GrammarError(
                "The output has left the grammar.", "The model's tokens cannot write what it demands, or it has ended."
            )
        key = tuple(path)
        mask = self._masks.get(key)
        if mask is None:
            if not self._move(key):
                return None
            mask = TokenMask(self._matcher.compute_bitmask())
            if self._matcher.is_error() or not self._can_go_on(mask):
                raise self._failure()
            self._masks[key] = mask
        return mask

    def forced(self, path: Sequence[int], /) -> list[int]:
        """See GrammarState."""
        if self._left or not self._move(path) or self._matcher.is_stopped():
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()
        if self._matcher.is_error():
            self._restart()
            return []
        return tokens

    def complete(self) -> bool:
        """See GrammarState."""
        return not self._left and self._move(()) and bool(self._matcher.is_stopped())

    def _can_go_on(self, mask: TokenMask) -> bool:
        """Whether a token is allowed that the matcher would take: a single one is how the tokenizer writes what the
        grammar forces, and a tokenizer may lack a byte of it."""
        only = mask.only()
        if only is None:
            return bool(mask)
        return bool(self._matcher.is_stopped() or self._matcher.validate_tokens([only]) == 1)

    def _move(self, path: Sequence[int]) -> bool:
        """Move the matcher behind output and path; False if the path leaves the grammar."""
        ahead = self._ahead
        same = 0
        while same < len(ahead) and same < len(path) and ahead[same] == path[same]:
            same += 1
        if same < len(ahead):
            if not self._matcher.rollback(len(ahead) - same):
                self._restart()
                return self._move(path)
            del ahead[same:]
        rest = list(path[same:])
        if rest:
            consumed = self._matcher.try_consume_tokens(rest)
            if self._matcher.is_error():
                self._restart()
                return False
            ahead += rest[:consumed]
            return bool(consumed == len(rest))
        return True

    def _failure(self) -> GrammarError:
        lines = self._matcher.get_error().splitlines()
        self._restart()
        reason = lines[0] if lines else "no token is allowed"
        return GrammarError(f"The grammar cannot go on: {reason}.", "Simplify the grammar, or let it end.")

    def _restart(self) -> None:
        """A matcher that failed stays so: replace it by one that has consumed the output."""
        self._matcher, self._ahead = self._start.deep_copy(), []
        self._matcher.try_consume_tokens(self._output)
