"""One thread for torch's own ops, for as long as a block runs.

Small ops lose more to a parallel region than they win, by far so on a machine that is busy with other work; and a sum
that never runs in parallel cannot depend on the number of cores. The native kernels have their own threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's ops in the calling thread alone; the number of threads is restored afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
