"""EAGLE-3's head in plain numpy, row by row, as a drafter runs it: what the unrolled module is tested against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from wager.train.draft_module import DraftSizes

Floats = NDArray[np.float64]


class PlainEagle:
    """Weights by the names of speculators' format. `feed` takes one row and returns what enters the output matrix."""

    def __init__(self, sizes: DraftSizes, weights: Mapping[str, Floats], embedding: Floats, rotation: Floats) -> None:
        self.sizes, self.weights, self.embedding, self.rotation = sizes, weights, embedding, rotation
        self.keys: list[Floats] = []
        self.values: list[Floats] = []

    def norm(self, x: Floats, name: str) -> Floats:
        return x / np.sqrt((x * x).mean() + self.sizes.norm_eps) * self.weights[f"{name}.weight"]

    def fuse(self, taps: Floats) -> Floats:
        """The state of a row that the target has computed, from its taps [n, H]."""
        if self.sizes.fc_norm:
            taps = np.stack([self.norm(tap, f"fc_norm.{index}") for index, tap in enumerate(taps)])
        return self.weights["fc.weight"] @ taps.reshape(-1)

    def turn(self, x: Floats, position: int) -> Floats:
        """RoPE of heads [h, d]."""
        cos, sin = np.split(self.rotation[position], 2)
        first, second = np.split(x, 2, axis=1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], 1)

    def feed(self, token: int, state: Floats, position: int) -> tuple[Floats, Floats]:
        """A row appended to the cache: what enters the output matrix, and the state that the next step is fed."""
        sizes, weights = self.sizes, self.weights
        normed = self.norm(state, "layers.0.hidden_norm")
        both = np.concatenate([self.norm(self.embedding[token], "layers.0.input_layernorm"), normed])

        def heads(part: str) -> Floats:
            return (weights[f"layers.0.self_attn.{part}_proj.weight"] @ both).reshape(-1, sizes.head_dim)

        self.keys.append(self.turn(heads("k"), position))
        self.values.append(heads("v"))
        query, keys, values = self.turn(heads("q"), position), np.stack(self.keys, 1), np.stack(self.values, 1)
        found = []
        for head, row in enumerate(query):
            shared = head * sizes.kv_heads // sizes.heads
            scores = keys[shared] @ row * sizes.head_dim**-0.5
            shares = np.exp(scores - scores.max())
            found.append(shares / shares.sum() @ values[shared])
        x = normed if sizes.norm_before_residual else state
        x = x + weights["layers.0.self_attn.o_proj.weight"] @ np.concatenate(found)
        inner = self.norm(x, "layers.0.post_attention_layernorm")
        gate = weights["layers.0.mlp.gate_proj.weight"] @ inner
        up = weights["layers.0.mlp.up_proj.weight"] @ inner
        x = x + weights["layers.0.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        out = self.norm(x, "norm")
        return out, out if sizes.norm_output else x

    def chain(self, taps: Floats, tokens: Sequence[int], depth: int) -> list[Floats]:
        """What enters the output matrix at each depth, after rows with `taps` [rows, n, H]; `tokens` are those of the
        text, of which the one after the last row and the next ones are fed."""
        self.keys.clear()
        self.values.clear()
        rows = len(taps)
        for row in range(rows):
            out, state = self.feed(tokens[row + 1], self.fuse(taps[row]), row)
        found = [out]
        for step in range(1, depth):
            out, state = self.feed(tokens[rows + step], state, rows - 1 + step)
            found.append(out)
        return found
