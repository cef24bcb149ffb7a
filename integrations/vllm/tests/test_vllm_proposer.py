"""The proposer of the vLLM plugin without vLLM: a scripted engine on a fake clock."""

from __future__ import annotations

import json
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from scripted_vllm import VOCAB, ScriptedPasses, ScriptedRequest, ScriptedVLLM, deployment, periodic, start

from wager.bench.scrape import Scrape
from wager.economics.calibration import write_quick
from wager.economics.surface import LatencySurface
from wager.models import hub
from wager.models.random_models import byte_tokenizer
from wager.testing import FakeClock
from wager_vllm import compat, metrics
from wager_vllm.options import Options
from wager_vllm.prices import setup_of
from wager_vllm.proposer import Proposer

CALIBRATIONS = "calibrations"


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache and a folder of figures of this test alone."""
    monkeypatch.setenv("WAGER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(metrics.FOLDER, str(tmp_path))
    yield


def request(seed: int, *, tokens: int = 200, prompt: int = 100, **more: object) -> ScriptedRequest:
    text = periodic(seed, prompt + tokens)
    return ScriptedRequest(text[:prompt], text[prompt:], **more)  # type: ignore[arg-type]


def test_guesses_follow_their_requests() -> None:
    """Through prompts in chunks, rows that move, preemption, an abort and the same id again."""
    vllm = start()
    vllm.moves = True
    for seed in range(6):
        vllm.add(f"r{seed}", request(seed, prompt=90 + 30 * seed))
    for at in range(60):
        if at == 20:
            vllm.preempt("r1")
        if at == 24:
            vllm.abort("r2")
            vllm.add("r2", request(77))
        vllm.step(without=["r3"] if 30 <= at < 34 else [])
    vllm.run()
    assert vllm.accepted > 0.85 * vllm.drafted > 500
    assert vllm.tokens / vllm.steps > 6
    assert not vllm.proposer._requests.keys() - vllm.finished


def test_one_tenant_guesses_nothing_from_anothers_answers() -> None:
    def accepted(tenant: str) -> int:
        vllm, secret = start(), periodic(9, 300, period=300)
        vllm.add("first", ScriptedRequest([1, 2, 3], secret, tenant="a"))
        vllm.run()
        before = vllm.accepted
        vllm.add("second", ScriptedRequest([4, 5, 6], secret, tenant=tenant))
        vllm.run()
        return vllm.accepted - before

    assert accepted("a") > 150
    assert accepted("b") < 10


def test_a_request_whose_tokens_are_others_stays_with_its_tenant() -> None:
    """vLLM may give a request that runs a new prompt, as with inputs that are streamed."""
    for told in (True, False):
        vllm, secret = start(), periodic(9, 300, period=300)
        vllm.add("first", ScriptedRequest([1, 2, 3], periodic(5, 40), tenant="a"))
        vllm.step()
        if told:
            vllm.add("first", ScriptedRequest([4, 5, 6], secret, tenant="a"))
        else:
            vllm.running["first"] = ScriptedRequest([4, 5, 6], secret, known=[4, 5, 6])
        vllm.step()
        assert vllm.proposer._requests["first"].tokens[:3] == [4, 5, 6]
        assert vllm.proposer._requests["first"].tenant == "a"


@pytest.mark.slow
@pytest.mark.parametrize("alone", [True, False], ids=["passes", "first steps"])
def test_a_cold_start_is_soon_as_good_as_a_warm_one(alone: bool) -> None:
    """Tokens a second in the steps from 100 on, with prices measured now and with those of a long run."""
    layout = {"tensor": 1, "pipeline": 1, "data": 1 if alone else 2}

    def rate(vllm: ScriptedVLLM, first: int, last: int) -> float:
        tokens, seconds = [0, 0], [0.0, 0.0]
        for number in range(4):
            prompt, answer = periodic(number, 60, noise=0.3), periodic(number, 2000, noise=0.15)
            vllm.add(f"{first} {number}", ScriptedRequest(prompt, answer))
        for at in range(last):
            if at == first:
                tokens[0], seconds[0] = vllm.tokens, vllm.clock()
            vllm.step()
        tokens[1], seconds[1] = vllm.tokens, vllm.clock()
        return (tokens[1] - tokens[0]) / (seconds[1] - seconds[0])

    cold = start(layout=layout)
    assert cold.proposer._prices.source == ("passes at the start" if alone else "the first steps")
    one = rate(cold, 100, 250)
    for name in list(cold.running):
        cold.abort(name)
    cold.step()
    warm = start(layout=layout)
    warm.proposer._prices._use(cold.proposer._prices.surface or warm.proposer._prices.surface)  # type: ignore[arg-type]
    rate(warm, 1, 300)
    for name in list(warm.running):
        warm.abort(name)
    warm.step()
    warm.proposer.forget()
    assert one > 0.97 * rate(warm, 100, 250)


def test_prices_are_kept_and_wrong_ones_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    vllm = start()
    vllm.add("a", request(1, tokens=1500))
    vllm.run()
    again = start()
    assert again.proposer._prices.source == "a file" and again.clock() == 0.0
    wrong = LatencySurface([1, 64], [1e-1, 10.0])
    write_quick(hub.cache_dir(CALIBRATIONS) / "vllm", setup_of(deployment()), wrong)
    with caplog.at_level(logging.WARNING, "vllm.wager"):
        misled = start()
        misled.add("a", request(1, tokens=1200))
        misled.run()
    assert [line for line in caplog.messages if "wrong or stale" in line]
    assert misled.steps < 1.1 * vllm.steps * 1200 / 1500 + 60
    damaged = Path(str(hub.cache_dir("damaged"))).with_suffix(".json")
    damaged.write_text("{")
    with caplog.at_level(logging.WARNING, "vllm.wager"):
        caplog.clear()
        start(options=Options(drafters="suffix", prices=damaged))
    assert len(caplog.messages) == 1 and "damaged.json are not used" in caplog.messages[0]


def test_passes_too_long_for_the_deepest_draft_are_no_prices(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    vllm = start(clock)
    passes = ScriptedPasses(clock)
    quick = passes.run

    def long(rows: int, **shape: Any) -> int:
        clock.advance(0.5)
        return quick(rows, **shape)

    passes.run = long  # type: ignore[method-assign,assignment]
    with caplog.at_level(logging.WARNING, "vllm.wager"):
        vllm.proposer.model_ready(passes)  # type: ignore[arg-type]
    assert passes.count < 16 and vllm.proposer._prices.depth_to_measure(1) == 0
    vllm.add("a", request(1))
    vllm.run(24)
    assert vllm.drafted and vllm.proposer._prices.surface is not None
    assert len(caplog.messages) == 1 and "in the first steps" in caplog.messages[0]


def test_faults_cost_speed_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A drafter that raises pauses; a proposer that raises drafts nothing more; each with a line of log."""
    vllm = start()
    vllm.add("a", request(1, tokens=400))
    vllm.run(40)
    drafter = vllm.proposer._pool.drafters["suffix"]
    drafter.propose = lambda requests: [][1]  # type: ignore[method-assign,assignment,return-value]
    with caplog.at_level(logging.WARNING):
        vllm.run(60)
        assert [line for line in caplog.messages if "Drafter 'suffix' failed" in line]
        caplog.clear()
        vllm.proposer._decisions = types.SimpleNamespace(end=lambda _: None)  # type: ignore[assignment]
        vllm.run()
    assert len(caplog.messages) == 1 and "goes on without draft tokens" in caplog.messages[0]
    assert not vllm.running and vllm.proposer.step_sampled(compat.RunnerStep([], {}, vllm.facts)) == []


def test_a_slow_drafter_is_hardly_used_and_said(caplog: pytest.LogCaptureFixture) -> None:
    vllm = start()
    drafter = vllm.proposer._pool.drafters["suffix"]
    quick = drafter.propose

    def slow(requests: object) -> object:
        vllm.clock.advance(0.1)
        return quick(requests)  # type: ignore[arg-type]

    drafter.propose = slow  # type: ignore[method-assign,assignment]
    vllm.add("a", request(1, tokens=900))
    with caplog.at_level(logging.WARNING, "vllm.wager"):
        vllm.run(300)
        plain = 900 * (vllm.beside + 1e-2)
        begun, tokens = vllm.clock(), vllm.tokens
        vllm.run()
    assert vllm.clock() - begun < 1.05 * plain * (vllm.tokens - tokens) / 900
    assert len([line for line in caplog.messages if "Drafting takes" in line]) == 1


def test_recycling_reads_logits_and_a_prediction_is_followed() -> None:
    vllm = start(options=Options(drafters="recycle"))
    assert vllm.proposer.wants_logits
    text = periodic(5, 400, period=40)
    vllm.add("a", ScriptedRequest(text[:4], text[4:]))
    while vllm.running:
        one = vllm.running["a"]
        rows = 1 + len(one.drafts) if one.cached else 1
        follow = dict(zip(text, text[1:], strict=False))
        logits = torch.zeros(rows, VOCAB)
        last = [one.known[-1], *one.drafts]
        for row, token in enumerate(last[:rows]):
            logits[row, follow.get(token, 0)] = 9.0
        vllm.proposer.logits_computed(logits)
        vllm.step()
    assert vllm.accepted > 200

    predicted = start(options=Options(drafters="prediction"))
    answer = periodic(8, 200, period=200)
    predicted.add("a", ScriptedRequest([1], answer, prediction=answer))
    predicted.add("b", ScriptedRequest([1], answer, prediction=["no", "ids"]))  # type: ignore[list-item]
    predicted.run()
    assert 120 < predicted.accepted < 200


def test_metrics_have_depths_reasons_and_what_acceptance_needs(tmp_path: Path) -> None:
    vllm = start()
    for seed in range(2):
        vllm.add(f"r{seed}", request(seed, tokens=300))
    vllm.add("r2", ScriptedRequest([1], list(range(100, 400))))  # nothing is seen twice, so there is no guess
    vllm.run(35)
    vllm.clock.advance(2.0)
    vllm.run()
    vllm.clock.advance(2.0)
    vllm.add("last", request(9, tokens=3))
    vllm.run()
    registry = CollectorRegistry()
    registry.register(metrics.FiguresCollector())
    text = generate_latest(registry).decode()
    for name in ("draft_depth_decided_total", "requests_without_draft_total", "row_cost_tokens", "plain_step_seconds"):
        assert f"wager:{name}{{" in text
    own = f"""vllm:spec_decode_num_drafts_total{{engine="0",model_name="script"}} 100
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="script"}} {vllm.drafted}
"""
    counts = Scrape.parse(text + own, "here").speculation()
    assert counts.by.engine == "vllm" and len(counts.reaching) == 8
    assert list(counts.reaching) == sorted(counts.reaching, reverse=True)
    assert sum(counts.reaching) == pytest.approx(vllm.drafted, abs=20)  # the last steps are not written yet


def test_an_unknown_version_is_refused_or_runs_plain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vllm = types.ModuleType("vllm")
    vllm.__version__ = "9.1.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    compat.usable.cache_clear()
    with pytest.raises(compat.IncompatibleError, match=r"does not know vLLM 9\.1\.0; it knows 0\.32"):
        Proposer(None)
    monkeypatch.setenv("WAGER_VLLM_OPTIONAL", "1")
    with caplog.at_level(logging.WARNING, "vllm.wager"):
        proposer = Proposer(None)
    assert proposer.propose([[1], [2, 3]], None, None) == [[], []] and len(caplog.messages) == 1
    vllm.__version__ = "0.32.5"  # type: ignore[attr-defined]
    with pytest.raises(compat.IncompatibleError, match=r"execute_model of vLLM 0\.32\.5 is not as wager-vllm expects"):
        compat.check()
    compat.usable.cache_clear()


def test_only_the_first_worker_of_a_group_drafts() -> None:
    vllm = start(leads=False)
    vllm.add("a", request(1))
    vllm.run()
    assert not vllm.drafted and vllm.tokens == 200


def test_a_corpus_is_guessed_from_and_a_damaged_one_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_tokenizer(512, where="test")
    for name, text in tokenizer.files().items():
        (tmp_path / name).write_text(text)
    words, corpus = "The quick brown fox jumps over the lazy dog.", tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"answer": words}) + "\n{\n")
    with caplog.at_level(logging.WARNING, "vllm.wager"):
        start(options=Options(corpus=corpus), tokenizer=str(tmp_path))
    assert len(caplog.messages) == 1 and "damaged in line 2" in caplog.messages[0]
    corpus.write_text(corpus.read_text().removesuffix("{\n"))
    vllm = start(options=Options(corpus=corpus), tokenizer=str(tmp_path), vocab=512)
    ids = tokenizer.encode(words)
    vllm.add("a", ScriptedRequest(ids[:4], ids[4:]))
    vllm.run()
    assert vllm.accepted > 10
