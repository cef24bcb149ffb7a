"""The selection of kernels: what was requested, what is available, and the reason given."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

import pytest
from test_pool import run_process

from wager.errors import UsageError
from wager.kernels import _native
from wager.kernels.arrays import BFLOAT16
from wager.kernels.cpu import ISAS, Kernels, _quota, physical_cores, select


def test_what_the_kernels_lack_is_refused(monkeypatch):
    with pytest.raises(UsageError, match="threads = 0"):
        select(threads=0)
    for sizes in ({"head_dim": 24}, {"head_dim": 528}, {"latent": (40, 16)}, {"latent": (64, 8)}):
        with pytest.raises(UsageError, match="multiple of 16 up to 512"):
            select(**sizes)

    class Bare:
        @staticmethod
        def has(name):
            return name == "portable"

    monkeypatch.setattr(_native, "Isa", Bare)
    monkeypatch.setenv("WAGER_ISA", "avx512")
    with pytest.raises(UsageError, match="no avx512"):
        select()


def test_the_best_that_is_built_is_taken_with_a_thread_a_core(monkeypatch):
    monkeypatch.delenv("WAGER_ISA", raising=False)
    kernels = select(threads=3)
    best = next(isa for isa in ISAS if _native.Isa.has(isa))
    assert kernels.name == Kernels(isa=best).name and "best" in kernels.reason
    assert kernels.act == BFLOAT16 and kernels.threads == 3
    assert select().threads == physical_cores() >= 1


def test_environment_forces_an_instruction_set(monkeypatch):
    monkeypatch.setenv("WAGER_ISA", "portable")
    kernels = select(threads=1)
    assert kernels.name == "native portable" and "WAGER_ISA" in kernels.reason
    monkeypatch.setenv("WAGER_ISA", "avx1024")
    with pytest.raises(UsageError, match="avx1024"):
        select()


@pytest.mark.parametrize("verb", [["doctor"], ["run", "--model", "random:llama:tiny", "a"]])
def test_without_the_extension_every_verb_says_what_to_do(verb):
    """Nothing slower is taken in its place."""
    program = f"""
        import sys
        sys.modules["wager.kernels._native"] = None  # importing it fails
        from wager.cli import main
        sys.exit(main({verb}))
    """
    run = run_process(program, code=1)
    assert run.stdout == ""
    assert run.stderr.startswith("error: wager's C++ extension cannot be imported: ")
    assert "hint: Install wager again" in run.stderr and "Traceback" not in run.stderr


def test_a_containers_quota_bounds_the_threads(tmp_path: Path) -> None:
    limit = tmp_path / "cpu.max"
    for text, most in (("250000 100000", 2), ("50000 100000", 1), ("max 100000", os.cpu_count() or 1)):
        limit.write_text(text + "\n")
        assert _quota(limit) == most
    assert _quota(tmp_path / "absent") == (os.cpu_count() or 1)


NEEDED = {
    "avx2": ["avx2", "fma", "f16c"],
    "avxvnni": ["avx2", "fma", "f16c", "avx_vnni"],
    "avx512": ["avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"],
    "neon": ["asimddp"],
    "i8mm": ["asimddp", "i8mm", "bf16"],
    "portable": [],
}


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="/proc/cpuinfo of x86-64")
def test_the_processors_features_are_those_that_linux_lists() -> None:
    flags = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split())
    assert NEEDED.keys() == set(ISAS)
    found = _native.cpu_features()
    assert found == {name: name in flags for name in found}
    for isa, needed in NEEDED.items():
        assert set(needed) <= found.keys()
        assert _native.Isa.has(isa) == flags.issuperset(needed)
