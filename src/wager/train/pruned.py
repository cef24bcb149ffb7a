"""A draft model made of some of the target's own layers (depth pruning), trained to give the target's distribution
(Minitron, arXiv 2407.14679).

Layers and the last norm begin as the target's and learn; embedding and output matrix are the target's and stay. It
reads the text alone, so what it gives at a position is what it will draft there once all guesses before were right:
training needs one depth, and the others are the same rows further on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from wager.arch.layers import Gqa
from wager.arch.spec import ModelSpec
from wager.errors import UsageError
from wager.train.data import DraftVocabulary
from wager.train.draft_module import DraftModule, DraftNorm, DraftSizes, GatedMlp, Projections, StepRows
from wager.train.target import TargetStates, TorchTarget

_PLACES: Mapping[str, str] = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    **{part: f"self_attn.{part}_proj.weight" for part in "qkvo"},
    **{f"{part}_bias": f"self_attn.{part}_proj.bias" for part in "qkvo"},
    **{part: f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
    **{f"{part}_bias": f"mlp.{part}_proj.bias" for part in ("gate", "up", "down")},
}
"""What each tensor of the target's layers is called here: as in a Hugging Face checkpoint."""


def chosen_layers(wanted: int | Sequence[int], count: int) -> tuple[int, ...]:
    """The layers to keep, from 0, ascending: those that are named, or of a number one half from the beginning (of an
    odd number the larger half) and the other from the end, which learn faster than layers from between.

    UsageError for layers that a target of `count` layers does not have, and for all of them.
    """
    if isinstance(wanted, int):
        if not 1 <= wanted < count:
            raise UsageError(f"{wanted} of {count} layers cannot be kept.", f"Keep 1 to {count - 1}.")
        last = wanted // 2
        return (*range(wanted - last), *range(count - last, count))
    kept = tuple(sorted(wanted))
    bad = [layer for layer in kept if not 0 <= layer < count]
    if bad or not kept or len(set(kept)) < len(kept):
        named = f"Layer {bad[0]}" if bad else "A layer named twice, or none,"
        raise UsageError(f"{named} cannot be kept.", f"The model has layers 0 to {count - 1}.")
    if len(kept) == count:
        raise UsageError(f"{count} layers are all that the model has.", "Leave some out: guesses must cost less.")
    return kept


def check_prunable(spec: ModelSpec) -> None:
    """UsageError for a model whose layers no configuration that is written here describes."""
    if any(isinstance(layer.attention, Gqa) and layer.attention.window is not None for layer in spec.layers):
        raise UsageError(
            f"{spec.name} has layers with a sliding window, of which no draft model is made.",
            "Give a model with full attention, or train a head: --kind eagle3.",
        )


class PrunedLayer(nn.Module):
    """One of the target's layers, under the names of Hugging Face checkpoints."""

    def __init__(self, spec: ModelSpec, sizes: DraftSizes) -> None:
        super().__init__()
        details = spec.details
        self.input_layernorm = DraftNorm(sizes.hidden, sizes.norm_eps)
        self.self_attn = Projections(
            sizes, bias=details.qkv_bias, output_bias=details.output_bias, normed=details.qk_norm
        )
        self.post_attention_layernorm = DraftNorm(sizes.hidden, sizes.norm_eps)
        self.mlp = GatedMlp(sizes.hidden, sizes.inner, bias=details.mlp_bias)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """x [B, T, H]; every row sees itself and those before."""
        attention, normed = self.self_attn, self.input_layernorm(x)
        q, (k, v) = attention.queries(normed, rotation), attention.keys(normed, rotation)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + attention.output(found)
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)).float())


class PrunedModule(DraftModule):
    """`sizes.kept_layers` of the target. The loss compares over the draft vocabulary; guesses are of all tokens, since
    the output matrix is the target's."""

    head: Tensor

    def attach(self, target: TorchTarget, vocabulary: DraftVocabulary) -> None:
        """Take the target's layers, and its embedding and output matrix, frozen."""
        self.attach_target(target, vocabulary)
        self.register_buffer("head", target.head, persistent=False)
        layers = [PrunedLayer(target.spec, self.sizes) for _ in self.sizes.kept_layers]
        norm = DraftNorm(self.sizes.hidden, self.sizes.norm_eps)
        for layer, place in zip(layers, self.sizes.kept_layers, strict=True):
            layer.load_state_dict({_PLACES[part]: value.float() for part, value in target.layers[place].items()})
        norm.weight.data.copy_(target.final_norm)
        self.model = nn.ModuleDict({"layers": nn.ModuleList(layers), "norm": norm}).to(target.device)

    def logits(self, rows: StepRows) -> Tensor:
        return functional.linear(rows.states.to(self.label_head.dtype), self.label_head)

    def choices(self, rows: StepRows, ids: Tensor) -> Tensor:
        return functional.linear(rows.states.to(self.head.dtype), self.head).argmax(-1)

    def output_parameters(self) -> list[nn.Parameter]:
        return []

    def steps(self, states: TargetStates, depth: int, generator: torch.Generator | None) -> Iterator[StepRows]:
        """With a generator, that is in training, the rows of the first guess alone."""
        tokens, last = states.tokens, states.tokens.shape[1] - 1
        x = self.embed(tokens)
        for layer in cast(nn.ModuleList, self.model["layers"]):
            x = layer(x, self.rotation[: last + 1])
        found = self.model["norm"](x)
        rows = torch.arange(last, device=tokens.device).expand(len(tokens), last)
        for step in range(depth if generator is None else 1):
            ahead = (rows + 1 + step).clamp(max=last)
            states_ahead = found.gather(1, ahead[..., None].expand(*ahead.shape, found.shape[-1]))
            yield StepRows(states_ahead, ahead, rows + 1 + step <= last, tokens.gather(1, ahead))
