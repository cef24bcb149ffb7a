"""The one decoder: a tape of kernel ops recorded from a ModelSpec, and a pass that replays it.

Every difference between families is a value of the spec; nothing here asks which family it is. Knows kernels only
through kernels/base.py and weights only by name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wager.errors import UsageError
from wager.kernels.base import PAGE, Kernels, Output, Tape
from wager.kernels.threads import one_thread
from wager.models import memory
from wager.models.weights import Weights
from wager.types import Batch


class Decoder:
    """A target: packs the weights, allocates cache and buffers, records the tape once. Implements kernels.base.Target.

    `pages` is the size of the cache, `max_rows` the rows of one pass, `max_heads` those of them that may want logits
    (None: all), `max_sequences` the sequences of one pass, `max_pages` the pages one sequence may span.
    ModelError if a tensor cannot be read.
    """

    def __init__(
        self,
        weights: Weights,
        kernels: Kernels,
        *,
        pages: int,
        max_rows: int,
        max_sequences: int,
        max_pages: int,
        max_heads: int | None = None,
    ) -> None:
        spec = self.spec = weights.spec
        self.kernels = kernels
        self.vocab, self.max_rows, self.max_sequences = spec.vocab, max_rows, max_sequences
        self.max_heads = max_rows if max_heads is None else min(max_heads, max_rows)
        self.max_pages = max_pages
        self.cache = kernels.cache(layers=spec.layers, pages=pages, kv_heads=spec.kv_heads, head_dim=spec.head_dim)
        self.weight_bytes = memory.weight_bytes(spec, kernels)
        self.workspace_bytes = memory.workspace_bytes(
            spec, kernels, max_rows=max_rows, max_sequences=max_sequences, max_pages=max_pages, max_heads=self.max_heads
        )
        self._tape: Tape = kernels.tape(
            max_rows=max_rows,
            max_sequences=max_sequences,
            max_pages=max_pages,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
        )
        self._logits = torch.empty(self.max_heads, spec.vocab)
        self._best = torch.empty(self.max_heads, dtype=torch.int32)
        with one_thread():
            self._record(weights)

    def forward(self, batch: Batch) -> Output:
        """One pass over the packed rows; see kernels.base.Target. UsageError if the batch exceeds the buffers."""
        heads, sequences = len(batch.heads), len(batch.starts)
        for name, size, most in (
            ("rows", batch.rows, self.max_rows),
            ("heads", heads, self.max_heads),
            ("sequences", sequences, self.max_sequences),
            ("pages of a sequence", batch.tables.shape[1], self.max_pages),
        ):
            if size > most:
                raise UsageError(f"A pass of {size} {name} exceeds the {most} this decoder was built for.")
        self._tape.inputs.fill(batch)
        self._tape.run(rows=batch.rows, sequences=sequences, heads=heads)
        return Output(self._logits[:heads], self._best[:heads])

    def _record(self, weights: Weights) -> None:
        """Describe a pass to the tape, packing each matrix as it is met, so that one layer at most is held twice."""
        spec, tape, kernels = self.spec, self._tape, self.kernels
        x = torch.empty(self.max_rows, spec.hidden)
        normed = torch.empty(self.max_rows, spec.hidden, dtype=kernels.act)
        table = torch.from_numpy(spec.rope.table(self.max_pages * PAGE, spec.head_dim))
        scratch = _Scratch(self, x, normed, table)
        embedding = weights.read("embed.weight", kernels.act)
        tape.embed(embedding, x)
        for layer in range(spec.layers):
            self._record_layer(_Layer(weights, layer), layer, scratch)
        picked = torch.empty(self.max_heads, spec.hidden)
        last = torch.empty(self.max_heads, spec.hidden, dtype=kernels.act)
        head = kernels.pack(embedding if spec.tied else weights.read("head.weight", kernels.act))
        tape.select(x, picked)
        tape.rms_norm(picked, weights.read("norm.weight"), spec.norm_eps, last, of="heads")
        tape.linear(last, head, self._logits, of="heads")
        tape.argmax(self._logits, self._best)

    def _record_layer(self, tensors: _Layer, layer: int, to: _Scratch) -> None:
        spec, tape, kernels = self.spec, self._tape, self.kernels
        tape.rms_norm(to.x, tensors.vector("attn_norm"), spec.norm_eps, to.normed)
        qkv = kernels.pack(tensors.stacked("q", "k", "v", kernels.act), tensors.stacked_bias("q", "k", "v"))
        tape.linear(to.normed, qkv, to.qkv)
        norms = (tensors.vector("q_norm"), tensors.vector("k_norm"), spec.norm_eps) if spec.qk_norm else None
        tape.rotary(to.qkv, to.table, norms, self.cache, layer, to.q)
        tape.attention(to.q, self.cache, layer, window=spec.windows[layer], out=to.mixed)
        tape.linear(to.mixed, kernels.pack(tensors.matrix("o", kernels.act), tensors.bias("o")), to.x, add=True)
        tape.rms_norm(to.x, tensors.vector("mlp_norm"), spec.norm_eps, to.normed)
        gate, up = tensors.matrix("gate", kernels.act), tensors.matrix("up", kernels.act)
        biases = (tensors.vector("gate", "bias"), tensors.vector("up", "bias")) if spec.mlp_bias else None
        tape.gated(to.normed, kernels.pack_gated(gate, up, bias=biases), to.wide)
        tape.linear(to.wide, kernels.pack(tensors.matrix("down", kernels.act), tensors.bias("down")), to.x, add=True)


class _Scratch:
    """Buffers that all layers share: residual x, its norm, q/k/v, rotated q, attention's output, the inner layer."""

    def __init__(self, decoder: Decoder, x: Tensor, normed: Tensor, table: Tensor) -> None:
        spec, rows, act = decoder.spec, decoder.max_rows, decoder.kernels.act
        self.x, self.normed, self.table = x, normed, table
        self.qkv = torch.empty(rows, spec.qkv)
        self.q = torch.empty(rows, spec.heads * spec.head_dim, dtype=act)
        self.mixed = torch.empty(rows, spec.heads * spec.head_dim, dtype=act)
        self.wide = torch.empty(rows, spec.width, dtype=act)


class _Layer:
    """The tensors of one layer by their short names."""

    def __init__(self, weights: Weights, layer: int) -> None:
        self._weights, self._layer = weights, layer
        self._known = weights.spec.tensors()

    def _name(self, part: str, suffix: str) -> str:
        return f"layers.{self._layer}.{part}.{suffix}"

    def matrix(self, part: str, dtype: torch.dtype) -> Tensor:
        return self._weights.read(self._name(part, "weight"), dtype)

    def vector(self, part: str, suffix: str = "weight") -> Tensor:
        return self._weights.read(self._name(part, suffix))

    def bias(self, part: str) -> Tensor | None:
        return self.vector(part, "bias") if self._name(part, "bias") in self._known else None

    def stacked(self, first: str, second: str, third: str, dtype: torch.dtype) -> Tensor:
        """Three matrices as one [sum of outputs, inputs]."""
        return torch.cat([self.matrix(part, dtype) for part in (first, second, third)])

    def stacked_bias(self, first: str, second: str, third: str) -> Tensor | None:
        parts = [self.bias(part) for part in (first, second, third)]
        return torch.cat([part for part in parts if part is not None]) if parts[0] is not None else None
