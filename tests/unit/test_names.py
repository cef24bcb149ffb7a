"""Models by name: what a name means, which files of a repository are the model, and fetching, listing and deleting
them, from a server that speaks the hub's protocol."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub, serving

from in_process import Call, refused
from wager import LLM
from wager.drafter_spec import parse_drafters
from wager.errors import ModelError
from wager.loading import drafters
from wager.models import hub
from wager.models.names import HubSource, hub_source, is_beside, model_files, named_model, named_models

TINY = "random:llama:tiny"

# ---- names ----------------------------------------------------------------------------------------------------------


def test_the_table_of_names_is_sound() -> None:
    """Its sources are repositories, its drafters can be written for --drafter, and short names in them exist."""
    rows = named_models()
    assert {"qwen3:4b", "gemma3:1b", "llama3.2:3b", "gpt-oss:20b"} <= set(rows)
    for name, row in rows.items():
        assert re.fullmatch(r"[a-z0-9.-]+:[a-z0-9.]+", name) and 0 < row.gb < 100
        assert row.source in hub.KNOWN or hub_source(row.source), name
        for text in row.drafters:
            [spec] = parse_drafters(text)
            kind, argument = spec.option.argument, spec.argument or ""
            assert kind == "modules" or (argument in rows if kind == "path" else hub_source(argument)), text
            assert kind != "path" or rows[argument].gb < row.gb, "a draft model is smaller"
    assert len({row.source for row in rows.values()}) == len(rows)


def test_names_of_files_that_go_with_a_model() -> None:
    heads = (
        "mmproj-F16",
        "mtp-gemma-4-12B-it",
        "Qwen3-4B-EAGLE3-Q8_0",
        "qwen3-4b-dflash-b16",
        "gemma-4-E2B-it-assistant",
    )
    heads += ("google_gemma-4-26B-A4B-it-assistant-Q8_0", "gemma-4-31B-it-qat-q4_0-unquantized-assistant")
    models = ("gemma-4-12B-it", "my-assistant-8B-Q4_K_M", "OpenAssistant-7B", "gemma-4-12b-home-assistant-Q4_0")
    assert all(is_beside(f"{name}.gguf") for name in heads) and not any(is_beside(f"{name}.gguf") for name in models)


def test_what_a_name_means() -> None:
    assert (
        named_model("Qwen3:4B") == named_model("qwen/qwen3-4b-gguf:qwen3-4b-q4_k_m.gguf") == named_models()["qwen3:4b"]
    )
    for text, source in (
        ("org/name", HubSource("org/name")),
        ("org/name:Q4_K_M", HubSource("org/name", "Q4_K_M")),
        ("https://huggingface.co/org/name", HubSource("org/name")),
        ("hf.co/org/name:a.gguf", HubSource("org/name", "a.gguf")),
        ("folder/a.gguf", None),
        ("./org/name", None),
        ("name", None),
    ):
        assert hub_source(text) == source
    with pytest.raises(ModelError) as caught:
        hub.find("qwen3")
    assert "several sizes" in caught.value.message and "qwen3:4b" in caught.value.hint
    with pytest.raises(ModelError) as caught:
        hub.find("gemma3:1.b")
    assert "'gemma3:1b'" in caught.value.hint


GGUF = ["README.md", "a-Q4_K_M.gguf", "a-Q8_0.gguf", "mmproj-a-f16.gguf"]
SPLIT = ["a-q4_k_m-00001-of-00002.gguf", "a-q4_k_m-00002-of-00002.gguf"]
BESIDE = ["mtp-a-Q8_0.gguf", "a-EAGLE3-Q8_0.gguf"]
FOLDER = [f"Q4_K_M/{name}" for name in SPLIT]
WEIGHTS = ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"]


def test_the_files_of_a_model() -> None:
    beside = ["original/model.safetensors", "consolidated.safetensors", "README.md", "pytorch_model.bin"]
    for names, wanted, files in (
        ([*WEIGHTS, *beside], "", sorted(WEIGHTS)),
        (GGUF, "", ["a-Q4_K_M.gguf"]),
        (GGUF, "q8_0", ["a-Q8_0.gguf"]),
        (GGUF, "A-q8_0.gguf", ["a-Q8_0.gguf"]),
        (["only-f16.gguf"], "", ["only-f16.gguf"]),
        ([*WEIGHTS, *GGUF], "Q8_0", ["a-Q8_0.gguf"]),
        (SPLIT, "", SPLIT),
        ([*WEIGHTS, "a-q8_0.gguf", *FOLDER], "", sorted(WEIGHTS)),
        ([*WEIGHTS, "a-q8_0.gguf", *FOLDER], "Q4_K_M", FOLDER),
        ([*GGUF, *SPLIT, *FOLDER], SPLIT[1], SPLIT),
        (["a-Q8_0.gguf", *BESIDE], "", ["a-Q8_0.gguf"]),
        (["a-Q8_0.gguf", *BESIDE], "Q8_0", ["a-Q8_0.gguf"]),
        (["a-Q8_0.gguf", *BESIDE], "mtp-a-q8_0.gguf", [BESIDE[0]]),
        ([BESIDE[1]], "", [BESIDE[1]]),
    ):
        assert sorted(model_files(names, HubSource("org/name", wanted))) == files
    for names, wanted, says in (
        (GGUF, "Q5_0", "no GGUF file 'Q5_0'"),
        (["a-Q8_0.gguf", "a-Q5_0.gguf"], "", "no GGUF file that would be chosen"),
        (["config.json", "pytorch_model.bin"], "", "pickles"),
    ):
        with pytest.raises(ModelError, match=says):
            model_files(names, HubSource("org/name", wanted))


# ---- a hub ----------------------------------------------------------------------------------------------------------

WHOLE = bytes(range(256)) * 4096
QWEN = {"Qwen3-0.6B-Q8_0.gguf": WHOLE[:5000], "README.md": b"read"}
PART = {
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": WHOLE,
    "model-00002-of-00002.safetensors": b"b" * 70_000,
    "original/model.safetensors": b"c" * 90_000,
}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with org/name, and an empty cache of the hub's clients."""
    from huggingface_hub import constants

    repositories = {"org/name": PART, "Qwen/Qwen3-0.6B-GGUF": QWEN}
    with serving(Hub(repositories)) as running:
        cache = tmp_path / "hf" / "hub"
        settings = {"HF_HOME": cache.parent, "HF_ENDPOINT": running.url, "WAGER_CACHE": tmp_path / "cache"}
        for name, value in {**settings, "HF_HUB_DISABLE_XET": 1}.items():
            monkeypatch.setenv(name, str(value))
        for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        yield running


def test_a_download_goes_on_where_it_ended_and_is_checked(server: Hub, wager: Call, tmp_path: Path) -> None:
    server.cut = 600_000
    broken = wager("pull", "org/name")
    assert broken.code == 1 and "could not be fetched" in broken.err and "the next attempt goes on" in broken.err
    [part] = (tmp_path / "hf").rglob("*.part")
    begun = part.stat().st_size
    assert 0 < begun <= server.cut
    assert hub.find("org/name") is None, "nobody loads half of it"
    assert "org/name (in part" in wager("list").out
    server.cut, server.requested = None, []
    whole = wager("pull", "ORG/name".lower())
    assert whole.code == 0, whole.err
    folder = Path(whole.out.strip())
    assert (folder / "model-00001-of-00002.safetensors").read_bytes() == WHOLE
    assert server.requested[0] == ("model-00001-of-00002.safetensors", begun)
    assert not (folder / "original").exists(), "folders hold the same in other forms"
    assert "Fetching org/name" in whole.err and list((tmp_path / "hf").rglob("*.part")) == []
    server.requested = []
    assert wager("pull", "org/name").out == whole.out and server.requested == []


@pytest.mark.slow
def test_what_arrives_otherwise_than_the_hub_states_is_deleted(server: Hub, wager: Call, tmp_path: Path) -> None:
    server.states["model-00001-of-00002.safetensors"] = "0" * 64
    refused(wager("pull", "org/name"), "its SHA-256 is", f"expected {'0' * 64}", code=1)
    assert list((tmp_path / "hf").rglob("*.part")) == [] and hub.find("org/name") is None
    del server.states["model-00001-of-00002.safetensors"]
    assert wager("pull", "org/name").code == 0
    server.requested = []
    assert wager("pull", "org/name", "--force").code == 0 and len(server.requested) == 2
    refused(wager("pull", "org/other"), "could not be fetched from the Hugging Face hub", code=1)


def test_a_short_name_is_fetched_listed_and_deleted(server: Hub, wager: Call, tmp_path: Path) -> None:
    fetched = wager("pull", "Qwen3:0.6B")
    assert fetched.code == 0, fetched.err
    path = Path(fetched.out.strip())
    assert path.name == "Qwen3-0.6B-Q8_0.gguf" and path.read_bytes() == QWEN[path.name]
    assert hub.find("qwen3:0.6b") == hub.find("Qwen/Qwen3-0.6B-GGUF") == path
    [model] = json.loads(wager("list", "--json", "-").out)["models"]
    assert (model["name"], model["bytes"], model["complete"]) == ("qwen3:0.6b", 5000, True)
    assert str(path) in wager("list", "-v").err and str(path) not in wager("list").err
    assert [drafters.is_here(spec) for spec in drafters.known_drafters("qwen3:4b")][:2] == [True, False]
    assert "qwen3:0.6b  (on this machine)" in wager("drafters", "qwen3:4b").out
    deleted = wager("rm", "qwen3:0.6b")
    assert deleted.code == 0 and not path.exists() and hub.find("qwen3:0.6b") is None
    assert list((tmp_path / "hf").rglob("*gguf*")) == [], "nor what it links to"
    refused(wager("rm", "qwen3:0.6b"), "is not on this machine", code=1)
    refused(wager("rm", str(tmp_path)), "is a path", code=1)


@pytest.mark.slow
def test_doctor_lists_models_of_the_hub_and_leaves_them_as_they_are(server: Hub, wager: Call, tmp_path: Path) -> None:
    """Directories, files that are no models, halves, and a snapshot whose blob is gone."""
    for name in ("org/name", "qwen3:0.6b"):
        folder = Path(wager("pull", name).out.strip()).parents[2]
    shutil.copytree(folder, folder.with_name("models--org--gone"), symlinks=True)
    hub.find("org/gone").resolve().unlink()  # type: ignore[union-attr]
    server.repositories, server.cut = {"org/half": PART}, 300_000
    assert wager("pull", "org/half").code == 1
    server.cut, server.requested = None, []

    def files() -> dict[Path, tuple[int, int]]:
        found = {path: path.lstat() for path in (tmp_path / "hf").rglob("*")}
        return {path: (status.st_size, status.st_mtime_ns) for path, status in found.items()}

    before = files()
    report, text = wager("doctor", "--json", "-"), wager("doctor")
    assert (report.code, text.code, files(), server.requested) == (0, 0, before, [])
    here = {model["name"]: model for model in json.loads(report.out)["models"]["here"]}
    assert {*here} == {"org/name", "qwen3:0.6b", "org/half"}
    assert [here["org/name"][key] for key in ("error", "weights")] == [None, None] and here["org/name"]["bytes"] > 2**20
    assert here["org/half"]["error"] == "org/half is here in part: `wager pull` goes on."
    assert "qwen3:0.6b (0 MB)" in text.out and here["org/half"]["error"] in text.out


@pytest.mark.slow
def test_all_parts_of_a_split_file_are_fetched_listed_and_deleted(server: Hub, wager: Call, tmp_path: Path) -> None:
    bodies = {name: name.encode() * 99 for name in (*FOLDER, "a-q8_0.gguf")}
    server.repositories = {"org/split": bodies}
    fetched = wager("pull", "org/split")
    assert fetched.code == 0, fetched.err
    first = Path(fetched.out.strip())
    parts = [first.with_name(name) for name in SPLIT]
    assert [part.read_bytes() for part in parts] == [bodies[name] for name in FOLDER] and first == parts[0]
    assert len(server.requested) == 2, "and not the other quantisation"
    assert hub.find("org/split:Q4_K_M") == first
    [model] = json.loads(wager("list", "--json", "-").out)["models"]
    assert (model["name"], model["bytes"]) == (f"org/split:{SPLIT[0]}", sum(map(len, bodies.values())) - 99 * 11)
    parts[1].resolve().unlink()
    assert hub.find("org/split:Q4_K_M") is None, "half of it"
    assert wager("pull", "org/split").code == 0
    assert wager("rm", f"org/split:{SPLIT[1]}").code == 0
    assert list((tmp_path / "hf").rglob("*gguf*")) == []


def test_auto_offers_the_drafter_that_fits(server: Hub, wager: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is fetched for who agrees, or writes --yes; others are told, and nothing is fetched."""
    from wager.cli.loading import _offered
    from wager.terminal import console

    monkeypatch.setattr("click.get_current_context", lambda silent=False: None)
    assert _offered("qwen3:4b") == [] == _offered("random:llama:tiny")
    monkeypatch.setattr("wager.terminal.flags.wrote", lambda name: name == "drafter")
    asked: list[str] = []
    for answer, expected in ((False, []), (True, ["qwen3:0.6b"])):
        monkeypatch.setattr(console, "confirmed", lambda question, yes, answer=answer: asked.append(question) or answer)
        assert _offered("qwen3:4b") == expected
    assert asked[0] == "Fetch qwen3:0.6b (0.6 GB) to draft for qwen3:4b?"


def test_auto_uses_a_drafter_that_fits_beside_a_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafters, "known_drafters", lambda model: parse_drafters("layers:0") * (model == TINY))
    monkeypatch.setattr(drafters, "is_here", lambda spec: True)
    with LLM(TINY, memory="256MiB", threads=1) as llm:
        assert list(llm.engine.proposer.drafters) == ["suffix", "layers"]
    with LLM(TINY, memory="256MiB", threads=1, policy="fixed") as llm:
        assert list(llm.engine.proposer.drafters) == ["layers"], "a policy of one drafter"


def test_nobody_is_asked_who_cannot_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from wager.terminal import console

    assert console.confirmed("Fetch it?", yes=True)
    monkeypatch.setattr("click.confirm", lambda *_, **__: pytest.fail("asked"))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert not console.confirmed("Fetch it?", yes=False)
