"""Origins that `--cors` takes: those that browsers send, since no other would ever match."""

from __future__ import annotations

import pytest

from in_process import Call
from in_process import wager as command  # noqa: F401
from wager.serve.limits import ServeOptions


@pytest.mark.parametrize("origin", ["*", "null", "https://a.example", "http://[::1]:3000", "tauri://localhost"])
def test_origins_of_pages_are_taken(origin: str) -> None:
    assert ServeOptions("m", cors=(origin,)).cors == (origin,)


@pytest.mark.parametrize("origin", ["a.example", "https://a.example/", "https://", "HTTPS://a.example", "https:// a"])
def test_others_are_refused_before_a_model_is_loaded(command: Call, origin: str) -> None:  # noqa: F811
    ended = command("serve", "--cors", origin, "--port", "0", "--model", "nope")
    assert ended.code == 2 and f"{origin!r} is not an origin" in ended.err
