"""The house rules: floors, names, sizes, and what a file must not contain."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from floors import MAY_IMPORT, SOURCE, circles, files, import_graph, module, room, violations

ROOT = SOURCE.parents[1]
FORBIDDEN_WORDS = {"helper", "helpers", "util", "utils", "misc", "common", "manager", "handler"}
LONGEST, LONGEST_FUNCTION = 300, 50
LONG = {"src/wager/types.py": 345}
"""Files allowed to be longer, each with the lines it may have."""

FRONT_DOOR = {
    "CacheIntegrityError",
    "CapacityConfig",
    "ClosedError",
    "Completion",
    "DownloadError",
    "Engine",
    "EngineConfig",
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
    "SpeculationConfig",
    "Stats",
    "TokenizerError",
    "UsageError",
    "WagerError",
}

EACH = pytest.mark.parametrize("path", files(), ids=lambda path: module(path) or "wager")


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def function_lengths(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def boolean_traps(tree: ast.Module) -> list[str]:
    """Functions with a bool that can be given by its place, beside other arguments (a checked `condition` may be)."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        given = [each for each in [*node.args.posonlyargs, *node.args.args] if each.arg not in ("self", "cls")]
        defaults = dict(zip([each.arg for each in reversed(given)], reversed(node.args.defaults), strict=False))
        for each in given if len(given) > 1 else []:
            typed = each.annotation is not None and ast.unparse(each.annotation) == "bool"
            default = defaults.get(each.arg)
            switch = isinstance(default, ast.Constant) and isinstance(default.value, bool)
            if (typed or switch) and each.arg != "condition":
                found.append(f"{node.name}({each.arg})")
    return found


def words(name: str) -> set[str]:
    """Words of a snake_case or CamelCase name, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


@EACH
def test_the_file_lies_in_a_room_and_imports_what_it_may(path: Path) -> None:
    assert room(module(path)) in MAY_IMPORT, f"{path} lies in no room of the plan"
    assert violations(module(path), parse(path)) == []


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
        ("economics.costmodel.roofline", "from wager.models.transformer import Decoder", "imports models"),
        ("economics.costmodel.roofline", "from wager.economics.latency import surface", "imports economics.latency"),
        ("economics.latency.surface", "from wager.economics.costmodel import devices", "imports economics.costmodel"),
        ("economics.policy.base", "from wager.economics.latency.surface import LatencySurface", "economics.latency"),
        ("economics.policy.base", "import torch.nn", "imports torch"),
        ("economics.policy.base", "from torch import nn", "imports torch"),
        ("engine.core", "from wager.bench import report", "imports bench"),
        ("engine.core", "from wager import LLM", "imports the front door"),
        ("engine.core", "from wager.build.load import load", "imports build"),
        ("engine.core", "from wager.testing import ToyTarget", "imports testing"),
        ("build.drafters", "from wager.testing import ToyTarget", "imports testing"),
        ("cli.prove", "from wager.testing import ToyTarget", "imports testing"),
        ("draft.ngram", "from .base import Drafter", "imports relatively"),
        ("draft.ngram", "importlib.import_module('wager.engine.core')", "imports engine"),
        ("draft.ngram", "importlib.import_module(name)", "imports by a name made up"),
        ("bench.measure", "from wager.cli.console import say", "imports cli"),
        ("llm", "import wager.cli", "imports cli"),
        ("", "import wager.cli", "imports cli"),
    ],
)
def test_the_floors_are_kept_by_a_check_that_can_fail(name: str, code: str, complaint: str) -> None:
    [found] = violations(name, ast.parse(code))
    assert complaint in found


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("kernels.cpu", "from wager.kernels.base import BLOCK_SIZE"),
        ("models.weights", "from wager.arch.spec import ModelSpec"),
        ("economics.costmodel.roofline", "from wager.arch.spec import ModelSpec"),
        ("economics.simulation.server", "from wager.economics.policy.base import Policy"),
        ("engine.core", "from wager.kv.blocks import BlockPool"),
        ("profiling.calibrate", "from wager.engine.core import Engine"),
        ("cli.run", "import wager"),
        ("llm", "from wager.build.load import load"),
        ("", "from wager.llm import LLM"),
    ],
)
def test_what_the_floors_allow_passes(name: str, code: str) -> None:
    assert violations(name, ast.parse(code)) == []


def test_nothing_imports_in_a_circle() -> None:
    """Nor inside a room: a file is read after those that it imports."""
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


@EACH
def test_functions_are_short(path: Path) -> None:
    long = [f"{name}: {length} lines" for name, length in function_lengths(parse(path)) if length > LONGEST_FUNCTION]
    assert long == []


@EACH
def test_booleans_are_given_by_name(path: Path) -> None:
    """f(x, True) says nothing: a bool is keyword-only, unless it is all that a function takes."""
    assert boolean_traps(parse(path)) == []


def test_boolean_traps_are_found_by_a_check_that_can_fail() -> None:
    assert boolean_traps(ast.parse("def f(x, deep: bool): ...")) == ["f(deep)"]
    assert boolean_traps(ast.parse("def f(x, deep=False): ...")) == ["f(deep)"]
    assert boolean_traps(ast.parse("def f(x, *, deep: bool): ...\nclass A:\n    def g(self, on: bool): ...")) == []


@EACH
def test_names_say_what_things_are(path: Path) -> None:
    named = [node.name for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    bad = [name for name in [path.stem, path.parent.name, *named] if words(name) & FORBIDDEN_WORDS]
    assert bad == []


def test_words_of_names() -> None:
    assert words("HTTPHelper") == {"http", "helper"}
    assert words("_cache_manager") == {"cache", "manager"}
    assert words("commons") == {"commons"}


@EACH
def test_modules_say_what_they_do(path: Path) -> None:
    assert ast.get_docstring(parse(path)), "a module opens with a few lines on what it does"


@EACH
def test_no_assert_and_no_print(path: Path) -> None:
    tree = parse(path)
    asserts = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    prints = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "print"]
    assert asserts == [], "errors come from wager.errors"
    assert prints == [] or room(module(path)) == "cli", "only the command line prints"


def sources() -> list[Path]:
    native = [path for kind in ("*.h", "*.cpp") for path in (ROOT / "csrc").glob(kind)]
    return [*files(), *native]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LONG.get(name, LONGEST), f"{name} has {lines} lines"


def test_the_list_of_long_files_is_up_to_date() -> None:
    stale = [n for n in LONG if not (ROOT / n).exists() or len((ROOT / n).read_text().splitlines()) <= LONGEST]
    assert stale == []


def test_the_front_door() -> None:
    import wager

    assert set(wager.__all__) == FRONT_DOOR
    assert [name for name in FRONT_DOOR if not hasattr(wager, name)] == []


@pytest.mark.parametrize(
    "name",
    ["wager.cli", "wager.cli.plan_text", "wager.bench.report", "wager.economics.policy.base", "wager.models.hub"],
)
def test_torch_is_not_imported_before_it_is_needed(name: str) -> None:
    code = f"import {name}, sys; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0
