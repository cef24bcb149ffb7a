"""The documents match the program: commands parse and run, the help is that of docs/cli.md, links lead somewhere."""

from __future__ import annotations

import ast
import io
import json
import re
import shlex
import sys
from pathlib import Path

import click
import pytest

import wager as package
from in_process import Call
from serve.serving import server_process
from wager.bench.machine import Machine
from wager.cli import VERBS, cli, main, reference
from wager.config import DEFAULT_MODEL
from wager.drafter_spec import descriptions
from wager.models import hub

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands(text: str) -> list[str]:
    """Every call of wager in code: in blocks, every step of a line; inline, the text between backticks."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    steps = [step.strip() for block in blocks for line in block.splitlines() for step in line.split("&&")]
    called = [step.removeprefix(".venv/bin/") for step in steps]
    inline = re.findall(r"`(wager [^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [call for call in [*called, *inline] if call.startswith("wager ")]


def check(call: str) -> None:
    """Parse a command line as the program would; raises click.UsageError."""
    _, verb, *arguments = shlex.split(call)
    top = click.Context(cli, **cli.context_settings)
    command = cli.get_command(top, verb)
    if command is None:
        raise click.UsageError(f"no verb {verb}")
    if arguments and "--help" not in arguments and verb != "VERB":  # a verb alone may be a name, not a call
        command.make_context(verb, arguments, parent=top)


CALLS = [(page.name, call) for page in PAGES if page.name != "cli.md" for call in commands(page.read_text("utf-8"))]


def test_commands_in_the_documents_parse() -> None:
    for page, call in CALLS:
        try:
            check(call)
        except click.UsageError as error:
            pytest.fail(f"{page}: {call}: {error.message}")
    assert {shlex.split(call)[1] for _, call in CALLS} == set(VERBS)


def test_the_command_page_is_the_programs_help() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert page == reference.render(), "run: python -m wager.cli.reference > docs/cli.md"


def test_every_drafter_is_in_the_table_of_drafters() -> None:
    page = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8")
    table = "\n".join(line for line in page.partition("\n## ")[0].splitlines() if line.startswith("| `"))
    for name in descriptions():
        assert "`" + (re.split(r"[\[:]", name)[0] or name) in table, name


def test_the_readme_is_short_and_set_up_and_tests_take_one_line_each() -> None:
    assert len(README.split()) <= 1000
    assert f"{DEFAULT_MODEL} ({hub.KNOWN[DEFAULT_MODEL].wheel_bytes / 1e6:.0f} MB)" in README
    lines = [block.strip() for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)]
    assert ["\n" in line for line in lines] == [False, False]
    assert '.venv/bin/wager run "' in lines[0] and lines[1].endswith(".venv/bin/pytest -n auto")


def test_ci_runs_the_readmes_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    [line] = [line for line in README.splitlines() if ".venv/bin/pytest" in line]
    places = [next(i for i, text in enumerate(script) if step in text) for step in line.split(" && ")]
    assert places == sorted(places)
    tests = line.split(" && ")[-1]
    assert script[-2:] == [tests, f"{tests} -m slow"], "the tests come last, so that their summary does"


def test_the_readmes_python_uses_names_that_exist() -> None:
    [code] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    attributes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in attributes if ast.unparse(node.value) == "wager"}
    assert used and used <= set(package.__all__)


def test_the_bench_page_lists_the_fields_of_a_row() -> None:
    page = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
    from wager.bench import measure
    from wager.bench.machine import card as conditions
    from wager.prompts import Prompt
    from wager.types import Completion, Stats

    stats = Stats(prompt_tokens=1, completion_tokens=1, seed=0, rounds=1)
    record = measure.Measurement([[Completion("p", 0, (1,), "", "length", stats)]], [1.0])
    rows = measure.rows([Prompt("p", "qa", "?")], record)
    listed = re.findall(r'"rows":\s+\[\{(.*?)\}\]', page, re.DOTALL)[0]
    assert re.findall(r'"(\w+)"', listed) == list(rows[0])
    summary = re.findall(r'"summary": \{(.*?)"per_category"', page, re.DOTALL)[0]
    assert re.findall(r'"(\w+)"', summary) == [k for k in measure.summary(rows, wall_s=1.0) if k != "per_category"]
    card = conditions(model="", kernels={}, settings={})
    assert all(f'"{key}"' in page for key in card)
    assert isinstance(card["machine"], dict)
    assert set(card["machine"]) == set(Machine.__dataclass_fields__)


# ---- links and paths lead somewhere: files, headings, and what docs/architecture.md names ----------------------------

LINKING = [
    path for pattern in ("*.md", "docs/*.md", "dev/*.md", ".github/**/*.md") for path in sorted(ROOT.glob(pattern))
]
NO_PATHS = {"config.json", "model.safetensors", "tokenizer.json"}


def prose(page: Path) -> str:
    """The text of a page without what stands in blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.append(anchor if anchor not in found else f"{anchor}-{found.count(anchor)}")
    return set(found)


def dead_links(page: Path) -> list[str]:
    """The relative links of a page that lead to no file, or to no heading of it."""
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(target)
    return dead


def named_paths(page: Path) -> set[str]:
    """What a page names in backticks that has the form of a path of the repository."""
    named = re.findall(r"`([\w./-]+)`", prose(page))
    return {name for name in named if re.search(r"\.(py|h|cpp|md)$|\w/$", name)} - NO_PATHS


def test_links_lead_somewhere() -> None:
    assert {str(page.relative_to(ROOT)): dead for page in LINKING if (dead := dead_links(page))} == {}


def test_paths_that_are_named_exist() -> None:
    for name in ("docs/architecture.md", "CONTRIBUTING.md"):
        paths = named_paths(ROOT / name)
        assert len(paths) > 10
        roots = ROOT, ROOT / "src" / "wager"
        assert [path for path in sorted(paths) if not any((root / path).exists() for root in roots)] == []


def test_the_index_lists_every_page_once() -> None:
    listed = re.findall(r"^- \[[^]]*\]\(([^)#]+)\): \w", (ROOT / "docs" / "index.md").read_text("utf-8"), re.MULTILINE)
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert sorted(target for target in listed if "/" not in target) == sorted(pages)


# ---- the README's commands run --------------------------------------------------------------------------------------

PLACEHOLDERS = {"PROMPT": "Why is the sky blue?", "M": "Qwen3-8B", "H": "H100", "MODEL": DEFAULT_MODEL}
SHORT = {
    "run": "--max-tokens 8",
    "chat": "--max-tokens 8",
    "bench": "--limit 1 --max-tokens 8",
    "acceptance": "--limit 1 --max-tokens 8",
    "prove": "--limit 1 --max-tokens 8 --concurrency 2",
    "popularity": "--model random:qwen3-moe:tiny --max-tokens 4",
    "train": "--model random:llama:tiny --answer-tokens 8 --steps 1 --batch 64 --vocabulary 64 --threads 1",
    "calibrate": "--seconds 1",
    "replay": "--concurrency 4 --rounds 300 --output 64",
}
"""Options that make a command of the README short enough for a test."""

SERVER_CALLS = [call for page, call in CALLS if page == "README.md" and ("serve" in call.split() or "--url" in call)]
"""Tested together below: `wager serve` does not end by itself, and `--url` needs a server."""

README_CALLS = {call for page, call in CALLS if page == "README.md"} - {*SERVER_CALLS}
README_CALLS = sorted(README_CALLS, key=lambda call: ("PROMPT" not in call, call))


@pytest.mark.real
@pytest.mark.parametrize("call", README_CALLS)
def test_the_readmes_commands_run(
    call: str,
    smollm2: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": 1, "category": "qa", "prompt": "Why is the sky blue?"}), encoding="utf-8")
    values = {**PLACEHOLDERS, "FILE": str(prompts), "FOLDER": str(tmp_path / "head")}
    _, verb, *words = shlex.split(call)
    arguments = [verb, *(values.get(word, word) for word in words), *SHORT.get(verb, "").split()]
    if verb == "pull" and hub.find(DEFAULT_MODEL) is None:
        pytest.skip("the model comes from WAGER_TEST_MODEL; nothing is fetched here")
    if verb != "pull":  # nothing is stored among the user's own calibrations
        monkeypatch.setenv("WAGER_CACHE", str(tmp_path / "cache"))
    if verb in ("run", "chat", "bench", "acceptance", "prove", "calibrate"):
        arguments += ["--model", str(smollm2)]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Why is the sky blue?\n/exit\n"))
    code = main(arguments)
    out, err = capfd.readouterr()
    assert code == 0, err
    assert out.strip()
    assert "Traceback" not in err


@pytest.mark.real
@pytest.mark.slow
def test_the_readmes_server_answers_its_load_client_and_ends_in_order(
    wager: Call, smollm2: Path, tmp_path: Path
) -> None:
    assert {"wager serve", "wager bench --url URL"} <= {*SERVER_CALLS}
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": number, "category": "qa", "prompt": f"What is {number} + {number}?"} for number in range(8)]
    prompts.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with server_process("--model", str(smollm2)) as server:
        more = "--requests 4 --max-tokens 8 --concurrency 2 --json -"
        done = wager("bench", str(prompts), "--url", server.url, more=more)
        assert done.code == 0, done.err
        assert json.loads(done.out)


@pytest.mark.real
@pytest.mark.slow
def test_the_readmes_python_runs(smollm2: Path, capfd: pytest.CaptureFixture[str]) -> None:
    [code] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert f'"{DEFAULT_MODEL}"' in code
    exec(code.replace(DEFAULT_MODEL, str(smollm2)).replace("max_tokens=100", "max_tokens=24"), {})
    *text, tau = capfd.readouterr().out.split()
    assert len(text) > 3
    assert float(tau) >= 1


def test_every_verb_of_the_readme_is_run() -> None:
    assert {shlex.split(call)[1] for call in (*README_CALLS, *SERVER_CALLS)} == set(VERBS)
