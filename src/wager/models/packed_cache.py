"""Keeps packed weights in the cache folder, so that only the first start of a model reads and packs them.

A file belongs to the model's files (by their published hashes, or else by their identity: size, times, inode), the
number format asked for, and the layout of packed weights. One that is damaged, cut off or of something else is never
used. Its data is hashed once in a run of the system, and when the file's identity changes.
Where it cannot be written (no space, a folder that is read-only) wager runs without it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from wager.kernels.base import Kernels
from wager.models import hub
from wager.models.integrity import FileIdentity, Finding, PublishedFile, VerifiedFiles
from wager.models.packed_file import SUFFIX, DamagedFileError, PackedFile, read_header, write_packed

log = logging.getLogger("wager")

_MODEL_FILES = re.compile(r".*\.(safetensors|gguf)|config\.json|.*\.index\.json")
_TEMPORARY = re.compile(r"\.(\d+)-\d+")


class PackedStore:
    """The packed weights of one model as it is loaded: from its file, or made and then written by `save`."""

    def __init__(self, kernels: Kernels, path: Path | None = None, facts: dict[str, Any] | None = None) -> None:
        """`path` is the file, which need not be there, None to keep nothing; `facts` are what it must be made from."""
        self._kernels, self._path, self._facts = kernels, path, facts or {}
        self._file = None if path is None else _open(path, self._facts)
        self._weights: dict[str, Any] = {}
        self._made = False

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """The weight of that name: mapped from the file, else what `make` packs."""
        weight = None
        if self._file is not None and name in self._file:
            try:
                weight = self._kernels.assemble(self._file[name])
            except (ValueError, KeyError, TypeError) as error:
                _say_damaged(self._path, str(error))
        if weight is None:
            weight, self._made = make(), True
        if self._path is not None:
            self._weights[name] = weight
        return weight

    def save(self) -> None:
        """Write the file if a weight was not in it, and remove files that it replaces. Says nothing where it fails: the
        next start packs again."""
        weights, self._weights, self._file = self._weights, {}, None
        if self._path is None or not self._made:
            return
        parts = {name: self._kernels.dismantle(weight) for name, weight in weights.items()}
        nbytes = sum(array.nbytes for part in parts.values() for array in part.arrays)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _sweep(self._path.parent)
            if shutil.disk_usage(self._path.parent).free < 2 * nbytes:  # as much again stays free
                return
            header = write_packed(self._path, self._facts, parts)
            _verified().record([_finding(self._path, header.digest, os.stat(self._path))])
        except OSError as error:
            log.info("Packed weights were not stored in %s: %s.", self._path, error.strerror or error)
            return
        for other in stored():
            if other.model == self._facts["model"] and other.dtype == self._facts["dtype"] and other.path != self._path:
                remove(other.path)


def open_store(model: Path, kernels: Kernels, *, dtype: str) -> PackedStore:
    """The store of a model's weights in the form that `dtype` asks for; one that keeps nothing for models that are
    generated, and kernels whose weights cannot be kept."""
    if kernels.weight_layout is None or hub.is_random(str(model)):
        return PackedStore(kernels)
    try:
        files = _files(model)
    except OSError:
        return PackedStore(kernels)
    facts = {"model": str(model.resolve()), "dtype": dtype, "layout": kernels.weight_layout, "files": files}
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return PackedStore(kernels, folder() / f"{model.name.removesuffix('.gguf')}-{key}{SUFFIX}", facts)


def folder() -> Path:
    return hub.cache_dir("packed")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in the folder: of which model and number format, and when it was last used, as far as the file system says
    (often to the day). `problem` says why it cannot be used."""

    path: Path
    nbytes: int
    used: float
    model: str = ""
    dtype: str = ""
    problem: str = ""


def stored() -> list[StoredFile]:
    """The files in the folder, by name."""
    files = []
    for path in sorted(folder().glob(f"*{SUFFIX}")):
        try:
            status = path.stat()
            size, used = status.st_size, max(status.st_atime, status.st_mtime)
            try:
                facts = read_header(path).facts
                files.append(StoredFile(path, size, used, str(facts.get("model")), str(facts.get("dtype"))))
            except (DamagedFileError, OSError) as error:
                files.append(StoredFile(path, size, used, problem=str(error)))
        except OSError:  # removed since it was listed
            continue
    return files


def remove(path: Path) -> bool:
    """Whether a file is gone. Processes that have it mapped keep its pages."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _open(path: Path, facts: dict[str, Any]) -> PackedFile | None:
    """The file, if it is intact and made from these facts."""
    try:
        file = PackedFile(path)
        if file.header.facts != facts:
            raise DamagedFileError("it was made from something else")
        finding = _finding(path, file.header.digest, file.status)
        verified = _verified()
        if verified.unknown([finding.file]):
            if not file.is_intact():
                raise DamagedFileError("its data is damaged")
            verified.record([finding])
        return file
    except OSError:  # there is none, or none that this user may read
        return None
    except ValueError as error:
        _say_damaged(path, str(error))
        return None


def _say_damaged(path: Path | None, cause: str) -> None:
    log.warning("The packed weights in %s are not used and are made again: %s.", path, cause)


def _files(model: Path) -> list[list[Any]]:
    """Name and published hash, or identity, of each file that the weights come from."""
    if model.is_dir():
        files = sorted(child for child in model.iterdir() if _MODEL_FILES.fullmatch(child.name))
    else:
        files = [model]
    published = {file.path.name: file.digest for file in hub.published_files(model)}
    return [[file.name, published.get(file.name) or list(astuple(FileIdentity.of(file.stat())))] for file in files]


def _sweep(where: Path) -> None:
    """Remove what processes that were killed left half written."""
    for path in where.iterdir():
        process = _TEMPORARY.fullmatch(path.suffix)
        if process and not _runs(int(process[1])):
            remove(path)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _verified() -> VerifiedFiles:
    return VerifiedFiles(hub.cache_dir("verified") / "packed.json")


def _finding(path: Path, digest: str, status: os.stat_result) -> Finding:
    """That the file with this status has the digest of its header, in this run of the system: what was written before a
    power failure may be known to the folder and yet not have reached the disk."""
    known = f"{digest} {_boot()}"
    return Finding(PublishedFile(path, known, again=""), known, FileIdentity.of(status))


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # another system than Linux
        return ""
