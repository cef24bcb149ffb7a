"""Every script of examples/ runs, as its docstring says, on a toy model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from wager.cli import main

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TINY = "random:llama:tiny"


def run(name: str, *arguments: str, given: str = "", tmp_path: Path) -> str:
    """What an example prints; it must end well."""
    environment = {**os.environ, "WAGER_CACHE": str(tmp_path)}
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def accepted(line: str) -> tuple[int, int]:
    """Accepted and drafted guesses of a line such as `3 of 12 guesses accepted`."""
    found = re.search(r"(\d+) of (\d+) guesses accepted", line)
    assert found is not None, line
    return int(found[1]), int(found[2])


def test_each_example_is_run_here_says_how_to_run_it_and_is_short() -> None:
    tested = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES:
        text = path.read_text(encoding="utf-8")
        assert f'"{path.name}"' in tested
        assert f"    python examples/{path.name}" in text.split('"""')[1]
        assert text.count("\n") <= 65, path.name


@pytest.mark.slow
def test_the_examples_do_what_they_say(tmp_path: Path) -> None:
    printed = run("chat.py", TINY, given="hello\nand again\n", tmp_path=tmp_path)
    assert printed.count("tokens a pass") == 2
    rows = [json.loads(line) for line in run("batch.py", TINY, given="a\nb\n", tmp_path=tmp_path).splitlines()]
    assert [row["prompt"] for row in rows] == ["a", "b"]
    assert all(0 < row["passes"] <= row["tokens"] for row in rows)
    printed = run("plan_a_deployment.py", "Qwen3-30B-A3B", "H100", "B200", tmp_path=tmp_path)
    assert [line.split()[0] for line in printed.splitlines()[2:]] == ["H100"] * 4 + ["B200"] * 4
    plan, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    assert (
        main([*["plan", "--model", "Llama-3.1-8B", "--hardware", "H100", "--context", "4k,32k", "--json"], str(plan)])
        == 0
    )
    run("draw_a_plan.py", str(plan), str(picture), tmp_path=tmp_path)
    assert "<svg" in picture.read_text()
    assert accepted(run("train_a_head.py", TINY, "4", tmp_path=tmp_path).splitlines()[-1])[1] > 0


@pytest.mark.slow
def test_the_server_gives_one_text_with_and_without_speculation(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    on, off = run("server_and_openai_client.py", TINY, tmp_path=tmp_path).splitlines()
    assert on.removeprefix("speculation on: ") == off.removeprefix("speculation off: ") != "''"


@pytest.mark.slow
@pytest.mark.real
def test_own_drafters_and_policies_change_no_text(smollm2: Path, tmp_path: Path) -> None:
    guesses, same = run("custom_drafter.py", str(smollm2), tmp_path=tmp_path).splitlines()
    assert accepted(guesses)[0] > 0 and same == "same token ids: True"
    assert accepted(run("custom_policy.py", str(smollm2), tmp_path=tmp_path))[0] > 0
