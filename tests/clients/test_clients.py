"""The clients that people have, each in an environment of its own. They are fetched from the package index, so these
tests run only where WAGER_TEST_CLIENTS names a folder for them: `WAGER_TEST_CLIENTS=/tmp/clients pytest -m slow
tests/clients`. The table of docs/clients.md is written from what ran.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.environments import MODEL, PAGE, RESULTS, SCRIPTS, page_with, run
from serve.serving import RealServer, server_process

FOLDER = os.environ.get("WAGER_TEST_CLIENTS", "")


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with server_process("--model", MODEL) as started:
        yield started


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.skipif(not FOLDER, reason="WAGER_TEST_CLIENTS names no folder for the clients' environments")
@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_a_client(server: RealServer, script: Path) -> None:
    if script.suffix == ".mjs" and not shutil.which("npm"):
        pytest.skip("npm is not installed")
    found = run(script, server.url, Path(FOLDER).absolute())
    assert [f"{name}: {told}" for name, told in found.items() if told.startswith("no")] == []


def test_the_page_has_what_ran() -> None:
    assert page_with(json.loads(RESULTS.read_text(encoding="utf-8"))) == PAGE.read_text(encoding="utf-8")
