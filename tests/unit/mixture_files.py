"""GGUF files of mixtures of experts as llama.cpp's converter makes them of a Hugging Face directory, by the names of
the gguf library: experts stacked, the latent projections of DeepSeek split or (older files) joined, gpt-oss's taken
apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open
from tiny_models import hybrid_tensors, mamba_tensor, permute, write_gguf

Tensors = dict[str, np.ndarray]

_EXPERT = re.compile(r"(model\.layers\.\d+\.(?:mlp|block_sparse_moe|feed_forward)\.experts)\.(\d+)\.(\w+)\.weight")
ARCHITECTURES = {
    "MixtralForCausalLM": "llama",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "GptOssForCausalLM": "gpt-oss",
    "OlmoeForCausalLM": "olmoe",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeHybridForCausalLM": "granitehybrid",
    "Qwen3NextForCausalLM": "qwen3next",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "Glm4MoeForCausalLM": "glm4moe",
    "Glm4MoeLiteForCausalLM": "deepseek2",
    "Lfm2MoeForCausalLM": "lfm2moe",
    "MiniMaxM2ForCausalLM": "minimax-m2",
}
_PERMUTED = ("mixtral", "granitemoe", "granitemoehybrid")


def stored_tensors(folder: Path) -> Tensors:
    found: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name).float().numpy() for name in opened.keys()}  # noqa: SIM118
    return found


def mixture_gguf(
    folder: Path,
    path: Path,
    *,
    kind_of: Callable[[str], Kind] = lambda _: Kind.F32,
    absorbed: bool = True,
    fused: bool = False,
    without: tuple[str, ...] = (),
    part: str = "whole",
    architecture: str | None = None,
    **changes: Any,
) -> Path:
    """Write the file of a saved model, or that `part` of it: the "model" without its MTP modules, or "mtp" alone.
    `architecture` is another than the class's. `kind_of` is asked for the type of each matrix by its name; `fused`
    stores gate and up projections of experts as one; `without` leaves keys out, `changes` replace them (dots as double
    underscores)."""
    config = json.loads((folder / "config.json").read_text())
    architecture = architecture or ARCHITECTURES[config["architectures"][0]]
    enum = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    modules = config.get("mtp_num_hidden_layers", 0)
    config["num_hidden_layers"] += modules
    names = gguf.get_tensor_name_map(enum, config["num_hidden_layers"])
    tensors: dict[str, tuple[np.ndarray, Kind]] = {}
    stored = {_as_layer(name, config["num_hidden_layers"] - modules): v for name, v in stored_tensors(folder).items()}
    for name, values in _converted(stored, config, absorbed=absorbed).items():
        around = _AROUND_MODULES.fullmatch(name)
        written = around and f"blk.{around[1]}.nextn.{around[2].replace('.', '_')}.weight"
        written = written or names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert written is not None, name
        plain = values.squeeze()
        wide = plain.ndim == 1 or ".ffn_gate_inp." in written or written.endswith(".bias")
        tensors[written] = (plain, Kind.F32 if wide else kind_of(written))
    for name in [name for name in tensors if fused and ".ffn_gate_exps." in name]:
        up, kind = tensors.pop(name.replace("gate", "up"))
        tensors[name.replace("gate", "gate_up")] = np.concatenate([tensors.pop(name)[0], up], axis=1), kind
    metadata = _metadata(config, architecture, absorbed=absorbed) | {"nextn_predict_layers": modules}
    if part != "whole":
        layers = config["num_hidden_layers"] - modules
        for name in [name for name in tensors if name.startswith("blk.")]:
            if (int(name.split(".")[1]) < layers) != (part == "model"):
                del tensors[name]
        metadata |= {"block_count": layers, "nextn_predict_layers": 0} if part == "model" else {}
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    return write_gguf(path, architecture, {k: v for k, v in metadata.items() if k not in without}, tensors)


_AROUND_MODULES = re.compile(r"model\.layers\.(\d+)\.(eh_proj|enorm|hnorm|shared_head\.norm)\.weight")
_MODULE_PARTS = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}


def _as_layer(name: str, layers: int) -> str:
    """A tensor of Qwen's module as one of a layer behind all others."""
    if match := re.fullmatch(r"mtp\.(\w+)\.weight", name):
        return f"model.layers.{layers}.{_MODULE_PARTS[match[1]]}.weight"
    return name.replace("mtp.layers.0.", f"model.layers.{layers}.")


def _converted(stored: Tensors, config: Mapping[str, Any], *, absorbed: bool) -> Tensors:
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    found: Tensors = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, values in stored.items():
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = values
        elif config["model_type"] in _PERMUTED and (kind := re.search(r"\.(q|k)_proj\.", name)):
            found[name] = permute(values, heads if kind[1] == "q" else kv_heads)
        elif name.endswith(("e_score_correction_bias", "expert_bias")):
            found[name.removesuffix("_bias") + ("_bias.bias" if name.endswith("expert_bias") else ".bias")] = values
        elif name.endswith("kv_b_proj.weight") and absorbed:
            split = values.reshape(heads, config["qk_nope_head_dim"] + config["v_head_dim"], -1)
            found[name.replace("kv_b_proj", "k_b_proj")] = split[:, : config["qk_nope_head_dim"]].swapaxes(1, 2)
            found[name.replace("kv_b_proj", "v_b_proj")] = split[:, config["qk_nope_head_dim"] :]
        elif match := re.fullmatch(r"(model\.layers\.\d+)\.block_sparse_moe\.(in|out)put_linear\.weight", name):
            parts = {"gate": values[:, : values.shape[1] // 2], "up": values[:, values.shape[1] // 2 :]}
            parts = parts if match[2] == "in" else {"down": values}
            found |= {f"{match[1]}.mlp.experts.{part}_proj.weight": half for part, half in parts.items()}
        elif name.endswith("shared_mlp.input_linear.weight"):
            before = name.removesuffix("shared_mlp.input_linear.weight") + "mlp.shared_expert."
            found |= {f"{before}{p}_proj.weight": v for p, v in zip(("gate", "up"), np.split(values, 2), strict=True)}
        elif ".mamba." in name:
            name, values = mamba_tensor(name, values, groups=config["mamba_n_groups"])
            found[name] = values
        elif config["model_type"] == "gpt_oss":
            found |= _gpt_oss(name, values)
        elif "linear_num_key_heads" in config:
            found |= hybrid_tensors(name, values, config, tiled=config["model_type"] != "qwen3_next")
        else:
            found[name] = values
    found |= {name: np.stack([parts[i] for i in range(len(parts))]) for name, parts in experts.items()}
    return {_merged(name): values for name, values in found.items()}


def _merged(name: str) -> str:
    """The names that the library's table has for stacked experts of Mixtral."""
    pattern = r"model\.layers\.(\d+)\.(block_sparse_moe|feed_forward)\.experts"
    return re.sub(pattern, r"layers.\1.feed_forward.experts", name)


def _gpt_oss(name: str, values: np.ndarray) -> Tensors:
    if name.endswith("sinks"):
        return {f"{name}.weight": values}
    if match := re.fullmatch(r"(.*experts\.)(gate_up|down)_proj(_bias)?", name):
        whole = values if match[3] else values.swapaxes(1, 2)
        suffix = "bias" if match[3] else "weight"
        if match[2] == "down":
            return {f"{match[1]}down_proj.{suffix}": whole}
        return {f"{match[1]}{part}_proj.{suffix}": whole[:, i::2] for i, part in enumerate(("gate", "up"))}
    return {name: values}


def _metadata(config: Mapping[str, Any], architecture: str, *, absorbed: bool) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    found = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps") or config["norm_eps"]),
        "rope.freq_base": float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        "vocab_size": config["vocab_size"],
        "expert_used_count": config["num_experts_per_tok"],
    }
    if rope.get("rope_type") == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    if architecture == "deepseek2":
        return found | _deepseek(config, rope, heads, absorbed=absorbed)
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1))
    found |= {"attention.key_length": head_dim, "attention.value_length": head_dim, "rope.dimension_count": rotated}
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    found["expert_count"] = next(config[name] for name in names if config.get(name))
    if architecture in ("glm4moe", "lfm2moe", "minimax-m2"):
        found["expert_gating_func"] = 2
    if architecture in ("glm4moe", "lfm2moe"):
        found["leading_dense_block_count"] = config.get("num_dense_layers", config.get("first_k_dense_replace"))
    if architecture == "glm4moe":
        found |= {
            "expert_shared_count": config["n_shared_experts"],
            "expert_weights_scale": float(config["routed_scaling_factor"]),
            "expert_weights_norm": bool(config["norm_topk_prob"]),
            "expert_group_count": config["n_group"],
            "expert_group_used_count": config["topk_group"],
        }
    if architecture == "lfm2moe":
        kinds = config["layer_types"]
        found["shortconv.l_cache"] = config["conv_L_cache"]
        found["attention.head_count_kv"] = [config["num_key_value_heads"] * (k == "full_attention") for k in kinds]
    if config.get("sliding_window") and architecture in ("llama", "gpt-oss"):
        found["attention.sliding_window"] = config["sliding_window"]
    if "linear_num_key_heads" in config:
        heads, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
        found |= {
            "rope.dimension_count": head_dim // 4,
            "full_attention_interval": config["num_hidden_layers"],
            "ssm.conv_kernel": config["linear_conv_kernel_dim"],
            "ssm.state_size": config["linear_key_head_dim"],
            "ssm.group_count": config["linear_num_key_heads"],
            "ssm.time_step_rank": heads,
            "ssm.inner_size": heads * value_dim,
        }
    if architecture == "granitehybrid":
        found |= {
            "attention.head_count_kv": [
                config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in config["layer_types"]
            ],
            "expert_shared_feed_forward_length": config["shared_intermediate_size"],
            "rope.scaling.finetuned": False,
            "ssm.conv_kernel": config["mamba_d_conv"],
            "ssm.state_size": config["mamba_d_state"],
            "ssm.group_count": config["mamba_n_groups"],
            "ssm.time_step_rank": config["mamba_n_heads"],
            "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        }
    if "shared_expert_intermediate_size" in config:
        found["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    if architecture in ("granitemoe", "granitehybrid"):
        found |= {
            "attention.scale": float(config["attention_multiplier"]),
            "embedding_scale": float(config["embedding_multiplier"]),
            "residual_scale": float(config["residual_multiplier"]),
            "logit_scale": float(config["logits_scaling"]),
        }
    alone = architecture in ("gpt-oss", "minimax-m2")
    width = config["intermediate_size"] if alone else config.get("moe_intermediate_size")
    return found | ({"expert_feed_forward_length": width} if width else {})


def _deepseek(config: Mapping[str, Any], rope: Mapping[str, Any], heads: int, *, absorbed: bool) -> dict[str, Any]:
    key = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    rank, value = config["kv_lora_rank"], config["v_head_dim"]
    found: dict[str, Any] = {
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "leading_dense_block_count": config.get("first_k_dense_replace", 1),
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": config["qk_rope_head_dim"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "attention.head_count_kv": 1 if absorbed else heads,
        "attention.key_length": rank + config["qk_rope_head_dim"] if absorbed else key,
        "attention.value_length": rank if absorbed else value,
    }
    if config.get("q_lora_rank"):
        found["attention.q_lora_rank"] = config["q_lora_rank"]
    if absorbed:
        found |= {"attention.key_length_mla": key, "attention.value_length_mla": value}
    if rope.get("mscale_all_dim"):
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if config["model_type"] in ("deepseek_v3", "glm4_moe_lite"):
        found |= {"expert_gating_func": 2, "expert_weights_norm": bool(config["norm_topk_prob"])}
    if (config.get("n_group") or 1) > 1 and config.get("topk_method") != "greedy":
        found |= {"expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"]}
    return found
