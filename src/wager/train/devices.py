"""Where a run computes: the device, the precision of its products, threads."""

from __future__ import annotations

import torch

from wager.errors import UsageError


def choose_device(device: str) -> str:
    """`cpu` or `cuda`; `auto` is the latter where there is one. UsageError if it is not there."""
    found = torch.cuda.is_available()
    if device == "cuda" and not found:
        raise UsageError("--device cuda: torch finds no CUDA device.", "Take --device cpu.")
    return device if device != "auto" else "cuda" if found else "cpu"


def choose_precision(precision: str, device: str) -> str:
    """`bfloat16` or `float32`; `auto` is the former where the device multiplies it."""
    if precision != "auto":
        return precision
    fast = device == "cuda" or torch.cpu.get_capabilities().get("avx512_bf16", False)
    return "bfloat16" if fast else "float32"


def use_threads(threads: int | None) -> None:
    """Threads of products on a CPU; None: all cores."""
    if threads is not None:
        torch.set_num_threads(threads)
