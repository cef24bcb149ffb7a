"""The small models that the fuzzing of files starts from: every format, several families, with tokenizer and template.

They are built without transformers, so that a worker starts quickly, and are the same for every run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from wager.arch.gguf_config import GGUF_NAMES
from wager.arch.hf_config import read_config
from wager.kernels.arrays import BFLOAT16, FLOAT32
from wager.models.random_models import RandomWeights
from wager.models.weights import checkpoint_names, source_name, tensor_shapes

PROMPT = "A bet is a guess <b>with</b> 12 prices.\n"
MESSAGES = ({"role": "user", "content": "What is a bet?"},)
TEMPLATE = (
    "{%- if tools %}{{ tools | tojson }}{% endif -%}"
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\\n' + m['content'] | trim + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)
_SPECIAL = ("<|start|>", "<|end|>")
_TEXTS = (
    "A bet is a guess with a price, and a price is a guess with a bet. What is it worth to be right?",
    "The engine guesses, the model decides; 12 of 20 guesses were right, 345 of 678 were not.",
    "def price(bet):\n    return bet * 0.5\n\n\nfor guess in range(10):\n    print(price(guess))\n",
)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_theta": 10000.0,
        "rope_scaling": _LLAMA3,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "tie_word_embeddings": False,
        "rope_parameters": {**_YARN, "rope_theta": 10000.0},
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
        "layer_types": ["full_attention", "sliding_attention"],
        "eos_token_id": [1, 0],
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "deepseek": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **_LATENT,
        "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
}
"""config.json of the directories, without the sizes that they share."""
SHAPE: Mapping[str, Any] = {
    **SIZES,
    **_LATENT,
    "vocab_size": 288,
    "num_hidden_layers": 4,
    "rope_scaling": _YARN,
    "num_local_experts": 4,
    "num_experts": 4,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 8,
    "compress_ratios": [0, 4, 128, 4],
    "intermediate_size_mlp": 32,
    "shared_expert_intermediate_size": 32,
    "mlp_only_layers": [0],
    "moe_layers": [1, 3],
    "no_rope_layers": [1, 1, 1, 0],
    "compress_rates": {"compressed_sparse_attention": 4},
    "index_topk_pattern": "FSFS",
    "dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "ignore": ["lm_head", "re:.*gate$"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float"},
                "input_activations": {"num_bits": 8, "type": "float"},
            }
        },
    },
}
"""A configuration with the keys of every family, for `wager plan`, which counts shapes only."""


def build(folder: Path) -> dict[str, Path]:
    """Writes every model into `folder`: its name -> its directory or GGUF file."""
    models = {name: _directory(folder / name, name) for name in CONFIGS}
    models["gguf"] = _gguf(folder / "gguf.gguf", _byte_level_metadata())
    models["gguf-sentencepiece"] = _gguf(folder / "sentencepiece.gguf", _sentencepiece_metadata())
    return models


def tokenizer() -> Tokenizer:
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=288,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        special_tokens=[AddedToken(token, special=True) for token in _SPECIAL],
    )
    backend.train_from_iterator(_TEXTS * 3, trainer)
    return backend


def _directory(path: Path, name: str) -> Path:
    path.mkdir(parents=True)
    config = {**SIZES, **CONFIGS[name], "vocab_size": 288}
    spec = read_config(config, runnable=True)
    weights, names = RandomWeights(spec, 0), checkpoint_names(spec.details.architecture)
    kind = BFLOAT16 if name == "qwen3" else FLOAT32
    # drawn tensors are unpermuted; what is read back differs from them in row order only
    tensors = {source_name(names, part): weights.read(part, kind) for part in tensor_shapes(spec)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    backend = tokenizer()
    backend.save(str(path / "tokenizer.json"))
    named = {"bos_token": _SPECIAL[0], "eos_token": {"content": _SPECIAL[1], "special": True}}
    texts: dict[str, Any] = {
        "config.json": config,
        "tokenizer_config.json": {**named, "chat_template": TEMPLATE, "add_bos_token": False, "pad_token": None},
        "generation_config.json": {"eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 1, "temperature": 0.6},
    }
    for file, content in texts.items():
        (path / file).write_text(json.dumps(content), encoding="utf-8")
    return path


def _gguf(path: Path, vocabulary: Mapping[str, Any]) -> Path:
    vocab = len(vocabulary["tokenizer.ggml.tokens"])
    spec = read_config({**SIZES, "architectures": ["LlamaForCausalLM"], "vocab_size": vocab}, runnable=True)
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {
        "context_length": 128,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": 16,
        "rope.freq_base": 10000.0,
        "vocab_size": vocab,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
    }
    for key, value in {"general.name": "fuzz", "general.alignment": 32, **sizes, **vocabulary}.items():
        _add(writer, key if key.startswith(("tokenizer.", "general.")) else f"llama.{key}", value)
    weights, kinds = RandomWeights(spec, 0), gguf.GGMLQuantizationType
    for name in tensor_shapes(spec):
        values, part = weights.read(name), name.split(".")[-2]
        kind = kinds.F32 if values.ndim == 1 else {"q": kinds.Q4_0, "gate": kinds.F16}.get(part, kinds.Q8_0)
        writer.add_tensor(source_name(GGUF_NAMES, name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adds.get(type(value), writer.add_array)(key, value)


def _byte_level_metadata() -> dict[str, Any]:
    backend = tokenizer()
    tokens = sorted(backend.get_vocab(), key=backend.get_vocab().__getitem__)
    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in _SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def _sentencepiece_metadata() -> dict[str, Any]:
    letters = sorted({letter for text in (*_TEXTS, PROMPT) for letter in text if letter.isalnum()})
    pieces = ["▁", "▁a", "▁b", "be", "▁be", "bet", "▁bet", "is", "▁is", "gu", "es", "▁gu", *letters, *_SPECIAL]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 2), 3, 3],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.chat_template": TEMPLATE,
    }
