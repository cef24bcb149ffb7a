"""Frozen values that cross packages: requests and what they may ask for, the step's plain values, results.

A *sequence* is one choice of one request: a request with n = 3 becomes three sequences, and everything below the engine
is keyed by the sequence's id.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

from wager.errors import RequestError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NO_TENANT = ""
"""The tenant of requests that name none."""

# ---- token ids -------------------------------------------------------------------------------------------------------


def listed(values: object) -> object:
    """Arrays and tensors as (nested) lists, their single numbers as Python's; anything else as it is."""
    is_array = hasattr(values, "tolist") and not isinstance(values, memoryview)
    return values.tolist() if is_array else values  # type: ignore[attr-defined]


def as_integer(value: object) -> int:
    """A Python int from one of any integer type. TypeError, which names the value, for bools and all others."""
    number = listed(value)
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(_named(value))
    return int(number)


def as_token_ids(values: object) -> tuple[int, ...]:
    """A tuple of Python ints. TypeError, which names what is no integer and where, for anything else.

    Whether a vocabulary has the ids is not asked here.
    """
    items = listed(values)
    if isinstance(items, str | bytes | bytearray | memoryview) or not isinstance(items, Sequence):
        raise TypeError(f"{_named(values)} is not a sequence of integers")
    if all(type(item) is int for item in items):
        return tuple(items)
    ids = []
    for index, item in enumerate(items):
        try:
            ids.append(as_integer(item))
        except TypeError as error:
            raise TypeError(f"token {error} at index {index} is not an integer") from None
    return tuple(ids)


def _named(value: object) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"


# ---- grammars --------------------------------------------------------------------------------------------------------


GrammarKind = Literal["json_schema", "regex", "choice", "lark", "tokens"]

MAX_GRAMMAR_CHARACTERS = 64 * 1024
"""The most characters of a grammar: larger ones are refused before they are compiled."""


class AllowedTokens(Protocol):
    """The tokens that may come next."""

    def __contains__(self, token: int) -> bool: ...

    def ids(self, vocab: int) -> NDArray[np.int64]:
        """The allowed ids below `vocab`, ascending."""


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
        size = len(self.text)
        if size > MAX_GRAMMAR_CHARACTERS and self.kind != "tokens":
            raise UsageError(
                f"The grammar ({self.kind}) has {size} characters; at most {MAX_GRAMMAR_CHARACTERS} are taken.",
                "Make it smaller.",
            )
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

    @classmethod
    def tokens(cls, token_ids: Sequence[int]) -> Grammar:
        """These tokens and no others: their log-probabilities are those of a text that is known."""
        ids = _token_ids("tokens", token_ids, "a sequence of token ids")
        require("tokens", ids, "a sequence of token ids that is not empty", ok=bool(ids))
        return cls("tokens", json.dumps(ids))

    @property
    def token_ids(self) -> list[int]:
        """The tokens, if it is made of them."""
        return json.loads(self.text) if self.kind == "tokens" else []


# ---- sampling --------------------------------------------------------------------------------------------------------


GREEDY_TEMPERATURE = 1e-4
"""Temperatures at or below this are greedy by definition."""

_RANGES: Mapping[str, tuple[type, float, float]] = {
    "max_tokens": (int, 1, 2**63 - 1),
    "min_tokens": (int, 0, 2**63 - 1),
    "temperature": (float, 0, 100),
    "top_k": (int, 0, 2**63 - 1),
    "top_p": (float, 0, 1),
    "min_p": (float, 0, 1),
    "repetition_penalty": (float, 1e-3, 1e3),
    "presence_penalty": (float, -2, 2),
    "frequency_penalty": (float, -2, 2),
    "seed": (int, 0, 2**64 - 1),
    "logprobs": (int, 0, 20),
    "n": (int, 1, 64),
}
"""Type, minimum and maximum of each number: within these ranges no logits processor overflows, for any logits."""

_NOBODY_MEETS = 2**63 - 1
"""A maximum that a message need not spell."""


def require(name: str, value: object, rule: str, *, ok: bool) -> None:
    """UsageError that names the option and what it must be, unless `ok`."""
    if not ok:
        kind = "" if isinstance(value, str) else f" ({type(value).__name__})"
        raise UsageError(f"{name} = {value!r}{kind} is not possible.", f"{name} must be {rule}.")


def _require_number(name: str, value: object, kind: type, low: float, high: float) -> None:
    # a bool is not a number here, an int is a float, and NaN is in no range
    is_kind = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    noun = "an integer" if kind is int else "a number"
    rule = f"{noun} between {low} and {high}"
    if high >= _NOBODY_MEETS:
        rule = f"{noun}, at least {low}, that 64 bits hold"
    require(name, value, rule, ok=is_kind and low <= value <= high)  # type: ignore[operator]


class TokenBiases(dict[int, float]):
    """What is added to the logits of some token ids; it must not be changed."""

    @cached_property
    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The ids, and what is added to the logit of each; made once, since every row of every step asks for them."""
        import numpy as np  # which the commands that need no model do without

        size = len(self)
        return np.fromiter(self.keys(), np.int64, size), np.fromiter(self.values(), np.float64, size)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled. Defaults are greedy decoding of 256 tokens.

    `top_k` 0 and `top_p` 1.0 are off. `stop` is one string or several. `logit_bias` maps a token id to a value in
    [-100, 100] added to its logit. `logprobs` is the number of most likely alternatives reported per token (None:
    none), `n` the number of choices; `repetition_penalty` counts tokens of prompt and output, `presence_penalty` and
    `frequency_penalty` of the output. `prediction` is what the output is expected to be like, a text or token ids:
    drafters guess from it, and it changes no token. `grammar` is what the output must be like: only tokens that it
    allows are sampled, and the output ends when it is complete. Before `min_tokens` tokens nothing ends it: no token
    that would is sampled, and no stop string counts.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    prediction: str | Sequence[int] = ()
    grammar: Grammar | None = None
    min_tokens: int = 0

    def __post_init__(self) -> None:
        for name, limits in _RANGES.items():
            if name not in ("seed", "logprobs") or getattr(self, name) is not None:
                _require_number(name, getattr(self, name), *limits)
        require("top_p", self.top_p, "above 0", ok=self.top_p > 0)
        require("ignore_eos", self.ignore_eos, "True or False", ok=isinstance(self.ignore_eos, bool))
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        stop_ids = _token_ids("stop_token_ids", self.stop_token_ids, "a tuple of integers")
        object.__setattr__(self, "stop_token_ids", stop_ids)
        object.__setattr__(self, "logit_bias", _token_biases(self.logit_bias))
        if not isinstance(self.prediction, str):
            predicted = _token_ids("prediction", self.prediction, "a text or a sequence of token ids")
            object.__setattr__(self, "prediction", predicted)
        require("grammar", self.grammar, "a Grammar", ok=self.grammar is None or isinstance(self.grammar, Grammar))
        for name in ("ignore_eos", "min_tokens"):
            if self.grammar is not None and self.grammar.kind != "tokens" and getattr(self, name):
                raise UsageError(f"{name} and grammar exclude each other.", "A grammar says where the output ends.")
        within = f"at most max_tokens, {self.max_tokens}"
        require("min_tokens", self.min_tokens, within, ok=self.min_tokens <= self.max_tokens)

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def biases(self) -> TokenBiases:
        """`logit_bias` as it was checked."""
        return self.logit_bias  # type: ignore[return-value]

    @property
    def filters(self) -> tuple[int, float, float]:
        """top_k, top_p and min_p."""
        return self.top_k, float(self.top_p), float(self.min_p)

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the tokens before them."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def needs_history(self) -> bool:
        """Whether the distribution depends on the tokens before: by penalties, a grammar or min_tokens."""
        return self.grammar is not None or self.penalises or self.min_tokens > 0

    @property
    def filters_only(self) -> bool:
        """Whether nothing but temperature and filters makes the distribution another one than that of the logits."""
        return not self.needs_history and not self.logit_bias

    @property
    def plain(self) -> bool:
        """Whether only the temperature changes the logits: the token is argmax(z / T + g) over all token ids."""
        return self.grammar is None and self.temperature_only

    @property
    def temperature_only(self) -> bool:
        """Whether the token is argmax(z / T + g) over the ids that the grammar allows (all, without one)."""
        unfiltered = self.greedy or (self.top_k == 0 and self.top_p == 1 and self.min_p == 0)
        return unfiltered and not self.penalises and not self.logit_bias and not self.min_tokens


def chosen_params(params: object, default: SamplingParams) -> SamplingParams:
    """`params`, or where there are none the default. UsageError for what is none."""
    if params is not None and not isinstance(params, SamplingParams):
        raise UsageError(
            f"params of type {type(params).__name__} are not possible.", "Give one SamplingParams for all prompts."
        )
    return params or default


def _stop_strings(value: object) -> tuple[str, ...]:
    """One string is one stop sequence, as in OpenAI's API."""
    strings = (value,) if isinstance(value, str) else value
    wrong = [value]
    if isinstance(strings, tuple | list):
        wrong = [each for each in strings if type(each) is not str or not each]
    for each in wrong:
        require("stop", each, "a text that is not empty, or several", ok=False)
    return tuple(strings)  # type: ignore[arg-type]


def _token_ids(name: str, value: object, rule: str) -> tuple[int, ...]:
    try:
        return as_token_ids(value)
    except TypeError as error:
        raise UsageError(f"{name} is not possible: {error}.", f"{name} must be {rule}.") from None


def _token_biases(value: object) -> TokenBiases:
    """Keys become Python ints."""
    require("logit_bias", value, "a mapping of ids to addends", ok=isinstance(value, Mapping))
    biases = TokenBiases()
    for key, bias in value.items():  # type: ignore[attr-defined]
        try:
            token = as_integer(key)
        except TypeError as error:
            raise UsageError(
                f"logit_bias has the key {error}.", "logit_bias must be keyed by integer token ids."
            ) from None
        _require_number(f"logit_bias[{token}]", bias, float, -100, 100)
        biases[token] = bias
    return biases


# ---- requests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestSpeculation:
    """How one request speculates, whatever the policy would decide: `depth` guesses a step (None: the drafter's
    default; 0: none at all) by `drafter` ("": the engine's first one). The text stays the same."""

    drafter: str = ""
    depth: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.drafter, str):
            raise RequestError(f"drafter = {self.drafter!r} is no name of a drafter.", "Give the name as a string.")
        depth = self.depth
        if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or not 0 <= depth < 2**31):
            raise RequestError(f"depth = {depth!r} is not possible.", "Give a whole number, or None for the default.")

    def named(self, drafters: Iterable[str]) -> str:
        """The name of the drafter, whose engine has `drafters`; "" if it has none and none is named."""
        return self.drafter or next(iter(drafters), "")


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt in token ids (any sequence of integers; kept as a tuple) and how to answer it. `weight` is what its
    tokens count for, relative to those of other requests, when the policy decides which guesses are verified;
    `speculation` decides that in the policy's place. What is learned and cached of it serves requests of the same
    `tenant` only (see tenants.py). While a `streamed` one runs, someone waits for each of its tokens: steps take fewer
    rows of prompts, and less throughput. Its choices are numbered from `first_choice` on."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    weight: float = 1.0
    speculation: RequestSpeculation | None = None
    tenant: str = NO_TENANT
    streamed: bool = False
    first_choice: int = 0

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "prompt", as_token_ids(self.prompt))
        except TypeError as error:
            raise RequestError(
                f"Request {self.id!r} has no valid prompt: {error}.", "A prompt is a sequence of token ids."
            ) from None
        if not self.prompt:
            raise RequestError(f"Request {self.id!r} has an empty prompt.", "Give at least one token.")
        if not 0 < self.weight < math.inf:
            raise RequestError(f"Request {self.id!r} has weight {self.weight!r}.", "Weights are numbers above 0.")

    @property
    def choices(self) -> range:
        """The numbers of its choices."""
        return range(self.first_choice, self.first_choice + self.params.n)


# ---- speculation -----------------------------------------------------------------------------------------------------


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


class Span(NamedTuple):
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


class DraftPrices(NamedTuple):
    """What drafting must bring, in tokens of the sequence: `row` each guess that is verified, `call` a call of a
    drafter that takes time, `guess` each of its guesses beside it, and `keeping` each step in which it is shown the
    target's states, asked or not."""

    row: float = 0.0
    call: float = 0.0
    guess: float = 0.0
    keeping: float = 0.0


_NO_PRICES = DraftPrices()


class DraftRequest(NamedTuple):
    """A request for a draft of one sequence: up to `depth` guesses after position `position - 1`, a chain's length or
    the nodes of a tree, however deep it is.

    `position` is the absolute position of the first guess, that is, the number of known tokens. Noise for a guess at
    position i is `gumbel(seed, i, ids, choice)`; q is processed by `params` exactly as the target's p is.
    `needs_draft_probs`: the draft must hold full rows of q (the distribution-exact rules need them). The draft may end
    after a guess whose own survival estimate is below `min_survival`. `after`: guesses of another drafter that stand
    between the known tokens and `position`, for drafters that continue them (Drafter.continues). `prices`: for drafters
    that decide themselves what to compute. `computed`: positions whose keys and values the target has cached; the pass
    that verifies computes the others.
    """

    seq_id: str
    position: int
    depth: int
    params: SamplingParams
    seed: int
    choice: int = 0
    needs_draft_probs: bool = False
    min_survival: float = 0.0
    after: tuple[int, ...] = ()
    prices: DraftPrices = _NO_PRICES
    computed: int = 0


_CHAIN_PARENTS = [tuple(range(-1, size - 1)) for size in range(64)]  # of short chains, by their size


@dataclass(frozen=True, slots=True)
class Draft:
    """Guesses of one sequence: tokens and parents; a chain is the tree whose parent is always the previous node.

    `parents[i]` is the node before node i, -1 for the root (the last known token); parents precede their children.
    `scores` are the drafter's estimates of survival, in [0, 1], per node: the probability that the node and all nodes
    before it are right. `draft_probs` holds the distribution q each node was drawn from, float64 [nodes, vocabulary];
    None means that the guesses are deterministic (q is a point mass). `computed`: of a drafter that weighs prices, how
    many guesses it took time for.
    """

    seq_id: str
    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    drafter: str = ""
    draft_probs: NDArray[np.float64] | None = None
    computed: int | None = None

    @classmethod
    def chain(
        cls,
        seq_id: str,
        tokens: Sequence[int],
        *,
        drafter: str,
        scores: Sequence[float] = (),
        draft_probs: NDArray[np.float64] | None = None,
    ) -> Draft:
        return cls(seq_id, tuple(tokens), tuple(range(-1, len(tokens) - 1)), tuple(scores), drafter, draft_probs)

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
        kept = self.tokens[:size], self.parents[:size], self.scores[:size]
        return Draft(self.seq_id, *kept, self.drafter, probs, self.computed)


class DraftDecision(NamedTuple):
    """How one sequence drafts in a step: at most `depth` guesses (0: plain decoding) by `drafter` ("": the first one).

    A drafter may stop after a guess whose own survival estimate has fallen below `min_survival`. One that weighs prices
    is told `prices`.
    """

    depth: int
    drafter: str = ""
    min_survival: float = 0.0
    prices: DraftPrices = _NO_PRICES


Plan = Mapping[str, DraftDecision]
"""The draft decision of each sequence, by sequence id; a sequence that is absent decodes plainly."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One ragged pass, packed: every row of every span with its guesses. All arrays int32.

    Rows of a sequence are contiguous. `parents` holds the batch row that precedes a row on its path (-1 for the first
    row of its span: what precedes it is cached). A row at depth d of a tree sits at position start + d but is cached
    at its own slot; for a chain the two agree. Row j of a sequence is cached at entry (num_computed_tokens + j) //
    block_size of its block table. `logits_indices` lists the rows whose logits are computed.

    `state_uses` and `replays` are for recurrent layers. `state_uses`: per sequence the fields of StateUse (csrc/ops.h):
    the slot of its states; the slot that they begin with (-1: zeros); its known rows; how many rows of the last pass
    are replayed, its accepted guesses; two positions at which states are copied (-1: none); the slots that they are
    copied to. `replays`: the replayed rows, by their number in that pass, sequence after sequence. Without them a
    sequence has the slot of its place in the batch, and no guesses.
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
    state_uses: NDArray[np.int32] | None = None  # [sequences, 8]
    replays: NDArray[np.int32] | None = None  # [replayed rows, or more]

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def num_sequences(self) -> int:
        return len(self.num_computed_tokens)


class Verdict(NamedTuple):
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


class Outcome(NamedTuple):
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
    token included). `seed` reproduces the text. `drafter` names those that could guess: all of the engine's, unless the
    request says how it speculates.
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
    def mean_acceptance_length(self) -> float:
        """Tokens per round, the bonus token included (tau)."""
        return self.completion_tokens / self.rounds if self.rounds else 0.0


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What a step added to the output of one sequence: tokens, their text, and the drafter of each ("": the target
    itself).

    The last delta of a sequence has its `finish_reason` and carries its stats, and the `stop_string` that ended it, if
    one did; with "error", `error` says why, and `error_status` is the HTTP status of that cause (400: the request's
    own). `index` numbers the choices of a request.
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
    stop_string: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished choice of one request. `logprobs` has an item per token if the request asked for them; `error` says
    why a choice ended with finish_reason "error", and `error_status` is the HTTP status of that cause (400: the
    request's own); `stop_string` is the one that ended it, if one did."""

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
    stop_string: str = ""


DRAFT_STAGE = "draft"
POLICY_STAGE = "policy"
FORWARD_STAGE = "forward"
"""The stages of StepRecord.seconds that are the drafters', the policy's and the target's."""

GRAMMAR_DRAFTER = "grammar"
"""Who guesses the tokens that a grammar forces. They stand among a drafter's own in one draft."""

REQUESTED_STAGE = "requested drafts"
"""The drafters' in place of DRAFT_STAGE, as a policy sees it, where they also drafted what it did not plan."""


class StepRecord(NamedTuple):
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
