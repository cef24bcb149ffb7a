"""Wheels: what dev/wheels.py reads of a library is true, a wheel that would not run elsewhere is refused, and one runs
in an environment without a compiler and without anything of this one. That clang builds one .ci/run sees."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from wager.kernels import _native

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "dev"))
wheels = pytest.importorskip("wheels")  # needs scikit-build-core

HERE = wheels.TARGETS["manylinux-x86_64"]


def packed(folder: Path, library: bytes, *more: str) -> Path:
    path = folder / "wager-0-cp312-cp312-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("wager/kernels/_native.so", library)
        for name in more:
            archive.writestr(name, "")
    return path


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="the extension here is another")
def test_a_library_that_needs_more_than_its_tag_says_is_refused(tmp_path: Path) -> None:
    library = Path(_native.__file__).read_bytes()
    processor, needed, versions = wheels._elf(library)
    assert processor == "x86_64" and "libc.so.6" in needed and (2, 2, 5) in versions
    with pytest.raises(SystemExit) as refusal:  # built here, with this machine's C and C++ libraries
        wheels.check(packed(tmp_path, library, "a.dist-info/licenses/LICENSE"), HERE)
    said = str(refusal.value)
    assert "is not for manylinux_2_17_x86_64" in said and "libstdc++.so.6" in said and "no licences" in said
    with pytest.raises(SystemExit, match="a library for x86_64"):
        wheels.check(packed(tmp_path, library), wheels.TARGETS["manylinux-aarch64"])


@pytest.mark.slow
def test_a_wheel_runs_where_nothing_else_is(tmp_path: Path) -> None:
    """The one in WAGER_TEST_WHEEL; without it one of the Python files, beside which the extension of these tests is
    put. Its dependencies come from the package index."""
    wheel, python = os.environ.get("WAGER_TEST_WHEEL"), tmp_path / "fresh" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "fresh")], check=True)
    if wheel is None:
        pack = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-Cwheel.cmake=false"]
        subprocess.run([*pack, "-w", str(tmp_path), str(ROOT)], check=True)
    made = wheel or str(next(tmp_path.glob("*.whl")))
    subprocess.run([str(python), "-m", "pip", "install", "-q", "--only-binary", ":all:", made], check=True)
    if wheel is None:
        shutil.copy(_native.__file__, next((tmp_path / "fresh").rglob("wager/kernels/cpu.py")).parent)
    (tmp_path / "home").mkdir()
    environment = {"PATH": str(python.parent), "HOME": str(tmp_path / "home"), "WAGER_CACHE": str(tmp_path / "cache")}
    assert shutil.which("c++", path=environment["PATH"]) is None

    def call(*arguments: str) -> str:
        command = [str(python), "-m", "wager.cli", *arguments, "--model", "random:llama:tiny", "--threads", "1"]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    receipt = tmp_path / "receipt.json"
    answer = json.loads(call("run", "hello", "-n", "8", "--json", "-", "--receipt", str(receipt)))
    assert answer["tokens"] == 8
    assert "verified" in call("verify", str(receipt))
    described = subprocess.run(
        [str(python), "-m", "pip", "show", "-f", "wager"], capture_output=True, text=True, check=True
    ).stdout
    assert "THIRD_PARTY_NOTICES.md" in described and "SmolLM2-135M-Instruct.store" in described
    assert "/tests/" not in described and "dev/" not in described


# ---- the build backend -----------------------------------------------------------------------------------------------

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
