"""What the engine asks of a target and of its cache: the decoder's on the kernels, or the toys' of `testing`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from wager.kernels.arrays import Array
from wager.types import PackedBatch

BLOCK_SIZE = 16
"""Tokens per block of the cache; prefixes are reused block by block."""

MAX_HEAD_DIM = 512
"""Largest head_dim of the kernels (a multiple of 16), and largest rank of a latent."""


class KVCache(Protocol):
    """Keys and values of all layers in blocks of BLOCK_SIZE tokens. A slot is block * BLOCK_SIZE + offset."""

    num_blocks: int

    def move(self, source: Array, target: Array) -> None:
        """Copy slots source[i] -> target[i] (int32, i ascending) in every layer: an accepted tree path becomes
        contiguous."""

    def read(self, slot: int) -> Array:
        """Keys and values of one slot, [layers, 2, kv_heads, head_dim], for tests; a latent cache has one vector per
        layer, [layers, 1, 1, rank + rope]. float32 where the cache holds int8."""

    def clear(self, block: int) -> None:
        """Zero one block (after values that were not finite)."""


@dataclass(frozen=True)
class TargetOutput:
    """The result of a pass: views into the target's buffers, valid until its next pass."""

    logits: Array  # float32 [L, vocabulary]
    greedy_tokens: Array  # int32 [L]: the greedy token of each logits row, -1 where logits are not finite
    last_hidden: Array | None = None  # float32 [L, hidden]: the residual stream of each logits row before the last norm
    taps: Mapping[int, Array] = field(default_factory=dict)
    """float32 [R, hidden] by layer id: the residual stream after that many layers (0: the embeddings), for those that
    are tapped. These are the numbers that heads are trained with, `hidden_states[i]` of transformers (but behind all
    layers the stream before the last norm)."""
    suppressed: tuple[Array, Array] | None = None
    """The ids of tokens that no text has, int64 [n], and the logits that the model gives them, float32 [L or more, n]:
    those in `logits` are never drawn."""

    def model_logits(self, rows: int | slice) -> Array:
        """float32 [.., vocabulary]: the logits of rows as the model gives them, of suppressed tokens too."""
        found: Array = self.logits[rows]
        if self.suppressed is not None:
            ids, own = self.suppressed
            found = found.copy()
            found[..., ids] = own[: len(self.logits)][rows]
        return found


class Target(Protocol):
    """The model that the engine verifies with: the decoder, or the closed-form target of `testing`."""

    vocab: int
    max_rows: int
    max_sequences: int

    @property
    def cache(self) -> KVCache: ...

    def forward(self, batch: PackedBatch) -> TargetOutput:
        """One ragged pass; writes the rows' keys and values at their slots."""


@runtime_checkable
class TappedTarget(Protocol):
    """A target whose passes can give the residual stream between its layers."""

    def tap(self, layers: Collection[int]) -> None:
        """From now on passes give it after so many layers, and after no other number: TargetOutput.taps."""
