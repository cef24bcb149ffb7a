"""The configuration: options sorted into groups, parsed at once, refused by name before anything is loaded."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from wager.config import (
    OPTIONS,
    CapacityConfig,
    EngineConfig,
    ModelConfig,
    SpeculationConfig,
)
from wager.errors import UsageError
from wager.types import SamplingParams


def test_options_are_sorted_into_groups() -> None:
    config = EngineConfig.from_options(
        model="m", drafter="ngram:4", depth=3, memory="2GiB", max_rows=64, temperature=0.5, stop=["END"]
    )
    assert config.model == ModelConfig(model="m")
    assert config.speculation == SpeculationConfig(drafter="ngram:4", depth=3)
    assert config.capacity == CapacityConfig(memory=2 << 30, max_rows=64)
    assert config.sampling == SamplingParams(temperature=0.5, stop=("END",))
    assert EngineConfig.from_options() == EngineConfig()
    assert EngineConfig.from_options(**config.as_options()) == config
    assert list(config.as_options()) == list(OPTIONS)
    with pytest.raises(FrozenInstanceError):
        config.model.model = "other"  # type: ignore[misc]


def test_changes_are_checked_anew() -> None:
    config = EngineConfig.from_options(drafter="recycle")
    assert config.with_options(depth=0).speculation.parsed_policy.kind == "fixed"
    with pytest.raises(UsageError, match="makes trees"):
        config.with_options(verify="block")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dept": 3}, "'dept' is not known.*'depth'"),
    ({"zzz": 3}, "'zzz' is not known.*model, dtype"),
    ({"model": ""}, "model = ''"),
    ({"dtype": "bfloat"}, "dtype = 'bfloat'.*'bfloat16'"),
    ({"threads": 0}, "threads = 0 .*at least 1"),
    ({"threads": "2"}, r"threads = '2' \(str\)"),
    ({"depth": -1}, "depth = -1 .*at least 0"),
    ({"max_sequences": 600}, "max_sequences = 600 is more than max_rows = 512"),
    ({"max_context": 1}, "max_context = 1 .*at least 2"),
    ({"memory": 0}, "memory = 0"),
    ({"memory": "plenty"}, "'plenty' is not an amount"),
    ({"prefix_cache": 1}, "prefix_cache = 1"),
    ({"drafter": "ngrm"}, "'ngrm'.*'ngram'"),
    ({"drafter": "model"}, "needs an argument"),
    ({"drafter": "ngram:9"}, "ngram:9"),
    ({"policy": "adaptiv"}, "'adaptive'"),
    ({"policy": "threshold:1"}, "threshold:1.*threshold:0.4"),
    ({"policy": "fixed:3"}, "fixed:3"),
    ({"objective": "speed"}, "'speed'"),
    ({"objective": "slo:20"}, "slo:20"),
    ({"objective": "latency", "policy": "fixed"}, "objective = 'latency' has no effect under policy 'fixed'"),
    ({"drafter": "ngram,recycle", "depth": 3}, "uses one drafter, but there are 2"),
    ({"drafter": "ngram,recycle", "policy": "threshold"}, "uses one drafter"),
    ({"drafter": "ngram,recycle", "verify": "block"}, "'recycle' makes trees"),
    ({"verify": "mach"}, "'match'"),
    ({"top_p": 2}, "top_p = 2"),
]


def test_impossible_options_are_refused_by_name() -> None:
    for options, named in REFUSED:
        with pytest.raises(UsageError, match=f"(?s){named}"):
            EngineConfig.from_options(**options)
