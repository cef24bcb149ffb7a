"""Keeps packed weights in the cache folder, so that only the first start of a model reads and packs them.

A file belongs to the model's files (by their published hashes, or else by their identity: size, times, inode), the
number format asked for, and the layout of packed weights. One that is damaged, cut off or of something else is never
used. Its weights are hashed once in a run of the system, and when the file's identity changes. Their digests are those
that receipts name (see models/digests.py).
Where it cannot be written (no space, a folder that is read-only) wager runs without it.

A file is a JSON header that says what lies where, then the weights' bytes, which are memory-mapped:

    8 bytes  MAGIC
    8 bytes  length of the header, little-endian
    32 bytes SHA-256 of the header
    header   {"facts": what the weights were made from, "data": {"offset", "bytes"},
              "weights": [{"name", "fields", "parts": [[offset from the data's beginning, bytes], ...], "sha256"}, ...]}
    data     from a multiple of 2 MB on, each part at a multiple of 4096, zeros between them

It is written under another name and renamed, so one that is there is complete. It is never written again: processes
that have it mapped share its pages, and keep them when it is removed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from wager.errors import MALFORMED
from wager.inputs import remove_unfinished, replacing
from wager.kernels.arrays import WeightParts
from wager.kernels.cpu import Kernels
from wager.models import hub
from wager.models.integrity import FileIdentity, Finding, PublishedFile, VerifiedFiles
from wager.models.names import part_paths

# ---- the file --------------------------------------------------------------------------------------------------------

SUFFIX = ".packed"
MAGIC = b"WAGERPK2"

_PREFIX = 8 + 8 + 32
_DATA_ALIGNMENT, _PART_ALIGNMENT = 2 << 20, 4096
_CHUNK = 8 << 20
"""Bytes of a write, so large that file systems that can keep them in huge pages do."""
_LONGEST_HEADER = 64 << 20
_POPULATE_READ = 22  # of madvise, since Linux 5.14: maps all pages now


class DamagedFileError(ValueError):
    """The file is not what `write_packed` wrote, in words."""


class StoredWeight(NamedTuple):
    """A weight of a file: its fields, the offset and bytes of each part in the data, and its digest."""

    fields: Mapping[str, Any]
    parts: tuple[tuple[int, int], ...]
    digest: str


@dataclass(frozen=True, slots=True)
class PackedHeader:
    """The header of a file, checked: all parts lie within the data, and the data within the file. `digest` is its own
    SHA-256, and so of the digests of all weights."""

    facts: Mapping[str, Any]
    offset: int
    nbytes: int
    digest: str
    weights: Mapping[str, StoredWeight]


def weight_digest(weight: WeightParts) -> str:
    """SHA-256, in hex, of a packed weight: its fields, then its bytes."""
    found = _digest_of_fields(weight.fields)
    for array in weight.arrays:
        found.update(array.data)
    return found.hexdigest()


def _digest_of_fields(fields: Mapping[str, Any]) -> hashlib._Hash:
    return hashlib.sha256(json.dumps(dict(fields), sort_keys=True).encode() + b"\n")


def read_header(path: Path) -> PackedHeader:
    """The header of a file. DamagedFileError, or OSError if it cannot be read."""
    with path.open("rb") as file:
        return _header(file.fileno())


def _header(descriptor: int) -> PackedHeader:
    prefix, size = os.pread(descriptor, _PREFIX, 0), os.fstat(descriptor).st_size
    length = int.from_bytes(prefix[8:16], "little")
    if prefix[:8] != MAGIC or length > min(size, _LONGEST_HEADER):
        raise DamagedFileError("it does not begin as a file of packed weights")
    raw = os.pread(descriptor, length, _PREFIX)
    if hashlib.sha256(raw).digest() != prefix[16:]:
        raise DamagedFileError("its header is damaged")
    try:
        values = json.loads(raw)
        data = values["data"]
        header = PackedHeader(
            dict(values["facts"]),
            int(data["offset"]),
            int(data["bytes"]),
            prefix[16:].hex(),
            {
                str(item["name"]): StoredWeight(
                    dict(item["fields"]),
                    tuple((int(at), int(size)) for at, size in item["parts"]),
                    str(item["sha256"]),
                )
                for item in values["weights"]
            },
        )
    except MALFORMED as error:
        raise DamagedFileError("its header is not as this wager writes it") from error
    parts = [part for weight in header.weights.values() for part in weight.parts]
    ends = [at + size for at, size in parts if at >= 0 and size >= 0]
    if header.offset < 0 or header.offset + header.nbytes != size:
        raise DamagedFileError(f"it has {size} bytes instead of {header.offset + header.nbytes}")
    if len(ends) != len(parts) or max(ends, default=0) > header.nbytes:
        raise DamagedFileError("its header names bytes that it does not have")
    return header


class PackedFile:
    """An open file, memory-mapped read-only. DamagedFileError or OSError if it cannot be used."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.status = os.fstat(file.fileno())
            self.header = _header(file.fileno())
            self._data = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        for advice in (getattr(mmap, "MADV_HUGEPAGE", None), _POPULATE_READ):
            if advice is not None:
                with suppress(OSError):  # this system has none; pages are then mapped when they are first read
                    self._data.madvise(advice)

    def __getitem__(self, name: str) -> WeightParts:
        """A weight, whose arrays are the mapped bytes. KeyError if the file has none of that name."""
        stored, offset = self.header.weights[name], self.header.offset
        arrays = (np.frombuffer(self._data, np.uint8, size, offset + at) for at, size in stored.parts)
        return WeightParts(stored.fields, tuple(arrays))

    def __contains__(self, name: str) -> bool:
        return name in self.header.weights

    def is_intact(self) -> bool:
        """Whether every weight has its digest."""
        return all(weight_digest(self[name]) == stored.digest for name, stored in self.header.weights.items())


def write_packed(path: Path, facts: Mapping[str, Any], weights: Mapping[str, WeightParts]) -> PackedHeader:
    """Write a file: complete, or not there at all and OSError. Its data may reach the disk later."""
    with replacing(path, buffered=_CHUNK) as file:
        _write(file, facts, weights)
    return read_header(path)


def _write(file: BinaryIO, facts: Mapping[str, Any], weights: Mapping[str, WeightParts]) -> None:
    entries, end = [], 0
    for name, weight in weights.items():
        parts = []
        for array in weight.arrays:
            parts.append((end, array.nbytes))
            end = _aligned(end + array.nbytes, _PART_ALIGNMENT)
        entries.append({"name": name, "fields": dict(weight.fields), "parts": parts, "sha256": "0" * 64})

    def described(offset: int) -> bytes:
        data = {"offset": offset, "bytes": end}
        return json.dumps({"facts": dict(facts), "data": data, "weights": entries}).encode()

    offset = _aligned(_PREFIX + len(described(1 << 40)), _DATA_ALIGNMENT)
    file.seek(offset)
    for entry, weight in zip(entries, weights.values(), strict=True):
        found = _digest_of_fields(weight.fields)
        for array in weight.arrays:
            found.update(array.data)
            file.write(array.data)
            file.write(bytes(-array.nbytes % _PART_ALIGNMENT))
        entry["sha256"] = found.hexdigest()
    raw = described(offset)
    file.seek(0)
    file.write(MAGIC + len(raw).to_bytes(8, "little") + hashlib.sha256(raw).digest() + raw)


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to


log = logging.getLogger("wager")

# ---- the cache -------------------------------------------------------------------------------------------------------

_MODEL_FILES = re.compile(r".*\.(safetensors|gguf)|config\.json|.*\.index\.json")


class PackedStore:
    """The packed weights of one model as it is loaded: from its file, or made and then written by `save`."""

    def __init__(self, kernels: Kernels, path: Path | None = None, facts: dict[str, Any] | None = None) -> None:
        """`path` is the file, which need not be there, None to keep nothing; `facts` are what it must be made from."""
        self.kernels = kernels
        self._path = path
        self._facts = facts or {}
        self._file = None if path is None else _open(path, self._facts)
        self._weights: dict[str, Any] = {}
        self._digests: dict[str, str] = {}
        self._made = False

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """The weight of that name: mapped from the file, else what `make` packs, once."""
        if name in self._weights:
            return self._weights[name]
        weight = None
        if self._file is not None and name in self._file:
            try:
                weight = self.kernels.assemble(self._file[name])
                self._digests[name] = self._file.header.weights[name].digest
            except (ValueError, KeyError, TypeError) as error:
                _warn_damaged(self._path, str(error))
        if weight is None:
            weight, self._made = make(), True
        self._weights[name] = weight
        return weight

    def digests(self) -> Mapping[str, str]:
        """The digest of each weight, by its name: from the file, else of the weights in memory, hashed once (1 s a
        gigabyte or two). None of kernels whose weights cannot be kept."""
        if self.kernels.weight_layout is not None:
            for name, weight in self._weights.items():
                if name not in self._digests:
                    self._digests[name] = weight_digest(self.kernels.dismantle(weight))
        return {name: self._digests[name] for name in sorted(self._digests)}

    def save(self) -> None:
        """Write the file if a weight was not in it, and remove files that it replaces. A failure is no error: the
        next start packs again."""
        self._file = None
        if self._path is None or not self._made:
            return
        parts = {name: self.kernels.dismantle(weight) for name, weight in self._weights.items()}
        nbytes = sum(array.nbytes for part in parts.values() for array in part.arrays)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            remove_unfinished(self._path.parent, f"*{SUFFIX}")
            if shutil.disk_usage(self._path.parent).free < 2 * nbytes:  # as much again stays free
                return
            header = write_packed(self._path, self._facts, parts)
            self._digests = {name: stored.digest for name, stored in header.weights.items()}
            _verified().record([_finding(self._path, header.digest, os.stat(self._path))])
        except OSError as error:
            log.info("Packed weights were not stored in %s: %s.", self._path, error.strerror or error)
            return
        name = self._path.name.rpartition("-")[0]
        for other in stored():
            unreadable = other.problem and other.path.name.rpartition("-")[0] == name  # an older wager's, or damaged
            same = other.model == self._facts["model"] and other.dtype == self._facts["dtype"]
            if (same or unreadable) and other.path != self._path:
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
    key = hashlib.sha256(MAGIC + json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
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
        if verified.unverified([finding.file]):
            if not file.is_intact():
                raise DamagedFileError("its data is damaged")
            verified.record([finding])
        return file
    except OSError:  # absent, or not readable for this user
        return None
    except ValueError as error:
        _warn_damaged(path, str(error))
        return None


def _warn_damaged(path: Path | None, cause: str) -> None:
    log.warning("The packed weights in %s are not used and are made again: %s.", path, cause)


def _files(model: Path) -> list[list[Any]]:
    """Name and published hash, or identity, of each file that the weights come from."""
    if model.is_dir():
        files = sorted(child for child in model.iterdir() if _MODEL_FILES.fullmatch(child.name))
    else:
        files = part_paths(model)
    published = {file.path.name: file.digest for file in hub.published_files(model)}
    return [[file.name, published.get(file.name) or list(FileIdentity.of(file.stat()))] for file in files]


def _verified() -> VerifiedFiles:
    return VerifiedFiles(hub.cache_dir("verified") / "packed.json")


def _finding(path: Path, digest: str, status: os.stat_result) -> Finding:
    """The file with this status has the digest of its header, in this run of the system: what was written before a
    power failure may be known to the folder and yet not have reached the disk."""
    known = f"{digest} {_boot_id()}"
    return Finding(PublishedFile(path, known, refetch=""), known, FileIdentity.of(status))


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # another system than Linux
        return ""
