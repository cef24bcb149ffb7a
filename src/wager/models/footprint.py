"""The memory of a decoder in bytes, computed from its spec before anything is allocated.

Counts the buffers of transformer.py, with the element sizes of each set of kernels.
"""

from __future__ import annotations

from wager.arch.layers import Experts, Mla
from wager.arch.spec import ModelSpec
from wager.kernels.base import BLOCK_SIZE, Kernels
from wager.models.matrices import Matrices
from wager.types import KVDtype


def weight_bytes(matrices: Matrices, kernels: Kernels) -> int:
    """Bytes of the packed matrices, each in its form, and of the vectors and routers in float32. A tied embedding is
    the head."""
    spec = matrices.spec
    packed = sum(kernels.matrix_bytes(*shape, known) for shape, known in matrices.packed())
    return packed + 4 * (spec.vector_elements + spec.elements()["router"])


def block_bytes(spec: ModelSpec, kernels: Kernels, kv_dtype: KVDtype = "bf16") -> int:
    """Bytes of one cache block: BLOCK_SIZE positions, keys and values or latents of all layers."""
    width = spec.attention.cache_width
    if kv_dtype == "q8":  # and a float32 scale for each key and each value of a head
        return spec.num_layers * BLOCK_SIZE * (width + 4 * width // spec.attention.head_dim)
    return spec.num_layers * BLOCK_SIZE * width * kernels.act.itemsize


def workspace_bytes(
    spec: ModelSpec,
    kernels: Kernels,
    *,
    max_rows: int,
    max_sequences: int,
    max_blocks: int,
    max_logits_rows: int | None = None,
) -> int:
    """Bytes of the buffers of a pass: activations, logits, integer inputs and the rotation table."""
    logits_rows = max_rows if max_logits_rows is None else max_logits_rows
    attention, act = spec.attention, kernels.act.itemsize
    row = 4 * spec.hidden + act * (spec.hidden + attention.heads * attention.head_dim + attention.output_width)
    row += act * spec.dense.width if spec.dense else 0
    row += _latent_row(attention, act) if isinstance(attention, Mla) else 4 * attention.qkv_width
    row += _expert_row(spec.hidden, spec.experts, act) if spec.experts else 0
    logits_row = 4 * (spec.hidden + spec.vocab + 1) + act * spec.hidden
    integers = 4 * (6 * max_rows + max_sequences * (2 + max_blocks))
    integers += 4 * (2 * spec.experts.count + 2) if spec.experts else 0
    table = 4 * max_blocks * BLOCK_SIZE * attention.rope_dim
    return max_rows * row + logits_rows * logits_row + integers + table


def _latent_row(attention: Mla, act: int) -> int:
    """Bytes per row between the projections of latent attention."""
    q_rank = attention.q_rank or 0
    floats = attention.query_width + attention.head_dim + q_rank
    return 4 * floats + act * (q_rank + attention.heads * (attention.nope + attention.kv_rank))


def _expert_row(hidden: int, experts: Experts, act: int) -> int:
    """Bytes per row of kernels.base.Routing and of the shared experts' inner layer."""
    choice = 4 + 4 + 4 + act * (hidden + experts.width)
    return 4 * experts.count + experts.active * choice + act * experts.shared_inner
