"""What a decoder will take in bytes, computed from its spec before anything is allocated.

Knows the buffers of transformer.py and what each set of kernels stores per element. Knows no tensors.
"""

from __future__ import annotations

from wager.arch.spec import Experts, Latent, ModelSpec
from wager.kernels.base import BLOCK_SIZE, Kernels


def weight_bytes(spec: ModelSpec, kernels: Kernels) -> int:
    """Bytes of the packed matrices, the embedding table and the vectors.

    The embedding is kept as rows beside the packed head, also when both are one matrix on disk: one is read by row,
    the other by panel.
    """
    packed: int = getattr(kernels, "packed_itemsize", kernels.act.itemsize)
    return spec.matrix_elements * packed + spec.head_elements * kernels.act.itemsize + spec.vector_elements * 4


def block_bytes(spec: ModelSpec, kernels: Kernels) -> int:
    """Bytes of one cache page (PAGE positions, keys and values, or latents, of all layers)."""
    return spec.kv_elements * BLOCK_SIZE * kernels.act.itemsize


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
    heads = max_rows if max_logits_rows is None else max_logits_rows
    act = kernels.act.itemsize
    row = 4 * spec.hidden + act * (spec.hidden + spec.heads * spec.head_dim + spec.mixed)
    row += act * spec.width if spec.expert_layers < spec.layers else 0
    row += _latent_row(spec, spec.latent, act) if spec.latent else 4 * spec.qkv
    row += _expert_row(spec, spec.experts, act) if spec.experts else 0
    head = 4 * (spec.hidden + spec.vocab + 1) + act * spec.hidden
    integers = 4 * (6 * max_rows + max_sequences * (2 + max_blocks))
    integers += 4 * (2 * spec.experts.count + 2) if spec.experts else 0
    return max_rows * row + heads * head + integers + 4 * max_blocks * BLOCK_SIZE * spec.rope_dim


def _latent_row(spec: ModelSpec, latent: Latent, act: int) -> int:
    """Bytes per row between the projections of latent attention."""
    floats = spec.queries + spec.head_dim + latent.q_rank
    return 4 * floats + act * (latent.q_rank + spec.heads * (latent.nope + latent.rank))


def _expert_row(spec: ModelSpec, how: Experts, act: int) -> int:
    """Bytes per row of kernels.base.Routing and of the shared expert's inner layer."""
    choice = 4 + 4 + 4 + act * (spec.hidden + how.width)
    return 4 * how.count + how.chosen * choice + act * how.shared
