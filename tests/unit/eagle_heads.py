"""Random EAGLE-3 heads in both formats, and what they guess, written in torch without a cache or a batch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from wager.kernels.arrays import Array

HIDDEN, VOCAB, HEADS, KV_HEADS, HEAD_DIM, INNER, EPS, THETA = 48, 83, 4, 2, 16, 56, 1e-5, 500.0


@dataclass(frozen=True)
class Flags:
    """What a head is like; the fields are those of its config.json, and what its files hold."""

    taps: tuple[int, ...] = (0, 2, 3)
    draft_vocab: int = 40
    norm_before_residual: bool = True
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    model_type: str = "llama"
    layers: int = 1
    bias: bool = False
    own_embedding: bool = False
    own_output: bool = True
    original: bool = False


VARIANTS = {
    "eagle3": Flags(norm_before_residual=False, original=True),
    "speculators": Flags(),
    "eagle3.1": Flags(fc_norm=True, norm_output=True, taps=(1, 3)),
    "one-norm": Flags(norm_before_fc=True, norm_before_residual=False, own_embedding=True),
    "whole-vocabulary": Flags(draft_vocab=VOCAB, fc_norm=True, own_output=False, norm_output=True),
    "shared-output": Flags(own_output=False, taps=(3,)),
    "qwen3": Flags(model_type="qwen3", layers=2, own_embedding=True, draft_vocab=VOCAB),
    "biased": Flags(bias=True, norm_output=True),
}


class ReferenceLayers:
    """A head's tensors, and parts of its layers."""

    tensors: dict[str, Tensor]

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def _matrix(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self._generator) * columns**-0.5 * 1.5

    def _norm_weight(self, size: int = HIDDEN) -> Tensor:
        return 1 + torch.randn(size, generator=self._generator) * 0.3

    def _layer(self, *, width: int = HIDDEN, norms: Sequence[str] = (), bias: bool, qk_norm: bool) -> dict[str, Tensor]:
        """Random tensors of a layer whose attention reads `width`; `norms` are beside the usual ones."""
        names = ("input_layernorm", "post_attention_layernorm", *norms)
        found = {f"{norm}.weight": self._norm_weight() for norm in names}
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            found[f"self_attn.{part}_proj.weight"] = self._matrix(heads * HEAD_DIM, width)
            if bias:
                found[f"self_attn.{part}_proj.bias"] = torch.randn(heads * HEAD_DIM, generator=self._generator) * 0.3
            if qk_norm and part != "v":
                found[f"self_attn.{part}_norm.weight"] = self._norm_weight(HEAD_DIM)
        found["self_attn.o_proj.weight"] = self._matrix(HIDDEN, HEADS * HEAD_DIM)
        if bias:
            found["self_attn.o_proj.bias"] = torch.randn(HIDDEN, generator=self._generator) * 0.3
        for part, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            found[f"mlp.{part}_proj.weight"] = self._matrix(*shape)
        return found

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.tensors[name]

    def _heads(self, x: Tensor, name: str) -> Tensor:
        """Queries, keys or values [HEADS, n, HEAD_DIM], with their norm if there is one."""
        bias = self.tensors.get(f"{name}_proj.bias", torch.zeros(()))
        y = (x @ self.tensors[f"{name}_proj.weight"].T + bias).view(len(x), -1, HEAD_DIM).transpose(0, 1)
        y = self._normed(y, f"{name}_norm.weight") if f"{name}_norm.weight" in self.tensors else y
        return y.repeat_interleave(HEADS // len(y), 0)

    def _attention(self, x: Tensor, others: Tensor, name: str, mask: Tensor) -> Tensor:
        """Of rows `x`, the last ones of `others`, which they see as far as `mask` lets them."""
        places = torch.arange(len(others))
        q = rotated(self._heads(x, f"{name}.q"), places[-len(x) :])
        k, v = rotated(self._heads(others, f"{name}.k"), places), self._heads(others, f"{name}.v")
        mixed = ((q @ k.transpose(1, 2)) * HEAD_DIM**-0.5 + mask).softmax(-1) @ v
        bias = self.tensors.get(f"{name}.o_proj.bias", torch.zeros(()))
        return mixed.transpose(0, 1).reshape(len(x), -1) @ self.tensors[f"{name}.o_proj.weight"].T + bias

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        y = self._normed(x, f"{name}.post_attention_layernorm.weight")
        gate, up, down = (self.tensors[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return x + (torch.nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T


def layer_config(model_type: str, layers: int, *, bias: bool = False) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": 128,
        "vocab_size": VOCAB,
        "hidden_act": "silu",
        "attention_bias": bias,
    }


def save_head(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write both files; a value of None leaves a key out."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


class ReferenceHead(ReferenceLayers):
    """A head's tensors, and its guesses by the whole sequence at once."""

    def __init__(
        self, flags: Flags, *, target_embedding: Array, target_output: Array, tensors: dict[str, Tensor] | None = None
    ) -> None:
        """Random `tensors` if none are given."""
        super().__init__(0)
        self.flags = flags
        self.ids = np.sort(np.random.default_rng(0).permutation(VOCAB)[: flags.draft_vocab])
        self.tensors = tensors or self._random()
        self._embedding = self.tensors.get("embed_tokens.weight", torch.from_numpy(target_embedding).float())
        shared = torch.from_numpy(target_output).float()[torch.from_numpy(self.ids)]
        self._output = self.tensors.get("lm_head.weight", shared)

    def _random(self) -> dict[str, Tensor]:
        flags = self.flags
        states = len(flags.taps) * HIDDEN
        tensors = {"fc.weight": self._matrix(HIDDEN, states), "norm.weight": self._norm_weight(HIDDEN)}
        if flags.norm_before_fc:
            tensors["input_norm.weight"] = self._norm_weight(states)
        for tap in range(len(flags.taps) if flags.fc_norm else 0):
            tensors[f"fc_norm.{tap}.weight"] = self._norm_weight(HIDDEN)
        for layer in range(flags.layers):
            first = {"width": 2 * HIDDEN, "norms": ["hidden_norm"]} if layer == 0 else {}
            made = self._layer(**first, bias=flags.bias, qk_norm=flags.model_type == "qwen3")
            tensors |= {f"layers.{layer}.{name}": value for name, value in made.items()}
        if flags.own_output:
            tensors["lm_head.weight"] = self._matrix(flags.draft_vocab, HIDDEN) * 3
        if flags.own_embedding:
            tensors["embed_tokens.weight"] = self._matrix(VOCAB, HIDDEN) * 5
        return tensors

    # ---- files -------------------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        flags = self.flags
        layer = layer_config(flags.model_type, flags.layers, bias=flags.bias)
        names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        own = {"draft_vocab_size": flags.draft_vocab, **{name: getattr(flags, name) for name in names}}
        taps = list(flags.taps)
        if flags.original:
            architectures = {"architectures": ["LlamaForCausalLMEagle3"]}
            del own["norm_before_residual"]  # absent: the residual stream is the state itself
            return {**architectures, **layer, **own, "eagle_config": {"eagle_aux_hidden_state_layer_ids": taps}}
        methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
        return {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            **own,
            "target_hidden_size": HIDDEN,
            "eagle_aux_hidden_state_layer_ids": taps,
            "speculators_config": {"algorithm": "eagle3", "proposal_methods": methods},
        }

    def files(self) -> dict[str, Tensor]:
        tensors = dict(self.tensors)
        if self.flags.draft_vocab < VOCAB:
            tensors["d2t"] = torch.from_numpy(self.ids - np.arange(len(self.ids)))
            tensors["t2d"] = torch.from_numpy(np.isin(np.arange(VOCAB), self.ids))
        if self.flags.original:
            tensors = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
        return tensors

    def save(self, folder: Path, **changes: Any) -> Path:
        """Write both files; `changes` edit the configuration (None removes a key)."""
        return save_head(folder, {**self.config(), **changes}, self.files())

    # ---- guesses -----------------------------------------------------------------------------------------------------

    def guesses(self, taps: Array, tokens: Sequence[int], depth: int) -> tuple[list[int], list[Array]]:
        """The likeliest guesses after `tokens`, by the target's ids, from the taps f32 [>= tokens - 1, taps * HIDDEN];
        and the logits that each was taken from, by the head's."""
        guessed: list[int] = []
        rows: list[Array] = []
        for logits in self.rows(taps, tokens, guessed):
            rows.append(logits)
            guessed.append(int(self.ids[int(logits.argmax())]))
            if len(guessed) == depth:
                break
        return guessed, rows

    def rows(self, taps: Array, tokens: Sequence[int], path: Sequence[int]) -> Iterator[Array]:
        """The logits after `tokens` and after each guess of `path` behind them, by the head's ids; `path` may grow
        meanwhile."""
        known, fed = len(tokens) - 1, 0
        states = self._fused(torch.from_numpy(taps[:known]).float())
        while True:
            followers = torch.tensor([*tokens[1:], *path[:fed]])
            outputs = self._outputs(states, self._embedding[followers])
            normed = self._normed(outputs, "norm.weight")
            yield (normed[-1] @ self._output.T).numpy()
            fed += 1
            if fed > len(path):
                return
            states = torch.cat([states, (normed if self.flags.norm_output else outputs)[-1:]])

    def _fused(self, taps: Tensor) -> Tensor:
        if self.flags.norm_before_fc:
            taps = self._normed(taps, "input_norm.weight")
        if self.flags.fc_norm:
            parts = taps.split(HIDDEN, -1)
            taps = torch.cat([self._normed(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)], -1)
        return taps @ self.tensors["fc.weight"].T

    def _outputs(self, states: Tensor, embedded: Tensor) -> Tensor:
        """What the layers give for all entries, before the last norm."""
        x = states
        for layer in range(self.flags.layers):
            name = f"layers.{layer}"
            if layer == 0:
                normed = self._normed(x, f"{name}.hidden_norm.weight")
                both = torch.cat([self._normed(embedded, f"{name}.input_layernorm.weight"), normed], -1)
                x = normed if self.flags.norm_before_residual else x
            else:
                both = self._normed(x, f"{name}.input_layernorm.weight")
            mask = torch.full((len(both), len(both)), -torch.inf).triu(1)
            x = self._mlp(x + self._attention(both, both, f"{name}.self_attn", mask), name)
        return x


def rotated(x: Tensor, places: Tensor) -> Tensor:
    """Rotary embedding of [heads, n, HEAD_DIM] at `places`, halves paired."""
    angles = places[:, None] * THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def changed(name: str, **flags: Any) -> Flags:
    return replace(VARIANTS[name], **flags)
