"""Checks model files against the hashes they are published with, and remembers which ones were found intact.

A file is hashed once, and again when its identity changes: size, times, inode or device. What was found is kept in the
process and in a small file, so that a later start costs a stat. Bits that change on the disk without a write are found
by hashing again (`wager doctor --verify`), never by a stat.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from wager.errors import MALFORMED, ModelError
from wager.inputs import replacing

Progress = Callable[[str, int, int], None]
"""Called with a description of the work, bytes done, and bytes in total."""


def silent(_activity: str, _done: int, _total: int) -> None:
    """Progress that is not reported."""


_CHUNK = 1 << 20
_SHA256_DIGITS = 64


class FileIdentity(NamedTuple):
    """What changes when a file is replaced or written: if none of it did, the file is the one that was hashed."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A file and the hash its publisher states, in hex: SHA-256, or SHA-1 as git has it for small files of a Hub.

    `refetch` is the command that fetches the file again.
    """

    path: Path
    digest: str
    refetch: str

    @property
    def algorithm(self) -> str:
        return "SHA-256" if len(self.digest) == _SHA256_DIGITS else "SHA-1"


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model file that is published inside a Python wheel. Digests are SHA-256 in hex, sizes are in bytes."""

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


@dataclass(frozen=True, slots=True)
class Finding:
    """What hashing a file found: its digest and identity, or the `problem` that kept it from being read."""

    file: PublishedFile
    digest: str | None = None
    identity: FileIdentity | None = None
    problem: str = ""

    @property
    def intact(self) -> bool:
        return self.digest == self.file.digest

    @property
    def status(self) -> str:
        return "intact" if self.intact else "unreadable" if self.problem else "damaged"

    def error(self) -> ModelError:
        """The error for a file that is not intact: its path, both digests, and how to get it again."""
        file = self.file
        if self.problem:
            hint = f"Make it readable, or delete it and fetch it again with `{file.refetch}`."
            return ModelError(f"{file.path} cannot be read: {self.problem}.", hint)
        return ModelError(
            f"{file.path} is damaged or was altered: its {file.algorithm} is {self.digest}, expected {file.digest}.",
            f"Fetch it again with `{file.refetch}`, or delete it.",
        )


class VerifiedFiles:
    """Files that were found intact, by path: in this process, and in a file that all processes of a cache share.

    That file only saves time: one that is absent or damaged holds nothing, one that cannot be written stays as it is.
    """

    _here: ClassVar[dict[str, tuple[FileIdentity, str]]] = {}

    def __init__(self, path: Path) -> None:
        self._path = path

    def unverified(self, files: Sequence[PublishedFile]) -> list[PublishedFile]:
        """The files that are not known to have their published digests."""
        found, stored = [], self._stored()
        for file in files:
            key, known = str(file.path), None
            with suppress(OSError):
                known = (FileIdentity.of(file.path.stat()), file.digest)
            if known is None or known not in (self._here.get(key), stored.get(key)):
                found.append(file)
        return found

    def record(self, findings: Sequence[Finding]) -> None:
        """Remember the files that are intact and forget the others."""
        stored = self._stored()
        kept = {key: entry for key, entry in stored.items() if os.path.exists(key)}
        for finding in findings:
            key = str(finding.file.path)
            for memory in (self._here, kept):
                memory.pop(key, None)
                if finding.intact and finding.identity:
                    memory[key] = (finding.identity, finding.file.digest)
        if kept != stored:
            text = json.dumps({key: [*identity, digest] for key, (identity, digest) in sorted(kept.items())})
            with suppress(OSError):  # a cache that is read-only or full
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(self._path) as file:
                    file.write(text.encode() + b"\n")

    def paths(self) -> list[Path]:
        """The remembered files that are still there."""
        return [Path(key) for key in sorted(self._stored()) if os.path.exists(key)]

    def _stored(self) -> dict[str, tuple[FileIdentity, str]]:
        try:
            values = json.loads(self._path.read_text(encoding="utf-8"))
            return {
                str(key): (FileIdentity(*map(int, identity)), str(digest))
                for key, (*identity, digest) in values.items()
            }
        except (OSError, *MALFORMED):
            return {}


def require_intact(files: Sequence[PublishedFile], verified: VerifiedFiles, progress: Progress = silent) -> None:
    """Hash the files that are not known to be intact. ModelError for the first one that is not."""
    findings: list[Finding] = []
    for file in verified.unverified(files):
        findings.append(check_file(file, progress))
        if not findings[-1].intact:
            break
    if findings:
        verified.record(findings)
        if not findings[-1].intact:
            raise findings[-1].error()


def check_file(file: PublishedFile, progress: Progress = silent) -> Finding:
    """Hash a file."""
    try:
        if not stat.S_ISREG(file.path.stat().st_mode):
            return Finding(file, problem="it is a folder" if file.path.is_dir() else "it is not a file")
        with file.path.open("rb") as opened:
            before = os.fstat(opened.fileno())
            found = _digests(opened.fileno(), file, before.st_size, progress)
            after = os.fstat(opened.fileno())
    except OSError as error:
        return Finding(file, problem=(error.strerror or str(error)).lower())
    identity = FileIdentity.of(after)
    unchanged = identity == FileIdentity.of(before)
    digest = file.digest if file.digest in found else found[0]
    return Finding(file, digest, identity if unchanged else None)


def _digests(descriptor: int, file: PublishedFile, size: int, progress: Progress) -> list[str]:
    """The SHA-256; or git's SHA-1 of the file and the plain one, which some mirrors of a Hub state instead."""
    if file.algorithm == "SHA-256":
        hashes = [hashlib.sha256()]
    else:
        header = b"blob %d\0" % size
        hashes = [hashlib.sha1(start, usedforsecurity=False) for start in (header, b"")]
        progress = silent  # these files are small
    done = 0
    while chunk := os.read(descriptor, _CHUNK):
        for one in hashes:
            one.update(chunk)
        done += len(chunk)
        progress(f"Checking {file.path.name}", done, size)
    return [one.hexdigest() for one in hashes]
