"""A file of packed weights: a JSON header that says what lies where, then their bytes, which are memory-mapped.

    8 bytes  MAGIC
    8 bytes  length of the header, little-endian
    32 bytes SHA-256 of the header
    header   {"facts": what the weights were made from, "data": {"offset", "bytes", "sha256"},
              "weights": [{"name", "fields", "parts": [[offset from the data's beginning, bytes], ...]}, ...]}
    data     from a multiple of 2 MB on, each part at a multiple of 4096, zeros between them

A file is written under another name and renamed, so one that is there is complete. It is never written again: processes
that have it mapped share its pages, and keep them when it is removed.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wager.errors import MALFORMED
from wager.kernels.arrays import WeightParts

SUFFIX = ".packed"
MAGIC = b"WAGERPK1"

_PREFIX = 8 + 8 + 32
_DATA_ALIGNMENT, _PART_ALIGNMENT = 2 << 20, 4096
_CHUNK = 8 << 20
"""Bytes of a write, so large that file systems that can keep them in huge pages do."""
_LONGEST_HEADER = 64 << 20
_POPULATE_READ = 22  # of madvise, since Linux 5.14: maps all pages now


class DamagedFileError(ValueError):
    """The file is not what `write_packed` wrote, in words."""


@dataclass(frozen=True, slots=True)
class PackedHeader:
    """The header of a file, checked: all parts lie within the data, and the data within the file."""

    facts: Mapping[str, Any]
    offset: int
    nbytes: int
    digest: str
    weights: Mapping[str, tuple[Mapping[str, Any], tuple[tuple[int, int], ...]]]


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
            str(data["sha256"]),
            {
                str(item["name"]): (dict(item["fields"]), tuple((int(at), int(size)) for at, size in item["parts"]))
                for item in values["weights"]
            },
        )
    except MALFORMED as error:
        raise DamagedFileError("its header is not as this wager writes it") from error
    ends = [at + size for _, parts in header.weights.values() for at, size in parts if at >= 0 and size >= 0]
    if header.offset < 0 or header.offset + header.nbytes != size:
        raise DamagedFileError(f"it has {size} bytes instead of {header.offset + header.nbytes}")
    if len(ends) != sum(len(parts) for _, parts in header.weights.values()) or max(ends, default=0) > header.nbytes:
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
        fields, parts = self.header.weights[name]
        offset = self.header.offset
        arrays = (np.frombuffer(self._data, np.uint8, size, offset + at) for at, size in parts)
        return WeightParts(fields, tuple(arrays))

    def __contains__(self, name: str) -> bool:
        return name in self.header.weights

    def is_intact(self) -> bool:
        """Whether the data has the digest of the header."""
        found, offset = hashlib.sha256(), self.header.offset
        for first in range(offset, offset + self.header.nbytes, _CHUNK):
            found.update(self._data[first : min(first + _CHUNK, offset + self.header.nbytes)])
        return found.hexdigest() == self.header.digest


def write_packed(path: Path, facts: Mapping[str, Any], weights: Mapping[str, WeightParts]) -> PackedHeader:
    """Write a file: complete, or not there at all and OSError. Its data may reach the disk later."""
    temporary = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    try:
        with temporary.open("xb") as file:
            _write(file.fileno(), facts, weights)
        header = read_header(temporary)
        temporary.replace(path)
        return header
    finally:
        with suppress(OSError):
            temporary.unlink()


def _write(descriptor: int, facts: Mapping[str, Any], weights: Mapping[str, WeightParts]) -> None:
    entries, end = [], 0
    for name, weight in weights.items():
        parts = []
        for array in weight.arrays:
            parts.append((end, array.nbytes))
            end = _aligned(end + array.nbytes, _PART_ALIGNMENT)
        entries.append({"name": name, "fields": dict(weight.fields), "parts": parts})

    def described(offset: int, digest: str) -> bytes:
        data = {"offset": offset, "bytes": end, "sha256": digest}
        return json.dumps({"facts": dict(facts), "data": data, "weights": entries}).encode()

    none = hashlib.sha256()
    room = len(described(1 << 40, none.hexdigest()))
    offset, found = _aligned(_PREFIX + room, _DATA_ALIGNMENT), none
    os.lseek(descriptor, offset, os.SEEK_SET)
    for chunk in _chunks(weights):
        found.update(chunk)
        _write_all(descriptor, chunk)
    raw = described(offset, found.hexdigest())
    os.lseek(descriptor, 0, os.SEEK_SET)
    _write_all(descriptor, MAGIC + len(raw).to_bytes(8, "little") + hashlib.sha256(raw).digest() + raw)


def _chunks(weights: Mapping[str, WeightParts]) -> Iterator[memoryview]:
    """The data in large pieces."""
    chunk, used = memoryview(bytearray(_CHUNK)), 0
    for weight in weights.values():
        for array in weight.arrays:
            padded, done = _aligned(array.nbytes, _PART_ALIGNMENT), 0
            while done < padded:
                size = min(_CHUNK - used, padded - done)
                held = max(0, min(size, array.nbytes - done))
                chunk[used : used + held] = array[done : done + held].tobytes()
                chunk[used + held : used + size] = bytes(size - held)
                used, done = used + size, done + size
                if used == _CHUNK:
                    yield chunk
                    used = 0
    if used:
        yield chunk[:used]


def _write_all(descriptor: int, data: memoryview | bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to
