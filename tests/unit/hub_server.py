"""A server that speaks the protocol of the Hugging Face hub, as far as fetching models needs it."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

COMMIT = "c" * 40


def git_hash(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


class Hub(http.server.ThreadingHTTPServer):
    """Repositories by ORG/NAME, with their files. Weights are large files, whose hash is their SHA-256.

    `cut`: bytes of weights after which a connection ends, and what is behind them is refused with 503 (None: nothing
    is); with `stalls` the connection stays open instead.
    `requested`: the weights that were asked for, with the first byte wanted. `states`: a hash that is stated in place
    of a file's own.
    """

    daemon_threads = True

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.repositories = repositories
        self.cut: int | None = None
        self.stalls = False
        self.stalled, self.left = threading.Event(), threading.Event()
        self.requested: list[tuple[str, int]] = []
        self.states: dict[str, str] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def sha256(self, name: str, body: bytes) -> str:
        return self.states.get(name, hashlib.sha256(body).hexdigest())


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    thread = threading.Thread(target=hub.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf"))


class _Answer(http.server.BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        about = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/tree/.*)?(/revision/.*)?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        repository = (about or file or [None, None])[1]
        files = self.server.repositories.get(repository or "")
        if files is None or (file and file[2] not in files):
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound" if files is None else "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif file:
            self._file(file[2], files[file[2]])
        elif about and about[2]:
            self._json([self._entry(name, body) for name, body in files.items()])
        else:
            siblings = [{"rfilename": name} for name in files]
            self._json({"id": repository, "sha": COMMIT, "siblings": siblings})

    def _entry(self, name: str, body: bytes) -> dict[str, object]:
        entry: dict[str, object] = {"type": "file", "path": name, "size": len(body), "oid": git_hash(body)}
        if is_large(name):
            entry["lfs"] = {"oid": self.server.sha256(name, body), "size": len(body), "pointerSize": 130}
        return entry

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _file(self, name: str, body: bytes) -> None:
        begin = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or [None, "0"])[1])
        tag = self.server.sha256(name, body) if is_large(name) else git_hash(body)
        if begin and self.server.cut is not None:
            self.send_error(503)
            return
        self.send_response(206 if begin else 200)
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(body) - 1}/{len(body)}")
        for header, value in {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT, "Content-Length": len(body) - begin}.items():
            self.send_header(header, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return
        end = len(body)
        if is_large(name):
            self.server.requested.append((name, begin))
            end = end if self.server.cut is None else self.server.cut
        self.wfile.write(body[begin:end])
        if end < len(body):
            self.wfile.flush()
            if self.server.stalls:
                self.server.stalled.set()
                with suppress(ConnectionError):
                    self.connection.recv(1)
                self.server.left.set()
            self.close_connection = True
