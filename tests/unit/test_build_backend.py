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


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Of a program with the backend and nothing else in its environment."""
    environment = {"PYTHONPATH": str(ROOT / "build_backend"), **environment}
    command = [sys.executable, "-c", f"import json, sys, wager_build; {program}"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("compiler", ["broken", "none", "CXX", "working"])
def test_ziglang_is_required_where_no_compiler_works(compiler: str, tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path)}
    if compiler == "broken":  # such as that of macOS without its command line tools
        (tmp_path / "c++").write_text(BROKEN)
        (tmp_path / "c++").chmod(0o755)
    if compiler == "CXX":  # the user's choice: if it does not work, its own error is what to show
        environment["CXX"] = "/absent/c++"
    if compiler == "working":
        if not any(map(shutil.which, ("c++", "g++", "clang++"))):
            pytest.skip("this machine has no compiler")
        environment["PATH"] = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    found = run("print(json.dumps(wager_build.get_requires_for_build_wheel()))", **environment)
    asked = [name for name in json.loads(found.stdout.splitlines()[-1]) if name.startswith("ziglang")]
    assert len(asked) == (compiler in ("none", "broken"))


def test_without_isolation_a_missing_compiler_is_named(tmp_path: Path) -> None:
    done = run("sys.modules['ziglang'] = None; wager_build.build_wheel('.')", PATH=str(tmp_path))
    assert done.returncode == 1
    assert "There is no C++ compiler" in done.stderr and "ziglang" in done.stderr and "Traceback" not in done.stderr
