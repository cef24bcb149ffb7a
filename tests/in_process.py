"""Commands of wager called within the process of the tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from wager.cli import main


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


Call = Callable[..., Result]


@pytest.fixture
def wager(capfd: pytest.CaptureFixture[str]) -> Call:
    def call(*arguments: str, more: str = "") -> Result:
        """`more` are further arguments, separated by blanks."""
        capfd.readouterr()
        code = main([*arguments, *more.split()])
        return Result(code, *capfd.readouterr())

    return call
