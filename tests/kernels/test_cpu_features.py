"""What the native kernels know of the processor, against what Linux lists."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

import pytest

from wager.kernels import _native

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
