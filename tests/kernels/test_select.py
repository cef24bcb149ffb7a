"""The selection of kernels: what was requested, what is available, and the reason given."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import wager
from wager.errors import UsageError
from wager.kernels import _native
from wager.kernels.arrays import BFLOAT16
from wager.kernels.cpu import _quota, physical_cores, select


def process(program):
    """It, run by a Python of its own."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(wager.__file__).parent.parent)},
    )


def test_threads_that_cannot_be_are_refused():
    with pytest.raises(UsageError, match="threads = 0"):
        select(threads=0)


@pytest.mark.parametrize("sizes", [{"head_dim": 24}, {"head_dim": 528}, {"latent": (40, 16)}, {"latent": (64, 8)}])
def test_sizes_that_the_kernels_lack_are_refused(sizes):
    with pytest.raises(UsageError, match="multiple of 16 up to 512"):
        select(**sizes)


def test_the_best_that_is_built_is_taken(monkeypatch):
    monkeypatch.delenv("WAGER_ISA", raising=False)
    kernels = select(threads=1)
    best = next(isa for isa in ("avx512", "avx2", "portable") if _native.Isa.has(isa))
    assert kernels.name.startswith(f"native {best}") and "best" in kernels.reason
    assert kernels.act == BFLOAT16


def test_environment_forces_an_instruction_set(monkeypatch):
    monkeypatch.setenv("WAGER_ISA", "portable")
    kernels = select(threads=1)
    assert kernels.name == "native portable" and "WAGER_ISA" in kernels.reason
    monkeypatch.setenv("WAGER_ISA", "avx1024")
    with pytest.raises(UsageError, match="avx1024"):
        select()


def test_an_instruction_set_the_machine_lacks_is_refused(monkeypatch):
    class Bare:
        @staticmethod
        def has(name):
            return name == "portable"

    monkeypatch.setattr(_native, "Isa", Bare)
    monkeypatch.setenv("WAGER_ISA", "avx512")
    with pytest.raises(UsageError, match="no avx512"):
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
    run = process(program)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("error: wager's C++ extension cannot be imported: ")
    assert "hint: Install wager again" in run.stderr and "Traceback" not in run.stderr


def test_threads_are_physical_cores(monkeypatch):
    monkeypatch.delenv("WAGER_ISA", raising=False)
    assert physical_cores() >= 1
    assert select().threads == physical_cores()
    assert select(threads=3).threads == 3


def test_a_forked_child_can_compute():
    """Threads do not survive a fork: the child must start its own and not wait for its parent's."""
    program = """
        import os
        import numpy as np
        from wager.kernels.arrays import BFLOAT16, zeros
        from wager.kernels.cpu import Kernels
        kernels = Kernels(threads=3)
        tape = kernels.tape(max_rows=4, max_sequences=1, max_blocks=1, heads=1, kv_heads=1, head_dim=16)
        x, out = np.ones((4, 16), BFLOAT16), zeros(4, 320)
        tape.linear(x, kernels.pack(np.ones((320, 16), np.float32)), out)
        tape.inputs.parents[0], tape.inputs.query_start_loc[1] = -1, 1
        for place in ("parent", "child"):
            out.fill(0)
            tape.run(rows=1, sequences=1, logits_rows=0)
            assert bool((out[0] == 16).all()), place
            if place == "parent" and (child := os.fork()):
                _, status = os.waitpid(child, 0)
                raise SystemExit(os.waitstatus_to_exitcode(status))
    """
    if not hasattr(os, "fork"):
        pytest.skip("no fork on this system")
    run = process(program)
    assert run.returncode == 0, run.stderr


def test_a_containers_quota_bounds_the_threads(tmp_path: Path) -> None:
    limit = tmp_path / "cpu.max"
    limit.write_text("250000 100000\n")
    assert _quota(limit) == 2
    limit.write_text("50000 100000\n")
    assert _quota(limit) == 1
    limit.write_text("max 100000\n")
    assert _quota(limit) == (os.cpu_count() or 1)
    assert _quota(tmp_path / "absent") == (os.cpu_count() or 1)


NEEDED = {
    "avx2": ["avx2", "fma", "f16c"],
    "avxvnni": ["avx2", "fma", "f16c", "avx_vnni"],
    "avx512": ["avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"],
    "portable": [],
}


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="/proc/cpuinfo of x86-64")
def test_the_processors_features_are_those_that_linux_lists() -> None:
    flags = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split())
    found = _native.cpu_features()
    assert found == {name: name in flags for name in found}
    for isa, needed in NEEDED.items():
        assert set(needed) <= found.keys()
        assert _native.Isa.has(isa) == flags.issuperset(needed)
