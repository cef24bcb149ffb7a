"""Rules of the code base that ruff and mypy do not know: floors, circles, names; and what is imported, and when.

(ruff bans relative imports, torch outside of `train/`, and positional booleans. import-linter knows layers, but not
wager/__init__.py as one of them; it sees no import_module, and counts imports in functions as circles.)
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import wager
from wager.kernels import _native

SOURCE = Path(__file__).parents[2] / "src" / "wager"

FLOORS = (
    {"cli"},
    {"serve", "planner", "simulation"},
    {""},  # wager/__init__.py
    {"llm", "async_llm", "receipts"},
    {"loading"},
    {"train", "profiling", "testing", "terminal"},
    {"engine", "bench", "config"},
    {"draft"},
    {"models", "kv", "verify", "constrain"},
    {"trace", "economics", "prompts", "tenants", "drafter_spec"},
    {"kernels"},
    {"arch"},
    {"types"},
    {"inputs", "elementary"},
    {"errors"},
)
"""Packages, top to bottom. A package imports what stands below it."""

BESIDE = {("simulation", "planner")}
"""What may import a package of its own floor."""

APART = {"planner": {"llm", "loading", "engine", "draft", "kv", "profiling", "testing", "train", ""}}
APART["simulation"] = APART["planner"]
APART["economics"] = {"config"}
"""What may not be imported although it stands below: plan and replay know nothing of the engine."""

COMMANDS = ("cli", "terminal", "planner.command", "simulation.command")
"""What starts a command: it imports in functions, so that a command waits for nothing that it does not use."""

LATE = {
    ("bench.machine", "kernels.cpu"),
    ("loading.drafters", "draft.combined"),
    ("loading.drafters", "loading.heads"),
    ("loading.load", "draft.corpus.learning"),
    ("loading.load", "profiling.calibrate"),
    ("models.head_files", "models.quantised_checkpoints"),
    ("models.head_files", "models.safetensors_files"),
    ("models.hub", "models.download"),
    ("models.opening", "models.random_models"),
    ("models.tokenizer", "models.chat_template"),
    ("models.weights", "models.safetensors_files"),
    ("models.weights", "models.gpt_oss"),  # these two read safetensors
    ("models.weights", "models.quantised_checkpoints"),
    ("planner.inputs", "models.opening"),
    ("planner.options", "models.companions"),
    ("train.answers", "train.generation"),
    ("train.convert", "train.export"),
}
"""The other modules that are imported in functions: few starts need them, and they or their libraries load slowly."""

FLOOR_OF = {name: floor for floor, names in enumerate(reversed(FLOORS)) for name in names}

FORBIDDEN_WORDS = {"helper", "helpers", "util", "utils", "misc", "common", "manager", "handler"}

PUBLIC_NAMES = set(
    re.findall(
        r"\w+",
        "AsyncLLM AsyncOutputStream CacheIntegrityError CapacityConfig ClosedError Completion DownloadError Engine "
        "EngineConfig Grammar GrammarError LLM LearningConfig MemoryPlanError ModelConfig ModelError NumericsError "
        "OutputDelta OutputStream Receipt Request RequestError RequestSpeculation SamplingParams SpeculationConfig "
        "Stats TokenLogprob TokenizerError UsageError Verification WagerError",
    )
)


@cache
def trees() -> dict[str, ast.Module]:
    """The syntax tree of every module by its name below wager: `kernels.base`, "" for wager/__init__.py."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


@cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    return list(ast.walk(tree))


def called(node: ast.Call) -> str:
    """The last part of the name that is called."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


@cache
def imports(tree: ast.AST) -> set[str]:
    """The modules of wager that are imported anywhere: in functions and under TYPE_CHECKING too."""
    found = set()
    for node in nodes(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and called(node) == "import_module":
            names = [str(node.args[0].value)] if isinstance(node.args[0], ast.Constant) else []
        for name in names:
            head, _, module = name.partition(".")
            while head == "wager" and module and module not in trees():
                module = module.rpartition(".")[0]  # a name of the module
            if head == "wager":
                found.add(module)
    return found


def violations(name: str, tree: ast.AST) -> list[str]:
    """The imports of module `name` that its floor does not allow."""
    own = name.partition(".")[0]
    others = {module.partition(".")[0] for module in imports(tree)} - {own}
    return [
        f"{name} imports {other or 'wager/__init__.py'}"
        for other in sorted(others)
        if other in APART.get(own, ()) or (FLOOR_OF[other] >= FLOOR_OF[own] and (own, other) not in BESIDE)
    ]


def a_package_imports_what_stands_below_it() -> None:
    assert {name.partition(".")[0] for name in trees()} == set(FLOOR_OF)
    assert [complaint for name, tree in trees().items() for complaint in violations(name, tree)] == []
    for name, code in (
        ("engine.core", "from wager.planner import devices"),
        ("economics.surface", "if TYPE_CHECKING:\n    from wager.config import EngineConfig"),
        ("draft.ngram", "importlib.import_module('wager.engine.core')"),
        ("engine.core", "from wager import LLM"),
    ):
        assert len(violations(name, ast.parse(code))) == 1, code


def what_is_for_tests_is_used_where_texts_are_proven_alone() -> None:
    using = {name for name, tree in trees().items() if "testing" in {each.partition(".")[0] for each in imports(tree)}}
    assert {name for name in using if not name.startswith("testing")} == {"cli.prove"}


@cache
def names_of(tree: ast.Module) -> set[str]:
    """What can be imported from a module."""
    found: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def lacking(tree: ast.Module) -> list[str]:
    """The names that a script imports of wager and that are not there; of C++ all are."""
    found = []
    for node in ast.walk(tree):
        head, _, module = (getattr(node, "module", None) or "").partition(".")
        if isinstance(node, ast.ImportFrom) and head == "wager" and "_native" not in module:
            for name in {alias.name for alias in node.names} - {"_native"}:
                if name not in names_of(trees()[module]) and f"{module}.{name}".strip(".") not in trees():
                    found.append(f"{module}.{name}")
    return found


def scripts_import_what_there_is() -> None:
    """Nothing runs most of them, and mypy reads none."""
    root = SOURCE.parents[1]
    paths = [path for folder in ("dev", "examples") for path in sorted((root / folder).rglob("*.py"))]
    found = {path.name: lacking(ast.parse(path.read_text("utf-8"))) for path in paths}
    assert len(paths) > 20 and {name: names for name, names in found.items() if names} == {}
    assert lacking(ast.parse("from wager.types import Request, Wizard")) == ["types.Wizard"]


def nothing_imports_in_a_circle() -> None:
    """Modules that import each other when they are imported, not in functions nor for types alone."""
    graph = {}
    for name, tree in trees().items():
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        graph[name] = imports(ast.Module(top, [])) - {name, ""}
    TopologicalSorter(graph).prepare()  # CycleError names the circle


def late_imports(name: str, tree: ast.Module) -> set[tuple[str, str]]:
    """The modules of wager that a module imports in functions; libraries may be optional, or slow to import."""
    every = nodes(tree)
    functions = [node for node in every if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lines = {line for node in functions for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    found = [node for node in every if isinstance(node, ast.Import | ast.ImportFrom) and node.lineno in lines]
    return {(name, module) for module in imports(ast.Module(list(found), []))}


def a_function_imports_only_what_a_start_need_not_wait_for() -> None:
    late = [
        pair
        for name, tree in trees().items()
        if not any(name == start or name.startswith(f"{start}.") for start in COMMANDS)
        for pair in late_imports(name, tree)
    ]
    assert set(late) == LATE
    assert late_imports("a", ast.parse("def f():\n    from wager.types import Span")) == {("a", "types")}


def no_class_name_stands_twice() -> None:
    every = [node for tree in trees().values() for node in nodes(tree)]
    named = Counter(node.name for node in every if isinstance(node, ast.ClassDef))
    assert [name for name, count in named.items() if count > 1] == []


def no_name_has_a_forbidden_word() -> None:
    def words(name: str) -> set[str]:
        return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}

    assert words("HTTPHelper._cache_commons") == {"http", "helper", "cache", "commons"}
    named = ast.ClassDef | ast.FunctionDef
    every = [node for tree in trees().values() for node in nodes(tree)]
    names = [*trees(), *(node.name for node in every if isinstance(node, named))]
    assert [name for name in names if words(name) & FORBIDDEN_WORDS] == []


def test_the_rules_of_the_source() -> None:
    """One test, so that one process reads all of it."""
    a_package_imports_what_stands_below_it()
    what_is_for_tests_is_used_where_texts_are_proven_alone()
    scripts_import_what_there_is()
    nothing_imports_in_a_circle()
    a_function_imports_only_what_a_start_need_not_wait_for()
    no_class_name_stands_twice()
    no_name_has_a_forbidden_word()


def test_the_public_names() -> None:
    assert set(wager.__all__) == PUBLIC_NAMES <= set(dir(wager))
    assert [name for name in PUBLIC_NAMES if getattr(wager, name).__name__ != name] == []
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = wager.Nothing  # type: ignore[attr-defined]


def test_the_stub_of_the_extension_names_what_the_extension_has() -> None:
    """nanobind could write it, without the names of parameters, which no binding states."""

    def stated(body: list[ast.stmt]) -> set[str]:
        names = {
            node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        return public(names | {node.name for node in body if isinstance(node, ast.FunctionDef)})

    def public(names: Iterable[str]) -> set[str]:
        return {name for name in names if not name.startswith("_")}

    body = ast.parse((SOURCE / "kernels" / "_native.pyi").read_text(encoding="utf-8")).body
    classes = {
        node.name: stated(node.body)
        for node in body
        if isinstance(node, ast.ClassDef) and "Protocol" not in {ast.unparse(base) for base in node.bases}
    }
    there = {name: public(vars(value)) for name, value in vars(_native).items() if isinstance(value, type)}
    assert classes == there
    assert stated(body) == public(vars(_native)) - there.keys()


def test_all_files_of_bindings_see_the_same_conversions() -> None:
    """A file that lacks a header of nanobind's has another body of the same cast, of which the linker keeps either."""
    folder = Path(__file__).parents[2] / "csrc"
    texts = {path.name: path.read_text("utf-8") for path in folder.iterdir() if path.suffix in (".cpp", ".h")}
    including = {name for name, text in texts.items() if re.search(r"<nanobind/(nanobind|stl/\w+)\.h>", text)}
    assert including == {"conversions.h"}
    for name, text in texts.items():
        if "nanobind" in text and name.endswith(".cpp"):
            assert re.search(r'"(step_bindings|values|conversions)\.h"', text), name


# ---- what is imported, and when --------------------------------------------------------------------------------------


def imported_by(code: str) -> set[str]:
    """Names of the modules that a new process has after running `code`."""
    shown = f"{code}\nimport sys; print('modules:', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", shown], check=True, capture_output=True, text=True)
    return set(done.stdout.rpartition("modules:")[2].split())


@pytest.mark.parametrize(
    "code",
    [
        "import wager; wager.EngineConfig, wager.SamplingParams, wager.UsageError",
        "from wager.cli import main; main(['--help'])",
        "from wager.cli import main; main(['run', '--help'])",
    ],
)
def test_neither_the_package_nor_help_imports_numpy(code: str) -> None:
    modules = imported_by(code)
    assert "wager" in modules
    assert not modules & {"numpy", "gguf", "tokenizers", "jinja2", "huggingface_hub", "wager.kernels"}


def test_an_engine_imports_only_what_every_model_needs() -> None:
    modules = imported_by("import wager; wager.LLM")
    assert {"numpy", "wager.llm", "wager.models.transformer"} <= modules
    needed_by_some = {"torch", "gguf", "jinja2", "huggingface_hub", "matplotlib", "safetensors", "yaml"}
    needed_by_some |= {"wager.profiling", "wager.models.random_models", "wager.draft.model", "wager.loading.heads"}
    assert not modules & needed_by_some
