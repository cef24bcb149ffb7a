"""Finding and fetching models: paths, known names and digests, with the real pip and a folder of wheels; and files that
are damaged or replaced, which are found at load by their published hashes, and hashed once."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import SIZES

from wager.cli import main
from wager.config import DEFAULT_MODEL
from wager.errors import DownloadError, ModelError
from wager.models import download, hub
from wager.models.integrity import VerifiedFiles, WheelModel
from wager.planner.inputs import find_plan_model

BODY = b"GGUF" + bytes(range(256)) * 64
SHA256 = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of fetched models; nothing is known to be intact."""
    monkeypatch.setenv("WAGER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(VerifiedFiles, "_here", {})
    return tmp_path / "cache" / "models"


TINY = WheelModel(
    package="tiny-model",
    version="1.0",
    wheel_sha256="0" * 64,
    wheel_bytes=1,
    member="tiny_model/tiny.gguf",
    sha256=SHA256,
    bytes=len(BODY),
)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """A model in a small wheel that pip can find, known as `tiny`."""
    path = tmp_path / "wheels" / "tiny_model-1.0-py3-none-any.whl"
    path.parent.mkdir()
    about = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", BODY)
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    model = replace(TINY, wheel_sha256=digest, wheel_bytes=path.stat().st_size)
    monkeypatch.setitem(hub.KNOWN, "tiny", model)
    return model


def leftovers(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def test_resolve_fetches_a_known_model_once(cache: Path, source: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    updates: list[tuple[str, int, int]] = []
    path = hub.resolve("tiny", lambda *activity: updates.append(activity))
    assert path == cache / "tiny" / "tiny.gguf"
    assert path.read_bytes() == BODY
    assert leftovers(cache) == ["tiny/tiny.gguf"]
    assert {activity.split()[0] for activity, _, _ in updates} == {"Downloading", "Checking", "Unpacking"}
    assert all(0 <= done <= total for _, done, total in updates)
    assert ("tiny", path) in [(each.name, each.path) for each in hub.stored_models()]
    monkeypatch.setattr(download, "pip_download", lambda *_, **__: pytest.fail("fetched twice"))
    assert hub.resolve("tiny") == path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"wheel_sha256": "0" * 64}, rf"SHA-256 is .*, expected {'0' * 64}"),
        ({"sha256": "0" * 64}, rf"SHA-256 is .*, expected {'0' * 64}"),
        ({"member": "tiny_model/other.gguf"}, r"other\.gguf"),
        ({"bytes": 1 << 60}, "MB left"),
        ({"version": "9.9"}, r"tiny-model 9\.9.*No matching distribution"),
    ],
)
def test_what_cannot_be_fetched_is_named_and_leaves_nothing(
    cache: Path, source: WheelModel, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], says: str
) -> None:
    monkeypatch.setitem(hub.KNOWN, "tiny", replace(source, **change))
    with pytest.raises(DownloadError, match=says):
        hub.resolve("tiny")
    assert leftovers(cache) == []


def test_a_missing_pip_is_an_error(cache: Path, source: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(download.shutil, "which", lambda _name: None)
    with pytest.raises(DownloadError, match="pip is not installed"):
        hub.resolve("tiny")


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, source: WheelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("WAGER_CACHE", str(blocker))
    with pytest.raises(DownloadError, match="could not be stored"):
        hub.resolve("tiny")


def test_existing_paths(tmp_path: Path) -> None:
    single, directory, several = (tmp_path / name for name in ("single", "hf", "several"))
    for folder in (single, directory, several):
        folder.mkdir()
    (single / "a.gguf").touch()
    (directory / "config.json").touch()
    (several / "a.gguf").touch()
    (several / "b.gguf").touch()
    (tmp_path / "sha256-0").write_bytes(b"GGUF\3\0\0\0")
    assert hub.resolve(str(tmp_path / "sha256-0")) == tmp_path / "sha256-0"
    assert hub.resolve(str(single)) == single / "a.gguf"
    assert hub.resolve(str(single / "a.gguf")) == single / "a.gguf"
    assert hub.resolve(str(directory)) == directory
    (single / "config.json").touch()  # as in many repositories of GGUF files
    assert hub.resolve(str(single)) == single / "a.gguf"
    (single / "model.safetensors").touch()
    assert hub.resolve(str(single)) == single
    with pytest.raises(ModelError, match=r"a\.gguf, b\.gguf"):
        hub.resolve(str(several))
    with pytest.raises(ModelError, match="holds no model"):
        hub.resolve(str(tmp_path))
    with pytest.raises(ModelError, match="not a GGUF file"):
        hub.resolve(str(directory / "config.json"))


@pytest.mark.parametrize(
    ("model", "hint"),
    [("smollm2-135m-instrct", DEFAULT_MODEL), ("./nowhere", "Check the path"), ("nowhere.gguf", "Check the path")],
)
def test_what_is_not_there_is_named(model: str, hint: str) -> None:
    with pytest.raises(ModelError) as caught:
        hub.resolve(model)
    assert model in caught.value.message and hint in caught.value.hint


# ---- files that are damaged, swapped or replaced ----


@pytest.fixture
def stored(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stored file of a model known as `tiny`."""
    monkeypatch.setitem(hub.KNOWN, "tiny", TINY)
    path = cache / "tiny" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(BODY)
    return path


def hashed(model: str) -> bool:
    """Whether loading `model` reads the whole file."""
    activities: list[str] = []
    hub.resolve(model, lambda activity, _done, _total: activities.append(activity))
    return bool(activities)


def restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what only this process remembers."""
    monkeypatch.setattr(VerifiedFiles, "_here", {})


def flip(path: Path, at: int = 5000) -> None:
    """Change one bit in place, and put the time of modification back."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        [value] = file.read(1)
        file.seek(at)
        file.write(bytes([value ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def exchange(path: Path, body: bytes) -> None:
    """Put another file in its place, with the same time of modification."""
    before, other = path.stat(), path.with_name("other")
    other.write_bytes(body)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


def test_a_file_is_hashed_once(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hashed("tiny")
    assert not hashed("tiny")
    restart(monkeypatch)
    assert not hashed("tiny"), "another process finds it in the cache"
    assert not hashed(str(stored)), "by its path too"
    assert not hashed(str(stored.parent))
    os.utime(stored)
    assert hashed("tiny"), "it may have been written"
    exchange(stored, BODY)
    assert hashed("tiny"), "it is another file"
    os.utime(stored)
    hub.resolve("tiny", lambda *_: os.utime(stored, ns=(1, 1)))
    assert hashed("tiny"), "it was written while it was hashed"


@pytest.mark.parametrize("known_before", [False, True])
@pytest.mark.parametrize(
    "damage",
    [
        flip,
        lambda path: exchange(path, BODY[:-1] + b"?"),
        lambda path: path.write_bytes(BODY[: len(BODY) // 2]),
    ],
    ids=["bit", "replaced", "truncated"],
)
def test_damage_is_an_error_that_names_both_hashes(
    stored: Path, damage: Callable[[Path], object], known_before: bool
) -> None:
    if known_before:
        hub.resolve("tiny")
    damage(stored)
    found = hashlib.sha256(stored.read_bytes()).hexdigest()
    for model in ("tiny", str(stored), str(stored.parent)):
        for _ in range(2):  # it is not remembered as intact
            with pytest.raises(ModelError) as caught:
                hub.resolve(model)
            assert all(text in caught.value.message for text in (str(stored), found, SHA256))
            assert "wager pull --force tiny" in caught.value.hint
    stored.write_bytes(BODY)
    assert hub.resolve("tiny") == stored


def test_what_is_no_file_is_named(stored: Path) -> None:
    stored.unlink()
    stored.mkdir()
    for fetch in (hub.resolve, hub.pull):
        with pytest.raises(ModelError, match="cannot be read: it is a folder") as caught:
            fetch("tiny")
        assert "delete it" in caught.value.hint
    stored.rmdir()
    os.mkfifo(stored)
    with pytest.raises(ModelError, match="cannot be read: it is not a file"):
        hub.resolve("tiny")


def test_the_memory_of_another_file_does_not_vouch(stored: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in the cache is compared with the file, entry by entry."""
    hub.resolve("tiny")
    memory = cache.parent / "verified" / "files.json"
    flip(stored)
    [(path, entry)] = json.loads(memory.read_text()).items()
    status = stored.stat()
    now = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]
    assert entry[:2] == now[:2], "size and modification time are as before"
    for changed in range(len(now)):
        values = [value + (index == changed) for index, value in enumerate(now)]
        memory.write_text(json.dumps({path: [*values, SHA256]}))
        restart(monkeypatch)
        with pytest.raises(ModelError, match="damaged"):
            hub.resolve("tiny")
    memory.write_text(json.dumps({path: [*now, "0" * 64]}))
    with pytest.raises(ModelError, match="damaged"):
        hub.resolve("tiny")


@pytest.mark.parametrize("text", ["", "[]", '{"a": ["x", 1]}', "[" * 100_000])
def test_a_damaged_memory_holds_nothing(stored: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    memory = cache.parent / "verified" / "files.json"
    memory.parent.mkdir()
    memory.write_text(text)
    assert hashed("tiny")
    restart(monkeypatch)
    assert not hashed("tiny"), "it was written anew"


def test_a_cache_that_cannot_be_written_still_works(stored: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache.parent / "verified").write_text("a file where the folder belongs")
    assert hashed("tiny")
    assert not hashed("tiny"), "this process remembers"
    restart(monkeypatch)
    assert hashed("tiny")


# ---- files of a Hub -----------------------------------------------------------------------------------------------


@pytest.fixture
def snapshot(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A snapshot of org/name as the hub's client stores it: links to blobs that are named by their hashes."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--org--name"
    folder = repository / "snapshots" / ("c" * 40)
    for part in (folder, repository / "blobs", repository / "refs"):
        part.mkdir(parents=True)
    (repository / "refs" / "main").write_text("c" * 40)
    text = b'{"a": 1}'
    files = [
        ("model.safetensors", hashlib.sha256(BODY), BODY),
        ("config.json", hashlib.sha1(b"blob %d\0" % len(text) + text), text),  # as git has it
        ("tokenizer.json", hashlib.sha1(text), text),  # as a mirror has it
    ]
    for name, hash_, body in files:
        digest = hash_.hexdigest()
        (repository / "blobs" / digest).write_bytes(body)
        (folder / name).symlink_to(Path("..", "..", "blobs", digest))
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_snapshot_of_the_hub_is_verified_once_and_a_damaged_file_named(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert hashed("org/name")
    restart(monkeypatch)
    assert not hashed("org/name") and not hashed(str(snapshot))
    flip((snapshot / name).resolve(), at=3)
    for model in ("org/name", str(snapshot)):
        with pytest.raises(ModelError, match="damaged") as caught:
            hub.resolve(model)
        assert str(snapshot / name) in caught.value.message
        assert "wager pull --force org/name" in caught.value.hint


def test_a_model_of_the_hub_is_planned_for_by_its_name(snapshot: Path) -> None:
    (snapshot / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **SIZES}))
    spec = find_plan_model("org/name")
    assert (spec.name, spec.hidden) == ("name", 48)
    with pytest.raises(ModelError, match="is not known"):
        find_plan_model("org/other")


# ---- wager doctor --verify, wager pull ------------------------------------------------------------------------------


def verify(capfd: pytest.CaptureFixture[str]) -> tuple[int, dict[str, str]]:
    """Exit code, and the status of every file."""
    code = main(["doctor", "--verify", "--json", "-"])
    files = json.loads(capfd.readouterr().out)["verified"]
    return code, {file["path"]: file["status"] for file in files}


def test_a_snapshot_without_weights_is_none(snapshot: Path) -> None:
    assert hub.find("org/name") == snapshot
    (snapshot / "model.safetensors").unlink()
    assert hub.find("org/name") is None


def test_doctor_hashes_everything_again(
    stored: Path, snapshot: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = cache / "own" / "own.gguf"
    own.parent.mkdir()
    own.write_bytes(b"GGUF")
    assert verify(capfd) == (0, {str(stored): "intact", str(own): "unknown"})
    hub.resolve("org/name")
    weights = str(snapshot / "model.safetensors")
    everything = {str(own): "unknown", **{str(path): "intact" for path in (stored, *snapshot.iterdir())}}
    assert verify(capfd) == (0, everything)
    flip(stored)
    flip(Path(weights).resolve())
    assert verify(capfd) == (1, {**everything, str(stored): "damaged", weights: "damaged"})
    assert main(["doctor", "--verify"]) == 1
    out = capfd.readouterr().out
    assert f"{stored}: damaged: SHA-256 {hashlib.sha256(stored.read_bytes()).hexdigest()}, expected {SHA256}" in out
    assert f"{own}: no hash is published to compare with" in out
    stored.unlink()
    stored.mkdir()
    assert verify(capfd)[1][str(stored)] == "unreadable"


@pytest.mark.parametrize("model", ["", " ", "\t\n"])
def test_a_blank_model_is_refused_by_name(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    (tmp_path / "only.gguf").write_bytes(BODY)
    monkeypatch.chdir(tmp_path)
    assert hub.resolve(".") == Path("only.gguf")
    for find in (hub.find, hub.resolve, hub.pull):
        with pytest.raises(ModelError, match="blank"):
            find(model)
    with pytest.raises(ModelError, match="there is nothing to fetch"):
        hub.pull(str(tmp_path / "only.gguf"), force=True)
