"""Outputs that follow a grammar: with and without speculation, alone and in a crowd, they are the same tokens."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grammar_toys as toys
import numpy as np
import pytest
from faulty_drafters import OutsideVocabularyDrafter
from grammar_toys import COMPILER, EOS, LAW, VOCAB, plain_text, text_of

from significance import chi_squared
from wager.constrain import compiler
from wager.constrain.compiler import GrammarCompiler
from wager.draft.base import Drafter
from wager.draft.combined import MergedDrafter
from wager.draft.lookup import LookupDrafter, LookupSources
from wager.draft.model import DraftModel
from wager.draft.ngram import NgramDrafter
from wager.economics.policy.heuristics import FixedDepth
from wager.errors import GrammarError, RequestError, UsageError
from wager.testing import (
    AdversaryDrafter,
    RandomTreeDrafter,
    ToyDistribution,
    ToyOracle,
    ToyTarget,
)
from wager.testing.toy import toy_engine
from wager.types import Completion, Grammar, Request, SamplingParams, VerifyRule

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "b": {"type": "boolean"}, "n": {"enum": [1, 20, 314]}},
    "required": ["name", "b", "n"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar.json_schema(SCHEMA),
    "regex": Grammar.regex("[abc]{2,6}(true|1+)"),
    "choice": Grammar.choice(["true", "ab", "abc", "names", "aaab"]),
    "lark": Grammar.lark('start: "[" item ("," item)* "]"\nitem: "a" | "b" start'),
}
PARAMS = {
    "greedy": SamplingParams(max_tokens=60, seed=1),
    "sampled": SamplingParams(max_tokens=60, temperature=0.9, seed=2),
    "truncated": SamplingParams(max_tokens=60, temperature=1.3, top_k=8, top_p=0.9, min_p=0.02, seed=3),
    "penalised": SamplingParams(
        max_tokens=60,
        temperature=0.7,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        logit_bias={5: 2.0, 7: -9.0},
        seed=4,
    ),
    "biased-greedy": SamplingParams(max_tokens=60, frequency_penalty=1.0, logit_bias={EOS: 3.0}, seed=5),
    "short": SamplingParams(max_tokens=5, temperature=1.0, seed=6),
}
NEAR = replace(LAW, drift=0.3, salt=4)


def model(**options: Any) -> DraftModel:
    return DraftModel(ToyTarget(NEAR, num_blocks=60, max_rows=40), **options)


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "ngram": NgramDrafter,
    "suffix:tree": lambda: LookupDrafter("suffix:tree", LookupSources(4, shared_tokens=200), trees=True),
    "adversary": lambda: AdversaryDrafter(VOCAB, oracle=ToyOracle(LAW)),
    "random-tree": lambda: RandomTreeDrafter(VOCAB, oracle=ToyOracle(LAW)),
    "outside": lambda: OutsideVocabularyDrafter(VOCAB),
    "model": model,
    "model:tree": lambda: model(trees=True),
    "merged": lambda: MergedDrafter([NgramDrafter(), model()], vocab=VOCAB),
}
SETTINGS = {
    "roomy": {"num_blocks": 256, "max_rows": 128},
    "narrow": {"num_blocks": 8, "max_rows": 9, "max_sequences": 3},
}


def requests(*, unconstrained: bool = True) -> list[Request]:
    shared = tuple(range(4, 36))
    made = []
    for (name, params), (kind, grammar) in itertools.product(PARAMS.items(), GRAMMARS.items()):
        for i, prompt in enumerate([(*shared, 5), (*shared, 6, 7)]):
            seed = (params.seed or 0) + 100 * i
            made.append(Request(f"{name}-{kind}-{i}", prompt, replace(params, seed=seed, grammar=grammar)))
    free = [Request(f"free-{i}", (*shared, i), SamplingParams(max_tokens=20, seed=i)) for i in range(4)]
    return made + free if unconstrained else made


def ids(completions: list[Completion]) -> dict[str, tuple[int, ...]]:
    return {c.request_id: c.token_ids for c in completions}


@pytest.fixture(scope="module")
def expected() -> Callable[[Request], tuple[int, ...]]:
    engine = toy_engine(LAW, depth=0)
    free = ids(engine.generate([r for r in requests() if r.params.grammar is None]))
    known: dict[str, tuple[int, ...]] = {}

    def text(request: Request) -> tuple[int, ...]:
        if request.params.grammar is None:
            return free[request.id]
        if request.id not in known:
            known[request.id] = plain_text(request)
        return known[request.id]

    return text


def fits(kind: str, text: str) -> bool:
    if kind == "schema":
        value = json.loads(text)
        name = value["name"]
        return (
            list(value) == ["name", "b", "n"]
            and len(name) <= 4
            and value["b"] in (True, False)
            and value["n"] in (1, 20, 314)
        )
    if kind == "lark":
        return bool(re.fullmatch(r"\[([ab,\[\]])*\]", text)) and text.count("[") == text.count("]")
    pattern = "[abc]{2,6}(true|1+)" if kind == "regex" else "true|ab|abc|names|aaab"
    return re.fullmatch(pattern, text) is not None


def test_what_is_complete_fits_its_grammar(expected: Callable[[Request], tuple[int, ...]]) -> None:
    complete = 0
    for request in requests(unconstrained=False):
        out = expected(request)
        if len(out) < request.params.max_tokens:
            complete += 1
            assert fits(request.id.split("-")[-2], text_of(out)), text_of(out)
    assert complete > 30


@pytest.mark.parametrize(
    ("drafter", "setting", "every"),
    [("merged", "narrow", 2), *((name, "narrow", 1) for name in DRAFTERS), ("random-tree", "roomy", 1)],
)
def test_guesses_change_no_token(
    drafter: str, setting: str, every: int, expected: Callable[[Request], tuple[int, ...]]
) -> None:
    asked = requests()[::every]
    wanted = {request.id: expected(request) for request in asked}
    engine = toy_engine(LAW, drafter=DRAFTERS[drafter](), depth=6, grammars=COMPILER, **SETTINGS[setting])
    completions = engine.generate(asked)
    assert ids(completions) == wanted
    assert {c.finish_reason for c in completions} <= {"stop", "length"}
    if setting == "narrow" and drafter != "none":
        assert sum(c.stats.preemptions for c in completions) > 0
    again = engine.generate(asked)  # warm: prefixes are cached
    assert ids(again) == wanted


def test_choices_have_their_own_noise_and_state() -> None:
    params = replace(PARAMS["sampled"], grammar=GRAMMARS["schema"], n=4)
    request = Request("many", (1, 2, 4), params)
    engine = toy_engine(LAW, drafter=NgramDrafter(), grammars=COMPILER)
    texts = [completion.token_ids for completion in engine.generate([request])]
    assert texts == [plain_text(request, choice) for choice in range(4)]
    assert len(set(texts)) > 1


# ---- forced tokens, forbidden guesses ---------------------------------------------------------------------------


def test_forced_tokens_are_guessed_and_always_right() -> None:
    request = Request("r", (1, 2, 4), replace(PARAMS["greedy"], grammar=GRAMMARS["schema"]))
    slow = toy_engine(LAW, depth=0, grammars=COMPILER).generate([request])[0]
    quick = toy_engine(LAW, drafter=NgramDrafter(), depth=8, grammars=COMPILER).generate([request])[0]
    assert quick.token_ids == slow.token_ids
    assert slow.drafted_by.count("grammar") == 0 and quick.drafted_by.count("grammar") >= 4
    assert quick.stats.rounds < slow.stats.rounds
    assert quick.stats.accepted == quick.stats.drafted


def test_forced_tokens_of_many_choices_leave_a_neighbours_tokens_their_time() -> None:
    """As guesses that a request asks for do: see test_request_speculation.py."""
    sizes = {"depth": 8, "max_rows": 256, "max_prefill_rows": 20}
    engine = toy_engine(LAW, drafter=NgramDrafter(), policy=FixedDepth(0), grammars=COMPILER, **sizes)
    drafted: list[int] = []
    engine.on_step = lambda record: drafted.append(record.drafted)
    params = SamplingParams(max_tokens=200, n=7, seed=1, grammar=Grammar.regex("(abc){60}"))
    engine.add(Request("many", (1, 2, 4), params, streamed=True))
    for _ in range(3):
        engine.step()
    assert drafted[-1] > 40
    engine.add(Request("stream", (1, 2), SamplingParams(max_tokens=200, ignore_eos=True), streamed=True))
    engine.step()
    drafted.clear()
    for _ in range(3):
        engine.step()
    assert 0 < max(drafted) <= 20


# ---- the distribution --------------------------------------------------------------------------------------------


MARKOV = ToyDistribution(vocab=VOCAB, order=1, sharpness=3.0, memory=0.0, eos=EOS)
TERNARY = Grammar.regex("[abc]([abc]([abc])?)?")


def outputs_of(grammar: Grammar, temperature: float) -> dict[str, float]:
    """The probability of every text, enumerated: p of the allowed tokens, renormalised."""
    found: dict[str, float] = {}
    open_paths: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while open_paths:
        out, mass = open_paths.pop()
        ids = toys.allowed_ids(grammar, out)
        z = MARKOV([5, *out]).astype(np.float64)[ids] / temperature
        p = np.exp(z - z.max())
        p /= p.sum()
        for token, share in zip(ids.tolist(), p.tolist(), strict=True):
            state = COMPILER.compile(grammar).compiled.start()  # type: ignore[union-attr]
            state.append([*out, token])
            if token == EOS or state.complete():
                text = text_of((*out, token))
                found[text] = found.get(text, 0.0) + mass * share
            else:
                open_paths.append(((*out, token), mass * share))
    return found


@pytest.mark.parametrize(
    ("rule", "drafter", "count"),
    [
        ("rejection", "model", 100),  # nothing else of the default set has grammars under these rules
        *itertools.product(("match", "rejection", "block", "traversal"), ("none", "model", "adversary"), [500]),
    ],
)
def test_the_distribution_is_that_of_the_allowed_tokens(rule: VerifyRule, drafter: str, count: int) -> None:
    """Also where a rule takes guesses as they were drawn."""
    shares = outputs_of(TERNARY, 1.0)
    assert abs(sum(shares.values()) - 1) < 1e-9 and len(shares) > 20
    near = ToyTarget(replace(MARKOV, drift=0.8, salt=2), num_blocks=60, max_rows=60)
    made = {"none": None, "model": DraftModel(near, vocab=VOCAB), "adversary": AdversaryDrafter(VOCAB)}[drafter]
    engine = toy_engine(MARKOV, drafter=made, depth=3, rule=rule, grammars=COMPILER, num_blocks=256)
    params = SamplingParams(temperature=1.0, grammar=TERNARY, max_tokens=8)
    drawn = engine.generate([Request(f"r{i}", (5,), replace(params, seed=i)) for i in range(count)])
    seen: dict[str, int] = {}
    for completion in drawn:
        text = text_of(completion.token_ids)
        seen[text] = seen.get(text, 0) + 1
    assert set(seen) <= set(shares)
    common = [text for text, p in shares.items() if p * count >= 5]
    observed = [seen.get(text, 0) for text in common]
    expected = [shares[text] * count for text in common]
    rest = count - sum(observed)
    pairs = [*zip(observed, expected, strict=True), (rest, count - sum(expected))]
    assert chi_squared(sum((seen - e) ** 2 / e for seen, e in pairs), len(pairs) - 1) > 1e-4


# ---- refusals and ends -------------------------------------------------------------------------------------------

OPTIONAL = {f"a{number}": {"type": "boolean"} for number in range(600)}
"""More properties than the parser takes alternatives, unless others are required."""


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.json_schema({"type": "foo"}), "Invalid type"),
        (Grammar.json_schema({"type": "object", "not": {}}), "cannot be enforced"),
        (Grammar.json_schema({"enum": []}), "Unsatisfiable"),
        (Grammar.json_schema({"$ref": "file:///etc/passwd"}), "not present"),
        (Grammar.json_schema({"$ref": "#"}), "no text fits it; a rule or .ref that leads back to itself has no end"),
        (Grammar.json_schema({"properties": OPTIONAL, "type": "object"}), "too many alternatives .* optional"),
        (Grammar.regex("(a"), "unclosed group"),
        (Grammar.regex("a(?=b)"), "look-around"),
        (Grammar.lark("start: b"), "unknown name"),
        (Grammar.lark('item: "a"'), "no start rule"),
        (Grammar.lark("start: a\na: b\nb: a"), "no text fits it"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(grammar: Grammar, reason: str) -> None:
    engine = toy_engine(LAW, grammars=COMPILER)
    with pytest.raises(RequestError, match=reason):
        engine.add(Request("r", (1,), SamplingParams(grammar=grammar)))
    assert not engine.busy
    engine.add(Request("r", (1,), SamplingParams(grammar=GRAMMARS["choice"])))  # the id is free, the compiler works


def test_values_that_are_no_grammar_are_refused() -> None:
    for make, words in (
        (lambda: Grammar.json_schema("{"), "not valid JSON"),
        (lambda: Grammar.json_schema("[1]"), "object"),
        (lambda: Grammar.json_schema({"a": {1, 2}}), "written as JSON"),  # type: ignore[dict-item]
        (lambda: Grammar.regex(""), "needs a text"),
        (lambda: Grammar.choice([]), "choice needs"),
        (lambda: Grammar.choice("abc"), "choice needs"),
        (lambda: Grammar.lark("start: " + "x" * 70_000), "characters"),
        (lambda: Grammar("yaml", "a"), "Unknown kind"),  # type: ignore[arg-type]
        (lambda: Grammar("regex", "a", any_whitespace=True), "any_whitespace"),
        (lambda: SamplingParams(grammar="a*"), "grammar"),  # type: ignore[arg-type]
        (lambda: SamplingParams(grammar=GRAMMARS["regex"], ignore_eos=True), "exclude"),
    ):
        with pytest.raises(UsageError, match=words):
            make()  # type: ignore[no-untyped-call]


def test_an_engine_without_a_tokenizer_refuses_grammars() -> None:
    with pytest.raises(RequestError, match="needs a tokenizer"):
        toy_engine(LAW).add(Request("r", (1,), SamplingParams(grammar=GRAMMARS["choice"])))


def test_a_grammar_that_cannot_go_on_ends_its_request_with_an_error_and_no_other() -> None:
    """The control token is all that may follow a, and q follows what no token of the vocabulary can write."""
    dead = Request("dead", (1, 2), SamplingParams(max_tokens=20, grammar=Grammar.lark('start: "a" /[q]/ "b"')))
    alive = Request("alive", (1, 2, 4), replace(PARAMS["sampled"], grammar=GRAMMARS["schema"]))
    for drafter in (None, NgramDrafter(), model()):
        engine = toy_engine(LAW, drafter=drafter, grammars=COMPILER)
        first, second = engine.generate([dead, alive])
        assert (first.finish_reason, text_of(first.token_ids)) == ("error", "a")
        assert "grammar" in first.error
        assert second.token_ids == plain_text(alive)
        engine.check()


def test_a_limit_that_is_reached_later_is_told_at_the_end_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the first bracket it is not known yet."""
    monkeypatch.setattr("wager.constrain.compiler.MAX_COMPILE_S", 60.0)  # not what is tested, on a busy machine neither
    wide = {"type": "object", "properties": OPTIONAL}
    schema = {"type": "array", "items": {"type": "array", "items": wide}}
    state = COMPILER.compile(Grammar.json_schema(schema)).compiled.start()  # type: ignore[union-attr]
    state.append(toys.ToyTokenizer().encode_text("[[{"))
    with pytest.raises(GrammarError, match="too many alternatives at one place") as caught:
        state.allowed(())
    assert "Simplify" in caught.value.hint


@pytest.mark.slow
def test_what_a_limit_stops_depends_on_the_output_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences share what the lexer has met, and guesses make it meet more; neither must end a sequence."""
    monkeypatch.setattr(compiler, "MAX_LEXER_STATES", 60)
    grammar = Grammar.regex("[ab]*a[ab]{6}(c[ab]*)?")
    made = [
        Request(f"r{seed}", (1, 2, 4), SamplingParams(max_tokens=24, temperature=2.0, seed=seed, grammar=grammar))
        for seed in range(10)
    ]
    expected = []
    for request in made:
        monkeypatch.setattr(toys, "COMPILER", GrammarCompiler(toys.ToyTokenizer()))  # nothing was met before
        expected.append(plain_text(request))
    fresh = GrammarCompiler(toys.ToyTokenizer())
    seen: list[list[str]] = []
    for drafter in (None, model(), NgramDrafter(), RandomTreeDrafter(VOCAB)):
        engine = toy_engine(LAW, drafter=drafter, depth=6, grammars=fresh)
        completions = engine.generate(made)
        assert [c.token_ids for c in completions] == expected
        seen.append([c.finish_reason for c in completions])
    assert all(each == seen[0] for each in seen) and "stop" in seen[0]


def test_hostile_grammars_take_bounded_time_and_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_COMPILE_S", 10.0)  # of the chain; it takes 0.1 s on a slow processor
    chain = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4500)) + '\nr4500: "a"'
    assert COMPILER.compile(Grammar.lark(chain)).compiled is not None
    monkeypatch.undo()
    for text in ("(" * 30_000, "[" * 30_000):
        with pytest.raises(RequestError, match="regular expression"):
            COMPILER.compile(Grammar.regex(text))
    with pytest.raises(RequestError, match="too large"):
        COMPILER.compile(
            Grammar.json_schema(
                {"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(6)]} for i in range(8)]}
            )
        )
