"""Frozen values that cross packages.

A *sequence* is one choice of one request: a request with n = 3 becomes three sequences, and everything below the engine
is keyed by the sequence's id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from wager.request import Request as Request
from wager.request import RequestSpeculation as RequestSpeculation
from wager.sampling import GREEDY_TEMPERATURE as GREEDY_TEMPERATURE
from wager.sampling import SamplingParams as SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

VerifyRule = Literal["match", "rejection", "block", "traversal"]

KVDtype = Literal["bf16", "q8"]
"""Types of cached keys and values: the kernels' activation type, or int8 with a scale per position and kv head."""
FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class RuleProperties:
    """Whether a verification rule needs the distribution of each sampled guess, and whether it takes trees."""

    needs_draft_probs: bool
    verifies_trees: bool


RULES: Mapping[VerifyRule, RuleProperties] = {
    "match": RuleProperties(needs_draft_probs=False, verifies_trees=True),
    "rejection": RuleProperties(needs_draft_probs=True, verifies_trees=True),
    "block": RuleProperties(needs_draft_probs=True, verifies_trees=False),
    "traversal": RuleProperties(needs_draft_probs=True, verifies_trees=True),
}


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one sequence in a step: known tokens whose keys and values are not computed yet.

    A prompt chunk, a single token and a token followed by guesses are all spans, with different numbers of rows.
    `num_computed_tokens` is the absolute position of the first row. `needs_logits`: the last row is the last known
    token, so that its logits give the next one. Only then may guesses follow, at most `max_draft_tokens` of them (as
    blocks, length and rows allow).
    """

    seq_id: str
    num_computed_tokens: int
    tokens: tuple[int, ...]
    needs_logits: bool
    max_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request for a draft of one sequence: up to `depth` guesses after position `position - 1`, a chain's length or
    the nodes of a tree, however deep it is.

    `position` is the absolute position of the first guess, that is, the number of known tokens. Noise for a guess at
    position i is `gumbel(seed, i, ids, choice)`; q is processed by `params` exactly as the target's p is.
    `needs_draft_probs`: the draft must hold full rows of q (the distribution-exact rules need them). The draft may end
    after a guess whose own survival estimate is below `min_survival`.
    """

    seq_id: str
    position: int
    depth: int
    params: SamplingParams
    seed: int
    choice: int = 0
    needs_draft_probs: bool = False
    min_survival: float = 0.0


_CHAIN_PARENTS = [tuple(range(-1, size - 1)) for size in range(64)]  # of short chains, by their size


@dataclass(frozen=True, slots=True)
class Draft:
    """Guesses of one sequence: tokens and parents; a chain is the tree whose parent is always the previous node.

    `parents[i]` is the node before node i, -1 for the root (the last known token); parents precede their children.
    `scores` are the drafter's estimates of survival, in [0, 1], per node: the probability that the node and all nodes
    before it are right. `draft_probs` holds the distribution q each node was drawn from, float64 [nodes, vocabulary];
    None means that the guesses are deterministic (q is a point mass).
    """

    seq_id: str
    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    drafter: str = ""
    draft_probs: NDArray[np.float64] | None = None

    @classmethod
    def chain(cls, seq_id: str, tokens: Sequence[int], *, drafter: str, scores: Sequence[float] = ()) -> Draft:
        return cls(seq_id, tuple(tokens), tuple(range(-1, len(tokens) - 1)), tuple(scores), drafter)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        size = len(self.tokens)
        return self.parents == (_CHAIN_PARENTS[size] if size < len(_CHAIN_PARENTS) else tuple(range(-1, size - 1)))

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node: 1 for a child of the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root's child down to `node`."""
        steps = []
        while node >= 0:
            steps.append(node)
            node = self.parents[node]
        return tuple(reversed(steps))

    def drafter_of(self, node: int) -> str:
        """The name of the drafter that guessed a node."""
        del node
        return self.drafter

    def truncate(self, size: int) -> Draft:
        """The first `size` nodes. Parents precede children, so they are a tree."""
        if size >= len(self.tokens):
            return self
        probs = None if self.draft_probs is None else self.draft_probs[:size]
        return Draft(self.seq_id, self.tokens[:size], self.parents[:size], self.scores[:size], self.drafter, probs)


@dataclass(frozen=True, slots=True)
class DraftDecision:
    """How one sequence drafts in a step: at most `depth` guesses (0: plain decoding) by `drafter` ("": the first one).

    A drafter may stop after a guess whose own survival estimate has fallen below `min_survival`.
    """

    depth: int
    drafter: str = ""
    min_survival: float = 0.0


Plan = Mapping[str, DraftDecision]
"""The draft decision of each sequence, by sequence id; a sequence that is absent decodes plainly."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One ragged pass, packed: every row of every span with its guesses. All arrays int32.

    Rows of a sequence are contiguous. `parents` holds the batch row that precedes a row on its path (-1 for the first
    row of its span: what precedes it is cached). A row at depth d of a tree sits at position start + d but is cached
    at its own slot; for a chain the two agree. Row j of a sequence is cached at entry (num_computed_tokens + j) //
    block_size of its block table. `logits_indices` lists the rows whose logits are computed.
    """

    tokens: NDArray[np.int32]  # [rows]
    positions: NDArray[np.int32]  # [rows]
    parents: NDArray[np.int32]  # [rows]
    slot_mapping: NDArray[np.int32]  # [rows] block * block_size + offset
    seq_ids: NDArray[np.int32]  # [rows] index of the sequence
    query_start_loc: NDArray[np.int32]  # [sequences + 1] first row of each sequence, then the number of rows
    num_computed_tokens: NDArray[np.int32]  # [sequences] position of its first row
    block_tables: NDArray[np.int32]  # [sequences, blocks] block of each block_size positions, padded with 0
    logits_indices: NDArray[np.int32]  # [logits rows]

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def num_sequences(self) -> int:
        return len(self.num_computed_tokens)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification decided for one sequence's rows.

    `accepted` are the draft's nodes on the accepted path, in order; `tokens` the emitted tokens: those of the accepted
    nodes and then the bonus (or corrected) token.
    """

    seq_id: str
    accepted: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def logits_rows(self) -> tuple[int, ...]:
        """The row of logits that each of `tokens` came from: 0 is the root's, 1 + node that of a node."""
        return (0, *(1 + node for node in self.accepted))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a pass of the target means for one sequence: the verdict, and what is reported with its tokens.

    `drafted` counts the guesses that were verified; `drafted_by` names the drafter of each emitted token ("": the
    target itself). `error` ends the sequence after those tokens, unless one of them ended it before; `error_status` is
    the HTTP status of its cause.
    """

    verdict: Verdict
    drafted: int = 0
    drafted_by: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str = ""
    error_status: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of an emitted token under the target's unprocessed distribution, and the likeliest
    tokens there with theirs."""

    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Stats:
    """Usage and cost of one sequence. `cached_tokens` are the prompt tokens that were found in the prefix cache.

    Seconds are wall time: `prefill_s` from admission to the first token, `decode_s` from there to the last. `rounds`
    counts target passes that emitted tokens, so completion_tokens / rounds is the mean acceptance length tau (bonus
    token included). `seed` reproduces the text.
    """

    prompt_tokens: int
    completion_tokens: int
    seed: int
    cached_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    drafter: str = "none"

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per round, the bonus token included (tau)."""
        return self.completion_tokens / self.rounds if self.rounds else 0.0


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What a step added to the output of one sequence: tokens, their text, and the drafter of each ("": the target
    itself).

    The last delta of a sequence has its `finish_reason` and carries its stats; with "error", `error` says why, and
    `error_status` is the HTTP status of that cause (400: the request's own). `index` numbers the choices of a request.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    drafted_by: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str = ""
    stats: Stats | None = None
    error_status: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished choice of one request. `logprobs` has an item per token if the request asked for them; `error` says
    why a choice ended with finish_reason "error", and `error_status` is the HTTP status of that cause (400: the
    request's own)."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stats: Stats
    drafted_by: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str = ""
    error_status: int = 0


DRAFT_STAGE, POLICY_STAGE, FORWARD_STAGE = "draft", "policy", "forward"
"""The stages of StepRecord.seconds that are the drafters', the policy's and the target's."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What a step did and what it took.

    `seconds` by stage: schedule, policy, draft, forward, accept, commit, observe; the time a policy takes to process
    this record counts for the next step. `context_lens` are the positions that each sequence had cached before the
    step.
    """

    rows: int
    sequences: int
    drafted: int
    accepted: int
    emitted: int
    seconds: Mapping[str, float]
    context_lens: tuple[int, ...] = ()

    @property
    def decodes_only(self) -> bool:
        """Whether it computed no prompt: every row is a sequence's last known token or a guess."""
        return self.rows == self.sequences + self.drafted
