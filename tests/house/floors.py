"""Which package may import which (the floors of the design), and how to find out what a file imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "wager"

_VALUES = {"types", "prompts", "tenants", "errors", "inputs", "arch"}
_ECONOMICS = {"economics", "economics.policy"}
_NUMBERS = _VALUES | {"config", "trace", "kernels"}
_BELOW_ENGINE = _NUMBERS | _ECONOMICS | {"models", "kv", "verify", "constrain", "draft", "drafter_spec"}
_BELOW_LOADING = _BELOW_ENGINE | {"engine", "profiling"}

MAY_IMPORT: dict[str, set[str]] = {
    # floor 0
    "types": {"errors"},
    "tenants": {"types"},
    "prompts": {"errors", "types"},
    "errors": set(),
    "inputs": {"errors"},
    "arch": {"errors", "inputs"},
    # floor 1
    "config": _VALUES | {"drafter_spec", "economics", "economics.policy"},  # to parse drafters, policies and objectives
    "trace": set(),
    "kernels": _VALUES,
    "economics": _VALUES | {"kernels"},
    "economics.policy": _VALUES | {"economics", "kernels"},
    # floor 2: never each other
    "models": _NUMBERS,
    "kv": _NUMBERS,
    "verify": _NUMBERS,
    "constrain": _VALUES,
    "bench": _NUMBERS | _ECONOMICS,
    # floor 3
    "draft": {"models", "kv", "kernels", "verify", "drafter_spec"} | _VALUES,
    "drafter_spec": {"errors", "inputs"},
    # floor 4: profiling and testing run an engine
    "engine": _BELOW_ENGINE,
    "profiling": _BELOW_ENGINE | {"engine"},
    "testing": _BELOW_ENGINE | {"engine"},
    # floor 5
    "loading": _BELOW_LOADING,
    "llm": _BELOW_LOADING | {"loading"},
    "async_llm": _BELOW_LOADING | {"loading"},
    "train": _BELOW_LOADING | {"loading"},
    # what commands share
    "terminal": _VALUES | {"bench", "config", "drafter_spec", "economics"},
    # beside the engine, which knows nothing of them: commands of their own
    "planner": _VALUES | _ECONOMICS | {"terminal", "bench", "config", "kernels", "models"},
    "simulation": _VALUES | _ECONOMICS | {"terminal", "config", "planner"},
    # above: wager/__init__.py imports all but the command line, which imports all but testing
    "serve": _BELOW_LOADING | {"", "loading", "async_llm"},
    "": _BELOW_LOADING | {"loading", "llm", "async_llm"},
    "cli": _BELOW_LOADING
    | {
        "terminal",
        "",
        "loading",
        "llm",
        "async_llm",
        "bench",
        "testing",
        "train",
        "serve",
        "planner",
        "simulation",
    },
}
"""Package -> packages it may import besides itself; "" is wager/__init__.py."""

TORCH = {"train"}
"""Packages that may import torch."""

LATE = {"", "cli"}
"""Packages that import modules by name at run time, so that start-up is short."""


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def module(path: Path) -> str:
    """The file's name below wager: `kernels.base`, `kernels` for its __init__, "" for wager/__init__.py."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package(name: str) -> str:
    """The package of a module: its longest prefix in MAY_IMPORT."""
    while "." in name and name not in MAY_IMPORT:
        name = name.rpartition(".")[0]
    return name


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything imported anywhere: in functions and under TYPE_CHECKING too.

    `from a import b` yields a.b, since b may be a module. A relative import yields a name that starts with a dot.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            name = node.args[0]
            known = isinstance(name, ast.Constant) and isinstance(name.value, str)
            yield node.lineno, str(name.value) if known else f"dynamic:{ast.unparse(name)}"


def violations(name: str, tree: ast.AST) -> list[str]:
    """The forbidden imports of module `name`, one line each."""
    complaints = []
    own = package(name)
    for line, imported in imports(tree):
        complaint = ""
        if imported.startswith("dynamic:"):
            complaint = "" if own in LATE else "imports by a name computed at run time"
        elif imported.startswith("."):
            complaint = "imports relatively"
        elif imported.split(".")[0] == "torch":
            complaint = "" if own in TORCH else "imports torch"
        elif imported.split(".")[0] == "wager":
            other = package(_known(imported.partition(".")[2]))
            complaint = "" if other == own or other in MAY_IMPORT[own] else f"imports {other or 'wager/__init__.py'}"
        if complaint:
            complaints.append(f"wager.{name}, line {line}: {complaint} ({imported})")
    return complaints


def _known(name: str) -> str:
    """The longest beginning of `name` that is a module of ours; "" is wager/__init__.py."""
    while name and not ((SOURCE / Path(*name.split("."))).with_suffix(".py").exists() or _is_package(name)):
        name = name.rpartition(".")[0]
    return name


def _is_package(name: str) -> bool:
    return (SOURCE / Path(*name.split("."))).is_dir()


def import_graph() -> dict[str, set[str]]:
    """Module -> modules of ours that it imports when it is imported itself (not in functions, nor for types alone)."""
    graph = {}
    for path in files():
        own = module(path)
        graph[own] = {
            _known(name.partition(".")[2]) for _, name in _at_import(ast.parse(path.read_text(encoding="utf-8")))
        }
        graph[own] -= {own, ""}
    return graph


def _at_import(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((line, name) for line, name in imports(ast.Module([node], [])) if name.startswith("wager."))


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that can reach each other, one sorted list for each circle."""
    reach = {name: _reachable(graph, name) for name in graph}
    cycles = {tuple(sorted(other for other in reach[name] if name in reach.get(other, ()))) for name in graph}
    return sorted(list(cycle) for cycle in cycles if cycle)


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    pending = list(graph.get(start, ()))
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += graph.get(name, ())
    return reached
