"""How many threads torch's own ops use: one.

Small ops lose more to a parallel region than they gain, most of all on a busy machine; and a sum that never runs in
parallel cannot depend on the number of cores. The native kernels have threads of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def limit_torch_threads() -> None:
    """Let torch's ops run in the calling thread alone, for the rest of the process.

    Called before a model is loaded: torch's idle workers would spin on the cores that the native kernels use.
    """
    torch.set_num_threads(1)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's ops in the calling thread alone; the number of threads is restored afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
