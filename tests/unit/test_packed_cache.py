"""Packed weights on disk: a start from them equals one without; none that is damaged or of something else is used."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tokenizer_models import save_model

import wager
from in_process import Call
from packing import batch, chain
from wager.kernels.arrays import Array, WeightParts
from wager.loading.load import LoadedEngine, load
from wager.models import packed_cache
from wager.models.packed_cache import SUFFIX, DamagedFileError, PackedFile, read_header

cpu = pytest.importorskip("wager.kernels.cpu")

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
}
TOKENS = list(range(3, 40))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WAGER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "packed"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("models") / "small", **SIZES)


class Started(NamedTuple):
    """An engine, its logits of TOKENS and how many matrices it packed."""

    engine: LoadedEngine
    logits: Array
    packed: int


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Started]:
    packed: list[str] = []
    for name in ("pack", "pack_gated", "pack_heads", "pack_experts"):
        real = getattr(cpu.Kernels, name)

        def counted(self: Any, *args: Any, real: Any = real, name: str = name, **more: Any) -> Any:
            packed.append(name)
            return real(self, *args, **more)

        monkeypatch.setattr(cpu.Kernels, name, counted)

    def start(model: str, **options: Any) -> Started:
        packed.clear()
        engine = load(wager.EngineConfig.from_options(model=model, drafter="none", max_rows=64, **options))
        rows = batch([chain(0, TOKENS, [5, 2, 7])], range(len(TOKENS)))
        return Started(engine, engine.target.decoder.forward(rows).logits.copy(), len(packed))

    return start


def files(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir()) if cache.is_dir() else []


def only(cache: Path) -> Path:
    [name] = files(cache)
    assert name.endswith(SUFFIX)
    return cache / name


# ---- a hit is a miss, only quicker ----


@pytest.mark.parametrize(
    ("architecture", "config", "options"),
    [
        ("LlamaForCausalLM", {}, {}),
        ("Qwen2ForCausalLM", {}, {"dtype": "q4"}),  # biases
        ("Qwen3MoeForCausalLM", EXPERTS, {"dtype": "q4"}),
        ("DeepseekV3ForCausalLM", LATENT, {"dtype": "q8"}),  # heads
    ],
)
def test_a_start_from_the_file_packs_nothing_and_gives_the_same_logits(
    tmp_path: Path, cache: Path, start: Callable[..., Started], architecture: str, config: Any, options: Any
) -> None:
    model = save_model(tmp_path / "model", architecture, **SIZES, **config)
    first, second = start(model, **options), start(model, **options)
    assert first.packed > 4 and second.packed == 0
    assert first.logits.tobytes() == second.logits.tobytes()
    assert np.abs(first.logits).max() > 0
    only(cache)


# ---- what is not used ----


def flipped(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: flipped(path, read_header(path).offset + read_header(path).nbytes // 2),
        lambda path: flipped(path, 100),
        lambda path: os.truncate(path, path.stat().st_size - 1),
    ],
    ids=["a bit of the data", "a bit of the header", "its end"],
)
def test_a_damaged_file_is_said_once_not_used_and_made_again(
    directory: str,
    cache: Path,
    start: Callable[..., Started],
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
) -> None:
    first = start(directory)
    path = only(cache)
    good = path.read_bytes()
    damage(path)
    assert path.read_bytes() != good
    second = start(directory)
    assert second.packed == first.packed
    assert second.logits.tobytes() == first.logits.tobytes()
    assert [str(path) in record.getMessage() for record in caplog.records] == [True]
    assert only(cache).read_bytes() == good
    assert start(directory).packed == 0
    assert len(caplog.records) == 1


def test_data_is_hashed_again_when_the_file_is_another(
    directory: str, cache: Path, start: Callable[..., Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[bool] = []
    real = PackedFile.is_intact

    def is_intact(self: PackedFile) -> bool:
        hashed.append(real(self))
        return hashed[-1]

    monkeypatch.setattr(PackedFile, "is_intact", is_intact)
    for _ in range(2):
        start(directory)
    assert hashed == []  # it was written by this process
    path = only(cache)
    copy = path.read_bytes()
    path.unlink()
    path.write_bytes(copy)
    assert [start(directory).packed for _ in range(2)] == [0, 0]
    assert hashed == [True]
    monkeypatch.setattr(packed_cache, "_boot_id", lambda: "after the next start of the system")
    assert [start(directory).packed for _ in range(2)] == [0, 0]
    assert hashed == [True, True]


def test_a_file_of_another_model_under_its_name_is_not_used(
    directory: str, tmp_path: Path, cache: Path, start: Callable[..., Started]
) -> None:
    expected = start(directory).logits
    path = only(cache)
    path.rename(tmp_path / "kept")
    start(save_model(tmp_path / "other", **SIZES, tie_word_embeddings=False))
    only(cache).rename(path)
    again = start(directory)
    assert again.packed > 0
    assert again.logits.tobytes() == expected.tobytes()


def test_another_layout_or_other_weights_are_another_file_and_the_old_one_goes(
    directory: str, cache: Path, start: Callable[..., Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = start(directory).logits
    first = only(cache)
    monkeypatch.setattr(cpu.Kernels, "weight_layout", cpu.Kernels.weight_layout + 1)
    assert start(directory).packed > 0
    second = only(cache)
    assert second != first
    os.utime(next(Path(directory).glob("*.safetensors")))
    changed = start(directory)
    assert changed.packed > 0
    assert changed.logits.tobytes() == expected.tobytes()
    assert only(cache) not in (first, second)


# ---- writing ----


def full(_path: Any) -> Any:
    return os.statvfs_result((4096, 4096, 1000, 1, 1, 10, 5, 5, 0, 255))


@pytest.mark.parametrize("cause", ["no rename", "little space", "a folder that cannot be made"])
def test_where_nothing_can_be_written_wager_runs_without(
    directory: str,
    cache: Path,
    start: Callable[..., Started],
    monkeypatch: pytest.MonkeyPatch,
    cause: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def rename(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    if cause == "little space":
        monkeypatch.setattr(os, "statvfs", full)
    elif cause == "no rename":
        monkeypatch.setattr(os, "rename", rename)
        monkeypatch.setattr(os, "replace", rename)
    else:
        cache.parent.mkdir()
        cache.write_text("a file")
    first, second = start(directory), start(directory)
    assert first.packed == second.packed > 0
    assert first.logits.tobytes() == second.logits.tobytes()
    assert files(cache) == []
    assert caplog.records == []


START = """
import sys, wager
with wager.LLM(sys.argv[1], drafter="none", max_rows=64) as llm:
    answer = llm.generate([5, 6, 7, 8], wager.SamplingParams(max_tokens=12, ignore_eos=True))
    print(*answer.token_ids, flush=True)
"""
STALL = """
import time
from wager.models import packed_cache
def write(file, facts, weights):
    file.write(bytes(100_000))
    file.flush()
    print("writing", flush=True)
    time.sleep(600)
packed_cache._write = write
"""


@contextmanager
def child(model: str, script: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", script, model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_what_a_process_writes_is_left_alone_while_it_runs_and_removed_when_it_was_killed(
    directory: str, cache: Path, start: Callable[..., Started]
) -> None:
    with child(directory, STALL + START) as writing:
        assert writing.stdout is not None
        assert writing.stdout.readline() == "writing\n"
        [half] = files(cache)
        assert not half.endswith(SUFFIX)
        assert start(directory).packed > 0
        [whole] = {*files(cache)} - {half}
    (cache / whole).unlink()
    assert files(cache) == [half]
    assert start(directory).packed > 0
    assert files(cache) == [whole]
    assert start(directory).packed == 0


@pytest.mark.slow
def test_processes_that_start_together_agree_and_leave_one_file(
    directory: str, cache: Path, start: Callable[..., Started]
) -> None:
    with child(directory, START) as one, child(directory, START) as two:
        answers = [process.communicate(timeout=120)[0] for process in (one, two)]
        assert (one.returncode, two.returncode) == (0, 0)
    assert len(answers[0].split()) == 12
    assert set(answers) == {answers[0]}
    only(cache)
    assert start(directory).packed == 0


# ---- doctor ----


def test_doctor_lists_them(
    directory: str, cache: Path, start: Callable[..., Started], wager: Call, tmp_path: Path
) -> None:
    assert "none: the first start of a model stores them" in wager("doctor").out
    start(directory)
    path = only(cache)
    text = wager("doctor").out
    assert f"{path.name} (" in text
    assert f"{directory}, dtype auto, last used {time.strftime('%Y-', time.gmtime())}" in text
    (cache / f"old{SUFFIX}").write_bytes(b"of an earlier wager")
    assert f"old{SUFFIX} (0 MB): not usable: it does not begin as a file of packed weights" in wager("doctor").out


# ---- the header ----


def test_a_header_that_names_bytes_outside_the_data_is_refused(tmp_path: Path) -> None:
    array = np.arange(5000, dtype=np.uint8)
    path = tmp_path / "x.packed"
    header = packed_cache.write_packed(path, {"a": 1}, {"one": WeightParts({"kind": "x"}, (array, array[:7]))})
    file = PackedFile(path)
    assert file.is_intact() and "one" in file and "two" not in file
    assert [part.tobytes() for part in file["one"].arrays] == [array.tobytes(), array[:7].tobytes()]
    assert (header.facts, header.nbytes, header.offset % (2 << 20)) == ({"a": 1}, 8192 + 4096, 0)
    raw = path.read_bytes()
    values = json.loads(raw[48 : 48 + int.from_bytes(raw[8:16], "little")])
    for parts in ([[8192, 4097]], [[-1, 5]], [[0, -5]]):
        values["weights"][0]["parts"] = parts
        written = json.dumps(values).encode()
        prefix = raw[:8] + len(written).to_bytes(8, "little") + hashlib.sha256(written).digest() + written
        other = tmp_path / "y.packed"
        other.write_bytes(prefix + raw[len(prefix) :])
        with pytest.raises(DamagedFileError, match="bytes that it does not have"):
            PackedFile(other)
