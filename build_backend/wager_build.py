"""The build backend: scikit-build-core, with a C++ compiler from the package index where the machine has none.

The PyPI package `ziglang` is clang with a C++ library and a linker, for Linux, macOS and Windows. pip calls these hooks
(PEP 517) in the root of the source tree.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scikit_build_core import build as base
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ZIGLANG = "ziglang>=0.17.1,<0.18"
FOLDER = Path("build", "zig")
"""The compiler's wrappers, its cache and what is built with it: apart from what another compiler builds."""

Settings = dict[str, Any] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return base.get_requires_for_build_wheel(config_settings) + _compiler_requires()


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return base.get_requires_for_build_editable(config_settings) + _compiler_requires()


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    return base.build_wheel(wheel_directory, _with_compiler(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    return base.build_editable(wheel_directory, _with_compiler(config_settings), metadata_directory)


def _compiler_requires() -> list[str]:
    return [] if _has_compiler() else [ZIGLANG]


def _has_compiler() -> bool:
    """Whether CXX is set, or the compiler that CMake finds compiles and links a program."""
    if os.environ.get("CXX"):
        return True
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "program.cpp")
        source.write_text("#include <vector>\nint main() { return std::vector<int>().size(); }\n", encoding="utf-8")
        command = [compiler, "-std=c++17", str(source), "-o", str(Path(folder, "program"))]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _with_compiler(settings: Settings) -> Settings:
    """The settings of scikit-build-core: with ziglang as the compiler where there is no other."""
    if _has_compiler():
        return settings
    package = find_spec("ziglang")
    if package is None or package.origin is None:
        raise SystemExit(f"There is no C++ compiler. Install one, or clang as a package: pip install '{ZIGLANG}'")
    zig = Path(package.origin).with_name("zig")
    # By default zig compiles for the very processor it runs on; the kernels choose among instruction sets themselves.
    compiler, ar, ranlib = (wrapper(zig, *command) for command in (("c++", "-mcpu=baseline"), ("ar",), ("ranlib",)))
    return {
        "build-dir": (FOLDER / "{wheel_tag}").as_posix(),
        "cmake.define.CMAKE_CXX_COMPILER": compiler,
        "cmake.define.CMAKE_AR": ar,
        "cmake.define.CMAKE_RANLIB": ranlib,
        **(settings or {}),
    }


def wrapper(zig: Path, *command: str, folder: Path = FOLDER) -> str:
    """The path of a program in the folder that runs a command of zig: CMake takes no arguments with most of its tools.
    It stays the same when pip puts zig into another folder, as CMake remembers it."""
    folder.mkdir(parents=True, exist_ok=True)
    cache = FOLDER.absolute() / "cache"  # by default in the user's home
    if sys.platform == "win32":
        path, words = folder / f"{command[0]}.bat", subprocess.list2cmdline([str(zig), *command])
        text = f'@set "ZIG_GLOBAL_CACHE_DIR={cache}"\n@{words} %*\n'
    else:
        path, words = folder / command[0], shlex.join([str(zig), *command])
        text = f'#!/bin/sh\nZIG_GLOBAL_CACHE_DIR={shlex.quote(str(cache))} exec {words} "$@"\n'
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path.absolute().as_posix()
