"""The kernels: an instruction set, a pool of threads, and what is made with them. All arithmetic is in csrc/.

`select` returns those for this machine.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wager.arch.layers import StateShape
from wager.errors import ModelError, UsageError
from wager.inputs import check_threads
from wager.kernels import _native
from wager.kernels.arrays import BFLOAT16, FLOAT32, Array, address
from wager.kernels.base import MAX_HEAD_DIM
from wager.kernels.cpu_cache import CpuCache, CpuLatents
from wager.kernels.cpu_states import CpuStates
from wager.kernels.inputs import Inputs
from wager.kernels.packed import LAYOUT_VERSION, Packer
from wager.kernels.tape import NOISE_KEY, Tape
from wager.types import GREEDY_TEMPERATURE, KVDtype

ISAS = ("avx512", "avxvnni", "avx2", "i8mm", "neon", "portable")
"""Instruction sets, best first: AVX-512 with BF16 and VNNI, AVX2 with FMA (and AVX-VNNI); ARM's NEON with I8MM and
BF16, or with dot products; whatever the compiler targets. All give the same bits: docs/arithmetic.md."""

ARITHMETIC_VERSION = 1
"""Of the definition in docs/arithmetic.md, by which every instruction set computes. Other bits raise it; receipts name
it."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One token to sample: argmax(z / temperature + g) over a row of logits, greedy at temperature <= 1e-4.

    g is the noise of (seed, position, choice), see kernels/noise.py: `seed` unsigned 64 bits, `position` the absolute
    position of the token, `choice` the index of the sequence among the n of its request.
    """

    row: int
    temperature: float
    seed: int
    position: int
    choice: int = 0


class Kernels(Packer):
    """An instruction set and a pool of threads: packs weights, allocates caches, records tapes and samples.

    Weights, activations and cache are bfloat16 or quantised, sums float32; one reduction order per row.
    """

    act = BFLOAT16
    weight_layout: int | None = LAYOUT_VERSION

    def __init__(self, *, isa: str | None = None, threads: int = 1, reason: str = "it was requested") -> None:
        """`isa` one of ISAS, or None for the best this machine has; UsageError if it is unknown or missing here."""
        if isa is None:
            isa = next(name for name in ISAS if _native.Isa.has(name))
        if isa not in ISAS:
            raise UsageError(f"Instruction set {isa!r} is not known.", f"Choose one of: {', '.join(ISAS)}.")
        if not _native.Isa.has(isa):
            raise UsageError(f"This machine (or this build) has no {isa}.", "Unset WAGER_ISA to let wager choose.")
        check_threads(threads)
        self.isa = _native.Isa(isa)
        self.pool = _native.Pool(threads)
        self.name = f"native {self.isa.name}"
        self.reason = reason

    @property
    def threads(self) -> int:
        return int(self.pool.threads)

    @property
    def arithmetic(self) -> str:
        """What results depend on besides the inputs: kernels of one arithmetic give the same bits."""
        return str(ARITHMETIC_VERSION)

    def latent_cache(self, *, layers: int, num_blocks: int, rank: int, rope: int) -> CpuLatents:
        """A cache of one vector of rank + rope per position and layer, for `Tape.latent`."""
        return CpuLatents(self.pool, layers=layers, num_blocks=num_blocks, rank=rank, rope=rope)

    def cache(
        self, *, layers: int, num_blocks: int, kv_heads: int, head_dim: int, kv_dtype: KVDtype = "bf16"
    ) -> CpuCache:
        """A cache of keys and values in `act`, or (q8) each as whole numbers of -127 to 127 times a float32 scale of
        its own: x / s rounded to nearest even, s the largest |x| / 127. Below 1e-30 all are zero; where some x is not
        finite the scale is NaN, and so is what attends to it."""
        shape = {"layers": layers, "num_blocks": num_blocks, "kv_heads": kv_heads, "head_dim": head_dim}
        return CpuCache(self.pool, **shape, kv_dtype=kv_dtype)

    def states(self, shape: StateShape, *, layers: int, slots: int, max_rows: int) -> CpuStates:
        """The states of that number of recurrent layers."""
        return CpuStates(shape, layers=layers, slots=slots, max_rows=max_rows)

    def tape(self, *, max_rows: int, max_sequences: int, max_blocks: int, whole_spans: bool = False) -> Tape:
        """whole_spans: a row also attends to the rows of its span behind it."""
        inputs = Inputs.allocate(max_rows=max_rows, max_sequences=max_sequences, max_blocks=max_blocks)
        return Tape(self.pool, self.isa, inputs, whole_spans=whole_spans)

    def sample(self, logits: Array, requests: Sequence[SampleRequest]) -> list[int]:
        """The token of each request, -1 where its row has a logit that is not finite; `logits` float32 [L, vocab]."""
        count, vocab = logits.shape
        if logits.dtype != FLOAT32 or not logits.flags.c_contiguous:
            raise ModelError(f"logits are {logits.dtype} {tuple(logits.shape)}; they must be contiguous float32.")
        if not all(0 <= request.row < count for request in requests):
            raise ModelError(f"sample got a row outside the {count} rows of logits.")
        rows = np.array([request.row for request in requests], np.int32)
        keys = np.array([(each.temperature, each.seed, each.position, each.choice) for each in requests], NOISE_KEY)
        out = np.empty(len(requests), np.int32)
        memory = (address(logits), vocab, address(rows), address(keys), len(requests))
        _native.sample(self.pool, self.isa, *memory, GREEDY_TEMPERATURE, address(out))
        tokens: list[int] = out.tolist()
        return tokens


def select(
    *, threads: int | None = None, head_dim: int | None = None, latent: tuple[int, int] | None = None
) -> Kernels:
    """Kernels of the best instruction set that this machine has, or of the one that the environment variable WAGER_ISA
    (one of ISAS) names. `threads` None: one per physical core this process has.

    `head_dim` is the model's, or `latent` the rank and rotated part of its latent attention, if known: UsageError if
    the kernels do not support that size, or if the instruction set is unknown or missing here.
    """
    sizes = {"head_dim": head_dim}
    if latent is not None:
        sizes = {"latent's rank": latent[0], "latent's rotated part": latent[1]}
    for name, size in sizes.items():
        if size is not None and (size % 16 or size > MAX_HEAD_DIM):
            raise UsageError(
                f"A {name} of {size} is not supported: the kernels need a multiple of 16 up to {MAX_HEAD_DIM}.",
                "`wager plan` knows such a model; the engine cannot run it.",
            )
    forced = os.environ.get("WAGER_ISA")
    reason = "this is the best instruction set the machine has" if forced is None else f"WAGER_ISA is {forced}"
    return Kernels(isa=forced, threads=physical_cores() if threads is None else threads, reason=reason)


def machine() -> str:
    """The processor's name and how many of its cores this process may use: the key of speed measurements."""
    try:
        cpu = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.MULTILINE)
    except OSError:
        cpu = None
    cores = physical_cores()
    return f"{cpu[1].strip() if cpu else platform.machine()}, {cores} core{'s' * (cores > 1)}"


def physical_cores() -> int:
    """Physical cores this process may use: hyper-threads of a core count once; at most a container's CPU quota."""
    processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores: set[str] = set()
    for processor in processors:
        siblings = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(processor))
    return max(1, min(len(cores), _quota()))


def _quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """The control group's CPU quota in processors, rounded down; all processors without one."""
    try:
        granted, period = path.read_text().split()
        return max(1, int(granted) // int(period))
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return os.cpu_count() or 1
