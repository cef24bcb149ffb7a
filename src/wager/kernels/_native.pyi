"""The C++ extension as Python sees it (csrc/bindings.cpp). Addresses are integers, checked by tape.py."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from wager.types import Draft, DraftRequest, FinishReason, Outcome, PackedBatch, Span, StepRecord

R = TypeVar("R")

class Buffer:
    def __init__(self, bytes: int, huge_pages: bool = True) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class Pool:
    def __init__(self, threads: int, always_all: bool = False) -> None: ...
    @property
    def threads(self) -> int: ...
    def team_sizes(self, stages: int, nanoseconds: int) -> list[int]: ...

class ThreadLimit:
    def __init__(self, threads: int) -> None: ...
    @property
    def limit(self) -> int: ...
    def begin(self, now: int) -> None: ...
    def woke(self) -> None: ...
    def worked(self, now: int, team: int, waited: int) -> None: ...

class Isa:
    def __init__(self, name: str) -> None: ...
    @property
    def name(self) -> str: ...
    @staticmethod
    def has(name: str) -> bool: ...

class CacheView:
    def __init__(
        self, keys: Buffer, values: Buffer, layers: int, num_blocks: int, kv_heads: int, head_dim: int, q8: bool
    ) -> None: ...
    @staticmethod
    def latent(keys: Buffer, layers: int, num_blocks: int, rank: int, rope: int) -> CacheView: ...
    def move(self, pool: Pool, source: int, target: int, n: int) -> None: ...
    def read(self, slot: int, out: int) -> None: ...
    def clear(self, block: int) -> None: ...

class StateView:
    def __init__(self, tails: Buffer, heads: Buffer, saved: Buffer, sizes: tuple[int, ...]) -> None: ...

class Tape:
    def __init__(
        self,
        pool: Pool,
        isa: Isa,
        inputs: tuple[int, ...],
        max_rows: int,
        max_sequences: int,
        max_blocks: int,
        whole_spans: bool,
    ) -> None: ...
    def embed(self, table: int, format: str, vocab: int, hidden: int, tokens: int, out: int, scale: float) -> None: ...
    def rms_norm(self, x: int, weight: int, n: int, eps: float, out: int, logits: bool) -> None: ...
    def float_norm(
        self,
        x: int,
        weight: int,
        n: int,
        stride: int,
        per_row: int,
        eps: float,
        out: int,
        out_stride: int,
        scale: float,
        add: bool,
        logits: bool,
    ) -> None: ...
    def narrow(self, x: int, out: int, n: int, squared_relu: bool, logits: bool) -> None: ...
    def soft_cap(self, x: int, n: int, cap: float, logits: bool) -> None: ...
    def linear(
        self,
        x: int,
        weight: int,
        format: str,
        bias: int,
        n: int,
        k: int,
        panels: int,
        gated: bool,
        activation: str,
        add: bool,
        scale: float,
        out: int,
        stride: int,
        logits: bool,
    ) -> None: ...
    def per_head(self, x: int, weight: int, format: str, heads: int, n: int, k: int, step: int, out: int) -> None: ...
    def route(
        self,
        x: int,
        weight: int,
        logit_bias: int,
        bias: int,
        scales: int,
        hidden: int,
        params: tuple[int, ...],
        scale: float,
        logits: int,
        ids: int,
        shares: int,
    ) -> None: ...
    def experts(
        self,
        x: int,
        into: tuple[int, str, int],
        down: tuple[int, str, int],
        hidden: int,
        width: int,
        experts: int,
        top_k: int,
        rows: int,
        routing: tuple[int, ...],
        activation: str,
        out: int,
    ) -> None: ...
    def add_gated(self, x: int, weight: int, k: int, y: int, n: int, out: int) -> None: ...
    def latent(
        self,
        q: int,
        kv: int,
        table: int,
        positions: int,
        norm: int,
        eps: float,
        cache: CacheView,
        layer: int,
        heads: int,
        nope: int,
        q_nope: int,
        query: int,
    ) -> None: ...
    def rotary(
        self,
        qkv: int,
        table: int,
        positions: int,
        q_norm: int,
        k_norm: int,
        eps: float,
        cache: CacheView,
        layer: int,
        heads: int,
        rope_dim: int,
        value_at: int,
        norm_values: bool,
        q: int,
        logits: bool,
    ) -> None: ...
    def attention(
        self,
        q: int,
        cache: CacheView,
        layer: int,
        heads: int,
        window: int,
        scale: float,
        soft_cap: float,
        sinks: int,
        out: int,
        logits: bool,
    ) -> None: ...
    def replay(self, states: StateView, layer: int, x: int) -> None: ...
    def convolve(
        self,
        states: StateView,
        layer: int,
        x: int,
        weight: int,
        bias: int,
        rates: int,
        gate_bias: int,
        heads: int,
        delta: bool,
        silu: bool,
        out: int,
    ) -> None: ...
    def recur(
        self,
        states: StateView,
        layer: int,
        x: int,
        skip: int,
        key_heads: int,
        q_at: int,
        k_at: int,
        v_at: int,
        tiled: bool,
        delta: bool,
        out: int,
    ) -> None: ...
    def gated_norm(
        self,
        x: int,
        gate: int,
        weight: int,
        eps: float,
        heads: int,
        n: int,
        weight_stride: int,
        gate_first: bool,
        out: int,
    ) -> None: ...
    def multiply(
        self,
        x: int,
        stride: int,
        y: int,
        y_stride: int,
        n: int,
        out: int,
        out_stride: int,
        gelu: bool,
        narrow: bool,
        logits: bool,
    ) -> None: ...
    def add_silu(self, x: int, y: int, n: int, out: int, stride: int) -> None: ...
    def sigmoid_gate(self, x: int, gate: int, n: int) -> None: ...
    def select(self, x: int, out: int, n: int) -> None: ...
    def copy(self, x: int, out: int, n: int, stride: int, wide: bool) -> int: ...
    def redirect(self, copy: int, out: int, stride: int) -> None: ...
    def argmax(self, logits: int, out: int, n: int) -> None: ...
    def guess(
        self,
        logits: int,
        stride: int,
        n: int,
        ids: int,
        halves: int,
        keys: int,
        ahead: int,
        tokens: int,
        probabilities: int,
        of_logits: bool,
    ) -> None: ...
    def feed(self, first: int, fed: int, narrow: bool, state: int, n: int) -> None: ...
    @property
    def ops(self) -> int: ...
    def run(self, rows: int, sequences: int, logits_rows: int, first: int, last: int) -> None: ...

weight_layout_version: int

def pack(pool: Pool, format: str, rows: int, panels: int, k: int, to: Buffer, start: int) -> None: ...
def panel_bytes(format: str, k: int) -> int: ...
def input_multiple(format: str) -> int: ...
def sample(
    pool: Pool,
    isa: Isa,
    logits: int,
    vocab: int,
    rows: int,
    keys: int,
    n: int,
    greedy: float,
    out: int,
) -> None: ...

class RowSampler:
    def __init__(self) -> None: ...
    def sample(
        self,
        isa: Isa,
        logits: NDArray[np.float32],
        temperature: float,
        seed: int,
        position: int,
        choice: int,
        top_k: int,
        top_p: float,
        min_p: float,
        edited_ids: NDArray[np.int64],
        edited_logits: NDArray[np.float64],
        allowed: NDArray[np.int64] | None,
        greedy: float,
    ) -> int: ...

def sweep(pool: Pool, isa: Isa, buffer: Buffer) -> float: ...

class BatchPacker:
    packed: PackedBatch | None
    sizes: tuple[int, int, int, int]
    def __init__(
        self,
        inputs: tuple[int, ...],
        max_rows: int,
        max_sequences: int,
        max_blocks: int,
        view: Callable[[int, int, int, int], PackedBatch],
    ) -> None: ...
    def pack(self, spans: Sequence[Span], drafts: Mapping[str, Draft], pool: BlockPool, /) -> PackedBatch: ...

class StageSeconds:
    def __init__(self, clock: Callable[[], float], /) -> None: ...
    def timed(self, stage: str, function: Callable[..., R], /, *last: object) -> Callable[..., R]: ...
    def take_into(self, seconds: Mapping[str, float], /) -> None: ...

class HasState(Protocol):
    @property
    def state(self) -> SequenceState: ...

class TokenMatcher:
    def __init__(
        self, pool: Pool, isa: Isa, *, greedy: float, outcome: type, verdict: type, draft: type, follows: bool
    ) -> None: ...
    def match(
        self,
        spans: Sequence[Span],
        drafts: Mapping[str, Draft],
        sequences: Mapping[str, HasState],
        greedy: NDArray[np.int32],
        logits: NDArray[np.float32],
        /,
    ) -> tuple[dict[str, Outcome], list[tuple[str, int]]]: ...

class BlockPool:
    def __init__(
        self, num_blocks: int, *, prefix_cache: bool, lead: int = 0, states: int = 0, snapshots: int = 0
    ) -> None: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free_blocks(self) -> int: ...
    def block_table(self, seq_id: str, /) -> list[int]: ...
    def is_held(self, block: int, /) -> bool: ...
    def match_prefix(self, seq_id: str, tokens: Sequence[int], *, tenant: str = "") -> int: ...
    def reserve(self, seq_id: str, length: int, /) -> bool: ...
    def trim(self, seq_id: str, length: int, /) -> None: ...
    def commit(self, seq_id: str, tokens: Sequence[int], *, length: int | None = None) -> None: ...
    def fork(self, source: str, target: str, length: int, /) -> None: ...
    def release(self, seq_id: str, /) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def check(self, lengths: Mapping[str, int] | None = None) -> None: ...

class SequenceState:
    def __init__(
        self,
        *,
        id: str,
        request_id: str,
        choice: int,
        tokens: Sequence[int],
        max_length: int,
        stop_ids: Sequence[int],
        tenant: str,
        seed: int,
        temperature: float | None,
        filters: tuple[int, float, float],
        greedy: float,
        streamed: bool = False,
    ) -> None: ...
    @property
    def num_tokens(self) -> int: ...
    def tokens_from(self, first: int, /) -> list[int]: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def admitted_at(self) -> float: ...
    @property
    def first_token_at(self) -> float: ...
    @property
    def last_token_at(self) -> float: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def rounds(self) -> int: ...
    @property
    def drafted(self) -> int: ...
    @property
    def accepted(self) -> int: ...
    @property
    def preemptions(self) -> int: ...

class StepState:
    def __init__(
        self,
        *,
        pool: BlockPool,
        max_rows: int,
        max_sequences: int,
        max_context: int,
        max_drafts: int,
        max_prefill_rows: int | None,
        span: type,
        delta: type,
        committed: type,
        record: type,
    ) -> None: ...
    max_drafts: int
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def running(self) -> list[str]: ...
    @property
    def rows_beside_others(self) -> int | None: ...
    def add(self, sequence: SequenceState, /) -> None: ...
    def remove(self, sequence: SequenceState, /) -> None: ...
    def preempt_all(self) -> None: ...
    def next(self, last: StepRecord | tuple[()], now: float, /) -> list[Span]: ...
    def commit(
        self, spans: Sequence[Span], outcomes: Mapping[str, Outcome], sequences: Mapping[str, HasState], now: float, /
    ) -> tuple[Any, list[tuple[int, FinishReason]], list[int], list[int], list[int]]: ...

class LookupTable:
    def __init__(
        self,
        draft: type,
        drafter: str,
        *,
        longest: int,
        shared_tokens: int,
        prior: Sequence[float],
        prior_weight: float,
        min_survival: float,
        most_certain: float,
        learned: tuple[float, float, float, float, float, int],
        weights: Sequence[float],
        coupling: tuple[float, float, float, float],
        slots: NDArray[np.uint64] | None,
        homes: int,
        trees: bool,
    ) -> None: ...
    def begin(self, seq_id: str, tokens: Sequence[int], prediction: Sequence[int], /) -> None: ...
    def accept(self, seq_id: str, tokens: Sequence[int], /) -> None: ...
    def end(self, seq_id: str, /) -> None: ...
    def propose(self, requests: Sequence[Any], /) -> list[Any]: ...
    def read(self, corpus: Corpus, /) -> None: ...
    def found(self) -> list[tuple[float, float]]: ...
    def start_from(self, means: Sequence[tuple[float, float]], /) -> bool: ...
    @property
    def nbytes(self) -> int: ...

class Corpus:
    def set(
        self,
        segments: Sequence[tuple[NDArray[np.int32], NDArray[np.uint32], NDArray[np.uint64], NDArray[np.uint8]]],
        /,
    ) -> None: ...
    def find(self, text: Sequence[int], least: int, /) -> tuple[int, list[tuple[int, int]]]: ...

def corpus_order(tokens: NDArray[np.int32], out: NDArray[np.uint32], /) -> None: ...
def corpus_merge(
    tokens: NDArray[np.int32],
    orders: Sequence[tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]],
    out: NDArray[np.uint32],
    /,
) -> None: ...

class Successors:
    def __init__(
        self,
        vocab: int,
        *,
        rates: Sequence[float],
        prior_weight: float,
        min_survival: float,
        weight: float,
        min_sampled: float,
        coupling: tuple[float, float, float, float],
    ) -> None: ...
    def update(self, tokens: Sequence[int], logits: NDArray[np.float32], /) -> None: ...
    def draft(self, last: int, most: int, request: Any = None) -> tuple[list[int], list[int], list[float]]: ...
    def state(self) -> bytes: ...
    def restore(self, state: bytes, /) -> bool: ...

def valid_drafts(
    drafts: object,
    requests: Sequence[DraftRequest],
    limits: Mapping[str, int],
    drafter: str,
    vocab: int,
    chains: bool,
    needs: bool,
    /,
) -> dict[str, Draft] | None:
    """The drafts by sequence that are not empty, if each answers the request at its place with a valid tree (with
    `chains`: a chain) of `drafter` of at most `limits[seq_id]` ids below `vocab`, without draft_probs, which with
    `needs` no request may need; None where Python has to look at them, as of values of other types than its own."""

class Reliability:
    """How often a drafter was right where it guessed, as a `factor` of how often it should have been by its scores."""

    def __init__(self) -> None: ...
    @property
    def factor(self) -> float: ...
    def learn(self, draft: Draft, tokens: Sequence[int], /) -> None:
        """Compare a drafter's guesses with the tokens that became known, as far as its path was right."""

class DraftMerger:
    """Makes the drafts of a drafter of that name."""

    def __init__(self, draft: type, drafter: str) -> None: ...
    def merge(self, seq_id: str, drafts: list[tuple[Draft, float]], nodes: int, /) -> Draft:
        """The one tree of several drafts, each of which was lately right `factor` times as often as it says; its
        `nodes` best nodes. Equal paths share their nodes, which take the greater score."""

    def rename(self, draft: Draft, /) -> Draft:
        """Another's draft, for which no time was taken."""

class BackedDrafts(DraftMerger):
    """Where a second drafter is asked behind a first one, and their drafts (csrc/merging.h)."""

    until: int
    """It is not asked before this call."""
    def __init__(self, draft: type, drafter: str, borders: list[float], share: float) -> None: ...
    def ask(
        self, request: DraftRequest, own: Draft | None, now: int, sequences: int, keeps: bool
    ) -> DraftRequest | None:
        """What is asked of the second one where the first gave its `own` draft; None where it is not asked."""

    def behind(self, request: DraftRequest, chain: Draft, /) -> DraftRequest | None:
        """What is asked of the first one behind a chain of the second's; None where nothing is."""

    def join(
        self, request: DraftRequest, first: Draft, second: Draft, behind: Draft | None = None, made: Draft | None = None
    ) -> Draft:
        """The one tree of both at a place where the second was asked, if none was `made`; what is `behind` goes on
        behind its last node."""

    def accept(self, seq_id: str, tokens: Sequence[int], /) -> None: ...
    def end(self, seq_id: str, /) -> None: ...

class HeadSequence:
    """What a head keeps of a sequence (csrc/head_rounds.h); of states that wait the last `most` count. `take` moves the
    next states to the rows of an array f32 [n, width]; `keep` forgets all but the last ones."""

    origin: int
    num_entries: int
    def __init__(
        self, tokens: Sequence[int], *, width: int, most: int, tenant: str, temperature: float | None
    ) -> None: ...
    @property
    def temperature(self) -> float | None: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def last_token(self) -> int: ...
    @property
    def num_known(self) -> int: ...
    @property
    def num_states(self) -> int: ...
    def tokens_between(self, first: int, end: int, /) -> list[int]: ...
    def accept(self, tokens: Sequence[int], /) -> None: ...
    def read(self, taps: list[NDArray[np.float32]], start: int, rows: Sequence[int], /) -> int: ...
    def take(self, into: NDArray[np.float32], /) -> None: ...
    def keep(self, states: int, /) -> None: ...
    def join(self, pool: BlockPool, seq_id: str, /) -> bool: ...
    def commit(self, pool: BlockPool, seq_id: str, length: int, /) -> None: ...

class HeadDrafts:
    def __init__(
        self,
        draft: type,
        drafter: str,
        tape: Tape,
        pool: BlockPool,
        states: int,
        width: int,
        limits: tuple[int, int, int],
    ) -> None: ...
    def propose(self, requests: Sequence[Any], sequences: Mapping[str, HeadSequence], /) -> list[Any] | None: ...

class NgramTable:
    def __init__(
        self, draft: type, drafter: str, longest: int, prior: Sequence[float], prior_weight: float, min_survival: float
    ) -> None: ...
    def begin(self, seq_id: str, tokens: Sequence[int], /) -> None: ...
    def accept(self, seq_id: str, tokens: Sequence[int], /) -> None: ...
    def end(self, seq_id: str, /) -> None: ...
    def propose(self, requests: Sequence[Any], /) -> list[Any]: ...

class KalmanFilter:
    def __init__(
        self,
        *,
        max_surprise: float,
        drift: float,
        noise_weight: float,
        most_noise: float,
        passing: float,
        first_trend_weight: float,
        trend_weight: float,
        trend: float,
        drift_interval: int,
        trend_growth: int,
        change: Sequence[float],
        noise: float,
        uncertainty: float,
    ) -> None: ...

class StepTimes:
    """What a step takes by its shape (rows, requests, cached positions), corrected by steps (csrc/step_times.h).
    `corrected`: of a step of each of `rows` without its requests and positions, at `scale` 1."""

    def __init__(
        self,
        filter: KalmanFilter,
        /,
        *,
        rows: Sequence[float],
        seconds: Sequence[float],
        per_request: float,
        per_context: float,
        per_pair: float,
    ) -> None: ...
    @property
    def scale(self) -> float: ...
    @property
    def per_request(self) -> float: ...
    @property
    def corrected(self) -> list[float]: ...
    def seconds(self, rows: float, requests: float, context_sum: float, /) -> float: ...
    def seconds_by_rows(self, rows: Sequence[float], requests: float, context_sum: float, /) -> list[float]: ...
    def slopes(self, rows: float, requests: float, context_sum: float, /) -> list[float]:
        """Seconds that a unit of each unknown of the filter adds."""
    def observe(self, rows: float, requests: float, context_sum: float, taken: float, /) -> None: ...
    def deviations(
        self, rows: float, others: Sequence[float], requests: float, context_sum: float, /
    ) -> list[float]: ...
    def update(self, slopes: Sequence[float], error: float, /) -> None:
        """As of the filter, which may follow more than this."""
    def deviation(self, slopes: Sequence[float], /) -> float: ...
    def values(self) -> list[float]: ...

class DraftTimes:
    """What a call for drafts takes by requests and depth, corrected by what calls took (csrc/step_times.h)."""

    def __init__(
        self,
        filter: KalmanFilter,
        /,
        *,
        requests: Sequence[float],
        per_call: Sequence[float],
        per_token: Sequence[float],
    ) -> None: ...
    @property
    def per_call(self) -> list[float]: ...
    @property
    def per_token(self) -> list[float]: ...
    def seconds_by_depth(self, requests: float, depths: Sequence[float], /) -> list[float]: ...
    def observe(self, requests: float, depth: float, seconds: float, /) -> bool:
        """False, and nothing is learned, where it was believed to take no time."""

class CollapseRules:
    def __init__(
        self, *, long_run: int, known: int, other_texts: float, nearly_never: float, enough: float, share: float
    ) -> None: ...

class DrafterRecords:
    """Whether the first guesses of each drafter go on being right (csrc/collapse.h); of a step the first `most_seen`
    drafts are looked at."""

    def __init__(self, rules: CollapseRules, /, *, most_seen: int) -> None: ...
    def add(self, steps: list[Any], /) -> list[tuple[str, bool, float, str]]:
        """Of each drafter that has collapsed in these steps (PolicyStep), or recovered: its name, whether it has
        collapsed, its usual rate, and how many of the latest guesses were right."""

class LogOddsTable:
    """Log-odds by cell (depth or bin of confidence), their exponentials, and the trials each was estimated from."""

    @property
    def log_odds(self) -> list[float]: ...
    @property
    def odds(self) -> list[float]: ...
    @property
    def trials(self) -> list[float]: ...

class SequenceAcceptance:
    """How much easier one sequence is for a drafter than others: mean and variance of its offset in log-odds."""

    def __init__(self, mean: float, variance: float) -> None: ...
    @property
    def mean(self) -> float: ...
    @property
    def variance(self) -> float: ...

class AcceptanceModel:
    """See economics/acceptance.py."""

    has_scores: bool
    """Whether its last draft carried confidence."""

    def __init__(
        self,
        *,
        prior: Sequence[float],
        borders: Sequence[float],
        highest: float,
        aged: float,
        prior_trials: float,
        chained_prior_trials: float,
        spread: float,
        prior_sequences: float,
        ended: float,
        drift: float,
        trial_weight: float,
        samples: int,
    ) -> None: ...
    @property
    def depths(self) -> LogOddsTable: ...
    @property
    def bins(self) -> LogOddsTable: ...
    def start_sequence(self) -> SequenceAcceptance:
        """A new sequence is taken to be an average one."""

    def end_sequence(self, sequence: SequenceAcceptance, /) -> None:
        """It goes on counting for how much sequences differ."""

    def compare_sequences(self, sequences: Sequence[SequenceAcceptance], /) -> None: ...
    def survival(self, draft: Draft, sequence: SequenceAcceptance, /) -> list[float]:
        """Survival of every node: by its confidence if it has one, by its depth if not."""

    def learn_round(self, sequence: SequenceAcceptance, *, accepted: int, tested: int, known: int = 0) -> None:
        """Depths 1 to `tested` were tested and the first `accepted` accepted; `known` were learned before."""

    def learn_draft(
        self,
        sequence: SequenceAcceptance,
        draft: Draft | None,
        emitted: Sequence[int],
        *,
        accepted: int | None = None,
        depth: int,
        stops_early: bool = False,
        forecast: Sequence[float] | None = None,
    ) -> bool:
        """A draft to at most `depth` (None: there was none), by the tokens emitted after it, or by how many of its
        nodes were `accepted` where that is another matter. `stops_early`: it may have stopped before. With the
        `forecast` of its survival by depth it is learned how scores moved that. Whether all that
        was emitted was drafted, and more after it."""

    def age(self) -> None:
        """Discount older observations; to be called every SLOW_INTERVAL steps."""

    def start_from(self, depths: Sequence[float], bins: Sequence[float], /) -> None:
        """Take log-odds of an earlier process for the prior. ValueError if they are none, or of other cells."""

    def shifts(self) -> list[float]:
        """Samples of how scores moved the odds of survival, [samples, depth], row by row."""

class DraftSelector:
    def __init__(self, draft_type: type[Draft], /) -> None: ...
    def select(
        self,
        drafts: dict[str, Draft],
        models: Sequence[AcceptanceModel],
        sequences: Sequence[SequenceAcceptance] | None,
        weights: Sequence[float] | None,
        seconds: Sequence[float],
        first: int,
        goodput: float,
        limit: int,
    ) -> tuple[dict[str, Draft], int, float, float | None, float]:
        """Which tokens to verify: the drafts as far as they are kept (`drafts` itself: whole), how many tokens these
        are, their gain, `cut`, and the benefit of choosing. `models` are one for all drafts, or one for each."""

    def keep(self, draft: Draft, nodes: Sequence[int], /) -> Draft:
        """The draft with these nodes alone, ascending and closed under parents."""

def compare(draft: Draft, emitted: Sequence[int], /) -> tuple[list[int], list[int]]:
    """Nodes that the emitted tokens can be compared with, and those of them that agree, from the root down."""

class DraftPlanner:
    def __init__(
        self,
        *,
        rooms: Sequence[int],
        weights: Sequence[float],
        extra: Sequence[float],
        goodput: float,
        max_min_survival: float,
    ) -> None: ...
    def add(
        self,
        *,
        model: AcceptanceModel,
        sequences: Sequence[SequenceAcceptance],
        offset: float | None,
        seconds: Sequence[Sequence[float]],
        catch_up: Sequence[float],
        unjudged: Sequence[bool],
        stops_early: bool,
    ) -> list[list[float]]: ...
    def choose(self, row_costs: Sequence[float], *, overhead: float) -> tuple[list[int], list[int], list[float]]: ...
