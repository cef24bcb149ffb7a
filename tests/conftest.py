"""The real model that some tests use, and commands called within the process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from in_process import wager  # noqa: F401 (a fixture)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as GGUF: in WAGER_TEST_MODEL, else in wager's own model cache; else skipped, saying so."""
    from wager.models import hub

    given = os.environ.get("WAGER_TEST_MODEL")
    found = Path(given) if given else hub.find("SmolLM2-135M-Instruct")
    if found is None or not found.is_file():
        pytest.skip("the SmolLM2 GGUF is not here: set WAGER_TEST_MODEL or run `wager pull`")
    return found
