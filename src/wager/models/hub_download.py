"""Downloads a model from the Hugging Face hub in a process of its own, which can be ended.

The hub's client finishes the files it has begun before it reacts to an interruption, which may take hours.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_FORCE = "--force"
_PARTIAL = re.compile(r"(\w+)\.[0-9a-f]{8}\.incomplete")
"""A file that the client has begun: the blob's name, and a part that is new each time, so that none is continued."""


def download(name: str, patterns: Sequence[str], *, force: bool) -> Path:
    """The snapshot of ORG/NAME with the files of `patterns`; OSError with the client's words for a failure."""
    from wager.models import child_process  # here, so that the process that downloads does without wager

    with tempfile.TemporaryDirectory(prefix="wager-") as folder:
        answer = Path(folder) / "answer"
        command = [sys.executable, "-P", __file__, name, *([_FORCE] if force else []), *patterns]
        try:
            code = child_process.run(command, output=answer, errors=False, environment=os.environ, report=lambda: None)
            lines = answer.read_text(encoding="utf-8").splitlines()
        except BaseException:
            remove_partial(name)
            raise
    try:
        values = json.loads(lines[-1])
    except (IndexError, ValueError):
        raise OSError(f"the download ended with exit status {code}") from None
    if "path" not in values:
        raise OSError(values["error"])
    return Path(values["path"])


def remove_partial(name: str) -> None:
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


def _main(name: str, *words: str) -> None:
    """In the process that downloads: one line of JSON on stdout, with the path or the error."""
    from huggingface_hub import snapshot_download

    patterns = [word for word in words if word != _FORCE]
    try:
        answer = {"path": snapshot_download(name, allow_patterns=patterns, force_download=_FORCE in words)}
    except Exception as error:  # the client raises errors of several unrelated families
        answer = {"error": (str(error).strip().splitlines() or [type(error).__name__])[0]}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    _main(*sys.argv[1:])
