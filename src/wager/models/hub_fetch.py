"""Fetches files of a repository of the Hugging Face hub into its client's cache: run as a program, by download.py.

Large files are fetched here and not by the client, which begins anew after every interruption: what arrived stays in a
file beside the blob and is gone on with, and it becomes the blob when its SHA-256 is the one that the hub states.
Prints a JSON object: {"path": the snapshot's folder} or {"error": a sentence}.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

_PIECE = 1 << 16
"""Bytes that are written at once: no more is lost of what arrived before an interruption."""


def fetch(plan: dict[str, Any]) -> str:
    """The snapshot's folder with the files of `plan`: repository, revision, files ({"path", "sha256" if it is a large
    file, else "oid", "size"}), force: fetch those too that are there."""
    from huggingface_hub import constants, snapshot_download

    constants.DOWNLOAD_CHUNK_SIZE = _PIECE
    folder = Path(constants.HF_HUB_CACHE) / ("models--" + plan["repository"].replace("/", "--"))
    for file in plan["files"]:
        if file["sha256"]:
            _fetch_large(plan, file, folder)
        elif plan["force"]:
            (folder / "blobs" / file["oid"]).unlink(missing_ok=True)
    return str(snapshot_download(plan["repository"], allow_patterns=[file["path"] for file in plan["files"]]))


def _fetch_large(plan: dict[str, Any], file: dict[str, Any], folder: Path) -> None:
    from filelock import FileLock
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    blob = folder / "blobs" / file["sha256"]
    part = blob.with_name(blob.name + plan["part"])
    locks = Path(constants.HF_HUB_CACHE) / ".locks" / folder.name  # as the client has them
    for needed in (blob.parent, locks):
        needed.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / f"{blob.name}.lock"):
        if blob.exists() and not plan["force"]:
            return
        if plan["force"] or (part.exists() and part.stat().st_size > file["size"]):
            part.unlink(missing_ok=True)
        url = hf_hub_url(plan["repository"], file["path"], revision=plan["revision"])
        with part.open("ab") as opened:
            there = opened.tell()
            http_get(url, opened, resume_size=there, headers=build_hf_headers(), expected_size=file["size"])
        with part.open("rb") as written:
            found = hashlib.file_digest(written, "sha256").hexdigest()
        if found != file["sha256"]:
            part.unlink()
            raise OSError(
                f"{file['path']} is not what the hub has: its SHA-256 is {found}, expected {file['sha256']}; what "
                "arrived was deleted, try again"
            )
        os.replace(part, blob)


if __name__ == "__main__":
    try:
        answer = {"path": fetch(json.loads(sys.argv[1]))}
    except Exception as error:
        answer = {"error": (str(error).strip().splitlines() or [type(error).__name__])[0]}
    sys.stdout.write(json.dumps(answer) + "\n")
