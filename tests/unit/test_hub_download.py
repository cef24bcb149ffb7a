"""`wager pull ORG/NAME` as a process, with the hub's client and a hub of our own: whole, damaged and interrupted."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import wager as package

pytestmark = pytest.mark.slow

SOURCE = str(Path(package.__file__).parents[1])
COMMIT = "c" * 40
CONFIG, WEIGHTS = b'{"a": 1}', bytes(range(256)) * 4096
HASHES = {
    "config.json": hashlib.sha1(b"blob %d\0" % len(CONFIG) + CONFIG).hexdigest(),
    "model.safetensors": hashlib.sha256(WEIGHTS).hexdigest(),
}


class Hub(http.server.ThreadingHTTPServer):
    """A hub with the model org/name, whose weights never arrive in full while `stalls` is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.stalls = False
        self.stalled, self.left = threading.Event(), threading.Event()


class Answer(http.server.BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        files = {"config.json": CONFIG, "model.safetensors": WEIGHTS}
        name = self.path.rpartition("/")[2]
        if "/tree/" in self.path:
            listed = [{"type": "file", "path": name, "size": len(files[name]), "oid": HASHES[name]} for name in files]
            self._send(json.dumps(listed).encode())
        elif self.path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": name} for name in files]
            self._send(json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode())
        elif self.path.startswith("/org/name/resolve/"):
            self._send(files[name], etag=HASHES[name], stall=self.server.stalls and name == "model.safetensors")
        else:
            self.send_error(404)

    def _send(self, body: bytes, *, etag: str = "", stall: bool = False) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        if etag:
            self.send_header("ETag", f'"{etag}"')
            self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[: len(body) // 2] if stall else body)
        if stall:
            self.server.stalled.set()
            with suppress(ConnectionError):
                self.connection.recv(1)
            self.server.left.set()


@pytest.fixture
def server() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, args=(0.05,))
    thread.start()
    yield hub
    hub.shutdown()
    hub.server_close()
    thread.join()


def default_signals() -> None:
    """In the child: also where the tests run in the background."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def pull(server: Hub, tmp_path: Path, *flags: str) -> subprocess.Popen[str]:
    ours = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment = {
        **ours,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "WAGER_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": SOURCE,
    }
    for name in ("HF_HUB_CACHE", "HF_TOKEN"):
        environment.pop(name, None)
    return subprocess.Popen(
        [sys.executable, "-m", "wager.cli", "pull", "org/name", *flags],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=default_signals,
    )


def test_a_model_of_the_hub_is_fetched_verified_and_replaced_when_damaged(server: Hub, tmp_path: Path) -> None:
    first = pull(server, tmp_path)
    out, err = first.communicate(timeout=60)
    assert first.returncode == 0, err
    weights = Path(out.strip()) / "model.safetensors"
    assert weights.read_bytes() == WEIGHTS
    weights.resolve().write_bytes(WEIGHTS[:-1] + b"?")
    again = pull(server, tmp_path)
    _, err = again.communicate(timeout=60)
    assert again.returncode == 1
    assert f"{weights} is damaged or was altered" in err
    assert HASHES["model.safetensors"] in err
    assert "`wager pull --force org/name`" in err
    forced = pull(server, tmp_path, "--force")
    _, err = forced.communicate(timeout=60)
    assert forced.returncode == 0, err
    assert weights.read_bytes() == WEIGHTS


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_download(server: Hub, tmp_path: Path, number: signal.Signals, code: int) -> None:
    server.stalls = True
    process = pull(server, tmp_path)
    assert server.stalled.wait(60)
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert "Traceback" not in err
    assert server.left.wait(5), "nobody downloads any more"
    assert list((tmp_path / "hf").rglob("*.incomplete")) == []


def test_a_hub_that_is_not_there_is_named(server: Hub, tmp_path: Path) -> None:
    server.server_close()
    process = pull(server, tmp_path)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "org/name is not a local directory, and could not be fetched from the Hugging Face hub" in err
    assert "Traceback" not in err
