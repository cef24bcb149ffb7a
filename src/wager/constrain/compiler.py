"""Grammars for one tokenizer, with llguidance: compiling them, and how far one sequence has come in one.

llguidance needs the bytes of every token, which of them are control tokens (these never stand for text), and how a text
is usually written in tokens. It is imported, and its view of the vocabulary built, with the first grammar
or by `GrammarCompiler.prepare`.

Its matcher goes forward by tokens and back again, so one of them serves all paths of a draft: it is moved to where a
question is asked. Answers depend on the tokens alone, never on what was asked before.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wager.constrain.schemas import ONE_LINE
from wager.errors import GrammarError, RequestError, UsageError
from wager.types import NO_TENANT, Grammar, Request

MAX_LEXER_STATES = 20_000
"""The most states of one grammar, each of 1 to 2 kB: they bound its memory. Other limits are llguidance's own: some
20 ms for a regular expression, 500,000 symbols."""

MAX_LEXER_FUEL = 2_000_000
"""The most for one mask, some 150 ms. What is known from earlier masks costs none, so it is ten times the library's
default: no grammar in use must reach it, since whether one does depends on what was asked before."""

MAX_COMPILE_S = 0.1
"""Processor seconds that compiling may take; grammars in use take milliseconds. Once in a while it is done again
between two steps (see LLGrammar.renew), for which all requests wait."""

_KEPT = 16  # grammars that are kept compiled, of all tenants together
_TRIED = 8  # tokens that may begin an output, each of which is tried when a grammar is compiled
_STACK_BYTES = 256 << 20  # of the thread that compiles: chains of rules are followed recursively


class GrammarTokenizer(Protocol):
    """What a compiler needs of a tokenizer. `encode_text` encodes a text within another one: no special tokens, and
    no space before it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> Sequence[int]: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def is_control(self, token_id: int, /) -> bool: ...

    def encode_text(self, text: str, /) -> list[int]: ...


class GrammarCompiler:
    """Compiles grammars for `tokenizer`. Several threads may use it; compiling releases the interpreter's lock.

    What is compiled, and the states that its lexer has met, serves the tenant that asked for it: how soon a grammar is
    ready would tell another one whether it is in use.
    """

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiled: OrderedDict[tuple[str, Grammar], LLGrammar] = OrderedDict()  # by tenant
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()

    def has_compiled(self, grammar: Grammar) -> bool:
        """Whether `compile` gives it back as it is."""
        if grammar.kind == "tokens":
            return grammar.compiled is not None
        return isinstance(grammar.compiled, LLGrammar) and grammar.compiled.compiler is self

    def compile(self, grammar: Grammar, *, tenant: str = NO_TENANT) -> Grammar:
        """The grammar with `compiled` set. RequestError with the reason if it cannot be compiled, allows no token to
        begin with, or is too large; UsageError where llguidance is not installed."""
        if self.has_compiled(grammar):
            return grammar
        if grammar.kind == "tokens":
            return replace(grammar, compiled=KnownTokens(grammar.token_ids))
        with self._lock:
            compiled = self._compiled.get((tenant, grammar))
        if compiled is None:
            compiled = self._compile(grammar)  # others need not wait for it
        with self._lock:
            self._compiled[tenant, grammar] = compiled
            self._compiled.move_to_end((tenant, grammar))
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return replace(grammar, compiled=compiled)

    def prepare(self) -> Any:
        """What the first grammar would wait for: llguidance's view of the vocabulary, which is made once. RequestError
        or UsageError where grammars are not possible."""
        with self._vocabulary_lock:
            return self._vocabulary

    @cached_property
    def _vocabulary(self) -> Any:
        tokenizer = self._tokenizer
        library = _library()
        if not tokenizer.eos_ids:
            raise RequestError("The model has no token that ends a text, which a grammar needs.", "Use another model.")
        wrapped = _WrappedTokenizer(tokenizer)
        wrapper = library.TokenizerWrapper(wrapped)
        eos = list(tokenizer.eos_ids)
        # in two calls, each of which holds the interpreter's lock for some 60 ms: other threads run between them
        tokens = library.LLTokenizer(wrapper, eos_token=eos, slices=[])
        vocabulary = tokens.with_slices(library.LLTokenizer.general_slices())
        wrapped.longest_first = vocabulary.greedy_tokenize
        return vocabulary

    def _compile(self, grammar: Grammar) -> LLGrammar:
        library = _library()
        vocabulary = self.prepare()
        limits = library.LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES, step_lexer_fuel=MAX_LEXER_FUEL, verbose_errors=False
        )
        seconds: list[float] = []

        def build() -> Any:
            begin = time.thread_time()
            source = _source(grammar, library.LLMatcher)
            matcher = library.LLMatcher(vocabulary, source, limits=limits, log_level=0)
            seconds.append(time.thread_time() - begin)
            return matcher

        try:
            started = LLGrammar(lambda: _with_large_stack(build), self._tokenizer.vocab_size, self)
        except ValueError as error:  # a text that the library cannot read
            raise _refused(grammar, str(error)) from error
        if started.matcher.is_error():
            raise _refused(grammar, started.matcher.get_error())
        if seconds[0] > MAX_COMPILE_S:
            raise _refused(grammar, f"compiling it took {seconds[0]:.2f} s, at most {MAX_COMPILE_S} s are given")
        try:
            self._check_beginning(started.start())
        except GrammarError as error:
            raise _refused(grammar, error.message.rstrip(".")) from error
        return started

    def _check_beginning(self, state: GrammarMatcher) -> None:
        """GrammarError if no token may begin the output, or a limit is reached behind the first ones, where these are
        few: an object of hundreds of optional properties is refused here."""
        state.allowed(())
        forced = state.forced(())
        mask = state.allowed(forced)
        tokens = [] if mask is None else mask.ids(self._tokenizer.vocab_size).tolist()
        for token in tokens if len(tokens) <= _TRIED else ():
            state.check([*forced, token])


def with_compiled_grammar(request: Request, compiler: GrammarCompiler | None) -> Request:
    """The request with its grammar, if it has one, compiled. RequestError as `compile`, and without a compiler."""
    grammar = request.params.grammar
    if grammar is None or (grammar.kind == "tokens" and grammar.compiled is not None):
        return request
    if compiler is None:
        raise RequestError("A grammar needs a tokenizer; this engine has none.", "Leave it out.")
    compiled = compiler.compile(grammar, tenant=request.tenant)
    return replace(request, params=replace(request.params, grammar=compiled))


class LLGrammar:
    """A compiled grammar; every sequence starts with a copy of `matcher`. Copies share the states of the lexer that one
    of them has met, and these are limited; `renew` begins with none."""

    def __init__(self, make: Callable[[], Any], vocab_size: int, compiler: GrammarCompiler | None = None) -> None:
        self._make = make
        self.vocab_size = vocab_size
        self.compiler = compiler
        self.matcher = make()

    def start(self) -> GrammarMatcher:
        return GrammarMatcher(self)

    def renew(self) -> None:
        """A matcher in place of one whose states, or those of its copies, were too many."""
        self.matcher = self._make()


class _WrappedTokenizer:
    """A tokenizer in the form that llguidance takes. `longest_first` encodes what the tokenizer would change."""

    bos_token_id = None
    longest_first: Callable[[str], list[int]] | None = None

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        ids = range(tokenizer.vocab_size)
        self.tokens = [tokenizer.token_bytes(token) for token in ids]
        self.special_token_ids = sorted({token for token in ids if tokenizer.is_control(token)} | {*tokenizer.eos_ids})
        self.eos_token_id = tokenizer.eos_ids[0]
        self._encode = tokenizer.encode_text

    def __call__(self, text: str) -> list[int]:
        ids = self._encode(text)
        exact = b"".join([self.tokens[token] for token in ids]) == text.encode()
        return ids if exact or self.longest_first is None else self.longest_first(text)


def _source(grammar: Grammar, matcher: Any) -> str:
    """The grammar as llguidance takes it."""
    if grammar.kind == "json_schema":
        return matcher.grammar_from_json_schema(grammar.text, None if grammar.any_whitespace else ONE_LINE)  # type: ignore[no-any-return]
    if grammar.kind == "regex":
        return matcher.grammar_from_regex(grammar.text)  # type: ignore[no-any-return]
    if grammar.kind == "choice":
        texts = [json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.text)]
        return matcher.grammar_from_lark("start: " + " | ".join(texts))  # type: ignore[no-any-return]
    return matcher.grammar_from_lark(_as_lark(grammar.text))  # type: ignore[no-any-return]


_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


def _as_lark(text: str) -> str:
    """A grammar in llama.cpp's form (root ::= ...) in that of llguidance. ValueError if it cannot be read."""
    if not _GBNF_RULE.search(text):
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # its own, which is not exported, and those of the recursion
        raise ValueError(
            f"it cannot be read: {str(error).splitlines()[0][:200] if str(error) else 'too deep'}"
        ) from None


_LISTING = re.compile(r"\s*(\d+ \||\^)")
"""Lines in which llguidance shows the text of a grammar, which may be one that the caller has not written."""


_REFUSALS = (
    (re.compile(r"Unimplemented keys: \[(.*?)\]"), r"it has keywords that cannot be enforced: \1"),
    (re.compile(r"oneOf constraints are not supported\. Enable .*"), "alternatives of its oneOf may overlap"),
    (re.compile(r"regex parse error:.*error: "), "its expression is not possible: "),
)
"""What llguidance means, without its options."""

_PLACE = re.compile(r"at (\d+)\(\d+\): failed to compile JSON schema")
_TOOL = re.compile(r'tool_\d+: %json .*?"name": \{"const": ("[^"]+")')


def _refused(grammar: Grammar, reason: str) -> RequestError:
    lines = [line.strip() for line in reason.splitlines() if line.strip() and not _LISTING.match(line)]
    name = {"json_schema": "JSON schema", "regex": "regular expression", "choice": "choice"}
    text = " ".join(lines)
    for words, plain in _REFUSALS:
        text = words.sub(plain, text)
    if place := _PLACE.match(text):
        tool = _TOOL.match(grammar.text.split("\n")[int(place[1]) - 1])
        text = f"{f'the parameters of {tool[1]}' if tool else place[0]}{text[place.end() :]}"
    return RequestError(
        f"The {name.get(grammar.kind, 'grammar')} cannot be used: {text[:400]}.",
        "Keywords and syntax that cannot be enforced are refused; see docs/grammars.md.",
        field="grammar",
    )


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UsageError(
            f"Grammars need llguidance, which cannot be imported ({error}).", "Install it: pip install llguidance."
        ) from error
    return llguidance


_stack_lock = threading.Lock()


def _with_large_stack(call: Callable[[], Any]) -> Any:
    """What `call` returns, or raises, in a thread whose stack is large enough for any grammar of the greatest size."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="wager-grammar")
    with _stack_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            result = pool.submit(call)  # its thread starts here
        finally:
            threading.stack_size(before)
    with pool:
        return result.result()


# ---- tokens that are known -------------------------------------------------------------------------------------------


class KnownTokens:
    """The grammar of one output, `tokens`. It needs no library."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tuple(tokens)

    def start(self) -> KnownState:
        return KnownState(self.tokens)


class OneToken:
    """A single token that may come next, or none."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def __contains__(self, token: int) -> bool:
        return token in self._tokens

    def ids(self, vocab: int) -> NDArray[np.int64]:
        return np.array([token for token in self._tokens if token < vocab], np.int64)


@dataclass
class KnownState:
    """A `GrammarState`: how many of `tokens` the output has."""

    tokens: tuple[int, ...]
    count: int = 0

    def append(self, tokens: Sequence[int], /) -> None:
        self.count += len(tokens)

    def allowed(self, path: Sequence[int], /) -> OneToken | None:
        at = self.count + len(path)
        return OneToken(self.tokens[at : at + 1]) if tuple(path) == self.tokens[self.count : at] else None

    def forced(self, path: Sequence[int], /) -> list[int]:
        at = self.count + len(path)
        return list(self.tokens[at:]) if tuple(path) == self.tokens[self.count : at] else []

    def copy(self) -> KnownState:
        return replace(self)

    def complete(self) -> bool:
        return self.count >= len(self.tokens)


# ---- matching --------------------------------------------------------------------------------------------------------


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
        """The allowed ids below `vocab`, ascending."""
        bits = np.unpackbits(np.frombuffer(self._bits, np.uint8), count=vocab, bitorder="little")
        return np.flatnonzero(bits)


class GrammarMatcher:
    """A `GrammarState`, whose methods are documented there: starts from a copy of the matcher of `grammar`.

    Copies share what the lexer has met, and it may get too much for its limits because of others. A question that fails
    is asked again of a new matcher that has met nothing but the tokens before it: so whether it fails depends on
    these alone. (What succeeds along with others succeeds alone, where less is met.)
    """

    def __init__(self, grammar: LLGrammar) -> None:
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
        made = copy(self)
        made._matcher = self._matcher.deep_copy()
        made._output = self._output.copy()
        made._ahead = self._ahead.copy()
        made._masks = self._masks.copy()
        return made

    def allowed(self, path: Sequence[int], /) -> TokenMask | None:
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
        if self._left is not None or not self._move(path) or self._matcher.is_stopped():
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return [] if self._matcher.is_error() else tokens

    def check(self, path: Sequence[int], /) -> None:
        """GrammarError if a limit is reached in the tokens of a path that is allowed."""
        if not self._move(path) and self._matcher.is_error():
            raise self._failure()

    def complete(self) -> bool:
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
        ahead = self._ahead
        same = 0
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
        self._matcher = self._grammar.matcher.deep_copy()
        self._ahead = []
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
