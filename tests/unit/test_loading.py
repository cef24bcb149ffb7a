"""Building engines: refused configurations, fallbacks, shared targets and any capacity, with small random models."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blank_heads import eagle_head
from safetensors.numpy import load_file, save_file
from tokenizer_models import save_model

import wager
from wager.cli import main
from wager.draft.base import ComputedRows, Drafter
from wager.draft.combined import JoinedDrafter
from wager.draft.heads import autoregressive
from wager.economics.calibration import FOLDER, Calibration
from wager.economics.surface import StepPoint
from wager.errors import UsageError
from wager.kernels.base import TargetOutput
from wager.loading.load import calibration_setup, load
from wager.loading.opened import OpenedModel
from wager.models import hub
from wager.types import Draft, DraftRequest, Request, SamplingParams

PARAMS = SamplingParams(max_tokens=12, temperature=0.7, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def config(directory: str) -> wager.EngineConfig:
    return wager.EngineConfig.from_options(model=directory, max_rows=32, max_sequences=4, drafter="none")


@pytest.mark.parametrize(
    ("drafter", "dtype"), [("model:{model}", "auto"), ("eagle3:{head}", "auto"), ("eagle3:{head}", "q8")]
)
def test_a_drafter_shares_the_plan_and_gives_the_same_text(
    drafter: str, dtype: str, config: wager.EngineConfig, directory: str, tmp_path: Path
) -> None:
    plain = load(config.with_options(dtype=dtype))
    written = drafter.format(model=directory, head=eagle_head(tmp_path, plain.spec))
    drafted = load(config.with_options(dtype=dtype, drafter=written, depth=3))
    assert drafted.drafter_name == written.partition(":")[0]
    assert drafted.memory_plan.drafter > 0 == plain.memory_plan.drafter
    assert drafted.memory_plan.total <= drafted.memory_plan.budget
    assert drafted.target.decoder.buffers is not plain.target.decoder.buffers
    request = Request("r", tuple(plain.tokenizer.encode("The quick brown fox")), PARAMS)
    (one,), (two,) = plain.generate([request]), drafted.generate([request])
    assert one.token_ids == two.token_ids and two.stats.drafted > 0
    assert two.stats.accepted == two.stats.drafted or drafter.startswith("eagle3")  # the model drafts for itself
    assert one.text == two.text == plain.tokenizer.decode(list(one.token_ids))


def test_engines_that_share_a_model_take_turns(config: wager.EngineConfig, tmp_path: Path) -> None:
    """Each taps the states that its own head reads, and corrects a latency model of its own."""
    plain = load(config)
    head = f"eagle3:{eagle_head(tmp_path, plain.spec)}"
    names = ("ngram", "ngram,ngram:5", head)
    engines = [plain, *(load(config.with_options(drafter=name), target=plain.target) for name in names)]
    assert [engine.drafter_name for engine in engines] == ["none", "ngram", "ngram,ngram:5", "eagle3"]
    assert engines[1].target.latency is engines[2].target.latency and engines[1].policy.explain() != ""
    prompt = tuple(plain.tokenizer.encode("one two three four five six seven eight nine ten eleven twelve " * 2))
    request = Request("r", prompt, PARAMS)
    answers = [engine.generate([request])[0] for _ in range(2) for engine in engines]
    assert len({answer.token_ids for answer in answers}) == 1
    assert [answers[at].stats.drafted > 0 for at in (0, 3, 4)] == [False, True, False]
    plain.add(Request("busy", prompt, PARAMS))
    with pytest.raises(UsageError, match="Another engine"):
        engines[1].add(request)
    plain.abort("busy")  # its last output is still to be returned, and needs no cache
    plain.forget_requests()
    assert engines[1].generate([request])[0].token_ids == answers[0].token_ids


def test_a_head_behind_another_drafter_counts_fewer_states_of_a_prompt(
    config: wager.EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoregressive, "MOST_BEHIND", 8)
    plain = load(config)
    head = f"eagle3:{eagle_head(tmp_path, plain.spec)}"
    for name, counted in ((head, 20), (f"ngram..{head}", 8), (f"ngram//{head}", 20)):
        (drafter,) = load(config.with_options(drafter=name), target=plain.target).proposer.drafters.values()
        while isinstance(drafter, JoinedDrafter):
            drafter = drafter._members[-1].drafter
        assert isinstance(drafter, autoregressive.HeadChainDrafter)
        taps = {tap: np.zeros((20, plain.spec.hidden), np.float32) for tap in drafter.taps}
        drafter.begin("s", [1] * 21, PARAMS)
        drafter.read(TargetOutput(np.zeros((0, 0)), np.zeros(0), taps=taps), [ComputedRows("s", 0, range(20), 19)])
        assert drafter._states["s"].num_states == counted, name


class Echo:
    """A drafter that inherits from nothing: it guesses the last token again."""

    name, default_depth, max_depth = "echo", 2, 4
    samples = makes_trees = continues = weighs_prices = False
    last = 0

    def begin(self, _seq_id: str, tokens: Sequence[int], _params: SamplingParams, *, tenant: str = "") -> None:
        self.accept(tenant, tokens)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft.chain(each.seq_id, [self.last] * each.depth, drafter=self.name) for each in requests]

    def observe(self, _output: TargetOutput) -> None: ...

    def accept(self, _seq_id: str, tokens: Sequence[int]) -> None:
        self.last = [self.last, *tokens][-1]

    def end(self, _seq_id: str) -> None: ...


def test_a_drafter_that_lacks_a_part_of_the_interface_is_refused(config: wager.EngineConfig) -> None:
    plain = load(config)
    with pytest.raises(
        UsageError, match="class Echo has no remembers_requests, taps, reads_rows, read, read_rows, forget"
    ):
        load(config, target=plain.target, drafter=Echo())
    further = {
        name: vars(Drafter)[name]
        for name in ("remembers_requests", "taps", "reads_rows", "read", "read_rows", "forget")
    }
    whole = type("Whole", (Echo,), further)()
    request = Request("r", (5, 6, 7), PARAMS)
    answers = [load(config, target=plain.target, drafter=each).generate([request])[0] for each in (None, whole)]
    assert answers[0].token_ids == answers[1].token_ids and answers[1].stats.drafted


def test_a_context_longer_than_the_models_is_refused(config: wager.EngineConfig) -> None:
    with pytest.raises(UsageError, match="97 is more than the model's 96"):
        load(config.with_options(max_context=97))


def test_a_cache_of_int8_has_more_positions_in_the_same_memory(config: wager.EngineConfig) -> None:
    plans = {kind: load(config.with_options(memory=8 << 20, kv_dtype=kind)).memory_plan for kind in ("bf16", "q8")}
    assert plans["bf16"].weights == plans["q8"].weights
    ratio = plans["q8"].cache_tokens / plans["bf16"].cache_tokens
    assert ratio == pytest.approx(2 * 16 / (16 + 4), rel=0.02)  # head_dim 16: a float32 scale beside 16 bytes
    with pytest.raises(UsageError, match=r"kv_dtype = 'q4' is not known"):
        config.with_options(kv_dtype="q4")


@pytest.mark.slow
def test_a_calibration_is_used_in_its_own_setup_only(
    config: wager.EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    speculating = config.with_options(drafter="ngram")
    first = load(speculating)
    current = calibration_setup(first.kernels, first.spec, model="tiny", dtype="bfloat16")
    points = [StepPoint(rows, 1, 100, 1.0 * rows) for rows in (1, 2, 4)]  # unrealistically long
    calibration = Calibration.fit(current, points, points[:1], seconds=1)
    folder = hub.cache_dir(FOLDER)
    path = calibration.write(folder)
    loaded = load(speculating)
    assert loaded.target.latency is not None
    assert loaded.target.latency.seconds(4, 1, 100) == pytest.approx(4.0, rel=0.01)
    assert not caplog.records
    narrow = load(speculating.with_options(dtype="q8"))
    assert narrow.target.latency is not None and narrow.target.latency.seconds(4, 1, 100) < 1.0
    assert "dtype bfloat16 (here bfloat16 x20 + q8_0 x3)" in caplog.text
    path.unlink()
    replace(calibration, setup=replace(current, machine="a different processor")).write(folder)
    measured = load(speculating)
    assert measured.target.latency is not None
    assert measured.target.latency.seconds(4, 1, 100) < 1.0
    assert "a different processor" in caplog.text


def test_only_the_first_start_measures_steps(config: wager.EngineConfig) -> None:
    lines: list[str] = []
    first = load(config.with_options(drafter="ngram"), report=lines.append)
    assert "measuring a few steps" in lines
    lines.clear()
    second = load(config.with_options(drafter="ngram"), report=lines.append)
    assert "measuring a few steps" not in lines
    assert first.target.latency is not None and second.target.latency is not None
    assert second.target.latency.as_dict() == first.target.latency.as_dict()


@pytest.fixture(autouse=True)
def nothing_measured_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test measures anew: a quick measurement is stored and found by the next load of the same model."""
    monkeypatch.setenv("WAGER_CACHE", str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "capacity",
    [
        *({"cache_tokens": tokens} for tokens in (64, 1)),
        *({"max_context": tokens} for tokens in (2, 17)),
        {"cache_tokens": 64, "max_context": 65},
        {"max_rows": 2, "max_context": 512},
        {"cache_tokens": 16, "max_context": 2, "max_rows": 1, "max_sequences": 1},
        {"memory": "5MiB"},
    ],
    ids=str,
)
def test_an_engine_of_any_capacity_serves_a_request_to_its_end(capacity: dict[str, Any]) -> None:
    """Under the default policy, which measures; the model's context is longer than most of these caches."""
    options = {"model": "random:llama:tiny", "threads": 1, "drafter": "ngram"} | capacity
    with wager.LLM(**options) as llm:
        context = llm.engine.scheduler.max_context
        held = min(context, llm.engine.memory_plan.cache_tokens)
        assert held >= min(context, options.get("cache_tokens", context))
        longest = SamplingParams(max_tokens=held - 1, ignore_eos=True)
        assert len(llm.generate([1], longest).token_ids) == held - 1
        assert len(llm.generate([1] * (held - 1), SamplingParams(max_tokens=1)).token_ids) == 1
        llm.engine.check()


def test_a_measurement_that_is_skipped_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "wager")
    load(wager.EngineConfig.from_options(model="random:llama:tiny", threads=1, drafter="ngram", cache_tokens=16))
    [record] = caplog.records
    assert "is too small to measure steps in. Default step latencies are used" in record.message


def test_logits_that_overflow_are_named_as_the_cause(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "wager")
    save_model(tmp_path)
    shards = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    file = tmp_path / shards["model.norm.weight"]
    tensors = load_file(file)
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], 3e38)
    save_file(tensors, file, metadata={"format": "pt"})
    engine = load(wager.EngineConfig.from_options(model=str(tmp_path), threads=1, drafter="ngram", max_rows=32))
    [record] = [record for record in caplog.records if "latencies" in record.message]
    assert "The model produced a logit that is not finite" in record.message
    assert "Default step latencies" in record.message
    [answer] = engine.generate([Request("r", (1, 2), SamplingParams(max_tokens=3))])
    assert answer.finish_reason == "error" and "not finite" in answer.error


def test_the_command_refuses_its_prompt_before_it_loads_the_model(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenedModel, "load", None)
    flags = ["--model", "random:llama:tiny", "--threads", "1", "--max-tokens", "1", "--max-context", "10"]
    assert main(["run", "hello", *flags]) == 1
    assert "maximum context length is 10" in capfd.readouterr().err
