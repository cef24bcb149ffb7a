"""Which room may import which, and how to find out what a file imports. The table is the plan of the house."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "wager"

_VALUES = {"types", "sampling", "errors", "arch"}
_ECONOMICS = {"economics", "economics.costmodel", "economics.latency", "economics.policy", "economics.simulation"}
_NUMBERS = _VALUES | {"config", "trace", "kernels"}
_BELOW_ENGINE = _NUMBERS | _ECONOMICS | {"models", "kv", "verify", "draft", "draft.registry"}
_BELOW_BUILD = _BELOW_ENGINE | {"engine", "profiling"}

MAY_IMPORT: dict[str, set[str]] = {
    # floor 0
    "types": {"errors", "sampling"},
    "sampling": {"errors"},
    "errors": set(),
    "arch": {"errors"},
    # floor 1
    "config": _VALUES
    | {"draft.registry", "economics", "economics.policy"},  # the grammar of drafters, policies and objectives
    "trace": _VALUES,
    "kernels": _VALUES,
    "economics": _VALUES,
    "economics.costmodel": _VALUES | {"economics"},
    "economics.latency": _VALUES | {"economics"},
    "economics.policy": _VALUES | {"economics"},
    "economics.simulation": _VALUES | {"economics", "economics.costmodel", "economics.policy"},
    # floor 2: never each other
    "models": _NUMBERS,
    "kv": _NUMBERS,
    "verify": _NUMBERS,
    "bench": _NUMBERS | _ECONOMICS,
    # floor 3
    "draft": {"models", "kv", "kernels", "verify"} | _VALUES,
    "draft.registry": {"draft", "kernels"} | _VALUES,
    # floor 4: profiling and the toys run a whole engine
    "engine": _BELOW_ENGINE,
    "profiling": _BELOW_ENGINE | {"engine"},
    "testing": _BELOW_ENGINE | {"engine"},
    # floor 5
    "build": _BELOW_BUILD,
    "llm": _BELOW_BUILD | {"build"},
    # above: the front door opens on everything but the command line, which sees everything but the toys
    "": _BELOW_BUILD | {"build", "llm"},
    "cli": _BELOW_BUILD | {"", "build", "llm", "bench"},
}
"""Room -> rooms it may import besides itself; "" is the front door, wager/__init__.py."""

LATE = {"", "cli"}
"""Rooms that import by names they look up, so that a short start stays short."""

NO_TORCH = {"types", "sampling", "draft.registry", "errors", "arch", "config", "trace", "bench", *_ECONOMICS}


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def module(path: Path) -> str:
    """The file's name below wager: `kernels.base`, `kernels` for its __init__, "" for the front door."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(name: str) -> str:
    """The room of a module, the most particular one the table knows."""
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
    """What module `name` imports and may not, one line each."""
    found = []
    own = room(name)
    for line, imported in imports(tree):
        complaint = ""
        if imported.startswith("dynamic:"):
            complaint = "" if own in LATE else "imports by a name made up at run time"
        elif imported.startswith("."):
            complaint = "imports relatively"
        elif imported.split(".")[0] == "torch":
            complaint = "imports torch" if own in NO_TORCH else ""
        elif imported.split(".")[0] == "wager":
            other = room(_known(imported.partition(".")[2]))
            complaint = "" if other == own or other in MAY_IMPORT[own] else f"imports {other or 'the front door'}"
        if complaint:
            found.append(f"wager.{name}, line {line}: {complaint} ({imported})")
    return found


def _known(name: str) -> str:
    """The longest beginning of `name` that is a module of ours; "" is the front door."""
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
    rings = {tuple(sorted(other for other in reach[name] if name in reach.get(other, ()))) for name in graph}
    return sorted(list(ring) for ring in rings if ring)


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    todo = list(graph.get(start, ()))
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += graph.get(name, ())
    return found
