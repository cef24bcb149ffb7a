"""Random models with modules of multi-token prediction in every format, and what the modules guess, written in torch
without a cache or a batch, on transformers' own layers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import SIZES, oracle
from torch import Tensor

from wager.kernels.arrays import Array

LAYERS, HIDDEN, VOCAB = 3, int(SIZES["hidden_size"]), int(SIZES["vocab_size"])
_LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "q_lora_rank": 24,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_HYBRID = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}


@dataclass(frozen=True)
class Variant:
    """A format and a family of targets; `own`: the modules have an embedding and an output matrix; `norm_offset` is
    added to the weights of norms."""

    format: str
    architecture: str
    modules: int = 1
    own: bool = False
    norm_offset: float = 0.0
    config: dict[str, Any] = field(default_factory=dict)


VARIANTS = {
    "deepseek": Variant("DeepSeek", "DeepseekV3ForCausalLM", own=True, config=_LATENT),
    "deepseek-three": Variant("DeepSeek", "LlamaForCausalLM", modules=3, config={"head_dim": 16}),
    "qwen": Variant("Qwen", "Qwen3ForCausalLM", config={"head_dim": 16}),
    "qwen-experts-two": Variant("Qwen", "Qwen3MoeForCausalLM", modules=2, config=_EXPERTS),
    "qwen-next": Variant(
        "Qwen",
        "Qwen3NextForCausalLM",
        norm_offset=1.0,
        config={**_HYBRID, **_EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 24},
    ),
    "qwen3.5": Variant("Qwen", "Qwen3_5ForCausalLM", norm_offset=1.0, config=_HYBRID),
    "qwen3.5-experts": Variant(
        "Qwen",
        "Qwen3_5MoeForCausalLM",
        norm_offset=1.0,
        config={**_HYBRID, **_EXPERTS, "shared_expert_intermediate_size": 24},
    ),
    "mimo": Variant("MiMo", "Qwen2ForCausalLM", config={"num_attention_heads": 3, "num_key_value_heads": 1}),
    "speculators": Variant("speculators", "Qwen3ForCausalLM", config={"head_dim": 16, "tie_word_embeddings": True}),
}
_PARTS = {
    "DeepSeek": {
        "enorm": "enorm",
        "hnorm": "hnorm",
        "proj": "eh_proj",
        "norm": "shared_head.norm",
        "head": "shared_head.head",
        "embed": "embed_tokens",
    },
    "Qwen": {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "proj": "fc", "norm": "norm"},
    "MiMo": {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "proj": "input_proj", "norm": "final_layernorm"},
}
_PARTS["speculators"] = _PARTS["MiMo"]


class ReferenceModules:
    """A model of LAYERS layers whose further ones are the blocks of its modules, and the tensors around them."""

    def __init__(self, variant: Variant, *, seed: int = 0, after_norm: bool | None = None) -> None:
        self.variant = variant
        self.after_norm = variant.format in ("DeepSeek", "Qwen") if after_norm is None else after_norm
        self.model = oracle(
            variant.architecture,
            **{**variant.config, "num_hidden_layers": LAYERS + variant.modules, "rms_norm_eps": 1e-5},
        )
        self._generator = torch.Generator().manual_seed(seed)
        self.parts = [self._random() for _ in range(1 if variant.format == "Qwen" else variant.modules)]

    def _random(self) -> dict[str, Tensor]:
        found = {part: 1 + self._noise(HIDDEN) * 0.3 for part in ("enorm", "hnorm", "norm")}
        found["proj"] = self._noise(HIDDEN, 2 * HIDDEN) * (2 * HIDDEN) ** -0.5 * 1.5
        if self.variant.own:
            vocab = self.model.config.vocab_size
            found |= {"head": self._noise(vocab, HIDDEN) * 0.3, "embed": self._noise(vocab, HIDDEN)}
        return found

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)

    # ---- files -------------------------------------------------------------------------------------------------------

    def module_tensors(self) -> dict[str, Tensor]:
        """The modules' tensors under the names of their format."""
        kind, found = self.variant.format, {}
        before = {"DeepSeek": "model.layers.{}.", "MiMo": "model.mtp_layers.{}.", "speculators": "mtp_layers.{}."}
        for module, parts in enumerate(self.parts):
            number = LAYERS + module if kind == "DeepSeek" else module
            prefix = before.get(kind, "mtp.").format(number)
            found |= {f"{prefix}{_PARTS[kind][part]}.weight": value for part, value in parts.items()}
        layers = before.get(kind, "mtp.layers.{}.")
        for name, value in self._checkpoint().items():
            if name.startswith("model.layers.") and (index := int(name.split(".")[2])) >= LAYERS:
                number = index if kind == "DeepSeek" else index - LAYERS
                found[name.replace(f"model.layers.{index}.", layers.format(number))] = value
        return found

    def _checkpoint(self) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self.model, self.model.state_dict()))

    def target_tensors(self) -> dict[str, Tensor]:
        found = {}
        for name, value in self._checkpoint().items():
            layer = int(name.split(".")[2]) if name.startswith("model.layers.") else 0
            if layer < LAYERS and not (name == "lm_head.weight" and self.model.config.tie_word_embeddings):
                found[name] = value
        return found

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {**self.model.config.to_dict(), "num_hidden_layers": LAYERS}
        config["architectures"] = [self.variant.architecture]
        if self.variant.format == "MiMo":  # Qwen2's layers under another name
            config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
        if config.get("layer_types"):
            config["layer_types"] = config["layer_types"][:LAYERS]
        return config

    def save_target(self, folder: Path, *, wrapped: bool = False, **changes: Any) -> Path:
        """The target, with the modules inside unless their format stands alone; `wrapped`: as published, a part of a
        model that sees, too."""
        count = "mtp_num_hidden_layers" if self.variant.format == "Qwen" else "num_nextn_predict_layers"
        inside = self.variant.format != "speculators"
        tensors = self.target_tensors() | (self.module_tensors() if inside else {})
        config = {**self.config(), **({count: self.variant.modules} if inside else {})}
        if wrapped:
            whole = self.variant.architecture.replace("ForCausalLM", "ForConditionalGeneration")
            config = {
                "architectures": [whole],
                "model_type": config["model_type"].removesuffix("_text"),
                "text_config": config,
            }
            tensors = {re.sub(r"^model\.", "model.language_model.", name): value for name, value in tensors.items()}
        return save(folder, {**config, **changes}, tensors)

    def save_modules(self, folder: Path, **changes: Any) -> Path:
        """The modules alone."""
        config = self.config()
        if self.variant.format == "speculators":
            methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
            config = {
                "speculators_model_type": "mtp",
                "num_nextn_predict_layers": 1,
                "transformer_layer_config": config,
                "speculators_config": {"algorithm": "mtp", "proposal_methods": methods},
            }
        return save(folder, {**config, **changes}, self.module_tensors())

    # ---- guesses -----------------------------------------------------------------------------------------------------

    def guesses(self, states: Array, tokens: Sequence[int], depth: int) -> tuple[list[int], list[Array]]:
        """The likeliest guesses after `tokens` from the states before the last norm, f32 [>= tokens - 1, HIDDEN]; and
        the logits that each was taken from."""
        known, modules, guessed, rows = len(tokens) - 1, self.variant.modules, [], []
        with torch.no_grad():
            given = torch.from_numpy(states[:known]).float()
            if self.after_norm:
                given = self._normed(given, self.model.model.norm.weight)
            for step in range(depth):
                module = min(step, modules - 1)
                if step < modules:
                    inputs, text = given, [*tokens, *guessed][1 + step :]
                else:  # the last module again: a row more, whose state is what it gave
                    inputs, text = torch.cat([inputs, given[-1:]]), [*text, guessed[-1]]
                given = self._run(module, inputs, text)
                logits = given[-1] @ self._head(module).T
                rows.append(logits.numpy())
                guessed.append(int(logits.argmax()))
        return guessed, rows

    def _run(self, module: int, states: Tensor, text: Sequence[int]) -> Tensor:
        parts = self.parts[min(module, len(self.parts) - 1)]
        embedded = parts.get("embed", self.model.model.embed_tokens.weight)[torch.tensor(list(text))]
        if self.variant.format in ("DeepSeek", "MiMo"):
            embedded = torch.cat([torch.zeros(1, HIDDEN), embedded[1:]])
        both = [self._normed(embedded, parts["enorm"]), self._normed(states, parts["hnorm"])]
        if self.variant.format == "MiMo":
            both.reverse()
        x = (torch.cat(both, -1) @ parts["proj"].T)[None]
        count = len(states)
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
        rotation = self.model.model.rotary_emb(x, positions)
        layer = self.model.model.layers[LAYERS + module]
        y = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotation)
        return self._normed((y[0] if isinstance(y, tuple) else y)[0], parts["norm"])

    def _head(self, module: int) -> Tensor:
        head: Tensor = self.parts[min(module, len(self.parts) - 1)].get("head", self.model.lm_head.weight)
        return head

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        return x * scale * (self.variant.norm_offset + weight)


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write both files; a value of None leaves a key out."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    save_file({name: value.contiguous().clone() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder
