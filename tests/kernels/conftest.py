"""The native kernels on every instruction set this machine has, with two threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
from cases import World

from wager.kernels import _native
from wager.kernels.cpu import Kernels
from wager.types import KVDtype

ISAS = ("avx512", "avxvnni", "avx2", "portable")
_kernels: dict[tuple[str, int], object] = {}


def native(isa: str, threads: int = 2) -> object:
    """Kernels of one instruction set, whose threads share every op also on a busy machine; built once, because each has
    threads of its own."""
    if not _native.Isa.has(isa):
        pytest.skip(f"this machine or build has no {isa}")
    if (isa, threads) not in _kernels:
        made = _kernels[isa, threads] = Kernels(isa=isa, threads=threads)
        made.pool = _native.Pool(threads, always_all=True)
    return _kernels[isa, threads]


@pytest.fixture(params=ISAS)
def kernels(request: pytest.FixtureRequest) -> object:
    return native(request.param)


@pytest.fixture(params=[*ISAS, "reference"])
def backend(request: pytest.FixtureRequest) -> object:
    return reference() if request.param == "reference" else native(request.param)


@pytest.fixture(params=ISAS)
def one_thread(request: pytest.FixtureRequest) -> object:
    return native(request.param, threads=1)


@pytest.fixture(params=ISAS)
def threaded(request: pytest.FixtureRequest) -> Callable[[int], object]:
    """Kernels of one instruction set by their number of threads."""
    return lambda threads: native(request.param, threads)


@pytest.fixture(params=get_args(KVDtype))
def kv_dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every World of the test has a cache of this type."""
    monkeypatch.setattr(World, "kv_dtype", request.param)
    return str(request.param)


@pytest.fixture
def oracle() -> object:
    return reference()


def reference() -> object:
    from oracle.kernels import ReferenceKernels

    return ReferenceKernels("bfloat16")
