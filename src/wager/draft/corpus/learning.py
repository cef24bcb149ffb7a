"""Learns texts while an engine runs: a corpus on disk for each tenant, which lookup drafters read.

The engine's thread puts texts into a queue. One thread appends them to the tenants' logs, and fsyncs these every
second; another one makes segments of closed logs, merges segments that are small beside what is new, and puts the
result in place of what the drafters read, between two of their calls. Until a segment has been read and checked no
drafter sees it. Nothing of this makes a request fail, and none waits for it, but a tenant's first one for its states:
what cannot be written is not learned, and the log says so.

    FOLDER/lock                         held by the process that writes
    FOLDER/key                          names the tenants' folders: a digest of a tenant is keyed with it
    FOLDER/TOKENIZER/TENANT/            files (files.py), by the beginnings of the digests; NAME.state: what drafters
                                        and the policy go on from, a SHA-256 before it
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import hmac
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wager.draft.corpus.files import (
    CorpusFile,
    CorpusFileError,
    LearnedText,
    Log,
    Segment,
    SegmentPart,
    bytes_of_texts,
    corpus_files,
    erase,
    part_of_segment,
    part_of_texts,
    private_file,
    read_log,
    sync_folder,
    tokenizer_of,
    write_segment,
)
from wager.errors import UsageError, WagerError
from wager.inputs import remove_unfinished
from wager.kernels import _native
from wager.types import OutputDelta, Request

log = logging.getLogger("wager")

CONTEXT = 5
"""Tokens of a prompt that are kept before an answer."""

SEAL_TOKENS = 1 << 14
"""Tokens of a log from which on it becomes a segment: what came later is in the drafters' memory."""

_LARGEST_MERGED = 1 << 22  # tokens of a segment that is merged no more
_GROWTH = 4  # a segment is merged with newer ones if it has at most so many times their tokens
_SYNC_S, _IDLE_S, _EXPIRE_S, _WARN_S = 1.0, 60.0, 3600.0, 60.0
_MOST_QUEUED = 1 << 22  # tokens
_SETTLED_TOGETHER = 16  # texts, of many, after which those that wait are written
_MOST_TENANTS = 64  # whose corpora are open while nobody uses them
_MOST_LOGS = 128  # that are open: each is a file descriptor
_BLOCK = 32  # tokens of a prompt that are learned, or known, together
_MOST_KNOWN = 1 << 14  # digests of texts and of beginnings of prompts, that are not learned again
TENANT_FOLDERS = f"{'[0-9a-f]' * 16}/{'[0-9a-f]' * 32}"
_ERASED, _STATE, _UNREAD = ".erase", ".state", ".unread"


@dataclass(eq=False)
class _Tenant:
    """A tenant's corpus. `log` is the writer's; `segments` and `opened` are the builder's."""

    folder: Path
    tokenizer: bytes
    corpus: _native.Corpus = field(default_factory=_native.Corpus)
    log: Log | None = None
    log_path: Path | None = None
    appended: float = 0.0
    segments: list[Segment] = field(default_factory=list)
    opened: bool = False
    known: OrderedDict[int, None] = field(default_factory=OrderedDict)


class _Waiting(NamedTuple):
    """A text to be written into the folder of that name."""

    folder: str
    prompt: Sequence[int]
    answer: Sequence[int]
    written: int


class LearnedTexts:
    """The corpora below a folder of the texts of one tokenizer, which is given by its fingerprint. UsageError if the
    folder cannot be used, or another process learns in it.

    A tenant's corpus holds texts of so many `days`, in files of about so many bytes; those that were written or used
    least recently leave first. `prompts`: prompts are learned too.
    """

    def __init__(
        self, folder: Path, tokenizer: str, *, days: float = inf, most_bytes: float = inf, prompts: bool = False
    ) -> None:
        self._root, self._tokenizer = folder, bytes.fromhex(tokenizer)
        self._days, self._most_bytes, self._prompts = days, most_bytes, prompts
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = lock_folder(folder)
            try:
                self._key = _tenant_key(folder)
                self._folder = folder / tokenizer[:16]
                self._folder.mkdir(mode=0o700, exist_ok=True)
            except OSError:
                os.close(self._lock)
                raise
        except OSError as error:
            raise UsageError(
                f"Nothing can be learned in {folder}: {error.strerror or error}.", "Give a folder that can be written."
            ) from error
        self.before_close: list[Callable[[], object]] = []
        """Called when learning ends, to keep the last states."""
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # by the name of the folder
        self._names: dict[str, str] = {}
        self._requests: dict[str, tuple[Request, dict[int, list[int]]]] = {}  # and the choices that have not ended
        self._queue: deque[_Waiting] = deque()
        self._queued = 0
        self._due: OrderedDict[str, None] = OrderedDict()
        self._busy = "all"  # at first it looks for what is too old
        self._closing = self._sealing = False
        self._warned: dict[str, float] = {}
        self._left_out = 0  # texts
        self._work = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, args=(loop,), name=f"wager-learn-{loop.__name__}", daemon=True)
            for loop in (self._write, self._build)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    # ---- called by the engine and its drafters -----------------------------------------------------------------------

    def corpus(self, tenant: str) -> _native.Corpus:
        """What drafters read for a tenant; it fills in the background."""
        with self._work:
            return self._of(self.folder_name(tenant)).corpus

    def begin(self, request: Request) -> None:
        """A request whose answer is to be learned; not one whose answer is given with it."""
        grammar = request.params.grammar
        if grammar is None or grammar.kind != "tokens":
            self._requests[request.id] = request, {choice: [] for choice in request.choices}

    def take(self, deltas: Iterable[OutputDelta]) -> None:
        """What a step added to the requests' outputs."""
        for delta in deltas:
            if delta.request_id not in self._requests:
                continue
            request, answers = self._requests[delta.request_id]
            answer = answers.setdefault(delta.index, [])  # an earlier one of the id may have ended it
            answer += delta.token_ids
            if delta.finish_reason is not None:
                del answers[delta.index]
                if not answers:
                    del self._requests[request.id]
                if answer:
                    self.learn(request.tenant, request.prompt, answer)

    def learn(
        self,
        tenant: str,
        prompt: Sequence[int],
        answer: Sequence[int],
        *,
        written: int | None = None,
        folder: str = "",
    ) -> None:
        """An answer of now, or `written` at so many seconds since 1970, for a tenant or the `folder` of one. It is left
        out where too much waits."""
        size = len(prompt) + len(answer)
        name = folder or self.folder_name(tenant)
        with self._work:
            if self._queued + size > _MOST_QUEUED:
                self._left_out += 1
                self._warn("Texts come faster than they can be written: some are not learned.")
            if self._closing or self._queued + size > _MOST_QUEUED:
                return
            self._queue.append(_Waiting(name, prompt, answer, int(time.time()) if written is None else written))
            self._queued += size
            self._work.notify_all()

    def learn_all(self, texts: Iterable[tuple[Sequence[int], Sequence[int]]], *, folder: str = "") -> int:
        """Learn prompts and answers, however many, and make segments of them; how many were not there before.
        WagerError if one cannot be written."""
        before, count = self._left_out, 0
        with self._work:
            tenant = self._of(folder or self.folder_name(""))
        self.settle()
        known = {hash(tuple(text.tokens.tolist())) for segment in tenant.segments for text in segment}
        for prompt, answer in texts:
            digest = hash((*prompt[-CONTEXT:], *answer))
            if digest in known:
                continue
            known.add(digest)
            count += 1
            if count % _SETTLED_TOGETHER == 0:
                self.settle()
            self.learn("", prompt, answer, folder=folder)
        self.seal()
        if self._left_out > before:
            cause = f"{self._left_out - before} texts could not be written to {self._root}."
            raise WagerError(cause, "What was logged says why; give them again.")
        return count

    def settle(self) -> None:
        """Wait until all that was learned is written, and what is due has been built."""
        with self._work:
            self._work.wait_for(lambda: self._closing or not (self._queued or self._due or self._busy))

    def seal(self) -> None:
        """As `settle`, with all logs made into segments."""
        self.settle()
        with self._work:
            self._sealing = True
            self._work.notify_all()
            self._work.wait_for(lambda: self._closing or not self._sealing)
        self.settle()

    def close(self) -> None:
        """Write what waits, end the threads and let others use the folder. May be repeated."""
        with self._work:
            self._closing = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join()
        for keep in self.before_close:
            keep()
        self.before_close.clear()
        for tenant in self._tenants.values():
            tenant.corpus.set([])
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        atexit.unregister(self.close)

    def folder_name(self, tenant: str) -> str:
        """The name of a tenant's folder, which does not tell who it is."""
        name = self._names.get(tenant)
        if name is None:
            if len(self._names) >= 1 << 12:
                self._names.clear()
            name = self._names[tenant] = tenant_folder_name(tenant, self._key)
        return name

    def state(self, tenant: str, name: str) -> bytes | None:
        """What drafters or the policy kept of a tenant under that name; None if nothing, or it is damaged."""
        path = self._folder / self.folder_name(tenant) / f"{name}{_STATE}"
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if hashlib.sha256(data[32:]).digest() != data[:32]:
            log.warning("%s is damaged: it begins anew.", path)
            return None
        return data[32:]

    def keep(self, tenant: str, name: str, state: bytes) -> None:
        """Write a state in the place of an earlier one, if something was learned of the tenant."""
        folder = self._folder / self.folder_name(tenant)
        try:
            if folder.is_dir():
                with private_file(folder / f"{name}{_STATE}") as file:
                    file.write(hashlib.sha256(state).digest() + state)
        except OSError as error:
            self._failed(error)

    def _of(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(self._folder / name, self._tokenizer)
            self._due[name] = None
            self._work.notify_all()
        self._tenants.move_to_end(name)
        return tenant

    def _warn(self, text: str) -> None:
        """Log it, unless that was done a minute ago."""
        now = time.monotonic()
        if now - self._warned.get(text, -_WARN_S) >= _WARN_S:
            self._warned[text] = now
            log.warning("%s", text)

    # ---- the two threads ---------------------------------------------------------------------------------------------

    def _run(self, loop: Callable[[], None]) -> None:
        with suppress(OSError, AttributeError):  # steps go first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        loop()

    def _write(self) -> None:
        synced = 0.0
        while True:
            with self._work:
                waits = any(tenant.log is not None for tenant in self._tenants.values())
                if not (self._queue or self._closing or self._sealing):
                    self._work.wait(_SYNC_S / 4 if waits else None)
                closing, texts = self._closing, list(self._queue)
                seals = closing or self._sealing
                self._queue.clear()
            for text in texts:
                try:
                    self._append(text)
                except Exception:  # the next one may be better
                    log.exception("a text could not be learned")
            if seals or time.monotonic() - synced >= _SYNC_S:
                synced = time.monotonic()
                self._sync(closes_all=seals)
            with self._work:
                self._sealing = self._sealing and not seals
                self._queued = sum(len(text.prompt) + len(text.answer) for text in self._queue)
                self._work.notify_all()
                if closing and not self._queue:
                    return

    def _append(self, waiting: _Waiting) -> None:
        name = waiting.folder
        with self._work:
            tenant = self._of(name)
        text = self._new_text(tenant, waiting.prompt, waiting.answer)
        if not text:
            return
        try:
            if tenant.log is None:
                tenant.folder.mkdir(mode=0o700, exist_ok=True)
                number = max((file.last for file in corpus_files(tenant.folder)), default=0) + 1
                tenant.log_path = tenant.folder / f"{number}.log"  # before it is there: the builder leaves it alone
                tenant.log = Log(tenant.log_path, self._tokenizer)
            tenant.log.append(text, waiting.written)
        except OSError as error:
            self._failed(error)
            self._left_out += 1
            tenant.known.clear()  # what was not written may be learned later
            if tenant.log is None:
                tenant.log_path = None
        tenant.appended = time.monotonic()
        if tenant.log is not None and tenant.log.tokens >= SEAL_TOKENS:
            self._close_log(name, tenant)

    def _new_text(self, tenant: _Tenant, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
        """What is to be learned of an answer; nothing if it is known. Of a prompt the part that is not known."""
        digest, begin = 0, max(0, len(prompt) - CONTEXT)
        rest = begin
        if self._prompts:
            begin = rest = 0
            while rest + _BLOCK < len(prompt):
                digest = hash((digest, *prompt[rest : rest + _BLOCK]))
                if self._is_known(tenant, digest) and rest == begin:
                    begin += _BLOCK
                rest += _BLOCK
        if self._is_known(tenant, hash((digest, *prompt[rest:], *answer))):
            return []
        return [*prompt[max(0, begin - _BLOCK) if digest else begin :], *answer]

    @staticmethod
    def _is_known(tenant: _Tenant, digest: int) -> bool:
        known = tenant.known
        is_known = digest in known
        known[digest] = None
        known.move_to_end(digest)
        if len(known) > _MOST_KNOWN:
            known.popitem(last=False)
        return is_known

    def _sync(self, *, closes_all: bool) -> None:
        now = time.monotonic()
        with self._work:  # the least recently used first
            written = [(name, tenant, tenant.log) for name, tenant in self._tenants.items() if tenant.log is not None]
        for left, (name, tenant, log_file) in zip(range(len(written), 0, -1), written, strict=True):
            rests = now - tenant.appended >= _IDLE_S or now - log_file.created >= _EXPIRE_S
            if closes_all or rests or left > _MOST_LOGS:
                self._close_log(name, tenant)
            elif log_file.dirty:
                self._sync_log(log_file)

    def _sync_log(self, log_file: Log) -> None:
        try:
            log_file.sync()
        except OSError as error:
            self._failed(error)

    def _close_log(self, name: str, tenant: _Tenant) -> None:
        if tenant.log is not None:
            self._sync_log(tenant.log)
            with suppress(OSError):  # of a file system that writes late; fsync has said it
                tenant.log.close()
            with self._work:
                tenant.log = tenant.log_path = None
                self._due[name] = None
                self._work.notify_all()

    def _failed(self, error: OSError) -> None:
        reason = error.strerror or str(error)
        self._warn(f"{self._root} cannot be written ({reason}): what comes meanwhile is answered, and not learned.")

    def _build(self) -> None:
        looks = 0.0  # when it looks for texts that are too old
        while True:
            expired: list[str] = []
            if time.monotonic() >= looks:
                looks = time.monotonic() + _EXPIRE_S
                try:
                    expired = self._expired()
                except Exception:  # what is too old leaves an hour later
                    log.exception("%s could not be searched for what is too old", self._root)
            with self._work:
                self._busy = ""
                self._due.update(dict.fromkeys(expired))
                self._close_unused()
                self._work.notify_all()
                self._work.wait_for(lambda: self._due or self._closing, max(0.0, looks - time.monotonic()))
                if self._closing:
                    return
                if not self._due:
                    continue
                self._busy, _ = self._due.popitem(last=False)
                tenant = self._of(self._busy)
                self._due.pop(self._busy, None)
            try:
                self._rebuild(tenant)
            except OSError as error:
                self._failed(error)
            except Exception:  # an engine goes on without what could not be built
                log.exception("the corpus in %s could not be built", tenant.folder)

    def _close_unused(self) -> None:
        """Close the corpora of the tenants that were used least recently."""
        for name, tenant in list(self._tenants.items())[: max(0, len(self._tenants) - _MOST_TENANTS)]:
            if tenant.log_path is None and name not in self._due and not self._queued:
                tenant.corpus.set([])
                del self._tenants[name]

    def _expired(self) -> list[str]:
        """The tenants that have something which is too old. Of other tokenizers it leaves at once."""
        found, oldest = [], self._oldest()
        for folder in self._root.glob(TENANT_FOLDERS):
            with suppress(OSError):
                files = corpus_files(folder)
                times = [_oldest_in(file) for file in files if not file.is_log]
                times += [path.stat().st_mtime for path in folder.iterdir() if path.suffix != ".segment"]
                if min(times, default=oldest) >= oldest:
                    continue
                if folder.parent == self._folder:
                    found.append(folder.name)
                    continue
                tokenizers = (tokenizer_of(file.path) for file in files)
                own = (each for each in tokenizers if each.hex().startswith(folder.parent.name))
                self._rebuild(_Tenant(folder, next(own, b"")))
        return found

    def _oldest(self) -> float:
        return max(-1.0, time.time() - 86400 * self._days)

    # ---- the builder: from logs to segments --------------------------------------------------------------------------

    def _rebuild(self, tenant: _Tenant) -> None:
        """Make segments of the closed logs, without the texts that are to leave."""
        files = corpus_files(tenant.folder)
        writing = tenant.log_path  # after the listing: a log that is there and not being written is closed
        if not tenant.opened:
            files = self._open(tenant, files)
        logs = [file for file in files if file.is_log and file.path != writing]
        texts: list[LearnedText] = []
        for file in logs:
            texts += self._read_log(file, tenant.tokenizer)
        now = int(time.time())
        for segment in tenant.segments:
            segment.note_uses(now)
        left, size = list(tenant.segments), sum(len(text.tokens) for text in texts)
        merged: list[Segment] = []
        while texts and left and len(left[-1].tokens) <= min(_GROWTH * size, _LARGEST_MERGED - size):
            merged.insert(0, left.pop())
            size += len(merged[0].tokens)
        files_of = [[segment.file] for segment in left] + [[*(segment.file for segment in merged), *logs]]
        parts = [[part_of_segment(segment)] for segment in left] + [[part_of_segment(segment) for segment in merged]]
        if texts:
            parts[-1].append(part_of_texts(texts))
        leaving = self._leave_out([part for group in parts for part in group])
        if leaving:
            tenant.known = OrderedDict()  # what left may be learned again
        segments, before = list[Segment](), [*left, *merged]
        merges = [False] * len(left) + [True]
        del left, merged
        for group, sources, is_merge in zip(parts, files_of, merges, strict=True):
            gone: list[Path] = []
            if not is_merge and all(part.kept.all() for part in group):
                segments.append(before.pop(0))
                continue
            if any(part.kept.any() for part in group):
                first, last = min(file.first for file in sources), max(file.last for file in sources)
                path = tenant.folder / f"{first}-{last}.segment"
                if path.exists():  # by another name, until it can be erased
                    gone.append(path.with_suffix(_ERASED))
                    gone[-1].unlink(missing_ok=True)
                    os.link(path, gone[-1])
                write_segment(path, group, tenant.tokenizer)
                segments.append(Segment(CorpusFile(path, first, last), tenant.tokenizer))
                segments[-1].verify()
                sources = [file for file in sources if file.path != path]
            gone += [file.path for file in sources]
            group.clear()
            del before[: None if is_merge else 1]
            tenant.segments = segments + before  # at once: the disk may be too full for the next one
            tenant.corpus.set([segment.arrays for segment in reversed(tenant.segments)])
            for path in gone:
                erase(path) if leaving else path.unlink(missing_ok=True)
        others = [*tenant.folder.glob(f"*{_STATE}"), *tenant.folder.glob(f"*{_UNREAD}")]
        for path in others:
            if path.stat().st_mtime < self._oldest():
                erase(path)

    def _leave_out(self, parts: Sequence[SegmentPart]) -> bool:
        """Mark the texts that are too old, and those that were not used for longest while there are too many bytes;
        whether there are any."""
        oldest = self._oldest()
        sizes = [bytes_of_texts(part) for part in parts]
        for part in parts:
            part.kept[part.texts["written"] < oldest] = False
        total = sum(int(size[part.kept].sum()) for size, part in zip(sizes, parts, strict=True))
        if total > self._most_bytes:
            used = np.concatenate([part.texts["used"] for part in parts])
            size = np.concatenate(sizes)
            room = self._most_bytes * 7 // 8
            latest = np.argsort(used, kind="stable")[::-1]
            latest = latest[size[latest] <= room]  # one that is larger leaves alone
            keeps = np.zeros(len(used), bool)
            keeps[latest[np.cumsum(size[latest]) <= room]] = True
            at = 0
            for part in parts:
                part.kept[~keeps[at : at + len(part.kept)]] = False
                at += len(part.kept)
        return any(not part.kept.all() for part in parts)

    def _open(self, tenant: _Tenant, files: Sequence[CorpusFile]) -> list[CorpusFile]:
        """Check a tenant's segments and remove what a process that was ended left; the files that count."""
        tenant.opened = True
        if tenant.folder.is_dir():
            remove_unfinished(tenant.folder, "*")
            half_written = tenant.folder.glob("*.segment.*-*")  # in a container all processes may have one number
            for path in [*half_written, *tenant.folder.glob(f"*{_ERASED}")]:
                erase(path)
        counting: list[CorpusFile] = []
        for file in files:
            if any(each.supersedes(file) for each in counting):
                erase(file.path)
                continue
            if not file.is_log:
                try:
                    segment = Segment(file, tenant.tokenizer)
                    segment.verify()
                except (CorpusFileError, OSError) as error:
                    self._set_aside(file, error)
                    continue
                tenant.segments.append(segment)
            counting.append(file)
        return counting

    def _read_log(self, file: CorpusFile, tokenizer: bytes) -> list[LearnedText]:
        try:
            texts, cut = read_log(file.path, tokenizer)
        except CorpusFileError as error:
            self._set_aside(file, error)
            return []
        if cut:
            log.warning("The last %d bytes of %s are cut off or damaged: they are left out.", cut, file.path)
        return texts

    def _set_aside(self, file: CorpusFile, error: Exception) -> None:
        """A file that is not read keeps its bytes under another name, until the tenant is forgotten."""
        log.warning("%s %s", error, "The corpus goes on without it.")
        with suppress(OSError):
            file.path.rename(file.path.with_name(f"{file.path.name}{_UNREAD}"))


def _oldest_in(file: CorpusFile) -> float:
    """When the oldest text of a segment was written. Of a damaged one: before all times, so that it is set aside."""
    try:
        return float(Segment(file).texts["written"].min(initial=np.iinfo(np.uint32).max))
    except CorpusFileError:
        return -np.inf


def forget_tenants(folder: Path, tenants: Sequence[Path]) -> None:
    """Overwrite and remove all files of these tenants. UsageError while a process learns in the folder, or reads texts
    in it to write them elsewhere."""
    lock = lock_folder(folder)
    try:
        with _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            for tenant in tenants:
                for path in tenant.iterdir():
                    erase(path)
                sync_folder(tenant)
                tenant.rmdir()
    finally:
        os.close(lock)


def being_read(folder: Path) -> AbstractContextManager[None]:
    """No other process forgets a tenant of the folder meanwhile."""
    return _locked(folder, fcntl.LOCK_SH)


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    """Locks the folder itself: its tenants may be more than the files that a process may open. UsageError if another
    process has it."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, how)
        except BlockingIOError:
            raise UsageError(
                f"Another process reads the texts in {folder}.", "Wait until the other wager corpus has ended."
            ) from None
        yield
    finally:
        os.close(opened)


def lock_folder(folder: Path) -> int:
    """An open file that keeps other processes from writing below a folder. UsageError if one does."""
    opened = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        process = os.read(opened, 20).decode("ascii", "replace").strip()
        os.close(opened)
        raise UsageError(
            f"Process {process or '(unknown)'} learns in {folder}, and only one can.",
            "End it first, or give each its own folder.",
        ) from None
    os.ftruncate(opened, 0)
    os.write(opened, b"%d\n" % os.getpid())
    return opened


def tenant_folder_name(tenant: str, key: bytes) -> str:
    return hmac.new(key, tenant.encode(), hashlib.sha256).hexdigest()[:32]


def _tenant_key(folder: Path) -> bytes:
    """The key of a folder's names, made once; its process holds the lock."""
    path = folder / "key"
    if not path.exists():
        with private_file(path) as file:
            file.write(secrets.token_bytes(32))
        sync_folder(folder)
    return path.read_bytes()
