"""Every file of the corpus is read as dev/fuzz.py reads it: an answer or a WagerError, with little memory."""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import targets

CORPUS = Path(__file__).parent / "corpus"
FILES = sorted(path for path in CORPUS.rglob("*") if path.is_file())
MOST_BYTES = 64 << 20


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    made = targets.scratch()
    targets.models(made)
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_corpus_is_read_or_refused(path: Path, folder: Path) -> None:
    tracemalloc.start()
    try:
        targets.call(path.parent.name, path.read_bytes(), folder)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", targets.TARGETS)
def test_a_target_reads_what_is_good(name: str, folder: Path) -> None:
    """Else it would refuse everything at once, and find nothing."""
    given = [path.read_bytes() for path in FILES if path.parent.name == name]
    seeds = targets.TARGETS[name].seeds(targets.models(folder))
    answered = 0
    for data in [*given, *seeds]:
        assert len(data) <= targets.TARGETS[name].longest
        answered += targets.call(name, data, folder)
    assert answered, f"no file of {name} is read"


def test_every_folder_of_the_corpus_is_a_target() -> None:
    assert {path.parent.name for path in FILES} <= set(targets.TARGETS)
