"""Runs each client's script in an environment of its own, and writes the table of docs/clients.md.

python tests/clients/environments.py [--only NAME] [--write]

An environment is made from the package index where it is missing, in WAGER_TEST_CLIENTS (a folder), and stays there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import click

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PAGE = ROOT / "docs" / "clients.md"
RESULTS = FOLDER / "results.json"
FEATURES = ("chat", "stream", "tools", "structured", "completions", "responses", "messages", "errors")
SCRIPTS = sorted(path for path in FOLDER.iterdir() if path.stem.endswith(("_python", "_npm")))
MODEL = "SmolLM2-135M-Instruct"
_BEGIN, _END = "<!-- table -->\n", "<!-- end of the table -->"


def environment(script: Path, folder: Path) -> list[str]:
    """The command that runs a script, in an environment that has what its first line requires."""
    first = script.read_text(encoding="utf-8").splitlines()[0]
    required = first.partition("requires: ")[2].split()
    place = folder / script.stem
    if script.suffix == ".mjs":
        if not (place / "node_modules").exists():
            place.mkdir(parents=True, exist_ok=True)
            subprocess.run(["npm", "install", "--silent", "--prefix", place, *required], check=True, timeout=900)
        for name in (script.name, "feature.mjs"):
            (place / name).write_text((FOLDER / name).read_text(encoding="utf-8"), encoding="utf-8")
        return ["node", str(place / script.name)]
    python = place / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *required], check=True, timeout=1800)
    return [str(python), str(script)]


def version(script: Path, folder: Path) -> str:
    """The client and its version."""
    first = script.read_text(encoding="utf-8").splitlines()[0].partition("requires: ")[2].split()[0]
    name = first.partition("[")[0]
    place = folder / script.stem
    if script.suffix == ".mjs":
        found = json.loads((place / "node_modules" / name / "package.json").read_text(encoding="utf-8"))
        return f"{name} {found['version']} (npm)"
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    told = subprocess.run([place / "bin" / "python", "-c", code], capture_output=True, text=True, check=True)
    return f"{name} {told.stdout.strip()}"


def run(script: Path, url: str, folder: Path) -> Mapping[str, str]:
    """What came of each feature."""
    command = [*environment(script, folder), url, MODEL]
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    told = subprocess.run(command, capture_output=True, text=True, timeout=900, env=variables)
    lines = told.stdout.strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        raise RuntimeError(f"{script.name} ended with {told.returncode}: {told.stderr[-2000:]}")
    sys.stderr.write(told.stderr[-3000:])
    found: Mapping[str, str] = json.loads(lines[-1])
    return found


def table(results: Mapping[str, Mapping[str, str]]) -> str:
    """The results as a table of Markdown."""
    lines = [f"| client | {' | '.join(FEATURES)} |", "|---" * (len(FEATURES) + 1) + "|"]
    for client, found in sorted(results.items()):
        cells = [found.get(name, "").partition(":")[0] or " " for name in FEATURES]
        lines.append(f"| {client} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page_with(results: Mapping[str, Mapping[str, str]]) -> str:
    text = PAGE.read_text(encoding="utf-8")
    return re.sub(f"{_BEGIN}.*{_END}", lambda _: _BEGIN + table(results) + _END, text, flags=re.DOTALL)


@click.command()
@click.option("--only", default="", help="Scripts whose names begin with this.")
@click.option("--write", is_flag=True, help="Write the results, and the table of docs/clients.md.")
def main(*, only: str, write: bool) -> None:
    sys.path.insert(0, str(FOLDER.parent))
    from serve.serving import server_process

    folder = Path(os.environ["WAGER_TEST_CLIENTS"]).absolute()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    with server_process("--model", MODEL) as server:
        for script in SCRIPTS:
            if script.stem.startswith(only):
                found = run(script, server.url, folder)
                name = version(script, folder)
                click.echo(f"{name}: {json.dumps(found)}")
                kind = name.partition(" ")[0] + ("(npm)" if "(npm)" in name else "")
                results = {
                    each: told
                    for each, told in results.items()
                    if each.partition(" ")[0] + ("(npm)" if "(npm)" in each else "") != kind
                }
                results[name] = found
    if write:
        RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page_with(results), encoding="utf-8")


if __name__ == "__main__":
    main()
