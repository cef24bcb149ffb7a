"""A Python of Debian's package index, unpacked in a folder of its own: for another architecture, or from another
release than the system's. The system, its package index and the architectures that it knows stay as they are."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

TRIPLETS = {"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}
"""The names of Debian's architectures, and those of its folders for them."""


class CannotUnpackError(Exception):
    """Why there is no such Python here."""


def unpack(home: Path, version: str, *, architecture: str, release: str = "") -> Path:
    """The interpreter `version` (3.11) for one of TRIPLETS, with its standard library and headers, below `home`/system;
    what was unpacked once is there. `release`: of Debian, by its name; by default that of the system.
    CannotUnpackError says what is missing."""
    system = home / "system"
    python = system / "usr" / "bin" / f"python{version}"
    if (home / "system.complete").exists():
        return python
    if lacking := [name for name in ("apt-get", "dpkg-deb") if shutil.which(name) is None]:
        raise CannotUnpackError(f"there is no {' and no '.join(lacking)}")
    index = PackageIndex(home / "apt", architecture=architecture, release=release)
    archives = home / "archives"
    for folder in (archives, system):
        folder.mkdir(parents=True, exist_ok=True)
    named = [f"python{version}", "libstdc++6"]
    names = {*index.needed_by(named), *named, f"libpython{version}-dev"}
    index.download(sorted(names), archives)
    for archive in archives.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(archive), str(system)], check=True)
    if not python.exists():
        raise CannotUnpackError(f"the distribution has no Python {version} for {architecture}")
    headers = Path("include") / TRIPLETS[architecture] / python.name / "pyconfig.h"
    shutil.copy(system / "usr" / headers, system / "usr" / "include" / python.name)  # which else includes that one
    (home / "system.complete").touch()
    return python


class PackageIndex:
    """A package index beside the system's, in a folder."""

    def __init__(self, folder: Path, *, architecture: str, release: str = "") -> None:
        for each in (folder / "lists" / "partial", folder / "cache" / "archives" / "partial"):
            each.mkdir(parents=True, exist_ok=True)
        (folder / "status").touch()
        settings = {
            "Dir::State": folder,
            "Dir::State::lists": folder / "lists",
            "Dir::State::status": folder / "status",
            "Dir::Cache": folder / "cache",
            "APT::Architecture": architecture,
            "APT::Architectures": architecture,
            "APT::Sandbox::User": "root",
        }
        if release:
            sources = folder / "sources.list"
            sources.write_text("".join(f"{kind} {_debian()} {release} main\n" for kind in ("deb", "deb-src")))
            settings |= {"Dir::Etc::sourcelist": sources, "Dir::Etc::sourceparts": "-"}
        self._options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
        self._run("apt-get", "-qq", "update", stderr=subprocess.DEVNULL)

    def needed_by(self, names: Sequence[str]) -> list[str]:
        """The packages that some need, themselves included."""
        only = [f"--no-{kind}" for kind in ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")]
        found = self._run("apt-cache", "depends", "--recurse", *only, *names)
        return [line for line in found.splitlines() if re.fullmatch(r"[a-z0-9][a-z0-9.+:-]+", line)]

    def download(self, names: Sequence[str], folder: Path) -> None:
        self._run("apt-get", "-qq", "download", *names, cwd=folder)

    def download_source(self, name: str, folder: Path) -> None:
        """The archives of a source package."""
        self._run("apt-get", "-qq", "source", "--download-only", name, cwd=folder)

    def _run(self, program: str, *arguments: str, **options: object) -> str:
        command = [program, *self._options, *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, **options)  # type: ignore[call-overload]
        if done.returncode:
            raise CannotUnpackError(f"{program} {' '.join(arguments[:3])} failed")
        return str(done.stdout)


def _debian() -> str:
    """Where the system's packages come from, with what apt checks them by."""
    keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
    done = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Identifier: Packages", "Label: Debian"],
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.stdout:
        raise CannotUnpackError("the system's packages are not Debian's")
    return f"[signed-by={keys}] {done.stdout.splitlines()[0]}"
