"""The interface of a drafter.

A drafter proposes drafts; guesses cannot change the text, only how many passes of the target it takes. It gets known
tokens and draft requests, and depends on no scheduler, acceptance rule or target.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import index
from typing import NamedTuple, Protocol

from wager.kernels.base import TargetOutput
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams

WARM_UP = 16
"""Steps for which a drafter that rested is shown the target's states before it drafts again: then its guesses are
nearly as often right as with the whole context (docs/policy.md)."""


class DrafterStoppedError(RuntimeError):
    """Raised by `propose` where the drafter has failed as a whole, not for the sequences that it was asked about."""


class ComputedRows(NamedTuple):
    """The rows of a pass that are known tokens of one sequence: row `rows[i]` of the batch is its position `start` + i.
    Rows of guesses that were not accepted are left out. `logits_row` is the row of logits of the last one, -1 if it has
    none."""

    seq_id: str
    start: int
    rows: Sequence[int]
    logits_row: int = -1


class LogitsRows(NamedTuple):
    """The rows of logits of one sequence in a pass: the first is row `first`, and each follows one of the `tokens`."""

    seq_id: str
    first: int
    tokens: Sequence[int]


class Drafter(Protocol):
    """The drafter interface of the engine. Everything is keyed by sequence id.

    A drafter is trusted code: it runs in the engine's process, and each of its calls must return soon, since the step
    waits for it and a thread cannot be ended from outside. It may raise (see engine/proposer.py for what follows), and
    a sequence that was ended may begin again with more tokens known.

    `name` labels its guesses in outputs and metrics. `default_depth` is the depth of a request when none was
    chosen, `max_depth` the greatest a policy requests. `samples`: its guesses are drawn from a distribution q, which
    a distribution-exact rule must request (DraftRequest.needs_draft_probs); otherwise they are point masses.
    `makes_trees`: its drafts may be trees. `continues`: it heeds DraftRequest.after. `weighs_prices`:
    it decides by DraftRequest.prices what to compute, and says so (Draft.computed). `remembers_requests`: it guesses
    from earlier requests of the same tenant, too. `taps`: the layers whose residual stream `read` needs, see
    TargetOutput. They may change with every call, and be None while it needs none; one whose `taps` are None when the
    engine is built reads no states. `reads_rows`: it reads every row of logits. What has a default here, a subclass
    need not define; a class that does not inherit from this one must have all of it.
    """

    name: str
    default_depth: int
    max_depth: int
    samples: bool = False
    makes_trees: bool = False
    continues: bool = False
    weighs_prices: bool = False
    remembers_requests: bool = False
    taps: Sequence[int] | None = None
    reads_rows: bool = False

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        """A sequence starts with this prompt (penalties treat prompt and output differently). What a drafter keeps
        from one sequence for others (texts, rates, cached keys) it keeps for sequences of the same `tenant` only.

        Preemption is no call: known tokens stay known.
        """

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order; an empty draft declines. What it caches meanwhile is provisional."""

    def observe(self, output: TargetOutput) -> None:
        """The result of the target's last pass (views of its buffers: copy what is kept); ignored unless overridden."""
        return None

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        """Tokens that became known, whichever drafter guessed them. They suffice to rebuild the drafter's state."""

    def end(self, seq_id: str) -> None:
        """The sequence finished or was aborted. Unknown sequences are ignored."""

    def read(self, output: TargetOutput, computed: Sequence[ComputedRows]) -> None:
        """The states of a pass (views of the target's buffers: copy what is kept), before `observe` and `accept`. Rows
        may repeat positions that were seen before, and begin behind some that never come (a cached prefix)."""
        return None

    def read_rows(self, output: TargetOutput, rows: Sequence[LogitsRows]) -> None:
        """All rows of logits of a pass (views of the target's buffers) by sequence, those of rejected guesses included;
        before `observe` and `accept`."""
        return None

    def forget(self) -> None:
        """Forget earlier requests. No sequence is running."""
        return None


def valid_part(draft: Draft, *, limit: int, vocab: int, chains: bool = False) -> Draft:
    """The longest prefix of a draft that is a tree (with `chains`: a chain) of at most `limit` ids below `vocab`;
    without scores that are no probabilities, and nothing where draft_probs are not [tokens, vocab]. Nearly all drafts
    have nothing to cut off, which _native.valid_drafts finds."""
    probs = draft.draft_probs
    if probs is not None and probs.shape != (len(draft.tokens), vocab):
        return Draft(draft.seq_id, drafter=draft.drafter)
    tokens, parents = _integers(draft.tokens), _integers(draft.parents)
    size = min(limit, len(tokens), len(parents))
    for node in range(size):
        lowest = node - 1 if chains else -1
        if not (0 <= tokens[node] < vocab and lowest <= parents[node] < node):
            size = node
            break
    return replace(
        draft,
        tokens=tokens[:size],
        parents=parents[:size],
        scores=tuple(draft.scores[:size]) if _has_valid_scores(draft) else (),
        draft_probs=None if probs is None else probs[:size],
    )


def _integers(values: Iterable[object]) -> tuple[int, ...]:
    """As Python's own, up to the first that is no integer."""
    integers: list[int] = []
    with suppress(TypeError):
        integers.extend(map(index, values))  # type: ignore[arg-type]
    return tuple(integers)


def _has_valid_scores(draft: Draft) -> bool:
    """Whether every guess has a score, and each is a probability."""
    scores = draft.scores
    if len(scores) != len(draft.tokens):
        return False
    total = sum(scores)  # NaN if one is, of which neither the least nor the greatest need tell
    return not scores or (min(scores) >= 0.0 and max(scores) <= 1.0 and total == total)
