"""A server of a small random model and the official client for it, shared by the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from serve.serving import Running, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made
