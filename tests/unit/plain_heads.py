"""EAGLE-3's head and a block drafter in plain numpy, row by row as a drafter runs them: what the torch modules are
tested against. Weights have the names of speculators' format."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wager.train.draft_module import DraftModule
from wager.train.target import TorchTarget

Floats = NDArray[np.float64]


class PlainHead:
    """`keys` and `values` [kv, d] of the rows that attention has seen so far, by layer."""

    def __init__(self, module: DraftModule, target: TorchTarget) -> None:
        self.sizes = module.sizes
        self.weights = {name: value.double().numpy() for name, value in module.state_dict().items()}
        self.embedding, self.rotation = target.embedding.double().numpy(), target.rotation.double().numpy()
        self.keys: dict[int, list[Floats]] = {}
        self.values: dict[int, list[Floats]] = {}

    def norm(self, x: Floats, name: str) -> Floats:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.sizes.norm_eps) * self.weights[f"{name}.weight"]

    def heads(self, layer: int, part: str, x: Floats, position: int | None = None) -> Floats:
        """[h, d], with its norm if there is one, and rotated where a position is given."""
        name = f"layers.{layer}.self_attn.{part}"
        found = (self.weights[f"{name}_proj.weight"] @ x).reshape(-1, self.sizes.head_dim)
        if f"{name}_norm.weight" in self.weights:
            found = self.norm(found, f"{name}_norm")
        if position is None:
            return found
        cos, sin = np.split(self.rotation[position], 2)
        first, second = np.split(found, 2, axis=1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], 1)

    def remember(self, layer: int, x: Floats, position: int) -> None:
        self.keys.setdefault(layer, []).append(self.heads(layer, "k", x, position))
        self.values.setdefault(layer, []).append(self.heads(layer, "v", x))

    def attend(self, layer: int, x: Floats, position: int) -> Floats:
        keys, values = np.stack(self.keys[layer], 1), np.stack(self.values[layer], 1)
        found = []
        for head, row in enumerate(self.heads(layer, "q", x, position)):
            shared = head * self.sizes.kv_heads // self.sizes.heads
            shares = np.exp(keys[shared] @ row * self.sizes.head_dim**-0.5)
            found.append(shares / shares.sum() @ values[shared])
        return self.weights[f"layers.{layer}.self_attn.o_proj.weight"] @ np.concatenate(found)

    def feed_forward(self, layer: int, x: Floats) -> Floats:
        inner = self.norm(x, f"layers.{layer}.post_attention_layernorm")
        gate, up, down = (self.weights[f"layers.{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return x + down @ (gate @ inner / (1 + np.exp(-(gate @ inner))) * (up @ inner))


def eagle_chain(head: PlainHead, taps: Floats, tokens: Sequence[int], depth: int) -> list[Floats]:
    """What enters the output matrix at each depth, after rows with `taps` [rows, n, H]; `tokens` are those of the
    text, of which the one after the last row and the next ones are fed."""
    found = []
    state = np.zeros(0)
    for row in range(len(taps) + depth - 1):
        if row < len(taps):
            fused = np.concatenate([head.norm(tap, f"fc_norm.{index}") for index, tap in enumerate(taps[row])])
            state = head.weights["fc.weight"] @ fused
        normed = head.norm(state, "layers.0.hidden_norm")
        both = np.concatenate([head.norm(head.embedding[tokens[row + 1]], "layers.0.input_layernorm"), normed])
        head.remember(0, both, row)
        state = head.norm(head.feed_forward(0, normed + head.attend(0, both, row)), "norm")
        found.append(state)
    return found[len(taps) - 1 :]


def block_rows(head: PlainHead, taps: Floats, anchor: int, slots: int) -> Floats:
    """What enters the output matrix [S, H], after states of positions 0 to len(taps) - 1."""
    count = len(taps)
    context = [head.norm(head.weights["fc.weight"] @ row.reshape(-1), "hidden_norm") for row in taps]
    x = head.embedding[[anchor, *[head.sizes.mask_token] * (slots - 1)]]
    for layer in range(head.sizes.layers):
        normed = head.norm(x, f"layers.{layer}.input_layernorm")
        for position, row in enumerate([*context, *normed]):
            head.remember(layer, row, position)
        attended = [head.attend(layer, row, count + slot) for slot, row in enumerate(normed)]
        x = np.stack([head.feed_forward(layer, row) for row in x + np.stack(attended)])
    return head.norm(x, "norm")
