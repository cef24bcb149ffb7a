"""What one API key sees is the same whatever another one asked before: texts, guesses, counts, cached tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from serve.serving import CHAT, Running, chunks_of, running
from unit.every_drafter import every_drafter
from wager.constrain.compiler import GrammarCompiler
from wager.economics.surface import LatencySurface
from wager.loading import load
from wager.tenants import tenant_of_key
from wager.trace import Trace
from wager.types import Grammar, StepRecord

ANNA, BEN, OPERATOR = "anna-0123456789abcdef", "ben-0123456789abcdef", "operator-0123456789abcdef"
SECRET: Any = [{"role": "user", "content": "The patient is called Ada and the password is xyzzy. " * 4}]
PLAIN: dict[str, Any] = {"messages": SECRET, "max_tokens": 48, "ignore_eos": True, "temperature": 0, "seed": 7}
OTHER = {**PLAIN, "messages": [{"role": "user", "content": "zebra"}], "max_tokens": 4}
QUESTIONS: list[dict[str, Any]] = [
    PLAIN,
    {**PLAIN, "speculation_stats": True, "stream": True, "stream_options": {"include_usage": True}, "receipts": True},
    {**PLAIN, "speculation_stats": True, "logit_bias": {"198": 100}},  # every guess is wrong
    {**PLAIN, "speculation_stats": True, "temperature": 0.8, "n": 2, "logprobs": True, "receipts": True},
    {**PLAIN, "speculation_stats": True, "speculation": {"depth": 5}},
]
VARYING = {"id", "created", "prefill_s", "decode_s", "stage_seconds", "seed"}
"""Fields of times, and of ids that are drawn."""


class FixedPrices(LatencySurface):
    """What steps take is a fact of the machine, which all keys may know: here it is known and does not change."""

    learns = False  # type: ignore[assignment]

    def observe(self, record: StepRecord) -> None:
        return


@pytest.fixture(autouse=True)
def counting_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds count readings of the clock, so that a policy decides the same whenever it sees the same."""

    def trace() -> Trace:
        return Trace(clock=map(float, itertools.count()).__next__)

    monkeypatch.setattr(load, "Trace", trace)
    monkeypatch.setattr(load, "_latency", lambda *_: FixedPrices([1, 64], [6.0, 9.0]))


@contextmanager
def server_of_two(engine: dict[str, Any], **options: Any) -> Iterator[Running]:
    keys = {"api_keys": (ANNA, BEN), "operator_keys": (OPERATOR,)}
    fixed = {"depth": None, "max_context": 1024, "max_prefill_rows": 96}  # else rows follow seconds, as prices do
    with running({**fixed, **engine}, **{**keys, **options}) as server:
        yield server


def ask(server: Running, key: str, body: dict[str, Any]) -> Any:
    """What a caller sees of an answer, without what varies. What is learned of it is there for the next one."""
    answer = server.post(CHAT, body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    if (learned := server.llm.engine.learned) is not None:
        learned.seal()
    if not body.get("stream"):
        return without_varying(answer.json())
    return without_varying(chunks_of(answer.text))


def without_varying(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_varying(each) for name, each in value.items() if name not in VARYING}
    return [without_varying(each) for each in value] if isinstance(value, list) else value


def seen_by_ben(engine: dict[str, Any], *, after_anna: bool, **options: Any) -> list[Any]:
    questions = [{**body, "receipts": "receipts" in body and "verify" not in engine} for body in QUESTIONS]
    with TemporaryDirectory() as folder:
        engine = {**engine, "learn": folder} if engine.get("learn") else engine
        with server_of_two(engine, **options) as server:
            for body in questions * after_anna:
                ask(server, ANNA, body)
            ask(server, OPERATOR, OTHER)  # what a policy's last look at a step takes counts for the next one's time
            return [ask(server, BEN, body) for body in questions]


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return every_drafter("random:llama:tiny", tmp_path_factory.mktemp("drafters"))


LEARNING: dict[str, dict[str, Any]] = {
    "auto": {"drafter": "auto"},
    "suffix": {"drafter": "suffix"},
    "suffix, fixed depth": {"drafter": "suffix", "depth": 6, "policy": "fixed"},
    "suffix, threshold": {"drafter": "suffix", "policy": "threshold"},
    "suffix:tree": {"drafter": "suffix:tree"},
    "store": {"drafter": "store"},
    "store:tree": {"drafter": "store:tree"},
    "recycle": {"drafter": "recycle"},
    "recycle, fixed depth": {"drafter": "recycle", "depth": 6, "policy": "fixed"},
    "several": {"drafter": "suffix,recycle"},
    "merged": {"drafter": "ngram//suffix", "depth": 6},
    "an inner drafter": {"drafter": "layers:0+suffix", "depth": 4},
    "ranks of a draft model": {"drafter": "layers:tree:0", "depth": 6, "verify": "rejection"},
    "ranks of a head": {"drafter": "eagle3:tree", "depth": 6, "verify": "rejection"},
    "cached keys of a head": {"drafter": "eagle3", "depth": 4},
    "learned": {"drafter": "suffix", "depth": 6, "policy": "fixed", "learn": True, "learn_prompts": True},
    "learned, auto": {"drafter": "auto", "learn": True, "learn_prompts": True},
    "no prefix cache": {"drafter": "suffix", "prefix_cache": False},
}


@pytest.mark.parametrize("name", sorted(LEARNING, key=lambda name: name != "suffix, fixed depth"))
def test_a_key_sees_the_same_whatever_another_one_asked(name: str, drafters: dict[str, str]) -> None:
    engine = LEARNING[name] | {"drafter": drafters.get(str(LEARNING[name]["drafter"]), LEARNING[name]["drafter"])}
    assert seen_by_ben(engine, after_anna=True) == seen_by_ben(engine, after_anna=False)


@pytest.mark.parametrize("name", ["suffix, fixed depth", "auto", "recycle, fixed depth", "several", "learned"])
def test_keys_that_share_see_each_others_traces(name: str) -> None:
    """What the walls keep apart is there to be seen without them."""
    engine = LEARNING[name]
    shared = seen_by_ben(engine, after_anna=True, share_between_keys=True)
    alone = seen_by_ben(engine, after_anna=False, share_between_keys=True)
    assert shared != alone
    assert shared[0]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert shared[0]["choices"] == alone[0]["choices"]


@pytest.mark.parametrize("name", ["suffix, fixed depth", "recycle, fixed depth", "merged", "suffix:tree"])
def test_rejected_guesses_that_may_be_another_text_are_counted_and_not_shown(name: str) -> None:
    body = {**PLAIN, "speculation_stats": True, "stream": True, "logit_bias": {"198": 100}}

    def told(**options: Any) -> list[Any]:
        with server_of_two(LEARNING[name], **options) as server:
            ask(server, BEN, {**body, "logit_bias": {}})
            events = ask(server, BEN, body)
        return [each["speculation"] for event in events for each in event["choices"] if "speculation" in each]

    hidden, shown = told(), told(show_rejected=True)
    assert sum(each["rejected_tokens"] for each in hidden) > 0 == sum(len(each["rejected"]) for each in hidden)
    assert all(each["rejected_tokens"] == len(each["rejected"]) for each in shown)


def test_rejected_guesses_from_the_request_itself_are_shown() -> None:
    body = {**PLAIN, "speculation_stats": True, "stream": True, "speculation": {"drafter": "ngram", "depth": 5}}
    with server_of_two({"drafter": "ngram,suffix"}) as server:
        events = ask(server, BEN, body)
    told = [each["speculation"] for event in events for each in event["choices"] if "speculation" in each]
    assert 0 < sum(each["rejected_tokens"] for each in told) == sum(len(each["rejected"]) for each in told)


def test_a_grammar_that_another_key_uses_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes milliseconds that would be missing: they would tell who uses which schema."""
    compiled: list[str] = []

    def compile(self: GrammarCompiler, grammar: Grammar, *, inner: Any = GrammarCompiler._compile) -> Any:
        compiled.append(grammar.text)
        return inner(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "_compile", compile)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "the password is xyzzy"}}}
    body = {"messages": SECRET, "max_tokens": 4, "response_format": schema}
    with server_of_two({"drafter": "ngram"}) as server:
        counts = []
        for key in (ANNA, ANNA, BEN, BEN):
            ask(server, key, body)
            counts.append(len(compiled))
    assert counts == [1, 1, 2, 2]


def test_the_users_of_a_key_are_told_apart_if_that_is_asked_for() -> None:
    fields: list[tuple[str, dict[str, Any]]] = [
        ("user", {"user": "anna"}),
        ("metadata.team", {"metadata": {"team": "a", "user": "x"}}),
    ]
    for tenant_by, named in fields:
        with server_of_two({"drafter": "suffix", "depth": 6}, tenant_by=tenant_by) as server:
            first = ask(server, ANNA, {**PLAIN, **named})
            assert ask(server, BEN, {**PLAIN, **named}) == first, "a user of another key who has that name"
            for others in ({}, {"user": "ben", "metadata": {"team": "b"}}, {"user": 5, "metadata": {"team": ["a"]}}):
                assert ask(server, ANNA, {**PLAIN, **others}) == first
            as_list = {"user": "anna", "metadata": {"team": ["a"]}}
            as_text = {"user": "anna", "metadata": {"team": '["a"]'}}
            for others in (named, as_list, as_text):
                again = ask(server, ANNA, {**PLAIN, **others})
                assert again["choices"] == first["choices"]
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_what_a_key_asked_before_a_restart_is_guessed_for_it_alone(tmp_path: Path) -> None:
    engine = {"drafter": "suffix", "depth": 6, "policy": "fixed", "learn": str(tmp_path)}
    body = {**PLAIN, "speculation_stats": True}

    def rounds(key: str) -> int:
        with server_of_two(engine) as server:
            if (learned := server.llm.engine.learned) is not None:
                learned.corpus(tenant_of_key(key))
                learned.settle()
            return int(ask(server, key, body)["speculation"]["choices"][0]["rounds"])

    first = rounds(ANNA)
    assert rounds(BEN) == first
    assert rounds(ANNA) < 0.7 * first


def test_figures_of_all_keys_are_for_operators() -> None:
    with server_of_two({}) as server, server.client() as http:
        for path in ("/metrics", "/live"):
            for key, status in ((ANNA, 403), (OPERATOR, 200), ("unknown-0123456789abc", 401)):
                for spelled in (path, f"{path}%0A", f"{path}?x"):  # routes take a line's end behind a path
                    assert http.get(spelled, headers={"authorization": f"Bearer {key}"}).status_code == status
        assert "--operator-key-file" in http.get("/live", headers={"authorization": f"Bearer {ANNA}"}).text
        assert ask(server, OPERATOR, PLAIN)["choices"] == ask(server, ANNA, PLAIN)["choices"]
    for options in ({"api_keys": (ANNA,)}, {"api_keys": (ANNA, BEN), "share_between_keys": True}):
        with running({}, **options) as server, server.client() as http:
            assert http.get("/metrics", headers={"authorization": f"Bearer {ANNA}"}).status_code == 200


def test_keys_whose_requests_run_together_get_their_own_texts() -> None:
    """One policy decides for both while both run; texts, cached tokens and tables stay apart."""
    with server_of_two({"drafter": "suffix,recycle"}) as server:
        alone = {key: ask(server, key, {**PLAIN, "temperature": 0.8})["choices"] for key in (ANNA, BEN)}
        assert alone[ANNA] == alone[BEN]
        with ThreadPoolExecutor(8) as pool:
            bodies = [(key, {**PLAIN, "temperature": 0.8}) for key in (ANNA, BEN) * 8]
            answers = list(pool.map(lambda each: ask(server, *each), bodies))
        assert all(answer["choices"] == alone[ANNA] for answer in answers)
        server.llm.engine.check()
