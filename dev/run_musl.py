"""Runs a wheel for musl on this machine, under a Python that is built here against musl: greedy tokens of the default
model must be those of this machine's own build.

    python dev/wheels.py --target musllinux-x86_64 --python 3.11
    python dev/run_musl.py dist/wager-*-cp311-cp311-musllinux_1_2_x86_64.whl

Exit status: 0 the same tokens, 1 otherwise, 77 where it cannot be set up. The sources of CPython and the C library come
from Debian's package index, the compiler (ziglang) and wager's requirements from PyPI. All is in build/musl, where a
second run finds it again; the system is not changed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

from debian_python import CannotUnpackError, PackageIndex
from emulate_arm import greedy, unavailable

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "build_backend"))
from wager_build import ZIGLANG, wrapper  # noqa: E402

HOME = ROOT / "build" / "musl"
VERSION, RELEASE = "3.11", "bookworm"
LIBRARY_RELEASE = "trixie"
"""Whose C library is as new as the one that zig compiles for."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="whose greedy tokens are compared")
    options = parser.parse_args()
    try:
        python = give_python(give_library())
    except CannotUnpackError as error:
        raise unavailable(str(error)) from None
    packages = give_packages(options.wheel, python)
    found = greedy([str(python)], {**os.environ, "PYTHONPATH": str(packages)}, options.model)
    own = greedy([sys.executable], os.environ, options.model)
    print(f"{len(own)} greedy tokens {'equal' if found == own else f'differ: {found} {own}'}")
    return int(found != own)


def give_library() -> Path:
    """The dynamic loader of musl, which is the C library too."""
    system = HOME / "library"
    if not system.exists():
        index, archives = (
            PackageIndex(HOME / "apt-library", architecture="amd64", release=LIBRARY_RELEASE),
            HOME / "deb",
        )
        archives.mkdir(parents=True, exist_ok=True)
        index.download(["musl"], archives)
        [archive] = archives.glob("musl_*.deb")
        subprocess.run(["dpkg-deb", "-x", str(archive), str(system)], check=True)
    return next(path for path in system.rglob("libc.so") if not path.is_symlink())


def give_python(library: Path) -> Path:
    """A Python of VERSION that runs with that C library, without the modules that need further libraries."""
    prefix, source = HOME / "python", HOME / "source"
    python = prefix / "bin" / f"python{VERSION}"
    if python.exists():
        return python
    archives = HOME / "archives"
    archives.mkdir(parents=True, exist_ok=True)
    index = PackageIndex(HOME / "apt", architecture="amd64", release=RELEASE)
    index.download_source(f"python{VERSION}", archives)
    [archive] = archives.glob(f"python{VERSION}_*.orig.tar.*")
    with tarfile.open(archive) as files:
        files.extractall(source, filter="data")
    [folder] = source.iterdir()
    # What the headers of the system's own C library seem to offer; binascii would take its checksums from zlib.
    local = "*static*\nbinascii binascii.c\n*disabled*\n_ctypes\n_lzma\n_uuid\nnis\nzlib\n"
    (folder / "Modules" / "Setup.local").write_text(local, encoding="utf-8")
    system = "x86_64-linux-musl"  # of both machines: programs for it run here
    configure = ["./configure", f"--prefix={prefix}", f"--build={system}", f"--host={system}", "--without-ensurepip"]
    # All variables of the C library that zig links with have one address: a program must not copy them.
    flags = "-O2 -fno-sanitize=undefined -Wno-date-time -fno-direct-access-external-data"
    settings = {"CC": compiler("cc"), "CFLAGS": flags, "LDFLAGS": f"-dynamic -Wl,--dynamic-linker,{library}"}
    for command in ([*configure, "--disable-test-modules"], ["make", "-j2"], ["make", "install"]):
        with (HOME / "log").open("a") as log:
            subprocess.run(command, check=True, cwd=folder, env={**os.environ, **settings}, stdout=log, stderr=log)
    return python


def compiler(language: str) -> str:
    """A program that compiles C (cc) or C++ (c++) for musl."""
    tools = HOME / "tools"
    if not (tools / "ziglang").exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(tools), ZIGLANG]
        subprocess.run(pip, check=True)
    command = (language, "-target", "x86_64-linux-musl", "-mcpu=baseline")
    return wrapper(tools / "ziglang" / "zig", *command, folder=tools)


def give_packages(wheel: Path, python: Path) -> Path:
    """The folder of a wheel and of wager's requirements, for musl. What PyPI has no wheels of is compiled (ml_dtypes),
    or left out (llguidance, which grammars need)."""
    folder = HOME / "packages"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    platforms = [part for minor in (1, 2) for part in ("--platform", f"musllinux_1_{minor}_x86_64")]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--upgrade", "--target", str(folder), "--only-binary=:all:"]
    constraints = ["--python-version", VERSION, "-c", str(ROOT / "constraints.txt")]
    if not (HOME / "packages.complete").exists():
        requirements = [each for each in project["dependencies"] if not each.startswith(("ml_dtypes", "llguidance"))]
        subprocess.run([*pip, *platforms, *constraints, *requirements], check=True)
        compile_ml_dtypes(folder, python)
        (HOME / "packages.complete").touch()
    subprocess.run([*pip, *platforms, "--python-version", VERSION, "--no-deps", str(wheel)], check=True)
    return folder


def compile_ml_dtypes(packages: Path, python: Path) -> None:
    """The package ml_dtypes from its sources, with numpy's headers."""
    archives = HOME / "sdist"
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary=:all:", "-d", str(archives)]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), "ml_dtypes"], check=True)
    [archive] = archives.glob("ml_dtypes-*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(archives, filter="data")
    source = archives / archive.name.removesuffix(".tar.gz")
    shutil.copytree(source / "ml_dtypes", packages / "ml_dtypes", dirs_exist_ok=True)
    headers = (python.parents[1] / "include" / python.name, packages / "numpy" / "_core" / "include")
    include = [f"-I{path}" for path in (*headers, source, source / "third_party" / "eigen")]
    flags = ["-O2", "-fno-sanitize=undefined", "-shared", "-fPIC", "-dynamic", "-std=c++17"]
    made = packages / "ml_dtypes" / "_ml_dtypes_ext.so"
    files_ = sorted(map(str, (source / "ml_dtypes" / "_src").glob("*.cc")))
    subprocess.run([compiler("c++"), *flags, *include, *files_, "-o", str(made)], check=True)


if __name__ == "__main__":
    sys.exit(main())
