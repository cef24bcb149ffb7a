"""Any capacity that can serve one request is served with it; any other is refused with figures."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizer_models import save_model

import wager
from wager.cli import main
from wager.engine.runner import Runner
from wager.errors import MemoryPlanError, NumericsError, UsageError
from wager.kernels.base import BLOCK_SIZE, TargetOutput
from wager.loading import memory
from wager.loading.load import load
from wager.loading.opened import OpenedModel
from wager.profiling.calibrate import StepTimer, quick_surface, time_steps, uniform_shape
from wager.testing import FakeClock, ToyDistribution, ToyTarget
from wager.trace import Trace
from wager.types import PackedBatch, Request, SamplingParams

LAW = ToyDistribution(vocab=97, memory=0.5)


class TimedTarget(ToyTarget):
    """Every pass takes seconds that grow with its rows."""

    def __init__(self, clock: FakeClock, **sizes: int) -> None:
        super().__init__(LAW, **sizes)
        self.clock = clock

    def forward(self, batch: PackedBatch) -> TargetOutput:
        self.clock.advance(5e-3 + 1e-4 * batch.rows)
        return super().forward(batch)


@pytest.fixture(autouse=True)
def nothing_measured_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test measures anew: a quick measurement is stored and found by the next load of the same model."""
    monkeypatch.setenv("WAGER_CACHE", str(tmp_path))


# ---- the measurement ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3, 512])
@pytest.mark.parametrize("context", [2, 10, 31, 32, 33, 100, 8192])
@pytest.mark.parametrize("blocks", [1, 3, 4, 5, 16, 64, 256])
def test_a_cache_of_any_size_is_measured_or_said_to_be_too_small(blocks: int, context: int, rows: int) -> None:
    clock = FakeClock()
    target = TimedTarget(clock, num_blocks=blocks, max_rows=rows, max_sequences=min(rows, 64))
    try:
        surface = quick_surface(Runner(target, rule="match"), max_context=context, seconds=0.2, trace=Trace(clock))
    except UsageError as error:
        assert f"A cache of {blocks * BLOCK_SIZE} tokens for contexts of {context} is too small" in error.message
        assert blocks < 4 or context < 32
    else:
        assert len(surface.rows) >= min(rows, 2)
        assert surface.seconds(1, 1, 16) == pytest.approx(5.1e-3, rel=0.2)


# ---- engines --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "capacity",
    [
        *({"cache_tokens": tokens} for tokens in (4096, 1024, 256, 64, 16, 1)),
        *({"max_context": tokens} for tokens in (2, 10, 17, 33)),
        *({"cache_tokens": 64, "max_context": tokens} for tokens in (2, 65)),
        *({"max_rows": rows, "max_context": 512} for rows in (1, 2, 3)),
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


@pytest.mark.parametrize("capacity", [{"max_context": 2}, {"max_context": 10}, {"cache_tokens": 16}])
def test_a_measurement_that_is_skipped_says_so(capacity: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "wager")
    load(wager.EngineConfig.from_options(model="random:llama:tiny", threads=1, drafter="ngram", **capacity))
    [record] = caplog.records
    assert "is too small to measure steps in. Default step latencies are used" in record.message


@pytest.mark.parametrize("options", [{"memory": 1}, {"memory": "1MiB"}, {"cache_tokens": 10**9, "memory": "1GiB"}])
def test_what_cannot_serve_a_request_is_refused_with_figures(options: dict[str, Any]) -> None:
    reports: list[str] = []
    with pytest.raises(MemoryPlanError, match=r"cache of \d+ tokens [\d.]+ [MG]iB = .* that may be used"):
        load(wager.EngineConfig.from_options(model="random:llama:tiny", **options), report=reports.append)
    assert reports == [], "refused before anything is loaded"


@pytest.mark.parametrize("max_context", [2, 15, 16, 17, 97, 256])
def test_a_planned_cache_holds_one_full_context(max_context: int) -> None:
    fixed = {"weights": 1000, "workspace": 500, "drafter": 0, "token_bytes": 10, "max_context": max_context}
    for use_all in (False, True):
        for budget in range(1500, 1500 + 10 * 5 * max_context, 7):
            try:
                plan = memory.plan(budget=budget, use_all=use_all, **fixed)  # type: ignore[arg-type]
            except MemoryPlanError:
                assert budget - 1500 < 10 * -(-max_context // BLOCK_SIZE) * BLOCK_SIZE
            else:
                assert plan.cache_tokens >= max_context
                assert plan.cache_tokens % BLOCK_SIZE == 0
                assert plan.total <= budget


# ---- logits that are not finite -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose weights are numbers so large that its logits overflow."""
    path = tmp_path_factory.mktemp("broken")
    save_model(path)
    shards = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    file = path / shards["model.norm.weight"]
    tensors = load_file(file)
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], 3e38)
    save_file(tensors, file, metadata={"format": "pt"})
    return str(path)


def test_logits_that_overflow_are_named_as_the_cause(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "wager")
    engine = load(wager.EngineConfig.from_options(model=broken, threads=1, drafter="ngram", max_rows=32))
    [record] = [record for record in caplog.records if "latencies" in record.message]
    assert "The model produced a logit that is not finite" in record.message
    assert "Default step latencies" in record.message
    [answer] = engine.generate([Request("r", (1, 2), SamplingParams(max_tokens=3))])
    assert answer.finish_reason == "error" and "not finite" in answer.error


def test_a_calibration_of_such_a_model_ends_with_the_cause(broken: str) -> None:
    engine = load(wager.EngineConfig.from_options(model=broken, threads=1, drafter="none", max_rows=32))
    timer = StepTimer(engine.runner, max_context=engine.scheduler.max_context)
    with pytest.raises(NumericsError, match="not finite"):
        time_steps(timer, [uniform_shape(2, 1, 16)], seconds=0.1)


# ---- requests that are known before the model is loaded -------------------------------------------------------------


def test_the_command_refuses_its_prompt_before_it_loads_the_model(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, load_weights = [], OpenedModel.load

    def count(model: OpenedModel, *arguments: Any, **options: Any) -> Any:
        loaded.append(model)
        return load_weights(model, *arguments, **options)

    monkeypatch.setattr(OpenedModel, "load", count)
    flags = ["--model", "random:llama:tiny", "--threads", "1", "--max-tokens", "1", "--max-context"]
    assert main(["run", "hello", *flags, "10"]) == 1
    assert "prompt tokens; the context holds 10" in capfd.readouterr().err
    assert not loaded
    assert main(["run", "h", "--raw", *flags, "2"]) == 0
    assert len(loaded) == 1
