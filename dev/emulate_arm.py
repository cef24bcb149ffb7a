"""Builds the native extension for 64-bit ARM and tests it here with qemu: kernels against the pinned bits and the
oracle, and the default model's greedy tokens against those of this machine's own kernels.

    python dev/emulate_arm.py               # all of it, on every processor of PROCESSORS
    python dev/emulate_arm.py --only max -- tests/kernels/test_attention.py -m "slow or not slow"

What is behind `--` goes to pytest in place of TESTS. Exit status: 0 all passed, 1 otherwise, 77 where it cannot be set
up: that needs aarch64-linux-gnu-g++, qemu-aarch64 (Debian's packages g++-aarch64-linux-gnu and qemu-user), apt-get and
dpkg-deb, and for this Python cmake, ninja and nanobind (pip install -c constraints.txt cmake ninja nanobind).

A Python for ARM comes from the distribution's package index, wager's requirements for it from PyPI. All is in
build/arm, where a second run finds it again; the system is not changed. Emulation says nothing about speed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from debian_python import TRIPLETS, CannotUnpackError, unpack

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / "build" / "arm"
UNAVAILABLE = 77
TRIPLET = TRIPLETS["arm64"]
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"

PROCESSORS = {"max": ("i8mm", "neon", "portable"), "neoverse-n1": ("neon", "portable")}
"""qemu's models, and the instruction sets that they have, best first."""

TESTS = [
    "tests/kernels/test_same_bits.py",
    "tests/unit/test_elementary.py",
    "tests/kernels/test_products.py::test_quantised_products_are_the_oracles_bit_for_bit",
    "tests/kernels/test_products.py::test_every_batch_size_gives_the_row_alone[neon-q4_1-False]",
    *(["-m", "slow or not slow", "-x"]),
]

GREEDY = """
import json, sys
from wager import LLM, SamplingParams
with LLM(sys.argv[1], drafter="none", threads=int(sys.argv[2])) as llm:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    print(json.dumps(list(llm.generate("Write a Python class for a queue.", params).token_ids)))
"""


def main() -> int:
    arguments, pytest = sys.argv[1:], TESTS
    if "--" in arguments:
        at = arguments.index("--")
        arguments, pytest = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PROCESSORS, help="one processor")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="whose greedy tokens are compared")
    options = parser.parse_args(arguments)
    lacking = [name for name in (f"{TRIPLET}-g++", "qemu-aarch64") if shutil.which(name) is None]
    if lacking:
        raise unavailable(f"there is no {' and no '.join(lacking)}")
    try:
        python = unpack(HOME, VERSION, architecture="arm64")
    except CannotUnpackError as error:
        raise unavailable(str(error)) from None
    packages = give_packages()
    extension = build(python)
    own = greedy([sys.executable], os.environ, options.model)
    failed = False
    for processor, sets in PROCESSORS.items():
        if options.only not in (None, processor):
            continue
        command = ["qemu-aarch64", "-cpu", processor, "-L", str(HOME / "system"), str(python)]
        path = [str(ROOT / "dev" / "extension"), str(ROOT / "src"), str(ROOT / "tests"), str(packages)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "WAGER_EXTENSION": str(extension)}
        used = "from wager.kernels.cpu import ISAS, _native"
        check = f"{used}; assert [name for name in ISAS if _native.Isa.has(name)] == {list(sets)}"
        if subprocess.run([*command, "-c", check], cwd=ROOT, env=environment, check=False).returncode:
            raise SystemExit(f"On {processor} the instruction sets are not {', '.join(sets)}.")
        for isa in sets[: 1 if pytest is TESTS else 0]:
            found = greedy(command, {**environment, "WAGER_ISA": isa}, options.model)
            failed |= found != own
            print(
                f"{processor}, {isa}: {len(own)} greedy tokens {'equal' if found == own else f'differ: {found} {own}'}",
                flush=True,
            )
        arguments = ["-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *pytest]
        failed |= subprocess.run([*command, *arguments], cwd=ROOT, env=environment, check=False).returncode != 0
    return int(failed)


def unavailable(reason: str) -> SystemExit:
    print(f"ARM: NOT RUN, because {reason}.", flush=True)
    return SystemExit(UNAVAILABLE)


def run(command: Sequence[str], *, setting_up: bool = False, **options: object) -> str:
    """The standard output of a command that must succeed."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode:
        failed = f"{' '.join(command[:4])} .. failed"
        raise unavailable(failed) if setting_up else SystemExit(f"{failed}.")
    return str(done.stdout)


def greedy(command: Sequence[str], environment: Mapping[str, str], model: str) -> list[int]:
    found: list[int] = json.loads(run([*command, "-c", GREEDY, model, "2"], cwd=ROOT, env=environment).splitlines()[-1])
    return found


def give_packages() -> Path:
    """The folder of wager's requirements, and of what its tests of kernels need, for ARM."""
    folder = HOME / "packages"
    if not (HOME / "packages.complete").exists():
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        names = ["2014", *(f"_2_{minor}" for minor in range(17, 37))]  # of glibc, up to Debian 12's
        platforms = [part for name in names for part in ("--platform", f"manylinux{name}_aarch64")]
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--target",
            str(folder),
            "--upgrade",
            "--only-binary=:all:",
        ]
        requirements = [*project["dependencies"], "pytest", "hypothesis"]
        constraints = ["--python-version", VERSION, "-c", str(ROOT / "constraints.txt")]
        run([*pip, *platforms, *constraints, *requirements], setting_up=True)
        (HOME / "packages.complete").touch()
    return folder


def build(python: Path) -> Path:
    """The path of the extension for ARM."""
    folder, usr = HOME / "extension", HOME / "system" / "usr"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    cmake, ninja = (shutil.which(name, path=path) for name in ("cmake", "ninja"))
    if cmake is None or ninja is None:
        raise unavailable("there is no cmake or no ninja")
    settings = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "CMAKE_CXX_COMPILER": f"{TRIPLET}-g++",
        "CMAKE_CXX_FLAGS": f"-I{usr / 'include'}",
        "CMAKE_MAKE_PROGRAM": ninja,
        "Python_EXECUTABLE": sys.executable,
        "Python_INCLUDE_DIR": str(usr / "include" / python.name),
        "NB_SUFFIX": f".cpython-{VERSION.replace('.', '')}-{TRIPLET}.so",
        "NB_SUFFIX_S": ".abi3.so",
        "WAGER_CHECK_SYMBOLS": "ON",
    }
    defines = [f"-D{name}={value}" for name, value in settings.items()]
    run([cmake, "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", "--log-level=WARNING", *defines])
    run([cmake, "--build", str(folder)], stderr=None)
    [extension] = folder.glob("_native*.so")
    return extension


if __name__ == "__main__":
    sys.exit(main())
