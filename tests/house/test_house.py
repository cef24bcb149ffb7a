"""The house rules: floors, names, sizes, and what a file must not contain."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from floors import MAY_IMPORT, SOURCE, files, module, room, violations

ROOT = SOURCE.parents[1]
FORBIDDEN_WORDS = {"helper", "helpers", "util", "utils", "misc", "common", "manager", "handler"}
LONGEST = 300
LONG = {"src/wager/types.py": 345}
"""Files allowed to be longer, each with the lines it may have."""

FRONT_DOOR = {
    "Completion",
    "Engine",
    "EngineConfig",
    "Event",
    "LoadedEngine",
    "Request",
    "SamplingParams",
    "Stats",
    "WagerError",
    "load",
}

EACH = pytest.mark.parametrize("path", files(), ids=lambda path: module(path) or "wager")


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


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
        ("kernels.base", "from wager import config", "imports config"),
        ("kv.pages", "def f():\n    from wager.models import tokenizer", "imports models"),
        ("kv.pages", "if TYPE_CHECKING:\n    from wager.verify.pack import pack", "imports verify"),
        ("models.hub", "from wager.economics import policy", "imports economics"),
        ("models.physics.shape", "from wager.models import hub", "imports models"),
        ("models.physics.shape", "from wager.types import Draft", "imports types"),
        ("models.physics.table", "import torch", "imports torch"),
        ("economics.cost", "from wager.models.transformer import Decoder", "imports models"),
        ("economics.policy", "import torch.nn", "imports torch"),
        ("economics.policy", "from torch import nn", "imports torch"),
        ("engine.core", "from wager.bench import report", "imports bench"),
        ("engine.core", "from wager import load", "imports the front door"),
        ("engine.core", "from wager.engine.build import load", "imports engine.build"),
        ("engine.core", "from wager.testing import ToyTarget", "imports testing"),
        ("draft.ngram", "from .base import Drafter", "imports relatively"),
        ("draft.ngram", "importlib.import_module('wager.engine.core')", "imports engine"),
        ("draft.ngram", "importlib.import_module(name)", "imports by a name made up"),
        ("bench.measure", "from wager.cli.console import say", "imports cli"),
        ("", "import wager.cli", "imports cli"),
    ],
)
def test_the_floors_are_kept_by_a_check_that_can_fail(name: str, code: str, complaint: str) -> None:
    [found] = violations(name, ast.parse(code))
    assert complaint in found


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("kernels.cpu", "from wager.kernels.base import PAGE"),
        ("models.families", "from wager.models.spec import ModelSpec"),
        ("economics.cost", "from wager.models.physics.shape import Model"),
        ("engine.core", "from wager.kv.pages import PageTable"),
        ("cli.run", "import wager"),
        ("cli.prove", "from wager.testing import AdversaryDrafter"),
        ("engine.drafters", "from wager.testing import AdversaryDrafter"),
        ("", "from wager.engine.core import Engine"),
    ],
)
def test_what_the_floors_allow_passes(name: str, code: str) -> None:
    assert violations(name, ast.parse(code)) == []


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
