"""Measurements, reports and the comparison of texts, on toy engines whose answers are known."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import pytest

from wager.bench import measure
from wager.bench.quality import compare_logits, fixed_text, windows
from wager.cli import prove
from wager.prompts import Prompt
from wager.testing import RandomTreeDrafter, ToyDistribution
from wager.testing.toy import toy_engine
from wager.types import Completion, Request, SamplingParams, Stats, StepRecord

TEXT = ToyDistribution(vocab=17)


# ---- measuring ----------------------------------------------------------------------------------------------------


class Scripted:
    """Answers every request in the given seconds, and records the calls in order."""

    def __init__(self, name: str, seconds: list[float], journal: list[str]) -> None:
        self.name, self.seconds, self.journal = name, seconds, journal

    def generate(self, requests, *, concurrency=None, on_output=None):  # type: ignore[no-untyped-def]
        self.journal.append(f"{self.name}:{','.join(r.id for r in requests)}")
        answers = []
        for request in requests:
            took = self.seconds.pop(0)
            stats = Stats(
                prompt_tokens=3, completion_tokens=4, seed=0, prefill_s=0.5, decode_s=took, rounds=2, drafter=self.name
            )
            answers.append(Completion(request.id, 0, (1, 2, 3, 4), "text", "length", stats))
        return answers

    def forget_requests(self) -> None:
        self.journal.append(f"{self.name} forgets")


REQUESTS = [Request("p", (1, 2)), Request("q", (1, 2, 3))]


def test_engines_take_turns_and_times_are_medians() -> None:
    journal: list[str] = []
    fast = Scripted("fast", [9.0, 1.0, 2.0, 5.0, 2.0, 3.0, 2.0], journal)
    plain = Scripted("plain", [9.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0], journal)
    ticks = iter(range(1000))
    records = measure.measure({"fast": fast, "plain": plain}, REQUESTS, repeats=3, clock=lambda: float(next(ticks)))
    assert journal[:2] == ["fast:p", "plain:p"]  # untimed
    assert journal[2:4] == journal[8:10] == ["fast forgets", "plain forgets"]
    assert journal[4:8] == ["fast:p", "plain:p", "plain:q", "fast:q"]
    assert journal[10:14] == ["plain:p", "fast:p", "fast:q", "plain:q"]
    prompts = [Prompt("p", "qa", "?"), Prompt("q", "qa", "?")]
    assert [row["decode_s"] for row in measure.rows(prompts, records["fast"])] == [3.0, 2.0]
    assert records["fast"].walls == [2.0, 2.0, 2.0]
    assert records["fast"].wall_s == 2.0
    together: list[str] = []
    measure.measure({"fast": Scripted("fast", [1.0] * 3, together)}, REQUESTS, concurrency=2)
    assert together == ["fast:p", "fast forgets", "fast:p,q"]


def test_rows_summary_and_comparison() -> None:
    prompts = [Prompt("p", "qa", "?"), Prompt(7, "rag", "!")]
    fast = measure.measure({"f": Scripted("f", [9.0, 1.0, 4.0], [])}, REQUESTS)["f"]
    plain = measure.measure({"p": Scripted("p", [9.0, 2.0, 2.0], [])}, REQUESTS)["p"]
    rows, plain_rows = measure.rows(prompts, fast), measure.rows(prompts, plain)
    assert [row["id"] for row in rows] == ["p", 7]
    summary = measure.summary(rows, wall_s=10.0)
    assert summary["decode_tok_s"] == 6 / 5  # the first token of each answer is not decoded in these seconds
    assert summary["e2e_tok_s"] == 8 / 10
    assert summary["mean_acceptance_length"] == 2
    assert summary["per_category"]["qa"]["e2e_tok_s"] == 4 / 1.5
    plain_rows[1]["token_ids"] = [1, 2, 3, 5]
    ratios = measure.compare(plain_rows, rows, plain_wall_s=30.0, wall_s=10.0)
    assert (ratios["decode_speedup"], ratios["e2e_speedup"]) == (4 / 5, 3.0)
    assert (ratios["median_decode_speedup"], ratios["slower"], ratios["differing"]) == (1.25, 1, 1)
    assert ratios["per_category"]["qa"]["decode_speedup"] == 2
    assert [row["same"] for row in ratios["rows"]] == [True, False]
    instant = [{**row, "decode_s": 0.0} for row in rows]  # answers of one token have no decoding speed
    assert measure.summary(instant, wall_s=1.0)["decode_tok_s"] is None
    assert measure.compare(instant, instant, plain_wall_s=1.0, wall_s=1.0)["median_decode_speedup"] is None


# ---- comparison of token ids ------------------------------------------------------------------------------------

COMMON = tuple(range(1, 17)) * 2
PARAMS = SamplingParams(max_tokens=24, temperature=0.9, seed=5)
PROMPTS = [Request(f"r{i}", (*COMMON, i % 7, i), PARAMS) for i in range(8)]


def answers(engine: Any, condition: prove.Condition) -> dict[str, Completion]:
    return prove.answers(engine, PROMPTS, condition, on_delta=lambda delta: None)


def test_conditions_occur_and_change_no_token() -> None:
    plain = answers(toy_engine(TEXT, prefix_cache=False), prove.ALONE)
    engine = toy_engine(TEXT, drafter=RandomTreeDrafter(TEXT.vocab))
    outcomes = [
        prove.compare_answers(plain, answers(engine, c), mode="sampled", drafter="tree", condition=c)
        for c in list(prove.conditions(8).values())[1:]
    ]
    engine.check()
    assert [outcome.differing for outcome in outcomes] == [0, 0, 0]
    assert [outcome.tokens for outcome in outcomes] == [24 * 8] * 3
    assert outcomes[0].preemptions >= 8
    assert outcomes[1].preemptions == outcomes[2].preemptions == 0
    assert min(outcome.prefix_hit_tokens for outcome in outcomes[1:]) >= 8 * 32
    assert all(outcome.drafted > 0 for outcome in outcomes)


def answer(*tokens: int, error: str = "") -> Completion:
    stats = Stats(prompt_tokens=1, completion_tokens=len(tokens), seed=0)
    return Completion("r", 0, tokens, "", "error" if error else "length", stats, error=error)


def test_differences_are_counted_and_placed() -> None:
    for tried, count, place in (
        (answer(1, 2, 3), 0, None),
        (answer(1, 9, 8), 2, (1, 2, 9)),
        (answer(1, 2), 1, (2, 3, None)),
        (answer(1, 2, 3, 4), 1, (3, None, 4)),
        (answer(1, 2, 3, error="broke"), 1, (3, None, None)),
    ):
        outcome = prove.compare_answers(
            {"r": answer(1, 2, 3)}, {"r": tried}, mode="m", drafter="d", condition=prove.ALONE
        )
        assert outcome.differing == count
        first = outcome.first
        assert (first and (first.position, first.plain, first.speculative)) == place


def test_decode_steps_are_those_at_full_concurrency_without_a_prompt() -> None:
    steps = measure.DecodeSteps(2)
    assert steps.rate is None
    for rows, sequences, drafted, emitted in ((6, 2, 4, 3), (2, 2, 0, 2), (40, 2, 4, 1), (1, 1, 0, 1), (9, 3, 6, 5)):
        steps.add(StepRecord(rows, sequences, drafted, 0, emitted, {"forward": 0.5, "draft": 0.125}))
    assert steps.as_dict() == {"sequences": 2, "steps": 2, "tokens": 5, "seconds": 1.25, "tok_s": 4.0}


# ---- quality: KL, agreement and perplexity, against their definitions on small distributions -------------------------


def table(seed: int, vocab: int = 7) -> np.ndarray:
    """Logits after each token."""
    return np.random.default_rng(seed).normal(size=(vocab, vocab)).astype(np.float32)


def probabilities(logits: np.ndarray) -> np.ndarray:
    values = np.exp(logits.astype(np.float64))
    return values / values.sum()


def test_a_model_is_compared_position_by_position() -> None:
    a, b = table(0), table(1)
    b[:3] = a[:3] + 100  # the same distributions, other logits
    tokens = np.random.default_rng(2).integers(0, 7, 60)
    text = list(windows(tokens.tolist(), size=25))
    assert [len(window) for window in text] == [25, 25, 10]
    found = compare_logits(lambda window: a[window], lambda window: b[window], text)
    p, q = ([probabilities(logits[token]) for token in tokens] for logits in (a, b))
    kls = [sum(x * math.log(x / y) for x, y in zip(*pair, strict=True)) for pair in zip(p, q, strict=True)]
    agree = sum(one.argmax() == other.argmax() for one, other in zip(p, q, strict=True))
    assert found.tokens == 60
    assert found.kl == pytest.approx(np.mean(kls)) and found.kl_99 == pytest.approx(np.quantile(kls, 0.99))
    assert found.top1 == agree / 60 and 0 < agree < 60
    pairs = [(now, then) for window in text for now, then in zip(window[:-1], window[1:], strict=True)]
    for logits, value in ((a, found.reference_perplexity), (b, found.perplexity)):
        logs = [math.log(probabilities(logits[now])[then]) for now, then in pairs]
        assert value == pytest.approx(math.exp(-np.mean(logs)))


def test_the_text_is_fixed() -> None:
    """Figures are stated for this text; another one needs new figures."""
    assert (
        hashlib.sha256(fixed_text().encode()).hexdigest()
        == "77cc20a2747318479f90d47bac97002d756ae5b8af0e6bf067611ffea0cd0ca5"
    )
