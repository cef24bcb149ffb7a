"""A server of a small random model and the official client for it, or a browser and a server process, shared by the
tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from serve.browsing import HOSTILE, chromium
from serve.real_server import TINY, RealServer, server_process
from serve.serving import Running, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as made:
        yield made


@pytest.fixture(scope="module")
def tiny(browser: Any) -> Iterator[RealServer]:
    """A small random model, under a hostile name; only if there is a browser."""
    with server_process(*TINY, "--drafter", "ngram", "--served-name", HOSTILE) as started:
        yield started
