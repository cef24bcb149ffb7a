"""What wager reads from files, a function of bytes for each kind: it returns, or raises WagerError, and nothing else.

`dev/fuzz.py` searches for bytes that do otherwise; `corpus/` keeps what it found and good files to begin from, and
test_corpus.py reads all of them. A target gets the bytes of one file and a folder of its own.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import fuzz_models
import numpy as np
from mutators import mutate_gguf, mutate_json, mutate_safetensors
from safetensors.numpy import save_file

from wager.arch.families import FAMILIES
from wager.arch.hf_config import read_config
from wager.arch.spec import ModelSpec
from wager.cli.measuring import read_key
from wager.cli.prove import OtherMachine
from wager.config import read_options
from wager.draft import store_file
from wager.draft.lookup import LookupSources, lookup_table
from wager.economics.calibration import QUICK_FOLDER, Calibration, Setup, read_quick
from wager.errors import UsageError, WagerError
from wager.kernels.cpu import select
from wager.models import packed_cache
from wager.models.head_block import open_block
from wager.models.head_eagle import open_eagle
from wager.models.head_files import HeadFiles
from wager.models.head_medusa import open_medusa
from wager.models.head_mtp import open_mtp
from wager.models.integrity import VerifiedFiles
from wager.models.tokenizer import Tokenizer
from wager.models.weights import open_weights, tensor_shapes
from wager.planner.acceptance import parse_acceptances
from wager.planner.inputs import find_hardware, find_plan_model, read_popularity
from wager.prompts import read_arrivals, read_prompts
from wager.receipts import read_receipts
from wager.simulation.traces import RecordedTraces
from wager.train.answers import read_answers, read_made_up
from wager.types import DraftRequest, SamplingParams

Read = Callable[[bytes, Path], None]
Mutate = Callable[[bytes, random.Random], bytes]

SETUP = Setup("machine", "model", "shape", "kernels", 1, "bfloat16")
FACTS = {"model": "m", "dtype": "auto"}
_VOCAB, _DIGEST = 288, "d" * 64
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Target:
    """`read` takes the file's bytes. `seeds` are good files beside those of the corpus, `mutate` changes what plain
    mutations of bytes rarely reach; `longest` is in bytes."""

    read: Read
    seeds: Callable[[Mapping[str, Path]], list[bytes]] = lambda models: []
    mutate: Mutate | None = None
    longest: int = 1 << 14


def scratch() -> Path:
    """A new folder; in memory where the system has one there."""
    shared = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="wager-fuzz-", dir=shared if shared.is_dir() else None))


def _file(data: bytes, folder: Path, name: str) -> Path:
    """A file whose path was never used before: readers may keep what they read by path, size and time."""
    path = folder / str(next(_numbers)) / name
    path.parent.mkdir()
    path.write_bytes(data)
    return path


@functools.cache
def models(folder: Path) -> Mapping[str, Path]:
    """The small models, built once in a folder."""
    return fuzz_models.build(folder / "bases")


def _model(folder: Path, name: str, *, without: tuple[str, ...] = ()) -> Path:
    """A copy of a small model's directory, of links."""
    path = folder / str(next(_numbers))
    path.mkdir()
    for file in models(folder)[name].iterdir():
        if file.name not in without:
            (path / file.name).symlink_to(file)
    return path


def _attempt(*reads: Callable[[], object]) -> None:
    """Every one of several readers of one file, of which most must refuse it. WagerError if all do."""
    refused: list[WagerError] = []
    for read in reads:
        try:
            read()
        except WagerError as error:
            refused.append(error)
    if len(refused) == len(reads):
        raise refused[0]


# ---- models ----------------------------------------------------------------------------------------------------------


def gguf(data: bytes, folder: Path) -> None:
    path = _file(data, folder, "model.gguf")
    _attempt(lambda: _read_weights(path), lambda: find_plan_model(str(path)), lambda: _encode(path))


def safetensors(data: bytes, folder: Path) -> None:
    """The first byte is the family."""
    names = tuple(fuzz_models.CONFIGS)
    path = _model(folder, names[data[0] % len(names)] if data else names[0], without=("model.safetensors",))
    (path / "model.safetensors").write_bytes(data[1:])
    _read_weights(path)


def index(data: bytes, folder: Path) -> None:
    path = _model(folder, "llama")
    (path / "model.safetensors.index.json").write_bytes(data)
    _read_weights(path)


def config(data: bytes, folder: Path) -> None:
    path = _model(folder, "llama", without=("config.json",))
    (path / "config.json").write_bytes(data)
    _attempt(lambda: open_weights(path), lambda: find_plan_model(str(path)), lambda: Tokenizer.load(path))


def _read_weights(path: Path) -> None:
    weights = open_weights(path)
    for name in tensor_shapes(weights.spec):
        weights.read(name)


def tokenizer(data: bytes, folder: Path) -> None:
    path = _model(folder, "llama", without=("tokenizer.json",))
    (path / "tokenizer.json").write_bytes(data)
    _encode(path)


def _encode(path: Path) -> None:
    loaded = Tokenizer.load(path)
    loaded.decode(loaded.encode(fuzz_models.PROMPT))
    loaded.decode(range(min(loaded.vocab_size, 300)), special=True)


def tokenizer_config(data: bytes, folder: Path) -> None:
    """The same bytes in both files beside tokenizer.json, and as chat_template.json."""
    for name in ("tokenizer_config.json", "generation_config.json", "chat_template.json", "chat_template.jinja"):
        path = _model(folder, "llama", without=(name,))
        (path / name).write_bytes(data)
        _attempt(lambda path=path: Tokenizer.load(path))  # type: ignore[misc]


def head(data: bytes, folder: Path) -> None:
    """config.json of a head that drafts from the target's states, of every kind, beside the weights of Medusa heads."""
    path = _file(data, folder, "config.json").parent
    weights = models(folder)["llama"].parent / "medusa.safetensors"
    if not weights.exists():
        shapes = {f"blocks.{i}.layers.0.weight": (64, 64) for i in range(3)} | {
            f"lm_heads.{i}.weight": (_VOCAB, 64) for i in range(3)
        }
        save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, weights)
    (path / "model.safetensors").symlink_to(weights)
    files, target = HeadFiles(path), _target()
    _attempt(
        lambda: open_eagle(files, target, dtype="bf16"),
        lambda: open_block(files, target, dtype="bf16"),
        lambda: open_medusa(files, target, dtype="bf16"),
        lambda: open_mtp(files, target, dtype="bf16", inside=False),
        lambda: open_mtp(files, target, dtype="bf16", inside=True),
    )


def _target() -> ModelSpec:
    return read_config({**fuzz_models.SIZES, **fuzz_models.CONFIGS["llama"], "vocab_size": _VOCAB}, runnable=True)


# ---- files that wager writes -----------------------------------------------------------------------------------------


def store(data: bytes, folder: Path) -> None:
    """A store; or where the first byte is odd a header up to a zero byte and slots, to which digests are added."""
    written = data[1:]
    if data and data[0] & 1:
        text, _, slots = written.partition(b"\0")
        written = _with_digests(store_file.MAGIC, text, slots[: len(slots) // 8 * 8])
    path = _file(written, folder, "a.store")
    opened = store_file.StoreFile(path, vocab=_VOCAB, tokenizer=_DIGEST)
    table = lookup_table("store", LookupSources(store=opened))
    for text in ([1, 2, 3, 4, 5, 6], [7], [_VOCAB - 1] * 9):
        size, found = opened.continuations(text)
        if not 0 <= size <= store_file.LONGEST or any(not 0 <= each.token < 1 << 20 for each in found):
            raise AssertionError(f"{size} {found}")
        name = f"s{next(_numbers)}"
        table.begin(name, text, ())
        table.propose([DraftRequest(name, len(text), 4, SamplingParams(), 0)])
        table.end(name)


def _with_digests(magic: bytes, text: bytes, rest: bytes) -> bytes:
    """A file of a JSON header that is given the digest of what follows it."""
    text = text.replace(b"SHA256", hashlib.sha256(rest).hexdigest().encode())
    return magic + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text + rest


def packed(data: bytes, folder: Path) -> None:
    """Packed weights; or where the first byte is odd a header up to a zero byte, to which its own digest is added, and
    spaces so that the data begin at byte 4096."""
    written = data[1:]
    if data and data[0] & 1:
        text, _, rest = written.partition(b"\0")
        text += b" " * (4096 - 48 - len(text))
        written = _with_digests(packed_cache.MAGIC, text, rest)
    path = _file(written, folder, "m" + packed_cache.SUFFIX)
    kept = packed_cache.PackedStore(select(threads=1), path, FACTS)
    used = [kept.get(name, lambda: None) for name in ("a", "b")]
    if not any(used):
        raise UsageError("nothing of it is used")


def calibration(data: bytes, folder: Path) -> None:
    path = _file(data, folder, "c.json")
    (path.parent / QUICK_FOLDER).mkdir()
    (path.parent / QUICK_FOLDER / SETUP.filename).write_bytes(data)
    _attempt(lambda: Calibration.read(path), lambda: read_quick(path.parent, SETUP))
    verified = VerifiedFiles(path)
    verified.paths()


# ---- files that users write ------------------------------------------------------------------------------------------


def plan_inputs(data: bytes, folder: Path) -> None:
    """What `wager plan` reads: a device, acceptance, popularity, a model's shape."""
    path = _file(data, folder, "p.json")
    _attempt(
        lambda: find_hardware(str(path)),
        lambda: parse_acceptances(str(path)),
        lambda: read_popularity(path),
        lambda: find_plan_model(str(path)),
    )


def results(data: bytes, folder: Path) -> None:
    """What commands check: results of `wager prove`, receipts."""
    path = _file(data, folder, "r.json")
    _attempt(
        lambda: OtherMachine.read(path),
        lambda: [list(receipt.problems_of_parts()) for receipt in read_receipts(path)],
    )


def traces(data: bytes, folder: Path) -> None:
    path = _file(data, folder, "t.jsonl")
    _attempt(lambda: RecordedTraces.read(path), lambda: read_arrivals(path))


def prompts(data: bytes, folder: Path) -> None:
    path = _file(data, folder, "p.jsonl")
    _attempt(
        lambda: read_prompts(path),
        lambda: read_prompts(path, timed=True),
        lambda: read_arrivals(path),
        lambda: list(read_answers(path, target="t")),
        lambda: read_key(path),
        lambda: read_made_up(path),
    )


def options(data: bytes, folder: Path) -> None:
    read_options(_file(data, folder, "wager.toml"))


# ---- the table -------------------------------------------------------------------------------------------------------


def _json_mutator(file: str) -> Mutate:
    def mutate(data: bytes, rng: random.Random) -> bytes:
        return mutate_json(data.decode(), file, rng)[0].encode("utf-8", "surrogatepass")

    return mutate


def _files_of(name: str) -> Callable[[Mapping[str, Path]], list[bytes]]:
    return lambda models: [(models[family] / name).read_bytes() for family in fuzz_models.CONFIGS]


def _shapes(models: Mapping[str, Path]) -> list[bytes]:
    every = [json.dumps({**fuzz_models.SHAPE, "model_type": family}).encode() for family in FAMILIES]
    return [*_files_of("config.json")(models), *every]


def _safetensors_seeds(models: Mapping[str, Path]) -> list[bytes]:
    return [bytes([i]) + data for i, data in enumerate(_files_of("model.safetensors")(models))]


def _mutate_parts(data: bytes, rng: random.Random) -> bytes:
    """Of `store` and `packed`: the header changed, with its digest."""
    text, zero, rest = data[1:].partition(b"\0")
    return b"\1" + _any_json(text, rng) + zero + rest


_any_json = _json_mutator("")

TARGETS: Mapping[str, Target] = {
    "gguf": Target(
        gguf,
        lambda models: [models[name].read_bytes() for name in ("gguf", "gguf-sentencepiece")],
        lambda data, rng: mutate_gguf(data, rng)[0],
        longest=1 << 18,
    ),
    "safetensors": Target(
        safetensors,
        _safetensors_seeds,
        lambda data, rng: data[:1] + mutate_safetensors(data[1:], rng)[0],
        longest=1 << 20,
    ),
    "index": Target(index, mutate=_any_json),
    "config": Target(config, _shapes, _json_mutator("config.json")),
    "tokenizer": Target(tokenizer, _files_of("tokenizer.json"), _json_mutator("tokenizer.json"), longest=1 << 16),
    "tokenizer_config": Target(
        tokenizer_config, _files_of("tokenizer_config.json"), _json_mutator("tokenizer_config.json")
    ),
    "head": Target(head, mutate=_any_json),
    "store": Target(store, mutate=_mutate_parts),
    "packed": Target(packed, mutate=_mutate_parts),
    "calibration": Target(calibration, mutate=_any_json),
    "plan_inputs": Target(plan_inputs, _shapes, _any_json),
    "results": Target(results, mutate=_any_json),
    "traces": Target(traces, mutate=_any_json),
    "prompts": Target(prompts, mutate=_any_json),
    "options": Target(options),
}
"""By the name of their folder in the corpus."""


def call(name: str, data: bytes, folder: Path) -> bool:
    """Whether one input was read; False if a WagerError refused it. Everything else that is raised is a fault. What the
    target wrote is removed."""
    before = set(folder.iterdir())
    try:
        TARGETS[name].read(data, folder)
        return True
    except WagerError:
        return False
    finally:
        for path in set(folder.iterdir()) - before:
            if path.name != "bases":
                shutil.rmtree(path)
