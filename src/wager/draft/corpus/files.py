"""The files of a corpus: token ids of texts in the order in which they came.

New texts are appended to a log, `N.log`. A closed log becomes a segment, `FIRST-LAST.segment`, which holds the texts of
the logs of these numbers and finds what followed a run of tokens (csrc/corpus.h); segments are merged into larger ones.
A segment supersedes logs and segments whose numbers are among its own: there is no list of files that could be wrong.

    log      _LOG_HEADER; then for each text _RECORD and its tokens, int32. A text that is cut off, or whose CRC-32 is
             another, ends the log: what a power cut left half written is not read.
    segment  _SEGMENT_HEADER; keys, uint64; texts, TEXT; tokens, int32, each text after a -1; order, uint32. It is
             written beside its place and moved there, and is read once it has the SHA-256 that it states.

All numbers are little-endian. The folder of a tenant has the mode 0700, its files 0600.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wager.errors import WagerError
from wager.inputs import replacing
from wager.kernels import _native

FORMAT = 1
_LOG_HEADER = struct.Struct("<8sI4x32s")  # magic, format, tokenizer
_RECORD = struct.Struct("<IIQ")  # tokens, CRC-32 of what follows, seconds since 1970
_SEGMENT_HEADER = struct.Struct("<8sI4x32s4Q32s32s")
"""Magic, format, tokenizer, numbers of keys, texts, tokens, places, SHA-256 of the data, and of the header so far."""

_LOG_MAGIC, _SEGMENT_MAGIC = b"WAGERLOG", b"WAGERSEG"
_NAMES = re.compile(r"(\d{1,12})\.log|(\d{1,12})-(\d{1,12})\.segment")
_STRIDE = 64  # CorpusSegment::kStride
_USED_SHIFT = 12  # CorpusSegment::kUsedShift
_LONGEST_RECORD = 1 << 24
MOST_TOKENS = 1 << 30
"""Of a segment: places are numbered in 32 bits."""

TEXT = np.dtype([("begin", "<u8"), ("written", "<u4"), ("used", "<u4")])
"""A text of a segment: where its -1 stands, when it was written and last used, in seconds since 1970."""

Ids = NDArray[np.int32]


class CorpusFileError(WagerError):
    """A file of a corpus is not read."""


class LearnedText(NamedTuple):
    """Token ids, and when they were written and last used, in seconds since 1970."""

    tokens: Ids
    written: int
    used: int


class CorpusFile(NamedTuple):
    """A log or a segment, and the numbers of the logs whose texts it holds."""

    path: Path
    first: int
    last: int

    @property
    def is_log(self) -> bool:
        return self.path.suffix == ".log"

    def supersedes(self, other: CorpusFile) -> bool:
        larger = self.first <= other.first and other.last <= self.last
        return larger and not self.is_log and (other.is_log or self[1:] != other[1:])


def corpus_files(folder: Path) -> list[CorpusFile]:
    """The logs and segments in a folder, in the order of their texts; none if it is not there."""
    found = []
    with suppress(FileNotFoundError):
        for path in folder.iterdir():
            if match := _NAMES.fullmatch(path.name):
                first, last = (match[1], match[1]) if match[1] else (match[2], match[3])
                found.append(CorpusFile(path, int(first), int(last)))
    return sorted(found, key=lambda file: (file.first, -file.last, file.is_log))


def tokenizer_of(path: Path) -> bytes:
    """The digest of the tokenizer that a log or a segment was written for."""
    with path.open("rb") as file:
        return file.read(48)[16:]


def sync_folder(folder: Path) -> None:
    """Names that were written into a folder survive a power cut."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


private_file = partial(replacing, durable=True, mode=0o600)
"""A new file of the mode 0600, which takes the place of a path once it is whole and on the disk."""


def erase(path: Path) -> None:
    """Overwrite a file with zeros and remove it; where it has another name, only this one. It must not be mapped."""
    with suppress(FileNotFoundError):
        with path.open("r+b") as file:
            status = os.fstat(file.fileno())
            for left in range(status.st_size if status.st_nlink == 1 else 0, 0, -(1 << 20)):
                file.write(bytes(min(left, 1 << 20)))
            file.flush()
            os.fsync(file.fileno())
        path.unlink()


# ---- logs ------------------------------------------------------------------------------------------------------------


class Log:
    """A new log, open for writing. OSError if that fails, for `append` and `sync` too; a text that could not be written
    is then overwritten by the next one."""

    def __init__(self, path: Path, tokenizer: bytes) -> None:
        self.path = path
        self.tokens = 0
        self.dirty = True
        self.created = time.monotonic()
        self._end = _LOG_HEADER.size
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            self._write(_LOG_HEADER.pack(_LOG_MAGIC, FORMAT, tokenizer), 0)
            sync_folder(path.parent)
        except OSError:
            self.close()
            path.unlink()
            raise

    def append(self, tokens: Sequence[int] | Ids, now: int) -> None:
        data = np.asarray(tokens, "<i4").tobytes()
        checked = struct.pack("<Q", now) + data
        self._write(struct.pack("<II", len(tokens), zlib.crc32(checked)) + checked, self._end)
        self._end += _RECORD.size + len(data)
        self.tokens += len(tokens)
        self.dirty = True

    def _write(self, data: bytes, at: int) -> None:
        while data:
            written = os.pwrite(self._file, data, at)
            data, at = data[written:], at + written

    def sync(self) -> None:
        os.fsync(self._file)
        self.dirty = False

    def close(self) -> None:
        os.close(self._file)


def read_log(path: Path, tokenizer: bytes | None = None) -> tuple[list[LearnedText], int]:
    """The whole texts of a log, and the bytes behind the last of them. CorpusFileError for one of another tokenizer
    (None: of any) or format."""
    data = path.read_bytes()
    header = data[: _LOG_HEADER.size].ljust(_LOG_HEADER.size, b"\0")
    magic, version, written_for = _LOG_HEADER.unpack(header)
    if not data or data[:8] == bytes(min(8, len(data))):  # the name survived a power cut, the data did not
        return [], len(data)
    _check(path, magic == _LOG_MAGIC, version, written_for, tokenizer)
    texts, at = [], _LOG_HEADER.size
    while at + _RECORD.size <= len(data):
        size, check, written = _RECORD.unpack_from(data, at)
        end = at + _RECORD.size + 4 * size
        if not 0 < size <= _LONGEST_RECORD or end > len(data) or zlib.crc32(data[at + 8 : end]) != check:
            break
        tokens = np.frombuffer(data, "<i4", size, at + _RECORD.size)
        if tokens.min() < 0 or written >> 32:
            break
        texts.append(LearnedText(tokens, written, written))
        at = end
    return texts, max(0, len(data) - at)


def _check(path: Path, is_one: object, version: int, written_for: bytes, tokenizer: bytes | None) -> None:
    if not is_one:
        raise CorpusFileError(f"{path} is damaged: it does not begin as a file of a corpus.", "It is not read.")
    if version != FORMAT:
        raise CorpusFileError(f"{path} has format {version}; this wager reads {FORMAT}.", "It is not read.")
    if tokenizer is not None and written_for != tokenizer:
        raise CorpusFileError(
            f"{path} holds tokens of another tokenizer: {written_for.hex()[:12]}, not {tokenizer.hex()[:12]}.",
            "It is not read.",
        )


# ---- segments --------------------------------------------------------------------------------------------------------


class Segment:
    """An open segment, memory-mapped. Only its header is checked until `verify`."""

    def __init__(self, file: CorpusFile, tokenizer: bytes | None = None) -> None:
        """CorpusFileError for one that is damaged, or of another tokenizer (None: of any) or format."""
        self.file, path = file, file.path
        with path.open("rb") as opened:
            nbytes = os.fstat(opened.fileno()).st_size
            header = opened.read(_SEGMENT_HEADER.size).ljust(_SEGMENT_HEADER.size, b"\0")
            magic, version, written_for, *counts, self._sha256, check = _SEGMENT_HEADER.unpack(header)
            _check(path, magic == _SEGMENT_MAGIC, version, written_for, tokenizer)
            keys, texts, tokens, places = counts
            ends = np.cumsum([_SEGMENT_HEADER.size, 8 * keys, TEXT.itemsize * texts, 4 * tokens, 4 * places]).tolist()
            if hashlib.sha256(header[:-32]).digest() != check or ends[-1] != nbytes or tokens > MOST_TOKENS:
                raise self._damaged(f"it has {nbytes} bytes, or its header is another")
            self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self.keys = np.frombuffer(self._map, "<u8", keys, ends[0])
        self.texts = np.frombuffer(self._map, TEXT, texts, ends[1])
        self.tokens: Ids = np.frombuffer(self._map, "<i4", tokens, ends[2])
        self.order = np.frombuffer(self._map, "<u4", places, ends[3])
        self.blocks_used = np.zeros((tokens >> _USED_SHIFT) + 1, np.uint8)
        self.used = self.texts["used"].copy()

    def verify(self) -> None:
        """Read it all, so that no lookup waits for the disk. CorpusFileError if it is damaged."""
        if hasattr(mmap, "MADV_WILLNEED"):
            self._map.madvise(mmap.MADV_WILLNEED)
        if hashlib.sha256(memoryview(self._map)[_SEGMENT_HEADER.size :]).digest() != self._sha256:
            raise self._damaged("its data do not have the digest that its header states")
        order, begins, size = self.order, self.texts["begin"], len(self.tokens)
        places = len(order) == 0 or (order.min() >= 2 and order.max() < size)
        texts = size > 0 and self.tokens[0] < 0 and len(begins) > 0 and begins[0] == 0 and begins[-1] < size
        if not (places and texts and (begins[1:] > begins[:-1]).all() and len(self.keys) == -(-len(order) // _STRIDE)):
            raise self._damaged("its places are not those of its tokens")

    def note_uses(self, now: int) -> None:
        """Texts in which something was found since the last call were used now."""
        blocks = np.flatnonzero(self.blocks_used)
        if len(blocks):
            self.blocks_used[:] = 0
            begins = self.texts["begin"].astype(np.int64)
            first = begins >> _USED_SHIFT
            last = np.append(begins[1:], len(self.tokens)) - 1 >> _USED_SHIFT
            at = np.searchsorted(blocks, first)
            found = at < len(blocks)
            found[found] = blocks[at[found]] <= last[found]
            self.used[found] = now

    @property
    def arrays(self) -> tuple[Ids, NDArray[np.uint32], NDArray[np.uint64], NDArray[np.uint8]]:
        """What the lookup reads (_native.Corpus.set)."""
        return self.tokens, self.order, self.keys, self.blocks_used

    def __iter__(self) -> Iterator[LearnedText]:
        """Its texts, the oldest first."""
        ends = [*self.texts["begin"][1:].tolist(), len(self.tokens)]
        for begin, end, written, used in zip(
            self.texts["begin"].tolist(), ends, self.texts["written"].tolist(), self.used.tolist(), strict=True
        ):
            yield LearnedText(self.tokens[begin + 1 : end], written, used)

    def _damaged(self, cause: str) -> CorpusFileError:
        return CorpusFileError(f"{self.file.path} is damaged: {cause}.", "It is not read; texts in it are lost.")


class SegmentPart(NamedTuple):
    """Texts that become part of a segment, the kept ones marked, and the order of the places in all of them."""

    tokens: Ids
    texts: NDArray[np.void]
    order: NDArray[np.uint32]
    kept: NDArray[np.bool_]


def part_of_segment(segment: Segment) -> SegmentPart:
    texts = segment.texts.copy()
    texts["used"] = segment.used
    return SegmentPart(segment.tokens, texts, segment.order, np.ones(len(texts), bool))


def part_of_texts(new: Iterable[LearnedText]) -> SegmentPart:
    learned = list(new)
    texts = np.zeros(len(learned), TEXT)
    sizes = np.array([len(text.tokens) + 1 for text in learned], np.int64)
    texts["begin"] = np.cumsum(sizes) - sizes
    texts["written"], texts["used"] = [text.written for text in learned], [text.used for text in learned]
    tokens = np.full(int(sizes.sum()), -1, np.int32)
    for begin, text in zip(texts["begin"].tolist(), learned, strict=True):
        tokens[begin + 1 : begin + 1 + len(text.tokens)] = text.tokens
    order = np.empty(_places(sizes), np.uint32)
    _native.corpus_order(tokens, order)
    return SegmentPart(tokens, texts, order, np.ones(len(texts), bool))


def _sizes(part: SegmentPart) -> NDArray[np.int64]:
    """Tokens of each text, with the -1 before it."""
    begins = part.texts["begin"].astype(np.int64)
    return np.append(begins[1:], len(part.tokens)) - begins


def _places(sizes: NDArray[np.int64]) -> int:
    return int(np.maximum(sizes - 2, 0).sum())


def bytes_of_texts(part: SegmentPart) -> NDArray[np.int64]:
    """What each text takes in a segment, but for the keys."""
    return 8 * _sizes(part) + TEXT.itemsize


def write_segment(path: Path, parts: Sequence[SegmentPart], tokenizer: bytes) -> None:
    """A segment of the kept texts of `parts`, of which there are some. OSError if it cannot be written."""
    kept = [np.flatnonzero(part.kept) for part in parts]
    all_sizes = [_sizes(part) for part in parts]
    sizes = np.concatenate([size[rows] for size, rows in zip(all_sizes, kept, strict=True)])
    texts = np.concatenate([part.texts[rows] for part, rows in zip(parts, kept, strict=True)])
    texts["begin"] = np.cumsum(sizes) - sizes
    tokens = np.empty(int(sizes.sum()), np.int32)
    orders, first = [], 0
    for part, rows, size in zip(parts, kept, all_sizes, strict=True):
        begins = part.texts["begin"].astype(np.int64)
        moved = np.full(len(begins), np.iinfo(np.int64).min)
        moved[rows] = texts["begin"][first : first + len(rows)].astype(np.int64) - begins[rows]
        if len(rows):
            at = int(texts["begin"][first])
            whole = len(rows) == len(begins)
            tokens[at : at + int(size[rows].sum())] = part.tokens if whole else part.tokens[np.repeat(part.kept, size)]
        orders.append((np.ascontiguousarray(part.order), begins, moved))
        first += len(rows)
    order = np.empty(_places(sizes), np.uint32)
    _native.corpus_merge(tokens, orders, order)
    keyed = order[::_STRIDE].astype(np.int64)
    keys = (tokens[keyed - 1].astype(np.uint64) + 1 << 32) | (tokens[keyed - 2] + 1).astype(np.uint64)
    data = [each.view(np.uint8).data for each in (keys, texts, tokens, order) if len(each)]
    digest = hashlib.sha256()
    for each in data:
        digest.update(each)
    header = _SEGMENT_HEADER.pack(
        _SEGMENT_MAGIC, FORMAT, tokenizer, len(keys), len(texts), len(tokens), len(order), digest.digest(), bytes(32)
    )[:-32]
    with private_file(path) as file:
        file.write(header + hashlib.sha256(header).digest())
        for each in data:
            file.write(each)
    sync_folder(path.parent)
