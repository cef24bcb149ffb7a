"""Commands of wager called within the process of the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from wager.cli import main


class Result(NamedTuple):
    code: int
    out: str
    err: str


def refused(result: Result, *words: str, code: int = 2) -> None:
    """Assert a refusal in a sentence that contains the words."""
    said = " ".join(result.err.split())
    assert result.code == code, said
    assert result.out == "" and "Traceback" not in said
    assert [word for word in words if word not in said] == [], said


Call = Callable[..., Result]


@pytest.fixture
def wager(capfd: pytest.CaptureFixture[str]) -> Call:
    def call(*arguments: str, more: str = "") -> Result:
        """`more` are further arguments, separated by blanks."""
        capfd.readouterr()
        code = main([*arguments, *more.split()])
        return Result(code, *capfd.readouterr())

    return call
