"""The kernels of every instruction set this machine has, with two threads. The default run takes the best of them;
`pytest -m slow` the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
from cases import World

from oracle.kernels import ReferenceKernels
from wager.kernels import _native
from wager.kernels.cpu import ISAS, Kernels
from wager.types import KVDtype

HERE = [isa for isa in ISAS if _native.Isa.has(isa)]
PARAMS = [HERE[0], *(pytest.param(isa, marks=pytest.mark.slow) for isa in HERE[1:])]
_kernels: dict[tuple[str, int], Kernels] = {}


def native(isa: str, threads: int = 2) -> Kernels:
    """Kernels of one instruction set, whose threads share every op also on a busy machine; built once, because each has
    threads of its own."""
    if (isa, threads) not in _kernels:
        made = _kernels[isa, threads] = Kernels(isa=isa, threads=threads)
        made.pool = _native.Pool(threads, always_all=True)
    return _kernels[isa, threads]


@pytest.fixture(params=PARAMS)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def kernels(isa: str) -> Kernels:
    return native(isa)


@pytest.fixture
def threaded(isa: str) -> Callable[[int], Kernels]:
    """Kernels of one instruction set by their number of threads."""
    return lambda threads: native(isa, threads)


@pytest.fixture(params=get_args(KVDtype))
def kv_dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every World of the test has a cache of this type."""
    monkeypatch.setattr(World, "kv_dtype", request.param)
    return str(request.param)


@pytest.fixture
def oracle() -> ReferenceKernels:
    return ReferenceKernels()
