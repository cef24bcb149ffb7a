"""Models of realistic proportions with random weights, for measuring: `random:FAMILY:SIZE`.

Nothing is fetched: the shape is a row of a table, the weights come from a seed, the tokenizer has one token per byte.
The text of such a model has no meaning; a pass takes as long as with a trained model of the same shape whose experts
are chosen almost uniformly.

Weights are scaled so that answers are varied and depend on all layers. The scales depend on shapes alone, so they hold
for every size; docs/random_models.md states the reasons and figures.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from wager.arch.hf_config import read_config
from wager.arch.layers import Gqa
from wager.arch.spec import ModelSpec
from wager.elementary import exp
from wager.errors import ModelError
from wager.kernels.arrays import FLOAT32, Array, DType
from wager.kernels.blocks import BLOCK, BLOCK_FORMATS, FOUR_BIT_FLOATS, QuantisedMatrix
from wager.models.gguf import StoredAs
from wager.models.hub import RANDOM
from wager.models.tokenizer import Tokenizer, byte_alphabet
from wager.models.tokenizer_files import TokenizerParts
from wager.models.weights import Weights, tensor_shapes

LOGIT_STD_PER_BIT = 0.28
"""Standard deviation of the logits, for each bit of log2(vocabulary)."""

SCORE_STD = 5.0
"""Standard deviation of the attention scores. At 1, attention averages its whole context, and greedy texts run into
cycles; at 5 a few positions have most of the weight."""


@dataclass(frozen=True, slots=True)
class _UniformCodes:
    """Mean and standard deviation of a format's codes when all are equally likely; `unused` is a byte that is drawn but
    means zero, so that the others are symmetric."""

    mean: float
    deviation: float
    unused: int | None = None


_CODES: Mapping[str, _UniformCodes] = {
    "q8_0": _UniformCodes(0.0, math.sqrt(2 * 127 * 128 * 255 / 6 / 256), unused=128),
    "q4_1": _UniformCodes(7.5, math.sqrt((16**2 - 1) / 12)),
    "mxfp4": _UniformCodes(0.0, float(FOUR_BIT_FLOATS.astype(np.float64).std())),
}


_MULTIPLIERS = {
    "o": "attention_out",
    "state_out": "state_out",
    "down": "down",
    "gate": "gate",
    "z": "state_gate",
    "step": "step",
}
"""Matrices, and the field of spec.Multipliers that scales their products."""


class RandomWeights:
    """Weights drawn from a seed, each tensor when it is read; activations stay of order one."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self.spec = spec
        self._shapes, self._seed = tensor_shapes(spec), seed

    def read(self, name: str, dtype: DType = FLOAT32) -> Array:
        generator = self._generator(name)
        noise: Array = generator.standard_normal(self._shapes[name], np.float32)
        if noise.ndim == 1 and name.endswith("bias"):
            noise *= 0.1
        elif name == "norm.weight":
            noise = np.sign(noise)  # a tied head would else repeat the input: its embedding is in the residual stream
        elif name.endswith(".rates.weight"):
            noise = -exp(1.5 * noise - 2.5).astype(np.float32)  # states fade over one to a hundred rows
        elif noise.ndim == 1:
            noise = 0.1 * noise + 1.0
        noise *= self.scale(name)
        return noise.astype(dtype, copy=False)

    def stored(self, name: str) -> StoredAs:
        published = self.spec.details.activation == "clamped" and ".expert_" in name and name.endswith("weight")
        if published and self._shapes[name][1] % BLOCK == 0:
            return StoredAs("MXFP4", "mxfp4")
        return StoredAs("random")

    def quantised(self, name: str, format_name: str) -> QuantisedMatrix:
        """Drawn in that format, all codes equally likely: other values than those of `read`, of the same size."""
        n, k = self._shapes[name]
        known, codes = BLOCK_FORMATS[format_name], _CODES[format_name]
        size = n * k // known.inputs * known.bytes
        words = self._generator(name).integers(0, 1 << 64, -(-size // 8), np.uint64)
        data = words.view(np.uint8)[:size]
        if codes.unused is not None:
            np.multiply(data, data != codes.unused, out=data)
        blocks = data.reshape(n, -1, known.bytes)
        if format_name == "mxfp4":  # powers of two: half of the blocks at the one below, half above
            exponent = 128 + math.floor(math.log2(self.scale(name) / codes.deviation))
            blocks[..., 0] = exponent + (blocks[..., 0] & 1)
            return QuantisedMatrix(known, data.reshape(n, -1), k)
        step = np.float16(self.scale(name) / codes.deviation)
        for at, value in zip(known.fields, (step, np.float16(-codes.mean * step)), strict=False):
            blocks[..., at : at + 2] = np.frombuffer(value.tobytes(), np.uint8)
        return QuantisedMatrix(known, data.reshape(n, -1), k)

    def _generator(self, name: str) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(zlib.crc32(f"{self._seed} {name}".encode())))

    def scale(self, name: str) -> float:
        """Standard deviation of a matrix, size of a norm's weights; 1 for a bias.

        Products of normalised activations are of order one; so is what a feed-forward adds to the residual stream.
        """
        spec = self.spec
        shape = self._shapes[name]
        part = name.split(".")[-2]
        details = spec.details
        embedding = 1 / details.embedding_scale
        if part == "norm":
            tied = math.sqrt(spec.hidden) * embedding if spec.tied else 1.0
            return LOGIT_STD_PER_BIT * math.log2(spec.vocab) / tied
        if part == "layer_embed":
            return math.sqrt(1 / spec.layer_embedding)
        scale = embedding if part == "embed" else 1.0 if len(shape) == 1 else shape[1] ** -0.5
        if part == self._query and name.endswith("weight"):
            layer = spec.ordered_layers[int(name.split(".")[1])]
            attention = layer.attending or spec.attention
            size = attention.head_dim if isinstance(attention, Gqa) else attention.nope + attention.rope
            scale *= SCORE_STD / (math.sqrt(size) * (details.attention_scale or size**-0.5))
        elif part in ("o", "down") and name.endswith("weight"):
            scale /= details.residual_scale
        elif part == "expert_down" and spec.experts:
            scale *= math.sqrt(spec.experts.active) / spec.experts.gating.scale  # outputs are averaged, then scaled
        multiplier = _MULTIPLIERS.get(part) if len(shape) == 2 else None
        return scale / getattr(details.multipliers, multiplier) if multiplier else scale

    @property
    def _query(self) -> str:
        """The last tensor that scales queries before they meet keys."""
        if self.spec.details.qk_norm:
            return "q_norm"
        return "q_b" if "layers.0.q_b.weight" in self._shapes else "q"


_END = "<|end|>"
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_HEADS = (*_SIZES, "num_key_value_heads", "head_dim")
_ROPE = ("rope_theta", "tie_word_embeddings")
_GEMMA4 = (
    "global_head_dim",
    "sliding_window",
    "layer_types",
    "attention_k_eq_v",
    "num_global_key_value_heads",
    "hidden_size_per_layer_input",
    "num_kv_shared_layers",
    "use_double_wide_mlp",
)
_WINDOWS_BUT_SECONDS = ["sliding_attention", "full_attention"] * 3
_QWEN = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_LINEAR = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
_MAMBA = ("mamba_n_heads", "mamba_d_state")
_GRANITE_H_LAYERS = ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)]
_FALCON_MAMBA = ("mamba_d_ssm", "mamba_n_heads", "mamba_n_groups", "mamba_d_state")
_NEMOTRON = ("hybrid_override_pattern", "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size")
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_DEEPSEEK = ("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group", "moe_intermediate_size")


def _family(
    architecture: str, keys: Sequence[str], sizes: Mapping[str, Sequence[Any]], **common: Any
) -> tuple[str, dict[str, dict[str, Any]]]:
    """A row of MODELS: the values of `keys` for each size, and those that all sizes have."""
    common["max_position_embeddings"] = 8192
    return architecture, {size: {**dict(zip(keys, row, strict=True)), **common} for size, row in sizes.items()}


MODELS: Mapping[str, tuple[str, Mapping[str, Mapping[str, Any]]]] = {
    "llama": _family(
        "LlamaForCausalLM",
        (*_HEADS, *_ROPE),
        {
            "tiny": (64, 2, 4, 160, 512, 2, 16, 1e4, True),
            "135m": (576, 30, 9, 1536, 49152, 3, 64, 1e5, True),
            "1b": (2048, 16, 32, 8192, 128256, 8, 64, 5e5, True),
            "8b": (4096, 32, 32, 14336, 128256, 8, 128, 5e5, False),
        },
    ),
    "qwen3": _family(
        "Qwen3ForCausalLM",
        (*_HEADS, *_ROPE),
        {
            "tiny": (64, 2, 4, 192, 512, 2, 16, 1e4, True),
            "0.6b": (1024, 28, 16, 3072, 151936, 8, 128, 1e6, True),
            "1.7b": (2048, 28, 16, 6144, 151936, 8, 128, 1e6, True),
        },
    ),
    "gemma3": _family(
        "Gemma3ForCausalLM",
        (*_HEADS, "sliding_window", "sliding_window_pattern"),
        {
            "tiny": (64, 4, 4, 160, 512, 2, 16, 8, 2),
            "270m": (640, 18, 4, 2048, 262144, 1, 256, 512, 6),
            "1b": (1152, 26, 4, 6912, 262144, 1, 256, 512, 6),
        },
        query_pre_attn_scalar=256,
    ),
    "gemma4": _family(
        "Gemma4ForCausalLM",
        (*_HEADS, *_GEMMA4),
        {
            "tiny": (64, 5, 4, 160, 512, 2, 16, 32, 8, _WINDOWS_BUT_SECONDS, True, 1, 0, 0, False),
            "edge": (64, 6, 4, 160, 512, 1, 16, 32, 8, _WINDOWS_BUT_SECONDS, False, None, 32, 3, True),
            "e2b": (1536, 35, 8, 6144, 262144, 1, 256, 512, 512, None, False, None, 256, 20, True),
        },
        final_logit_softcapping=30.0,
    ),
    "gemma4-moe": _family(
        "Gemma4ForCausalLM",
        (*_HEADS, *_GEMMA4, "num_experts", "top_k_experts", "moe_intermediate_size"),
        {"tiny": (64, 5, 4, 96, 512, 2, 16, 32, 8, _WINDOWS_BUT_SECONDS, True, 1, 0, 0, False, 16, 4, 32)},
        enable_moe_block=True,
        final_logit_softcapping=30.0,
    ),
    "gemma2": _family(
        "Gemma2ForCausalLM",
        (*_HEADS, "sliding_window"),
        {"tiny": (64, 2, 4, 160, 512, 2, 16, 8), "2b": (2304, 26, 8, 9216, 256000, 4, 256, 4096)},
        query_pre_attn_scalar=256,
    ),
    "phi4": _family(
        "Phi3ForCausalLM",
        _HEADS,
        {"tiny": (64, 2, 4, 160, 512, 2, 16), "mini": (3072, 32, 24, 8192, 200064, 8, 128)},
        partial_rotary_factor=0.75,
        tie_word_embeddings=True,
    ),
    "granite": _family(
        "GraniteForCausalLM",
        (*_HEADS, "attention_multiplier"),
        {"tiny": (64, 2, 4, 160, 512, 2, 16, 0.0625), "2b": (2048, 40, 32, 8192, 49159, 8, 64, 0.015625)},
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        logits_scaling=8.0,
        tie_word_embeddings=True,
        rope_theta=1e7,
    ),
    "smollm3": _family(
        "SmolLM3ForCausalLM",
        _HEADS,
        {"tiny": (64, 4, 4, 160, 512, 2, 16), "3b": (2048, 36, 16, 11008, 128256, 4, 128)},
    ),
    "olmo2": _family(
        "Olmo2ForCausalLM",
        _HEADS,
        {"tiny": (64, 2, 4, 160, 512, 2, 16), "1b": (2048, 16, 16, 8192, 100352, 16, 128)},
        rope_theta=5e5,
    ),
    "olmo3": _family(
        "Olmo3ForCausalLM",
        (*_HEADS, "sliding_window"),
        {"tiny": (64, 4, 4, 160, 512, 2, 16, 8), "7b": (4096, 32, 32, 11008, 100278, 32, 128, 4096)},
    ),
    "glm4": _family(
        "Glm4ForCausalLM",
        _HEADS,
        {"tiny": (64, 2, 4, 160, 512, 2, 32), "9b": (4096, 40, 32, 13696, 151552, 2, 128)},
    ),
    "mixtral": _family(
        "MixtralForCausalLM",
        _HEADS,
        {
            "tiny": (64, 2, 4, 224, 512, 2, 16),
            "300m": (640, 9, 10, 2240, 32000, 2, 64),
            "1b": (1024, 10, 8, 3584, 32000, 2, 128),
        },
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "qwen3-moe": _family(
        "Qwen3MoeForCausalLM",
        (*_HEADS, *_QWEN),
        {
            "tiny": (64, 2, 4, 192, 512, 2, 16, 16, 4, 24),
            "300m": (512, 7, 8, 1536, 32000, 1, 128, 128, 8, 192),
            "1b": (768, 10, 12, 2304, 32000, 2, 128, 128, 8, 288),
        },
        norm_topk_prob=True,
    ),
    "deepseek": _family(
        "DeepseekV3ForCausalLM",
        (*_SIZES, *_LATENT, *_DEEPSEEK),
        {
            "tiny": (64, 3, 4, 160, 512, 48, 32, 16, 16, 16, 16, 4, 4, 2, 24),
            "300m": (512, 8, 8, 1536, 32000, 192, 128, 64, 32, 64, 64, 6, 8, 4, 320),
            "1b": (1024, 10, 8, 2816, 32000, 384, 256, 64, 32, 64, 64, 6, 8, 4, 448),
        },
        first_k_dense_replace=1,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
    ),
    "qwen2-moe": _family(
        "Qwen2MoeForCausalLM",
        (*_HEADS, *_QWEN),
        {"tiny": (64, 2, 4, 192, 512, 2, 16, 12, 4, 32), "300m": (512, 7, 8, 1536, 32000, 8, 64, 60, 4, 352)},
        shared_expert_intermediate_size=128,
    ),
    "qwen3-next": _family(
        "Qwen3NextForCausalLM",
        (*_HEADS, *_QWEN, *_LINEAR),
        {
            "tiny": (64, 4, 4, 64, 512, 2, 16, 16, 4, 32, 2, 4, 16, 32),
            "300m": (512, 8, 8, 512, 32000, 1, 64, 128, 6, 160, 4, 8, 64, 64),
        },
        shared_expert_intermediate_size=64,
        rope_theta=1e7,
    ),
    "qwen3.5": _family(
        "Qwen3_5ForCausalLM",
        (*_HEADS, *_LINEAR),
        {
            "tiny": (64, 4, 4, 160, 512, 2, 16, 2, 4, 16, 32),
            "0.8b": (1024, 24, 8, 3584, 248320, 2, 256, 16, 16, 128, 128),
        },
        tie_word_embeddings=True,
        rope_theta=1e7,
    ),
    "lfm2": _family(
        "Lfm2ForCausalLM",
        (*_HEADS, "full_attn_idxs"),
        {
            "tiny": (64, 4, 4, 160, 512, 2, 16, [2]),
            "1.2b": (2048, 16, 32, 8192, 65536, 8, 64, [2, 5, 8, 10, 12, 14]),
        },
        block_auto_adjust_ff_dim=False,
    ),
    "granite-h": _family(
        "GraniteMoeHybridForCausalLM",
        (*_HEADS, "attention_multiplier", "shared_intermediate_size", *_MAMBA, "layer_types"),
        {
            "tiny": (64, 4, 4, 160, 512, 2, 16, 0.0625, 160, 4, 32, ["mamba", "mamba", "attention", "mamba"]),
            "1b": (1536, 40, 12, 4096, 100352, 4, 128, 0.0078125, 4096, 48, 128, _GRANITE_H_LAYERS),
        },
        mamba_expand=2,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        logits_scaling=6.0,
        tie_word_embeddings=True,
        num_local_experts=0,
    ),
    "falcon-h1": _family(
        "FalconH1ForCausalLM",
        (*_HEADS, *_FALCON_MAMBA),
        {
            "tiny": (64, 3, 4, 160, 512, 2, 16, 96, 6, 2, 32),
            "0.5b": (1024, 36, 8, 2048, 32784, 2, 64, 1536, 24, 1, 128),
        },
        attention_out_multiplier=0.9375,
        embedding_multiplier=5.656854249492381,
        key_multiplier=0.390625,
        lm_head_multiplier=0.0390625,
        mlp_multipliers=[0.8838834764831844, 0.5859375],
        ssm_in_multiplier=1.25,
        ssm_multipliers=[0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        ssm_out_multiplier=0.23570226039551587,
        rope_theta=1e11,
    ),
    "nemotron-h": _family(
        "NemotronHForCausalLM",
        (*_HEADS, *_NEMOTRON),
        {
            "tiny": (64, 6, 4, 160, 512, 2, 16, "M-M*-M", 4, 16, 2, 32),
            "1b": (2048, 18, 16, 8192, 131072, 8, 128, "M-M-M-M*-" * 2, 64, 64, 8, 128),
        },
        mlp_hidden_act="relu2",
    ),
    "nemotron-h-moe": _family(
        "NemotronHForCausalLM",
        (*_HEADS, *_NEMOTRON, "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_latent_size"),
        {
            "tiny": (64, 6, 4, 160, 512, 2, 16, "MEM*EM", 4, 16, 2, 32, 16, 4, 32, None),
            "latent": (64, 6, 4, 160, 512, 2, 16, "MEM*EM", 4, 16, 2, 32, 16, 4, 32, 32),
        },
        moe_shared_expert_intermediate_size=96,
        routed_scaling_factor=2.5,
        mlp_hidden_act="relu2",
    ),
    "gpt-oss": _family(
        "GptOssForCausalLM",
        _HEADS,
        {
            "tiny": (64, 4, 4, 64, 512, 2, 16),
            "300m": (512, 10, 16, 512, 32000, 2, 64),
            "1b": (768, 14, 16, 768, 32000, 2, 64),
        },
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=128,
        rope_theta=150000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 256,
            "truncate": False,
        },
    ),
}
"""Family -> its architecture, and by size the configuration keys of a model of about that many parameters.

The dense ones (but tiny) have the shapes of the models that docs/random_models.md names. The mixtures keep the
proportions of Mixtral-8x7B, Qwen3-30B-A3B, DeepSeek-V3, Qwen1.5-MoE-A2.7B and gpt-oss-20b (experts to choose from,
their width to the hidden size, groups, latent to hidden size) at a size that fits on a small machine. The experts of
gpt-oss are in MXFP4, as the published ones.
"""


def make(model: str) -> tuple[Weights, Tokenizer]:
    """Weights and tokenizer of `random:FAMILY:SIZE`. ModelError names a family or a size that is not known."""
    spec = spec_of(model)
    return RandomWeights(spec, 0), byte_tokenizer(spec.vocab, where=model)


def spec_of(model: str) -> ModelSpec:
    """The spec alone; errors as `make`."""
    family, _, size = model.removeprefix(RANDOM).partition(":")
    if family not in MODELS:
        raise ModelError(f"There is no random model of family {family!r}.", f"Families are: {', '.join(MODELS)}.")
    architecture, sizes = MODELS[family]
    if size not in sizes:
        raise ModelError(f"There is no random {family} of size {size!r}.", f"Sizes are: {', '.join(sizes)}.")
    return read_config({"architectures": [architecture], **sizes[size]}, name=model, runnable=True)


def byte_tokenizer(vocab: int, *, where: str) -> Tokenizer:
    """A tokenizer that encodes one token per byte; the last id is EOS, the text of the others is their number."""
    alphabet = byte_alphabet()
    alphabet |= {f"\u0120{i}": i for i in range(256, vocab - 1)}  # U+0120 stands for a space
    backend = Backend(BPE({**alphabet, _END: vocab - 1}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([AddedToken(_END, normalized=False, special=True)])
    eos = vocab - 1
    return Tokenizer(
        TokenizerParts(
            backend=backend,
            spelling="byte-level",
            vocab_size=vocab,
            eos_ids=(eos,),
            where=where,
            special=frozenset({eos}),
            literal=frozenset({eos}),
            named={"eos_token": _END},
            chat_template=_TEMPLATE,
        )
    )
