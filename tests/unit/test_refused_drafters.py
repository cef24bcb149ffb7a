"""Heads and stores that do not fit, as a user sees it: exit code 1, a sentence that names the mismatch, and a hint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from blank_heads import HEADS

from wager.cli import main
from wager.models.opening import open_model, target_fingerprint, tokenizer_fingerprint

MODEL = "random:llama:tiny"
Refusal = Callable[..., str]


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Refusal:
    """What `wager run` says of a drafter that it refuses."""
    monkeypatch.setenv("WAGER_CACHE", str(tmp_path / "cache"))

    def run(drafter: str, *, model: str = MODEL, code: int = 1) -> str:
        given = ["run", "hi", "--model", model, "--threads", "1", "--memory", "64MiB", "--max-tokens", "2"]
        assert main([*given, "--drafter", drafter]) == code
        said = capfd.readouterr().err
        assert "Traceback" not in said
        assert code == 0 or ("error: " in said and "hint: " in said)
        return said

    return run


def noted(**changes: object) -> dict[str, object]:
    _, weights, tokenizer = open_model(MODEL)
    own = {"target": "tiny", "target_fingerprint": target_fingerprint(weights)}
    return {**own, "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer), **changes}


def spoiled(name: str, folder: Path) -> Iterator[tuple[Path, str]]:
    """Heads of a kind that are wrong in one way each, and what is said of them."""
    spec = open_model(MODEL)[1].spec
    make = HEADS[name]
    yield make(folder / "target", spec, wager=noted(target_fingerprint="00")), "was trained for tiny, whose weights"
    yield (
        make(folder / "tokenizer", spec, wager=noted(tokenizer_fingerprint="00")),
        "with another tokenizer or chat template",
    )
    for size, says in ((0, "cannot be read"), (9, "cannot be read"), (3000, "cannot be read")):
        cut = make(folder / f"cut{size}", spec)
        (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:size])
        yield cut, says
    for absent, says in (("config.json", "There is no head at"), ("model.safetensors", "neither model.safetensors")):
        cut = make(folder / f"no {absent}", spec)
        (cut / absent).unlink()
        yield cut, says
    yield folder / "nowhere", "There is no head at"


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_do_not_fit_are_refused(name: str, refusal: Refusal, tmp_path: Path) -> None:
    spec = open_model(MODEL)[1].spec
    refusal(f"{name}:{HEADS[name](tmp_path / 'good', spec, wager=noted())}", code=0)
    for path, says in spoiled(name, tmp_path):
        found = refusal(f"{name}:{path}")
        assert says in found and path.name in found, found


@pytest.mark.parametrize("name", HEADS)
def test_a_head_of_another_kind_is_refused(name: str, refusal: Refusal, tmp_path: Path) -> None:
    spec = open_model(MODEL)[1].spec
    for other in HEADS:
        if other != name:
            said = refusal(f"{name}:{HEADS[other](tmp_path / other, spec)}")
            assert str(tmp_path / other) in said, said


@pytest.mark.parametrize(
    ("name", "key"), [("eagle3", "eagle_aux_hidden_state_layer_ids"), ("dflash", "aux_hidden_state_layer_ids")]
)
def test_other_taps_than_those_that_a_head_was_trained_on_are_refused(
    name: str, key: str, refusal: Refusal, tmp_path: Path
) -> None:
    """Also where the shapes fit; and layers that the target does not have."""
    spec = open_model(MODEL)[1].spec
    last = spec.num_layers - 1
    head = HEADS[name](tmp_path, spec, wager=noted(taps=[0, last]))
    refusal(f"{name}:{head}", code=0)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps({**config, key: [0, 99]}))
    assert "after layer 99" in refusal(f"{name}:{head}")
    (head / "config.json").write_text(json.dumps({**config, "wager": noted(taps=[0, 7])}))
    assert f"taps the target after layers 0, {last}; it was trained on 0, 7" in refusal(f"{name}:{head}")
