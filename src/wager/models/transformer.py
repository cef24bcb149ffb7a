"""The one decoder: a tape of kernel ops recorded from a ModelSpec, and a pass that replays it.

Every difference between families is a value of the spec; nothing here asks which family it is. Knows kernels only
through kernels/base.py and weights only by name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wager.arch.spec import Experts, Latent
from wager.errors import UsageError
from wager.kernels.base import BLOCK_SIZE, Kernels, Routing, Tape, TargetOutput
from wager.kernels.threads import one_thread
from wager.models import footprint as memory
from wager.models.weights import Weights
from wager.types import PackedBatch


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
        num_blocks: int,
        max_rows: int,
        max_sequences: int,
        max_blocks: int,
        max_logits_rows: int | None = None,
    ) -> None:
        spec = self.spec = weights.spec
        self.kernels = kernels
        self.vocab, self.max_rows, self.max_sequences = spec.vocab, max_rows, max_sequences
        self.max_heads = max_rows if max_logits_rows is None else min(max_logits_rows, max_rows)
        self.max_pages = max_blocks
        if spec.latent:
            rank, rope = spec.latent.rank, spec.latent.rope
            self.cache = kernels.latent_cache(layers=spec.layers, num_blocks=num_blocks, rank=rank, rope=rope)
        else:
            self.cache = kernels.cache(
                layers=spec.layers, num_blocks=num_blocks, kv_heads=spec.kv_heads, head_dim=spec.head_dim
            )
        self.weight_bytes = memory.weight_bytes(spec, kernels)
        self.workspace_bytes = memory.workspace_bytes(
            spec,
            kernels,
            max_rows=max_rows,
            max_sequences=max_sequences,
            max_blocks=max_blocks,
            max_logits_rows=self.max_heads,
        )
        self._tape: Tape = kernels.tape(
            max_rows=max_rows,
            max_sequences=max_sequences,
            max_blocks=max_blocks,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
        )
        self._logits = torch.empty(self.max_heads, spec.vocab)
        self._best = torch.empty(self.max_heads, dtype=torch.int32)
        with one_thread():
            self._record(weights)

    def forward(self, batch: PackedBatch) -> TargetOutput:
        """One pass over the packed rows; see kernels.base.Target. UsageError if the batch exceeds the buffers."""
        heads, sequences = len(batch.logits_indices), batch.num_sequences
        for name, size, most in (
            ("rows", batch.rows, self.max_rows),
            ("heads", heads, self.max_heads),
            ("sequences", sequences, self.max_sequences),
            ("pages of a sequence", batch.block_tables.shape[1], self.max_pages),
        ):
            if size > most:
                raise UsageError(f"A pass of {size} {name} exceeds the {most} this decoder was built for.")
        self._tape.inputs.fill(batch)
        self._tape.run(rows=batch.rows, sequences=sequences, logits_rows=heads)
        return TargetOutput(self._logits[:heads], self._best[:heads])

    def _record(self, weights: Weights) -> None:
        """Describe a pass to the tape, packing each matrix as it is met, so that one layer at most is held twice."""
        spec, tape, kernels = self.spec, self._tape, self.kernels
        x = torch.empty(self.max_rows, spec.hidden)
        normed = torch.empty(self.max_rows, spec.hidden, dtype=kernels.act)
        table = torch.from_numpy(spec.rope.table(self.max_pages * BLOCK_SIZE, spec.rope_dim))
        scratch = _Scratch(self, x, normed, table)
        embedding = weights.read("embed.weight", kernels.act)
        tape.embed(embedding, x)
        for layer in range(spec.layers):
            self._record_layer(_Layer(weights, layer), layer, scratch)
        picked = torch.empty(self.max_heads, spec.hidden)
        last = torch.empty(self.max_heads, spec.hidden, dtype=kernels.act)
        head = kernels.pack(embedding if spec.tied else weights.read("head.weight", kernels.act))
        tape.select(x, picked)
        tape.rms_norm(picked, weights.read("norm.weight"), spec.norm_eps, last, of="logits")
        tape.linear(last, head, self._logits, of="logits")
        tape.argmax(self._logits, self._best)

    def _record_layer(self, tensors: _Layer, layer: int, to: _Scratch) -> None:
        spec, tape, kernels = self.spec, self._tape, self.kernels
        tape.rms_norm(to.x, tensors.vector("attn_norm"), spec.norm_eps, to.normed)
        if spec.latent:
            self._record_latent_attention(tensors, layer, to, spec.latent)
        else:
            self._record_attention(tensors, layer, to)
        tape.linear(to.mixed, kernels.pack(tensors.matrix("o", kernels.act), tensors.bias("o")), to.x, add=True)
        tape.rms_norm(to.x, tensors.vector("mlp_norm"), spec.norm_eps, to.normed)
        if spec.experts and spec.has_experts(layer):
            self._record_experts(tensors, to, spec.experts)
        else:
            self._record_feed_forward(tensors, "", to.wide, to)

    def _record_attention(self, tensors: _Layer, layer: int, to: _Scratch) -> None:
        spec, tape, kernels = self.spec, self._tape, self.kernels
        qkv = kernels.pack(tensors.stacked("q", "k", "v", kernels.act), tensors.stacked_bias("q", "k", "v"))
        tape.linear(to.normed, qkv, to.qkv)
        norms = (tensors.vector("q_norm"), tensors.vector("k_norm"), spec.norm_eps) if spec.qk_norm else None
        tape.rotary(to.qkv, to.table, norms, self.cache, layer, to.q)
        tape.attention(to.q, self.cache, layer, window=spec.windows[layer], out=to.mixed)

    def _record_latent_attention(self, tensors: _Layer, layer: int, to: _Scratch, latent: Latent) -> None:
        """Queries meet latents, never expanded keys: each head's half of kv_b goes into its query, the other half takes
        what it mixed to its values."""
        spec, tape, kernels = self.spec, self._tape, self.kernels
        normed = to.normed
        if latent.q_rank:
            tape.linear(normed, kernels.pack(tensors.matrix("q_a", kernels.act)), to.squeezed)
            tape.rms_norm(to.squeezed, tensors.vector("q_a_norm"), latent.norm_eps, to.q_normed)
            normed = to.q_normed
        tape.linear(normed, kernels.pack(tensors.matrix("q_b" if latent.q_rank else "q", kernels.act)), to.qkv)
        tape.linear(to.normed, kernels.pack(tensors.matrix("kv_a", kernels.act)), to.kv)
        norm = (tensors.vector("kv_a_norm"), latent.norm_eps)
        tape.latent(to.qkv, to.kv, to.table, norm, self.cache, layer, to.plain, to.q)
        expand = tensors.matrix("kv_b", kernels.act).view(spec.heads, latent.nope + latent.value, latent.rank)
        tape.per_head(to.plain, kernels.pack_heads(expand[:, : latent.nope].transpose(1, 2)), to.q)
        tape.attention(to.q, self.cache, layer, window=spec.windows[layer], out=to.latents, scale=latent.scale)
        tape.per_head(to.latents, kernels.pack_heads(expand[:, latent.nope :]), to.mixed)

    def _record_experts(self, tensors: _Layer, to: _Scratch, how: Experts) -> None:
        tape, act = self._tape, self.kernels.act
        bias = tensors.vector("correction", "bias") if how.corrected else None
        tape.route(to.normed, tensors.vector("router"), bias, how, to.routing)
        parts = (tensors.expert(expert, act) for expert in range(how.count))
        tape.experts(to.normed, self.kernels.pack_experts(parts, count=how.count), how, to.routing, to.x)
        if how.shared:
            self._record_feed_forward(tensors, "shared_", to.shared, to)

    def _record_feed_forward(self, tensors: _Layer, prefix: str, wide: Tensor, to: _Scratch) -> None:
        kernels = self.kernels
        gate, up, down = (tensors.matrix(prefix + part, kernels.act) for part in ("gate", "up", "down"))
        biases = [tensors.bias(prefix + part) for part in ("gate", "up")]
        both = (biases[0], biases[1]) if biases[0] is not None and biases[1] is not None else None
        self._tape.gated(to.normed, kernels.pack_gated(gate, up, bias=both), wide)
        self._tape.linear(wide, kernels.pack(down, tensors.bias(prefix + "down")), to.x, add=True)


class _Scratch:
    """Buffers that all layers share: residual x, its norm, queries (and keys and values) before the rotation, rotated
    q, what goes to the output projection, the inner layers; those of latent attention and of experts where needed."""

    def __init__(self, decoder: Decoder, x: Tensor, normed: Tensor, table: Tensor) -> None:
        spec, rows, act = decoder.spec, decoder.max_rows, decoder.kernels.act
        self.x, self.normed, self.table = x, normed, table
        self.q = torch.zeros(rows, spec.heads * spec.head_dim, dtype=act)
        self.mixed = torch.empty(rows, spec.mixed, dtype=act)
        if latent := spec.latent:
            self.qkv, self.kv = torch.empty(rows, spec.queries), torch.empty(rows, spec.head_dim)
            self.squeezed = torch.empty(rows, latent.q_rank)
            self.q_normed = torch.empty(rows, latent.q_rank, dtype=act)
            self.plain = torch.empty(rows, spec.heads * latent.nope, dtype=act)
            self.latents = torch.empty(rows, spec.heads * latent.rank, dtype=act)
        else:
            self.qkv = torch.empty(rows, spec.qkv)
        if spec.expert_layers < spec.layers:
            self.wide = torch.empty(rows, spec.width, dtype=act)
        if how := spec.experts:
            self.routing = Routing.allocate(how, max_rows=rows, hidden=spec.hidden, act=act)
            self.shared = torch.empty(rows, how.shared, dtype=act)


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

    def expert(self, expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Gate, up and down of one expert."""
        gate, up, down = (self.matrix(f"{expert}.expert_{part}", dtype) for part in ("gate", "up", "down"))
        return gate, up, down

    def bias(self, part: str) -> Tensor | None:
        return self.vector(part, "bias") if self._name(part, "bias") in self._known else None

    def stacked(self, first: str, second: str, third: str, dtype: torch.dtype) -> Tensor:
        """Three matrices as one [sum of outputs, inputs]."""
        return torch.cat([self.matrix(part, dtype) for part in (first, second, third)])

    def stacked_bias(self, first: str, second: str, third: str) -> Tensor | None:
        parts = [self.bias(part) for part in (first, second, third)]
        return torch.cat([part for part in parts if part is not None]) if parts[0] is not None else None
