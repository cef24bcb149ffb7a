"""Rules of the code base that ruff does not know: imports by floor, names, booleans."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from floors import MAY_IMPORT, SOURCE, circles, files, import_graph, module, package, violations

ROOT = SOURCE.parents[1]
NAMED = ast.ClassDef | ast.FunctionDef
FORBIDDEN_WORDS = {"helper", "helpers", "util", "utils", "misc", "common", "manager", "handler"}
PUBLIC_NAMES = {
    "AsyncLLM",
    "AsyncOutputStream",
    "CacheIntegrityError",
    "CapacityConfig",
    "ClosedError",
    "Completion",
    "DownloadError",
    "Engine",
    "EngineConfig",
    "Grammar",
    "GrammarError",
    "LLM",
    "MemoryPlanError",
    "ModelConfig",
    "ModelError",
    "NumericsError",
    "OutputDelta",
    "OutputStream",
    "Request",
    "RequestError",
    "SamplingParams",
    "RequestSpeculation",
    "SpeculationConfig",
    "Stats",
    "TokenLogprob",
    "TokenizerError",
    "UsageError",
    "WagerError",
}


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def boolean_traps(tree: ast.Module) -> list[str]:
    """Functions with a positional bool beside other arguments (a checked `condition` may be positional)."""
    traps = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        positional = [arg for arg in [*node.args.posonlyargs, *node.args.args] if arg.arg not in ("self", "cls")]
        defaults = dict(zip([arg.arg for arg in reversed(positional)], reversed(node.args.defaults), strict=False))
        for arg in positional if len(positional) > 1 else []:
            typed = arg.annotation is not None and ast.unparse(arg.annotation) == "bool"
            default = defaults.get(arg.arg)
            switch = isinstance(default, ast.Constant) and isinstance(default.value, bool)
            if (typed or switch) and arg.arg != "condition":
                traps.append(f"{node.name}({arg.arg})")
    return traps


def words(name: str) -> set[str]:
    """Words of a snake_case or CamelCase name, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def test_every_file_is_in_a_known_package_and_imports_what_it_may() -> None:
    assert [path for path in files() if package(module(path)) not in MAY_IMPORT] == []
    assert [complaint for path in files() for complaint in violations(module(path), parse(path))] == []


@pytest.mark.parametrize(
    ("name", "code", "complaint"),
    [
        ("types", "import wager.config", "imports config"),
        ("arch.spec", "from wager.models import hub", "imports models"),
        ("arch.spec", "from wager.types import Draft", "imports types"),
        ("arch.catalog", "import torch", "imports torch"),
        ("kernels.base", "from wager import config", "imports config"),
        ("kernels.base", "from wager.models.weights import Weights", "imports models"),
        ("kv.blocks", "def f():\n    from wager.models import tokenizer", "imports models"),
        ("kv.blocks", "if TYPE_CHECKING:\n    from wager.verify.pack import pack", "imports verify"),
        ("models.hub", "from wager.economics.policy import base", "imports economics.policy"),
        ("planner.cost", "from wager.engine.core import Engine", "imports engine"),
        ("engine.core", "from wager.planner import devices", "imports planner"),
        ("economics.surface", "from wager.planner import devices", "imports planner"),
        ("economics.surface", "from wager.economics.policy.base import Policy", "economics.policy"),
        ("kernels.reference", "def f():\n    import torch.nn", "imports torch"),
        ("models.transformer", "from torch import nn", "imports torch"),
        ("engine.core", "from wager.bench import measure", "imports bench"),
        ("engine.core", "from wager import LLM", "imports wager/__init__.py"),
        ("engine.core", "from wager.loading.load import load", "imports loading"),
        ("engine.core", "from wager.testing import ToyTarget", "imports testing"),
        ("loading.drafters", "from wager.testing import ToyTarget", "imports testing"),
        ("draft.ngram", "from .base import Drafter", "imports relatively"),
        ("draft.ngram", "importlib.import_module('wager.engine.core')", "imports engine"),
        ("draft.ngram", "importlib.import_module(name)", "imports by a name computed"),
        ("bench.measure", "from wager.terminal.console import say", "imports terminal"),
        ("llm", "import wager.cli", "imports cli"),
        ("", "import wager.cli", "imports cli"),
    ],
)
def test_the_floors_are_kept_by_a_check_that_can_fail(name: str, code: str, complaint: str) -> None:
    [violation] = violations(name, ast.parse(code))
    assert complaint in violation


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("kernels.cpu", "from wager.kernels.base import BLOCK_SIZE"),
        ("models.weights", "from wager.arch.spec import ModelSpec"),
        ("planner.cost", "from wager.arch.spec import ModelSpec"),
        ("simulation.server", "from wager.economics.policy.base import Policy"),
        ("engine.core", "from wager.kv.blocks import BlockPool"),
        ("profiling.calibrate", "from wager.engine.core import Engine"),
        ("cli.run", "import wager"),
        ("llm", "from wager.loading.load import load"),
        ("", "from wager.llm import LLM"),
    ],
)
def test_what_the_floors_allow_passes(name: str, code: str) -> None:
    assert violations(name, ast.parse(code)) == []


def test_nothing_imports_in_a_circle() -> None:
    """Nor inside a package."""
    assert circles(import_graph()) == []


def test_circles_are_found_by_a_check_that_can_fail() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_class_name_stands_twice() -> None:
    named: dict[str, list[str]] = {}
    for path in files():
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef):
                named.setdefault(node.name, []).append(module(path))
    assert {name: places for name, places in named.items() if len(places) > 1} == {}


def test_booleans_are_given_by_name() -> None:
    """f(x, True) does not show what is true: a bool is keyword-only, unless it is the only argument."""
    assert {module(path): traps for path in files() if (traps := boolean_traps(parse(path)))} == {}


def test_boolean_traps_are_found_by_a_check_that_can_fail() -> None:
    assert boolean_traps(ast.parse("def f(x, deep: bool): ...")) == ["f(deep)"]
    assert boolean_traps(ast.parse("def f(x, deep=False): ...")) == ["f(deep)"]
    assert boolean_traps(ast.parse("def f(x, *, deep: bool): ...\nclass A:\n    def g(self, on: bool): ...")) == []


def test_no_name_has_a_forbidden_word() -> None:
    named = [
        (module(path), name)
        for path in files()
        for name in [
            path.stem,
            path.parent.name,
            *(node.name for node in ast.walk(parse(path)) if isinstance(node, NAMED)),
        ]
    ]
    assert [each for each in named if words(each[1]) & FORBIDDEN_WORDS] == []


def test_words_of_names() -> None:
    assert words("HTTPHelper") == {"http", "helper"}
    assert words("_cache_manager") == {"cache", "manager"}
    assert words("commons") == {"commons"}


def test_the_public_names() -> None:
    import wager

    assert set(wager.__all__) == PUBLIC_NAMES
    assert [name for name in PUBLIC_NAMES if not hasattr(wager, name)] == []


@pytest.mark.parametrize(
    "name",
    ["wager.cli", "wager.bench.measure", "wager.economics.policy.base", "wager.models.hub", "wager.llm"],
)
def test_torch_is_not_imported(name: str) -> None:
    """Not by what wager imports either."""
    code = f"import {name}, sys; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0
