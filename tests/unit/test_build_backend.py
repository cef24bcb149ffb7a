"""The build backend asks for a compiler from the package index where there is none, and only there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BROKEN = "#!/bin/sh\nexit 1\n"


def requires(hook: str, **environment: str) -> list[str]:
    """What the hook asks for, with nothing in the environment besides."""
    program = f"import json, wager_build; print(json.dumps(wager_build.{hook}()))"
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT / "build_backend"), **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return list(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.parametrize("hook", ["get_requires_for_build_wheel", "get_requires_for_build_editable"])
@pytest.mark.parametrize("compiler", ["none", "broken", "CXX", "working"])
def test_ziglang_is_required_where_no_compiler_works(hook: str, compiler: str, tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path)}
    if compiler == "broken":  # such as that of macOS without its command line tools
        (tmp_path / "c++").write_text(BROKEN)
        (tmp_path / "c++").chmod(0o755)
    if compiler == "CXX":  # the user's choice: if it does not work, its own error is what to show
        environment["CXX"] = "/absent/c++"
    if compiler == "working":
        found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
        if found is None:
            pytest.skip("this machine has no compiler")
        environment["PATH"] = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    asked = [name for name in requires(hook, **environment) if name.startswith("ziglang")]
    assert len(asked) == (compiler in ("none", "broken"))


def test_without_isolation_a_missing_compiler_is_named(tmp_path: Path) -> None:
    program = "import sys, wager_build; sys.modules['ziglang'] = None; wager_build.build_wheel('.')"
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT / "build_backend"), "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == 1
    assert "There is no C++ compiler" in run.stderr and "ziglang" in run.stderr and "Traceback" not in run.stderr
