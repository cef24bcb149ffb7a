"""The tokens that the distribution at a position depends on besides the logits: penalties count them, a grammar follows
them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy

import numpy as np
from numpy.typing import NDArray

from wager.errors import UsageError
from wager.types import AllowedTokens, GrammarState, SamplingParams


class _TokenCounts:
    """Distinct ids of a sequence, and how often each is in its output; grows by doubling."""

    __slots__ = ("counts", "ids", "index", "size")

    def __init__(self, prompt: Iterable[int]) -> None:
        unique = dict.fromkeys(prompt)
        self.index = {token: slot for slot, token in enumerate(unique)}
        self.size = len(unique)
        self.ids = np.zeros(self.size + 64, np.int64)
        self.ids[: self.size] = list(unique)
        self.counts = np.zeros(self.size + 64, np.int64)

    def add(self, token: int) -> None:
        slot = self.index.get(token)
        if slot is None:
            slot = self.index[token] = self.size
            if slot == len(self.ids):
                self.ids = np.concatenate((self.ids, np.zeros_like(self.ids)))
                self.counts = np.concatenate((self.counts, np.zeros_like(self.counts)))
            self.ids[slot] = token
            self.size += 1
        self.counts[slot] += 1


class History:
    """The tokens that a position's penalties depend on, and its grammar.

    The engine keeps one per sequence and appends committed tokens; `extended` gives the history of a guess further down
    a path. A view shares its base and is valid until the base is appended to. `grammar` is the state of the output's
    grammar before `output`.
    """

    __slots__ = ("_counts_by_id", "_path", "grammar")

    def __init__(
        self, prompt: Sequence[int] = (), output: Sequence[int] = (), *, grammar: GrammarState | None = None
    ) -> None:
        self._counts_by_id = _TokenCounts(prompt)
        self._path: tuple[int, ...] = ()
        self.grammar = grammar
        self.append(output)

    @classmethod
    def of(cls, prompt: Sequence[int], params: SamplingParams) -> History | None:
        """That of a request that begins; None if its distributions depend on none."""
        if not params.needs_history:
            return None
        compiled = params.grammar and params.grammar.compiled
        return cls(prompt, grammar=compiled.start() if compiled else None)

    def append(self, tokens: Iterable[int]) -> None:
        """Tokens that are now part of the output."""
        if self._path:
            raise UsageError("A view of a history cannot be appended to.", "Append to the history it was taken from.")
        added = list(tokens)
        for token in added:
            self._counts_by_id.add(token)
        if self.grammar is not None and added:
            self.grammar.append(added)

    def copy(self) -> History:
        """One that is appended to by itself. A view cannot be copied."""
        if self._path:
            raise UsageError("A view of a history cannot be copied.", "Copy the history it was taken from.")
        made = object.__new__(History)
        made._counts_by_id, made._path = deepcopy(self._counts_by_id), ()
        made.grammar = self.grammar and self.grammar.copy()
        return made

    def extended(self, path: Sequence[int]) -> History:
        """The history after the further tokens of `path`; copies nothing but the path."""
        view = object.__new__(History)
        view._counts_by_id = self._counts_by_id
        view._path = self._path + tuple(path)
        view.grammar = self.grammar
        return view

    def allowed(self) -> AllowedTokens | None:
        """The tokens that the grammar allows next; None for all of them: without a grammar, and behind a guess that is
        not allowed itself, since such a guess is never accepted. GrammarError if the grammar cannot go on."""
        return None if self.grammar is None else self.grammar.allowed(self._path)

    def counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Distinct ids of prompt and output, and how often each is in the output; both int64 [m], not to be written."""
        counts_by_id = self._counts_by_id
        ids, counts = counts_by_id.ids[: counts_by_id.size], counts_by_id.counts[: counts_by_id.size]
        if not self._path:
            return ids, counts
        counts = counts.copy()
        fresh: dict[int, int] = {}
        for token in self._path:
            slot = counts_by_id.index.get(token)
            if slot is None:
                fresh[token] = fresh.get(token, 0) + 1
            else:
                counts[slot] += 1
        return (
            np.concatenate((ids, np.array(list(fresh), np.int64))),
            np.concatenate((counts, np.array(list(fresh.values()), np.int64))),
        )
